"""What is wrong with a user's data, where, and how often.

A problem with one document is counted and skipped (`on_bad='skip'`) or ends the run at once
(`on_bad='fatal'`). A problem with the request itself (no such folder, nothing left to train on) is
always a `DataError`.
"""

import collections
import dataclasses
from typing import Any

# Problem -> how a person would say it.
PROBLEMS = {
  'unreadable': 'cannot be read',
  'not_utf8': 'is not valid UTF-8',
  'empty': 'is empty',
  'broken_json': 'is not a JSON object',
  'missing_field': 'has no text in the wanted field',
  'too_long': 'is longer than a row',
  'bad_chat': 'is not a well-formed conversation',
}


class DataError(ValueError):
  """The data cannot be used as asked; the message says what, where, and what to do."""


@dataclasses.dataclass(frozen=True)
class Origin:
  """Where a document came from.

  Attributes:
    path: The file.
    line: Line of a text or JSONL file, row of a Parquet file, record of an ArrayRecord file, all
      counted from 1; 0 stands for the whole file.
  """

  path: str
  line: int = 0

  def __str__(self) -> str:
    return f'{self.path}:{self.line}' if self.line else self.path


@dataclasses.dataclass
class DataReport:
  """Running account of the documents read and the ones that could not be used.

  Attributes:
    on_bad: 'skip' counts a bad document and goes on, 'fatal' raises `DataError` at the first.
    documents: Usable documents.
    num_bytes: Their size in UTF-8.
    counts: Problem -> number of occurrences; keys of `PROBLEMS`.
    examples: The first few problems of each kind, in full.
  """

  on_bad: str = 'skip'
  documents: int = 0
  num_bytes: int = 0
  counts: collections.Counter[str] = dataclasses.field(default_factory=collections.Counter)
  examples: list[str] = dataclasses.field(default_factory=list)
  max_examples_per_kind: int = 5

  def bad(self, kind: str, origin: Origin, detail: str) -> None:
    """Records one problem, or raises `DataError` when `on_bad` is 'fatal'."""
    message = f'{origin}: {PROBLEMS[kind]}: {detail}'
    self.counts[kind] += 1
    if self.counts[kind] <= self.max_examples_per_kind:
      self.examples.append(message)
    if self.on_bad == 'fatal':
      raise DataError(f"{message} (on_bad='skip' counts such documents and leaves them out)")

  def merge(self, other: 'DataReport') -> None:
    """Adds another account to this one; raises if it has problems and `on_bad` is 'fatal'."""
    self.documents += other.documents
    self.num_bytes += other.num_bytes
    self.counts.update(other.counts)
    self.examples += other.examples
    if self.on_bad == 'fatal' and other.examples:
      raise DataError(other.examples[0])

  def as_dict(self) -> dict[str, Any]:
    """JSON-able summary, for logs, caches and report.md."""
    return {
      'documents': self.documents,
      'bytes': self.num_bytes,
      'bad': sum(self.counts.values()),
      'bad_by_kind': dict(self.counts),
      'examples': list(self.examples),
    }

  @classmethod
  def from_dict(cls, d: dict[str, Any], on_bad: str = 'skip') -> 'DataReport':
    """Inverse of `as_dict`."""
    return cls(
      on_bad=on_bad,
      documents=d['documents'],
      num_bytes=d['bytes'],
      counts=collections.Counter(d['bad_by_kind']),
      examples=list(d['examples']),
    )

  def __str__(self) -> str:
    text = f'{self.documents} documents, {self.num_bytes / 2**20:.2f} MiB'
    if not self.counts:
      return text
    kinds = ', '.join(f'{n} {kind}' for kind, n in sorted(self.counts.items()))
    return '\n  '.join([f'{text}; left out: {kinds}', *self.examples])
