"""Text of a growing list of tokens, and where a stop string ends it."""

from collections.abc import Iterable, Sequence
from typing import Protocol

_INCOMPLETE = '\N{REPLACEMENT CHARACTER}'
# A run of so many tokens without a whole character is no text; waiting longer would only cost time.
_MAX_OPEN = 64


class Tokenizer(Protocol):
  """What the engine needs of a tokenizer."""

  def decode(self, ids: Iterable[int]) -> str:
    """Text of any ids; incomplete UTF-8 becomes U+FFFD."""
    ...


class TextStream:
  """Decodes token by token, so that the pieces add up to the text of the whole.

  Held back is a last character that may be incomplete, and what may be the beginning of a stop string.

  Attributes:
    text: everything given out so far; nothing of a stop string or after it.
    stop: the stop string that was found.
  """

  def __init__(self, tokenizer: Tokenizer, stops: Sequence[str] = ()):
    self._tokenizer = tokenizer
    self._stops = tuple(stops)
    self._known: list[int] = []  # Decoded tokens, kept as the context of the open ones.
    self._open: list[int] = []
    self._decoded = 0  # Characters of the open tokens that went on to `_held` or `text`.
    self._held = ''
    self.text = ''
    self.stop: str | None = None

  def add(self, token: int) -> str:
    """The new text that is certain after `token`."""
    self._open.append(token)
    text = self._open_text()
    complete = not text.endswith(_INCOMPLETE) or len(self._open) >= _MAX_OPEN
    piece = text[self._decoded : len(text) if complete else len(text) - 1]
    self._decoded += len(piece)
    if complete:
      self._known, self._open, self._decoded = self._open, [], 0
    return self._give(piece)

  def finish(self) -> str:
    """What was still held back, at the end of generation."""
    piece = self._give(self._open_text()[self._decoded :])
    self._open, self._decoded = [], 0
    if self.stop is None:
      piece, self.text, self._held = piece + self._held, self.text + self._held, ''
    return piece

  def _open_text(self) -> str:
    before = self._tokenizer.decode(self._known)
    return self._tokenizer.decode(self._known + self._open)[len(before) :]

  def _give(self, piece: str) -> str:
    """The part of what is held and `piece` that no stop string can concern."""
    if self.stop is not None:
      return ''
    held = self._held + piece
    found = [(held.find(s), s) for s in self._stops if s in held]
    if found:
      end, self.stop = min(found)
      held = held[:end]
    else:
      end = len(held) - self._suspicious(held)
    self._held = held[end:]
    self.text += held[:end]
    return held[:end]

  def _suspicious(self, text: str) -> int:
    """Length of the longest end of `text` that begins a stop string."""
    longest = max((len(s) for s in self._stops), default=1) - 1
    for length in range(min(longest, len(text)), 0, -1):
      if any(s.startswith(text[-length:]) for s in self._stops):
        return length
    return 0
