"""Tokenized documents as one flat array, kept on disk so that a restart does not tokenize again.

The array is `eot d1 eot d2 eot ... dn eot`: every document lies between two end-of-document tokens,
so its inputs and its targets are one slice of it, and the same slice moved by one. Conversations
bring their own first token and need no other; of theirs a second array says which targets are learnt.
"""

import contextlib
import dataclasses
import functools
import hashlib
import io
import json
import logging
import os
import pathlib
import shutil
import tempfile
import zipfile
from collections.abc import Callable, Iterable, Iterator
from typing import Any, BinaryIO, NamedTuple

import numpy as np

from glm5_jax.data import conversations
from glm5_jax.data.config import SourceConfig
from glm5_jax.data.report import DataReport, Origin
from glm5_jax.data.sources import Document
from glm5_jax.data.tokenizer import Tokenizer

_log = logging.getLogger(__name__)
# Part of every cache key: raise it when the meaning of the files changes.
_VERSION = 1
# Text handed to the tokenizer at a time: enough to keep its threads busy, small beside memory.
_CHUNK_BYTES = 4 * 2**20


@dataclasses.dataclass(frozen=True)
class TokenStore:
  """Documents as tokens.

  Attributes:
    tokens: The flat array (see the module), uint16 or uint32, in memory or mapped from disk.
    offsets: [documents + 1] int64, where each document's leading end-of-document token lies.
    num_bytes: [documents] int64, length of the text in UTF-8.
    split_hash: [documents] uint32, see `sources.Document`.
    file_index: [documents] int32 into `files`.
    line: [documents] int64, see `report.Origin`.
    files: Paths.
    report: What was read and what was left out (`DataReport.as_dict`).
    fingerprint: Hash of the tokens and their borders.
    learnt: [tokens] bool, whether a token is learnt as a target; None if all are.
  """

  tokens: np.ndarray
  offsets: np.ndarray
  num_bytes: np.ndarray
  split_hash: np.ndarray
  file_index: np.ndarray
  line: np.ndarray
  files: list[str]
  report: dict[str, Any]
  fingerprint: str
  learnt: np.ndarray | None = None

  def __len__(self) -> int:
    return len(self.num_bytes)

  @functools.cached_property
  def lengths(self) -> np.ndarray:
    """Inputs of each document: its tokens and one for the leading end-of-document token."""
    return np.diff(self.offsets)

  def origin(self, document: int) -> Origin:
    return Origin(self.files[self.file_index[document]], int(self.line[document]))

  def read(self, document: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    """Inputs and targets [length] of a run of a document."""
    at = int(self.offsets[document]) + start
    return self.tokens[at : at + length], self.tokens[at + 1 : at + length + 1]

  def weights(self, document: int, start: int, length: int) -> np.ndarray | float:
    """Weights of the targets that `read` gives: [length], or 1 for all."""
    if self.learnt is None:
      return 1.0
    at = int(self.offsets[document]) + start + 1
    return self.learnt[at : at + length].astype(np.float32)


def cache_key(*parts: object) -> str:
  """Name of a cache entry that depends on all of `parts`."""
  return hashlib.sha256(repr((_VERSION, *parts)).encode()).hexdigest()[:32]


def build_store(
  documents: Iterable[Document],
  report: DataReport,
  tokenizer: Tokenizer,
  source: SourceConfig,
  folder: pathlib.Path | None,
) -> TokenStore:
  """Tokenizes documents into `folder` (which appears whole or not at all), or into memory.

  Args:
    documents: What to tokenize, read once.
    report: The account that reading `documents` fills; stored with the tokens.
    tokenizer: Its end-of-document token separates the documents.
    source: Where they come from; says whether they are texts or conversations.
    folder: Where to keep the result; None for nowhere. An existing one is replaced.
  """
  if folder is None:
    buffer = io.BytesIO()
    columns, meta = _write(documents, report, _encoder(tokenizer, source), buffer)
    tokens = np.frombuffer(buffer.getbuffer(), meta['dtype'])
    return _store(tokens, columns, meta)
  folder.parent.mkdir(parents=True, exist_ok=True)
  with tempfile.TemporaryDirectory(dir=folder.parent, prefix='.partial-') as name:
    partial = pathlib.Path(name, 'store')
    partial.mkdir()
    with (partial / 'tokens.bin').open('wb') as file:
      columns, meta = _write(documents, report, _encoder(tokenizer, source), file)
    np.savez(partial / 'documents.npz', **columns)
    (partial / 'meta.json').write_text(json.dumps(meta), encoding='utf-8')
    if folder.exists():
      shutil.rmtree(folder)
    # Another process may have been faster with the same content.
    with contextlib.suppress(OSError):
      os.rename(partial, folder)
  store = load_store(folder)
  if store is None:
    raise OSError(f'{folder}: the token cache could not be written; is the disk full?')
  return store


def load_store(folder: pathlib.Path) -> TokenStore | None:
  """Opens what `build_store` wrote; None if there is nothing, or it is damaged (and logged)."""
  if not folder.is_dir():
    return None
  try:
    meta = json.loads((folder / 'meta.json').read_text(encoding='utf-8'))
    with np.load(folder / 'documents.npz') as file:
      columns = dict(file)
    tokens = np.memmap(folder / 'tokens.bin', meta['dtype'], mode='r')
    if len(tokens) != columns['offsets'][-1] + 1:
      raise ValueError(f'{len(tokens)} tokens, {columns["offsets"][-1] + 1} expected')
    return _store(tokens, columns, meta)
  except (OSError, ValueError, KeyError, EOFError, zipfile.BadZipFile) as error:
    _log.warning('%s: damaged token cache, made anew (%s)', folder, error)
    return None


def _store(tokens: np.ndarray, columns: dict[str, np.ndarray], meta: dict[str, Any]) -> TokenStore:
  return TokenStore(
    tokens=tokens,
    **columns,
    files=meta['files'],
    report=meta['report'],
    fingerprint=meta['fingerprint'],
  )


class _Encoder(NamedTuple):
  """How documents become tokens.

  Attributes:
    encode: Documents -> of each its samples: ids with a first token that nothing predicts, and which
      of them are learnt (None for all).
    end: Stands after the last document, as its last target.
    dtype: Of the ids.
  """

  encode: Callable[[list[Document]], Iterator[list[tuple[np.ndarray, np.ndarray | None]]]]
  end: int
  dtype: np.dtype


def _encoder(tokenizer: Tokenizer, source: SourceConfig) -> _Encoder:
  eot = np.array([tokenizer.eot_id])

  def texts(chunk):
    for ids in tokenizer.encode_batch([d.text for d in chunk]):
      yield [(np.concatenate([eot, ids]), None)]

  def chats(chunk):
    for document in chunk:
      yield [s.encode(tokenizer) for s in conversations.samples(document.text, source)]

  dtype = np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)
  return _Encoder(chats if source.kind == 'chat' else texts, tokenizer.eot_id, dtype)


