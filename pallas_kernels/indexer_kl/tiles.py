"""Attention target and index scores of one chunk of keys, for both kernels of the indexer's KL.

Keys lie on sublanes. Heads and queries lie on lanes, heads first: lane n * M + m is head n of query
m of the block. Sums over heads are then additions of registers, and one fold within 128 lanes
leaves a query's sum in every lane l with l mod M = m. What depends on (query, key) alone, such as
the mask, the softmax and the score's gradient, is computed in that form: [C, 128], once a key and
128 / M times a query, where the target took N * M / 128 times as many exponentials.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla.layout import LANES
from pallas_kernels.sparse_mla.stream import LOG2_E, Blocks, dot

# Scores below any real one: of keys that a query does not see, and the floor of the running
# maximum, which keeps the exponentials of the former at exactly 0.
MASKED, LOWEST = -1e30, -5e29
SMALLEST_TARGET = 1e-30  # Under the logarithm, as in reference.py.


@dataclasses.dataclass(frozen=True)
class Sizes:
  """Static sizes of a kernel call."""

  blocks: Blocks  # `features` is that of a whole row of keys: `width` + `index_dim`.
  width: int  # Padded L + R.
  heads: int  # N that count in the mean over heads; `blocks.heads` has padding.
  index_heads: int  # Padded I.
  index_dim: int  # Padded J.
  unit: int  # Keys of one matmul, a divisor of a chunk.

  @property
  def index_rows(self) -> int:
    """Lanes that the index heads of a block take, I * M."""
    return self.index_heads * self.blocks.queries

  @property
  def units(self) -> int:
    return self.blocks.keys // self.unit

  @property
  def groups(self) -> int:
    """Matmuls that one unit's target takes."""
    return -(-self.blocks.rows // self.lanes)

  @property
  def index_groups(self) -> int:
    """Matmuls that one unit's index scores take."""
    return -(-self.index_rows // self.lanes)

  @property
  def lanes(self) -> int:
    """Lanes of one matmul."""
    return max(LANES, self.blocks.together * self.blocks.heads)


def _fold(x: jax.Array, queries: int) -> jax.Array:
  """Sums over the lanes of one query; every one of them gets the sum. [C, 128]."""
  distance = LANES // 2
  while distance >= queries:
    x = x + pltpu.roll(x, distance, 1)
    distance //= 2
  return x


def _head_sum(
  s: Sizes, rows: int, logits, term, before: Callable[[int], None] = lambda group: None
):
  """Sum over heads of `term(logits tile, lanes)`, [unit, 128].

  The next group's matmul stands before this group's terms, so that matrix and vector units overlap.
  """
  starts = range(0, rows, s.lanes)
  ends = [min(rows, start + s.lanes) for start in starts]
  following = logits(slice(0, ends[0]))
  total: Any = None
  for group, (start, end) in enumerate(zip(starts, ends, strict=True)):
    before(group)
    now = following
    if group + 1 < len(ends):
      following = logits(slice(end, ends[group + 1]))
    for first in range(start, end, LANES):
      tile = now[:, first - start : first - start + LANES]
      part = term(tile, slice(first, first + LANES))
      total = part if total is None else total + part
  return _fold(total, s.blocks.queries)


def target(s: Sizes, unit: int, refs: dict[str, Any], keys, before) -> jax.Array:
  """Mean over heads of the attention probabilities, [unit, 128]; any value where not selected."""
  b = s.blocks
  rows = keys(slice(0, s.width))[unit * s.unit : (unit + 1) * s.unit]
  total = _head_sum(
    s,
    b.rows,
    lambda lanes: dot(rows, refs['q'][lanes], (1, 1), b),
    lambda tile, lanes: jnp.exp2(tile * (b.scale * LOG2_E) - refs['lse'][0, :, lanes]),
    before,
  )
  return total * (1 / s.heads)


def index_keys(s: Sizes, unit: int, keys) -> jax.Array:
  """[unit, J]."""
  return keys(slice(s.width, s.width + s.index_dim))[unit * s.unit : (unit + 1) * s.unit]


def index_scores(
  s: Sizes, unit: int, refs: dict[str, Any], keys, keep=None, before=lambda group: None
) -> jax.Array:
  """Index scores [unit, 128]; `keep(relu, lanes)` takes relu of the logits, if given."""
  rows = index_keys(s, unit, keys)

  def term(tile, lanes):
    relu = jnp.maximum(tile, 0.0)
    if keep:
      keep(relu, lanes)
    return relu * refs['weights'][0, :, lanes]

  return _head_sum(
    s,
    s.index_rows,
    lambda lanes: dot(rows, refs['index_q'][lanes], (1, 1), s.blocks),
    term,
    before,
  )


def spread_masks(refs: dict[str, Any], words: jax.Array) -> None:
  """The masks of a chunk, [1, C], on sublanes: [C, 128]."""
  refs['words'][...] = jnp.broadcast_to(words, (LANES, words.shape[1])).T


def selected(s: Sizes, unit: int, refs: dict[str, Any]) -> jax.Array:
  """bool [unit, 128]."""
  queries = s.blocks.queries
  query = lax.broadcasted_iota(jnp.int32, (1, LANES), 1) & (queries - 1)
  return (refs['words'][unit * s.unit : (unit + 1) * s.unit] >> query) & 1 == 1


def pipelined(units: int, first: Callable[[int], Any], second: Callable[..., None]) -> None:
  """`second(unit, first(unit))` for all units; the next `first` stands before this `second`."""
  ready = first(0)
  for unit in range(units):
    now = ready
    if unit + 1 < units:
      ready = first(unit + 1)
    second(unit, now)
