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


def keys(latents: jax.Array, index_k: jax.Array, b: Blocks) -> jax.Array:
  """One row a key: latent, then index key; packed (gathered), or padded sequences (dense)."""
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
    return pack_rows(pad_to(rows.reshape(batch * size, -1), 0, batch * size + b.keys))
  return pad_to(rows, 1, round_up(size, b.keys)).reshape(-1, rows.shape[2])


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
