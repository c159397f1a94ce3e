"""GLM blank infilling: a text with holes (Part A), then what belongs into them (Part B).

GLM (arXiv 2103.10360, section 2) and GLM-130B (arXiv 2210.02414, section 2.2); GLM-5 itself is a causal
model. A span x1..xL is replaced by one mask token in A, and B has it as inputs `sop x1 .. xL` with
targets `x1 .. xL eop`. A sees all of A; B sees all of A and what comes before it in B. Draws come in
the order of the published implementation (THUDM/GLM, ConstructBlockStrategy), so that the same
`random.Random` gives the same samples.
"""

import dataclasses
import itertools
import math
from collections.abc import Sequence
from random import Random
from typing import Literal, NamedTuple

import numpy as np

from glm5_jax.data.config import InfillingConfig
from glm5_jax.data.report import DataError

Mode = Literal['spans', 'sentences', 'generation']
Span = tuple[int, int]  # [start, end)

# Lengths 1 to 39, in proportion to Poisson(3).
SPAN_LENGTHS = range(1, 40)
SPAN_WEIGHTS = tuple(math.exp(-3) * 3**k / math.factorial(k) for k in SPAN_LENGTHS)
# A sentence ends at a token that contains one of these.
SENTENCE_ENDS = '.?!;:。？！；…\n'


class Tokens(NamedTuple):
  """Ids of the tokens that give a sample its structure.

  `start` opens every text ([CLS] in GLM) and `end` closes every document; they may be the same.
  """

  start: int
  end: int
  mask: int
  sentence_mask: int
  generation_mask: int
  sop: int
  eop: int
  block_mask: int | None = None  # [dBLOCK]


@dataclasses.dataclass(frozen=True)
class Sample:
  """One text of n slots in all, Part A and Part B.

  Attributes:
    tokens: [n] int32 inputs.
    targets: [n] int32; in A the inputs themselves, which do not count.
    loss_mask: [n] int32, 0 in A and 1 in B.
    positions: [2, n] int32. Row 0 counts through A, and all of a span in B has the position of its
      mask. Row 1 is 0 in A and counts 1, 2, ... through each span of B. GLM adds an embedding of each
      row; the second one needs learnt block-position embeddings, which GLM-5 does not have.
    sep: Length of A: slot `s` is visible to slot `t` iff s < sep or s <= t.
    mode: What is hidden.
  """

  tokens: np.ndarray
  targets: np.ndarray
  loss_mask: np.ndarray
  positions: np.ndarray
  sep: int
  mode: Mode

  def __len__(self) -> int:
    return len(self.tokens)

  def one_row_positions(self) -> np.ndarray:
    """[n] int32: GLM-130B's positions, for models with rope.

    Spans and sentences keep the position of their mask; the positions of generation just continue.
    """
    first = self.positions[0]
    return first if self.mode != 'generation' else first[0] + np.arange(len(self), dtype=np.int32)


def construct(
  texts: Sequence[Sequence[int]],
  recipe: InfillingConfig,
  ids: Tokens,
  rng: Random,
  *,
  sentence_end: np.ndarray | None = None,
  max_length: int = 512,
  short_prob: float = 0.0,
  noise: Random | None = None,
) -> list[Sample]:
  """The samples of a batch of texts, which share one mode and, in generation, one span length.

  A text in which the drawn spans find no room is left out.

  Args:
    texts: Each `start` tokens `end`, maybe with more documents, each closed by `end`.
    recipe: What to hide.
    ids: Structural tokens.
    rng: Source of all draws but those of `noise`.
    sentence_end: [V] bool, the tokens that end a sentence; for sentences and short texts.
    max_length: Of a text, for short texts and random positions.
    short_prob: Probability that the texts are cut into short ones (`split_texts`).
    noise: Draws the tokens that `block_mask_prob` replaces; by default `rng`, too.

  Raises:
    DataError: The recipe needs something that was not given.
  """
  if recipe.block_mask_prob and ids.block_mask is None:
    raise DataError('block_mask_prob needs a tokenizer with the token [dBLOCK], or must be 0')
  batch = [[int(token) for token in text] for text in texts]
  if rng.random() < short_prob:
    batch = split_texts(batch, ids, _known(sentence_end), max_length, rng)
  single = rng.random() < recipe.single_span_prob
  chance = 0.0 if single else rng.random()
  build = _Builder(recipe, ids, max_length, rng, noise or rng)
  if chance < recipe.span_prob:
    drawn = (_spans(text, recipe, ids, single, rng) for text in batch)
    return [
      build.blocks(text, spans, 'spans')
      for text, spans in zip(batch, drawn, strict=True)
      if spans is not None
    ]
  if chance < recipe.span_prob + recipe.sentence_prob:
    ends = _known(sentence_end)
    return [
      build.blocks(text, _sentences(text, ends, ids, recipe, rng), 'sentences') for text in batch
    ]
  shortest = max(1, int(recipe.min_generation * min(map(len, batch))))
  longest = max(map(len, batch)) - 2
  if longest < shortest:
    return []
  limit = rng.randint(shortest, longest)
  samples = []
  for text in batch:
    length = min(limit, len(text) - 2)
    if length < 1:
      continue
    if ids.end in text[1:-1] or rng.random() < recipe.suffix_prob:
      samples.append(build.suffix(text, len(text) - length))
    elif (spans := place_spans(text, [length], recipe.mask_ratio, ids, rng)) is not None:
      samples.append(build.blocks(text, spans, 'generation'))
  return samples


