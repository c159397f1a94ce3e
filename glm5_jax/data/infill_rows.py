"""Rows for GLM blank infilling: each piece of a document is a sample and a segment of its own.

A text grows when spans are moved out of it, by two slots a span, and how many there are is drawn. So a
plan of rows (packing.py) reserves what a piece takes with a margin, and a draw that needs more is drawn
again. Positions are GLM-130B's one row, because the model has rope.

A batch has, beside the usual arrays, `prefix` [T] int32: the slot at which Part A of a token's segment
ends (0 for padding). Keys before it are visible to the whole segment (glm5_jax/shapes.py).
"""

from random import Random

import numpy as np

from glm5_jax.data import infilling, packing
from glm5_jax.data.config import DataConfig
from glm5_jax.data.packing import Batch, Pieces, Read
from glm5_jax.data.tokenizer import Tokenizer

_TRIES = 16
_LENGTHS = np.array(infilling.SPAN_LENGTHS)
_MEAN = float(np.average(_LENGTHS, weights=infilling.SPAN_WEIGHTS))  # 3.157
_VARIANCE = float(np.average((_LENGTHS - _MEAN) ** 2, weights=infilling.SPAN_WEIGHTS))


def tokens(tokenizer: Tokenizer) -> infilling.Tokens:
  """GLM's structural tokens; the end-of-document token opens a text as well.

  Raises:
    DataError: The tokenizer lacks one.
  """
  purpose = "objective 'infilling'"
  return infilling.Tokens(
    start=tokenizer.eot_id,
    end=tokenizer.eot_id,
    mask=tokenizer.special('[MASK]', purpose),
    sentence_mask=tokenizer.special('[sMASK]', purpose),
    generation_mask=tokenizer.special('[gMASK]', purpose),
    sop=tokenizer.special('<sop>', purpose),
    eop=tokenizer.special('<eop>', purpose),
    block_mask=tokenizer.special_ids.get('[dBLOCK]'),
  )


def sentence_ends(tokenizer: Tokenizer) -> np.ndarray:
  """[V] bool: tokens whose text contains the end of a sentence, a line end included."""
  texts = (tokenizer.decode([token]) for token in range(tokenizer.vocab_size))
  return np.array([any(end in text for end in infilling.SENTENCE_ENDS) for text in texts])


class InfillRows:
  """Makes the rows of the objective 'infilling'.

  Raises:
    DataError: The tokenizer lacks a token.
  """

  def __init__(self, config: DataConfig, tokenizer: Tokenizer):
    self._recipe = config.infilling
    self._seq_len = config.seq_len
    self._ids = tokens(tokenizer)
    if self._recipe.block_mask_prob:
      tokenizer.special('[dBLOCK]', 'block_mask_prob')
    self._sentence_end = sentence_ends(tokenizer) if self._recipe.sentence_prob else None

  def slots(self, inputs: np.ndarray) -> np.ndarray:
    """Positions to reserve for pieces of so many inputs: two standard deviations above the mean."""
    text = np.asarray(inputs) + 1
    share = max(self._recipe.mask_ratio, self._recipe.sentence_ratio)
    hidden = np.floor(share * text)
    # How many lengths it takes to reach `hidden`: a renewal process, asymptotically normal.
    excess = (_VARIANCE + _MEAN**2) / (2 * _MEAN**2)
    deviation = np.sqrt(_VARIANCE * hidden / _MEAN**3)
    spans = np.minimum(hidden, np.ceil(hidden / _MEAN + excess + 2 * deviation))
    return text + 2 * np.maximum(spans, 1).astype(np.int64)

  @staticmethod
  def held_out_slots(inputs: np.ndarray) -> np.ndarray:
    """Positions that `held_out_row` uses."""
    return np.asarray(inputs) + 2

  def train_row(self, pieces: Pieces, read: Read, rng: Random) -> Batch:
    """One row of a plan made with `slots`.

    Left out is a piece too short to hide anything of it (fewer than 6 inputs, at a ratio of 0.15), and
    one for which 16 draws in a row need more than their reserve.
    """
    row, at, reserved = self.empty_row(), 0, 0
    segment = 0
    for document, start, length in _columns(pieces):
      reserved += int(self.slots(np.array(length)))
      text = [self._ids.start, *read(document, start, length)[1].tolist()]
      sample = self._draw(text, reserved - at, rng)
      if sample is not None:
        segment += 1
        at = _place(row, at, segment, sample)
    return row

  def held_out_row(self, pieces: Pieces, read: Read) -> Batch:
    """One row of a plan made with `held_out_slots`: every target of a piece once, without any draw.

    Part A is the piece's context (none but the start, unless evaluation overlaps) and [gMASK], Part B
    all the rest. Left to right, so bits per byte compare with those of a causal model.
    """
    row, at = self.empty_row(), 0
    for segment, (piece, context) in enumerate(
      zip(_columns(pieces), pieces.context.tolist(), strict=True), 1
    ):
      text = [self._ids.start, *read(*piece)[1].tolist()]
      at = _place(row, at, segment, infilling.suffix_sample(text, 1 + context, self._ids))
    return row

  def empty_row(self) -> Batch:
    """A row of padding."""
    row = packing.empty_row(self._seq_len, self._ids.end)
    return row | {'prefix': np.zeros(self._seq_len, np.int32)}

  def _draw(self, text: list[int], room: int, rng: Random) -> infilling.Sample | None:
    for _ in range(_TRIES):
      for sample in infilling.construct(
        [text], self._recipe, self._ids, rng,
        sentence_end=self._sentence_end, max_length=self._seq_len,
      ):  # fmt: skip
        if sample.sep < len(sample) <= room:
          return sample
    return None


def _columns(pieces: Pieces):
  return zip(pieces.document.tolist(), pieces.start.tolist(), pieces.length.tolist(), strict=True)


def _place(row: Batch, at: int, segment: int, sample: infilling.Sample) -> int:
  """Writes `sample` into `row` from slot `at` on; returns where it ends."""
  here = slice(at, at + len(sample))
  row['tokens'][here] = sample.tokens
  row['targets'][here] = sample.targets
  row['weights'][here] = sample.loss_mask
  row['segment_ids'][here] = segment
  row['positions'][here] = sample.one_row_positions()
  row['prefix'][here] = at + sample.sep
  return at + len(sample)
