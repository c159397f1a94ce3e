"""Forward kernel: each query's KL in one pass over its keys.

With the attention's log-sum-exp known, only the index softmax is carried along:

  kl = sum_s p (log p - I) + (sum_s p) log sum_s exp(I)
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_kl import tiles
from pallas_kernels.indexer_kl.tiles import LOWEST, MASKED, Sizes
from pallas_kernels.sparse_mla.layout import LANES
from pallas_kernels.sparse_mla.stream import LOG2_E, Stream

# Rows of the running state and of the result.
_HIGHEST, _TOTAL, _CROSS, _MASS = range(4)
KL, INDEX_LSE, MASS = range(3)
STATE_ROWS = 8


def _update(s: Sizes, refs, unit: int, sums: tuple[jax.Array, jax.Array]) -> None:
  """Adds one unit's keys, [unit, 128] each of target and index scores, to the running state."""
  chosen = tiles.selected(s, unit, refs)
  target = jnp.where(chosen, sums[0], 0.0)
  scores = jnp.where(chosen, sums[1], MASKED)
  state = refs['state']

  def add(row, x):
    state[row : row + 1] += jnp.sum(x, axis=0, keepdims=True)

  before = state[_HIGHEST : _HIGHEST + 1]
  highest = jnp.maximum(before, jnp.max(scores, axis=0, keepdims=True))
  state[_HIGHEST : _HIGHEST + 1] = highest
  state[_TOTAL : _TOTAL + 1] *= jnp.exp2((before - highest) * LOG2_E)
  add(_TOTAL, jnp.exp2((scores - highest) * LOG2_E))
  add(_CROSS, target * (jnp.log(jnp.maximum(target, tiles.SMALLEST_TARGET)) - scores))
  add(_MASS, target)


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
  pl.when(step == 0)(stream.prime)
  state = refs['state']
  state[...] = jnp.zeros(state.shape, jnp.float32)
  state[_HIGHEST : _HIGHEST + 1] = jnp.full((1, LANES), LOWEST, jnp.float32)
  parts = s.units * s.groups

  def chunk(c, carry):
    tick, words, keys = stream.begin((block, c))
    tiles.spread_masks(refs, words)

    def copies(part):
      if b.gather:
        stream.issue_rows(tick, part * b.keys // parts, (part + 1) * b.keys // parts)

    def sums(unit):
      scores = tiles.index_scores(s, unit, refs, keys)
      target = tiles.target(s, unit, refs, keys, lambda g: copies(unit * s.groups + g))
      return target, scores

    tiles.pipelined(s.units, sums, functools.partial(_update, s, refs))
    return carry

  lax.fori_loop(0, counts[block], chunk, 0)
  total = state[_TOTAL : _TOTAL + 1]
  index_lse = state[_HIGHEST : _HIGHEST + 1] + jnp.log(jnp.maximum(total, 1e-37))
  index_lse = jnp.where(total > 0, index_lse, 0.0)
  mass = state[_MASS : _MASS + 1]
  out = refs['out']
  out[0] = jnp.zeros((STATE_ROWS, LANES), jnp.float32)
  out[0, KL : KL + 1] = state[_CROSS : _CROSS + 1] + mass * index_lse
  out[0, INDEX_LSE : INDEX_LSE + 1] = index_lse
  out[0, MASS : MASS + 1] = mass
  pl.when(step == steps - 1)(stream.finish)


def query_inputs(sizes: Sizes, steps: int, q, lse, index_q, weights) -> dict[str, Any]:
  """(BlockSpec, array) of what both kernels take per query block, by name."""
  b = sizes.blocks

  def rows(size, width):
    return pl.BlockSpec((size, width), lambda core, step, *_: (core * steps + step, 0))

  def row(size):
    return pl.BlockSpec((1, 1, size), lambda core, step, *_: (core * steps + step, 0, 0))

  return {
    'q': (rows(b.rows, sizes.width), q),
    'lse': (row(b.rows), lse),
    'index_q': (rows(sizes.index_rows, sizes.index_dim), index_q),
    'weights': (row(sizes.index_rows), weights),
  }


def key_inputs(keys, lists, masks) -> dict[str, Any]:
  """(BlockSpec, array) of what stays in HBM, by name."""
  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
  found = {'masks_hbm': masks, 'keys_hbm': keys, 'lists': lists}
  return {name: (anywhere, x) for name, x in found.items() if x is not None}


def forward(
  q: jax.Array,
  lse: jax.Array,
  index_q: jax.Array,
  weights: jax.Array,
  keys: jax.Array,
  lists: jax.Array | None,
  masks: jax.Array,
  starts: jax.Array,
  counts: jax.Array,
  base: jax.Array,
  sizes: Sizes,
  interpret,
) -> jax.Array:
  """[G, 8, 128] float32: rows KL, INDEX_LSE and MASS (the sum of the target), lane m query m.

  Args:
    q: [G * N * M, padded L + R], heads first within a block.
    lse: [G, 1, N * M] float32, base 2.
    index_q: [G * I * M, padded J].
    weights: [G, 1, I * M] float32.
    keys: packed rows [S, 1, W] uint32 (gathered), or [S, F] (dense): latents, then index keys.
    lists: [G, chunks, 1, C] int32 row ids, or None (dense).
    masks: [G, chunks, 1, C] int32, bit m for query m of the block.
    starts, counts: [G] int32, the chunks of each block.
    base: [G] int32, first row of the block's sequence (dense).
    sizes: static sizes.
    interpret: passed to `pallas_call`.
  """
  total = masks.shape[0]
  steps = total // sizes.blocks.cores
  inputs = query_inputs(sizes, steps, q, lse, index_q, weights) | key_inputs(keys, lists, masks)
  scratch = sizes.blocks.scratch() | {
    'words': pltpu.VMEM((sizes.blocks.keys, LANES), jnp.int32),
    'state': pltpu.VMEM((STATE_ROWS, LANES), jnp.float32),
  }
  names = (*inputs, 'out', *scratch)
  b = sizes.blocks
  width = b.heads * sizes.width + sizes.index_heads * sizes.index_dim
  out = jax.ShapeDtypeStruct((total, STATE_ROWS, LANES), jnp.float32)
  return pl.pallas_call(
    functools.partial(_kernel, sizes, names=names),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(sizes.blocks.cores, steps),
      in_specs=[spec for spec, _ in inputs.values()],
      out_specs=pl.BlockSpec(
        (1, STATE_ROWS, LANES), lambda core, step, *_: (core * steps + step, 0, 0)
      ),
      scratch_shapes=list(scratch.values()),
    ),
    out_shape=out,
    cost_estimate=b.cost(masks, width, b.key_bytes, q, lse, index_q, weights, out),
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      disable_bounds_checks=True,
      vmem_limit_bytes=60 << 20,
    ),
    interpret=interpret,
    name='indexer_kl_forward',
  )(starts, counts, base, *[value for _, value in inputs.values()])
