"""Kernels that write packed rows into a pool and fetch some out of it, one copy a place.

XLA's scatter and gather would want the pool in tiles of eight rows, and copy all of it into them.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla import layout

_STEP = 1024  # Places of one step of the grid, which its core's scalar memory holds.
_AHEAD = 32  # Copies under way.


def _move(copy, index):
  """Starts `copy(n, index[n])` for all that are not negative, and waits for them."""
  count = index.shape[-1]

  def when_there(n, do):
    place = index[0, 0, n]
    pl.when(place >= 0)(lambda: do(copy(n, place)))

  def body(n, carry):
    pl.when(n >= _AHEAD)(lambda: when_there(n - _AHEAD, lambda c: c.wait()))
    pl.when(n < count)(lambda: when_there(jnp.minimum(n, count - 1), lambda c: c.start()))
    return carry

  lax.fori_loop(0, count + _AHEAD, body, 0)


def _write_kernel(index, rows, pool_in, pool, sem):
  del pool_in  # The same memory as `pool`.
  first = pl.program_id(0) * index.shape[-1]

  def copy(n, place):
    return pltpu.make_async_copy(rows.at[first + n], pool.at[place], sem)

  _move(copy, index)


def _read_kernel(index, pool, out, sem, *, granule: int):
  first = pl.program_id(0) * index.shape[-1]

  def copy(n, place):
    source = pool.at[pl.ds(place * granule, granule)]
    return pltpu.make_async_copy(source, out.at[pl.ds((first + n) * granule, granule)], sem)

  _move(copy, index)


def _call(kernel, index, *arrays, name: str, moved: int, interpret: Any, **kwargs):
  step = min(_STEP, layout.round_up(index.shape[0], layout.LANES))
  index = layout.pad_to(index, 0, layout.round_up(index.shape[0], step), -1)
  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
  return pl.pallas_call(
    kernel,
    grid=(index.shape[0] // step,),
    in_specs=[
      pl.BlockSpec((1, 1, step), lambda i: (i, 0, 0), memory_space=pltpu.SMEM),
      *[anywhere] * len(arrays),
    ],
    out_specs=anywhere,
    scratch_shapes=[pltpu.SemaphoreType.DMA],
    compiler_params=pltpu.CompilerParams(dimension_semantics=('arbitrary',)),
    cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=2 * moved),
    interpret=interpret,
    name=name,
    **kwargs,
  )(index.reshape(-1, 1, step), *arrays)


def write_rows(pool: jax.Array, rows: jax.Array, target: jax.Array, interpret: Any) -> jax.Array:
  """The pool [S, 1, W] with row n of `rows` [N, 1, W] at `target[n]`, all different; nowhere at -1."""
  return _call(
    _write_kernel, target, rows, pool, name='sparse_mla_write', moved=rows.nbytes,
    interpret=interpret, input_output_aliases={2: 0},
    out_shape=jax.ShapeDtypeStruct(pool.shape, pool.dtype),
  )  # fmt: skip


def read_rows(pool: jax.Array, source: jax.Array, granule: int, interpret: Any) -> jax.Array:
  """[N * granule, 1, W]: of the pool [S, 1, W], for each `source[n]` its run of `granule` rows."""
  out = jax.ShapeDtypeStruct((source.shape[0] * granule, *pool.shape[1:]), pool.dtype)
  return _call(
    functools.partial(_read_kernel, granule=granule), source, pool, name='sparse_mla_read',
    moved=out.size * out.dtype.itemsize, interpret=interpret, out_shape=out,
  )  # fmt: skip
