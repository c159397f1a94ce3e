"""The held-out documents: a finite set of batches, and what general-purpose compressors make of them."""

import dataclasses
import gzip
import lzma
from collections.abc import Sequence

import numpy as np

from glm5_jax.data import packing, sources
from glm5_jax.data.corpus import Corpus, Part
from glm5_jax.data.infill_rows import InfillRows
from glm5_jax.data.packing import Batch
from glm5_jax.data.report import DataError, DataReport


@dataclasses.dataclass(frozen=True)
class EvalSet:
  """Held-out batches; every held-out token is a target with weight 1 exactly once.

  Bits per byte = sum(weights * cross-entropy in nats) / ln 2 / num_bytes, summed over all
  processes.

  Attributes:
    batches: Arrays [batch_size / process_count, T]; the last batch ends in rows of padding. In
      random order, so the first few are a fair sample.
    num_bytes: UTF-8 bytes of the held-out texts, over all processes.
    num_targets: Sum of the weights, over all processes: every token, and one end per document.
    num_documents: Held-out documents, over all processes.
  """

  batches: list[Batch]
  num_bytes: int
  num_targets: int
  num_documents: int


def make_eval_batches(
  corpus: Corpus,
  process_index: int = 0,
  process_count: int = 1,
  max_bytes: int | None = None,
  overlap: int = 0,
) -> EvalSet:
  """The held-out documents as batches, best-fit packed; the same on every call.

  With objective 'infilling' they are generated behind [gMASK] (`InfillRows.held_out_row`).

  Args:
    corpus: From `load_corpus`.
    process_index: This process.
    process_count: All of them; divides the batch size.
    max_bytes: If given, only as many documents (at least one, always the same) as reach it.
    overlap: Inputs of context, without loss, that a continuation of a long document repeats.

  Raises:
    DataError: Nothing is held out, or the batch cannot be divided.
  """
  config = corpus.config
  local = config.rows_per_process(process_index, process_count)
  parts = _held_out_parts(corpus, max_bytes)
  # One numbering over all parts, so that their documents can share rows.
  which = np.repeat(np.arange(len(parts)), [len(p.documents) for p in parts])
  document = np.concatenate([p.documents for p in parts])
  lengths = np.concatenate([p.lengths for p in parts])
  infill = InfillRows(config, corpus.tokenizer) if config.objective == 'infilling' else None
  slots = infill.held_out_slots if infill else None
  plan = packing.plan_rows(lengths, config.seq_len, 'best_fit', 0, overlap, slots)

  def read(index: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    return parts[which[index]].store.read(int(document[index]), start, length)

  def weights(index: int, start: int, length: int) -> np.ndarray | float:
    return parts[which[index]].store.weights(int(document[index]), start, length)

  def build(number: int) -> Batch:
    if infill:
      return infill.held_out_row(plan.row(number), read)
    return packing.build_row(plan.row(number), read, config.seq_len, pad_id, weights)

  pad_id = corpus.tokenizer.eot_id
  padding = infill.empty_row() if infill else packing.empty_row(config.seq_len, pad_id)
  order = np.random.default_rng(0).permutation(len(plan))
  batches = []
  for first in range(process_index * local, len(plan) + process_index * local, config.batch_size):
    numbers = order[first : first + local]
    rows = [build(n) for n in numbers]
    rows += [padding] * (local - len(rows))
    batches.append({key: np.stack([row[key] for row in rows]) for key in rows[0]})
  return EvalSet(
    batches, sum(p.num_bytes for p in parts), sum(p.num_targets for p in parts), len(document)
  )


def held_out_texts(corpus: Corpus, max_bytes: int | None = None) -> list[bytes]:
  """Contents of the held-out texts of `make_eval_batches`, read again from their files.

  Conversations are left out: only a part of them is a text that a model writes.

  Raises:
    DataError: Nothing is held out, or the files have changed since they were tokenized.
  """
  texts = []
  for part in _held_out_parts(corpus, max_bytes):
    if part.source.kind == 'chat':
      continue
    wanted = {part.store.origin(d): int(part.store.num_bytes[d]) for d in part.documents}
    only = {origin.path for origin in wanted}
    texts += [
      document.text.encode()
      for document in sources.read_documents(part.source, DataReport(), only)
      if wanted.pop(document.origin, None) == document.num_bytes
    ]
    if wanted:
      raise DataError(f'{next(iter(wanted))}: has changed since it was tokenized; start again')
  return texts


def _held_out_parts(corpus: Corpus, max_bytes: int | None) -> list[Part]:
  if not corpus.validation:
    raise DataError(
      'no document is held out: give `validation_sources`, a larger validation_fraction '
      f'(now {corpus.config.validation_fraction}), or `separator` to cut a text file into documents'
    )
  if max_bytes is None:
    return list(corpus.validation)
  # In the order of their hashes, which is a random one that does not change.
  hashes = np.concatenate([p.store.split_hash[p.documents] for p in corpus.validation])
  sizes = np.concatenate([p.store.num_bytes[p.documents] for p in corpus.validation])
  order = np.argsort(hashes, kind='stable')
  before = np.cumsum(sizes[order]) - sizes[order]
  chosen = np.zeros(len(order), bool)
  chosen[order[before < max(1, max_bytes)]] = True
  borders = np.cumsum([len(p.documents) for p in corpus.validation])[:-1]
  parts = [
    dataclasses.replace(part, documents=part.documents[mask])
    for part, mask in zip(corpus.validation, np.split(chosen, borders), strict=True)
  ]
  return [part for part in parts if len(part.documents)]


def compression_baselines(files: Sequence[bytes]) -> dict[str, float]:
  """Bits per byte of `gzip -9` and `xz -9`, of each file by itself and of all of them end to end.

  Args:
    files: Contents; at least one byte together.

  Returns:
    gzip_by_file, xz_by_file, gzip_together, xz_together. The first two correspond to a model that
    sees every document alone.
  """
  total = sum(map(len, files))
  if not total:
    raise ValueError('no bytes to compress')
  together = b''.join(files)

  def bits_per_byte(compressed: Sequence[bytes]) -> float:
    return 8 * sum(map(len, compressed)) / total

  def gzip9(data: bytes) -> bytes:
    return gzip.compress(data, compresslevel=9, mtime=0)

  def xz9(data: bytes) -> bytes:
    return lzma.compress(data, preset=9)

  return {
    'gzip_by_file': bits_per_byte([gzip9(data) for data in files]),
    'xz_by_file': bits_per_byte([xz9(data) for data in files]),
    'gzip_together': bits_per_byte([gzip9(together)]),
    'xz_together': bits_per_byte([xz9(together)]),
  }
