"""Data layouts of the sparse MLA kernels: packed latent rows, lists of rows and masks per query
block.

The kernels work on blocks of neighbouring queries. A block reads each key that any of its queries
selected once (the union of the selections) and masks, which costs fewer row copies than a list per
query and fills the matrix unit. All of it is plain jax: sorts and compares, no scatter.

Letters beyond the glossary: G query blocks, M queries of one block, U slots of a row list, C keys
of one chunk, F padded feature width, W 32-bit words of a packed row.
"""

import jax
import jax.numpy as jnp
from jax import lax

LANES = 128
# The kernels hold a row id and one bit per query of the block in an int32.
MAX_QUERIES_PER_BLOCK = 16


def round_up(size: int, multiple: int) -> int:
  """Smallest multiple of `multiple` that is at least `size`."""
  return -(-size // multiple) * multiple


def pad_to(x: jax.Array, axis: int, size: int, value=0) -> jax.Array:
  """`x` with `axis` lengthened to `size`."""
  widths = [(0, 0)] * x.ndim
  widths[axis] = (0, size - x.shape[axis])
  return jnp.pad(x, widths, constant_values=value) if size > x.shape[axis] else x


def pad_features(x: jax.Array, latent_dim: int) -> jax.Array:
  """[..., L + R] -> [..., F]: latent part and rope part each start on a lane tile."""
  latent, rope = x[..., :latent_dim], x[..., latent_dim:]
  latent = pad_to(latent, -1, round_up(latent_dim, LANES))
  rope = pad_to(rope, -1, round_up(rope.shape[-1], LANES))
  return jnp.concatenate([latent, rope], axis=-1)


def unpad_features(x: jax.Array, latent_dim: int, rope_dim: int) -> jax.Array:
  """Inverse of `pad_features`."""
  start = round_up(latent_dim, LANES)
  return jnp.concatenate([x[..., :latent_dim], x[..., start : start + rope_dim]], axis=-1)


def packed_words(features: int, dtype) -> int:
  """Words W of a packed row: whole lane tiles of 32 bits."""
  tiles = features // LANES
  return LANES * (tiles if jnp.dtype(dtype).itemsize == 4 else -(-tiles // 2))


def pack_rows(keys: jax.Array) -> jax.Array:
  """[S, F] bfloat16 or float32 -> [S, 1, W] uint32, rows that one copy can fetch.

  A 32-bit array with a unit dimension is stored row by row, without the 8-row tiles that forbid a
  copy of one row. Word w of a bfloat16 row holds feature w in its low half and feature w + W in
  its high half, so that a shift and a mask give whole lane tiles.
  """
  if keys.dtype == jnp.float32:
    return lax.bitcast_convert_type(keys, jnp.uint32)[:, None]
  words = packed_words(keys.shape[-1], keys.dtype)
  halves = jnp.split(pad_to(keys, -1, 2 * words), 2, axis=1)
  # Converted apart: XLA would write the bits of whole rows to HBM, a word for each feature.
  low, high = (lax.bitcast_convert_type(x, jnp.uint16).astype(jnp.uint32) for x in halves)
  return (low | high << 16)[:, None]


def unpack_rows(rows: jax.Array, features: int, dtype) -> jax.Array:
  """Inverse of `pack_rows`: [S, 1, W] uint32 -> [S, F] of bfloat16 or float32."""
  words = rows[:, 0]
  if jnp.dtype(dtype) == jnp.float32:
    return lax.bitcast_convert_type(words, jnp.float32)
  halves = jnp.concatenate([words & 0xFFFF, words >> 16], axis=-1).astype(jnp.uint16)
  return lax.bitcast_convert_type(halves, jnp.bfloat16)[:, :features]


def row_lists(
  indices: jax.Array, queries: int, chunk: int, total_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Union of the selections of each block of `queries` neighbouring queries.

  Args:
    indices: [G * M, K] int32 row ids of the flattened latents, -1 where there is none; no id twice
      in a row.
    queries: M.
    chunk: C; the list's length U is a multiple of it.
    total_rows: number of rows of the flattened latents.

  Returns:
    rows [G, U] int32, ascending, then filler: rows `total_rows` to `total_rows + chunk - 1`, none
    twice in a chunk; masks [G, U] int32, bit m set where query m of the block selected the row, 0
    for filler; counts [G] int32, chunks of each block, at least 1.
  """
  blocks = indices.shape[0] // queries
  entries = indices.reshape(blocks, -1)
  query = lax.broadcasted_iota(jnp.int32, entries.shape, 1) // indices.shape[1]
  big = jnp.iinfo(jnp.int32).max
  # One int32 holds row and query, so that one single-operand sort does; equal ones are all `big`.
  key = lax.sort(
    jnp.where(entries >= 0, entries * queries + query, big), dimension=1, is_stable=False
  )
  row = jnp.where(key == big, big, key // queries)
  bit = jnp.where(key == big, 0, 1 << (key % queries))
  mask = bit
  for distance in range(1, min(queries, row.shape[1])):
    same = row[:, distance:] == row[:, :-distance]
    mask = mask | pad_to(jnp.where(same, bit[:, distance:], 0), 1, row.shape[1])
  first = jnp.concatenate([row[:, :1] != big, row[:, 1:] != row[:, :-1]], axis=1) & (row != big)
  # The second sort moves the repeats behind the list.
  rank = jnp.where(first, row, big)
  rank, mask = lax.sort((rank, mask), dimension=1, num_keys=1, is_stable=False)
  return fill_up(rank, mask, jnp.sum(rank != big, axis=1, dtype=jnp.int32), chunk, total_rows)


def fill_up(
  rows: jax.Array, masks: jax.Array, sizes: jax.Array, chunk: int, total_rows: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What `row_lists` returns, of unions [G, N] of which the first `sizes` [G] entries count."""
  length = round_up(min(rows.shape[1], total_rows), chunk)
  slot = jnp.arange(length, dtype=jnp.int32)
  valid = slot < sizes[:, None]
  rows, masks = (pad_to(a[:, :length], 1, length) for a in (rows, masks))
  counts = jnp.maximum(1, -(-sizes // chunk))
  return jnp.where(valid, rows, total_rows + slot % chunk), jnp.where(valid, masks, 0), counts


def dense_masks(
  indices: jax.Array, queries: int, chunk: int, keys: int
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Masks over all keys, for the masked-dense regime.

  Args:
    indices: [B, T, K] int32 positions in [0, keys), -1 where there is none; T a multiple of
      `queries`.
    queries: M.
    chunk: C.
    keys: S, a multiple of `chunk`.

  Returns:
    masks [G, S] int32, bit m set where query m of the block selected the key; starts [G] and counts
    [G] int32: the chunks from the first to the last that hold a selected key (one if there is
    none).
  """
  batch, time, _ = indices.shape
  words = -(-keys // 32)
  flat = indices.reshape(batch * time, -1)
  slot = jnp.where(flat >= 0, flat >> 5, -1)
  bit = jnp.where(flat >= 0, 1 << (flat & 31), 0)
  # Each bit occurs at most once, so the sum is the union. XLA fuses compare and sum.
  bits = jnp.sum(
    jnp.where(slot[:, None, :] == jnp.arange(words)[:, None], bit[:, None, :], 0), axis=-1
  )
  bits = (bits[:, :, None] >> jnp.arange(32)) & 1
  bits = bits.reshape(-1, queries, words * 32)[..., :keys]
  masks = jnp.sum(bits << jnp.arange(queries)[:, None], axis=1)
  positions = flat.reshape(-1, queries * flat.shape[1])
  first = jnp.min(jnp.where(positions >= 0, positions, keys), axis=1) // chunk
  last = jnp.max(positions, axis=1) // chunk
  starts = jnp.where(last >= 0, first, 0).astype(jnp.int32)
  return masks, starts, jnp.maximum(1, last - starts + 1).astype(jnp.int32)
