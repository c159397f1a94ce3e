"""What the benchmark compiles of this op. A unit of work is one chunk of keys for a block of
queries."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels.shapes import Decode
from pallas_kernels.sparse_mla import (
  api,
  kernel_backward,
  kernel_forward,
  kernel_lists,
  layout,
  paged,
)


class SparseMla(NamedTuple):
  """A call of `sparse_mla`, or of its gradient."""

  name: str
  regime: str
  time: int  # T
  keys: int  # S
  backward: bool = False
  heads: int = 64  # N
  latent_dim: int = 512  # L
  rope_dim: int = 64  # R
  topk: int = 2048  # K
  batch: int = 1
  dtype: str = 'bfloat16'


SHAPES = (
  SparseMla('train-4k', 'train', 4096, 4096),
  SparseMla('train-32k', 'train', 4096, 32_768),
  SparseMla('train-200k', 'train', 4096, 202_752),
  SparseMla('train-4k-backward', 'train', 4096, 4096, backward=True),
  SparseMla('train-32k-backward', 'train', 4096, 32_768, backward=True),
  SparseMla('train-200k-backward', 'train', 4096, 202_752, backward=True),
)


def _config(shape: SparseMla, chip: str, tuning: api.Tuning | None) -> api.Config:
  width = shape.latent_dim + shape.rope_dim
  return api.make_config(
    width**-0.5, shape.latent_dim, shape.keys, chip=chip, forward=tuning, backward=tuning
  )


def build(shape: SparseMla, chip: str, tuning: api.Tuning | None = None):
  """(function, abstract arguments) of the kernel for 'v5p', 'v6e' or 'tpu7x'.

  The kernel alone, its lists given: `sparse_mla_lists` is a case of its own. `tuning` are block
  sizes in place of the chip's.
  """
  s = shape
  c = _config(shape, chip, tuning)
  b = api._blocks(
    c, c.backward if s.backward else c.forward, s.heads, s.latent_dim + s.rope_dim, s.dtype
  )

  def struct(*dims, dtype=s.dtype):
    return jax.ShapeDtypeStruct((s.batch, *dims), dtype)

  def arrange(q, latents, indices, dout, lse):
    arguments = {
      'q': api._rows(layout.pad_features(q, s.latent_dim), b, b.features),
      'keys': api._keys(latents, c, b),
      **api._selection(indices, s.keys, c, b),
    }
    if s.backward:
      arguments |= {'dout': api._rows(dout, b, b.latent), 'lse': api._per_row(lse, b)}
      arguments['delta'] = arguments['lse']
      arguments['sums'] = kernel_backward.zero_sums(arguments['keys'].shape[0], b)
    return arguments

  arguments = jax.eval_shape(
    arrange,
    struct(s.time, s.heads, s.latent_dim + s.rope_dim),
    struct(s.keys, s.latent_dim + s.rope_dim),
    struct(s.time, s.topk, dtype=jnp.int32),
    struct(s.time, s.heads, s.latent_dim),
    struct(s.time, s.heads, dtype=jnp.float32),
  )
  kernel: Callable[..., Any] = kernel_forward.forward
  if s.backward:
    kernel = functools.partial(
      kernel_backward.backward, sequence_keys=layout.round_up(s.keys, b.keys)
    )
  return lambda arguments: kernel(**arguments, blocks=b, interpret=False), (arguments,)


def work(shape: SparseMla, chip: str) -> tuple[float, float, float, float]:
  """(queries, useful FLOPs, bytes of HBM that must move, bytes that move) of a unit.

  `queries` is the share of its block's queries that a chunk is worth when a query reads `topk`
  keys, which holds for the gathered regime when the selections of a block coincide.
  """
  c = _config(shape, chip, None)
  regime, t = c.regime, c.backward if shape.backward else c.forward
  width = shape.latent_dim + shape.rope_dim
  widths = 3 * width + 2 * shape.latent_dim if shape.backward else width + shape.latent_dim
  gradient = (8 * width, 8 * 640) if shape.backward and regime == 'gather' else (0, 0)
  row = 1536 if regime == 'gather' else 1280
  return (
    t.queries * t.keys / shape.topk,
    2.0 * shape.heads * widths * t.keys * t.queries,
    t.keys * (2.0 * width + gradient[0]),
    # Masks and row ids; for gradients ids are read three times.
    t.keys * (row + (16.0 if gradient[1] else 8.0) + gradient[1]),
  )


class Lists(NamedTuple):
  """Selections of T queries, M in a block, that become the lists of the gathered kernels."""

  name: str
  regime: str
  queries: int  # M
  time: int = 16_384  # T
  topk: int = 2048  # K


LISTS = tuple(Lists(f'blocks-of-{m}', 'train', m) for m in (2, 4, 8, 16))


def build_lists(shape: Lists):
  """(function, abstract arguments) of the kernel that makes the unions, the same for every chip."""
  lists, run = kernel_lists.sizes(shape.queries, shape.topk)
  blocks = layout.round_up(shape.time // shape.queries, kernel_lists.LANES)
  entries = (lists * run // kernel_lists.SUBLANES, kernel_lists.SUBLANES, blocks)
  merge = functools.partial(kernel_lists.merge, lists=lists, run=run)
  return merge, (jax.ShapeDtypeStruct(entries, jnp.int32),)


def work_lists(shape: Lists) -> tuple[float, float, float, float]:
  """As `work`, of one step of the grid, 128 blocks; rows are read once, those of one query written."""
  queries = kernel_lists.LANES * shape.queries
  entries = 4.0 * shape.topk * queries
  return queries, 0.0, entries + 8.0 * shape.topk * kernel_lists.LANES, 3 * entries


def loops_lists(shape: Lists) -> tuple[tuple[str | None, float], ...]:
  """See `Op.loops`."""
  lists, run = kernel_lists.sizes(shape.queries, shape.topk)
  n = lists * run // kernel_lists.SUBLANES
  return (('ends', 1), *kernel_lists.loops(n, run))


def build_decode(shape: Decode, chip: str, chunk: int | None = None):
  """(function, abstract arguments) of `sparse_mla_paged` on packed pages, lists of rows given.

  The lists of several queries are made by a kernel of their own, `sparse_mla_lists`.
  `chunk` are keys of a chunk in place of the chip's.
  """
  s = shape
  width = s.latent_dim + s.rope_dim
  regime = paged.choose_regime(s.keys)
  c = api.make_config(width**-0.5, s.latent_dim, s.keys, regime, chip)
  q = jax.ShapeDtypeStruct((s.batch, s.time, s.heads, width), s.dtype)
  b = paged.make_blocks(
    c, q.shape, q.dtype, s.page_size, chunk or paged.choose_chunk(chip, c.regime)
  )
  pool = (s.batch * s.keys // s.page_size + 1, s.page_size)
  selection = jax.eval_shape(
    lambda indices, table: paged.select(indices, table, pool, b),
    jax.ShapeDtypeStruct((s.batch, s.time, s.topk), jnp.int32),
    jax.ShapeDtypeStruct((s.batch, s.keys // s.page_size), jnp.int32),
  )
  pages = jax.ShapeDtypeStruct((*pool, 1, b.words), jnp.uint32)
  return functools.partial(paged.attend, b=b, latent_dim=s.latent_dim), (q, pages, selection)


def work_decode(shape: Decode, chip: str) -> tuple[float, float, float, float]:
  """As `work`, of a chunk of one sequence whose queries all select the same keys.

  In the dense regime a chunk is one of those of the whole context.
  """
  s = shape
  regime = paged.choose_regime(s.keys)
  chunk = paged.choose_chunk(chip, regime)
  read = s.keys if regime == 'dense' else s.topk
  width = s.latent_dim + s.rope_dim
  query = s.heads * (2 * width + 2 * s.latent_dim + 4)
  words = layout.packed_words(layout.round_up(width, layout.LANES), s.dtype)
  part = chunk / read
  return (
    part * s.time,
    part * s.time * 2.0 * s.heads * (width + s.latent_dim) * s.topk,
    part * (s.time * (query + 4 * s.topk) + s.topk * 2.0 * width),
    part * (s.time * query + read * (4.0 * words + 8)),
  )
