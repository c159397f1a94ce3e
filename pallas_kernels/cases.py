"""What `bench` compiles: every op's shapes, its work, and how its kernel's loops add up to a call.

An op is one entry of `OPS`. Loops are named in the order of the program, since a schedule has no
names: `Op.loops` must have as many entries as the kernel has loops, or the bench says so.
"""

import functools
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from pallas_kernels import peers, shapes
from pallas_kernels.indexer import kernel_decode, kernel_tpu
from pallas_kernels.indexer import paged as indexer_paged
from pallas_kernels.indexer.api import indexer_topk
from pallas_kernels.indexer_kl import cases as indexer_kl_cases
from pallas_kernels.schedule import Chip
from pallas_kernels.sparse_mla import cases as sparse_mla_cases


class LoopsChangedError(ValueError):
  """A kernel has other loops than its `Op.loops` names."""


class Work(NamedTuple):
  """What one unit of the op's work (for example a block of queries) takes."""

  queries: float
  flops: float  # Useful ones.
  floor_bytes: float  # Bytes of HBM that any implementation must move.
  moved_bytes: float  # Bytes that this kernel moves.


class Op(NamedTuple):
  """A kernel to be measured."""

  name: str
  shapes: tuple[Any, ...]
  build: Callable[[Any, Chip], tuple[Callable[..., Any], tuple[Any, ...]]]
  work: Callable[[Any, Chip], Work]
  # (stage, how often it runs for one unit of work) of each loop in the program's order; stages of
  # equal name are added, a stage None is not counted. Without it the hottest loop is the unit.
  loops: Callable[[Any, Chip], tuple[tuple[str | None, float], ...]] | None = None


def struct(shape, dtype) -> jax.ShapeDtypeStruct:
  """An abstract array."""
  return jax.ShapeDtypeStruct(shape, dtype)


def _indexer_build(shape: shapes.Indexer, chip: Chip):
  s, b, t = shape, shape.batch, shape.time
  arguments = (
    struct((b, t, s.heads, s.dim), s.dtype),
    struct((b, t, s.heads), jnp.float32),
    struct((b, s.keys, s.dim), s.dtype),
    struct((b, t), jnp.int32),
    struct((b, t), jnp.int32),
    struct((b, s.keys), jnp.int32),
  )
  call = functools.partial(
    indexer_topk, topk=s.topk, implementation='tpu', block_q=s.block_q, vmem=chip.vmem
  )
  return call, arguments


def _indexer_blocks(shape: shapes.Indexer, chip: Chip) -> dict[str, int]:
  return kernel_tpu.choose_blocks(shape.time, shape.keys, shape.block_q, chip.vmem)


def _indexer_block(shape: shapes.Indexer, chip: Chip) -> int:
  return _indexer_blocks(shape, chip)['block_q']


def _indexer_work(shape: shapes.Indexer, chip: Chip) -> Work:
  """Of a block of queries that sees all keys."""
  queries = min(_indexer_block(shape, chip), shape.time)
  per_query = shape.heads * (2 * shape.dim + 4) + 4 * shape.topk + 16
  keys = shape.keys * (2 * shape.dim + 4)
  return Work(
    queries=queries,
    flops=2.0 * queries * shape.keys * shape.heads * shape.dim,
    # With all queries in VMEM at once the keys would be read once.
    floor_bytes=queries * per_query + keys * queries / max(queries, shape.time),
    # Segments take a padded tile: 4 KiB for 256 keys.
    moved_bytes=queries * per_query + shape.keys * (2 * shape.dim + 16),
  )


# Of the search for the threshold, sweeps that depend on the scores: as many as random scores need.
_BISECTIONS = 14


