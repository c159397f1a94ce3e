"""Several stages in one command, each a run of its own that starts from the one before.

A config with a `stages` section (configs/nano_pipeline.py) holds a whole config for every stage, and
`order`, the names of those to run. Stage k runs in WORKDIR/k_NAME, an ordinary run's folder. What is
finished is skipped and what was interrupted goes on, so the same command continues a pipeline that was
stopped or killed anywhere. A value 'stage:NAME' in a stage's config stands for the folder of an earlier
stage, for loops that know it (rl/teachers.py).
"""

import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

from glm5_jax.train import distributed, loop, pipeline_report, result, workdir
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.handover import model_changes, tokenizer_changes
from glm5_jax.train.pipeline_report import StageRun
from glm5_jax.train.prepare import ConfigError, plain, prepare
from glm5_jax.train.workdir import WorkdirError


class Loop(NamedTuple):
  """How stages of one kind are run.

  Attributes:
    prepare: config -> what it means, with at least `model` (a ModelConfig); raises ConfigError.
    train: as `loop.train`.
    is_finished: (folder, steps) -> whether a stage came to its end and was measured.
  """

  prepare: Callable[[Mapping[str, Any]], Any]
  train: Callable[..., int]
  is_finished: Callable[[pathlib.Path, int], bool]


# Stages whose config has a section of this name are run so; others by train/loop.py. What is built upon
# this package enters itself here when it is imported (rl/loop.py).
LOOPS: dict[str, Loop] = {}
_BASIC = Loop(prepare, lambda *args, **kwargs: loop.train(*args, **kwargs), result.is_finished)


def loop_of(config: Mapping[str, Any]) -> Loop:
  """The loop of a stage's config."""
  return next((found for section, found in LOOPS.items() if section in config), _BASIC)


def train(config: Mapping[str, Any], folder: str, *, command: str = '') -> int:
  """Runs what is left of the stages and writes WORKDIR/report.md after each.

  Args:
    config: `order` and `stages`, see above.
    folder: of the pipeline.
    command: what a person typed, for the reports.

  Returns:
    Exit status, as `loop.train`; 0 also where a stage was stopped on request.

  Raises:
    ConfigError, DataError, WorkdirError, CheckpointError, ProcessError: with messages for people.
  """
  path = pathlib.Path(folder).expanduser().absolute()
  runs = stage_runs(config, path)
  with (
    distributed.claim(folder, plain(config)),
    distributed.output() as out,
    workdir.StopRequest() as stop,
  ):
    for i, run in enumerate(runs):
      if distributed.from_first(run.is_finished()):
        with distributed.claim(run.folder, run.config):  # An error if its config has changed since.
          print(f'{run.folder.name} is finished', file=out, flush=True)
        continue
      _check_nothing_later(run, runs[i + 1 :])
      print(f'\nstage {i + 1} of {len(runs)}: {run.folder}', file=out, flush=True)
      status = loop_of(run.config).train(run.config, str(run.folder), command=command)
      if distributed.is_first():
        pipeline_report.write(path, runs, command)
      stopped = any(distributed.gather(stop.reason or '')) and run is not runs[-1]
      if status or stopped or not distributed.from_first(run.is_finished()):
        print(
          f'stopped in or after {run.folder.name}; the same command continues', file=out, flush=True
        )
        return status
    if distributed.is_first():
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
    _check_stage_names(name, settings, order[: number - 1])
    which = loop_of(settings)
    if which is not _BASIC:
      distributed.check_alone(f'stages.{name}')
    try:
      parts = which.prepare(settings)
    except ConfigError as e:
      raise ConfigError(f'stages.{name}: {e}') from None
    run = StageRun(name, path / f'{number}_{name}', settings, parts, which.is_finished)
    if runs:
      _check_continues(runs[-1], run)
    runs.append(run)
  return runs


def _check_stage_names(name: str, settings: Mapping[str, Any], earlier: list[str]) -> None:
  for key, value in workdir.flatten(settings).items():
    if isinstance(value, str) and value.startswith('stage:'):
      if value.removeprefix('stage:') not in earlier:
        raise ConfigError(f'stages.{name}.{key}={value!r} is none of the stages before: {earlier}')


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
