"""The indexer's KL in plain jax: gathers each query's selected rows, a few queries at a time."""

import jax
import jax.numpy as jnp
from jax import lax

# Gathered rows of one step, in elements: bounds the memory of long sequences.
_ROWS_PER_STEP = 1 << 25


def _take(table: jax.Array, indices: jax.Array) -> jax.Array:
  """[B, S, X], [B, T, K] -> [B, T, K, X]; the first row where nothing is selected."""
  return jax.vmap(lambda rows, i: rows[i])(table, jnp.maximum(indices, 0))


def _kl(q, lse, index_q, index_weights, indices, latents, index_k, scale):
  """One step: queries [B, c, ...] against all rows -> [B, c]."""
  dtype = jnp.promote_types(q.dtype, jnp.float32)
  valid = indices >= 0
  rows = _take(latents, indices)
  logits = jnp.einsum('BTNL,BTKL->BTNK', q, rows, preferred_element_type=dtype) * scale
  probs = jnp.exp(jnp.where(valid[:, :, None], logits - lse[..., None], -jnp.inf))
  target = lax.stop_gradient(jnp.mean(probs, axis=2))

  dots = jnp.einsum(
    'BTIJ,BTKJ->BTIK', index_q, _take(index_k, indices), preferred_element_type=dtype
  )
  scores = jnp.sum(jax.nn.relu(dots) * index_weights[..., None], axis=2)
  highest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-1e30, where=valid))
  centred = jnp.where(valid, scores - highest, 0.0)
  total = jnp.sum(jnp.exp(centred), axis=-1, keepdims=True, where=valid)
  log_index = centred - jnp.log(jnp.maximum(total, 1e-30))
  log_target = jnp.log(jnp.maximum(target, 1e-30))
  return jnp.sum(target * (log_target - log_index), axis=-1, where=valid)


def indexer_kl(q, latents, lse, index_q, index_weights, index_k, indices, scale):
  """Arguments and result as in api.py. The backward pass gathers the rows once more."""
  q, latents, lse = lax.stop_gradient((q, latents, lse))
  batch, time = q.shape[:2]
  per_query = batch * indices.shape[2] * latents.shape[2]
  step = max(1, min(time, _ROWS_PER_STEP // per_query))
  steps = -(-time // step)

  def split(x, fill=0):  # [B, T, ...] -> [steps, B, step, ...]
    padding = [(0, 0), (0, steps * step - time)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(x.reshape(batch, steps, step, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def one_step(queries):
    q, lse, index_q, index_weights, indices = queries
    return _kl(q, lse, index_q, index_weights, indices, latents, index_k, scale)

  queries = (split(q), split(lse), split(index_q), split(index_weights), split(indices, -1))
  kl = lax.map(one_step, queries)
  return jnp.moveaxis(kl, 0, 1).reshape(batch, -1)[:, :time]
