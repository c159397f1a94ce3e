"""Rotary embeddings: layouts, relative positions, YaRN, long contexts."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import Yarn, deepseek_v32, glm5, glm5_2
from glm5_jax.ops import rope
from tests import oracle, tiny

CONFIGS = {
  'glm5': glm5(),
  'glm5_2': glm5_2(),
  'deepseek_v32': deepseek_v32(),
  'short context': tiny.config(rope_scaling=Yarn(factor=4.0, original_max_position_embeddings=16)),
}


@pytest.mark.parametrize('name', CONFIGS)
def test_frequencies(name):
  want = oracle.rope_frequencies(CONFIGS[name].to_hf())
  np.testing.assert_allclose(rope.frequencies(CONFIGS[name]), want, rtol=1e-6)


def test_yarn_slows_the_slow_pairs_only():
  """DeepSeek-V3.2: the fastest pairs keep their frequency, the slowest turn 40 times slower."""
  yarn = rope.frequencies(deepseek_v32())
  plain = rope.frequencies(deepseek_v32(rope_scaling=None))
  ratio = plain / yarn
  assert ratio[0] == 1 and ratio[9] == 1  # More than 32 turns in 4096 tokens.
  np.testing.assert_allclose(ratio[-8:], 40, rtol=1e-5)  # Less than one turn.
  assert (np.diff(ratio) >= -1e-5).all()
  turns = 4096 * plain / (2 * np.pi)
  assert turns[9] > 32 and turns[-8] < 1


def test_yarn_softmax_scale():
  """(0.1 ln 40 + 1)^2 = 1.87385; GLM-5 has no YaRN and 1 / 16."""
  assert glm5().attention_scale == 1 / 16
  assert deepseek_v32().attention_scale == pytest.approx(192**-0.5 * 1.87385, rel=1e-5)
  assert deepseek_v32().attention_scale == pytest.approx(
    oracle.attention_scale(deepseek_v32().to_hf()), rel=1e-12
  )


@pytest.mark.parametrize('layout', ['interleaved', 'half'])
def test_rotation(layout):
  """Up to a fixed permutation (all first components, then all second) it is the pairwise rotation."""
  config = tiny.config(qk_rope_head_dim=8)
  rng = np.random.default_rng(0)
  x = rng.standard_normal((2, 5, 3, 8)).astype('f4')
  positions = rng.integers(0, 400, (2, 5))
  cos, sin = rope.angles(positions, rope.frequencies(config))
  got = np.asarray(rope.rotate(jnp.asarray(x), cos, sin, layout))
  want = oracle.rotate(x.astype('f8'), positions, oracle.rope_frequencies(config.to_hf()), layout)
  if layout == 'interleaved':
    want = np.concatenate([want[..., 0::2], want[..., 1::2]], -1)
  tiny.close('rotated', got, want, 1e-5)
  # The layouts are different functions: a mix-up cannot pass.
  other = rope.rotate(
    jnp.asarray(x), cos, sin, 'half' if layout == 'interleaved' else 'interleaved'
  )
  assert np.abs(np.asarray(other) - got).max() > 0.5
  np.testing.assert_allclose((got**2).sum(-1), (x**2).sum(-1), rtol=1e-5)


def test_products_depend_on_distance_only():
  config = tiny.config(qk_rope_head_dim=8)
  x, y = np.random.default_rng(1).standard_normal((2, 1, 1, 8)).astype('f4')

  @jax.jit
  def product(position, distance):
    def at(v, p):
      cos, sin = rope.angles(jnp.reshape(p, (1, 1)), rope.frequencies(config))
      return rope.rotate(v[None], cos, sin)

    return jnp.sum(at(x, position + distance) * at(y, position))

  near = [float(product(p, 7)) for p in (0, 1, 50, 1000)]
  assert np.ptp(near) < 1e-3
  assert abs(float(product(0, 7)) - float(product(0, 8))) > 1e-2


def test_without_a_head_axis():
  """The shared key has no head axis; it is rotated like one head."""
  config = tiny.config()
  x = np.random.default_rng(2).standard_normal((2, 5, 6)).astype('f4')
  positions = np.tile(np.arange(5), (2, 1))
  cos, sin = rope.angles(positions, rope.frequencies(config))
  np.testing.assert_array_equal(
    rope.rotate(jnp.asarray(x), cos, sin),
    rope.rotate(jnp.asarray(x)[:, :, None], cos, sin)[:, :, 0],
  )
