"""Sparse MLA for decoding: a few new tokens of each of many sequences, whose rows lie in pages.

The block of queries of the forward kernel is here one sequence's new tokens, so drafted tokens
share the rows that several of them selected. Nothing else is new: the lists name rows of the pool,
or whole pages where all keys are read.
"""

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.sparse_mla import (
  api,
  kernel_forward,
  kernel_lists,
  kernel_move,
  layout,
  reference,
)
from pallas_kernels.sparse_mla.stream import Blocks
from pallas_kernels.tuning import best_blocks

MAX_QUERIES = 8
# Keys up to which whole pages are read; docs/kernels_decode.md has the measurements.
DENSE_KEYS = 4096
# Queries of a block that a number of new tokens is padded to, and queries of one matmul.
_TOGETHER = {1: 1, 2: 2, 3: 3, 4: 4, 6: 3, 8: 4}
# Sequences whose selected rows the reference holds at a time.
_SEQUENCES_PER_STEP = 4


def pack_pages(pages: jax.Array, latent_dim: int) -> jax.Array:
  """[..., page_size, L + R] -> [..., page_size, 1, W] uint32: pages from which a row can be copied.

  New rows are packed in the same way and written at the same place, so that a pool is packed once.
  """
  rows = layout.pad_features(pages, latent_dim)
  packed = layout.pack_rows(rows.reshape(-1, rows.shape[-1]))
  return packed.reshape(*pages.shape[:-1], *packed.shape[1:])


def unpack_pages(packed: jax.Array, latent_dim: int, rope_dim: int, dtype) -> jax.Array:
  """Inverse of `pack_pages`: [..., 1, W] uint32 -> [..., L + R] of bfloat16 or float32."""
  features = sum(layout.round_up(n, layout.LANES) for n in (latent_dim, rope_dim))
  rows = layout.unpack_rows(packed.reshape(-1, *packed.shape[-2:]), features, dtype)
  rows = layout.unpad_features(rows, latent_dim, rope_dim)
  return rows.reshape(*packed.shape[:-2], rows.shape[-1])


def write_pages(
  pages: jax.Array,
  rows: jax.Array,
  page: jax.Array,
  offset: jax.Array,
  *,
  implementation: api.Implementation = 'reference',
  interpret: Any = False,
) -> jax.Array:
  """Packed pages [P, page_size, 1, W] uint32 with packed `rows` [N, 1, W] in them.

  Args:
    pages: of `pack_pages`; given away (donated, or the carry of a loop) they are changed in place.
    rows: of `pack_pages` as well.
    page, offset: [N] int32; row n becomes row offset[n] of page page[n]. A negative page is none; no
      two rows have the same place.
    implementation: 'reference' is XLA's scatter, which on a TPU copies all of the pages; 'tpu' the
      kernel.
    interpret: passed to pallas_call.
  """
  if implementation == 'reference':
    there = jnp.where(page >= 0, page, pages.shape[0])  # Nowhere: dropped.
    return pages.at[there, offset].set(rows, mode='drop')
  size = pages.shape[1]
  flat = pages.reshape(-1, *pages.shape[2:])
  target = jnp.where(page >= 0, page * size + offset, -1)
  return kernel_move.write_rows(flat, rows, target, interpret).reshape(pages.shape)


def read_pages(
  pages: jax.Array,
  page: jax.Array,
  offset: jax.Array | None = None,
  *,
  implementation: api.Implementation = 'reference',
  interpret: Any = False,
) -> jax.Array:
  """Of packed pages [P, page_size, 1, W] uint32 some, [N, page_size, 1, W], or some rows, [N, 1, W].

  Args:
    pages: of `pack_pages`.
    page: [N] int32, which pages.
    offset: [N] int32, which row of each; None for all of it.
    implementation: 'reference' is XLA's gather, which on a TPU copies all of the pages; 'tpu' the
      kernel.
    interpret: passed to pallas_call.
  """
  if implementation == 'reference':
    where = page if offset is None else (page, offset)
    return pages.at[where].get(mode='promise_in_bounds')
  size = pages.shape[1]
  flat = pages.reshape(-1, *pages.shape[2:])
  if offset is not None:
    return kernel_move.read_rows(flat, page * size + offset, 1, interpret)
  return kernel_move.read_rows(flat, page, size, interpret).reshape(-1, *pages.shape[1:])


