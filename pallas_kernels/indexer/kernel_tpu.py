"""Pallas TPU kernel of the lightning indexer: scores, mask, exact top-k and compaction in one op.

The scores of a block of queries against all keys stay in VMEM as order-preserving int32 (the tile);
nothing of size [T, S] goes to HBM. For one block of queries the kernel

  1. scores: streams the keys through the MXU against the stationary queries, all heads at once on
     lanes, and accumulates weight * relu(logit);
  2. finds each query's threshold: the K-th largest entry of its column of the tile, by counting;
  3. packs the comparison with the threshold to 32-bit words, 32 consecutive keys each;
  4. turns the words into ascending positions: output slot j of a row of 128 words finds its word by
     bisecting the words' prefix counts, then its bit within the word. The loops go over slots and
     words, not over keys.

Layout. Queries are on lanes, keys on sublanes, so that counting needs no work across lanes. Where
128 queries' scores would not fit VMEM, a block has 128 / G queries and G lane groups of keys: lane
g * block_q + t of row r has the score of query t and key (r, g). Keys are ordered so that the words
of step 3 hold consecutive keys (`_UNIT`), and the words of one row after a transpose are
consecutive too (`PART`):

  key = ((r // 4096 * G + g) * 16 + r // 256 % 16) * 256 + r % 8 * 32 + r % 256 // 8
"""

import functools
import math
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer import reference
from pallas_kernels.indexer.reference import LOWEST

_LANES, _SUBLANES = 128, 8
_UNIT = 256  # Keys whose mask bits make one word a sublane.
PART = 4096  # Keys whose words fill the lanes of one row after the transpose.
STEP = 1024  # Rows of the tile that one grid step scores.
# The same, above so many keys, for at least so many queries a block and where VMEM has room for it.
# No matmul overlaps with the start and the end of a step, so fewer steps keep the MXU busier; but a
# block scores half a step in vain behind its last visible key.
LONG_STEP, LONG_KEYS, LONG_BLOCK = 2048, 65_536, 64
_TABLE = PART // 32  # Rows of words of one part.
VMEM = 64 * 2**20  # Bytes a core, of the smallest of the supported chips.
NARROWING = 7  # Counts over the tile before the candidates are folded.
FOLD_ABOVE = 4  # Folding pays above so many times the number of cells.


class Layout(NamedTuple):
  """Static sizes of one call."""

  block_q: int  # Queries a block.
  groups: int  # Lane groups; block_q * groups = 128.
  blocks: int  # Blocks of queries.
  parts: int  # Rows of the tile / 4096.
  topk: int  # K.
  slots: int  # K, padded to a multiple of 128.
  step: int = STEP  # Rows of the tile that one grid step scores, and one round of a sweep reads.

  @property
  def steps_per_part(self) -> int:
    return PART // self.step

  @property
  def at_once(self) -> tuple[int, int]:
    """Passes and parts that one step of the compaction works on."""
    return (2, 1) if self.parts == 1 else (1, 2)


def divide(x, power: int):
  """Quotient and remainder by a power of two of integers >= 0, without the general case's cost."""
  return x >> (power.bit_length() - 1), x & (power - 1)


def _parts(steps, layout: Layout) -> jax.Array:
  """Parts of the tile that hold the rows of so many grid steps."""
  per_part = layout.steps_per_part
  return divide(steps + (per_part - 1), per_part)[0]


