"""The lightning indexer's selection in plain jax: the truth that the kernels are tested against."""

import jax
import jax.numpy as jnp

LOWEST = -(2**31)  # Below every score: what no query may see.
HIGHEST = 2**31 - 2  # NaN; one more is above everything.

# Scores of one chunk of queries are the largest temporary: 2**24 float32 are 64 MiB.
_CHUNK_ELEMENTS = 2**24


def ordered_bits(x: jax.Array) -> jax.Array:
  """int32 whose order is that of the float32 `x`; -0.0 equals 0.0, any NaN is above everything."""
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  return jnp.where(x != x, HIGHEST, jnp.where(bits < 0, LOWEST - bits, bits))


def from_ordered_bits(u: jax.Array) -> jax.Array:
  """The float32 score of an `ordered_bits`; -inf for LOWEST, "no key"."""
  bits = jnp.where(u < 0, LOWEST - u, u)
  x = jax.lax.bitcast_convert_type(bits, jnp.float32)
  return jnp.where(u == LOWEST, -jnp.inf, x)


def visible(q_slot, q_segment, k_segment) -> jax.Array:
  """[B, T, S] bool: key s is no later than slot q_slot, in the same segment, which is not 0."""
  s = jax.lax.broadcasted_iota(jnp.int32, (1, 1, k_segment.shape[1]), 2)
  same = q_segment[:, :, None] == k_segment[:, None, :]
  return (s <= q_slot[:, :, None]) & same & (k_segment[:, None, :] > 0)


def scores(q, weights, k) -> jax.Array:
  """[B, T, S] float32: sum over heads of weight * relu(q . k)."""
  precision = 'highest' if q.dtype == jnp.float32 else None
  logits = jnp.einsum(
    'BTIJ,BSJ->BTIS', q, k, preferred_element_type=jnp.float32, precision=precision
  )
  # A float32 sum over heads whatever the backend's default for matmuls is: weights are not rounded.
  return jnp.sum(jax.nn.relu(logits) * weights[..., None].astype(jnp.float32), axis=2)


def _select(u: jax.Array, k: int) -> tuple[jax.Array, jax.Array]:
  """The k largest of each row of `u` [B, T, S]; `top_k` prefers the lowest index among equals."""
  size = u.shape[-1]
  values, indices = jax.lax.top_k(u, min(k, size))
  indices = jnp.sort(jnp.where(values == LOWEST, size, indices), axis=-1)
  indices = jnp.where(indices == size, -1, indices)
  padding = [(0, 0), (0, 0), (0, max(0, k - size))]
  threshold = values[..., -1] if size >= k else jnp.full(u.shape[:-1], LOWEST)
  return jnp.pad(indices, padding, constant_values=-1), from_ordered_bits(threshold)


def indexer_topk(q, weights, k, q_slot, q_segment, k_segment, topk: int):
  """See `api.indexer_topk`. Works on chunks of queries, so that no [B, T, S] array exists."""
  batch, time, heads, _ = q.shape
  per_query = batch * k.shape[1] * heads
  chunk = max(1, min(time, _CHUNK_ELEMENTS // per_query))
  chunks = -(-time // chunk)

  def split(x):  # [B, T, ...] -> [chunks, B, chunk, ...]
    x = jnp.pad(x, [(0, 0), (0, chunks * chunk - time)] + [(0, 0)] * (x.ndim - 2))
    return jnp.moveaxis(x.reshape(batch, chunks, chunk, *x.shape[2:]), 1, 0)

  def one_chunk(inputs):
    q, weights, q_slot, q_segment = inputs
    u = ordered_bits(scores(q, weights, k))
    return _select(jnp.where(visible(q_slot, q_segment, k_segment), u, LOWEST), topk)

  def join(x):
    return jnp.moveaxis(x, 0, 1).reshape(batch, chunks * chunk, *x.shape[3:])[:, :time]

  results = jax.lax.map(one_chunk, tuple(split(x) for x in (q, weights, q_slot, q_segment)))
  return jax.tree.map(join, results)