def _reference(q, pages, table, indices, scale, latent_dim):
  """Gathers what is selected, sequence by sequence, and attends to all of that."""
  size, k = pages.shape[1], indices.shape[2]

  def one_sequence(inputs):
    q, table, indices = inputs
    chosen = indices >= 0
    position = jnp.maximum(indices, 0)
    rows = jnp.where(chosen[..., None], pages[table[position // size], position % size], 0)
    slots = jnp.where(chosen, jnp.arange(k), -1)
    out, lse = reference.sparse_mla(q[:, None], rows, slots[:, None], scale, latent_dim)
    return out[:, 0], lse[:, 0]

  step = min(_SEQUENCES_PER_STEP, q.shape[0])
  return lax.map(one_sequence, (q, table, indices), batch_size=step)


def _gathered(indices: jax.Array, table: jax.Array, size: int, b: Blocks):
  """Lists of the rows [B, U] of the pool that a sequence's queries selected; masks and lengths."""
  batch, queries, k = indices.shape
  keys = table.shape[1] * size
  if queries == 1:  # Ascending and without repeats already.
    positions = layout.pad_to(indices[:, 0], 1, layout.round_up(k, b.keys), -1)
    valid = positions >= 0
    masks = valid.astype(jnp.int32)
  else:
    positions, masks, _ = kernel_lists.row_lists(
      indices.reshape(-1, k), queries, b.keys, keys, b.interpret
    )
    valid = positions < keys
  positions = jnp.where(valid, positions, 0)
  pages = jnp.take_along_axis(table, positions // size, axis=1)
  lists = jnp.where(valid, pages * size + positions % size, 0)
  lengths = jnp.sum(valid, axis=1, dtype=jnp.int32)
  counts = jnp.maximum(1, -(-lengths // b.keys))
  return {
    'lists': lists.reshape(batch, -1, 1, b.keys),
    'masks': masks.reshape(batch, -1, 1, b.keys),
    'starts': jnp.zeros_like(counts),
    'counts': counts,
    'base': lengths,
  }


def _whole_pages(indices: jax.Array, table: jax.Array, size: int, b: Blocks):
  """The same, of pages: all from the chunk of the first selected key to that of the last."""
  batch, queries, _ = indices.shape
  keys = layout.round_up(table.shape[1] * size, b.keys)
  masks, starts, counts = layout.dense_masks(indices, queries, b.keys, keys)
  return {
    'lists': layout.pad_to(table, 1, keys // size).reshape(batch, -1, 1, b.copies),
    'masks': masks.reshape(batch, -1, 1, b.keys),
    'starts': starts,
    'counts': counts,
    'base': jnp.max(indices, axis=(1, 2)) + 1,
  }


def choose_regime(keys: int) -> api.Regime:
  """Whole pages while that is cheaper than a copy a row, however many drafts there are."""
  return 'dense' if keys <= DENSE_KEYS else 'gather'


def choose_chunk(chip: str, regime: api.Regime) -> int:
  """Keys of a chunk, from the table of `pallas_kernels/tuning.py`."""
  return best_blocks(chip, 'sparse_mla_paged', regime, 'forward')[2]


def make_blocks(c: api.Config, q_shape, dtype, page_size: int, chunk: int) -> Blocks:
  """Static sizes: one block of queries a sequence."""
  _, time, heads, width = q_shape
  queries = min(n for n in _TOGETHER if n >= time)
  sizes = api.Tuning(queries, _TOGETHER[queries], chunk)
  b = api._blocks(dataclasses.replace(c, regime='gather'), sizes, heads, width, dtype)
  return dataclasses.replace(b, granule=page_size if c.regime == 'dense' else 1, tails=True)


def _per_block(x: jax.Array, b: Blocks, value=0) -> jax.Array:
  """[B, T, ...] or [B, pages] with sequences and queries filled up to whole blocks and cores."""
  x = layout.pad_to(x, 1, b.queries, value) if x.ndim > 2 else x
  return layout.pad_to(x, 0, layout.round_up(x.shape[0], b.cores), value)


def select(
  indices: jax.Array, table: jax.Array, pool: tuple[int, ...], b: Blocks
) -> dict[str, Any]:
  """Keyword arguments of the kernel that say what each sequence reads; `pool` is (P, page_size)."""
  table = jnp.clip(_per_block(table, b), 0, pool[0] - 1)
  lists = _gathered if b.granule == 1 else _whole_pages
  return lists(_per_block(indices, b, -1), table, pool[1], b)


def cost(selection: dict[str, Any], b: Blocks) -> pl.CostEstimate:
  """What `attend` computes and moves at the most: lists full, selections of drafts all different."""
  sequences, chunks, _, keys = selection['masks'].shape
  entries, pairs = selection['lists'].size, sequences * chunks * keys * b.rows
  outside = b.rows * (b.dtype.itemsize * (b.features + b.latent) + 4)
  lists = 4 * (entries + selection['masks'].size)
  return pl.CostEstimate(
    flops=2 * pairs * (b.features + b.latent),
    transcendentals=pairs,
    bytes_accessed=entries * b.granule * 4 * b.words + lists + sequences * outside,
  )


def attend(q, pages, selection, b: Blocks, latent_dim: int, interpret: Any = False):
  """out and lse of `sparse_mla_paged` by the kernel, from packed pages and what `select` gives."""
  batch, time, heads, _ = q.shape
  rows = layout.pad_to(_per_block(layout.pad_features(q, latent_dim), b), 2, b.heads)
  out, lse = kernel_forward.forward(
    rows.reshape(-1, b.features),
    keys=pages.reshape(-1, *pages.shape[2:]),
    **selection,
    blocks=b,
    interpret=interpret,
    cost=cost(selection, b),
  )
  out = out.reshape(-1, b.queries, b.heads, b.latent)
  lse = lse.reshape(-1, b.queries, b.heads)
  return out[:batch, :time, :heads, :latent_dim], lse[:batch, :time, :heads]


def _check(q, pages, table, indices, latent_dim: int) -> None:
  batch, time = q.shape[:2]
  if q.ndim != 4 or indices.ndim != 3 or table.ndim != 2 or indices.shape[:2] != (batch, time):
    raise ValueError(
      'sparse_mla_paged: expected q [B, T, N, L + R], table [B, pages of a row], indices [B, T, K],'
      f' got {q.shape}, {table.shape}, {indices.shape}'
    )
  if table.shape[0] != batch:
    raise ValueError(f'sparse_mla_paged: q has {batch} sequences, the table {table.shape[0]}')
  if not 1 <= time <= MAX_QUERIES:
    raise ValueError(
      f'sparse_mla_paged: {time} new tokens a sequence; it takes 1 to {MAX_QUERIES}, longer chunks'
      ' are prefill and go to sparse_mla'
    )
  if table.dtype != jnp.int32 or indices.dtype != jnp.int32:
    raise ValueError(
      f'sparse_mla_paged: table and indices must be int32, got {table.dtype}, {indices.dtype}'
    )
  width = q.shape[3]
  if not 0 < latent_dim < width:
    raise ValueError(f'sparse_mla_paged: latent_dim {latent_dim} must be within 1..{width - 1}')
  if pages.dtype == jnp.uint32:
    features = sum(layout.round_up(n, layout.LANES) for n in (latent_dim, width - latent_dim))
    wanted: tuple[int, ...] = (1, layout.packed_words(features, q.dtype))
  else:
    wanted = (width,)
  if pages.ndim != 2 + len(wanted) or pages.shape[2:] != wanted:
    raise ValueError(
      f'sparse_mla_paged: pages {pages.dtype}{list(pages.shape)} do not fit q {q.dtype}'
      f'{list(q.shape)}: expected [P, page_size, {width}] of its dtype, or what pack_pages gives'
    )
  if pages.dtype not in (q.dtype, jnp.uint32):
    raise ValueError(f'sparse_mla_paged: q is {q.dtype} and pages {pages.dtype}; use one dtype')


def sparse_mla_paged(
  q: jax.Array,
  pages: jax.Array,
  table: jax.Array,
  indices: jax.Array,
  scale: float,
  latent_dim: int,
  *,
  implementation: api.Implementation = 'reference',
  regime: api.Regime | None = None,
  chip: str | None = None,
  chunk: int | None = None,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """`sparse_mla` of the 1 to 8 newest tokens of sequences whose rows lie in pages of one pool.

  The token at position s of sequence b is row s % page_size of page table[b, s // page_size]; its
  row must be in the pool already, those of the new tokens too. One layer of a pool of many is given
  by `pages.reshape(layers * P, ...)` and `table + layer * P`, which copies nothing.

  Pages of other sequences, table entries and rows behind a sequence's end may hold anything, NaN
  included. Not differentiable.

  Args:
    q: [B, T, N, L + R] queries with W_UK absorbed, T from 1 to 8. Fill up with any: a query that
      selects nothing costs no rows.
    pages: [P, page_size, L + R] in q's dtype, or packed by `pack_pages`, [P, page_size, 1, W]
      uint32. The kernel reads packed rows: others are packed first, which reads the whole pool.
    table: [B, pages of a row] int32 page numbers.
    indices: [B, T, K] int32 positions in the sequence, ascending, none twice, padded with -1.
    scale: softmax scale.
    latent_dim: L.
    implementation: 'reference' (plain jax) or 'tpu'.
    regime: 'dense' reads all pages up to the last selected key, 'gather' one row at a time; None
      takes 'dense' up to `DENSE_KEYS` = 4,096 keys that a table has room for. By the compiler's
      schedules one token is faster gathered from 5K to 6K keys on, drafts while the union of their
      selections is small; docs/kernels_decode.md.
    chip: 'v5p', 'v6e' or 'tpu7x'; None asks the mesh, or the first device.
    chunk: keys of a chunk in place of the chip's.
    interpret: passed to pallas_call.

  Returns:
    out [B, T, N, L] in q's dtype and lse [B, T, N] float32, as in `sparse_mla`.

  Raises:
    ValueError: shapes or dtypes that do not fit, said in the message.
  """
  _check(q, pages, table, indices, latent_dim)
  packed = pages.dtype == jnp.uint32
  if implementation == 'reference':
    if packed:
      raise ValueError("sparse_mla_paged: implementation='reference' takes pages not yet packed")
    return _reference(q, pages, table, indices, scale, latent_dim)
  if implementation != 'tpu':
    raise ValueError(
      f"sparse_mla_paged: implementation must be 'reference' or 'tpu', got {implementation!r}"
    )
  if q.dtype not in (jnp.bfloat16, jnp.float32):
    raise ValueError(f'sparse_mla_paged: the kernel takes bfloat16 or float32, got {q.dtype}')
  size = pages.shape[1]
  keys = table.shape[1] * size
  c = api.make_config(
    scale, latent_dim, keys, regime or choose_regime(keys), chip, interpret=interpret
  )
  chunk = chunk or choose_chunk(chip or api.chip_name(), c.regime)
  if c.regime == 'dense' and chunk % size:
    raise ValueError(f'sparse_mla_paged: pages of {size} tokens do not divide a chunk of {chunk}')
  blocks = make_blocks(c, q.shape, q.dtype, size, chunk)
  if not packed:
    pages = pack_pages(pages, latent_dim)
  with jax.named_scope('sparse_mla_selection'):
    selection = select(indices, table, pages.shape[:2], blocks)
  return attend(q, pages, selection, blocks, latent_dim, interpret)