def make_layout(time: int, keys: int, topk: int, block_q: int, step: int = STEP) -> Layout:
  """The sizes of a call with T, S and K; `block_q` and `step` as `choose_blocks` gives them."""
  groups = _LANES // block_q
  return Layout(
    block_q=block_q,
    groups=groups,
    blocks=-(-time // block_q),
    parts=-(-keys // (groups * PART)),
    topk=topk,
    slots=-(-topk // _LANES) * _LANES,
    step=step,
  )


def _position(groups: int) -> tuple[jax.Array, jax.Array]:
  """What a sublane and a lane add to a key's position, [8, 128], and the lane group."""
  sublane = jax.lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 0)
  lane = jax.lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 1)
  group, _ = divide(lane, _LANES // groups)
  return sublane * 32 + group * PART, group


def _fold_lanes(parts: list[jax.Array]) -> jax.Array:
  """Sums over lane groups: G arrays [rows, 128] -> one whose lane group g has the sum of array g.

  A reduce-scatter by halves: every level adds two arrays' halves and keeps both results in one.
  """
  lane = jax.lax.broadcasted_iota(jnp.int32, (1, _LANES), 1)
  distance = _LANES // 2
  while len(parts) > 1:
    half = len(parts) // 2
    low = (lane & distance) == 0
    folded = []
    for a, b in zip(parts[:half], parts[half:], strict=True):
      other = jnp.where(low, b, a)
      swapped = pltpu.roll(other, distance, 1)
      if distance < _LANES // 2:
        swapped = jnp.where(low, pltpu.roll(other, _LANES - distance, 1), swapped)
      folded.append(jnp.where(low, a, b) + swapped)
    parts, distance = folded, distance // 2
  return parts[0]


def _all_groups(x: jax.Array, groups: int) -> jax.Array:
  """[1, 128] -> the sum over lane groups, in every group."""
  while groups > 1:
    groups //= 2
    x = x + pltpu.roll(x, _LANES // 2 // groups, 1)
  return x


def _score_rows(k_ref, q_ref, w_ref, row, rows: int, groups: int):
  """float32 [rows, 128] scores of the tile's rows [row, row + rows) of this grid step."""
  keys = k_ref[0, 0, :, pl.ds(row, rows), :].reshape(groups * rows, k_ref.shape[-1])
  precision = 'highest' if keys.dtype == jnp.float32 else None
  width = _LANES if q_ref.shape[-1] % (2 * _LANES) else 2 * _LANES
  total = jnp.zeros((groups * rows, _LANES), jnp.float32)
  for n in range(q_ref.shape[-1] // width):
    logits = jnp.dot(
      keys,
      q_ref[0, 0, :, n * width : (n + 1) * width],
      preferred_element_type=jnp.float32,
      precision=precision,
    )
    for h in range(width // _LANES):
      relu = jnp.maximum(logits[:, h * _LANES : (h + 1) * _LANES], 0.0)
      total += relu * w_ref[0, 0, n * (width // _LANES) + h, :][None]
  return _fold_lanes([total[g * rows : (g + 1) * rows] for g in range(groups)])


def _score_step(step, refs, layout: Layout):
  """Scores one grid step's keys, masks them and writes them to the tile."""
  q_ref, w_ref, q_slot_ref, q_segment_ref, k_ref, k_segment_ref, tile, sample, seen = refs
  groups = layout.groups
  offset, group = _position(groups)
  part, within = divide(step, layout.steps_per_part)
  base = part * (groups * PART) + within * layout.step
  # A key is visible if what its row adds to the position is at most this.
  room = q_slot_ref[0, 0] - offset - base
  q_segment = q_segment_ref[0, 0]

  def body(n, _):
    row = pl.multiple_of(n * _UNIT, _UNIT)
    u = reference.ordered_bits(_score_rows(k_ref, q_ref, w_ref, row, _UNIT, groups))
    u = u.reshape(32, _SUBLANES, _LANES)
    masked, count = [], jnp.zeros((_SUBLANES, _LANES), jnp.int32)
    segments = k_segment_ref[0, 0, :, pl.ds(n, 1)][:, 0]  # [G, 8 sublanes, 32 registers]
    for i in range(32):
      segment = jnp.broadcast_to(segments[0, :, i : i + 1], (_SUBLANES, _LANES))
      for g in range(1, groups):
        other = jnp.broadcast_to(segments[g, :, i : i + 1], (_SUBLANES, _LANES))
        segment = jnp.where(group == g, other, segment)
      visible = (room >= row + i) & (segment == q_segment)
      masked.append(jnp.where(visible, u[i], LOWEST))
      count = count + visible.astype(jnp.int32)
    seen[...] += count
    tile[pl.ds(pl.multiple_of(step * layout.step + row, _UNIT), _UNIT), :] = jnp.concatenate(masked)
    sampled = pl.multiple_of((step * layout.step + row) >> 5, _SUBLANES)
    sample[pl.ds(sampled, _SUBLANES), :] = masked[0]
    return _

  # Unrolled: one unit's mask is computed while the next one's matmuls run.
  jax.lax.fori_loop(0, layout.step // _UNIT, body, 0, unroll=True)


def _sum_registers(x: jax.Array) -> jax.Array:
  """bool [rows, 128] -> int32 [8, 8, 128] partial sums: eight chains of additions, not one."""
  return jnp.sum(x.astype(jnp.int32).reshape(-1, _SUBLANES, _SUBLANES, _LANES), axis=0)


def _count(ref, chunks, rows: int, groups: int, predicate) -> jax.Array:
  """[1, 128]: of how many entries `predicate(entries [rows, 128], start)` holds, per query."""

  def body(n, total):
    start = pl.multiple_of(n * rows, rows)
    return total + _sum_registers(predicate(ref[pl.ds(start, rows), :], start))

  total = jnp.zeros((_SUBLANES, _SUBLANES, _LANES), jnp.int32)
  total = jnp.sum(jax.lax.fori_loop(0, chunks, body, total), axis=0)
  return _all_groups(jnp.sum(total, axis=0, keepdims=True), groups)


def any_true(x: jax.Array) -> jax.Array:
  """Whether any entry is true, as a scalar."""
  return jnp.max(x.astype(jnp.float32)) > 0


class Bracket(NamedTuple):
  """A search for the K-th largest entry, per query: count(low) >= K > count(high). All [1, 128]."""

  low: jax.Array
  high: jax.Array
  at_low: jax.Array  # How many entries are >= low.
  at_high: jax.Array

  def unsettled(self, k) -> jax.Array:
    """Neither exactly K entries at or above low, nor low the K-th largest itself (a tie)."""
    return (self.at_low > k) & (self.low + 1 < self.high)

  def update(self, t, count, k, active) -> 'Bracket':
    up, down = active & (count >= k), active & (count < k)
    return Bracket(
      jnp.where(up, t, self.low),
      jnp.where(down, t, self.high),
      jnp.where(up, count, self.at_low),
      jnp.where(down, count, self.at_high),
    )

  def middle(self) -> jax.Array:
    return (self.low >> 1) + (self.high >> 1) + (self.low & self.high & 1)


def _widest(at_low) -> Bracket:
  return Bracket(
    jnp.full((1, _LANES), LOWEST + 1),
    jnp.full((1, _LANES), reference.HIGHEST + 1),
    at_low,
    jnp.zeros((1, _LANES), jnp.int32),
  )


def _bisect(bracket: Bracket, count, k, active) -> Bracket:
  """Halves the brackets of active queries until all are settled; `count(t)` [1, 128]."""

  def body(b):
    t = b.middle()
    return b.update(t, count(t), k, b.unsettled(k) & active)

  return jax.lax.while_loop(lambda b: any_true(b.unsettled(k) & active), body, bracket)


def interpolate(b: Bracket, k: int) -> jax.Array:
  """A threshold that should bring the farther end of the bracket close to the K-th entry.

  Counts are taken as linear in the score. The aim is a little beyond K, by about the error of
  such a guess, since a guess on the wrong side of K moves the end that is close already.
  """
  low, high = reference.from_ordered_bits(b.low), reference.from_ordered_bits(b.high)
  above = (b.at_low - k).astype(jnp.float32) + 0.5
  below = (k - b.at_high).astype(jnp.float32) - 0.5
  size = above + below
  margin = jnp.sqrt(jnp.minimum(above, below)) + 0.05 * size
  part = jnp.where(
    above > below, above - jnp.minimum(margin, above / 2), above + jnp.minimum(margin, below / 2)
  )
  t = low + (high - low) * (part / size)
  finite = t - t == 0
  t = jnp.where(finite, reference.ordered_bits(t), b.middle())
  return jnp.clip(t, b.low + 1, b.high - 1)


def _sample_bounds(sample, parts, layout: Layout) -> tuple[jax.Array, jax.Array]:
  """Thresholds likely to enclose the K-th largest, from every 32nd key: 4 standard deviations."""
  expected = layout.topk / 32
  ranks = [max(1.0, expected + side * 4 * expected**0.5) for side in (1, -1)]

  def body(_, bounds):
    pairs = []
    middles = [Bracket(low, high, low, low).middle() for low, high in bounds]

    def both(n, totals):
      u = sample[pl.ds(pl.multiple_of(n * _TABLE, _TABLE), _TABLE), :]
      return tuple(total + _sum_registers(u >= t) for total, t in zip(totals, middles, strict=True))

    zero = jnp.zeros((_SUBLANES, _SUBLANES, _LANES), jnp.int32)
    totals = jax.lax.fori_loop(0, parts, both, (zero, zero))
    for (low, high), t, total, rank in zip(bounds, middles, totals, ranks, strict=True):
      count = _all_groups(jnp.sum(total, axis=(0, 1)).reshape(1, _LANES), layout.groups)
      pairs.append((jnp.where(count >= rank, t, low), jnp.where(count >= rank, high, t)))
    return tuple(pairs)

  start = _widest(jnp.zeros((1, _LANES), jnp.int32))
  # 16 bits: sign, exponent and 7 bits of the mantissa, far below the sample's own error.
  (low, _), (_, high) = jax.lax.fori_loop(0, 16, body, ((start.low, start.high),) * 2)
  return low, high


def _fold(tile, cells, chunks, high, rows: int):
  """The two largest entries below `high` of every `rows`-th row of the tile.

  Subtracting `high` with the sign bit flipped rotates the order: what is at or above it comes last,
  at no cost but the subtraction.
  """
  block = _LANES
  turn = high ^ jnp.int32(LOWEST)

  def one_block(n, _):
    at = pl.ds(pl.multiple_of(n * block, block), block)
    below = pl.ds(pl.multiple_of(rows + n * block, block), block)

    def body(c, best):
      first, next_ = best
      u = tile[pl.ds(pl.multiple_of(c * rows + n * block, block), block), :] - turn
      larger = u > first
      return jnp.where(larger, u, first), jnp.maximum(next_, jnp.where(larger, first, u))

    none = jnp.full((block, _LANES), LOWEST)
    best = jax.lax.fori_loop(0, chunks, body, (none, none))
    for half, u in zip((at, below), best, strict=True):
      u += turn
      cells[half, :] = jnp.where(u < high, u, LOWEST)
    return _

  jax.lax.fori_loop(0, rows // block, one_block, 0)


def _threshold(tile, sample, cells, seen, steps, layout: Layout) -> Bracket:
  """Brackets whose `low` is the K-th largest or has exactly K entries at or above it, per query.

  `low` is LOWEST + 1, which selects all that is visible, for queries that see at most K keys.

  A sample gives two thresholds that enclose the K-th entry, a few counts over the tile shrink the
  bracket by interpolation to some 30 entries. Those are then found among the two largest of each of
  4,096 cells, so that the remaining bisection sweeps a fraction of the tile. A query whose bracket
  has three entries in one cell (its cells' count is then short) is bisected over the whole tile.
  """
  k, groups = layout.topk, layout.groups

  def count(t):
    return _count(tile, steps, layout.step, groups, lambda u, _: u >= t)

  bracket = _widest(_all_groups(jnp.sum(seen[...], axis=0, keepdims=True), groups))
  guesses = _sample_bounds(sample, _parts(steps, layout), layout)

  def narrow(carry):
    n, b = carry
    t = jnp.where(n == 0, guesses[0], jnp.where(n == 1, guesses[1], interpolate(b, k)))
    t = jnp.clip(t, b.low + 1, b.high - 1)
    return n + 1, b.update(t, count(t), k, b.unsettled(k))

  def wide(carry):
    n, b = carry
    return (n < NARROWING) & any_true(b.unsettled(k))

  _, bracket = jax.lax.while_loop(wide, narrow, (0, bracket))

  rows = PART // groups
  chunks = _parts(steps, layout) * groups

  def among_cells(b):
    _fold(tile, cells, chunks, b.high, rows)

    def cell_count(t):
      piece = min(2 * rows, layout.step)
      return _count(cells, 2 * rows // piece, piece, groups, lambda u, _: u >= t)

    complete = cell_count(b.low) == b.at_low - b.at_high
    return _bisect(b, lambda t: cell_count(t) + b.at_high, k, complete)

  bracket = jax.lax.cond(
    any_true(bracket.unsettled(k)) & (chunks > FOLD_ABOVE), among_cells, lambda b: b, bracket
  )
  return _bisect(bracket, count, k, True)


def _tile_positions(start, layout: Layout) -> jax.Array:
  """[step, 128] int32: key positions of the tile's rows from `start` on."""
  groups = layout.groups
  offset, _ = _position(groups)
  part, within = divide(start, PART)
  n = jax.lax.broadcasted_iota(jnp.int32, (layout.step // _SUBLANES, _SUBLANES, _LANES), 0)
  base = part * (groups * PART) + within
  unit, i = divide(n, 32)
  return (offset[None] + base + unit * _UNIT + i).reshape(layout.step, _LANES)


def _drop_ties(tile, steps, threshold, count, layout: Layout):
  """Hides the highest positions among entries equal to the threshold, so that exactly K remain."""
  groups = layout.groups
  excess = jnp.maximum(count - layout.topk, 0)
  size = layout.parts * groups * PART

  def equal_from(cut):
    def predicate(u, start):
      return (u == threshold) & (_tile_positions(start, layout) >= cut)

    return _count(tile, steps, layout.step, groups, predicate)

  # The largest cut with at least `excess` equal entries at or above it.
  def body(_, bounds):
    low, high = bounds
    middle = (low + high + 1) >> 1
    enough = equal_from(middle) >= excess
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

  low = jnp.zeros((1, _LANES), jnp.int32)
  cut, _ = jax.lax.fori_loop(0, size.bit_length(), body, (low, jnp.full((1, _LANES), size)))

  def hide(n, _):
    start = pl.multiple_of(n * layout.step, layout.step)
    u = tile[pl.ds(start, layout.step), :]
    drop = (u == threshold) & (_tile_positions(start, layout) >= cut) & (excess > 0)
    tile[pl.ds(start, layout.step), :] = jnp.where(drop, LOWEST, u)
    return _

  jax.lax.fori_loop(0, steps, hide, 0)


def _clear_rest(tile, sample, steps, value, layout: Layout):
  """Fills the rows after the last grid step's, to the end of its part."""

  def body(n, _):
    for ref, rows in ((tile, layout.step), (sample, layout.step // 32)):
      ref[pl.ds(pl.multiple_of(n * rows, rows), rows), :] = jnp.full((rows, _LANES), value)
    return _

  jax.lax.fori_loop(steps, _parts(steps, layout) * layout.steps_per_part, body, 0)


def _pack(tile, packed, steps, threshold, layout: Layout) -> jax.Array:
  """Words of the mask `tile >= threshold`: bit i of word c is key 32 c + i of its part and group.

  Returns the smallest entry of the mask, [1, 128].
  """
  step, groups = layout.step, layout.groups
  step_words = step // 32

  def body(n, lowest):
    u = tile[pl.ds(pl.multiple_of(n * step, step), step), :]
    u = u.reshape(-1, 32, _SUBLANES, _LANES)
    words = jnp.zeros((step // _UNIT, _SUBLANES, _LANES), jnp.int32)
    for i in range(32):
      hit = u[:, i] >= threshold
      words = words | jnp.where(hit, jnp.int32(1 << i if i < 31 else LOWEST), 0)
      lowest = jnp.minimum(lowest, jnp.where(hit, u[:, i], reference.HIGHEST))
    at = pl.ds(pl.multiple_of(n * step_words, step_words), step_words)
    packed[at, :] = words.reshape(step_words, _LANES)
    return lowest

  # Rows to the end of the last part are LOWEST: their words must be 0, not stale.
  steps = _parts(steps, layout) * layout.steps_per_part
  start = jnp.full((step // _UNIT, _SUBLANES, _LANES), reference.HIGHEST)
  lowest = jnp.min(jax.lax.fori_loop(0, steps, body, start), axis=(0, 1)).reshape(1, _LANES)
  while groups > 1:
    groups //= 2
    lowest = jnp.minimum(lowest, pltpu.roll(lowest, _LANES // 2 // groups, 1))
  return lowest


def inclusive_bit_counts(words: jax.Array) -> jax.Array:
  """[rows, 128] words -> how many bits each word and those before it in its row have."""
  upper = (
    jax.lax.broadcasted_iota(jnp.int32, (_TABLE, _TABLE), 0)
    <= jax.lax.broadcasted_iota(jnp.int32, (_TABLE, _TABLE), 1)
  ).astype(jnp.bfloat16)
  bits = jax.lax.population_count(words).astype(jnp.float32).astype(jnp.bfloat16)  # At most 32.
  return jnp.dot(bits, upper, preferred_element_type=jnp.float32).astype(jnp.int32)


def _transpose_words(packed, words, prefix, parts, together: int):
  """Words to [part, (group, query), 128 words in order of keys], and their inclusive bit counts.

  Of `together` parts at once, which hide each other's latency.
  """

  def body(n, _):
    for part in [n * together + i for i in range(together)]:
      w = packed[pl.ds(pl.multiple_of(part * _TABLE, _TABLE), _TABLE), :].T
      words[part] = w
      prefix[part] = inclusive_bit_counts(w)
    return _

  jax.lax.fori_loop(0, divide(parts + (together - 1), together)[0], body, 0)


def _nth_bit(word: jax.Array, n: jax.Array) -> jax.Array:
  """Position of the n-th (from 0) set bit of each word, by bisection."""
  position = jnp.zeros_like(word)
  for width in (16, 8, 4, 2, 1):
    below = jax.lax.population_count(word & ((1 << width) - 1))
    beyond = n >= below
    n = jnp.where(beyond, n - below, n)
    word = jnp.where(beyond, jax.lax.shift_right_logical(word, width), word)
    position = jnp.where(beyond, position + width, position)
  return position


def _gather(x: jax.Array, lane: jax.Array) -> jax.Array:
  return jnp.take_along_axis(x, lane, axis=1, mode='promise_in_bounds')


def compact(words, prefix, out_ref, parts, layout: Layout, passes: int = 1, together: int = 1):
  """Writes each query's positions, ascending, -1 where it has fewer than K.

  A pass places up to 128 keys of every row; `passes` of them, of each of `together` parts, are one
  step of the loop: their gathers hide each other's latency. Parts up to a multiple of `together`
  must have words, which are ignored.
  """
  block_q, groups = layout.block_q, layout.groups
  shape = (block_q * groups, _LANES)
  lane = jax.lax.broadcasted_iota(jnp.int32, shape, 1)
  group = jax.lax.broadcasted_iota(jnp.int32, shape, 0) >> (block_q.bit_length() - 1)
  out_ref[0] = jnp.full((block_q, layout.slots), -1, jnp.int32)

  def some_parts(n, filled):
    """Appends the keys of some parts' words to slots [filled, ...) of each (group, query)."""
    rows = []  # Of each part: its number, the first slot and the number of its keys.
    for part in [n * together + i for i in range(together)]:
      total = prefix[part][:, _LANES - 1 :]
      if together > 1:
        total = jnp.where(part < parts, total, 0)
      starts = []
      for g in range(groups):
        starts.append(filled)
        filled = filled + total[g * block_q : (g + 1) * block_q]
      rows.append((part, jnp.concatenate(starts), total))
    most = functools.reduce(jnp.maximum, [total for _, _, total in rows])
    most = jnp.max(most.astype(jnp.float32)).astype(jnp.int32)

    def place(part, start, total, n):
      """Keys of pass n, and the row of the output that takes each, or -1."""
      w, ends = words[part], prefix[part]
      # Hit j of the row goes to slot start + j: lane l of the output takes a j that ends up there.
      j = n * _LANES + ((lane - start) & (_LANES - 1))
      word, begin = jnp.zeros_like(j), jnp.zeros_like(j)
      for width in (64, 32, 16, 8, 4, 2, 1):
        end = _gather(ends, word + (width - 1))
        beyond = end <= j
        word = jnp.where(beyond, word + width, word)
        begin = jnp.where(beyond, end, begin)
      base = (part * groups + group) * PART
      key = base + word * 32 + _nth_bit(_gather(w, word), j - begin)
      return key, jnp.where(j < total, divide(start + j, _LANES)[0], -1)

    def chunk(n, _):
      placed = [place(*row, n * passes + i) for row in rows for i in range(passes)]
      for r in range(layout.slots // _LANES):
        at = (0, slice(None), pl.ds(r * _LANES, _LANES))
        out = out_ref[at]
        for key, row in placed:
          for g in range(groups):
            mine = slice(g * block_q, (g + 1) * block_q)
            out = jnp.where(row[mine] == r, key[mine], out)
        out_ref[at] = out
      return _

    step = passes * _LANES
    jax.lax.fori_loop(0, divide(most + (step - 1), step)[0], chunk, 0)
    return filled

  chunks = divide(parts + (together - 1), together)[0]
  jax.lax.fori_loop(0, chunks, some_parts, jnp.zeros((block_q, 1), jnp.int32))


def _kernel(steps_ref, *refs, layout: Layout):
  inputs, (out_ref, threshold_ref), scratch = refs[:6], refs[6:8], refs[8:]
  tile, packed, words, prefix, cells, seen = scratch
  steps = steps_ref[pl.program_id(0), pl.program_id(1)]
  step = pl.program_id(2)

  @pl.when(step == 0)
  def _():
    seen[...] = jnp.zeros_like(seen)

  @pl.when(step < steps)
  def _():
    with jax.named_scope('scores'):
      _score_step(step, (*inputs, tile, packed, seen), layout)

  @pl.when(step == pl.num_programs(2) - 1)
  def _():
    parts = _parts(steps, layout)
    with jax.named_scope('threshold'):
      _clear_rest(tile, packed, steps, LOWEST, layout)
      found = _threshold(tile, packed, cells, seen, steps, layout)

    @pl.when(any_true(found.at_low > layout.topk))
    def _():
      with jax.named_scope('ties'):
        _drop_ties(tile, steps, found.low, found.at_low, layout)

    with jax.named_scope('pack'):
      lowest = _pack(tile, packed, steps, found.low, layout)
      full = found.at_low >= layout.topk
      threshold_ref[0, 0] = reference.from_ordered_bits(jnp.where(full, lowest, LOWEST))
    with jax.named_scope('compact'):
      passes, together = layout.at_once
      _transpose_words(packed, words, prefix, parts, together)
      compact(words, prefix, out_ref, parts, layout, passes, together)


def _pad(x: jax.Array, axis: int, multiple: int, value=0) -> jax.Array:
  padding = [(0, 0)] * x.ndim
  padding[axis] = (0, -x.shape[axis] % multiple)
  return jnp.pad(x, padding, constant_values=value)


def _arrange_queries(q, weights, q_slot, q_segment, layout: Layout):
  """Queries of a block side by side on lanes, heads outermost; 0 heads and queries fill up."""
  batch, groups = q.shape[0], layout.groups
  q, weights = _pad(_pad(q, 3, _LANES), 2, groups), _pad(weights, 2, groups)
  q, weights, q_slot, q_segment = (
    _pad(x, 1, layout.block_q, v) for x, v in ((q, 0), (weights, 0), (q_slot, -1), (q_segment, 0))
  )
  # Not a segment: its queries see nothing.
  q_slot = jnp.where(q_segment > 0, q_slot, -1)
  shape = (batch, layout.blocks, layout.block_q)
  q = q.reshape(*shape, *q.shape[2:]).transpose(0, 1, 4, 3, 2)  # [B, blocks, J, I, block_q]
  q = q.reshape(*q.shape[:3], -1)
  w = weights.astype(jnp.float32).reshape(*shape, -1).transpose(0, 1, 3, 2)
  w = w.reshape(batch, layout.blocks, -1, _LANES)

  def lanes(x):  # [B, T] -> [B, blocks, 1, 128], repeated for each lane group.
    return jnp.tile(x.reshape(batch, layout.blocks, 1, layout.block_q), (1, 1, 1, groups))

  return q, w, lanes(q_slot), lanes(q_segment)


def _arrange_keys(k, k_segment, layout: Layout):
  """Keys in the tile's order (see the module's docstring), [B, parts, G, 4096, J]."""
  span = layout.groups * PART
  k = _pad(_pad(k, 2, _LANES), 1, span)
  k_segment = _pad(k_segment, 1, span)
  shape = (k.shape[0], layout.parts, layout.groups, PART // _UNIT, _SUBLANES, 32)
  k = k.reshape(*shape, -1).swapaxes(4, 5)
  return k.reshape(*shape[:3], PART, -1), k_segment.reshape(shape)


def _steps(q_slot, layout: Layout, keys: int) -> jax.Array:
  """[B, blocks]: grid steps until the last key that a query of the block may see."""
  last = jnp.minimum(jnp.max(q_slot, axis=(2, 3)), keys - 1)
  span, per_part = layout.groups * PART, layout.steps_per_part
  within = jnp.minimum(last % span // layout.step + 1, per_part)
  return jnp.where(last < 0, 0, last // span * per_part + within).astype(jnp.int32)


def choose_blocks(
  time: int, keys: int, block_q: int | None = None, vmem: int = VMEM
) -> dict[str, int]:
  """Sizes for `indexer_topk`: as many queries a block as VMEM holds scores of.

  Args:
    time: T; a block is no larger than it needs to be.
    keys: S.
    block_q: the block if it is given, else None.
    vmem: bytes of VMEM of a core; 64 MiB is what the smallest of the supported chips has.

  Returns:
    'block_q', 'step' and 'vmem', the bytes that the kernel may use.

  Raises:
    ValueError: a given block is not possible, or not even 8 queries fit.
  """

  def need(block):
    parts = -(-keys * block // (PART * _LANES))
    # Words, their transpose and prefix counts, of pairs of parts; the rest is blocks and cells, and
    # the registers that a pair of parts spills.
    words = (parts + parts % 2) * _TABLE * _LANES * 4 * 3
    return parts * PART * _LANES * 4 + words + (2 + block // 16) * 2**20 + 2**18

  sizes = (128, 64, 32, 16, 8)
  if block_q is None:
    fitting = [block for block in sizes if need(block) <= vmem - 2 * 2**20]
    if not fitting:
      raise ValueError(f'indexer_topk: scores of 8 queries and {keys} keys exceed VMEM; split them')
    block_q = min((block for block in fitting if block >= time), default=max(fitting))
  elif block_q not in sizes:
    raise ValueError(f'indexer_topk: block_q={block_q}; choose one of {sizes}')
  more = 2 * 2**20  # What the keys of a longer step take.
  room = need(block_q) + more <= vmem - 2 * 2**20
  long = keys > LONG_KEYS and block_q >= LONG_BLOCK and room
  return dict(
    block_q=block_q,
    step=LONG_STEP if long else STEP,
    vmem=max(60 * 2**20, need(block_q) + more * long),
  )


def indexer_topk(
  q, weights, k, q_slot, q_segment, k_segment, topk: int, *, block_q: int, step: int, vmem: int,
  interpret
):  # fmt: skip
  """See `api.indexer_topk`.

  Args:
    q, weights, k, q_slot, q_segment, k_segment, topk: the op's arguments.
    block_q: queries a block, 8 to 128, a power of two.
    step: rows of the tile that a grid step scores, a divisor of `PART`.
    vmem: bytes of VMEM that the kernel may use.
    interpret: what `pallas_call` takes.
  """
  batch, time = q_slot.shape
  layout = make_layout(time, k.shape[1], topk, block_q, step)
  groups = layout.groups
  queries = _arrange_queries(q, weights, q_slot, q_segment, layout)
  keys = _arrange_keys(k, k_segment, layout)
  steps = _steps(queries[2], layout, k.shape[1])
  per_part = layout.steps_per_part

  def per_block(b, t, s, steps):
    return b, t, 0, 0

  def per_step(b, t, s, steps):
    # Past the last visible key the block stays the same, so nothing is fetched.
    s = jnp.minimum(s, jnp.maximum(steps[b, t] - 1, 0))
    part, within = divide(s, per_part)
    return b, part, 0, within

  lane_spec = pl.BlockSpec((1, 1, 1, _LANES), per_block)
  rows = layout.parts * PART
  together = layout.at_once[1]
  word_parts = -(-layout.parts // together) * together
  out_shape = [
    jax.ShapeDtypeStruct((batch, layout.blocks * block_q, layout.slots), jnp.int32),
    jax.ShapeDtypeStruct((batch, layout.blocks, 1, _LANES), jnp.float32),
  ]
  # A causal sequence: blocks see half of the keys on average, in whole steps.
  seen = (layout.parts * PART + STEP) * groups // 2
  read = batch * layout.blocks * seen
  cost = pl.CostEstimate(
    flops=2 * read * block_q * math.prod(q.shape[2:]),
    transcendentals=0,
    # Segments take a padded tile: 4 KiB for 256 keys.
    bytes_accessed=read * (q.shape[3] * q.dtype.itemsize + 16)
    + sum(x.size * jnp.dtype(x.dtype).itemsize for x in (*queries, *out_shape)),
  )
  indices, threshold = pl.pallas_call(
    functools.partial(_kernel, layout=layout),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=1,
      grid=(batch, layout.blocks, layout.parts * per_part),
      in_specs=[
        pl.BlockSpec((1, 1, *queries[0].shape[2:]), per_block),
        pl.BlockSpec((1, 1, *queries[1].shape[2:]), per_block),
        lane_spec,
        lane_spec,
        pl.BlockSpec((1, 1, groups, layout.step, keys[0].shape[-1]), lambda *a: (*per_step(*a), 0)),
        pl.BlockSpec(
          (1, 1, groups, layout.step // _UNIT, _SUBLANES, 32), lambda *a: (*per_step(*a), 0, 0)
        ),
      ],
      out_specs=[
        pl.BlockSpec((1, block_q, layout.slots), lambda b, t, s, steps: (b, t, 0)),
        lane_spec,
      ],
      scratch_shapes=[
        pltpu.VMEM((rows, _LANES), jnp.int32),
        pltpu.VMEM((word_parts * _TABLE, _LANES), jnp.int32),
        pltpu.VMEM((word_parts, _LANES, _TABLE), jnp.int32),
        pltpu.VMEM((word_parts, _LANES, _TABLE), jnp.int32),
        pltpu.VMEM((2 * PART // groups, _LANES), jnp.int32),
        pltpu.VMEM((_SUBLANES, _LANES), jnp.int32),
      ],
    ),
    out_shape=out_shape,
    cost_estimate=cost,
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'parallel', 'arbitrary'), vmem_limit_bytes=vmem
    ),
    interpret=interpret,
    name='indexer_topk',
  )(steps, *queries, *keys)
  threshold = threshold[:, :, 0, :block_q].reshape(batch, -1)
  return indices[:, :time, :topk], threshold[:, :time]
