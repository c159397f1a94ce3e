"""Rotary position embedding, interleaved (GLM-5) and half-split (DeepSeek-V3.2's indexer), and YaRN."""

import math

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig, Yarn


def frequencies(config: ModelConfig) -> np.ndarray:
  """[R/2] float32 angular frequencies theta^(-2i/R), radians a token, YaRN-corrected if asked."""
  dim = config.qk_rope_head_dim
  inv_freq = config.rope_theta ** (-np.arange(0, dim, 2, dtype=np.float64) / dim)
  if config.rope_scaling:
    inv_freq = _yarn(inv_freq, config.rope_theta, config.rope_scaling)
  return inv_freq.astype(np.float32)


def _yarn(inv_freq: np.ndarray, theta: float, yarn: Yarn) -> np.ndarray:
  """NTK-by-parts (arXiv 2309.00071, section 3.2): interpolate the slow dimensions only."""
  dim = 2 * len(inv_freq)

  def dimension_of(rotations: float) -> float:  # The dimension that turns this often in training.
    period = yarn.original_max_position_embeddings / (rotations * 2 * math.pi)
    return dim * math.log(period) / (2 * math.log(theta))

  low = max(math.floor(dimension_of(yarn.beta_fast)), 0)
  high = min(math.ceil(dimension_of(yarn.beta_slow)), dim - 1)
  ramp = np.clip((np.arange(dim // 2) - low) / max(high - low, 1e-3), 0.0, 1.0)
  return inv_freq / yarn.factor * ramp + inv_freq * (1.0 - ramp)


def angles(positions: jax.Array, inv_freq: np.ndarray) -> tuple[jax.Array, jax.Array]:
  """cos and sin, each [B, T, R/2] float32, of integer `positions` [B, T]."""
  phase = positions[..., None].astype(jnp.float32) * inv_freq
  return jnp.cos(phase), jnp.sin(phase)


def rotate(x: jax.Array, cos: jax.Array, sin: jax.Array, layout: str = 'interleaved') -> jax.Array:
  """Rotates the last axis of `x` [B, T, ..., R] by `cos`, `sin` [B, T, R/2].

  `interleaved` pairs dimensions (2i, 2i+1), `half` pairs (i, i + R/2). Either way the result holds
  all first components, then all second ones: queries and keys get the same permutation, so dot
  products are unaffected, and nothing has to be interleaved back.
  """
  if layout == 'interleaved':
    first, second = x[..., 0::2], x[..., 1::2]
  else:
    first, second = jnp.split(x, 2, axis=-1)
  shape = cos.shape[:2] + (1,) * (x.ndim - 3) + cos.shape[2:]
  cos, sin = cos.reshape(shape).astype(x.dtype), sin.reshape(shape).astype(x.dtype)
  return jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
