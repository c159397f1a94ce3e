"""result.json: what a run came to, for programs; report.md says the same to people."""

import json
import pathlib
from collections.abc import Mapping
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
  write_fields(
    run.path, step=run.step, stopped=run.stopped, minutes=round(minutes, 2), evaluations=evaluations
  )


def write_fields(folder: pathlib.Path, **fields: Any) -> None:
  """Writes these fields and no others; a run that is measured on tasks has `tasks` (`task_scores`)."""
  write_atomically(folder / _NAME, json.dumps(fields, indent=2) + '\n')


def task_scores(
  before: Mapping[str, Any] | None, after: Mapping[str, Any]
) -> dict[str, dict[str, dict[str, float]]]:
  """What two rows of metrics say of each environment: score -> 'before' or 'after' -> name -> share.

  The scores are 'accuracy' and 'valid' (rl/evaluation.py), and 'teacher' where there is one, which is
  measured before. Without a row before, there is no 'before'.
  """

  def named(row: Mapping[str, Any] | None, score: str) -> dict[str, float]:
    prefix = f'eval/{score}/'
    return {k.removeprefix(prefix): v for k, v in (row or {}).items() if k.startswith(prefix)}

  both = (('before', before), ('after', after))
  scores = {
    score: {when: named(row, score) for when, row in both if named(row, score)}
    for score in ('accuracy', 'valid', 'teacher')
  }
  return {score: found for score, found in scores.items() if found}


def read(folder: pathlib.Path) -> dict[str, Any] | None:
  """What `write` wrote; None if the run has not ended yet."""
  try:
    found = json.loads((folder / _NAME).read_text(encoding='utf-8'))
  except (OSError, ValueError):
    return None
  return found if isinstance(found, dict) else None


def is_finished(folder: pathlib.Path, steps: int, measured: str = 'evaluations') -> bool:
  """Whether the run in `folder` came to the end of its `steps` and has this measurement."""
  found = read(folder)
  # A signal during the last step leaves a result without evaluations: the same command adds them.
  return (
    found is not None
    and not found['stopped']
    and found['step'] >= steps
    and bool(found.get(measured))
  )
