"""result.json: what a run came to, for programs; report.md says the same to people."""

import json
import pathlib
from typing import Any

from glm5_jax.train.summary import Run
from glm5_jax.train.workdir import write_atomically

_NAME = 'result.json'


def write(run: Run, minutes: float) -> None:
  """Writes the result of a run that has ended, for whatever reason.

  Holds step, stopped (why before the end, or ''), minutes (of this process, everything included) and
  evaluations: 'dense' or 'sparse' attention -> the fields of `Evaluation`.
  """
  evaluations = {name: e._asdict() for name, e in run.evaluations.items()}
  fields = {
    'step': run.step, 'stopped': run.stopped, 'minutes': round(minutes, 2),
    'evaluations': evaluations,
  }  # fmt: skip
  write_atomically(run.path / _NAME, json.dumps(fields, indent=2) + '\n')


def read(folder: pathlib.Path) -> dict[str, Any] | None:
  """What `write` wrote; None if the run has not ended yet."""
  try:
    found = json.loads((folder / _NAME).read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return None
  return found if isinstance(found, dict) else None


def is_finished(folder: pathlib.Path, steps: int) -> bool:
  """Whether the run in `folder` came to the end of its `steps` and was evaluated."""
  found = read(folder)
  # A signal during the last step leaves a result without evaluations: the same command adds them.
  return (
    found is not None
    and not found['stopped']
    and found['step'] >= steps
    and bool(found['evaluations'])
  )
