"""Which part of which document goes where: plans of rows, and rows made from them.

A document of tokens t1..tn is the sequence [eot, t1, ..., tn, eot]: its n + 1 inputs are all but the
last, its targets all but the first. A *piece* is a run of inputs of one document; a *row* is a list
of pieces, at most T inputs together. A plan is made from lengths alone, so every row of an epoch is
addressable by its number: shuffling, sharding and resuming are then arithmetic on one integer, and
the global batch does not depend on the number of hosts. (Grain's packing iterators hold a window of
half-filled rows instead, per host. On log-normal lengths they fill 0.974 to 0.994 of the rows with
64 to 512 open rows, against more than 0.999 here.)

The three ways:
  concat     documents end to end, cut every T inputs (random truncation; GLM-4.5's pre-training,
             arXiv 2508.06471 section 2.3).
  best_fit   documents cut only where they exceed T; each piece, longest first, into the fullest row
             with room (best-fit packing, arXiv 2404.10830; GLM-4.5's mid-training).
  first_fit  the same pieces in random order, each into the first open row with room.
"""

import dataclasses
from collections.abc import Callable
from typing import Literal

import numpy as np

Packing = Literal['concat', 'first_fit', 'best_fit']
Batch = dict[str, np.ndarray]
# (document, start, length) -> inputs and targets, [length] each.
Read = Callable[[int, int, int], tuple[np.ndarray, np.ndarray]]
# (document, start, length) -> weights of these targets, [length] or one for all.
Weights = Callable[[int, int, int], np.ndarray | float]


@dataclasses.dataclass(frozen=True)
class Pieces:
  """Runs of inputs, one per index; all arrays [pieces] int64.

  Attributes:
    document: Index of the document.
    start: First input within the document.
    length: Number of inputs.
    context: How many leading inputs are only read, because an earlier piece predicted from them.
  """

  document: np.ndarray
  start: np.ndarray
  length: np.ndarray
  context: np.ndarray

  def take(self, index: np.ndarray | slice) -> 'Pieces':
    return Pieces(self.document[index], self.start[index], self.length[index], self.context[index])


@dataclasses.dataclass(frozen=True)
class RowPlan:
  """Rows of pieces.

  Attributes:
    pieces: In the order of their rows.
    offsets: [rows + 1]; row r holds pieces offsets[r] to offsets[r + 1].
    seq_len: Row length T.
  """

  pieces: Pieces
  offsets: np.ndarray
  seq_len: int

  def __len__(self) -> int:
    return len(self.offsets) - 1

  @property
  def density(self) -> float:
    """Share of the positions that hold an input, rather than padding."""
    return float(self.pieces.length.sum() / max(1, len(self) * self.seq_len))

  def row(self, index: int) -> Pieces:
    return self.pieces.take(slice(self.offsets[index], self.offsets[index + 1]))


