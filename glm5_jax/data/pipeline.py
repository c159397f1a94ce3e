"""Training batches: an endless iterator that resumes exactly.

The pipeline is Grain's: rows of each source, shuffled anew each epoch and repeated, mixed
by weight, dealt to processes, batched, and made ahead by a thread. Its position is one number, the
same on every process.
"""

import dataclasses
import functools
import hashlib
import random
import threading
from collections.abc import Sequence
from typing import Any

import grain
import numpy as np

from glm5_jax.data import fim, packing
from glm5_jax.data.config import DataConfig
from glm5_jax.data.corpus import Corpus, Part
from glm5_jax.data.infill_rows import InfillRows
from glm5_jax.data.packing import Batch
from glm5_jax.data.report import DataError
from glm5_jax.data.tokenizer import Tokenizer


class PackedRows(grain.MapDataset):
  """The rows of one source; row i belongs to epoch i // len.

  With packing 'concat' every epoch cuts the documents elsewhere; otherwise all epochs have the same
  documents in a row. What blank infilling hides, and where fill-in-the-middle cuts, is drawn anew in each.
  """

  def __init__(self, part: Part, config: DataConfig, seed: int, tokenizer: Tokenizer):
    super().__init__()
    self._part = part
    self._config = config
    self._seed = seed
    self._pad_id = tokenizer.eot_id
    self._infill = InfillRows(config, tokenizer) if config.objective == 'infilling' else None
    self._fim = None
    if config.fim_rate and part.source.fim and part.source.kind != 'chat':
      self._fim = fim.Documents(
        part.lengths, self._read, fim.Tokens.of(tokenizer), config.fim_rate, config.fim_spm_rate,
        seed, config.seq_len, whole=config.long_documents != 'split',
      )  # fmt: skip
    self._lock = threading.Lock()
    self._epoch = 0
    self._plan = self._make_plan(0)

  @property
  def density(self) -> float:
    """Share of the positions that are not padding."""
    return self._plan.density

  def __len__(self) -> int:
    return len(self._plan)

  def __str__(self) -> str:
    return f'PackedRows({self._part.source.name}, {self._config.packing}, {len(self)} rows)'

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    epoch, row = divmod(index, len(self))
    pieces = self._plan_of(epoch).row(row)
    if self._infill:
      return self._infill.train_row(pieces, self._read, random.Random(f'{self._seed}/{index}'))
    read = functools.partial(self._fim.read, epoch=epoch) if self._fim else self._read
    return packing.build_row(pieces, read, self._config.seq_len, self._pad_id, self._weights)

  def _plan_of(self, epoch: int) -> packing.RowPlan:
    if self._config.packing != 'concat':
      return self._plan
    with self._lock:
      if epoch != self._epoch:
        self._plan, self._epoch = self._make_plan(epoch), epoch
      return self._plan

  def _make_plan(self, epoch: int) -> packing.RowPlan:
    config = self._config
    seed = (self._seed, epoch)
    lengths = self._fim.lengths if self._fim else self._part.lengths
    slots = self._infill.slots if self._infill else None
    return packing.plan_rows(lengths, config.seq_len, config.packing, seed, slots=slots)

  def _read(self, document: int, start: int, length: int) -> tuple[np.ndarray, np.ndarray]:
    return self._part.store.read(int(self._part.documents[document]), start, length)

  def _weights(self, document: int, start: int, length: int) -> np.ndarray | float:
    return self._part.store.weights(int(self._part.documents[document]), start, length)


class _ProcessRows(grain.MapDataset):
  """The rows of one process: always the same of each global batch."""

  def __init__(self, parent: grain.MapDataset, batch: int, rows: Sequence[int]):
    super().__init__(parent)
    self._batch, self._rows = batch, rows

  def __len__(self) -> int:
    return len(self._parent) // self._batch * len(self._rows)

  def __getitem__(self, index):
    if isinstance(index, slice):
      return self.slice(index)
    step, row = divmod(index, len(self._rows))
    return self._parent[step * self._batch + int(self._rows[row])]


