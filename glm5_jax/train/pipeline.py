"""Several stages in one command, each a run of its own that starts from the one before.

A config with a `stages` section (configs/nano_pipeline.py) holds a whole config for every stage, and
`order`, the names of those to run. Stage k runs in WORKDIR/k_NAME, an ordinary run's folder. What is
finished is skipped and what was interrupted goes on, so the same command continues a pipeline that was
stopped or killed anywhere.
"""

import pathlib
from collections.abc import Mapping
from typing import Any

from glm5_jax.train import loop, pipeline_report, workdir
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.handover import model_changes, tokenizer_changes
from glm5_jax.train.pipeline_report import StageRun
from glm5_jax.train.prepare import ConfigError, plain, prepare
from glm5_jax.train.workdir import WorkdirError


def train(config: Mapping[str, Any], folder: str, *, command: str = '') -> int:
  """Runs what is left of the stages and writes WORKDIR/report.md after each.

  Args:
    config: `order` and `stages`, see above.
    folder: of the pipeline.
    command: what a person typed, for the reports.

  Returns:
    Exit status, as `loop.train`; 0 also where a stage was stopped on request.

  Raises:
    ConfigError, DataError, WorkdirError, CheckpointError: with messages for people.
  """
  path = pathlib.Path(folder).expanduser().absolute()
  runs = stage_runs(config, path)
  with workdir.claim(folder, plain(config)), workdir.StopRequest() as stop:
    for i, run in enumerate(runs):
      if run.is_finished():
        with workdir.claim(run.folder, run.config):  # An error if its config has changed since.
          print(f'{run.folder.name} is finished', flush=True)
        continue
      _check_nothing_later(run, runs[i + 1 :])
      print(f'\nstage {i + 1} of {len(runs)}: {run.folder}', flush=True)
      status = loop.train(run.config, str(run.folder), command=command)
      pipeline_report.write(path, runs, command)
      if status or not run.is_finished() or (stop and run is not runs[-1]):
        print(f'stopped in or after {run.folder.name}; the same command continues', flush=True)
        return status
    print(f'all stages: {pipeline_report.write(path, runs, command)}', flush=True)
  return 0


def stage_runs(config: Mapping[str, Any], path: pathlib.Path) -> list[StageRun]:
  """The stages in order, every one checked before the first begins.

  Raises:
    ConfigError: `order` names an unknown stage, a stage's config is impossible, or it is of another
      model or tokenizer than the stage before.
  """
  config = plain(config)
  order, stages = config['order'], config['stages']
  if not order or len(set(order)) < len(order) or not set(order) <= set(stages):
    raise ConfigError(f'order={order} must name each stage once at most, out of {sorted(stages)}')
  runs: list[StageRun] = []
  for number, name in enumerate(order, 1):
    settings = stages[name]
    if runs:
      settings = settings | {'init_from': str(runs[-1].folder)}
    try:
      run = StageRun(name, path / f'{number}_{name}', settings, prepare(settings))
    except ConfigError as e:
      raise ConfigError(f'stages.{name}: {e}') from None
    if runs:
      _check_continues(runs[-1], run)
    runs.append(run)
  return runs


def _check_continues(before: StageRun, run: StageRun) -> None:
  different = model_changes(before.parts.model, run.parts.model)
  different += tokenizer_changes(*(r.config['data']['tokenizer'] for r in (before, run)))
  if different:
    raise ConfigError(
      f'stages.{run.name} cannot start from stages.{before.name}: {"; ".join(different)}'
    )


def _check_nothing_later(run: StageRun, later: list[StageRun]) -> None:
  """A stage that is trained further must not have successors made from what it was."""
  for other in later:
    if Checkpoints(other.folder / 'checkpoints').steps():
      raise WorkdirError(
        f'{other.folder} was started from {run.folder.name} as it was, which is now to be trained'
        f' further: remove {other.folder.name} and what follows it, or choose another --workdir'
      )
