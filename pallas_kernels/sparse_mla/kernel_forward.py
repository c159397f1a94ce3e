"""Forward kernel: flash attention of query blocks over a stream of key chunks."""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla import layout
from pallas_kernels.sparse_mla.stream import LOG2_E, Blocks, Stream, dot

_MASKED = -1e30  # Added to the logit of a key that a query did not select.
_LOWEST = -5e29  # Floor of the running maximum, so that a masked key's probability is exactly 0.


def _logits(b: Blocks, group: int, q_ref, keys, bias):
  """Masked base-2 logits [rows, C] of the heads of one group of queries."""
  q = q_ref[_rows(b, group)]
  s = dot(q, keys(slice(None)), (1, 1), b)
  s = s.reshape(b.together, b.heads, b.keys) * (b.scale * LOG2_E)
  return (s + bias[pl.ds(group * b.together, b.together)]).reshape(-1, b.keys)


def _update(b: Blocks, group: int, s, keys, m_ref, l_ref, acc_ref):
  """Online softmax step of one group of queries."""
  rows = _rows(b, group)
  m_before = m_ref[rows, :1]
  m = jnp.maximum(m_before, jnp.max(s, axis=1, keepdims=True))
  p = jnp.exp2(s - m)
  alpha = jnp.exp2(m_before - m)
  m_ref[rows] = jnp.broadcast_to(m, (rows.size, layout.LANES))
  total = l_ref[rows, :1] * alpha + jnp.sum(p, axis=1, keepdims=True)
  l_ref[rows] = jnp.broadcast_to(total, (rows.size, layout.LANES))
  mixed = dot(p.astype(b.dtype), keys(slice(0, b.latent)), (1, 0), b)
  acc_ref[rows] = acc_ref[rows] * alpha + mixed


def _rows(b: Blocks, group: int):
  size = b.together * b.heads
  return pl.ds(group * size, size)


def _kernel(b: Blocks, starts, counts, base, *buffers, names):
  refs: dict[str, Any] = dict(zip(names, buffers, strict=True))
  q_ref, out_ref, lse_ref = refs['q'], refs['out'], refs['lse']
  m_ref, l_ref, acc_ref = refs['m'], refs['l'], refs['acc']
  core, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
  block, first = core * steps + step, core * steps
  refs['dense_base'] = base
  stream = Stream(
    b, starts, counts, refs.get('lists'), refs['masks_hbm'], refs['keys_hbm'], refs, first,
    first + steps - 1, lengths=base if b.tails else None,
  )  # fmt: skip

  pl.when(step == 0)(stream.prime)
  m_ref[...] = jnp.full(m_ref.shape, _LOWEST, jnp.float32)
  l_ref[...] = jnp.zeros(l_ref.shape, jnp.float32)
  acc_ref[...] = jnp.zeros(acc_ref.shape, jnp.float32)

  groups = b.queries // b.together

  def chunk(c, carry):
    tick, words, keys = stream.begin((block, c))
    for query in range(b.queries):
      refs['bias'][query] = jnp.where((words >> query) & 1 == 1, 0.0, _MASKED)
    s = _logits(b, 0, q_ref, keys, refs['bias'])
    for group in range(groups):
      if b.gather:
        stream.issue_rows(tick, group * b.keys // groups, (group + 1) * b.keys // groups)
      # The next logits before this softmax: the matrix unit has work while the vector unit
      # exponentiates.
      following = None
      if group + 1 < groups:
        following = _logits(b, group + 1, q_ref, keys, refs['bias'])
      _update(b, group, s, keys, m_ref, l_ref, acc_ref)
      s = following
    return carry

  lax.fori_loop(0, counts[block], chunk, 0)
  total = l_ref[:, :1]
  empty = total == 0
  out_ref[...] = (acc_ref[...] / jnp.where(empty, 1.0, total)).astype(out_ref.dtype)
  lse = jnp.where(
    l_ref[...] == 0, -jnp.inf, m_ref[...] * (1 / LOG2_E) + jnp.log(jnp.maximum(l_ref[...], 1e-37))
  )
  lse_ref[0] = lse.T[:1]
  pl.when(step == steps - 1)(stream.finish)


def forward(
  q: jax.Array,
  keys: jax.Array,
  lists: jax.Array | None,
  masks: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  base: jax.Array,
  blocks: Blocks,
  interpret,
  cost: pl.CostEstimate | None = None,
) -> tuple[jax.Array, jax.Array]:
  """Output [G * M * N, padded L] and log-sum-exp [G, 1, M * N] float32 (nats).

  Args:
    q: [G * M * N, F].
    keys: packed rows [S, 1, W] uint32 (gathered), or [S, F] (dense).
    lists: [G, chunks, 1, C] int32 row ids, or None (dense). With a granule above 1 the last axis
      is C / granule, and an entry n stands for rows n * granule and following.
    masks: [G, chunks, 1, C] int32, bit m for query m of the block.
    starts, counts: [G] int32, the chunks of each block.
    base: [G] int32, first row of the block's sequence (dense); rows of its list, counted from
      chunk 0 (`Blocks.tails`).
    blocks: static sizes.
    interpret: passed to `pallas_call`.
    cost: what the compiler is told about the call, if not `blocks.cost`.
  """
  total = masks.shape[0]
  steps = total // blocks.cores

  def row_block(width):
    return pl.BlockSpec((blocks.rows, width), lambda core, step, *_: (core * steps + step, 0))

  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
  inputs: dict[str, Any] = {'q': (row_block(blocks.features), q), 'masks_hbm': (anywhere, masks)}
  inputs['keys_hbm'] = (anywhere, keys)
  if blocks.gather:
    inputs['lists'] = (anywhere, lists)
  scratch = blocks.scratch() | {
    'bias': pltpu.VMEM((blocks.queries, 1, blocks.keys), jnp.float32),
    'm': pltpu.VMEM((blocks.rows, layout.LANES), jnp.float32),
    'l': pltpu.VMEM((blocks.rows, layout.LANES), jnp.float32),
    'acc': pltpu.VMEM((blocks.rows, blocks.latent), jnp.float32),
  }
  names = (*inputs, 'out', 'lse', *scratch)
  out_shape = [
    jax.ShapeDtypeStruct((q.shape[0], blocks.latent), blocks.dtype),
    jax.ShapeDtypeStruct((total, 1, blocks.rows), jnp.float32),
  ]
  width = blocks.heads * (blocks.features + blocks.latent)
  return pl.pallas_call(
    functools.partial(_kernel, blocks, names=names),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(blocks.cores, steps),
      in_specs=[spec for spec, _ in inputs.values()],
      out_specs=[
        row_block(blocks.latent),
        pl.BlockSpec((1, 1, blocks.rows), lambda core, step, *_: (core * steps + step, 0, 0)),
      ],
      scratch_shapes=list(scratch.values()),
    ),
    out_shape=out_shape,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      disable_bounds_checks=True,
      vmem_limit_bytes=60 << 20,
    ),
    cost_estimate=cost or blocks.cost(masks, width, blocks.key_bytes, q, *out_shape),
    interpret=interpret,
    name='sparse_mla_forward',
  )(starts, counts, base, *[value for _, value in inputs.values()])
