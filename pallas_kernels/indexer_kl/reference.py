"""The indexer's KL in plain jax, a few queries at a time: what the kernels are tested against."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax import lax

# Gathered rows (sparse stage) or logits (dense) of one step, in elements: bounds the memory.
_ROWS_PER_STEP = 1 << 25


class Visible(NamedTuple):
  """Key s is visible to query t if s <= q_slot[t] and both carry the same segment id, above 0."""

  q_slot: jax.Array  # [B, T] int32
  q_segment: jax.Array  # [B, T] int32
  k_segment: jax.Array  # [B, S] int32

  def mask(self) -> jax.Array:
    """[B, T, S] bool."""
    position = jnp.arange(self.k_segment.shape[1])
    same = self.q_segment[:, :, None] == self.k_segment[:, None, :]
    return same & (self.k_segment[:, None, :] > 0) & (position <= self.q_slot[:, :, None])


def _take(table: jax.Array, indices: jax.Array) -> jax.Array:
  """[B, S, X], [B, T, K] -> [B, T, K, X]; the first row where nothing is selected."""
  return jax.vmap(lambda rows, i: rows[i])(table, jnp.maximum(indices, 0))


def _kl(q, lse, index_q, index_weights, chosen, latents, index_k, scale):
  """One step: queries [B, c, ...] against all rows -> [B, c]."""
  dtype = jnp.promote_types(q.dtype, jnp.float32)
  if isinstance(chosen, Visible):
    valid, letters = chosen.mask(), 'BK'
  else:
    valid, letters = chosen >= 0, 'BTK'
    latents, index_k = _take(latents, chosen), _take(index_k, chosen)
  logits = jnp.einsum(f'BTNL,{letters}L->BTNK', q, latents, preferred_element_type=dtype) * scale
  probs = jnp.exp(jnp.where(valid[:, :, None], logits - lse[..., None], -jnp.inf))
  target = lax.stop_gradient(jnp.mean(probs, axis=2))

  dots = jnp.einsum(f'BTIJ,{letters}J->BTIK', index_q, index_k, preferred_element_type=dtype)
  scores = jnp.sum(jax.nn.relu(dots) * index_weights[..., None], axis=2)
  highest = lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-1e30, where=valid))
  centred = jnp.where(valid, scores - highest, 0.0)
  total = jnp.sum(jnp.exp(centred), axis=-1, keepdims=True, where=valid)
  log_index = centred - jnp.log(jnp.maximum(total, 1e-30))
  log_target = jnp.log(jnp.maximum(target, 1e-30))
  return jnp.sum(target * (log_target - log_index), axis=-1, where=valid)


def indexer_kl(q, latents, lse, index_q, index_weights, index_k, selection, scale):
  """Arguments and result as in api.py. The backward pass computes each step once more."""
  q, latents, lse = lax.stop_gradient((q, latents, lse))
  batch, time, heads, width = q.shape
  dense = isinstance(selection, Visible)
  per_query = batch * (latents.shape[1] * heads if dense else selection.shape[2] * width)
  step = max(1, min(time, _ROWS_PER_STEP // per_query))
  steps = -(-time // step)

  def split(x, fill=0):  # [B, T, ...] -> [steps, B, step, ...]
    padding = [(0, 0), (0, steps * step - time)] + [(0, 0)] * (x.ndim - 2)
    x = jnp.pad(x, padding, constant_values=fill)
    return jnp.moveaxis(x.reshape(batch, steps, step, *x.shape[2:]), 1, 0)

  @jax.checkpoint
  def one_step(queries):
    q, lse, index_q, index_weights, chosen = queries
    if dense:
      chosen = Visible(chosen[0], chosen[1], selection.k_segment)
    return _kl(q, lse, index_q, index_weights, chosen, latents, index_k, scale)

  chosen = (split(selection.q_slot), split(selection.q_segment)) if dense else split(selection, -1)
  kl = lax.map(one_step, (split(q), split(lse), split(index_q), split(index_weights), chosen))
  return jnp.moveaxis(kl, 0, 1).reshape(batch, -1)[:, :time]
