"""The unions of neighbouring queries' selections, by merging lists that are sorted already.

`layout.row_lists` says what is computed, in plain jax: XLA sorts all entries of a block twice there, and its sort
knows neither that each query's entries ascend nor that few bits tell them apart. Here 128 blocks lie side by side on
lanes, everything stays in VMEM, and nothing but minima, maxima, selects and shifts of whole registers is needed:

1. Bitonic merges (Batcher 1968) of M ascending lists: log2 M levels instead of a whole sort's.
2. From the last entry to the first: an entry whose row is the next one's takes over its queries, so that the first
   of a row's entries knows all of them.
3. From the first to the last: how many repeats come before each entry is how far it has to move down.
4. It moves by the powers of two of that number, the smallest first. No two entries ever meet: their distances differ
   by the repeats between them, which are fewer than the places that they are apart.

Entry i = s n + v of a block of N = 8 n entries lies in register v on sublane s, so that distances below n are those
of registers, and those above of sublanes.

Letters beyond the glossary: G query blocks, M queries of one block, N entries of one block, n = N / 8.
"""

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.sparse_mla import layout

LANES, SUBLANES = layout.LANES, 8
_LEAST = 16 * SUBLANES  # Entries: a row's up to 16 lie on two neighbouring sublanes at most.
_MASK_BITS = 16
BIG = (1 << 31) - 1
MOST_ENTRIES = 1 << 15


def _power_of_two(size: int) -> int:
  return 1 << max(0, size - 1).bit_length()


def _sublane():
  return lax.broadcasted_iota(jnp.int32, (SUBLANES, LANES), 0)


def _partner(x, distance: int):
  """x[s ^ distance] on sublane s."""
  down = pltpu.roll(x, SUBLANES - distance, 0)  # x[s + distance]
  if 2 * distance == SUBLANES:
    return down
  return jnp.where((_sublane() & distance) != 0, pltpu.roll(x, distance, 0), down)


def _following(x, distance: int, fill):
  """x[s + distance] on sublane s, `fill` behind the last."""
  return jnp.where(_sublane() < SUBLANES - distance, pltpu.roll(x, SUBLANES - distance, 0), fill)


