"""Backward kernel: gradients for index queries, index keys and head weights, in one walk.

Target and scores are recomputed from the log-sum-exps. With g a query's cotangent,

  d_score = g ((sum_s p) exp(I - index_lse) - p)        d_w[i] += sum_s d_score relu(dot_i)
  d_dot_i = d_score w[i] 1[dot_i > 0]                   d_q[i] += d_dot_i k    d_k += d_dot_i q[i]

The gradients of a block's queries are summed in VMEM over its chunks, those of the keys in HBM over
the blocks: a chunk's rows are read, added to and written back, one copy a chunk (dense) or a row
(gathered). The order is that of the walk, and chunk i is read only when chunk i - 1 is written, so
repeated runs agree to the bit.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_kl import tiles
from pallas_kernels.indexer_kl.kernel_forward import STATE_ROWS, key_inputs, query_inputs
from pallas_kernels.indexer_kl.tiles import Sizes
from pallas_kernels.sparse_mla.layout import LANES
from pallas_kernels.sparse_mla.stream import LOG2_E, Stream, dot, each_row, row_tile

# Rows of what a query brings along: its cotangent, the index softmax's log-sum-exp in base 2, and
# the cotangent times the sum of the target.
COTANGENT, INDEX_LSE, COTANGENT_MASS = range(3)


class _KeyGradients:
  """Read-add-write of one chunk's gradient rows in HBM; every core sums into rows of its own."""

  def __init__(self, s: Sizes, refs, core):
    self.b, self.r = s.blocks, refs
    self.per_core = refs['sums'].shape[0] // s.blocks.cores
    self.offset = core * self.per_core

  def _rows(self, row):
    return self.r['sums'].at[pl.ds(self.offset + row, self.b.keys)]

  def _each(self, tick, first_row, part, parts, copy):
    """Starts part of the chunk's copies: its share of the rows, or all in the first part."""
    if not self.b.gather:
      if part == 0:
        copy(self.r['old'], self._rows(pl.multiple_of(first_row, self.b.keys)))
      return
    begin, end = (i * self.b.keys // parts for i in (part, part + 1))
    each_row(
      self.b, begin, end,
      lambda i: copy(
        self.r['old'].at[i], self.r['sums'].at[self.offset + self.r['ids'][tick, 0, i]]
      ),
    )  # fmt: skip

  def read(self, tick, first_row, part, parts):
    sem = self.r['read_sem']
    self._each(
      tick, first_row, part, parts, lambda old, row: pltpu.make_async_copy(row, old, sem).start()
    )

  def add_and_write(self, tick, first_row):
    old, sem = self.r['old'], self.r['write_sem']
    pltpu.make_async_copy(old, old, self.r['read_sem']).wait()
    for tile in range(old.shape[2] // LANES):
      view, index = row_tile(self.b, old, 0, tile)
      view[index] += self.r['gradient'][:, tile * LANES : (tile + 1) * LANES]
    self._each(tick, first_row, 0, 1, lambda old, row: pltpu.make_async_copy(old, row, sem).start())

  def wait_write(self):
    pltpu.make_async_copy(self.r['old'], self.r['old'], self.r['write_sem']).wait()

  def prime(self):
    """What the first `wait_write` waits for: zeros into the filler rows behind the last."""
    old = self.r['old']
    old[...] = jnp.zeros(old.shape, jnp.float32)
    filler = self._rows(self.per_core - self.b.keys)
    pltpu.make_async_copy(old, filler, self.r['write_sem']).start()


def _score_gradient(s: Sizes, refs, unit: int, target: jax.Array, scores: jax.Array) -> jax.Array:
  """[unit, 128], 0 where not selected."""
  row = refs['per_query']
  softmax = jnp.exp2(scores * LOG2_E - row[0, INDEX_LSE : INDEX_LSE + 1])
  mass, cotangent = row[0, COTANGENT_MASS : COTANGENT_MASS + 1], row[0, COTANGENT : COTANGENT + 1]
  return jnp.where(tiles.selected(s, unit, refs), mass * softmax - cotangent * target, 0.0)


def _gradients(s: Sizes, refs, keys, unit: int, sums: tuple[jax.Array, jax.Array]) -> None:
  """All gradients of one unit's keys."""
  b = s.blocks
  d_score = _score_gradient(s, refs, unit, *sums)
  d_dots = []
  for first in range(0, s.index_rows, LANES):
    lanes = slice(first, first + LANES)
    relu = refs['relu'][unit % 2, :, lanes]
    refs['d_weights'][0, :, lanes] += jnp.sum(d_score * relu, axis=0, keepdims=True)
    d_dot = jnp.where(relu > 0, d_score * refs['weights'][0, :, lanes], 0.0)
    d_dots.append(d_dot.astype(b.dtype))
  d_dot = jnp.concatenate(d_dots, axis=1)
  rows = slice(unit * s.unit, (unit + 1) * s.unit)
  refs['gradient'][rows, :] = dot(d_dot, refs['index_q'][...], (1, 0), b)
  refs['d_index_q'][...] += dot(d_dot, tiles.index_keys(s, unit, keys), (0, 0), b)


def _chunk(s: Sizes, stream: Stream, rows: _KeyGradients, position, first_row, refs) -> None:
  b = s.blocks
  tick, words, keys = stream.begin(position)
  tiles.spread_masks(refs, words)
  parts = s.units * s.groups
  half = max(1, parts // 2)

  def copies(part):
    """Fetches ahead in the first half; then the gradient rows, once the last are written."""
    if b.gather and part < half:
      stream.issue_rows(tick, part * b.keys // half, (part + 1) * b.keys // half)
    if part == half:
      rows.wait_write()
    if part >= half:
      rows.read(tick, first_row, part - half, parts - half)

  def sums(unit):
    def keep(relu, lanes):
      refs['relu'][unit % 2, :, lanes] = relu

    scores = tiles.index_scores(s, unit, refs, keys, keep)
    target = tiles.target(s, unit, refs, keys, lambda g: copies(unit * s.groups + g))
    return target, scores

  tiles.pipelined(s.units, sums, functools.partial(_gradients, s, refs, keys))
  if half == parts:
    rows.wait_write()
    rows.read(tick, first_row, 0, 1)
  rows.add_and_write(tick, first_row)


def _kernel(s: Sizes, starts, counts, base, *buffers, names):
  b = s.blocks
  refs: dict[str, Any] = dict(zip(names, buffers, strict=True))
  core, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
  block, first = core * steps + step, core * steps
  refs['dense_base'] = base
  stream = Stream(
    b, starts, counts, refs.get('lists'), refs['masks_hbm'], refs['keys_hbm'], refs, first,
    first + steps - 1,
  )  # fmt: skip
  rows = _KeyGradients(s, refs, core)
  pl.when(step == 0)(stream.prime)
  pl.when(step == 0)(rows.prime)
  for name in ('d_index_q', 'd_weights'):
    refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

  def chunk(c, carry):
    first_row = base[block] + (starts[block] + c) * b.keys
    _chunk(s, stream, rows, (block, c), first_row, refs)
    return carry

  lax.fori_loop(0, counts[block], chunk, 0)
  pl.when(step == steps - 1)(rows.wait_write)
  pl.when(step == steps - 1)(stream.finish)


def zero_sums(rows: int, sizes: Sizes) -> jax.Array:
  """Zero gradients of `rows` index keys and a chunk of filler a core: [.., 1, padded J] float32."""
  b = sizes.blocks
  return jnp.zeros((b.cores * (rows + b.keys), 1, sizes.index_dim), jnp.float32)


def backward(
  q: jax.Array,
  lse: jax.Array,
  index_q: jax.Array,
  weights: jax.Array,
  per_query: jax.Array,
  keys: jax.Array,
  sums: jax.Array,
  lists: jax.Array | None,
  masks: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  base: jax.Array,
  sizes: Sizes,
  interpret,
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Gradients, all float32: d_index_q [G * I * M, J], d_weights [G, 1, I * M], and `sums` with the
  keys' gradients added.

  Args:
    q, lse, index_q, weights, keys, lists, masks, starts, counts, base, sizes, interpret: as in
      `kernel_forward.forward`.
    per_query: [G, 8, 128] float32: rows COTANGENT, INDEX_LSE (finite) and COTANGENT_MASS, query m
      in every lane l with l mod M = m.
    sums: as `zero_sums` makes it; consumed.
  """
  b = sizes.blocks
  steps = masks.shape[0] // b.cores
  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)

  def block(*shape):
    return pl.BlockSpec(shape, lambda core, step, *_: (core * steps + step, *(0,) * len(shape[1:])))

  inputs = query_inputs(sizes, steps, q, lse, index_q, weights) | key_inputs(keys, lists, masks)
  inputs['per_query'] = (block(1, STATE_ROWS, LANES), per_query)
  inputs['sums_in'] = (anywhere, sums)
  scratch = b.scratch() | {
    'words': pltpu.VMEM((b.keys, LANES), jnp.int32),
    'relu': pltpu.VMEM((2, sizes.unit, sizes.index_rows), jnp.float32),
    'gradient': pltpu.VMEM((b.keys, sizes.index_dim), jnp.float32),
    'old': pltpu.VMEM((b.keys, 1, sizes.index_dim), jnp.float32),
    'read_sem': pltpu.SemaphoreType.DMA,
    'write_sem': pltpu.SemaphoreType.DMA,
  }
  names = (*inputs, 'd_index_q', 'd_weights', 'sums', *scratch)
  width = b.heads * sizes.width + 3 * sizes.index_heads * sizes.index_dim
  out_shape = [
    jax.ShapeDtypeStruct(index_q.shape, jnp.float32),
    jax.ShapeDtypeStruct(weights.shape, jnp.float32),
    jax.ShapeDtypeStruct(sums.shape, jnp.float32),
  ]
  return pl.pallas_call(
    functools.partial(_kernel, sizes, names=names),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(b.cores, steps),
      in_specs=[spec for spec, _ in inputs.values()],
      out_specs=[
        block(sizes.index_rows, sizes.index_dim), block(1, 1, sizes.index_rows), anywhere,
      ],
      scratch_shapes=list(scratch.values()),
    ),
    out_shape=out_shape,
    cost_estimate=b.cost(
      masks, width, b.key_bytes + 2 * 4 * sizes.index_dim, q, lse, index_q, weights, per_query,
      *out_shape[:2],
    ),
    input_output_aliases={3 + list(inputs).index('sums_in'): 2},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      disable_bounds_checks=True,
      vmem_limit_bytes=60 << 20,
    ),
    interpret=interpret,
    name='indexer_kl_backward',
  )(starts, counts, base, *[value for _, value in inputs.values()])  # fmt: skip
