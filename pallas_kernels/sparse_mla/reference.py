"""Sparse MLA in plain jax: the definition the kernels are tested against.

Absorbed form (DeepSeek-V2, arXiv 2405.04434, section 2.1) over the keys that the lightning indexer
selected (section 2.1.1): a cached row is key (all of it) and value (its latent part) of every head.
"""

import jax
import jax.numpy as jnp
from jax import lax

# Gathered rows of one step, in elements: bounds the memory of long sequences.
_ROWS_PER_STEP = 1 << 25


def _attend(q, latents, indices, scale, latent_dim):
  """[B, c, N, L + R], [B, S, L + R], [B, c, K] -> out [B, c, N, L], lse [B, c, N]."""
  dtype = jnp.promote_types(q.dtype, jnp.float32)
  rows = jax.vmap(lambda table, i: table[i])(latents, jnp.maximum(indices, 0))
  valid = (indices >= 0)[:, :, None, :]
  logits = jnp.einsum('BTNL,BTKL->BTNK', q, rows, preferred_element_type=dtype) * scale
  logits = jnp.where(valid, logits, -jnp.inf)
  any_key = jnp.any(valid, axis=-1)
  highest = lax.stop_gradient(jnp.maximum(jnp.max(logits, axis=-1, initial=-jnp.inf), -1e30))
  p = jnp.where(valid, jnp.exp(jnp.where(valid, logits - highest[..., None], 0.0)), 0.0)
  total = jnp.where(any_key, jnp.sum(p, axis=-1), 1.0)
  p = p / total[..., None]
  out = jnp.einsum('BTNK,BTKL->BTNL', p, rows[..., :latent_dim], preferred_element_type=dtype)
  return out.astype(q.dtype), jnp.where(any_key, highest + jnp.log(total), -jnp.inf)


def sparse_mla(
  q: jax.Array, latents: jax.Array, indices: jax.Array, scale: float, latent_dim: int
) -> tuple[jax.Array, jax.Array]:
  """Attention of every query to its selected rows; arguments and results as in api.py.

  Queries are processed a few at a time, so that memory does not grow with T * K * (L + R).
  """
  batch, time, _, width = q.shape
  k = indices.shape[-1]
  step = max(1, min(time, _ROWS_PER_STEP // max(1, batch * k * width)))
  if step >= time:
    return _attend(q, latents, indices, scale, latent_dim)
  steps = -(-time // step)
  pad = steps * step - time
  q = jnp.pad(q, ((0, 0), (0, pad), (0, 0), (0, 0)))
  indices = jnp.pad(indices, ((0, 0), (0, pad), (0, 0)), constant_values=-1)

  def split(x):
    return jnp.moveaxis(x.reshape(batch, steps, step, *x.shape[2:]), 1, 0)

  def join(x):
    return jnp.moveaxis(x, 0, 1).reshape(batch, steps * step, *x.shape[3:])[:, :time]

  one = jax.checkpoint(lambda x: _attend(x[0], latents, x[1], scale, latent_dim))
  results = lax.map(one, (split(q), split(indices)))
  return join(results[0]), join(results[1])
