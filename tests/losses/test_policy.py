"""The policy objectives against their formulas in float64 loops, gradients included."""

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.losses import policy
from tests import tiny

OBJECTIVES = (
  'double_sided', 'icepop', 'on_policy', 'importance', 'truncated', 'ppo', 'gspo', 'cispo',
)  # fmt: skip
# Wide enough that both sides of every bound are met, and no two bounds coincide.
SETTINGS = dict(eps_low=0.3, eps_high=0.45, beta=1.6, rho_max=1.3)
# Packed rows: 1 is a sequence with a prompt, 2 one whose environment speaks in between; the last row
# has a sequence without a single token of the model.
SEQUENCES = np.array([[1, 1, 1, 1, 1, 2, 2, 2, 2, 2, 0],
                      [1, 1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
                      [1, 1, 1, 2, 2, 2, 2, 2, 3, 3, 3]], np.int32)  # fmt: skip
WRITTEN = np.array([[0, 0, 1, 1, 1, 0, 1, 0, 1, 1, 0],
                    [0, 1, 1, 0, 0, 1, 1, 1, 1, 0, 0],
                    [0, 0, 0, 0, 1, 1, 1, 1, 0, 1, 1]], bool)  # fmt: skip


def _clip(x, low, high):
  return min(max(x, low), high)


def _oracle_weights(mask, sequences, per):
  """1/N per token, or 1/G 1/|y_i|, with plain loops."""
  out = np.zeros(mask.shape)
  owner = {}
  for b in range(mask.shape[0]):
    for t in range(mask.shape[1]):
      if mask[b, t] and sequences[b, t] > 0:
        owner.setdefault((b, sequences[b, t]), []).append((b, t))
  tokens = sum(len(places) for places in owner.values())
  for places in owner.values():
    for place in places:
      out[place] = 1 / tokens if per == 'token' else 1 / len(owner) / len(places)
  return out


def _log_s(logp, old, weights, sequences, b, t):
  """log of GSPO's ratio: the mean log ratio over the sequence's own tokens."""
  same = [
    u for u in range(logp.shape[1]) if sequences[b, u] == sequences[b, t] and weights[b, u] > 0
  ]
  return sum(logp[b, u] - old[b, u] for u in same) / len(same)


def _oracle(name, logp, frozen, e, c):
  """(loss, its gradient, weight of the tokens without gradient), float64.

  `frozen` are the log-probabilities that a stop-gradient sees: finite differences move `logp` alone.
  """
  rollout, old, advantages, weights = (np.asarray(a, np.float64) for a in e[:4])
  low, high = 1 - c.eps_low, 1 + c.eps_high
  loss, masked, gradient = 0.0, 0.0, np.zeros(logp.shape)
  for b in range(logp.shape[0]):
    for t in range(logp.shape[1]):
      w = weights[b, t]
      if w == 0:
        continue
      x, fx, a = logp[b, t], frozen[b, t], advantages[b, t]
      behaviour = math.exp(fx - rollout[b, t])
      passes = True
      if name == 'on_policy':
        value, slope = a * x, a
      elif name == 'importance':
        value = slope = math.exp(x - rollout[b, t]) * a
      elif name == 'truncated':
        value, slope = min(behaviour, c.rho_max) * a * x, min(behaviour, c.rho_max) * a
      elif name == 'cispo':
        f = _clip(math.exp(fx - old[b, t]), low, high)
        value, slope = f * a * x, f * a
      elif name == 'double_sided':
        passes = low < behaviour < high
        f = behaviour if passes else 0.0
        value, slope = f * a * x, f * a
      else:
        r = math.exp(x - old[b, t])
        if name == 'gspo':
          r = math.exp(_log_s(frozen, old, weights, e.sequences, b, t) + x - fx)
        value = min(r * a, _clip(r, low, high) * a)
        passes = not (a > 0 and r > high) and not (a < 0 and r < low)
        slope = r * a if passes else 0.0
        if name == 'icepop':
          rho = math.exp(old[b, t] - rollout[b, t])
          pop = rho if 1 / c.beta <= rho <= c.beta else 0.0
          passes = passes and pop > 0
          value, slope = pop * value, pop * slope
      loss -= w * value
      gradient[b, t] = -w * slope
      masked += w * (not passes)
  return loss, gradient, masked


def _experience(per, seed=0):
  """(log-probabilities, experience) with ratios on both sides of everything."""
  rng = np.random.default_rng(seed)
  shape = WRITTEN.shape
  rollout = -rng.gamma(2.0, 0.7, shape)
  old = rollout + rng.normal(0, 0.5, shape)
  logp = old + rng.normal(0, 0.5, shape)
  weights = _oracle_weights(WRITTEN, SEQUENCES, per)
  arrays = (a.astype(np.float32) for a in (rollout, old, rng.normal(size=shape), weights))
  return logp.astype(np.float32), policy.Experience(*arrays, SEQUENCES)


@tiny.fast_jit(static_argnames='config')
def _value_and_grad(logp, experience, config):
  return jax.value_and_grad(policy.policy_loss, has_aux=True)(logp, experience, config)


_token_weights = tiny.fast_jit(policy.token_weights, static_argnames='per')


def _config(name, **changes):
  return policy.PolicyConfig(name, **(SETTINGS | changes))


@pytest.mark.parametrize('per', ['token', 'sequence'])
@pytest.mark.parametrize('name', OBJECTIVES)
def test_value_and_gradient(name, per):
  config = _config(name)
  logp, e = _experience(per)
  x = logp.astype(np.float64)
  loss, gradient, masked = _oracle(name, x, x, e, config)
  (got, metrics), got_gradient = _value_and_grad(logp, e, config)
  # The terms of the loss are of order 1 and may cancel.
  np.testing.assert_allclose(got, loss, rtol=3e-6, atol=2e-7)
  np.testing.assert_allclose(got_gradient, gradient, rtol=1e-5, atol=1e-8)
  np.testing.assert_allclose(metrics['masked'], masked, atol=1e-6)
  if name in ('double_sided', 'icepop', 'ppo', 'gspo'):
    assert 0.05 < masked < 0.95, 'the case exercises one side only'


@pytest.mark.parametrize('name', OBJECTIVES)
def test_the_oracles_gradient(name):
  """Central differences of the oracle's own value: its slope formulas are right."""
  config = _config(name)
  logp, e = _experience('sequence')
  x = logp.astype(np.float64)
  _, gradient, _ = _oracle(name, x, x, e, config)
  numeric = np.zeros_like(x)
  step = 1e-6
  for place in np.argwhere(WRITTEN):
    moved = np.zeros_like(x)
    moved[tuple(place)] = step
    up, down = (_oracle(name, x + d, x, e, config)[0] for d in (moved, -moved))
    numeric[tuple(place)] = (up - down) / (2 * step)
  np.testing.assert_allclose(numeric, gradient, atol=1e-8)


@pytest.mark.parametrize('name', OBJECTIVES)
def test_on_policy_all_are_reinforce(name):
  """pi = pi_rollout = pi_old: every ratio is 1, and the gradient is -weight * A."""
  logp, e = _experience('token')
  e = e._replace(rollout=logp, old=logp)
  (_, metrics), gradient = _value_and_grad(logp, e, _config(name))
  np.testing.assert_allclose(gradient, -e.weights * e.advantages, rtol=1e-6)
  assert metrics['masked'] == 0
  np.testing.assert_allclose(metrics['kl_behaviour'], 0, atol=1e-7)
  np.testing.assert_allclose(metrics['ratio'], 1, rtol=1e-6)
  assert metrics['logprob_gap'] == metrics['logprob_gap_max'] == 0


def test_gspo_is_the_gradient_of_the_sequence_form():
  """-1/G sum_i min(s_i A_i, clip(s_i) A_i), one advantage a sequence, by finite differences."""
  config = _config('gspo')
  logp, e = _experience('sequence')
  a_of = {(0, 1): 1.3, (0, 2): -0.4, (1, 1): 0.7, (2, 2): -1.1, (2, 3): 0.2}
  advantages = np.array([[a_of.get((b, s), 0.0) for s in row] for b, row in enumerate(SEQUENCES)])
  e = e._replace(advantages=advantages.astype(np.float32))

  def sequence_form(x):
    total = 0.0
    for (b, sequence), a in a_of.items():
      places = [t for t in range(x.shape[1]) if SEQUENCES[b, t] == sequence and WRITTEN[b, t]]
      s = math.exp(sum(x[b, t] - float(e.old[b, t]) for t in places) / len(places))
      total += min(s * a, _clip(s, 1 - config.eps_low, 1 + config.eps_high) * a)
    return -total / len(a_of)

  x = logp.astype(np.float64)
  numeric = np.zeros_like(x)
  for place in np.argwhere(WRITTEN):
    moved = np.zeros_like(x)
    moved[tuple(place)] = 1e-6
    numeric[tuple(place)] = (sequence_form(x + moved) - sequence_form(x - moved)) / 2e-6
  (loss, metrics), gradient = _value_and_grad(logp, e, config)
  np.testing.assert_allclose(loss, sequence_form(x), rtol=1e-5)
  np.testing.assert_allclose(gradient, numeric, atol=1e-7)
  assert 0 < metrics['masked'] < 1
  # All tokens of a sequence pass or none does.
  for b, sequence in a_of:
    own = gradient[b][(SEQUENCES[b] == sequence) & WRITTEN[b]]
    assert np.all(own == 0) or np.all(own != 0)


def _neighbours(centre: float, count: int = 40) -> np.ndarray:
  """The float32 numbers around `centre`, so that exp of one of them hits a bound exactly."""
  ulps = np.arange(-count, count, dtype=np.int32)
  return (np.float32(centre).view(np.int32) + ulps).view(np.float32)


_exp = tiny.fast_jit(jnp.exp)


@pytest.mark.parametrize('end', [0.5, 1.5])
def test_ends_of_eq_5_are_outside(end):
  """f(x) = x only strictly between 1 - eps_l and 1 + eps_h."""
  config = policy.PolicyConfig('double_sided', eps_low=0.5, eps_high=0.5)
  x = _neighbours(math.log(end))[None]
  ratio, zeros = np.asarray(_exp(x)), np.zeros_like(x)
  assert np.any(ratio == end) and np.any(ratio < end) and np.any(ratio > end)
  experience = policy.Experience(zeros, zeros, zeros + 1, zeros + 1, zeros.astype(int) + 1)
  _, gradient = _value_and_grad(x, experience, config)
  inside = (ratio > 0.5) & (ratio < 1.5)
  np.testing.assert_array_equal(np.asarray(gradient) != 0, inside)


@pytest.mark.parametrize('end', [0.5, 2.0])
def test_ends_of_pop_are_inside(end):
  """pop(rho) = rho for 1/beta <= rho <= beta."""
  config = policy.PolicyConfig('icepop', beta=2.0)
  x = _neighbours(math.log(end))[None]
  rho, zeros = np.asarray(_exp(x)), np.zeros_like(x)
  assert np.any(rho == end) and np.any(rho < end) and np.any(rho > end)
  # r = pi / pi_old is 1: nothing is clipped.
  experience = policy.Experience(zeros, x, zeros + 1, zeros + 1, zeros.astype(int) + 1)
  _, gradient = _value_and_grad(x, experience, config)
  np.testing.assert_allclose(gradient, -np.where((rho >= 0.5) & (rho <= 2), rho, 0), rtol=1e-6)


def test_an_interval_without_width_rejects_everything():
  """eps_l = 0: a ratio of exactly 1 is at the end, and out."""
  logp, e = _experience('token')
  (loss, metrics), gradient = _value_and_grad(
    logp, e._replace(rollout=logp), _config('double_sided', eps_low=0.0)
  )
  assert loss == 0 and not np.any(gradient)
  np.testing.assert_allclose(metrics['masked'], 1, rtol=1e-6)


def test_f_is_a_constant():
  """One token, by hand: d loss / d log pi = -r A; with f differentiated it would be -r A (1 + log pi)."""
  one = np.ones((1, 1))
  experience = policy.Experience(-1.1 * one, -1.1 * one, 2 * one, one, one.astype(int))
  (loss, _), gradient = _value_and_grad(-one, experience, _config('double_sided'))
  np.testing.assert_allclose(loss, 2 * math.exp(0.1), rtol=1e-6)
  np.testing.assert_allclose(gradient, [[-2 * math.exp(0.1)]], rtol=1e-6)


@pytest.mark.parametrize('name', ['double_sided', 'icepop'])
def test_rejected_tokens_stay_in_the_denominator(name):
  """Four tokens, one rejected: each of the others still counts a quarter."""
  mask = np.ones((1, 4), bool)
  sequences = np.ones((1, 4), int)
  weights = _token_weights(mask, sequences, per='token')
  zeros = np.zeros((1, 4))
  off = np.array([[0.0, 0.0, -3.0, 0.0]])
  experience = policy.Experience(rollout=off, old=zeros, advantages=zeros + 1, weights=weights,
                                 sequences=sequences)  # fmt: skip
  (_, metrics), gradient = _value_and_grad(zeros, experience, _config(name))
  np.testing.assert_allclose(gradient, [[-0.25, -0.25, 0, -0.25]])
  np.testing.assert_allclose(metrics['masked'], 0.25)


@pytest.mark.parametrize('bad', [np.nan, np.inf, -np.inf])
@pytest.mark.parametrize('name', OBJECTIVES)
def test_tokens_the_model_did_not_write_change_nothing(name, bad):
  config = _config(name)
  logp, e = _experience('sequence')
  used = e.weights > 0
  spoilt = [np.where(used, a, np.float32(bad)) for a in (logp, *e[:3])]
  (loss, metrics), gradient = _value_and_grad(logp, e, config)
  other = policy.Experience(*spoilt[1:], e.weights, e.sequences)
  (loss2, metrics2), gradient2 = _value_and_grad(spoilt[0], other, config)
  assert np.isfinite(loss) and loss == loss2
  np.testing.assert_array_equal(gradient, gradient2)
  assert not np.any(gradient[~used])
  jax.tree.map(np.testing.assert_array_equal, metrics, metrics2)


@pytest.mark.parametrize('advantage', [-1.0, 1.0])
@pytest.mark.parametrize(
  'name, logp, rollout, old',
  [
    ('double_sided', -1.0, -np.inf, -1.0),  # The ratio overflows.
    ('double_sided', -1.0, -150.0, -1.0),
    ('icepop', -1.0, -1.0, -150.0),  # rho is 0 and r overflows.
    ('icepop', -1.0, -1.0, -np.inf),
    ('icepop', -1.0, -150.0, -1.0),  # rho overflows.
  ],
)
def test_a_rejected_token_is_harmless_however_far_off(name, logp, rollout, old, advantage):
  one = np.ones((1, 2))
  experience = policy.Experience(
    np.array([[rollout, -1.0]]), np.array([[old, -1.0]]), advantage * one, 0.5 * one,
    one.astype(int),
  )  # fmt: skip
  (loss, metrics), gradient = _value_and_grad(np.array([[logp, -1.0]]), experience, _config(name))
  assert np.isfinite(loss)
  np.testing.assert_allclose(gradient, [[0, -0.5 * advantage]], rtol=1e-6)
  assert metrics['masked'] == 0.5


@pytest.mark.parametrize('name', ['icepop', 'ppo', 'gspo', 'cispo', 'truncated'])
def test_a_clipped_token_is_harmless_however_far_off(name):
  """r overflows: exp(149) / exp(0). The second token is a sequence of its own."""
  rollout, one = np.array([[-150.0, -1.0]]), np.ones((1, 2))
  experience = policy.Experience(rollout, rollout, one, 0.5 * one, np.array([[1, 2]]))
  (loss, metrics), gradient = _value_and_grad(-one, experience, _config(name))
  bound = {'cispo': 1.45, 'truncated': 1.3}.get(name, 0.0)
  assert np.isfinite(loss)
  np.testing.assert_allclose(gradient, [[-0.5 * bound, -0.5]], rtol=1e-6)
  assert metrics['masked'] == (0.0 if bound else 0.5)


@pytest.mark.parametrize('name', OBJECTIVES)
def test_micro_batches_add_up(name):
  """With the weights of the whole batch, losses, gradients and sums of its rows add up to its own."""
  config = _config(name)
  logp, e = _experience('sequence')
  (loss, metrics), gradient = _value_and_grad(logp, e, config)
  parts = [
    _value_and_grad(logp[b : b + 1], jax.tree.map(lambda a, b=b: a[b : b + 1], e), config)
    for b in range(3)
  ]
  np.testing.assert_allclose(sum(p[0][0] for p in parts), loss, rtol=1e-5)
  np.testing.assert_allclose(np.concatenate([p[1] for p in parts]), gradient, rtol=1e-6)
  gaps = [p[0][1].pop('logprob_gap_max') for p in parts]
  assert max(gaps) == metrics.pop('logprob_gap_max')
  sums = jax.tree.map(lambda *a: sum(a), *(p[0][1] for p in parts))
  jax.tree.map(lambda a, b: np.testing.assert_allclose(a, b, rtol=1e-5, atol=1e-7), sums, metrics)


@pytest.mark.parametrize('name', OBJECTIVES)
def test_packing_changes_nothing(name):
  """Two sequences in one row are the two of them in rows of their own."""
  config = _config(name)
  logp, e = _experience('sequence')
  logp, *rest = (np.repeat(a[:1], 3, 0) for a in (logp, *e))
  e = policy.Experience(*rest)
  row = np.arange(3)[:, None]
  together = e._replace(weights=np.where(row == 0, e.weights, 0))
  apart = e._replace(weights=np.where(row + 1 == e.sequences, e.weights, 0))
  (loss, _), gradient = _value_and_grad(logp, together, config)
  (loss2, _), gradient2 = _value_and_grad(logp, apart, config)
  assert np.count_nonzero(apart.weights[0]) == 3 == np.count_nonzero(apart.weights[1])
  np.testing.assert_allclose(loss2, loss, rtol=1e-6, atol=1e-7)
  np.testing.assert_allclose(np.sum(gradient2, 0), gradient[0], rtol=1e-6)


def test_no_gradient_but_to_the_log_probabilities():
  logp, e = _experience('token')

  def loss(arrays):
    return policy.policy_loss(logp, policy.Experience(*arrays, e.sequences), _config('icepop'))[0]

  for gradient in tiny.fast_jit(jax.grad(loss))(e[:4]):
    assert not np.any(gradient)


def test_metrics():
  logp, e = _experience('sequence')
  (_, metrics), _ = _value_and_grad(logp, e, _config('double_sided'))
  expected = dict.fromkeys(('kl_behaviour', 'ratio', 'logprob_gap'), 0.0)
  histogram, worst = np.zeros(len(policy.RATIO_BINS) + 1), 0.0
  for b, t in np.argwhere(WRITTEN):
    x = float(logp[b, t]) - float(e.rollout[b, t])
    gap = abs(float(e.old[b, t]) - float(e.rollout[b, t]))
    w = float(e.weights[b, t])
    expected['kl_behaviour'] += w * (math.exp(x) - 1 - x)
    expected['ratio'] += w * math.exp(x)
    expected['logprob_gap'] += w * gap
    histogram[sum(x / math.log(2) > border for border in policy.RATIO_BINS)] += w
    worst = max(worst, gap)
  for key, value in expected.items():
    np.testing.assert_allclose(metrics[key], value, rtol=1e-5)
  np.testing.assert_allclose(metrics['logprob_gap_max'], worst, rtol=1e-6)
  np.testing.assert_allclose(metrics['ratio_histogram'], histogram, atol=1e-6)
  np.testing.assert_allclose(sum(metrics['ratio_histogram']), 1, rtol=1e-6)


@pytest.mark.parametrize('per', ['token', 'sequence'])
def test_token_weights(per):
  rng = np.random.default_rng(3)
  for _ in range(20):
    mask = rng.random(SEQUENCES.shape) < rng.random()
    want = _oracle_weights(mask, SEQUENCES, per)
    got = _token_weights(mask, SEQUENCES, per=per)
    np.testing.assert_allclose(got, want, rtol=1e-6)
    np.testing.assert_allclose(np.sum(got), float(want.any()), rtol=1e-6)


@pytest.mark.parametrize('per', ['token', 'sequence'])
def test_weights_of_nothing(per):
  """No token at all, and tokens in the padding alone: zeros, not 0/0."""
  nothing = _token_weights(np.zeros((2, 3), bool), np.ones((2, 3), np.int32), per=per)
  padding = _token_weights(np.ones((2, 3), bool), np.zeros((2, 3), np.int32), per=per)
  assert not np.any(nothing) and not np.any(padding)


def test_weights_by_hand():
  """A long and a short sequence: per sequence each has one half, however long."""
  mask = np.array([[False, True, True, True, True, False, True]])
  sequences = np.array([[1, 1, 1, 1, 1, 2, 2]])
  per_sequence = _token_weights(mask, sequences, per='sequence')
  np.testing.assert_allclose(per_sequence, [[0, 0.125, 0.125, 0.125, 0.125, 0, 0.5]])
  per_token = _token_weights(mask, sequences, per='token')
  np.testing.assert_allclose(per_token, [[0, 0.2, 0.2, 0.2, 0.2, 0, 0.2]], rtol=1e-6)
  with pytest.raises(ValueError, match='neither'):
    _token_weights(mask, sequences, per='row')


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'objective': 'grpo'}, 'known are'),
    ({'eps_low': -0.1}, 'eps_low'),
    ({'eps_low': 1.1}, 'eps_low'),
    ({'eps_high': -0.1}, 'eps_high'),
    ({'beta': 0.5}, 'beta'),
    ({'rho_max': 0.0}, 'rho_max'),
  ],
)
def test_senseless_constants_are_refused(changes, message):
  with pytest.raises(ValueError, match=message):
    policy.PolicyConfig(**changes)