def _indexer_loops(shape: shapes.Indexer, chip: Chip):
  blocks = _indexer_blocks(shape, chip)
  layout = kernel_tpu.make_layout(
    shape.time, shape.keys, shape.topk, blocks['block_q'], blocks['step']
  )
  parts, groups = layout.parts, layout.groups
  steps = -(-shape.keys // (layout.step * groups))
  at_once = layout.at_once  # Passes and parts.
  cells = kernel_tpu.PART // groups  # Rows of each half of the cells.
  pieces = max(1, 2 * cells // layout.step)
  folds = parts * groups > kernel_tpu.FOLD_ABOVE
  # Selected keys of one row of words, and four standard deviations for the fullest of 128 rows.
  row = shape.topk * min(1.0, kernel_tpu.PART / shape.keys)
  passes = math.ceil(min(shape.topk, row + 4 * row**0.5) / 128)
  return (
    ('scores', steps),  # The grid.
    (None, 0),  # Rows after the last step.
    ('threshold', 16),  # The sample ...
    ('threshold', 16 * parts),
    ('threshold', kernel_tpu.NARROWING),  # Interpolation ...
    ('threshold', kernel_tpu.NARROWING * steps),
    ('threshold', folds * cells / 128),  # Folding ...
    ('threshold', folds * cells / 128 * parts * groups),
    # Whether the cells are complete; a count of one piece is no loop.
    *((('threshold', folds * pieces),) if pieces > 1 else ()),
    ('threshold', folds * _BISECTIONS),  # Bisection among them ...
    *((('threshold', folds * _BISECTIONS * pieces),) if pieces > 1 else ()),
    ('threshold', (not folds) * _BISECTIONS),  # ... or over the tile.
    ('threshold', (not folds) * _BISECTIONS * steps),
    *((None, 0),) * 3,  # Ties.
    ('compaction', steps),  # Packing.
    ('compaction', math.ceil(parts / at_once[1])),  # Transposes.
    ('compaction', math.ceil(parts / at_once[1])),
    ('compaction', math.ceil(parts / at_once[1]) * math.ceil(passes / at_once[0])),
  )


def _paged_indexer_build(shape: shapes.Decode, chip: Chip):
  s = shape
  call = functools.partial(
    indexer_paged.indexer_topk_paged, topk=s.topk, implementation='tpu', chip=chip.name
  )
  return call, (
    struct((s.batch, s.time, s.index_heads, s.index_dim), s.dtype),
    struct((s.batch, s.time, s.index_heads), jnp.float32),
    struct((s.batch * s.keys // s.page_size + 1, s.page_size, s.index_dim), s.dtype),
    struct((s.batch, s.keys // s.page_size), jnp.int32),
    struct((s.batch, s.time), jnp.int32),
  )


def _paged_indexer_work(shape: shapes.Decode, chip: Chip) -> Work:
  """Of one sequence."""
  s = shape
  query = s.index_heads * (2 * s.index_dim + 4) + 4 * s.topk + 8
  floor = s.time * query + s.keys * 2.0 * s.index_dim
  # Weights are spread over 128 lanes; the results of a sequence have 8 rows.
  moved = 512 * s.index_heads * s.time + 8 * (4 * s.topk + 512)
  return Work(
    queries=s.time,
    flops=2.0 * s.time * s.keys * s.index_heads * s.index_dim,
    floor_bytes=floor,
    moved_bytes=floor + moved,
  )


# Sweeps of the search for the threshold that random scores need.
_SWEEPS = 13


def _paged_indexer_loops(shape: shapes.Decode, chip: Chip):
  sizes = kernel_decode.make_sizes(
    shape.time, shape.keys // shape.page_size, shape.page_size, shape.topk
  )
  layout = sizes.layout
  pieces = kernel_decode.pieces(sizes.chunks, sizes.queries)
  # As in `_indexer_loops`: the fullest of a part's rows.
  row = shape.topk * min(1.0, kernel_decode.CHUNK / shape.keys)
  passes = math.ceil(min(shape.topk, row + 4 * row**0.5) / 128)
  return (
    ('ends', 1),  # The grid: what runs once a sequence.
    *((None, 0),) * 2,  # The first copies.
    ('scores', sizes.chunks),
    (None, 0),  # Rows after the last chunk.
    ('threshold', _SWEEPS),
    ('threshold', _SWEEPS * pieces),
    *((None, 0),) * 3,  # Ties.
    ('compaction', layout.parts * layout.groups // 4),  # Packing.
    ('compaction', layout.parts),
    ('compaction', layout.parts * math.ceil(passes / kernel_decode.passes(layout))),
    (None, 0),  # The last copies.
  )


OPS: tuple[Op, ...] = (
  Op(
    'indexer_topk',
    tuple(shapes.select(shapes.Indexer)),
    _indexer_build,
    _indexer_work,
    _indexer_loops,
  ),
  Op(
    'sparse_mla',
    sparse_mla_cases.SHAPES,
    lambda shape, chip: sparse_mla_cases.build(shape, chip.name),
    lambda shape, chip: Work(*sparse_mla_cases.work(shape, chip.name)),
  ),
  Op(
    'sparse_mla_lists',
    sparse_mla_cases.LISTS,
    lambda shape, _: sparse_mla_cases.build_lists(shape),
    lambda shape, _: Work(*sparse_mla_cases.work_lists(shape)),
    lambda shape, _: sparse_mla_cases.loops_lists(shape),
  ),
  Op(
    'indexer_topk_paged',
    tuple(shapes.select(shapes.Decode)),
    _paged_indexer_build,
    _paged_indexer_work,
    _paged_indexer_loops,
  ),
  Op(
    'sparse_mla_paged',
    tuple(shapes.select(shapes.Decode)),
    lambda shape, chip: sparse_mla_cases.build_decode(shape, chip.name),
    lambda shape, chip: Work(*sparse_mla_cases.work_decode(shape, chip.name)),
  ),
  Op(
    'indexer_kl',
    indexer_kl_cases.SHAPES,
    lambda shape, chip: indexer_kl_cases.build(shape, chip.name),
    lambda shape, chip: Work(*indexer_kl_cases.work(shape, chip.name)),
  ),
)


def _peer_work(shape, chip: Chip) -> Work:
  del chip
  return Work(shape.queries, shape.flops, shape.bytes, shape.bytes)


# JAX's own kernels and a plain matmul, through the same reader: what the numbers are worth.
def _ragged_work(shape, chip: Chip) -> Work:
  m, k, n = peers.RAGGED_TILES[chip.name]
  return _peer_work(shape._replace(m=m, k=k, n=n), chip)


PEERS: tuple[Op, ...] = (
  Op('matmul', peers.MATMULS, lambda s, _: peers.matmul(s), _peer_work),
  Op('splash', peers.SPLASH, lambda s, _: peers.splash(s), _peer_work),
  Op('megablox', peers.GROUPED, lambda s, _: peers.grouped(s), _peer_work),
  Op('ragged_dot', peers.RAGGED, lambda s, _: peers.grouped(s), _ragged_work),
)


def find(name: str) -> tuple[Op, Any]:
  """'op/shape' -> (the op, the shape)."""
  op_name, shape_name = name.split('/')
  op = next(op for op in (*OPS, *PEERS) if op.name == op_name)
  return op, next(shape for shape in op.shapes if shape.name == shape_name)


def build(name: str, chip: Chip):
  """For `schedule.analyze`: 'op/shape' -> (function, abstract arguments)."""
  op, shape = find(name)
  return op.build(shape, chip)
