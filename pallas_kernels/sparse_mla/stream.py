"""Chunks of keys on their way from HBM to VMEM, shared by the forward and the backward kernel.

The kernels walk over (query block, chunk of keys) in one order without gaps, across the steps of
the grid, so the copies of the next chunks overlap the matmuls of this one:

  gathered: chunk i + 3's row ids -> SMEM, chunk i + 2's rows -> VMEM (one copy a row), chunk i
    computes;
  dense:    chunk i + 1's rows -> VMEM (one contiguous copy), chunk i computes.

Past the last chunk the walk stays on the last block; those copies are drained by `finish`.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla import layout

# Chunks whose row ids are kept in SMEM, a power of two: this one and the three after it.
RING = 4
LOG2_E = 1.4426950408889634


@dataclasses.dataclass(frozen=True)
class Blocks:
  """Static sizes of a kernel call."""

  queries: int  # M, queries of a block.
  heads: int  # N, a multiple of 16.
  keys: int  # C, keys of a chunk.
  latent: int  # Padded L.
  features: int  # F.
  together: int  # Queries whose heads form one matmul.
  gather: bool
  cores: int  # TensorCores that share the device's grid.
  scale: float
  dtype: Any
  interpret: bool = False
  granule: int = 1  # Rows of one copy, and of one entry of the lists, in the gathered regime.
  tails: bool = False  # Lists may end anywhere: what lies behind their last row is cleared.
  sum_beside: bool = False  # Gradient rows are summed beside matmuls, not before them.

  @property
  def copies(self) -> int:
    """Copies that bring a chunk, in the gathered regime."""
    return self.keys // self.granule

  @property
  def rows(self) -> int:
    """Rows of a query block, M * N."""
    return self.queries * self.heads

  @property
  def words(self) -> int:
    """W of a packed row."""
    return layout.packed_words(self.features, self.dtype)

  def scratch(self) -> dict[str, Any]:
    """Scratch buffers that `Stream` takes by keyword."""
    buffers = {
      'masks': pltpu.VMEM((2, 1, self.keys), jnp.int32),
      'tick': pltpu.SMEM((1,), jnp.int32),
      'row_sems': pltpu.SemaphoreType.DMA((2,)),
      'mask_sems': pltpu.SemaphoreType.DMA((2,)),
    }
    if self.gather:
      return buffers | {
        'ids': pltpu.SMEM((RING, 1, self.copies), jnp.int32),
        'packed': pltpu.VMEM((2 * self.keys, 1, self.words), jnp.uint32),
        'keys': pltpu.VMEM((self.keys, self.features), self.dtype),
        'id_sems': pltpu.SemaphoreType.DMA((RING,)),
      }
    return buffers | {'keys': pltpu.VMEM((2, self.keys, self.features), self.dtype)}

  def cost(self, masks, width: int, per_key: int, *streamed) -> pl.CostEstimate:
    """What a call costs, for the compiler and for those who read its program.

    How many keys a block of queries reads depends on the data. Counted are, gathered, as many as one
    query selects, as if those of a block selected the same; all of a list of runs of rows; and half
    of a whole sequence.

    Args:
      masks: [G, chunks, 1, C].
      width: multiply-adds of a pair of query and key.
      per_key: bytes that a block moves for a key besides its row of `masks` and `lists`.
      streamed: arrays that are read or written once.
    """
    blocks, slots = masks.shape[0], masks.shape[1] * masks.shape[3]
    if self.gather:
      keys = slots // self.queries if self.granule == 1 else slots
    else:
      keys = (slots + masks.shape[3]) // 2
    pairs = blocks * self.queries * keys
    once = sum(x.size * jnp.dtype(x.dtype).itemsize for x in streamed)
    return pl.CostEstimate(
      flops=2 * pairs * width,
      transcendentals=pairs * self.heads,
      bytes_accessed=blocks * keys * (per_key + 8) + once,
    )

  @property
  def key_bytes(self) -> int:
    """Of a row of keys as a kernel reads it."""
    row = 4 * self.words if self.gather else self.features * self.dtype.itemsize
    return int(row)


def each_row(b: Blocks, begin: int, end: int, start: Callable[[Any], None]) -> None:
  """Calls `start` for rows [begin, end), unrolled so that matmuls and scalar work share bundles."""

  def body(i, carry):
    start(i)
    return carry

  lax.fori_loop(begin, end, body, 0, unroll=not b.interpret)


def row_tile(b: Blocks, ref, start, tile: int, rows: int | None = None):
  """View and index of one lane tile [C, 128] of rows start.. of `ref` [x, 1, W], or of `rows` rows.

  The rows lie one after the other; a load with a stride over the flat view puts 8 of them into a
  register, which an index into the three dimensions does at twice the cycles. Interpret mode knows
  no such view.
  """
  if b.interpret:
    lanes = slice(tile * layout.LANES, (tile + 1) * layout.LANES)
    return ref, (pl.ds(start, rows or b.keys), 0, lanes)
  tiles = ref.shape[2] // layout.LANES
  flat = ref.reshape(ref.shape[0] * tiles, layout.LANES)
  return flat, (pl.ds(start * tiles + tile, rows or b.keys, stride=tiles), slice(None))


class Stream:
  """The walk of one core: prime once, `begin` / `issue` for every chunk, finish once."""

  def __init__(
    self,
    blocks,
    starts,
    counts,
    lists,
    masks_hbm,
    keys_hbm,
    scratch,
    first,
    last,
    lengths=None,
    ring=RING,
  ):
    """References; `first` and `last` are the first and last query block of this core.

    `lengths` [G] are the rows of each block's list, which only `Blocks.tails` asks for. `ring` is
    RING, or 1: then row ids lie at one address, which saves a scalar operation a copy, and the
    caller starts their copies with `start_ids`.
    """
    self.lengths, self.ring = lengths, ring
    self.b, self.starts, self.counts = blocks, starts, counts
    self.lists, self.masks_hbm, self.keys_hbm = lists, masks_hbm, keys_hbm
    self.s, self.first, self.last = scratch, first, last
    self.per_block = masks_hbm.shape[1]

  def after(self, position):
    """(block, chunk) that follows; stays on the last block at the end."""
    block, chunk = position
    end = chunk + 1 >= self.counts[block]
    return jnp.where(end, jnp.minimum(block + 1, self.last), block), jnp.where(end, 0, chunk + 1)

  def _chunk(self, position):
    block, chunk = position
    return block, self.starts[block] + chunk

  def _mask_copy(self, position, slot):
    block, chunk = self._chunk(position)
    return pltpu.make_async_copy(
      self.masks_hbm.at[block, chunk], self.s['masks'].at[slot], self.s['mask_sems'].at[slot]
    )

  def id_copy(self, position, ids, sem):
    """The copy of a chunk's row ids to `ids` in SMEM."""
    block, chunk = self._chunk(position)
    return pltpu.make_async_copy(self.lists.at[block, chunk], ids, sem)

  def _id_copy(self, position, slot):
    return self.id_copy(position, self.s['ids'].at[slot], self.s['id_sems'].at[slot])

  def _dense_copy(self, position, slot):
    block, chunk = self._chunk(position)
    row = self.s['dense_base'][block] + chunk * self.b.keys
    return pltpu.make_async_copy(
      self.keys_hbm.at[pl.ds(pl.multiple_of(row, self.b.keys), self.b.keys)],
      self.s['keys'].at[slot],
      self.s['row_sems'].at[slot],
    )

  def _row_copy(self, ring, slot, i):
    """The i-th copy of a chunk: one row, or `granule` of them."""
    source, target, size = self.s['ids'][ring, 0, i], slot * self.b.keys + i, self.b.granule
    if size > 1:
      target = pl.multiple_of(slot * self.b.keys + i * size, size)
      source, target = pl.ds(pl.multiple_of(source * size, size), size), pl.ds(target, size)
    return pltpu.make_async_copy(
      self.keys_hbm.at[source], self.s['packed'].at[target], self.s['row_sems'].at[slot]
    )

  def issue_rows(self, tick, begin, end):
    """Starts the copies of rows [begin, end) of the chunk two after the one of `tick`."""
    each_row(
      self.b,
      begin // self.b.granule,
      end // self.b.granule,
      lambda i: self._row_copy(self._id_slot(tick + 2), tick & 1, i).start(),
    )

  def _id_slot(self, tick):
    return tick & (self.ring - 1) if self.ring > 1 else 0

  def start_ids(self, position):
    """Starts the copy of the row ids of the chunk three after the one at `position`.

    Without a ring, once all rows of the chunk before that one are issued.
    """
    third = self.after(self.after(self.after(position)))
    self._id_copy(third, 0).start()

  def _wait_rows(self, slot):
    if self.b.gather:
      half = self.s['packed'].at[pl.ds(slot * self.b.keys, self.b.keys)]
      pltpu.make_async_copy(half, half, self.s['row_sems'].at[slot]).wait()
    else:
      half = self.s['keys'].at[slot]
      pltpu.make_async_copy(half, half, self.s['row_sems'].at[slot]).wait()

  def prime(self):
    """Starts the first copies; to be called at the core's first step."""
    position = (self.first, 0)
    self.s['tick'][0] = 0
    if not self.b.gather:
      self._dense_copy(position, 0).start()
      self._mask_copy(position, 0).start()
      return
    for slot in range(2):
      copy = self._id_copy(position, self._id_slot(slot))
      copy.start()
      copy.wait()
      self._mask_copy(position, slot).start()

      def start_row(i, carry, slot=slot):
        self._row_copy(self._id_slot(slot), slot, i).start()
        return carry

      lax.fori_loop(0, self.b.copies, start_row, 0)
      position = self.after(position)
    self._id_copy(position, self._id_slot(2)).start()

  def begin(self, position):
    """Waits for this chunk, unpacks it, and starts what comes next; returns (tick, words, keys).

    `words` [1, C] int32 are the masks, bit m for query m of the block; `keys` is a function of a
    column slice. In the gathered regime the caller then issues the rows of chunk i + 2 with
    `issue_rows(tick, ...)`, all of them, at the places that suit its own work. In a ring,
    `ids[tick]` keeps this chunk's row ids.
    """
    b, s = self.b, self.s
    tick = s['tick'][0]
    slot = tick & 1
    s['tick'][0] = (tick + 1) & (RING - 1)
    following = self.after(position)
    self._mask_copy(position, slot).wait()
    words = s['masks'][slot]
    if not b.gather:
      self._dense_copy(following, 1 - slot).start()
      self._mask_copy(following, 1 - slot).start()
      self._wait_rows(slot)
      return tick, words, lambda columns: s['keys'][slot, :, columns]
    second = self.after(following)
    self._mask_copy(second, slot).start()
    self._id_copy(second, self._id_slot(tick + 2)).wait()
    if self.ring > 1:
      self._id_copy(self.after(second), self._id_slot(tick + 3)).start()
    self._wait_rows(slot)
    if b.tails:
      self._clear_tail(position, slot)
    self._unpack(slot)
    return tick, words, lambda columns: s['keys'][:, columns]

  def _clear_tail(self, position, slot):
    """Zeros for what a chunk holds behind its list: a probability of 0 times NaN would be NaN."""
    block, chunk = self._chunk(position)
    length = self.lengths[block] - chunk * self.b.keys

    @pl.when(length < self.b.keys)
    def _():
      row = lax.broadcasted_iota(jnp.int32, (self.b.keys, layout.LANES), 0)
      for tile in range(self.b.words // layout.LANES):
        view, index = row_tile(self.b, self.s['packed'], slot * self.b.keys, tile)
        view[index] = jnp.where(row < length, view[index], jnp.uint32(0))

  def _unpack(self, slot):
    b, packed = self.b, self.s['packed']
    # What lies in front of the features is for the caller to take.
    front = (packed.shape[2] - b.words) // layout.LANES
    for tile in range(b.words // layout.LANES):
      view, index = row_tile(b, packed, slot * b.keys, front + tile)
      words = view[index]
      column = slice(tile * layout.LANES, (tile + 1) * layout.LANES)
      if b.dtype == jnp.float32:
        self.s['keys'][:, column] = lax.bitcast_convert_type(words, jnp.float32)
        continue
      low = lax.bitcast_convert_type(words << 16, jnp.float32)
      self.s['keys'][:, column] = low.astype(b.dtype)
      start = b.words + tile * layout.LANES
      if start < b.features:
        high = lax.bitcast_convert_type(words & jnp.uint32(0xFFFF0000), jnp.float32)
        self.s['keys'][:, start : start + layout.LANES] = high.astype(b.dtype)

  def finish(self):
    """Waits for the copies that are still under way; to be called after the core's last chunk."""
    tick = self.s['tick'][0]
    slot = tick & 1
    position = (self.last, 0)
    self._wait_rows(slot)
    self._mask_copy(position, slot).wait()
    if self.b.gather:
      self._wait_rows(1 - slot)
      self._mask_copy(position, 1 - slot).wait()
      self._id_copy(position, self._id_slot(tick + 2)).wait()


def dot(a: jax.Array, b: jax.Array, contract: tuple[int, int], blocks: Blocks) -> jax.Array:
  """Matmul with float32 sums; float32 operands at full precision."""
  return lax.dot_general(
    a,
    b,
    (((contract[0],), (contract[1],)), ((), ())),
    precision=lax.Precision.HIGHEST if blocks.dtype == jnp.float32 else None,
    preferred_element_type=jnp.float32,
  )