def draw_lengths(total: int, rng: Random) -> list[int]:
  """Span lengths from the Poisson distribution until they sum to `total` or more."""
  lengths: list[int] = []
  while total > 0:
    lengths += rng.choices(SPAN_LENGTHS, weights=SPAN_WEIGHTS)
    total -= lengths[-1]
  return lengths


def sample_spans(lengths: Sequence[int], total: int, rng: Random, offset: int = 0) -> list[Span]:
  """Spans of these lengths within [offset, offset + total), in order, at least one token apart."""
  room = total - sum(lengths) - len(lengths) + 1
  places = sorted(rng.randrange(room + 1) for _ in lengths)
  spans = []
  for place, length in zip(places, lengths, strict=True):
    spans.append((offset + place, offset + place + length))
    offset += length + 1
  return spans


def place_spans(
  text: Sequence[int], lengths: list[int], ratio: float, ids: Tokens, rng: Random
) -> list[Span] | None:
  """Spans of these lengths, each within a document: shorter documents first, up to `ratio` of each,
  and the rest in the longest. None if they find no room there.
  """
  for _ in range(2):  # Once would do; the published code shuffles twice.
    rng.shuffle(lengths)
  borders = [-1, *(i for i, token in enumerate(text) if token == ids.end)]
  documents = []
  for before, after in zip(reversed(borders), [len(text), *reversed(borders)], strict=False):
    start = before + 1
    if start < len(text) and text[start] == ids.start:
      start += 1
    length = after - start
    if after == len(text) and length > 0:
      length -= 1  # A document that is cut off keeps its last token.
    documents.append((start, length))
  documents.sort(key=lambda document: document[1])
  spans: list[Span] = []
  for number, (start, length) in enumerate(documents, 1):
    rest, count, used = lengths[len(spans) :], 0, 0
    last = number == len(documents)
    while count < len(rest) and used + rest[count] + last * count <= (
      length if last else int(ratio * length)
    ):
      used += rest[count]
      count += 1
    spans += sample_spans(rest[:count], length, rng, start) if count else []
  return spans if len(spans) == len(lengths) else None


def split_texts(
  texts: Sequence[list[int]], ids: Tokens, sentence_end: np.ndarray, max_length: int, rng: Random
) -> list[list[int]]:
  """Short texts: runs of one random length, moved back to where sentences or documents end.

  Args:
    texts: As in `construct`.
    ids: Structural tokens.
    sentence_end: [V] bool.
    max_length: Of a text; as many runs of each as fit it.
    rng: Draws the length, from 32 on, and where runs begin.
  """

  def ends(token: int) -> bool:
    return token == ids.end or bool(sentence_end[token])

  length = rng.randrange(32, max_length - 1)
  out = []
  for text in texts:
    body = text[1:]
    for _ in range((max_length - 1) // length):
      run = body
      if length < len(body):
        start = rng.randrange(len(body) - length)
        while start > 0 and (body[start] == ids.end or not ends(body[start - 1])):
          start -= 1
        end = start + length
        while end > start and not ends(body[end - 1]):
          end -= 1
        run = body[start : end if end - start >= length // 2 else start + length]
      out.append([ids.start, *run])
  return out


def pad(samples: Sequence[Sample]) -> dict[str, np.ndarray]:
  """Samples as arrays [B, n] of the longest, zeros behind: tokens, targets, loss_mask, positions
  [B, 2, n] and sep [B].
  """
  longest = max(map(len, samples))

  def rows(name: str) -> np.ndarray:
    arrays = [getattr(sample, name) for sample in samples]
    return np.stack(
      [np.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, longest - a.shape[-1])]) for a in arrays]
    )

  out = {name: rows(name) for name in ('tokens', 'targets', 'loss_mask', 'positions')}
  return out | {'sep': np.array([sample.sep for sample in samples], np.int32)}