class TrainIterator(grain.DatasetIterator):
  """Endless iterator over batches: of each array [batch_size, T], the rows of one process.

  A `grain.DatasetIterator`, so Orbax saves and restores it; the state is a small JSON-able dict,
  equal on all processes, and valid for any number of them.

  Attributes:
    rows_per_epoch: Source name -> rows in one pass.
    density: Source name -> share of positions that are not padding.
  """

  def __init__(
    self,
    parent: grain.DatasetIterator,
    made_with: dict[str, Any],
    rows: dict[str, PackedRows],
    weights: dict[str, float],
  ):
    super().__init__(parent)
    self._made_with = made_with
    self.rows_per_epoch = {name: len(r) for name, r in rows.items()}
    self.density = {name: r.density for name, r in rows.items()}
    self._weights = weights

  def __next__(self) -> Batch:
    return next(self._parent)

  @property
  def batches(self) -> int:
    """Batches delivered since the beginning of training."""
    return int(self._parent.get_state()['next_index'])

  def epochs(self) -> dict[str, float]:
    """Passes over each source so far."""
    rows = self.batches * self._made_with['batch_size']
    return {n: rows * self._weights[n] / count for n, count in self.rows_per_epoch.items()}

  def get_state(self) -> dict[str, Any]:
    return {'grain': self._parent.get_state(), 'made_with': self._made_with}

  def set_state(self, state: dict[str, Any]) -> None:
    """Goes to a saved position.

    Raises:
      DataError: The state belongs to other data or settings, which would silently give another
        order; the message names them.
    """
    saved = state.get('made_with', {})
    different = [
      f'{key} was {saved.get(key)!r}, is {self._made_with.get(key)!r}'
      for key in {**self._made_with, **saved}
      if saved.get(key) != self._made_with.get(key)
    ]
    if different:
      raise DataError(
        f'the saved data position does not fit this run: {"; ".join(different)}. Resume with the '
        'same data settings and files, or start the data from the beginning in a new run'
      )
    self._parent.set_state(state['grain'])


def make_train_iterator(
  corpus: Corpus,
  process_index: int = 0,
  process_count: int = 1,
  rows: Sequence[int] | None = None,
) -> TrainIterator:
  """The training batches of one process.

  Global batch number b is the same for every `process_count`; process p has its p-th block of rows,
  or `rows`, those that its devices compute (`sharding.local_rows`).

  Args:
    corpus: From `load_corpus`.
    process_index: This process, e.g. `jax.process_index()`.
    process_count: All of them; divides the batch size.
    rows: Which rows of every batch, instead of a block.

  Raises:
    DataError: The batch cannot be divided, or the tokenizer lacks a token that the settings need.
  """
  config = corpus.config
  if rows is None:
    count = config.rows_per_process(process_index, process_count)
    rows = range(process_index * count, (process_index + 1) * count)
  packed, shuffled = {}, []
  for number, part in enumerate(corpus.train):
    seed = int(np.random.SeedSequence((config.seed, number)).generate_state(1)[0])
    name = part.source.name if part.source.name not in packed else f'{part.source.name}#{number}'
    packed[name] = PackedRows(part, config, seed, corpus.tokenizer)
    shuffled.append(packed[name].shuffle(seed).repeat())
  weights = [part.source.weight for part in corpus.train]
  mixed = grain.MapDataset.mix(shuffled, weights) if len(shuffled) > 1 else shuffled[0]
  local = _ProcessRows(mixed, config.batch_size, rows)
  batches = local.batch(len(rows), drop_remainder=True)
  # One thread: rows are slices of an array, and the plan of an epoch is made once, in order.
  options = grain.ReadOptions(
    num_threads=1 if config.prefetch else 0, prefetch_buffer_size=config.prefetch
  )
  made_with: dict[str, Any] = {
    'seq_len': config.seq_len,
    'batch_size': config.batch_size,
    'packing': config.packing,
    'seed': config.seed,
    'weights': weights,
    'documents': [_fingerprint(part) for part in corpus.train],
  }
  if config.objective != 'next_token':
    made_with |= {'objective': config.objective, 'infilling': dataclasses.asdict(config.infilling)}
  if config.fim_rate:
    made_with['fim'] = [config.fim_rate, config.fim_spm_rate, [p.source.fim for p in corpus.train]]
  return TrainIterator(
    iter(batches.to_iter_dataset(options)),
    made_with,
    packed,
    {name: w / sum(weights) for name, w in zip(packed, weights, strict=True)},
  )


def _fingerprint(part: Part) -> str:
  chosen = np.asarray(part.documents, np.int64).tobytes()
  return hashlib.sha256(part.store.fingerprint.encode() + chosen).hexdigest()[:32]
