"""`indexer_topk_paged`: the indexer's selection for decoding, over index keys in pages."""

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from pallas_kernels.indexer import kernel_decode, reference
from pallas_kernels.indexer.api import Implementation
from pallas_kernels.sparse_mla import api as sparse_mla

MAX_QUERIES = 8
# Sequences whose keys the reference holds at a time.
_SEQUENCES_PER_STEP = 4


def _reference(q, weights, pages, table, q_slot, topk: int):
  """Reads the pages of a few sequences at a time; see `indexer_topk_paged`."""
  size = table.shape[1] * pages.shape[1]

  def one_sequence(inputs):
    q, weights, table, q_slot = inputs
    keys = pages[jnp.clip(table, 0, pages.shape[0] - 1)].reshape(1, size, -1)
    # What lies behind the sequence is invisible, and no score of it may be NaN: 0 * NaN is.
    keys = jnp.where(jnp.arange(size)[:, None] <= jnp.max(q_slot), keys, 0)
    one = jnp.ones((1, size), jnp.int32)
    segment = jnp.ones((1, q.shape[0]), jnp.int32)
    results = reference.indexer_topk(q[None], weights[None], keys, q_slot[None], segment, one, topk)
    return jax.tree.map(lambda x: x[0], results)

  step = min(_SEQUENCES_PER_STEP, q.shape[0])
  return lax.map(one_sequence, (q, weights, table, q_slot), batch_size=step)


def _check(q, weights, pages, table, q_slot, topk, implementation):
  name = 'indexer_topk_paged'
  batch, time, heads, dim = q.shape if q.ndim == 4 else (0,) * 4
  shapes = {
    'weights': (weights, (batch, time, heads)),
    'q_slot': (q_slot, (batch, time)),
    'table': (table, (batch, table.shape[-1])),
    'pages': (pages, (*pages.shape[:2], dim)),
  }
  for argument, (x, wanted) in shapes.items():
    if q.ndim != 4 or x.shape != wanted:
      raise ValueError(
        f'{name}: q has shape {q.shape} and {argument} {x.shape}; expected q [B, T, I, J], weights '
        '[B, T, I], pages [P, page_size, J], table [B, pages of a row], q_slot [B, T] with equal '
        'letters equal'
      )
  if q.dtype != pages.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
    raise TypeError(
      f'{name}: q is {q.dtype} and pages {pages.dtype}; cast both to bfloat16, or both to float32'
    )
  if not 1 <= time <= MAX_QUERIES:
    raise ValueError(
      f'{name}: {time} new tokens a sequence; it takes 1 to {MAX_QUERIES}, longer chunks are '
      'prefill and go to indexer_topk'
    )
  if min(topk, *q.shape, *pages.shape, table.shape[1]) < 1:
    raise ValueError(f'{name}: K={topk} and all sizes must be positive, q {q.shape}')
  if implementation not in ('reference', 'tpu'):
    raise ValueError(f"{name}: implementation={implementation!r}; use 'reference' or 'tpu'")
  if implementation == 'tpu' and kernel_decode.CHUNK % pages.shape[1]:
    raise ValueError(
      f'{name}: the kernel reads {kernel_decode.CHUNK} keys at a time, which pages of '
      f'{pages.shape[1]} do not divide; make them a power of two, 64 for instance'
    )


def indexer_topk_paged(
  q: jax.Array,
  weights: jax.Array,
  pages: jax.Array,
  table: jax.Array,
  q_slot: jax.Array,
  topk: int,
  *,
  implementation: Implementation = 'reference',
  chip: str | None = None,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """`indexer_topk` for the 1 to 8 newest tokens of sequences whose index keys lie in pages.

  The key at position s of sequence b is row s % page_size of page table[b, s // page_size]; those
  of the new tokens must be in the pool already. One layer of a pool of many is given by
  `pages.reshape(layers * P, ...)` and `table + layer * P`, which copies nothing.

  Key s is visible to query t if s <= q_slot[t]. What no query sees may hold anything, NaN included.
  The kernel's cost grows with each sequence's own length, in steps of 4,096 keys.

  Args:
    q: [B, T, I, J] bfloat16 or float32 index queries, rotated, T from 1 to 8.
    weights: [B, T, I] head weights with both scales folded in; float32.
    pages: [P, page_size, J] index keys of q's dtype, rotated. The kernel reads lanes of 128: if J
      is no multiple of that the pool is padded first, a copy of it.
    table: [B, pages of a row] int32 page numbers.
    q_slot: [B, T] int32, last position that the query may see; -1 for none, beyond the table's room
      means all.
    topk: how many keys to select, K.
    implementation: 'reference' is plain jax, 'tpu' the Pallas kernel.
    chip: 'v5p', 'v6e' or 'tpu7x'; None asks the mesh, or the first device.
    interpret: for the kernel on CPU, as in `pallas_call`.

  Returns:
    [B, T, K] int32 positions in the sequence, ascending, then -1; and [B, T] float32, the K-th
    largest visible score, or -inf where fewer than K keys are visible. As `indexer_topk`.

  Raises:
    ValueError: shapes that disagree, more than 8 new tokens, an unknown implementation, a page size
      that the kernel does not take.
    TypeError: dtypes other than the above.
  """
  _check(q, weights, pages, table, q_slot, topk, implementation)
  q, weights, pages = lax.stop_gradient((q, weights, pages))
  q_slot, table = q_slot.astype(jnp.int32), table.astype(jnp.int32)
  if implementation == 'reference':
    return _reference(q, weights, pages, table, q_slot, topk)
  return kernel_decode.indexer_topk(
    q, weights, pages, table, q_slot, topk, cores=sparse_mla.cores(chip), interpret=interpret
  )
