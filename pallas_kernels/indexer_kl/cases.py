"""What the benchmark compiles of this op. A unit of work is one chunk of keys for a block of
queries."""

import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax

from pallas_kernels.indexer_kl import api, kernel_backward, kernel_forward, layout
from pallas_kernels.indexer_kl.reference import Visible
from pallas_kernels.sparse_mla.api import Regime
from pallas_kernels.sparse_mla.layout import LANES


class IndexerKl(NamedTuple):
  """A call of `indexer_kl`, or of its gradient."""

  name: str
  regime: str
  time: int  # T
  keys: int  # S
  stage: str = 'sparse'  # 'dense': the warm-up.
  backward: bool = False
  heads: int = 64  # N
  width: int = 576  # L + R
  index_heads: int = 32  # I
  index_dim: int = 128  # J
  topk: int = 2048  # K
  batch: int = 1
  dtype: str = 'bfloat16'


def _shapes():
  for stage in ('sparse', 'dense'):
    for length, keys in (('4k', 4096), ('32k', 32_768), ('200k', 202_752)):
      for backward in (False, True):
        name = f'{stage}-{length}' + '-backward' * backward
        yield IndexerKl(name, 'train', 4096, keys, stage, backward)


SHAPES = tuple(_shapes())


def _config(shape: IndexerKl, chip: str, tuning: api.Tuning | None = None):
  regime: Regime | None = 'dense' if shape.stage == 'dense' else None
  return api.make_config(
    shape.width**-0.5, shape.width, shape.keys, regime, chip, forward=tuning, backward=tuning
  )


def build(shape: IndexerKl, chip: str, tuning: api.Tuning | None = None):
  """(function, abstract arguments) for the compiler; `chip` is 'v5p', 'v6e' or 'tpu7x'.

  The kernel alone, its lists given: `sparse_mla_lists` is a case of its own. `tuning` are block
  sizes in place of the chip's.
  """
  s = shape

  def struct(*dims, dtype=s.dtype):
    return jax.ShapeDtypeStruct((s.batch, *dims), dtype)

  integers, floats = (functools.partial(struct, dtype=dtype) for dtype in ('int32', 'float32'))
  q, index_q = struct(s.time, s.heads, s.width), struct(s.time, s.index_heads, s.index_dim)
  selection: jax.ShapeDtypeStruct | Visible = integers(s.time, s.topk)
  if s.stage == 'dense':
    selection = Visible(integers(s.time), integers(s.time), integers(s.keys))
  config = _config(shape, chip, tuning)
  sizes = api.make_sizes(config, config.backward if s.backward else config.forward, q, index_q)

  def arrange(q, lse, index_q, weights, latents, index_k, selection):
    arguments: dict[str, Any] = api.query_arguments(sizes, q, lse, index_q, weights)
    if s.backward:
      arguments |= api.backward_selection(selection, s.keys, config, sizes)
      arguments['keys'], arguments['sums'] = api.backward_keys(latents, index_k, sizes)
      return arguments
    keys = layout.keys(latents, index_k, sizes.blocks)
    return arguments | {'keys': keys, **api.selection_arguments(selection, s.keys, config, sizes)}

  arguments = jax.eval_shape(
    arrange, q, floats(s.time, s.heads), index_q, floats(s.time, s.index_heads),
    struct(s.keys, s.width), struct(s.keys, s.index_dim), selection,
  )  # fmt: skip
  kernel: Callable[..., Any] = kernel_forward.forward
  if s.backward:
    kernel = kernel_backward.backward
    blocks = arguments['counts'].shape[0]
    arguments['per_query'] = jax.ShapeDtypeStruct(
      (blocks, kernel_forward.STATE_ROWS, LANES), 'float32'
    )
  return lambda arguments: kernel(**arguments, sizes=sizes, interpret=False), (arguments,)


def work(shape: IndexerKl, chip: str) -> tuple[float, float, float, float]:
  """(queries, useful FLOPs, bytes of HBM that must move, bytes that move) of a unit.

  `queries` is the share of its block's queries that a chunk is worth when a query reads `topk` keys
  (gathered: when the selections of a block coincide), or all keys (dense stage).
  """
  config = _config(shape, chip)
  t = config.backward if shape.backward else config.forward
  reads = shape.keys if shape.stage == 'dense' else shape.topk
  index_products = 3 if shape.backward else 1
  per_pair = 2.0 * (
    shape.heads * shape.width + index_products * shape.index_heads * shape.index_dim
  )
  gradient = 2 * 4 * shape.index_dim if shape.backward else 0
  row = 2 * (shape.width + shape.index_dim)
  # Masks and row ids; to write gathered rows ids are read again.
  lists = 12 if shape.backward and config.regime == 'gather' else 8
  return (
    t.queries * t.keys / reads,
    per_pair * t.keys * t.queries,
    float(t.keys * (row + gradient)),
    float(t.keys * (1536 + lists + gradient)),
  )
