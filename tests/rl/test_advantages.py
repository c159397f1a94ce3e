"""Advantages against sums written out over the actions of each sequence, in float64."""

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st

from glm5_jax.rl import advantages
from tests import tiny

# Two sequences with the environment's tokens in between and padding after; three without a gap, the
# second one without an action; one that ends in the environment's tokens, then padding and another.
SEQUENCES = np.array([[1, 1, 1, 1, 1, 1, 2, 2, 2, 2, 0, 0],
                      [1, 1, 1, 2, 2, 2, 3, 3, 3, 3, 3, 3],
                      [1, 1, 1, 1, 1, 0, 0, 2, 2, 2, 2, 2]], np.int32)  # fmt: skip
MASK = np.array([[0, 1, 1, 0, 0, 1, 0, 1, 0, 1, 0, 0],
                 [1, 0, 1, 0, 0, 0, 1, 1, 1, 0, 1, 1],
                 [0, 1, 1, 0, 0, 0, 0, 1, 1, 0, 0, 1]], bool)  # fmt: skip

_gae = tiny.fast_jit(advantages.gae)
_vtrace = tiny.fast_jit(advantages.vtrace)


def _arrays(seed):
  rewards, values, log_ratio = np.random.default_rng(seed).normal(size=(3, *MASK.shape))
  return rewards.astype(np.float32), values.astype(np.float32), log_ratio.astype(np.float32)


def _sequences(mask, sequences):
  """The places of the actions of every sequence."""
  for b in range(mask.shape[0]):
    for s in sorted(set(sequences[b]) - {0}):
      yield [(b, t) for t in range(mask.shape[1]) if mask[b, t] and sequences[b, t] == s]


def _oracle_gae(rewards, values, mask, sequences, discount, decay):
  """A_t = sum_l (discount decay)^l delta_t+l; target A + V."""
  out, targets = np.zeros(mask.shape), np.zeros(mask.shape)
  for places in _sequences(mask, sequences):
    r, v = ([float(a[p]) for p in places] for a in (rewards, values))
    v.append(0.0)
    delta = [r[i] + discount * v[i + 1] - v[i] for i in range(len(r))]
    for i, place in enumerate(places):
      out[place] = sum((discount * decay) ** (j - i) * delta[j] for j in range(i, len(r)))
      targets[place] = out[place] + v[i]
  return out, targets


def _oracle_vtrace(rewards, values, log_ratio, mask, sequences, discount, rho_max, c_max):
  """v_s = V_s + sum_t discount^(t-s) (prod of c_s..c_t-1) delta_t;  A_s = r_s + discount v_s+1 - V_s."""
  out, targets = np.zeros(mask.shape), np.zeros(mask.shape)
  for places in _sequences(mask, sequences):
    r, v, x = ([float(a[p]) for p in places] for a in (rewards, values, log_ratio))
    v.append(0.0)
    rho, c = ([min(bound, np.exp(y)) for y in x] for bound in (rho_max, c_max))
    n = len(r)
    delta = [rho[i] * (r[i] + discount * v[i + 1] - v[i]) for i in range(n)]
    target = [
      v[s] + sum(discount ** (t - s) * np.prod(c[s:t]) * delta[t] for t in range(s, n))
      for s in range(n + 1)
    ]
    for i, place in enumerate(places):
      out[place] = r[i] + discount * target[i + 1] - v[i]
      targets[place] = target[i]
  return out, targets


def _assert_equal(got, want):
  for a, b in zip(got, want, strict=True):
    assert a.dtype == jnp.float32
    np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-5)


def test_group_mean():
  rewards = np.array([[1.0, 0.0, 0.0, 1.0, 1.0], [3.0, -1.0, 0.5, 0.5, 2.0]])
  want = [[r - sum(group) / len(group) for r in group] for group in rewards]
  np.testing.assert_allclose(advantages.group_mean(rewards), want, atol=1e-6)


def test_group_normalised():
  rewards = np.array([[1.0, 0.0, 0.0, 1.0, 1.0], [3.0, -1.0, 0.5, 0.5, 2.0]])
  want = []
  for group in rewards:
    mean = sum(group) / 5
    std = (sum((r - mean) ** 2 for r in group) / 5) ** 0.5
    want.append([(r - mean) / (std + 1e-6) for r in group])
  got = advantages.group_normalised(rewards)
  np.testing.assert_allclose(got, want, rtol=1e-5)
  # Neither scale nor offset of a reward matters.
  np.testing.assert_allclose(advantages.group_normalised(7 * rewards - 2), got, rtol=1e-4)


@pytest.mark.parametrize('reward', [0.0, 1.0, 0.1, -0.7, 1000.1])
@pytest.mark.parametrize('size', [1, 3, 7, 32])
def test_equal_rewards_teach_nothing(reward, size):
  """Exactly zero: the rounding of a mean must not be blown up by a tiny standard deviation."""
  rewards = np.full((1, size), reward, np.float32)
  assert not np.any(advantages.group_normalised(rewards))
  assert not np.any(advantages.group_mean(rewards))


def test_one_success_in_a_large_group():
  """1 of 32: the deviation is the population's, sqrt(p (1 - p))."""
  rewards = np.eye(1, 32, dtype=bool)
  got = advantages.group_normalised(rewards)[0]
  np.testing.assert_allclose(got[0], 31**0.5, rtol=1e-4)
  np.testing.assert_allclose(got[1:], -(31**-0.5), rtol=1e-4)


