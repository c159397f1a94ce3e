"""Backward kernel: gradients for index queries, index keys and head weights, in one walk.

Target and scores are recomputed from the log-sum-exps. With g a query's cotangent,

  d_score = g ((sum_s p) exp(I - index_lse) - p)        d_w[i] += sum_s d_score relu(dot_i)
  d_dot_i = d_score w[i] 1[dot_i > 0]                   d_q[i] += d_dot_i k    d_k += d_dot_i q[i]

The gradients of a block's queries are summed in VMEM over its chunks, those of the keys in HBM over
the blocks, in the order of the walk, so repeated runs agree to the bit: a chunk's sums are read,
added to and written back.

Dense, in one copy each way: chunk i's are read when chunk i - 1's are written. Gathered, a key's sum
lies in front of the key and one copy a row brings both, two chunks ahead. The copies are issued
beside a chunk's matmuls:

  first half: sums i - 1 -> HBM;  wait for them;
  second half: sums and keys i + 2 -> VMEM, gradients are added to sums i.

A row is read only when every earlier chunk that has it is written: those up to i - 1 are, and
i, i + 1 and i + 2 have no row in common, since lists are made that keep chunks so near in the walk
apart (`layout.keep_apart`).
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_kl import layout, tiles
from pallas_kernels.indexer_kl.kernel_forward import STATE_ROWS, key_inputs, query_inputs
from pallas_kernels.indexer_kl.tiles import Sizes
from pallas_kernels.sparse_mla.layout import LANES
from pallas_kernels.sparse_mla.stream import LOG2_E, Stream, dot, each_row, row_tile

# Rows of what a query brings along: its cotangent, the index softmax's log-sum-exp in base 2, and
# the cotangent times the sum of the target.
COTANGENT, INDEX_LSE, COTANGENT_MASS = range(3)


class _DenseSums:
  """Read-add-write of the index keys' gradients of a chunk, as `_chunk` goes through its parts."""

  def __init__(self, s: Sizes, refs, core, stream: Stream):
    self.r, self.stream, self.keys = refs, stream, s.blocks.keys
    # Every core sums into rows of its own.
    size = refs['sums'].shape[0] // s.blocks.cores
    self.sums = refs['sums'].at[pl.ds(pl.multiple_of(core * size, self.keys), size)]
    self.filler = size - self.keys

  def _rows(self, position):
    block, chunk = position
    row = self.r['dense_base'][block] + (self.stream.starts[block] + chunk) * self.keys
    return self.sums.at[pl.ds(pl.multiple_of(row, self.keys), self.keys)]

  def _write(self, rows):
    pltpu.make_async_copy(self.r['sum'], rows, self.r['write_sem']).start()

  def _wait_write(self):
    pltpu.make_async_copy(self.r['sum'], self.r['sum'], self.r['write_sem']).wait()

  def prime(self):
    """What the first wait is for: zeros into the filler rows behind the last."""
    self.r['sum'][...] = jnp.zeros(self.r['sum'].shape, self.r['sum'].dtype)
    self._write(self.sums.at[pl.ds(self.filler, self.keys)])

  def begin(self, tick):
    """There is nothing to take yet."""

  def first_half(self, part, parts):
    """The last chunk's sums are on their way."""

  def turn(self, position):
    """Once the last chunk's sums are written, this chunk's are read."""
    self._wait_write()
    pltpu.make_async_copy(self._rows(position), self.r['sum'], self.r['read_sem']).start()

  def second_half(self, tick, part, parts):
    """This chunk's sums are on their way."""

  def add(self, start: int, gradient):
    """Gradients of the chunk's keys from `start`."""
    self.r['gradient'][start : start + gradient.shape[0]] = gradient

  def end(self, position):
    pltpu.make_async_copy(self.r['sum'], self.r['sum'], self.r['read_sem']).wait()
    self.r['sum'][...] += self.r['gradient'][...]
    self._write(self._rows(position))

  def finish(self):
    self._wait_write()


