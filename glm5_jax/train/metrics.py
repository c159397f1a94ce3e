"""The record of a run: metrics.jsonl (one JSON object a line) and TensorBoard events.

The file is one clean curve at any time: opening it for a run that resumes at step s drops the rows
beyond s, which a crash left behind, and a half-written last line. Everything but the clock is a
function of config and seed, so two runs, or a run killed and resumed, differ in `TIMING` only.
"""

import json
import os
import pathlib
import time
from collections.abc import Iterator, Mapping
from typing import Any, TextIO

import jax
import numpy as np
import tensorboardX

from glm5_jax.train.evaluate import Evaluation
from glm5_jax.train.progress import ProgressLine

# Keys whose values depend on the machine, not on the run.
TIMING = frozenset({'time', 'seconds', 'tokens_per_second', 'flops_per_second'})


class MetricsWriter:
  """Appends rows; use as a context manager or call `close`.

  Args:
    workdir: the run's folder; gets metrics.jsonl and tensorboard/. None writes nothing.
    step: the step the run continues from: rows and events of later steps are dropped.
  """

  def __init__(self, workdir: str | os.PathLike | None, step: int = 0):
    self._file: TextIO | None = None
    self._board: tensorboardX.SummaryWriter | None = None
    if workdir is None:
      return
    workdir = pathlib.Path(workdir)
    self.path = workdir / 'metrics.jsonl'
    truncate(self.path, step)
    self._file = self.path.open('a', encoding='utf-8')
    purge = step + 1 if step else None
    self._board = tensorboardX.SummaryWriter(str(workdir / 'tensorboard'), purge_step=purge)

  def write(self, step: int, row: Mapping[str, Any]) -> None:
    """Adds one row. Scalars go to TensorBoard as well, arrays as histograms of their values."""
    if self._file is None or self._board is None:
      return
    row = {'step': step} | {k: _plain(v) for k, v in row.items()}
    self._file.write(json.dumps(row) + '\n')
    self._file.flush()
    for key, value in row.items():
      if isinstance(value, list):
        self._board.add_histogram(key, np.asarray(value).ravel(), step)
      elif isinstance(value, int | float) and key not in ('step', 'time'):
        self._board.add_scalar(key if '/' in key else f'train/{key}', value, step)

  def sync(self) -> None:
    """Makes the rows survive a power cut; call before a checkpoint that counts on them."""
    if self._file and self._board:
      os.fsync(self._file.fileno())
      self._board.flush()

  def close(self) -> None:
    if self._file and self._board:
      self._file.close()
      self._board.close()

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()


class StepRecord:
  """From the arrays that a step returns to rows of the file, one step late.

  `add` fetches the metrics of the step *before*: the device has the new step to work on meanwhile, so
  nobody waits. `flush` fetches the last one as well, `pause` keeps other work out of the timing.

  Attributes:
    skips_in_a_row: How many of the latest steps were not finite and had no effect.
  """

  def __init__(
    self, writer: MetricsWriter, progress: ProgressLine, steps: int, every: int, skipped: int
  ):
    self._writer, self._progress = writer, progress
    self._every = every
    # The load of every expert is large: some 200 columns are all that a heat map can show.
    self._load_every = every * max(1, steps // (200 * every))
    self._skipped = skipped
    self._pending: tuple[int, Mapping[str, jax.Array], int] | None = None
    self._clock = time.monotonic()
    self._seconds, self._tokens, self._work = 0.0, 0.0, 0
    self.skips_in_a_row = 0
    self.overflow = 0  # Token-expert pairs for which the last step, if it was skipped, had no room.

  def add(self, step: int, metrics: Mapping[str, jax.Array], work: int) -> None:
    """Takes the metrics of a step (train/step.py) and its model FLOPs."""
    self.flush()
    self._pending = step, metrics, work

  def pause(self) -> None:
    """Starts the clock anew; call it after work that is not training."""
    self._clock = time.monotonic()

  def flush(self) -> None:
    """Waits for the last step added and records it."""
    if self._pending is None:
      return
    step, metrics, work = self._pending
    self._pending = None
    m = jax.device_get(dict(metrics))
    now = time.monotonic()
    self._seconds += now - self._clock
    self._clock = now
    self._tokens += float(m['tokens'])
    self._work += work
    self.skips_in_a_row = self.skips_in_a_row + 1 if m['skipped'] else 0
    self._skipped += int(m['skipped'])
    self.overflow = int(m['skipped'] * m.get('dropped', 0))
    if m['skipped']:
      text = f'step {step}: loss {float(m["loss"]):.4g}, gradient norm {float(m["grad_norm"]):.4g}'
      self._progress.message(f'{text}: not finite, skipped ({self._skipped} so far)')
    if step % self._every == 0:
      speed = self._tokens / self._seconds
      self._writer.write(step, self._row(step, m, speed))
      self._progress.update(step, float(m['loss']), speed)
      self._seconds, self._tokens, self._work = 0.0, 0.0, 0

  def _row(self, step: int, m: dict[str, Any], speed: float) -> dict[str, Any]:
    row = {'time': time.time(), 'seconds': self._seconds}
    row |= {k: v for k, v in m.items() if np.ndim(v) == 0} | {'skipped': self._skipped}
    row |= {f'mtp_loss_{k}': x for k, x in enumerate(m.get('mtp_ce', ()), 1)}
    row |= {'tokens_per_second': speed, 'flops_per_second': self._work / self._seconds}
    if 'load' in m:
      row['load_max_over_mean'] = float(np.max(m['load']) * m['load'].shape[-1])
      if step % self._load_every == 0:
        row['load'] = m['load']
    return row

  def evaluation(self, step: int, evaluation: Evaluation) -> None:
    """Records an evaluation."""
    self._writer.write(step, evaluation.row())
    self._progress.note(
      f'held-out loss {evaluation.loss:.4f}, {evaluation.bits_per_byte:.3f} bits/byte'
    )
    self.pause()


def read(path: str | os.PathLike) -> list[dict[str, Any]]:
  """The rows of a metrics.jsonl, without a half-written last one; empty if there is no file."""
  return list(_rows(pathlib.Path(path)))


def truncate(path: pathlib.Path, step: int) -> None:
  """Drops rows beyond `step` and everything from the first damaged line on, atomically."""
  if not path.exists():
    return
  kept = [line for line, row in _lines(path) if row['step'] <= step]
  replacement = path.with_name(f'.{path.name}.new')
  with replacement.open('wb') as f:
    f.writelines(kept)
    f.flush()
    os.fsync(f.fileno())
  replacement.replace(path)


def _rows(path: pathlib.Path) -> Iterator[dict[str, Any]]:
  if path.exists():
    for _, row in _lines(path):
      yield row


def _lines(path: pathlib.Path) -> Iterator[tuple[bytes, dict[str, Any]]]:
  with path.open('rb') as f:
    for line in f:
      try:
        row = json.loads(line)
      except ValueError:
        return
      if not line.endswith(b'\n') or not isinstance(row, dict) or 'step' not in row:
        return
      yield line, row


def _plain(value: Any) -> Any:
  """JSON-able: Python scalars, nested lists rounded to what a plot can show, None for NaN."""
  if isinstance(value, np.ndarray) and value.ndim:
    return np.round(value.astype(np.float64), 5).tolist()
  if isinstance(value, np.ndarray | np.generic):
    value = value.item()
  if isinstance(value, float) and not np.isfinite(value):
    return None
  return value
