"""What each step consumes: how many rows, how many keys a query keeps, and the batches themselves.

Two things may change while a run is on: the size of the batch (GLM-4.5, arXiv 2508.06471, section 2.4,
grows it from 16M to 64M tokens over the first 500B) and, with gradual sparsity, how many keys the
sparse attention keeps. Neither compiles anything anew. A batch always has the rows of a full one, its
last micro-batches empty; the number of the others, and of the keys, travel with it as scalars. Both
follow from the step alone, so a resumed run goes on where it was.
"""

import dataclasses
import itertools
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from glm5_jax.data import TrainIterator
from glm5_jax.train import flops


@dataclasses.dataclass(frozen=True)
class Plan:
  """The sizes of all steps; step 0 is the first.

  Attributes:
    rows: Of a full batch.
    micro_batches: Into which a full batch is divided.
    first_rows: Of the first batch; 0 is a full one.
    warmup_steps: From the first batch to the first full one, linearly in whole micro-batches.
    seq_len: Tokens a row.
    topk: Keys that sparse attention keeps; None if attention is dense.
    anneal_steps: From seq_len kept keys (all) to topk, geometrically: every step loses the same share.
      0 keeps topk from the start.
  """

  rows: int
  micro_batches: int = 1
  first_rows: int = 0
  warmup_steps: int = 0
  seq_len: int = 1
  topk: int | None = None
  anneal_steps: int = 0

  def __post_init__(self):
    if self.micro_batches < 1 or self.rows % self.micro_batches:
      raise ValueError(
        f'train.grad_accum={self.micro_batches} must divide data.batch_size={self.rows}'
      )
    growth = (self.first_rows, self.warmup_steps)
    if bool(self.first_rows) != bool(self.warmup_steps) or min(growth) < 0:
      raise ValueError(
        f'train.batch_warmup_rows={self.first_rows} and train.batch_warmup_steps={self.warmup_steps}'
        ' go together: both 0, or both positive'
      )
    if self.first_rows and (self.first_rows % self.micro_rows or self.first_rows > self.rows):
      raise ValueError(
        f'train.batch_warmup_rows={self.first_rows} must be a multiple of the {self.micro_rows} rows of'
        f' a micro-batch and at most data.batch_size={self.rows}; raise train.grad_accum'
      )
    if self.anneal_steps and self.topk is None:
      raise ValueError(
        'train.topk_anneal_steps is for sparse attention; this run has dense attention'
      )

  @property
  def micro_rows(self) -> int:
    return self.rows // self.micro_batches

  @property
  def rows_per_read(self) -> int:
    """Of a batch of the data pipeline, of which a step takes one or, while it grows, several."""
    return self.micro_rows if self.warmup_steps else self.rows

  def filled(self, step: int) -> int:
    """Micro-batches of a step that hold data."""
    if step >= self.warmup_steps:
      return self.micro_batches
    first = self.first_rows // self.micro_rows
    # round(a / b) in integers.
    grown = (2 * (self.micro_batches - first) * step + self.warmup_steps) // (2 * self.warmup_steps)
    return first + grown

  def rows_until(self, step: int) -> int:
    """Rows of all steps before `step`."""
    growing = min(step, self.warmup_steps)
    part = sum(self.filled(s) for s in range(growing)) * self.micro_rows
    return part + (step - growing) * self.rows

  def tokens_until(self, step: int) -> int:
    """Tokens, padding included, of all steps before `step`."""
    return self.rows_until(step) * self.seq_len

  def topk_at(self, step: int) -> int | None:
    """Keys that a query keeps at a step."""
    if self.topk is None or self.seq_len <= self.topk or step >= self.anneal_steps:
      return self.topk
    return round(self.seq_len * (self.topk / self.seq_len) ** (step / self.anneal_steps))


class Fetched(NamedTuple):
  """A batch on its way to the device, and what the host wants to know about it."""

  arrays: dict[str, jax.Array]
  tokens: int  # Of the rows that this process has read; so are the pairs.
  pairs: flops.Pairs
  state_after: dict[str, Any]  # Of the iterator: where the next batch comes from.


def prefetched(
  batches: TrainIterator, plan: Plan, step: int, put: Callable[[Any], Any] = jax.device_put
) -> Iterator[Fetched]:
  """The batches from `step` on, one transfer ahead. (Grain's thread makes them further ahead still.)

  Args:
    batches: at the position of `step`, with this process's of `plan.rows_per_read` rows each.
    plan: the sizes.
    step: the first step to make a batch for.
    put: places a batch where the step wants it.
  """
  queue: deque[Fetched] = deque()
  for now in itertools.count(step):
    reads = plan.filled(now) if plan.warmup_steps else 1
    parts = [next(batches) for _ in range(reads)]
    tokens, pairs = 0, flops.Pairs(0, 0)
    for part in parts:
      positions, used = part['positions'], part['weights']
      if 'prefix' in part:  # Infilling: Part A is work as well, though it has no targets.
        used = part['segment_ids']
        positions = flops.infilling_positions(used, part['prefix'])
      new = flops.count_pairs(positions, used, plan.topk_at(now))
      tokens += int(np.count_nonzero(used))
      pairs = flops.Pairs(pairs.visible + new.visible, pairs.selected + new.selected)
    batch = _joined(parts, plan, now)
    queue.append(Fetched(put(batch), tokens, pairs, batches.get_state()))
    if len(queue) > 1:
      yield queue.popleft()


def _joined(parts: Sequence[Mapping[str, np.ndarray]], plan: Plan, step: int) -> dict[str, Any]:
  """One batch of full size, and the scalars that change."""
  batch: dict[str, Any] = dict(parts[0])
  if plan.warmup_steps:
    missing = (plan.micro_batches - plan.filled(step)) * len(parts[0]['tokens'])
    for key in batch:
      rows = np.concatenate([part[key] for part in parts])
      batch[key] = np.pad(rows, ((0, missing), (0, 0)))
    batch['micro_batches'] = np.int32(plan.filled(step))
  topk = plan.topk_at(step)
  if plan.anneal_steps and topk is not None:
    batch['topk'] = np.int32(topk)
  return batch
