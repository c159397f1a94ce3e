"""Exact, deterministic top-k selection: among equal scores the lowest index wins.

Section 3.2 of the paper reports that a non-deterministic top-k ruins RL within a few steps, so
trainer and engine share this one definition. The threshold is found by bisecting the scores' ordered
bit patterns, a few counting sweeps that stop as soon as every row has exactly k keys above it; that
is faster than sorting on every backend XLA serves, and gives a mask without a scatter.
"""

import functools
import math

import jax
import jax.numpy as jnp

from glm5_jax.ops.cumsum import cumulative_count

_ROWS_PER_BLOCK = 512  # Keeps one block of rows in cache while it is swept.


_LOWEST = jnp.iinfo(jnp.int32).min  # Below every score, -inf included.


def _ordered_bits(x: jax.Array) -> jax.Array:
  """int32 whose order is that of the float32 `x`; -0.0 equals 0.0, any NaN is above everything."""
  x = x.astype(jnp.float32)
  bits = jax.lax.bitcast_convert_type(x, jnp.int32)
  bits = bits ^ ((bits >> 31) & 0x7FFFFFFF)
  # Not `x + 0.0`, which the compiler simplifies to `x` and so keeps the sign of zero.
  return jnp.where(x == 0, 0, jnp.where(jnp.isnan(x), 0x7FFFFFFF, bits))


def _threshold(u: jax.Array, done: jax.Array, k: int | jax.Array) -> tuple[jax.Array, jax.Array]:
  """For `u` [S, rows]: the k-th largest of each column, or any value with exactly k at or above it.

  Returns (threshold, number of entries >= threshold), both [rows]. Columns marked `done` are left at
  their minimum, which selects all.
  """
  low, high = jnp.min(u, axis=0), jnp.max(u, axis=0)
  count = jnp.full(low.shape, u.shape[0], jnp.int32)

  def unsettled(carry):
    low, high, count = carry
    return (count != k) & (low < high) & ~done

  def body(carry):
    low, high, count = carry
    # ceil((low + high) / 2) without overflow; always above low.
    middle = (low >> 1) + (high >> 1) + ((low | high) & 1)
    above = jnp.sum((u >= middle).astype(jnp.int32), axis=0)
    open_ = unsettled(carry)
    up, down = open_ & (above >= k), open_ & (above < k)
    return (
      jnp.where(up, middle, low),
      jnp.where(down, middle - 1, high),
      jnp.where(up, above, count),
    )

  low, _, count = jax.lax.while_loop(lambda c: jnp.any(unsettled(c)), body, (low, high, count))
  return low, count


def _select_block(scores: jax.Array, visible: jax.Array, k: int | jax.Array) -> jax.Array:
  """[rows, S] -> bool mask of the top k visible entries of each row."""
  u = jnp.where(visible, _ordered_bits(scores), _LOWEST)
  threshold, count = _threshold(u.T, jnp.sum(visible, axis=1) <= k, k)
  threshold = threshold[:, None]

  def break_ties(_):
    above, equal = u > threshold, u == threshold
    room = k - jnp.sum(above, axis=1, keepdims=True)
    return above | (equal & (cumulative_count(equal) <= room))

  ties = jnp.any(count > k)
  return jax.lax.cond(ties, break_ties, lambda _: u >= threshold, None) & visible


@functools.partial(jax.named_call, name='select')
def select_mask(scores: jax.Array, visible: jax.Array, k: int | jax.Array) -> jax.Array:
  """Mask [..., S] of the `k` largest visible scores of each row; all visible ones if fewer than k.

  Args:
    scores: [..., S], compared as float32; -0.0 equals 0.0, and NaN is above everything.
    visible: [..., S] bool; only these can be selected.
    k: how many; traced where it changes during training (gradual sparsity).
  """
  shape = scores.shape
  if isinstance(k, int) and shape[-1] <= k:
    return visible
  scores, visible = scores.reshape(-1, shape[-1]), visible.reshape(-1, shape[-1])
  rows = scores.shape[0]
  block = min(_ROWS_PER_BLOCK, rows)
  if rows % block:
    block = math.gcd(rows, block) if math.gcd(rows, block) >= 64 else rows
  blocks = (scores.reshape(-1, block, shape[-1]), visible.reshape(-1, block, shape[-1]))
  if blocks[0].shape[0] == 1:
    return _select_block(scores, visible, k).reshape(shape)
  return jax.lax.map(lambda b: _select_block(b[0], b[1], k), blocks).reshape(shape)


def mask_to_indices(mask: jax.Array, k: int) -> jax.Array:
  """[..., S] bool with at most k set -> [..., k] int32 positions, ascending, padded with -1."""
  size = mask.shape[-1]
  rank = cumulative_count(mask) - 1
  slots = jnp.where(mask, rank, k).reshape(-1, size)
  rows = jnp.arange(slots.shape[0])[:, None]
  positions = jnp.broadcast_to(jnp.arange(size, dtype=jnp.int32), slots.shape)
  indices = jnp.full((slots.shape[0], k + 1), -1, jnp.int32).at[rows, slots].set(positions)
  return indices[:, :k].reshape(*mask.shape[:-1], k)


def indices_to_mask(indices: jax.Array, size: int) -> jax.Array:
  """[B, T, K] positions padded with -1 -> [B, T, size] bool."""
  slots = jnp.where(indices >= 0, indices, size)
  batch, time = indices.shape[:2]
  b, t = jnp.arange(batch)[:, None, None], jnp.arange(time)[None, :, None]
  return jnp.zeros((batch, time, size + 1), bool).at[b, t, slots].set(True)[..., :size]
