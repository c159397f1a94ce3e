"""From settings to tokenized documents: the tokenizer, the token stores, and the split."""

import dataclasses
import functools
import logging
import pathlib
from collections.abc import Iterator
from typing import Any

import numpy as np
import tokenizers

from glm5_jax.data import sources as sources_lib
from glm5_jax.data import store as store_lib
from glm5_jax.data import tokenizer as tokenizer_lib
from glm5_jax.data.config import DataConfig, SourceConfig
from glm5_jax.data.report import DataError, DataReport

_log = logging.getLogger(__name__)
_HASHES = 2**32


@dataclasses.dataclass(frozen=True)
class Part:
  """The documents of one source on one side of the split.

  Attributes:
    source: Where they came from.
    store: All documents of the source.
    documents: Indices into the store, ascending.
  """

  source: SourceConfig
  store: store_lib.TokenStore
  documents: np.ndarray

  @functools.cached_property
  def lengths(self) -> np.ndarray:
    """Inputs (and as many targets) of each document."""
    return self.store.lengths[self.documents]

  @property
  def num_bytes(self) -> int:
    return int(self.store.num_bytes[self.documents].sum())

  @property
  def num_targets(self) -> int:
    if self.store.learnt is None:
      return int(self.lengths.sum())
    learnt = np.add.reduceat(self.store.learnt, self.store.offsets[:-1], dtype=np.int64)
    return int(learnt[self.documents].sum())

  def summary(self) -> dict[str, Any]:
    return {
      'documents': len(self.documents),
      'bytes': self.num_bytes,
      'targets': self.num_targets,
    }


@dataclasses.dataclass(frozen=True)
class Corpus:
  """Everything the iterators need, and what a report should say about it.

  Attributes:
    config: The settings.
    tokenizer: Its `vocab_size` is what the model needs at least.
    train: One part per training source.
    validation: Parts with held-out documents; may be empty.
    report: Documents read and left out, over all sources.
    long_documents: Number of documents longer than a row (split over several, unless left out).
  """

  config: DataConfig
  tokenizer: tokenizer_lib.Tokenizer
  train: tuple[Part, ...]
  validation: tuple[Part, ...]
  report: DataReport
  long_documents: int

  def summary(self) -> dict[str, Any]:
    """JSON-able account, for logs and report.md."""
    return {
      'tokenizer': {
        'kind': self.config.tokenizer.kind,
        'vocab_size': self.tokenizer.vocab_size,
        'fingerprint': self.tokenizer.fingerprint[:16],
      },
      'train': {p.source.name: p.summary() for p in self.train},
      'validation': {p.source.name: p.summary() for p in self.validation},
      'licences': {p.source.name: p.source.licence for p in (*self.train, *self.validation)},
      'long_documents': self.long_documents,
      'read': self.report.as_dict(),
    }


def load_corpus(config: DataConfig) -> Corpus:
  """Reads, splits and tokenizes the documents, or finds all that in the cache.

  Raises:
    DataError: Nothing to train on, bad data with `on_bad='fatal'`, or an unusable tokenizer.
  """
  cache = pathlib.Path(config.cache_dir).expanduser().absolute() if config.cache_dir else None
  if cache is not None:
    try:
      cache.mkdir(parents=True, exist_ok=True)
    except OSError as error:
      raise DataError(
        f"cache_dir {cache} cannot be made ({error.strerror}); name a folder of your own, or '' to "
        'keep nothing'
      ) from error
  # One source may appear on both lists; read it once.
  identities = {s: sources_lib.identity(s) for s in (*config.sources, *config.validation_sources)}
  tokenizer = _tokenizer(config, cache, [identities[s] for s in config.sources])
  report = DataReport(on_bad=config.on_bad)
  stores = {}
  for source, identity in identities.items():
    stores[source] = _token_store(source, identity, tokenizer, cache, config.on_bad)
    report.merge(DataReport.from_dict(stores[source].report))
  long_documents = DataReport()
  train = tuple(_part(config, s, stores[s], False, long_documents) for s in config.sources)
  held_out = config.validation_sources or config.sources
  validation = tuple(_part(config, s, stores[s], True, long_documents) for s in held_out)
  for part in train:
    if not len(part.documents):
      raise DataError(
        f'source {part.source.name!r} has nothing to train on: {part.store.report["documents"]} '
        f'documents were read, {part.store.report["bad"]} left out as bad, the others held out for '
        'validation or longer than a row. Give more files, `separator` (to cut a text file into '
        'documents), `validation_sources`, or validation_fraction=0'
      )
  if config.long_documents == 'skip':
    report.merge(long_documents)
  corpus = Corpus(
    config,
    tokenizer,
    train,
    tuple(p for p in validation if len(p.documents)),
    report,
    long_documents.counts['too_long'],
  )
  _log.info('data: %s', report)
  return corpus


