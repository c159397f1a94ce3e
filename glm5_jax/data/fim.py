"""Fill-in-the-middle for source code (arXiv 2207.14255), with the code tokens of GLM's tokenizer.

A document is cut in three at random and rearranged, so that a causal model learns to write the middle:

  PSM  <|code_prefix|> prefix <|code_suffix|> suffix <|code_middle|> middle
  SPM  <|code_suffix|> suffix <|code_prefix|> prefix <|code_middle|> middle

Cuts lie between tokens, not between characters: the result then has exactly three tokens more, which is
known before a document is read, so that rows are still planned from lengths alone and found by number.
Cuts within a token (which the paper finds better for completing at any character) would need the text
and its tokens anew, of unknown length. Which documents are rearranged depends on the seed alone, where
they are cut on the epoch as well.

A document longer than a row is rearranged run by run, each as long as a row holds. Packings that cut
documents only where they exceed a row then have all three parts of a run as targets of one row.
"""

from typing import NamedTuple

import numpy as np

from glm5_jax.data.packing import Read
from glm5_jax.data.tokenizer import Tokenizer

EXTRA = 3  # Tokens that a run gains.


class Tokens(NamedTuple):
  """Ids of the code tokens."""

  prefix: int
  suffix: int
  middle: int

  @classmethod
  def of(cls, tokenizer: Tokenizer) -> 'Tokens':
    """Those of a tokenizer.

    Raises:
      DataError: It lacks one.
    """
    names = (f'<|code_{field}|>' for field in cls._fields)
    return cls(*(tokenizer.special(name, 'fim_rate') for name in names))


def rearrange(
  tokens: np.ndarray, ids: Tokens, rng: np.random.Generator, spm_rate: float = 0.0
) -> np.ndarray:
  """`tokens` [n] cut in three and rearranged, [n + 3].

  Args:
    tokens: Of a document or a run of one, without its end.
    ids: Code tokens.
    rng: Draws two cuts, each uniform over all n + 1 places (so a part may be empty), and the order.
    spm_rate: Probability of the order SPM.
  """
  first, second = sorted(rng.integers(0, len(tokens) + 1, 2).tolist())
  prefix, middle, suffix = np.split(np.asarray(tokens), [first, second])
  prefix, suffix, middle = (
    np.concatenate([[token], part]).astype(tokens.dtype)
    for token, part in zip(ids, (prefix, suffix, middle), strict=True)
  )
  parts = (suffix, prefix) if rng.random() < spm_rate else (prefix, suffix)
  return np.concatenate([*parts, middle])


class Documents:
  """The documents of a source, a share of them rearranged; a view that reads what it is asked for.

  Attributes:
    lengths: Inputs of each document [documents], as packing.py counts them.
    rearranged: Which documents are, [documents] bool.
  """

  def __init__(
    self, lengths: np.ndarray, read: Read, ids: Tokens, rate: float, spm_rate: float, seed: int,
    seq_len: int, whole: bool = False,
  ):  # fmt: skip
    """See the module.

    Args:
      lengths: Inputs of each document as it is, one more than its tokens.
      read: Reads the documents as they are.
      ids: Code tokens.
      rate: Probability that a document is rearranged.
      spm_rate: Of those, the share in the order SPM.
      seed: Of which documents, and where they are cut.
      seq_len: Row length.
      whole: Leave documents alone that would no longer fit a row.
    """
    self._read, self._ids, self._spm_rate, self._seed = read, ids, spm_rate, seed
    self._run = seq_len - EXTRA
    self._tokens = np.asarray(lengths, np.int64) - 1
    chance = np.random.default_rng(np.random.SeedSequence(seed, spawn_key=(1,)))
    self.rearranged = (chance.random(len(lengths)) < rate) & (self._tokens > 0)
    if whole:
      self.rearranged &= self._tokens + 1 + EXTRA <= seq_len
    runs = -(-self._tokens // self._run)
    self.lengths = np.asarray(lengths, np.int64) + EXTRA * runs * self.rearranged

  def read(
    self, document: int, start: int, length: int, epoch: int
  ) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets [length] of a run of the document as it is in this epoch."""
    if not self.rearranged[document]:
      return self._read(document, start, length)
    # With its ends the document is [eot, run 0, run 1, ..., eot]; all runs but the last are as long as a
    # row. Only those within [start, start + length] are made.
    tokens, wide = int(self._tokens[document]), self._run + EXTRA
    last_run = (tokens - 1) // self._run
    first, last = max(start - 1, 0) // wide, min((start + length - 1) // wide, last_run)
    parts = [self._read(document, 0, 1)[0]]
    for run in range(first, last + 1):
      begin = run * self._run
      _, body = self._read(document, begin, min(self._run, tokens - begin))
      rng = np.random.default_rng((self._seed, epoch, document, run))
      parts.append(rearrange(body, self._ids, rng, self._spm_rate))
    parts.append(self._read(document, tokens, 1)[1])
    sequence = np.concatenate(parts)[start - first * wide :]
    return sequence[:length], sequence[1 : length + 1]
