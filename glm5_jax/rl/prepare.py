"""From an RL run's config to its parts; whatever a person can get wrong in it is found here."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import optax

from glm5_jax.config import ModelConfig
from glm5_jax.envs.catalogue import make_environments
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.losses.policy import PolicyConfig
from glm5_jax.optim.build import build
from glm5_jax.rl import advantages
from glm5_jax.rl.learner import STAGE, Learner, of_episodes, of_teacher
from glm5_jax.rl.rollout import Settings
from glm5_jax.train.prepare import ConfigError, build_model_config

STAGES = ('reasoning_rl', 'distill')
# Of a group's rewards; None where a teacher says it.
ADVANTAGES = {
  'group_normalised': advantages.group_normalised,
  'group_mean': advantages.group_mean,
  'teacher': None,
}


class Play(NamedTuple):
  """How episodes are played, and on which tasks a model is measured.

  Attributes:
    settings, engine: of the episodes.
    environments: to measure on.
    tasks: held-out ones of each.
    seed: of the tasks.
  """

  settings: Settings
  engine: EngineConfig
  environments: list
  tasks: int
  seed: int


class Parts(NamedTuple):
  """What depends on the config alone.

  Attributes:
    model, tx: as in train/prepare.py.
    learner: how a batch becomes an update.
    play: the held-out side of `environments` unless rl.eval_environments names others.
    environments: to learn from.
    advantage: from rewards [groups, G]; None where teachers say it.
    trains: what trains, in words.
  """

  model: ModelConfig
  tx: optax.GradientTransformation
  learner: Learner
  play: Play
  environments: list
  advantage: Any
  trains: str = STAGE.trains


def prepare_play(config: Mapping[str, Any]) -> Play:
  """How the config's `rl` section plays episodes.

  Raises:
    ValueError, TypeError: a value is impossible.
  """
  rl = config['rl']
  settings = Settings(**dict(rl['episode'].items()), seed=config['seed'])
  sizes: dict[str, Any] = {k: _hashable(v) for k, v in rl['engine'].items()}
  if rl['eval_tasks'] < 1:
    raise ValueError(f'rl.eval_tasks={rl["eval_tasks"]} must be at least 1')
  return Play(
    settings,
    EngineConfig(max_length=settings.max_tokens, **sizes),
    make_environments(rl['eval_environments'] or rl['environments']),
    rl['eval_tasks'],
    config['seed'],
  )


def _hashable(value: Any) -> Any:
  return tuple(map(_hashable, value)) if isinstance(value, list | tuple) else value


def prepare_rl(config: Mapping[str, Any], one_device: bool = True) -> Parts:
  """The parts of a run, which has one device; or of its updates alone, which need not.

  Raises:
    ConfigError: a value is impossible.
  """
  rl = config['rl']
  if config['stage'] not in STAGES:
    raise ConfigError(f'unknown RL stage {config["stage"]!r}, known are {list(STAGES)}')
  if rl['advantage'] not in ADVANTAGES:
    raise ConfigError(f'rl.advantage={rl["advantage"]!r} is none of {sorted(ADVANTAGES)}')
  wanted = {axis: size for axis, size in config['mesh'].items() if size != 1}
  if wanted and one_device:
    raise ConfigError(f'mesh={wanted}: RL runs on one device so far; leave every size at 1')
  advantage = ADVANTAGES[rl['advantage']]
  try:
    play = prepare_play(config)
    parts = Parts(
      build_model_config(config['model']),
      build(config['optim'], config['train']['steps'])[0],
      Learner(
        PolicyConfig(**dict(rl['policy'].items())), rl['per'], play.settings.temperature,
        rl['micro_rows'],
        advantages=of_teacher if advantage is None else of_episodes,
        kernels=config['train']['kernels'],
      ),
      play,
      make_environments(rl['environments']),
      advantage,
    )  # fmt: skip
  except (ValueError, TypeError) as e:
    raise ConfigError(str(e)) from None
  for key in ('groups', 'group_size', 'micro_rows', 'seq_len'):
    if rl[key] < 1:
      raise ConfigError(f'rl.{key}={rl[key]} must be at least 1')
  if not config['init_from']:
    raise ConfigError(
      f'stage {config["stage"]!r} continues a trained model: set --config.init_from to the folder of'
      ' the run before'
    )
  if play.settings.max_tokens > rl['seq_len'] + 1:
    raise ConfigError(
      f'rl.episode.max_tokens={play.settings.max_tokens} must fit a row of rl.seq_len={rl["seq_len"]}'
    )
  _check_teachers(config['stage'], rl)
  return parts


def _check_teachers(stage: str, rl: Mapping[str, Any]) -> None:
  teachers = {name: folder for name, folder in rl['teachers'].items() if folder}
  if (stage == 'distill') != (rl['advantage'] == 'teacher'):
    raise ConfigError(
      f"stage {stage!r} with rl.advantage={rl['advantage']!r}: the advantage of stage 'distill', and"
      " of no other, is 'teacher'"
    )
  if rl['advantage'] != 'teacher':
    if rl['group_size'] < 2:
      raise ConfigError('rl.group_size=1 leaves nothing to compare a response with')
    if teachers:
      raise ConfigError(f'rl.teachers={teachers} are for rl.advantage=teacher')
    return
  missing = sorted(set(rl['environments']) - set(teachers))
  if missing:
    raise ConfigError(
      f'rl.teachers names no run for {missing}: every one of rl.environments needs a teacher'
    )