def _held_out(config: DataConfig, split_hash: np.ndarray) -> np.ndarray:
  if config.validation_sources:
    return np.zeros(len(split_hash), bool)
  return split_hash < config.validation_fraction * _HASHES


def _part(
  config: DataConfig,
  source: SourceConfig,
  store: store_lib.TokenStore,
  validation: bool,
  report: DataReport,
) -> Part:
  if validation and config.validation_sources:
    wanted = np.ones(len(store), bool)
  else:
    wanted = _held_out(config, store.split_hash) == validation
  documents = np.flatnonzero(wanted)
  too_long = store.lengths[documents] > config.seq_len
  for document in documents[too_long]:
    origin = store.origin(document)
    detail = f'{store.lengths[document]} inputs, seq_len is {config.seq_len}'
    if config.long_documents == 'fatal':
      raise DataError(
        f"{origin}: is longer than a row: {detail} (long_documents='split' spreads it over "
        "several rows, 'skip' leaves it out)"
      )
    report.bad('too_long', origin, detail)
  if config.long_documents == 'skip':
    documents = documents[~too_long]
  return Part(source, store, documents)


def _tokenizer(
  config: DataConfig, cache: pathlib.Path | None, identities: list[str]
) -> tokenizer_lib.Tokenizer:
  wanted = config.tokenizer
  if cache is None or wanted.kind != 'bpe':
    return tokenizer_lib.make_tokenizer(wanted, _training_texts(config))
  split = None if config.validation_sources else config.validation_fraction
  algorithm = (tokenizers.__version__, tokenizer_lib.SPLIT_PATTERN, tokenizer_lib.SPECIAL_TOKENS)
  key = store_lib.cache_key('tokenizer', algorithm, wanted, split, identities)
  folder = cache / 'tokenizers' / key
  if folder.exists():
    try:
      return tokenizer_lib.load_tokenizer(folder, wanted.eot)
    except DataError as error:
      _log.warning('damaged tokenizer cache, made anew (%s)', error)
  tokenizer = tokenizer_lib.make_tokenizer(wanted, _training_texts(config))
  tokenizer.save(folder)
  return tokenizer


def _training_texts(config: DataConfig) -> Iterator[str]:
  """Texts on the training side only: a held-out text must not shape the vocabulary."""
  for source in config.sources:
    report = DataReport(on_bad=config.on_bad)
    for document in sources_lib.read_documents(source, report):
      if not _held_out(config, np.array([document.split_hash]))[0]:
        yield document.text
      if report.num_bytes > config.tokenizer.train_bytes:
        break


def _token_store(
  source: SourceConfig,
  identity: str,
  tokenizer: tokenizer_lib.Tokenizer,
  cache: pathlib.Path | None,
  on_bad: str,
) -> store_lib.TokenStore:
  folder = None
  if cache is not None:
    folder = cache / 'tokens' / store_lib.cache_key('tokens', identity, tokenizer.fingerprint)
    store = store_lib.load_store(folder)
    if store is not None:
      return store
  report = DataReport(on_bad=on_bad)
  documents = sources_lib.read_documents(source, report)
  return store_lib.build_store(documents, report, tokenizer, source, folder)
