"""Arrays as the kernels of the indexer's KL read them: blocks of M queries, heads first.

Letters beyond the glossary: G query blocks, M queries of one block, C keys of one chunk.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.indexer_kl.kernel_forward import STATE_ROWS
from pallas_kernels.indexer_kl.reference import Visible
from pallas_kernels.sparse_mla.layout import LANES, pack_rows, pad_to, round_up
from pallas_kernels.sparse_mla.stream import Blocks


def heads_first(x: jax.Array, queries: int, time: int, heads: int, fill=0.0) -> jax.Array:
  """[B, T, N, ...] -> [B, time / M, heads, M, ...], filled where padded."""
  x = pad_to(pad_to(x, 1, time, fill), 2, heads, fill)
  x = x.reshape(x.shape[0], time // queries, queries, heads, *x.shape[3:])
  return jnp.swapaxes(x, 2, 3)


def heads_last(x: jax.Array, batch: int, queries: int, heads: int) -> jax.Array:
  """[G * heads * M * ...] -> [B, T, heads, ...]; x's trailing dimension, if any, is kept."""
  x = x.reshape(batch, -1, heads, queries, x.shape[-1])
  return jnp.swapaxes(x, 2, 3).reshape(batch, -1, heads, x.shape[-1])


def per_query(rows: list[jax.Array], queries: int) -> jax.Array:
  """Arrays of G * M values -> [G, 8, 128], one a row, repeated along the lanes."""
  x = jnp.stack([row.reshape(-1, queries) for row in rows], axis=1)
  return pad_to(jnp.tile(x, (1, 1, LANES // queries)), 1, STATE_ROWS)


def keys(latents: jax.Array, index_k: jax.Array, b: Blocks, filler: int = 1) -> jax.Array:
  """One row a key: latent, then index key; packed (gathered), or padded sequences (dense).

  Gathered, `filler` chunks of rows lie behind the last key.
  """
  batch, size, width = latents.shape
  rows = jnp.concatenate(
    [
      pad_to(latents, 2, round_up(width, LANES)),
      pad_to(index_k, 2, round_up(index_k.shape[2], LANES)),
    ],
    axis=-1,
  )
  if b.gather:
    # Rows behind the last are what the filler of the lists names.
    return pack_rows(pad_to(rows.reshape(batch * size, -1), 0, batch * size + filler * b.keys))
  return pad_to(rows, 1, round_up(size, b.keys)).reshape(-1, rows.shape[2])


# Chunks that `keep_apart` may add to a list. Chunks of filler rows: of three in a row in the walk
# each has its own, and one is named by no list.
APART, FILLER = 2, 4


def keep_apart(
  lists: jax.Array, masks: jax.Array, counts: jax.Array, total_rows: int, cores: int
) -> dict[str, jax.Array]:
  """Lists of which no two chunks at most two apart in the walk have a row in common.

  Chunks of one block have none. Where the last of one block and the first of the next may have one,
  by the ranges of their rows, up to two chunks of filler come between; likewise behind the last
  block of a core, on which the walk stays.

  Args:
    lists: [G, chunks, 1, C] int32 row ids, ascending, those of `total_rows` and above being filler.
    masks: [G, chunks, 1, C] int32.
    counts: [G] int32, at least 1.
    total_rows: rows of keys.
    cores: TensorCores that share the blocks.

  Returns:
    'lists' and 'masks' with APART chunks more, 'counts'. Filler rows of chunk i of the walk are
    those of C * (i mod 3) and above behind the last key.
  """
  blocks, _, _, size = lists.shape
  real = lists < total_rows
  lows = jnp.min(jnp.where(real, lists, total_rows), axis=(2, 3))
  highs = jnp.max(jnp.where(real, lists, -1), axis=(2, 3))
  block = jnp.arange(blocks)
  following = jnp.where((block + 1) % (blocks // cores) == 0, block, block + 1)

  def meet(behind: int, chunk: int) -> jax.Array:
    """Whether so many chunks before a block's last may share rows with a chunk of the next."""
    chunk = min(chunk, lows.shape[1] - 1)
    mine = jnp.maximum(counts - 1 - behind, 0)
    return (lows[block, mine] <= highs[following, chunk]) & (
      lows[following, chunk] <= highs[block, mine]
    )

  one = meet(0, 1) | meet(1, 0) | (counts == 1)
  extra = jnp.where(meet(0, 0), APART, one.astype(jnp.int32))
  ends = jnp.cumsum(counts + extra)
  lists, masks = (
    jnp.pad(x, ((0, 0), (0, APART), (0, 0), (0, 0)), constant_values=fill)
    for x, fill in ((lists, total_rows), (masks, 0))
  )
  place = (ends - counts - extra)[:, None] + jnp.arange(lists.shape[1])
  filler = total_rows + (place % (FILLER - 1) * size)[:, :, None, None] + jnp.arange(size)
  lists = jnp.where(lists < total_rows, lists, filler.astype(jnp.int32))
  return {'lists': lists, 'masks': masks, 'counts': (counts + extra).astype(jnp.int32)}


def visible_masks(visible: Visible, b: Blocks) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Visibility of a block's queries as bits, like `sparse_mla.layout.dense_masks`.

  Args:
    visible: T a multiple of M, S of C.
    b: static sizes.

  Returns:
    masks [G, S] int32, bit m set where query m of the block sees the key; starts [G] and counts [G]
    int32: the chunks from the first to the last with such a key (one if there is none).
  """
  batch, time = visible.q_slot.shape
  size = visible.k_segment.shape[1]
  # XLA fuses comparison and sum: no [T, S] array is made.
  sees = visible.mask().reshape(batch * time // b.queries, b.queries, size).astype(jnp.int32)
  masks = jnp.sum(sees << jnp.arange(b.queries, dtype=jnp.int32)[:, None], axis=1)
  chunks = jnp.any(masks.reshape(masks.shape[0], -1, b.keys) != 0, axis=2)
  first = jnp.argmax(chunks, axis=1).astype(jnp.int32)
  last = chunks.shape[1] - 1 - jnp.argmax(chunks[:, ::-1], axis=1).astype(jnp.int32)
  return masks, first, jnp.where(jnp.any(chunks, axis=1), last - first + 1, 1)
