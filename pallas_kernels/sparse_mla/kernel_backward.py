"""Backward kernel: gradients for the queries of a block and for the latent rows it read.

Probabilities are recomputed from the log-sum-exp, keys on sublanes and heads on lanes, so that
only the product for dq needs a transpose:

  p = exp(scale q.k - lse)   ds = scale p (dout.v - delta)   delta = sum(dout out) - dlse
  dq += ds k                 dlatent[row] += ds^T q, and p^T dout on the value part

A row's gradient is a float32 sum over query blocks in their order, so repeated runs agree to the
bit: in VMEM for the dense regime, by read-add-write of the row in HBM for the gathered one. There
chunk i's rows are read only when chunk i - 1's are written, because two blocks may have selected
the same row. So that both are issued beside matmuls, a chunk adds and writes the rows of the one
before it in its first half and reads its own in its second:

  wait for the rows i - 1, add;
  first half: rows i - 1 -> HBM, most of the latents i + 2 -> VMEM;  wait for the writes;
  second half: rows i -> VMEM, the rest of the latents.

Each wait lets the matrix units run empty, hence one between chunks and one in the middle.
`Blocks.sum_beside` puts the sum beside the first matmuls, before which it runs otherwise. Writes
then start a quarter of a chunk later, so matmuls must take far longer than the copies.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla import layout
from pallas_kernels.sparse_mla.stream import LOG2_E, RING, Blocks, Stream, dot, each_row, row_tile


def _probabilities(b: Blocks, group: int, refs, keys):
  """p and ds of one group of queries, [C, rows] in the inputs' dtype."""
  size = b.together * b.heads
  rows = pl.ds(group * size, size)
  lane = lax.broadcasted_iota(jnp.int32, (1, size), 1)
  query = group * b.together + lax.div(lane, b.heads)
  words = jnp.concatenate([refs['words'][...]] * (-(-size // layout.LANES)), axis=1)[:, :size]
  chosen = (words >> query) & 1 == 1
  s = dot(keys(slice(None)), refs['q'][rows], (1, 1), b)
  p = jnp.where(chosen, jnp.exp2(s * (b.scale * LOG2_E) - refs['lse'][0, :, rows]), 0.0)
  dp = dot(keys(slice(0, b.latent)), refs['dout'][rows], (1, 1), b)
  ds = (p * b.scale) * (dp - refs['delta'][0, :, rows])
  return p.astype(b.dtype), ds.astype(b.dtype)


def _groups(b: Blocks, refs, keys, write, before):
  """Gradients of all groups; `write` takes the rows' gradients, `before(group)` starts copies.

  The next group's probabilities come before this group's gradients, so that the matrix unit has
  work while the vector unit exponentiates.
  """
  groups = b.queries // b.together
  size = b.together * b.heads
  p, ds = _probabilities(b, 0, refs, keys)
  for group in range(groups):
    before(group)
    following = _probabilities(b, group + 1, refs, keys) if group + 1 < groups else (None, None)
    rows = pl.ds(group * size, size)
    refs['dq_sum'][rows] += dot(ds, keys(slice(None)), (0, 0), b)
    write(group, dot(ds, refs['q'][rows], (1, 0), b), dot(p, refs['dout'][rows], (1, 0), b))
    p, ds = following


# Whose row ids are where in `row_ids`: of the chunk that reads, and of the one before, that writes.
# At an address of its own an id takes one scalar operation less than in the ring of `Stream`.
_READ, _WRITE = range(2)


class _Rows:
  """Read-add-write of the chunks' gradient rows in HBM."""

  def __init__(self, b: Blocks, refs, core, stream: Stream):
    self.b, self.r, self.stream = b, refs, stream
    # Every core sums into an array of its own.
    size = _rows_per_core(refs['sums'], b)
    self.sums = refs['sums'].at[pl.ds(core * size, size)]

  def ids(self, use, position):
    """The copy of a chunk's row ids for `_READ` or `_WRITE`."""
    target, sem = self.r['row_ids'].at[use], self.r['row_id_sems'].at[use]
    return self.stream.id_copy(position, target, sem)

  def _row(self, use, i):
    return self.sums.at[self.r['row_ids'][use, 0, i]]

  def _read_row(self, i):
    old, sem = self.r['old'], self.r['read_sem']
    pltpu.make_async_copy(self._row(_READ, i), old.at[i], sem).start()

  def read(self, begin, end):
    """Starts reading rows [begin, end) of this chunk."""
    each_row(self.b, begin, end, self._read_row)

  def wait_read(self, position):
    """Waits for the rows that the chunk before this one read, and for its row ids."""
    self.ids(_WRITE, position).wait()
    pltpu.make_async_copy(self.r['old'], self.r['old'], self.r['read_sem']).wait()

  def add(self):
    """Adds the gradients of the chunk before this one to its rows."""
    for tile in range(self.b.features // layout.LANES):
      view, index = row_tile(self.b, self.r['old'], 0, tile)
      view[index] += self.r['gradient'][:, tile * layout.LANES : (tile + 1) * layout.LANES]

  def _write_row(self, first, i):
    old, sem = self.r['old'], self.r['write_sem']
    pltpu.make_async_copy(old.at[first + i], self._row(_WRITE, i), sem).start()

  def write(self, tick, begin, end):
    """Starts writing rows [begin, end) of the chunk before this one."""
    # 0, but the compiler does not know: addresses that it knows it would compute once for reads
    # and writes and keep, for which there are too few scalar registers.
    first = tick & RING
    each_row(self.b, begin, end, functools.partial(self._write_row, first))

  def wait_write(self):
    """Waits for the rows that were written; only then may this chunk's be read."""
    pltpu.make_async_copy(self.r['old'], self.r['old'], self.r['write_sem']).wait()

  def prime(self, position):
    """The chunk before the first one: the same rows, to which it adds zeros."""
    self.r['gradient'][...] = jnp.zeros(self.r['gradient'].shape, jnp.float32)
    self.ids(_WRITE, position).start()
    ids = self.ids(_READ, position)
    ids.start()
    ids.wait()

    def read(i, carry):
      self._read_row(i)
      return carry

    lax.fori_loop(0, self.b.keys, read, 0)

  def finish(self, position):
    """Adds and writes the rows of the last chunk, beside which there is no other."""
    self.wait_read(position)
    self.add()

    def write(i, carry):
      self._write_row(0, i)
      return carry

    lax.fori_loop(0, self.b.keys, write, 0)
    self.wait_write()


def _rows_per_core(sums, b: Blocks) -> int:
  """Rows of one core's array of sums."""
  return sums.shape[0] // b.cores


def _gathered_chunk(b: Blocks, stream: Stream, rows: _Rows, position, refs):
  """Three copies a row, spread over the groups, so that the matmuls hide them."""
  groups = b.queries // b.together
  half = max(1, groups // 2)
  early = b.keys * 3 // 4  # Rows fetched in the first half, which also unpacks the keys.
  rows.wait_read(position)
  if not b.sum_beside:
    rows.add()
  tick, words, keys = stream.begin(position)
  if b.sum_beside:
    rows.add()
  rows.ids(_READ, position).start()
  refs['words'][...] = jnp.broadcast_to(words, (layout.LANES, b.keys)).T

  def accumulate(group, ds_q, p_dout):
    gradient = refs['gradient']
    if group:
      gradient[...] += ds_q
    else:
      gradient[...] = ds_q
    gradient[:, : b.latent] += p_dout

  def turn():
    rows.wait_write()
    rows.ids(_READ, position).wait()
    rows.ids(_WRITE, position).start()
    stream.issue_rows(tick, early, b.keys)
    stream.start_ids(position)

  def before(group):
    if group < half:
      rows.write(tick, group * b.keys // half, (group + 1) * b.keys // half)
      stream.issue_rows(tick, group * early // half, (group + 1) * early // half)
      return
    if group == half:
      turn()
    part, parts = group - half, groups - half
    rows.read(part * b.keys // parts, (part + 1) * b.keys // parts)

  _groups(b, refs, keys, accumulate, before)
  if half == groups:
    turn()
    rows.read(0, b.keys)


def _dense_chunk(b: Blocks, stream: Stream, position, first_row, refs):
  block, chunk = position
  _, words, keys = stream.begin(position)
  refs['words'][...] = jnp.broadcast_to(words, (layout.LANES, b.keys)).T
  rows = pl.ds(pl.multiple_of((stream.starts[block] + chunk) * b.keys, b.keys), b.keys)

  def write(group, ds_q, p_dout):
    refs['total'][rows, :] += ds_q
    refs['total'][rows, : b.latent] += p_dout

  _groups(b, refs, keys, write, lambda group: None)


def _kernel(b: Blocks, starts, counts, base, *buffers, names):
  refs: dict[str, Any] = dict(zip(names, buffers, strict=True))
  core, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
  block, first = core * steps + step, core * steps
  refs['dense_base'] = base
  stream = Stream(
    b, starts, counts, refs.get('lists'), refs['masks_hbm'], refs['keys_hbm'], refs, first,
    first + steps - 1, ring=1,
  )  # fmt: skip
  pl.when(step == 0)(stream.prime)
  refs['dq_sum'][...] = jnp.zeros(refs['dq_sum'].shape, jnp.float32)
  if b.gather:
    rows = _Rows(b, refs, core, stream)
    pl.when(step == 0)(lambda: rows.prime((block, 0)))

    def chunk(c, carry):
      _gathered_chunk(b, stream, rows, (block, c), refs)
      return carry
  else:
    total = refs['total']

    def same_as(other):
      return base[block] == base[jnp.clip(other, first, first + steps - 1)]

    def sums():
      row = core * _rows_per_core(refs['sums'], b) + base[block]
      return refs['sums'].at[pl.ds(pl.multiple_of(row, b.keys), total.shape[0])]

    pl.when((step == 0) | ~same_as(block - 1))(lambda: pltpu.sync_copy(sums(), total))

    def chunk(c, carry):
      _dense_chunk(b, stream, (block, c), base[block], refs)
      return carry

  lax.fori_loop(0, counts[block], chunk, 0)
  refs['dq'][...] = refs['dq_sum'][...].astype(refs['dq'].dtype)
  if b.gather:
    pl.when(step == steps - 1)(lambda: rows.finish((block, 0)))
  else:
    pl.when((step == steps - 1) | ~same_as(block + 1))(lambda: pltpu.sync_copy(total, sums()))

  pl.when(step == steps - 1)(stream.finish)


def zero_sums(rows: int, blocks: Blocks) -> jax.Array:
  """Zero gradients of the rows of `keys`, one array a core: [cores * rows, (1,) F] float32."""
  unit = (1,) if blocks.gather else ()
  return jnp.zeros((blocks.cores * rows, *unit, blocks.features), jnp.float32)


def backward(
  q: jax.Array,
  dout: jax.Array,
  lse: jax.Array,
  delta: jax.Array,
  keys: jax.Array,
  sums: jax.Array,
  lists: jax.Array | None,
  masks: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  base: jax.Array,
  sequence_keys: int,
  blocks: Blocks,
  interpret,
) -> tuple[jax.Array, jax.Array]:
  """Gradients dq [G * M * N, F], and `sums` with the keys' gradients added.

  Args:
    q, keys, lists, masks, starts, counts, base, blocks, interpret: as in `forward`.
    dout: [G * M * N, padded L].
    lse: [G, 1, M * N] float32, base 2, finite (any value where there is no key).
    delta: [G, 1, M * N] float32, sum(dout * out) - dlse.
    sums: as `zero_sums` makes it; consumed.
    sequence_keys: keys of one sequence, padded (dense).
  """
  total = masks.shape[0]
  steps = total // blocks.cores

  def row_block(width):
    return pl.BlockSpec((blocks.rows, width), lambda core, step, *_: (core * steps + step, 0))

  per_row = pl.BlockSpec((1, 1, blocks.rows), lambda core, step, *_: (core * steps + step, 0, 0))
  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
  inputs: dict[str, Any] = {
    'q': (row_block(blocks.features), q),
    'dout': (row_block(blocks.latent), dout),
    'lse': (per_row, lse),
    'delta': (per_row, delta),
    'masks_hbm': (anywhere, masks),
    'keys_hbm': (anywhere, keys),
  }
  if blocks.gather:
    inputs['lists'] = (anywhere, lists)
  inputs['sums_in'] = (anywhere, sums)
  scratch = blocks.scratch() | {
    'words': pltpu.VMEM((blocks.keys, layout.LANES), jnp.int32),
    'dq_sum': pltpu.VMEM((blocks.rows, blocks.features), jnp.float32),
  }
  if blocks.gather:
    scratch |= {
      'gradient': pltpu.VMEM((blocks.keys, blocks.features), jnp.float32),
      'old': pltpu.VMEM((blocks.keys, 1, blocks.features), jnp.float32),
      'row_ids': pltpu.SMEM((2, 1, blocks.keys), jnp.int32),
      'row_id_sems': pltpu.SemaphoreType.DMA((2,)),
      'read_sem': pltpu.SemaphoreType.DMA,
      'write_sem': pltpu.SemaphoreType.DMA,
    }
  else:
    scratch['total'] = pltpu.VMEM((sequence_keys, blocks.features), jnp.float32)
  names = (*inputs, 'dq', 'sums', *scratch)
  width = blocks.heads * (3 * blocks.features + 2 * blocks.latent)
  # A gathered row's gradient is read and written by every block, a sequence's once; its id is read
  # for that twice more.
  gradient = 2 * 4 * blocks.features + 8 if blocks.gather else 0
  return pl.pallas_call(
    functools.partial(_kernel, blocks, names=names),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(blocks.cores, steps),
      in_specs=[spec for spec, _ in inputs.values()],
      out_specs=[row_block(blocks.features), anywhere],
      scratch_shapes=list(scratch.values()),
    ),
    out_shape=[
      jax.ShapeDtypeStruct((q.shape[0], blocks.features), blocks.dtype),
      jax.ShapeDtypeStruct(sums.shape, jnp.float32),
    ],
    cost_estimate=blocks.cost(
      masks, width, blocks.key_bytes + gradient, q, q, dout, lse, delta,
      *([] if blocks.gather else [sums, sums]),
    ),
    input_output_aliases={3 + list(inputs).index('sums_in'): 1},
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      disable_bounds_checks=True,
      vmem_limit_bytes=60 << 20,
    ),
    interpret=interpret,
    name='sparse_mla_backward',
  )(starts, counts, base, *[value for _, value in inputs.values()])  # fmt: skip