def test_constants_of_the_paper():
  config = policy.PolicyConfig()
  assert (config.objective, config.eps_low, config.eps_high, config.beta) == (
    'icepop',
    0.2,
    0.28,
    2,
  )
  assert set(policy.OBJECTIVES) == set(OBJECTIVES)


def test_kl_estimates_in_expectation():
  """Over all outcomes of a small distribution: values of k1 and k3, gradients of all three."""
  rng = np.random.default_rng(0)
  theta, reference = rng.normal(size=(2, 5)).astype(np.float32)
  reference -= np.log(np.sum(np.exp(reference)))

  def exact(theta):
    logp = jax.nn.log_softmax(theta)
    return jnp.sum(jnp.exp(logp) * (logp - reference))

  def estimate(theta, kind):
    """The mean over tokens drawn from the policy, whose frequencies are no function of theta."""
    logp = jax.nn.log_softmax(theta)
    return policy.kl_penalty(logp, reference, jax.lax.stop_gradient(jnp.exp(logp)), kind=kind)

  def backwards(theta):
    return -jnp.sum(jnp.exp(reference) * jax.nn.log_softmax(theta))

  both = tiny.fast_jit(jax.value_and_grad(estimate), static_argnums=1)
  values, gradients = zip(*(both(theta, kind) for kind in ('k1', 'k2', 'k3')), strict=True)
  kl, slope = tiny.fast_jit(jax.value_and_grad(exact))(theta)
  np.testing.assert_allclose((values[0], values[2]), kl, rtol=1e-5)
  np.testing.assert_allclose(gradients[0], 0, atol=1e-7)
  np.testing.assert_allclose(gradients[1], slope, atol=1e-6)
  # k3's is the gradient of KL(reference || policy).
  np.testing.assert_allclose(gradients[2], tiny.fast_jit(jax.grad(backwards))(theta), atol=1e-6)