def _known(sentence_end: np.ndarray | None) -> np.ndarray:
  if sentence_end is None:
    raise DataError('hiding sentences, or short texts, needs `sentence_end`')
  return sentence_end


def _spans(
  text: list[int], recipe: InfillingConfig, ids: Tokens, single: bool, rng: Random
) -> list[Span] | None:
  hidden = 1 if single else int(recipe.mask_ratio * len(text))  # Any span holds one token.
  return place_spans(text, draw_lengths(hidden, rng), recipe.mask_ratio, ids, rng)


def _sentences(
  text: list[int], sentence_end: np.ndarray, ids: Tokens, recipe: InfillingConfig, rng: Random
) -> list[Span]:
  """Whole sentences in random order, until they hold `sentence_ratio` of the text."""
  sentences: list[Span] = []
  start = 1 if text[0] == ids.start else 0
  for i, token in enumerate(text):
    if sentence_end[token]:
      if start < i + 1:
        sentences.append((start, i + 1))
      start = i + 1
    elif token == ids.end:
      start = i + 1
  if start < len(text):
    sentences.append((start, len(text)))
  rng.shuffle(sentences)
  hidden = itertools.accumulate(end - start for start, end in sentences)
  enough = int(recipe.sentence_ratio * len(text))
  count = next((n for n, total in enumerate(hidden, 1) if total >= enough), len(sentences))
  return sentences[:count]


@dataclasses.dataclass(frozen=True)
class _Builder:
  """Lays out Part A and Part B."""

  recipe: InfillingConfig
  ids: Tokens
  max_length: int
  rng: Random
  noise: Random

  def blocks(self, text: list[int], spans: list[Span], mode: Mode) -> Sample:
    """A sample with `spans` hidden, which do not overlap."""
    part_a: list[int] = []
    mask_at: dict[Span, int] = {}
    last = 0
    for start, end in sorted(spans):
      part_a += text[last:start]
      mask_at[start, end] = len(part_a)
      part_a.append(self._mask(mode))
      last = end
    part_a += text[last:]
    sep = len(part_a)
    offset = 0
    if self.recipe.random_position and sep < self.max_length:
      offset = self.rng.randrange(self.max_length - sep + 1)
    spans = list(spans)
    if self.recipe.shuffle_spans:
      self.rng.shuffle(spans)
    else:
      spans.sort()
    inputs, targets = list(part_a), list(part_a)
    rows = [list(range(sep)), [0] * sep]
    for start, end in spans:
      hidden = text[start:end]
      inputs += [self.ids.sop, *(self._noisy(hidden) if mode == 'spans' else hidden)]
      targets += [*hidden, self.ids.eop]
      rows[0] += [mask_at[start, end]] * (end - start + 1)
      rows[1] += range(1, end - start + 2)
    return self._sample(inputs, targets, rows, sep, offset, mode)

  def suffix(self, text: list[int], division: int) -> Sample:
    """A sample that generates text[division:], including the `end` it has there and without `eop`."""
    part_a = [*text[:division], self._mask('generation')]
    sep, hidden = len(part_a), text[division:]
    inputs, targets = [*part_a, self.ids.sop, *hidden[:-1]], [*part_a, *hidden]
    rows = [[*range(sep), *([division] * len(hidden))], [*([0] * sep), *range(1, len(hidden) + 1)]]
    return self._sample(inputs, targets, rows, sep, 0, 'generation')

  def _mask(self, mode: Mode) -> int:
    if mode == 'spans' or not self.recipe.task_masks:
      return self.ids.mask
    return self.ids.sentence_mask if mode == 'sentences' else self.ids.generation_mask

  def _noisy(self, hidden: list[int]) -> list[int]:
    share, replacement = self.recipe.block_mask_prob, self.ids.block_mask
    if not share or replacement is None:
      return hidden
    return [replacement if self.noise.random() < share else token for token in hidden]

  def _sample(
    self, inputs: list[int], targets: list[int], rows: list[list[int]], sep: int, offset: int,
    mode: Mode,
  ) -> Sample:  # fmt: skip
    positions = np.array(rows, np.int32)
    positions[0] += offset
    if not self.recipe.block_positions:
      positions[1, sep:] = 1
    loss_mask = (np.arange(len(inputs)) >= sep).astype(np.int32)
    return Sample(
      np.array(inputs, np.int32), np.array(targets, np.int32), loss_mask, positions, sep, mode
    )


def suffix_sample(text: Sequence[int], division: int, ids: Tokens) -> Sample:
  """Generation of text[division:] behind [gMASK], without any draw."""
  rng = Random(0)
  return _Builder(InfillingConfig(), ids, 0, rng, rng).suffix(list(map(int, text)), division)