def _merge(entries, n: int, run: int) -> None:
  """Sorts each lane's entries, which are runs of `run` that ascend and descend in turn.

  A merge that is to descend is one of complements that ascends.
  """
  flipped = jnp.zeros((SUBLANES, LANES), jnp.int32)
  length = 2 * run
  while length <= SUBLANES * n:
    # Of the last merge, none descends: no sublane has this bit.
    wanted = jnp.where((_sublane() * n & length) != 0, -1, 0)
    flip: Any = flipped ^ wanted
    flipped = wanted
    distance = length // 2
    if distance >= n:
      _merge_sublanes(entries, n, distance // n, flip)
      distance, flip = n // 2, None
    while distance:
      stages = min(4, distance.bit_length())
      _merge_registers(entries, n, distance, stages, flip)
      distance, flip = distance >> stages, None
    length *= 2


def _merge_sublanes(entries, n: int, distance: int, flip) -> None:
  """Minimum below, maximum above, at this distance of sublanes and its halves."""

  def body(i, carry):
    for v in range(8):
      x = entries[8 * i + v] ^ flip
      for d in (d for d in (4, 2, 1) if d <= distance):
        y = _partner(x, d)
        x = jnp.where((_sublane() & d) != 0, jnp.maximum(x, y), jnp.minimum(x, y))
      entries[8 * i + v] = x
    return carry

  lax.fori_loop(0, n // 8, body, 0)


def _merge_registers(entries, n: int, distance: int, stages: int, flip) -> None:
  """The same at this distance of registers and `stages - 1` halves of it, once through VMEM."""
  group, step = 1 << stages, 2 * distance >> stages

  def body(i, carry):
    first = lax.div(i, step) * (2 * distance) + lax.rem(i, step)
    xs = [entries[first + j * step] for j in range(group)]
    xs = xs if flip is None else [x ^ flip for x in xs]
    for d in (group >> (k + 1) for k in range(stages)):
      for j in (j for j in range(group) if not j & d):
        xs[j], xs[j + d] = jnp.minimum(xs[j], xs[j + d]), jnp.maximum(xs[j], xs[j + d])
    for j in range(group):
      entries[first + j * step] = xs[j]
    return carry

  lax.fori_loop(0, n // group, body, 0)


def _collect(entries, words, n: int, queries: int):
  """Entries become rows, `words` the queries of each entry and those behind it of the same row.

  Returns how many entries of each sublane repeat the one before, [8, 128].
  """
  bits = queries.bit_length() - 1

  def body(i, carry):
    next_row, next_word, repeats = carry
    for v in range(8):
      at = n - 1 - (8 * i + v)
      entry = entries[at]
      row = entry >> bits
      same = row == next_row
      word = (1 << (entry & (queries - 1))) | jnp.where(same, next_word, 0)
      entries[at], words[at] = row, word
      next_row, next_word = row, word
      repeats = repeats + same.astype(jnp.int32)
    return next_row, next_word, repeats

  zero = jnp.zeros((SUBLANES, LANES), jnp.int32)
  repeats = lax.fori_loop(0, n // 8, body, (zero - 1, zero, zero))[2]
  # A row whose entries end on the next sublane.
  next_row, next_word = _following(entries[0], 1, -1), _following(words[0], 1, 0)
  across = entries[n - 1] == next_row
  for at in range(n - 1, n - queries, -1):
    word = words[at] | jnp.where(entries[at] == next_row, next_word, 0)
    words[at] = word
    next_word = jnp.where(entries[at] == next_row, word, next_word)
  # What repeats across is counted with the sublane that it is on.
  return repeats + jnp.where(_sublane() > 0, pltpu.roll(across.astype(jnp.int32), 1, 0), 0)


def _count(entries, words, n: int, repeats) -> jax.Array:
  """The high half of `words` becomes the number of repeats before; words of repeats 0.

  Returns the number of entries that are none, [8, 128], the same on all sublanes.
  """
  before = jnp.where(_sublane() >= 1, pltpu.roll(repeats, 1, 0), 0)
  for d in (1, 2, 4):
    before = before + jnp.where(_sublane() >= d, pltpu.roll(before, d, 0), 0)
  last = jnp.where(_sublane() == 0, -1, pltpu.roll(entries[n - 1], 1, 0))

  def body(i, carry):
    count, previous = carry
    for v in range(8):
      at = 8 * i + v
      row = entries[at]
      repeat = row == previous
      words[at] = jnp.where(repeat, 0, words[at] | count << _MASK_BITS)
      count, previous = count + repeat.astype(jnp.int32), row
    return count, row

  count, _ = lax.fori_loop(0, n // 8, body, (before, last))
  total = jnp.where(_sublane() == SUBLANES - 1, count, 0)
  for d in (1, 2, 4):
    total = total + pltpu.roll(total, d, 0)
  return SUBLANES * n - total


def _moved(own, other, bit: int):
  """(row, word) of a place after the move by 2 ** `bit`, from its own and those of that much behind."""
  comes = other[1] & (1 << (_MASK_BITS + bit)) != 0
  goes = own[1] & (1 << (_MASK_BITS + bit)) != 0
  row = jnp.where(comes, other[0], own[0])
  return row, jnp.where(comes, other[1], jnp.where(goes, 0, own[1]))


def _move_registers(rows, words, n: int, bit: int) -> None:
  """Eight registers after eight, in the order in which each is read before it is overwritten."""
  distance = 1 << bit
  step = max(distance, 8)

  def load(at):
    return [(rows[at + j], words[at + j]) for j in range(8)]

  def store(at, own, others):
    for j in range(8):
      rows[at + j], words[at + j] = _moved(own[j], others[j], bit)

  def others(own, following):
    return following if distance >= 8 else (own + following)[distance : distance + 8]

  def chain(i, carry):
    first = load(8 * i)

    def body(j, own):
      following = load(8 * i + (j + 1) * step)
      store(8 * i + j * step, own, others(own, following))
      return following

    own = lax.fori_loop(0, n // step - 1, body, first)
    following = [(_following(r, 1, 0), _following(w, 1, 0)) for r, w in first]
    store(8 * i + n - step, own, others(own, following))
    return carry

  lax.fori_loop(0, step // 8, chain, 0)


def _move_sublanes(rows, words, n: int) -> None:
  first = n.bit_length() - 1

  def body(i, carry):
    for v in range(8):
      at = 8 * i + v
      own = rows[at], words[at]
      for k in range(3):
        other = _following(own[0], 1 << k, 0), _following(own[1], 1 << k, 0)
        own = _moved(own, other, first + k)
      rows[at], words[at] = own
    return carry

  lax.fori_loop(0, n // 8, body, 0)


def _kernel(entries_hbm, rows_hbm, words_hbm, counts, rows, words, sem, *, run: int, queries: int):
  n = rows.shape[0]
  lanes = pl.ds(pl.program_id(0) * LANES, LANES)
  read = pltpu.make_async_copy(entries_hbm.at[:, :, lanes], rows, sem.at[0])
  read.start()
  read.wait()
  _merge(rows, n, run)
  repeats = _collect(rows, words, n, queries)
  counts[...] = _count(rows, words, n, repeats)
  for bit in range(n.bit_length() - 1):
    _move_registers(rows, words, n, bit)
  _move_sublanes(rows, words, n)
  writes = (
    pltpu.make_async_copy(rows, rows_hbm.at[:, :, lanes], sem.at[0]),
    pltpu.make_async_copy(words, words_hbm.at[:, :, lanes], sem.at[1]),
  )
  for write in writes:
    write.start()
  for write in writes:
    write.wait()


def loops(n: int, run: int) -> tuple[tuple[str, float], ...]:
  """(stage, how often it runs for a step of the grid) of each loop, in the order of the program.

  A loop of one iteration is none.
  """
  found: list[tuple[str, float]] = []
  length = 2 * run
  while length <= SUBLANES * n:
    distance = length // 2
    if distance >= n:
      found.append(('merge', n / 8))
      distance = n // 2
    while distance:
      stages = min(4, distance.bit_length())
      found.append(('merge', n >> stages))
      distance >>= stages
    length *= 2
  found += [('masks', n / 8), ('masks', n / 8)]
  for bit in range(n.bit_length() - 1):
    step = max(1 << bit, 8)
    found.append(('compaction', step / 8))
    found.append(('compaction', step / 8 * (n / step - 1)))
    if n == 2 * step or step == 8:  # One of the two is no loop.
      del found[-1 if n == 2 * step else -2]
  return (*found, ('compaction', n / 8))


def sizes(queries: int, length: int) -> tuple[int, int]:
  """(lists, entries of each): M and K as the kernel takes them, powers of two with N = 128 or more."""
  lists = _power_of_two(queries)
  return lists, max(_power_of_two(length), _LEAST // lists)


def fits(queries: int, length: int) -> bool:
  """Whether the kernel takes M lists of K entries: its words have 15 bits for distances."""
  lists, run = sizes(queries, length)
  return 1 < lists <= _MASK_BITS and lists * run <= MOST_ENTRIES


def _arrange(indices: jax.Array, queries: int) -> jax.Array:
  """Entries [n, 8, G] of the kernel, G a multiple of 128; every other list backwards."""
  blocks, length = indices.shape[0] // queries, indices.shape[1]
  lists, run = sizes(queries, length)
  query = jnp.arange(queries, dtype=jnp.int32)[:, None]
  entries = indices.reshape(blocks, queries, length)
  entries = jnp.where(entries >= 0, entries * lists + query, BIG)
  widths = (0, -blocks % LANES), (0, lists - queries), (0, run - length)
  entries = jnp.pad(entries, widths, constant_values=BIG)
  entries = jnp.where(jnp.arange(lists)[:, None] % 2 == 1, entries[..., ::-1], entries)
  return entries.reshape(entries.shape[0], SUBLANES, -1).transpose(2, 1, 0)


def merge(
  entries: jax.Array, lists: int, run: int, interpret: Any = False
) -> tuple[jax.Array, ...]:
  """The kernel: rows and words [n, 8, G], and how many count [8, G], of what `_arrange` made."""
  n, _, lanes = entries.shape
  anywhere = pl.BlockSpec(memory_space=pltpu.HBM)
  same = jax.ShapeDtypeStruct(entries.shape, jnp.int32)
  return pl.pallas_call(
    functools.partial(_kernel, run=run, queries=lists),
    grid=(lanes // LANES,),
    in_specs=[anywhere],
    out_specs=[anywhere, anywhere, pl.BlockSpec((SUBLANES, LANES), lambda i: (0, i))],
    out_shape=[same, same, jax.ShapeDtypeStruct((SUBLANES, lanes), jnp.int32)],
    scratch_shapes=[
      *[pltpu.VMEM((n, SUBLANES, LANES), jnp.int32)] * 2, pltpu.SemaphoreType.DMA((2,))
    ],
    compiler_params=pltpu.CompilerParams(
      dimension_semantics=('parallel',), vmem_limit_bytes=2 * n * 4096 + (8 << 20)
    ),
    cost_estimate=pl.CostEstimate(flops=0, transcendentals=0, bytes_accessed=3 * entries.nbytes),
    interpret=interpret,
    name='sparse_mla_lists',
  )(entries)  # fmt: skip


def unions(
  indices: jax.Array, queries: int, interpret: Any = False
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """The union of the selections of each block of `queries` neighbouring queries.

  Args:
    indices: [G * M, K] int32 row ids, ascending, none twice, then -1; below 2^31 / 16.
    queries: M.
    interpret: passed to pallas_call.

  Returns:
    rows [G, M * K] int32, ascending; masks [G, M * K] int32, bit m set where query m of the block selected
    the row; sizes [G] int32, how many there are. What lies behind them is undefined.

  Raises:
    ValueError: not `fits`.
  """
  if not fits(queries, indices.shape[1]):
    raise ValueError(
      f'lists of {indices.shape[1]} for {queries} queries: from 2 to 16 queries, and {MOST_ENTRIES}'
      ' entries, are merged; use layout.row_lists'
    )
  blocks = indices.shape[0] // queries
  lists, run = sizes(queries, indices.shape[1])
  rows, words, counts = merge(_arrange(indices, queries), lists, run, interpret)
  rows, words = (
    a.transpose(2, 1, 0).reshape(a.shape[2], -1)[:blocks, : queries * indices.shape[1]]
    for a in (rows, words)
  )
  # What fills up short lists is one more row, the last.
  there = jnp.arange(rows.shape[1]) < counts[0, :blocks, None]
  there &= rows != BIG >> (lists.bit_length() - 1)
  masks = words & ((1 << _MASK_BITS) - 1)
  return rows, masks, jnp.sum(there, axis=1, dtype=jnp.int32)


def row_lists(
  indices: jax.Array, queries: int, chunk: int, total_rows: int, interpret: bool
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """`layout.row_lists`, by the kernel where it takes such lists and nothing is interpreted."""
  if interpret or not fits(queries, indices.shape[1]):
    return layout.row_lists(indices, queries, chunk, total_rows)
  return layout.fill_up(*unions(indices, queries), chunk, total_rows)