class _GatheredSums:
  """As `_DenseSums`, for rows whose sums come with the keys."""

  def __init__(self, s: Sizes, refs, core, stream: Stream):
    self.b, self.r, self.stream = s.blocks, refs, stream
    self.tiles = s.index_dim // LANES
    size = refs['sums'].shape[0] // s.blocks.cores
    self.sums = refs['sums'].at[pl.ds(core * size, size), :, pl.ds(0, s.index_dim)]
    self.filler = size - s.blocks.keys

  def _part(self, part: int, parts: int) -> tuple[int, int]:
    return part * self.b.keys // parts, (part + 1) * self.b.keys // parts

  def _write_row(self, i):
    row = self.sums.at[self.r['row_ids'][0, i]]
    pltpu.make_async_copy(self.r['sum'].at[i], row, self.r['write_sem']).start()

  def _wait_write(self):
    pltpu.make_async_copy(self.r['sum'], self.r['sum'], self.r['write_sem']).wait()

  def _ids(self, position):
    """The copy of the row ids of the chunk that is written next, to an address of their own."""
    return self.stream.id_copy(position, self.r['row_ids'], self.r['row_id_sem'])

  def prime(self):
    """A chunk before the first one: zeros for filler rows that no chunk names."""
    self.r['sum'][...] = jnp.zeros(self.r['sum'].shape, self.r['sum'].dtype)

    def name(i, carry):
      self.r['row_ids'][0, i] = self.filler + i
      return carry

    lax.fori_loop(0, self.b.keys, name, 0)

  def begin(self, tick):
    """Takes the sums, whose place the rows two chunks ahead will need."""
    for tile in range(self.tiles):
      packed, rows = row_tile(self.b, self.r['packed'], (tick & 1) * self.b.keys, tile)
      columns = slice(tile * LANES, (tile + 1) * LANES)
      self.r['before'][:, columns] = lax.bitcast_convert_type(packed[rows], jnp.float32)

  def first_half(self, part, parts):
    """Writes a part of the last chunk's sums."""
    each_row(self.b, *self._part(part, parts), self._write_row)

  def turn(self, position):
    """Waits until the last chunk's sums are written."""
    self._wait_write()
    self._ids(position).start()

  def second_half(self, tick, part, parts):
    """Fetches a part of the sums and keys two chunks ahead."""
    self.stream.issue_rows(tick, *self._part(part, parts))

  def add(self, start: int, gradient):
    """Sums of the chunk's keys from `start`, to be written by the next chunk."""
    for tile in range(self.tiles):
      sums, index = row_tile(self.b, self.r['sum'], start, tile, gradient.shape[0])
      columns = slice(tile * LANES, (tile + 1) * LANES)
      total = self.r['before'][start : start + gradient.shape[0], columns] + gradient[:, columns]
      sums[index] = lax.bitcast_convert_type(total, jnp.uint32)

  def end(self, position):
    self._ids(position).wait()

  def finish(self):
    """Writes the sums of the last chunk, beside which there is no other."""

    def write(i, carry):
      self._write_row(i)
      return carry

    lax.fori_loop(0, self.b.keys, write, 0)
    self._wait_write()


def _score_gradient(s: Sizes, refs, unit: int, target: jax.Array, scores: jax.Array) -> jax.Array:
  """[unit, 128], 0 where not selected."""
  row = refs['per_query']
  softmax = jnp.exp2(scores * LOG2_E - row[0, INDEX_LSE : INDEX_LSE + 1])
  mass, cotangent = row[0, COTANGENT_MASS : COTANGENT_MASS + 1], row[0, COTANGENT : COTANGENT + 1]
  return jnp.where(tiles.selected(s, unit, refs), mass * softmax - cotangent * target, 0.0)


def _gradients(s: Sizes, refs, keys, add, unit: int, sums: tuple[jax.Array, jax.Array]) -> None:
  """All gradients of one unit's keys; `add` takes those of the keys and where they start."""
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
  add(unit * s.unit, dot(d_dot, refs['index_q'][...], (1, 0), b))
  refs['d_index_q'][...] += dot(d_dot, tiles.index_keys(s, unit, keys), (0, 0), b)