@pytest.mark.parametrize('discount, decay', [(1.0, 0.95), (0.9, 0.7), (1.0, 0.0), (0.99, 1.0)])
def test_gae(discount, decay):
  rewards, values, _ = _arrays(0)
  got = _gae(rewards, values, MASK, SEQUENCES, discount=discount, decay=decay)
  _assert_equal(got, _oracle_gae(rewards, values, MASK, SEQUENCES, discount, decay))


@pytest.mark.parametrize('discount, rho_max, c_max', [(1.0, 1.0, 1.0), (0.9, 1.5, 0.8)])
def test_vtrace(discount, rho_max, c_max):
  arrays = _arrays(1)
  got = _vtrace(*arrays, MASK, SEQUENCES, discount=discount, rho_max=rho_max, c_max=c_max)
  want = _oracle_vtrace(*arrays, MASK, SEQUENCES, discount, rho_max, c_max)
  _assert_equal(got, want)


def test_by_hand():
  """Actions at 0 and 2, an outcome of 1 at the end, values 0.4 and 0.6."""
  mask = np.array([[True, False, True, False]])
  sequences = np.ones((1, 4), np.int32)
  rewards, values = np.array([[0, 9, 1, 9.0]]), np.array([[0.4, 9, 0.6, 9]])
  got = advantages.gae(rewards, values, mask, sequences, discount=1.0, decay=0.5)
  # delta = 0.6 - 0.4 and 1 - 0.6; what the environment's tokens carry is not read.
  np.testing.assert_allclose(got.advantages, [[0.2 + 0.5 * 0.4, 0, 0.4, 0]], rtol=1e-6)
  np.testing.assert_allclose(got.targets, [[0.8, 0, 1.0, 0]], rtol=1e-6)
  half = np.log(np.full((1, 4), 0.5))
  got = advantages.vtrace(rewards, values, half, mask, sequences)
  # v_2 = 0.6 + 0.5 * 0.4 = 0.8; v_0 = 0.4 + 0.5 * 0.2 + 0.5 * (0.8 - 0.6) = 0.6.
  np.testing.assert_allclose(got.targets, [[0.6, 0, 0.8, 0]], rtol=1e-6)
  np.testing.assert_allclose(got.advantages, [[0.4, 0, 0.4, 0]], rtol=1e-6)


masks = st.lists(st.booleans(), min_size=MASK.size, max_size=MASK.size)
# Lengths of the sequences of each row, in order; what is left is padding.
lengths = st.lists(st.lists(st.integers(1, 6), max_size=4), min_size=3, max_size=3)


def _packed(mask, lengths):
  sequences = np.zeros(MASK.shape, np.int32)
  for row, own in zip(sequences, lengths, strict=True):
    ids = np.repeat(np.arange(1, len(own) + 1), own)[: len(row)]
    row[: len(ids)] = ids
  return np.array(mask).reshape(MASK.shape), sequences


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(masks, lengths, st.integers(0, 99))
def test_any_packing(mask, lengths, seed):
  """Both estimators on arbitrary rows, with rubbish wherever there is no action."""
  mask, sequences = _packed(mask, lengths)
  arrays = _arrays(seed)
  spoilt = [np.where(mask & (sequences > 0), a, np.float32(np.nan)) for a in arrays]
  got = _gae(*spoilt[:2], mask, sequences, discount=0.9, decay=0.8)
  _assert_equal(got, _oracle_gae(*arrays[:2], mask, sequences, 0.9, 0.8))
  got = _vtrace(*spoilt, mask, sequences, discount=0.9, rho_max=1.2, c_max=0.9)
  _assert_equal(got, _oracle_vtrace(*arrays, mask, sequences, 0.9, 1.2, 0.9))


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(masks, lengths, st.integers(0, 99))
def test_limits_are_the_return(mask, lengths, seed):
  """V-trace on-policy and GAE with lambda = 1: the discounted return, whatever the values say."""
  mask, sequences = _packed(mask, lengths)
  rewards, values, _ = _arrays(seed)
  returns = np.zeros(mask.shape)
  for places in _sequences(mask, sequences):
    for i, place in enumerate(places):
      returns[place] = sum(0.9**j * float(rewards[p]) for j, p in enumerate(places[i:]))
  got = _vtrace(rewards, values, 0 * values, mask, sequences, discount=0.9, rho_max=1.2, c_max=1.0)
  np.testing.assert_allclose(got.targets, returns, atol=1e-5)
  got = _gae(rewards, values, mask, sequences, discount=0.9, decay=1.0)
  action = mask & (sequences > 0)
  np.testing.assert_allclose(got.advantages, np.where(action, returns - values, 0), atol=1e-5)
  np.testing.assert_allclose(got.targets, returns, atol=1e-5)


def test_a_wild_ratio_is_bounded():
  """Ratios that overflow count as rho-bar and c-bar, in the targets and in the advantages."""
  rewards, values, _ = _arrays(2)
  wild, bound = (np.full(MASK.shape, x, np.float32) for x in (1e4, np.log(2.0)))
  got, want = (
    _vtrace(rewards, values, x, MASK, SEQUENCES, discount=1.0, rho_max=1.5, c_max=1.0)
    for x in (wild, bound)
  )
  np.testing.assert_array_equal(got.targets, want.targets)
  assert np.all(np.isfinite(got.advantages))