def _write(
  documents: Iterable[Document], report: DataReport, encoder: _Encoder, out: BinaryIO
) -> tuple[dict[str, Any], dict[str, Any]]:
  digest = hashlib.sha256()
  files: dict[str, int] = {}
  lengths: list[int] = []
  masks: list[np.ndarray] = []
  rows: list[tuple[int, int, int, int]] = []
  for chunk in _chunks(documents):
    for document, samples in zip(chunk, encoder.encode(chunk), strict=True):
      file = files.setdefault(document.origin.path, len(files))
      for ids, learnt in samples:
        data = ids.astype(encoder.dtype).tobytes()
        out.write(data)
        digest.update(data)
        lengths.append(len(ids))
        if learnt is not None:
          masks.append(learnt)
        # The bytes of a record with several samples count once.
        size = document.num_bytes if ids is samples[0][0] else 0
        rows.append((size, document.split_hash, file, document.origin.line))
  out.write(np.array([encoder.end], encoder.dtype).tobytes())
  offsets = np.concatenate([[0], np.cumsum(lengths, dtype=np.int64)])
  digest.update(offsets.tobytes())
  table = np.array(rows, np.int64).reshape(-1, 4)
  columns = {
    'offsets': offsets,
    'num_bytes': table[:, 0],
    'split_hash': table[:, 1].astype(np.uint32),
    'file_index': table[:, 2].astype(np.int32),
    'line': table[:, 3],
  }
  if masks:
    columns['learnt'] = np.concatenate([*masks, [False]])
    digest.update(columns['learnt'].tobytes())
  meta = {
    'dtype': encoder.dtype.name,
    'files': list(files),
    'report': report.as_dict(),
    'fingerprint': digest.hexdigest(),
  }
  return columns, meta


def _chunks(documents: Iterable[Document]) -> Iterator[list[Document]]:
  chunk: list[Document] = []
  size = 0
  for document in documents:
    chunk.append(document)
    size += document.num_bytes
    if size >= _CHUNK_BYTES:
      yield chunk
      chunk, size = [], 0
  if chunk:
    yield chunk