def _chunk(s: Sizes, stream: Stream, rows: _DenseSums | _GatheredSums, position, refs) -> None:
  tick, words, keys = stream.begin(position)
  rows.begin(tick)
  tiles.spread_masks(refs, words)
  groups = s.index_groups + s.groups
  parts = s.units * groups
  # The first gradients come after two units, if there are so many, and not before the turn.
  half = min(parts // 2, 2 * groups - 1)

  def copies(part):
    if part < half:
      rows.first_half(part, half)
      return
    if part == half:
      rows.turn(position)
    rows.second_half(tick, part - half, parts - half)

  def sums(unit):
    def keep(relu, lanes):
      refs['relu'][unit % 2, :, lanes] = relu

    scores = tiles.index_scores(s, unit, refs, keys, keep, lambda g: copies(unit * groups + g))
    after = unit * groups + s.index_groups
    target = tiles.target(s, unit, refs, keys, lambda g: copies(after + g))
    return target, scores

  tiles.pipelined(s.units, sums, functools.partial(_gradients, s, refs, keys, rows.add))
  rows.end(position)


def _kernel(s: Sizes, starts, counts, base, *buffers, names):
  b = s.blocks
  refs: dict[str, Any] = dict(zip(names, buffers, strict=True))
  core, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
  block, first = core * steps + step, core * steps
  refs['dense_base'] = base
  keys_hbm = refs.get('keys_hbm')
  if b.gather:
    per_core = refs['sums'].shape[0] // b.cores
    keys_hbm = refs['sums'].at[pl.ds(core * per_core, per_core)]
  stream = Stream(
    b, starts, counts, refs.get('lists'), refs['masks_hbm'], keys_hbm, refs, first,
    first + steps - 1,
  )  # fmt: skip
  rows = (_GatheredSums if b.gather else _DenseSums)(s, refs, core, stream)
  pl.when(step == 0)(stream.prime)
  pl.when(step == 0)(rows.prime)
  for name in ('d_index_q', 'd_weights'):
    refs[name][...] = jnp.zeros(refs[name].shape, jnp.float32)

  def chunk(c, carry):
    _chunk(s, stream, rows, (block, c), refs)
    return carry

  lax.fori_loop(0, counts[block], chunk, 0)
  pl.when(step == steps - 1)(rows.finish)
  pl.when(step == steps - 1)(stream.finish)


def zero_sums(keys: jax.Array, sizes: Sizes) -> jax.Array:
  """What `backward` sums the index keys' gradients in: one array a core.

  Args:
    keys: of the layout. Gathered, its rows behind the last key are those of `layout.keep_apart`.
    sizes: static sizes.

  Returns:
    Zeros [cores * (S + C), J] float32 (dense), or for every core the rows of `keys` with zeros
    behind each [cores * S, 1, W + J] uint32 (gathered).
  """
  b = sizes.blocks
  if b.gather:
    rows = jnp.pad(keys, ((0, 0), (0, 0), (sizes.index_dim, 0)))
    return jnp.tile(rows, (b.cores, 1, 1))
  return jnp.zeros((b.cores * (keys.shape[0] + b.keys), sizes.index_dim), jnp.float32)


def total(sums: jax.Array, rows: int, sizes: Sizes) -> jax.Array:
  """The gradients of the first `rows` index keys from all cores' sums, [rows, J] float32."""
  b = sizes.blocks
  if b.gather:
    sums = lax.bitcast_convert_type(sums[:, 0, : sizes.index_dim], jnp.float32)
  return jnp.sum(sums.reshape(b.cores, -1, sizes.index_dim)[:, :rows], axis=0)


def backward(
  q: jax.Array,
  lse: jax.Array,
  index_q: jax.Array,
  weights: jax.Array,
  per_query: jax.Array,
  keys: jax.Array | None,
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
    q, lse, index_q, weights, lists, masks, starts, counts, base, sizes, interpret: as in
      `kernel_forward.forward`; gathered lists, masks and counts from `layout.keep_apart`.
    keys: as in `kernel_forward.forward` (dense), or None: they are in `sums` (gathered).
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
    'write_sem': pltpu.SemaphoreType.DMA,
  }
  if b.gather:
    scratch |= {
      'packed': pltpu.VMEM((2 * b.keys, 1, sums.shape[2]), jnp.uint32),
      'sum': pltpu.VMEM((b.keys, 1, sizes.index_dim), jnp.uint32),
      'before': pltpu.VMEM((b.keys, sizes.index_dim), jnp.float32),
      'row_ids': pltpu.SMEM((1, b.keys), jnp.int32),
      'row_id_sem': pltpu.SemaphoreType.DMA,
    }
  else:
    scratch |= {
      'gradient': pltpu.VMEM((b.keys, sizes.index_dim), jnp.float32),
      'sum': pltpu.VMEM((b.keys, sizes.index_dim), jnp.float32),
      'read_sem': pltpu.SemaphoreType.DMA,
    }
  names = (*inputs, 'd_index_q', 'd_weights', 'sums', *scratch)
  width = b.heads * sizes.width + 3 * sizes.index_heads * sizes.index_dim
  out_shape = [
    jax.ShapeDtypeStruct(index_q.shape, jnp.float32),
    jax.ShapeDtypeStruct(weights.shape, jnp.float32),
    jax.ShapeDtypeStruct(sums.shape, sums.dtype),
  ]
  # A row's sum is read and written, its id read once more for that. Filler chunks are few.
  gradient = 2 * 4 * sizes.index_dim + (4 if b.gather else 0)
  chunks = masks.shape[1] - (layout.APART if b.gather else 0)
  real = jax.ShapeDtypeStruct((masks.shape[0], chunks, *masks.shape[2:]), masks.dtype)
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
      real, width, b.key_bytes + gradient, q, lse, index_q, weights, per_query,
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
