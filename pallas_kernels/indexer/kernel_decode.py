"""Pallas TPU kernel of the lightning indexer for decoding: a few queries a sequence, paged keys.

For each sequence the kernel streams its pages, scores them, and selects: threshold by counting,
packing to words, compaction to ascending positions, the last by kernel_tpu.py. Chunks of keys are
fetched ahead across sequences, so that HBM is read while a selection is computed.

Layout. Keys are on lanes: there are few queries, and their heads stream through the MXU against
stationary keys. With T = 1, 2, 4 or 8 queries the scores are a tile [S / 128 * T, 128] of
order-preserving int32 whose row r * T + t has query t and keys 128 r to 128 r + 127, so that a
register is full whatever T is. Sublane s of everything per query is query s % T.
"""

import functools
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer import kernel_tpu, reference
from pallas_kernels.indexer.reference import LOWEST

_LANES, _SUBLANES = 128, 8
CHUNK = kernel_tpu.PART  # Keys of one DMA wait, and those whose words fill the lanes of one row.
_RUNS = CHUNK // _LANES  # Rows of the tile that a chunk takes a query.
_RING = 8  # Chunks in VMEM.
_PIECE = 128  # Rows of the tile that one step of a count takes.
_INTERPOLATIONS = 12  # Sweeps of the search that interpolate, before it bisects.
# Chunks whose words are compacted together, 8 rows each, and passes over them at a time: both hide
# the latency of gathers. Few chunks have many selected keys each.
_GROUPS, _PASSES = 16, 1
_GROUPS_SHORT, _PASSES_SHORT = 4, 4


class Sizes(NamedTuple):
  """Static sizes of one call."""

  queries: int  # T, padded to a power of two.
  chunks: int  # Of the longest sequence that a table has room for.
  page_size: int
  layout: kernel_tpu.Layout  # As the compaction sees it.
  unroll: bool

  @property
  def scored(self) -> int:
    """Keys of one matmul: a few registers of scores."""
    return max(4 * _LANES, _SUBLANES * _LANES // self.queries)


def passes(layout: kernel_tpu.Layout) -> int:
  """Passes of the compaction that are taken together."""
  return _PASSES if layout.groups == _GROUPS else _PASSES_SHORT


def pieces(chunks, queries: int):
  """Steps of one count over the tile."""
  return kernel_tpu.divide(chunks * (_RUNS * queries) + (_PIECE - 1), _PIECE)[0]


def _sublane() -> jax.Array:
  return lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 0)


def _lane() -> jax.Array:
  return lax.broadcasted_iota(jnp.int32, (_SUBLANES, _LANES), 1)


def _offset(queries: int) -> jax.Array:
  """[8, 128]: a register's keys, counted from the first."""
  return kernel_tpu.divide(_sublane(), queries)[0] * _LANES + _lane()


def _fold_sublanes(parts: list[jax.Array]) -> jax.Array:
  """Sums over sublanes: eight [8, 128] -> one whose sublane i has the sum of array i.

  A reduce-scatter by halves, as in kernel_tpu.py over lanes.
  """
  distance = _SUBLANES // 2
  while distance:
    half = len(parts) // 2
    low = (_sublane() & distance) == 0
    folded = []
    for a, b in zip(parts[:half], parts[half:], strict=True):
      other = jnp.where(low, b, a)
      swapped = pltpu.roll(other, distance, 0)
      if distance < _SUBLANES // 2:
        swapped = jnp.where(low, pltpu.roll(other, _SUBLANES - distance, 0), swapped)
      folded.append(jnp.where(low, a, b) + swapped)
    parts, distance = folded, distance // 2
  return parts[0]


def _fold_queries(x: jax.Array, queries: int, combine) -> jax.Array:
  """[8, 128] combined over the sublanes of one query, in all of them."""
  while queries < _SUBLANES:
    x = combine(x, pltpu.roll(x, queries, 0))
    queries *= 2
  return x