def test_kl_estimates_by_hand():
  logp, reference = np.array([[-1.0, -2.0, np.nan]]), np.array([[-1.5, -1.0, np.inf]])
  weights = np.array([[0.25, 0.75, 0.0]])
  x, w = np.array([0.5, -1.0]), np.array([0.25, 0.75])
  for kind, each in (('k1', x), ('k2', x**2 / 2), ('k3', np.exp(-x) - 1 + x)):
    loss = functools.partial(policy.kl_penalty, reference=reference, weights=weights, kind=kind)
    value, gradient = tiny.fast_jit(jax.value_and_grad(loss))(logp)
    np.testing.assert_allclose(value, np.sum(w * each), rtol=1e-6)
    assert np.all(np.isfinite(gradient))
  with pytest.raises(ValueError, match='k1, k2, k3'):
    policy.kl_penalty(logp, reference, weights, kind='k4')


def test_value_loss():
  rng = np.random.default_rng(1)
  values, old, returns = rng.normal(size=(3, 2, 6))
  weights = np.where(rng.random((2, 6)) < 0.7, 0.1, 0.0)
  loss, gradient = 0.0, np.zeros_like(values)
  for i in np.ndindex(2, 6):
    near = old[i] + _clip(values[i] - old[i], -0.4, 0.4)
    far, clipped = (values[i] - returns[i]) ** 2, (near - returns[i]) ** 2
    loss += 0.5 * weights[i] * max(far, clipped)
    flat = clipped > far and near != values[i]
    gradient[i] = 0.0 if flat else weights[i] * (values[i] - returns[i])
  assert np.any((gradient == 0) & (weights > 0)), 'nothing was clipped'
  # What the value head says of the prompt and of padding does not matter.
  values, old, returns = (np.where(weights > 0, a, np.nan) for a in (values, old, returns))
  arguments = (a.astype(np.float32) for a in (values, old, returns, weights))
  got, got_gradient = tiny.fast_jit(jax.value_and_grad(policy.value_loss))(*arguments, 0.4)
  np.testing.assert_allclose(got, loss, rtol=1e-6)
  np.testing.assert_allclose(got_gradient, gradient, rtol=1e-5, atol=1e-8)
