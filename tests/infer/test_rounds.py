"""Experts in rounds (expert_matmul='rounds'): the definition, for any load."""

import functools

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.infer import programs
from glm5_jax.ops import dispatch
from glm5_jax.train.prepare import build_model_config
from tests import tiny

D, F, E, K = 12, 10, 6, 2


@functools.partial(tiny.fast_jit, static_argnames='matmul')
def run(x, experts, weights, matmul='rounds'):
  return dispatch.pair_outputs(x, experts, share_of(x, experts), *weights, matmul)


def share_of(x, experts):
  """A weight of each pair that depends on the token alone."""
  return 1.5 + jnp.sin(x[:, :1] + jnp.arange(experts.shape[1]))


def made(tokens: int, popular: bool):
  rng = np.random.default_rng(tokens)
  x = rng.standard_normal((tokens, D), np.float32)
  weights = [rng.standard_normal(s, np.float32) for s in ((E, D, F), (E, D, F), (E, F, D))]
  experts = np.stack([rng.permutation(E)[:K] for _ in range(tokens)]).astype(np.int32)
  if popular:  # Two experts get everything, in either order: as many rounds as there can be.
    experts[::2], experts[1::2] = (4, 1), (1, 4)
  return x, experts, weights


def every_pair(x, experts, weights) -> np.ndarray:
  """[T * K, D] float64, one token and one expert at a time."""
  gate, up, down = (w.astype(np.float64) for w in weights)
  out = []
  shares = np.asarray(share_of(x, experts), np.float64)
  for token, chosen, share in zip(x.astype(np.float64), experts, shares, strict=True):
    for e, s in zip(chosen, share, strict=True):
      h = token @ gate[e]
      out.append(s * ((h / (1 + np.exp(-h)) * (token @ up[e])) @ down[e]))
  return np.array(out)


@pytest.mark.parametrize('popular', [False, True], ids=['even', 'two-get-all'])
@pytest.mark.parametrize('tokens', [1, 2, 16, 17, 150])
def test_equals_every_pair_computed(tokens, popular):
  x, experts, weights = made(tokens, popular)
  want = every_pair(x, experts, weights)
  tiny.close_relative('rounds', run(x, experts, weights), want, 2e-6)
  # A token's result depends on no other's, nor on how many rounds they need.
  single = np.concatenate(
    [run(x[t : t + 1], experts[t : t + 1], weights) for t in range(3)[:tokens]]
  )
  tiny.close_relative('alone', single, want[: len(single)], 2e-6)


def test_a_round_that_is_too_small_takes_more_of_them():
  """150 tokens of two experts: 75 rows a round would be enough for an even load only."""
  assert dispatch.round_size(150, 300, E) < 150
  assert dispatch.round_size(3, 6, E) == 3
  assert dispatch.round_size(512, 2048, 16) == 64


def test_the_weights_are_not_copied():
  """Blocks need a copy of the weights for each pair; rounds need none but of activations."""
  _, experts, _ = made(16, False)
  big = [np.zeros((E, *s), np.float32) for s in ((256, 256),) * 3]
  x = np.zeros((16, 256), np.float32)

  def temporary(matmul):
    lowered = run.lower(x, experts, big, matmul=matmul)
    return lowered.compile().memory_analysis().temp_size_in_bytes

  assert temporary('rounds') < big[0].nbytes < temporary('blocks')


def test_engines_take_it_instead_of_blocks():
  """And nothing else: what is not for this machine stays as it was asked for."""
  for asked, used in (('blocks', 'rounds'), ('ragged_dot', 'ragged_dot')):
    assert programs.without_gradients(tiny.config(expert_matmul=asked)).expert_matmul == used


def test_training_refuses_it():
  with pytest.raises(ValueError, match="'rounds' has no gradient.*'blocks'"):
    build_model_config({'size': 'nano', 'expert_matmul': 'rounds'})