def _greatest(x: jax.Array, queries: int) -> jax.Array:
  """The greatest int32 of each query, everywhere; of [8, 128].

  By halves, which float32 holds exactly: its maximum over lanes is one instruction.
  """

  def over_query(half):
    top = jnp.max(half.astype(jnp.float32), axis=1, keepdims=True)
    return _fold_queries(jnp.broadcast_to(top, x.shape), queries, jnp.maximum).astype(jnp.int32)

  high = over_query(x >> 16)
  return (high << 16) | over_query(jnp.where(x >> 16 == high, x & 0xFFFF, 0))


def _score_chunk(c, slot, refs, sizes: Sizes, issue):
  """Scores chunk `c` of a sequence, from `slot` of the ring; `issue(n, of)` starts copies."""
  q_ref, w_ref, q_slot_ref, ring, tile, bounds = refs
  t, scored, count = sizes.queries, sizes.scored, CHUNK // sizes.scored
  precision = 'highest' if q_ref.dtype == jnp.float32 else None
  room = q_slot_ref[0] - _offset(t)

  def body(n, ends):
    first = pl.multiple_of(n * scored, scored)
    logits = lax.dot_general(
      q_ref[0],
      ring[slot, pl.ds(first, scored), :],
      (((1,), (1,)), ((), ())),
      precision=precision,
      preferred_element_type=jnp.float32,
    )
    issue(n, count)
    lowest, highest = ends
    partials: list[jax.Array] = []
    for lanes in range(scored // _LANES):
      x = jnp.maximum(logits[:, lanes * _LANES : (lanes + 1) * _LANES], 0.0) * w_ref[0]
      x = jnp.sum(x.reshape(t, -1, _SUBLANES, _LANES), axis=1)
      partials.extend(x[i] for i in range(t))
    for v in range(len(partials) // _SUBLANES):
      u = _fold_sublanes(partials[v * _SUBLANES : (v + 1) * _SUBLANES])
      u = reference.ordered_bits(u)
      visible = room >= c * CHUNK + first + v * (_SUBLANES // t) * _LANES
      highest = jnp.maximum(highest, jnp.where(visible, u, LOWEST))
      lowest = jnp.minimum(lowest, jnp.where(visible, u, reference.HIGHEST))
      row = (c * _RUNS + (first >> 7)) * t + v * _SUBLANES
      tile[pl.ds(pl.multiple_of(row, _SUBLANES), _SUBLANES), :] = jnp.where(visible, u, LOWEST)
    return lowest, highest

  # Unrolled: the next keys' matmul overlaps this one's sums.
  ends = bounds[0], bounds[1]
  bounds[0], bounds[1] = lax.fori_loop(0, count, body, ends, unroll=sizes.unroll)


def _count(tile, pieces, queries: int, predicate) -> jax.Array:
  """[8, 128]: of how many of a query's entries `predicate([rows / 8, 8, 128], start)` holds."""

  def body(n, total):
    start = pl.multiple_of(n * _PIECE, _PIECE)
    u = tile[pl.ds(start, _PIECE), :].reshape(-1, _SUBLANES, _LANES)
    hits = predicate(u, start).astype(jnp.int32)
    return total + jnp.sum(hits.reshape(-1, 4, _SUBLANES, _LANES), axis=0)

  total = lax.fori_loop(0, pieces, body, jnp.zeros((4, _SUBLANES, _LANES), jnp.int32))
  # float32 holds the counts exactly, and its sum over lanes is one instruction.
  total = jnp.sum(jnp.sum(total, axis=0).astype(jnp.float32), axis=1, keepdims=True)
  total = jnp.broadcast_to(total, (_SUBLANES, _LANES))
  return _fold_queries(total, queries, jnp.add).astype(jnp.int32)


def _threshold(tile, pieces, bounds, seen, sizes: Sizes) -> kernel_tpu.Bracket:
  """Brackets whose `low` is the K-th largest or has exactly K entries at or above it, per query.

  A query that sees at most K keys gets the lowest of them.
  """
  k, queries = sizes.layout.topk, sizes.queries
  low, high = ~_greatest(~bounds[0], queries), _greatest(bounds[1], queries)
  none = seen == 0
  bracket = kernel_tpu.Bracket(
    jnp.where(none, LOWEST + 1, low),
    jnp.where(none, LOWEST + 2, high + 1),
    seen,
    jnp.zeros_like(seen),
  )

  def narrow(carry):
    n, b = carry
    t = jnp.where(n < _INTERPOLATIONS, kernel_tpu.interpolate(b, k), b.middle())
    count = _count(tile, pieces, queries, lambda u, _: u >= t)
    return n + 1, b.update(t, count, k, b.unsettled(k))

  def unsettled(carry):
    return kernel_tpu.any_true(carry[1].unsettled(k))

  return lax.while_loop(unsettled, narrow, (0, bracket))[1]


def _positions(start, rows: int, queries: int) -> jax.Array:
  """[rows, 8, 128] key positions of the tile's registers from row `start` on."""
  n = lax.broadcasted_iota(jnp.int32, (rows, _SUBLANES, _LANES), 0) * _SUBLANES + start
  return kernel_tpu.divide(n, queries)[0] * _LANES + _offset(queries)


def _drop_ties(tile, pieces, found: kernel_tpu.Bracket, sizes: Sizes):
  """Hides the highest positions among entries equal to the threshold, so that exactly K remain."""
  excess = jnp.maximum(found.at_low - sizes.layout.topk, 0)
  queries, registers = sizes.queries, _PIECE // _SUBLANES
  size = sizes.chunks * CHUNK

  def equal_from(cut):
    def predicate(u, start):
      return (u == found.low) & (_positions(start, registers, queries) >= cut)

    return predicate

  # The largest cut with at least `excess` equal entries at or above it.
  def body(_, ends):
    low, high = ends
    middle = (low + high + 1) >> 1
    enough = _count(tile, pieces, queries, equal_from(middle)) >= excess
    return jnp.where(enough, middle, low), jnp.where(enough, high, middle - 1)

  zero = jnp.zeros_like(excess)
  cut, _ = lax.fori_loop(0, size.bit_length(), body, (zero, zero + size))

  def hide(n, _):
    rows = pl.ds(pl.multiple_of(n * _PIECE, _PIECE), _PIECE)
    u = tile[rows, :].reshape(-1, _SUBLANES, _LANES)
    drop = equal_from(cut)(u, n * _PIECE) & (excess > 0)
    tile[rows, :] = jnp.where(drop, LOWEST, u).reshape(_PIECE, _LANES)
    return _

  lax.fori_loop(0, pieces, hide, 0)


def _pack(tile, words, parts, threshold, sizes: Sizes) -> jax.Array:
  """Words of the mask `tile >= threshold`: bit i of word w is key 32 w + i. Returns its least entry.

  A matmul with powers of two adds the bits of 16 keys; row g * 8 + query of a part of `words` has
  the 128 words of its g-th chunk.
  """
  t, groups = sizes.queries, sizes.layout.groups
  key = lax.broadcasted_iota(jnp.int32, (_LANES, 2 * _LANES), 0)
  column = lax.broadcasted_iota(jnp.int32, (_LANES, 2 * _LANES), 1)
  # Columns 0 to 127 are the low halves of words, repeated every four, the others the high halves.
  own = (key >> 5 == column & 3) & ((key >> 4) & 1 == column >> 7)
  powers = jnp.where(own, jnp.left_shift(1, key & 15), 0).astype(jnp.float32).astype(jnp.bfloat16)
  chunk_rows = _RUNS * t

  def body(n, lowest):
    size = _GROUPS_SHORT * chunk_rows
    u = tile[pl.ds(pl.multiple_of(n * size, size), size), :].reshape(-1, _SUBLANES, _LANES)
    hit = u >= threshold
    lowest = jnp.minimum(lowest, jnp.min(jnp.where(hit, u, reference.HIGHEST), axis=0))
    mask = jnp.where(hit, 1.0, 0.0).reshape(size, _LANES).astype(jnp.bfloat16)
    halves = jnp.dot(mask, powers, preferred_element_type=jnp.float32).astype(jnp.int32)
    word = (halves[:, :_LANES] | (halves[:, _LANES:] << 16)).reshape(-1, _SUBLANES, _LANES)
    registers = chunk_rows // _SUBLANES
    part, first = kernel_tpu.divide(n * _GROUPS_SHORT, groups)
    for g in range(_GROUPS_SHORT):
      total = jnp.zeros((_SUBLANES, _LANES), jnp.int32)
      for v in range(registers):
        run = v * (_SUBLANES // t) + kernel_tpu.divide(_sublane(), t)[0]
        total = total | jnp.where(_lane() >> 2 == run, word[g * registers + v], 0)
      total = _fold_queries(total, t, jnp.bitwise_or)
      row = pl.multiple_of((first + g) * _SUBLANES, _SUBLANES)
      words[part, pl.ds(row, _SUBLANES), :] = jnp.where(_sublane() < t, total, 0)
    return lowest

  start = jnp.full((_SUBLANES, _LANES), reference.HIGHEST)
  lowest = lax.fori_loop(0, parts * (groups // _GROUPS_SHORT), body, start)
  return ~_greatest(~lowest, t)


def _select(chunks, refs, sizes: Sizes):
  """Positions and threshold of a sequence whose chunks are scored."""
  q_slot_ref, out_ref, threshold_ref, tile, bounds, words, prefix = refs
  t, layout = sizes.queries, sizes.layout
  count = pieces(chunks, t)
  seen = jnp.maximum(q_slot_ref[0] + 1, 0)
  parts = kernel_tpu.divide(chunks + (layout.groups - 1), layout.groups)[0]

  def clear(n, _):  # Rows behind the last chunk, to the end of its part.
    tile[pl.ds(pl.multiple_of(n * _RUNS, _RUNS), _RUNS), :] = jnp.full((_RUNS, _LANES), LOWEST)
    return _

  with jax.named_scope('threshold'):
    lax.fori_loop(chunks * t, parts * layout.groups * t, clear, 0)
    found = _threshold(tile, count, bounds, seen, sizes)

  @pl.when(kernel_tpu.any_true(found.at_low > layout.topk))
  def _():
    with jax.named_scope('ties'):
      _drop_ties(tile, count, found, sizes)

  with jax.named_scope('pack'):
    lowest = _pack(tile, words, parts, found.low, sizes)
    full = found.at_low >= layout.topk
    threshold_ref[0] = reference.from_ordered_bits(jnp.where(full, lowest, LOWEST))
    # Of all parts at once; what stale words give is not read.
    counts = kernel_tpu.inclusive_bit_counts(words[...].reshape(-1, _LANES))
    prefix[...] = counts.reshape(prefix.shape)
  with jax.named_scope('compact'):
    kernel_tpu.compact(words, prefix, out_ref, parts, layout, passes(layout))


class _Walk:
  """Chunks of keys on their way to VMEM, `_RING - 1` ahead, across the sequences of one core."""

  def __init__(self, table, pages, chunks, pages_hbm, ring, sems, state, first, last, sizes: Sizes):
    """References; `first` and `last` are the first and last sequence of this core."""
    self.table, self.pages, self.chunks, self.pages_hbm = table, pages, chunks, pages_hbm
    self.ring, self.sems, self.state = ring, sems, state
    self.first, self.last, self.sizes = first, last, sizes
    self.copies = CHUNK // sizes.page_size

  def copy(self, sequence, chunk, slot, i):
    """The i-th page of a chunk; past the sequence's last page that one again."""
    size = self.sizes.page_size
    n = jnp.minimum(chunk * self.copies + i, self.pages[sequence] - 1)
    page = self.table[sequence * (self.sizes.chunks * self.copies) + n]
    return pltpu.make_async_copy(
      self.pages_hbm.at[page], self.ring.at[slot, pl.ds(i * size, size)], self.sems.at[slot]
    )

  def start(self, slot, n, of: int):
    """Starts the n-th of `of` equal parts of the copies of the chunk that is to be fetched next."""
    sequence, chunk = self.state[1], self.state[2]
    if self.copies < of:
      pl.when(n == 0)(functools.partial(self.start, slot, 0, 1))
      return
    per_part = self.copies // of

    def body(i, carry):
      self.copy(sequence, chunk, slot, n * per_part + i).start()
      return carry

    # Unrolled, so that scalar work and matmuls share bundles.
    lax.fori_loop(0, per_part, body, 0, unroll=self.sizes.unroll and of > 1)

  def advance(self):
    """Moves on to the next chunk to be fetched; the core's last one is fetched again and again."""
    sequence, chunk = self.state[1], self.state[2]
    end = chunk + 1 >= self.chunks[sequence]
    stay = end & (sequence == self.last)
    self.state[1] = jnp.where(end & ~stay, sequence + 1, sequence)
    self.state[2] = jnp.where(stay, chunk, jnp.where(end, 0, chunk + 1))

  def prime(self):
    """Starts the first copies; to be called at the core's first sequence."""
    self.state[0], self.state[1], self.state[2] = 0, self.first, 0

    def body(slot, carry):
      self.start(slot, 0, 1)
      self.advance()
      return carry

    lax.fori_loop(0, _RING - 1, body, 0)

  def finish(self):
    """Waits for the copies that are still under way; to be called after the core's last chunk."""
    lax.fori_loop(0, _RING - 1, lambda _, carry: (self.wait(), carry)[1], 0)

  def wait(self):
    """Waits for the next chunk and returns its slot."""
    slot = self.state[0]
    self.state[0] = (slot + 1) & (_RING - 1)
    pltpu.make_async_copy(self.ring.at[slot], self.ring.at[slot], self.sems.at[slot]).wait()
    return slot


def _kernel(table, pages, chunks, q_ref, w_ref, q_slot_ref, pages_hbm, *refs, sizes: Sizes):
  out_ref, threshold_ref, ring, tile, bounds, words, prefix, sems, state = refs
  core, step, steps = pl.program_id(0), pl.program_id(1), pl.num_programs(1)
  sequence, first = core * steps + step, core * steps
  walk = _Walk(table, pages, chunks, pages_hbm, ring, sems, state, first, first + steps - 1, sizes)
  pl.when(step == 0)(walk.prime)
  bounds[0] = jnp.full((_SUBLANES, _LANES), reference.HIGHEST)
  bounds[1] = jnp.full((_SUBLANES, _LANES), LOWEST)
  score = functools.partial(
    _score_chunk, refs=(q_ref, w_ref, q_slot_ref, ring, tile, bounds), sizes=sizes
  )

  def chunk(c, carry):
    slot = walk.wait()
    free = (slot + _RING - 1) & (_RING - 1)  # The slot that was read last.
    score(c, slot, issue=functools.partial(walk.start, free))
    walk.advance()
    return carry

  with jax.named_scope('scores'):
    lax.fori_loop(0, chunks[sequence], chunk, 0)
  _select(
    chunks[sequence], (q_slot_ref, out_ref, threshold_ref, tile, bounds, words, prefix), sizes
  )
  # The copies past the end are those of a chunk again, and hide behind the last selection.
  pl.when(step == steps - 1)(walk.finish)


def make_sizes(time: int, pages: int, page_size: int, topk: int, unroll: bool = True) -> Sizes:
  """The sizes of a call with T, as many pages as a table has for a sequence, and K."""
  queries = next(n for n in (1, 2, 4, 8) if n >= time)
  chunks = -(-pages * page_size // CHUNK)
  groups = _GROUPS if chunks > _GROUPS_SHORT else _GROUPS_SHORT
  layout = kernel_tpu.Layout(
    block_q=_SUBLANES,
    groups=groups,
    blocks=1,
    parts=-(-chunks // groups),
    topk=topk,
    slots=-(-topk // _LANES) * _LANES,
  )
  return Sizes(queries, chunks, page_size, layout, unroll)


def cost(q: jax.Array, sizes: Sizes, cores: int) -> pl.CostEstimate:
  """What a call with padded q [B, T * I, J] computes and moves, of contexts that fill their tables.

  All pages of whole chunks are fetched, and a core's last chunk again while it ends.
  """
  sequences, rows, depth = q.shape
  scored = sequences * sizes.chunks * CHUNK
  fetched = scored + cores * (_RING - 1) * CHUNK
  outside = q.size * q.dtype.itemsize + 4 * sequences * (
    rows * _LANES + _SUBLANES * sizes.layout.slots
  )
  return pl.CostEstimate(
    flops=2 * scored * rows * (depth + 1),
    transcendentals=0,
    bytes_accessed=fetched * depth * q.dtype.itemsize + outside,
  )


def indexer_topk(
  q, weights, pages, table, q_slot, topk: int, *, cores: int, vmem: int = 60 * 2**20, interpret: Any
):
  """See `paged.indexer_topk_paged`.

  Args:
    q, weights, pages, table, q_slot, topk: the op's arguments.
    cores: TensorCores of a device that share the sequences.
    vmem: bytes of VMEM that the kernel may use.
    interpret: what `pallas_call` takes.
  """
  batch, time, heads, dim = q.shape
  page_size, width = pages.shape[1], table.shape[1]
  sizes = make_sizes(time, width, page_size, topk, not interpret)
  t, layout = sizes.queries, sizes.layout
  sequences = -(-batch // cores) * cores
  heads = -(-heads // 16) * 16

  def padded(x, shape, value=0):
    widths = [(0, wanted - size) for size, wanted in zip(x.shape, shape, strict=True)]
    return jnp.pad(x, widths, constant_values=value)

  depth = -(-dim // _LANES) * _LANES
  q = padded(q, (sequences, t, heads, depth)).reshape(sequences, t * heads, depth)
  weights = padded(weights.astype(jnp.float32), (sequences, t, heads))
  weights = jnp.broadcast_to(weights.reshape(sequences, -1, 1), (*q.shape[:2], _LANES))
  keys = padded(pages, (*pages.shape[:2], depth))
  q_slot = jnp.minimum(padded(q_slot, (sequences, t), -1), width * page_size - 1)
  seen = jnp.max(q_slot, axis=1) + 1
  used = jnp.maximum(1, -(-seen // page_size))
  chunks = jnp.maximum(1, -(-seen // CHUNK))
  table = jnp.clip(padded(table, (sequences, width)), 0, pages.shape[0] - 1)
  table = padded(table, (sequences, sizes.chunks * CHUNK // page_size))
  q_slot = jnp.broadcast_to(
    jnp.tile(q_slot, (1, _SUBLANES // t))[:, :, None], (sequences, _SUBLANES, _LANES)
  )
  steps = sequences // cores

  def block(*shape):
    return pl.BlockSpec((1, *shape), lambda core, step, *_: (core * steps + step, 0, 0))

  rows = layout.parts * layout.groups * _RUNS * t
  words = pltpu.VMEM((layout.parts, layout.groups * _SUBLANES, _LANES), jnp.int32)
  indices, threshold = pl.pallas_call(
    functools.partial(_kernel, sizes=sizes),
    grid_spec=pltpu.PrefetchScalarGridSpec(
      num_scalar_prefetch=3,
      grid=(cores, steps),
      in_specs=[
        block(*q.shape[1:]),
        block(*weights.shape[1:]),
        block(_SUBLANES, _LANES),
        pl.BlockSpec(memory_space=pltpu.HBM),
      ],
      out_specs=[block(_SUBLANES, layout.slots), block(_SUBLANES, _LANES)],
      scratch_shapes=[
        pltpu.VMEM((_RING, CHUNK, depth), keys.dtype),
        pltpu.VMEM((rows, _LANES), jnp.int32),
        pltpu.VMEM((2, _SUBLANES, _LANES), jnp.int32),
        words,
        words,
        pltpu.SemaphoreType.DMA((_RING,)),
        pltpu.SMEM((3,), jnp.int32),
      ],
    ),
    out_shape=[
      jax.ShapeDtypeStruct((sequences, _SUBLANES, layout.slots), jnp.int32),
      jax.ShapeDtypeStruct((sequences, _SUBLANES, _LANES), jnp.float32),
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel', 'arbitrary'),
      disable_bounds_checks=True,
      vmem_limit_bytes=vmem,
    ),
    cost_estimate=cost(q, sizes, cores),
    interpret=interpret,
    name='indexer_topk_decode',
  )(table.reshape(-1), used, chunks, q, weights, q_slot, keys)
  return indices[:batch, :time, :topk], threshold[:batch, :time, 0]