def cut(lengths: np.ndarray, seq_len: int, overlap: int = 0) -> Pieces:
  """Cuts documents into pieces of at most `seq_len` inputs.

  Args:
    lengths: Inputs of each document, [documents], positive.
    seq_len: Row length T.
    overlap: Inputs that a continuation repeats from the piece before it, as context without loss.
      Every input still counts exactly once.

  Raises:
    ValueError: `overlap` is not in [0, seq_len).
  """
  if not 0 <= overlap < seq_len:
    raise ValueError(f'overlap {overlap} must lie in [0, seq_len {seq_len})')
  lengths = np.asarray(lengths, np.int64)
  stride = seq_len - overlap
  counts = 1 + np.maximum(0, -(-(lengths - seq_len) // stride))
  document = np.repeat(np.arange(len(lengths)), counts)
  # Number of the piece within its document: a running index minus where the document begins.
  number = np.arange(len(document)) - np.repeat(np.cumsum(counts) - counts, counts)
  start = number * stride
  length = np.minimum(seq_len, lengths[document] - start)
  return Pieces(document, start, length, np.where(number > 0, overlap, 0))


def plan_rows(
  lengths: np.ndarray,
  seq_len: int,
  packing: Packing,
  seed: int | tuple[int, ...],
  overlap: int = 0,
  slots: Callable[[np.ndarray], np.ndarray] | None = None,
) -> RowPlan:
  """Plans the rows of one pass over documents of the given lengths; every input is in it once.

  The number of rows depends on the seed for 'first_fit' only. Rows come in no useful order: shuffle
  them.

  Args:
    lengths: Inputs of each document, [documents], positive.
    seq_len: Row length T.
    packing: See the module.
    seed: Of the order of the documents, for 'concat' and 'first_fit'.
    overlap: See `cut`; not for 'concat'.
    slots: How many positions of a row pieces of so many inputs take, not falling with the inputs; by
      default as many. Not for 'concat'.
  """
  rng = np.random.default_rng(seed)
  if packing == 'concat':
    if overlap or slots:
      raise ValueError(
        "overlap and slots need packing 'best_fit' or 'first_fit', where cuts are known"
      )
    return _concat(np.asarray(lengths, np.int64), seq_len, rng)
  longest = seq_len
  if slots:
    longest = int(np.searchsorted(slots(np.arange(1, seq_len + 1)), seq_len, side='right'))
  pieces = cut(lengths, longest, overlap)
  if packing == 'first_fit':
    pieces = pieces.take(rng.permutation(len(pieces.length)))
  sizes = slots(pieces.length) if slots else pieces.length
  rows = first_fit(sizes, seq_len) if packing == 'first_fit' else best_fit(sizes, seq_len)
  order = np.argsort(rows, kind='stable')
  counts = np.bincount(rows)
  return RowPlan(pieces.take(order), np.concatenate([[0], np.cumsum(counts)]), seq_len)


def _concat(lengths: np.ndarray, seq_len: int, rng: np.random.Generator) -> RowPlan:
  """Documents in random order around a circle, cut every `seq_len` inputs from a random point.

  The random point makes the cuts differ between epochs even within a single document.
  """
  order = rng.permutation(len(lengths))
  begins = np.concatenate([[0], np.cumsum(lengths[order])])
  total = int(begins[-1])
  # Where pieces begin on the circle: at documents and at cuts; a document without inputs has none.
  cuts = (rng.integers(total) + np.arange(0, total, seq_len)) % total
  edges = np.unique(np.concatenate([begins[:-1], cuts]))
  length = np.diff(np.concatenate([edges, [total]]))
  slot = np.searchsorted(begins, edges, side='right') - 1
  pieces = Pieces(order[slot], edges - begins[slot], length, np.zeros_like(length))
  # The circle opens at the first cut: what lies before it belongs to the last row.
  pieces = pieces.take(np.roll(np.arange(len(edges)), -int(np.searchsorted(edges, cuts[0]))))
  distance = np.cumsum(pieces.length) - pieces.length
  offsets = np.searchsorted(distance, np.arange(0, total, seq_len))
  return RowPlan(pieces, np.concatenate([offsets, [len(edges)]]), seq_len)


def first_fit(lengths: np.ndarray, capacity: int, open_rows: int = 1024) -> np.ndarray:
  """Row of each item: the first open one with room for it; [items] int64.

  When none of the `open_rows` has room, the fullest is closed and a new one takes its place, which
  bounds the time per item.
  """
  free = np.zeros(open_rows, np.int64)  # No room at all: full, or not opened yet.
  row_of_slot = np.zeros(open_rows, np.int64)
  rows = np.empty(len(lengths), np.int64)
  opened = 0
  for i, length in enumerate(lengths.tolist()):
    slot = int(np.argmax(free >= length))
    if free[slot] < length:
      # Open rows stay in the order of their numbers.
      closed = int(np.argmin(free))
      for array in (free, row_of_slot):
        array[closed:-1] = array[closed + 1 :]
      slot = -1
      free[slot], row_of_slot[slot] = capacity, opened
      opened += 1
    free[slot] -= length
    rows[i] = row_of_slot[slot]
  return rows


def best_fit(lengths: np.ndarray, capacity: int) -> np.ndarray:
  """Row of each item: longest first, the row with the least room that suffices; [items] int64."""
  by_room: list[list[int]] = [[] for _ in range(capacity + 1)]
  # Bit r is set where by_room[r] has a row, so the least sufficient room is found by one shift.
  rooms = 0
  rows = np.empty(len(lengths), np.int64)
  opened = 0
  values = lengths.tolist()
  for i in np.argsort(-lengths, kind='stable').tolist():
    length = values[i]
    sufficient = rooms >> length
    if sufficient:
      room = length + (sufficient & -sufficient).bit_length() - 1
      row = by_room[room].pop()
      if not by_room[room]:
        rooms ^= 1 << room
    else:
      room, row = capacity, opened
      opened += 1
    left = room - length
    if left:
      by_room[left].append(row)
      rooms |= 1 << left
    rows[i] = row
  return rows


def build_row(
  pieces: Pieces, read: Read, seq_len: int, pad_id: int, weights: Weights = lambda *_: 1.0
) -> Batch:
  """Fills one row, [T] each: tokens, targets, segment_ids and positions int32, weights float32.

  Segments count from 1 in a row, positions from 0 in a segment. Padding has segment 0, weight 0,
  position 0 and `pad_id` as token and target.
  """
  row = empty_row(seq_len, pad_id)
  at = 0
  columns = (pieces.document, pieces.start, pieces.length, pieces.context)
  for segment, piece in enumerate(zip(*(c.tolist() for c in columns), strict=True), 1):
    document, start, length, context = piece
    end = at + length
    row['tokens'][at:end], row['targets'][at:end] = read(document, start, length)
    row['weights'][at:end] = weights(document, start, length)
    row['weights'][at : at + context] = 0.0
    row['segment_ids'][at:end] = segment
    row['positions'][at:end] = np.arange(length)
    at = end
  return row


def empty_row(seq_len: int, pad_id: int) -> Batch:
  """A row of padding."""
  return {
    'tokens': np.full(seq_len, pad_id, np.int32),
    'targets': np.full(seq_len, pad_id, np.int32),
    'weights': np.zeros(seq_len, np.float32),
    'segment_ids': np.zeros(seq_len, np.int32),
    'positions': np.zeros(seq_len, np.int32),
  }
