"""Trains a model: `python -m experiments.run --config=configs/nano_pretrain.py --workdir=DIR`.

Any value of the config can be changed on the command line (`--config.optim.peak_lr=2e-3`). Running the
same command again resumes the run in DIR. A config with `stages` (configs/nano_pipeline.py) runs them one
after another; there a key begins with its stage (`--config.stages.pretrain.train.steps=100`). What a person can get wrong ends in one line and exit
status 2. In several processes: experiments/launch.py, or the variables of glm5_jax/train/distributed.py.
"""

import difflib
import pathlib
import re
import runpy
import shlex
import sys
from collections.abc import Sequence
from typing import Any

from absl import flags
from ml_collections import ConfigDict, config_flags

USAGE = (
  'usage: python -m experiments.run --config=configs/NAME.py [--config.KEY=VALUE ...] --workdir=DIR'
)


class UsageError(Exception):
  """Something on the command line or in the config file; the message is one line."""


def parse(argv: Sequence[str]) -> tuple[ConfigDict, str]:
  """The config with its overrides, and the workdir.

  Raises:
    UsageError: unknown flag or key (names the nearest), value of a wrong type, bad config file.
  """
  # Overrides need the file first; accept any order.
  args = sorted(argv[1:], key=lambda a: not re.match(r'--?config(=|$)', a))
  if '--config' in args or '-config' in args:
    args = list(argv[1:])
  values = flags.FlagValues()
  config_flags.DEFINE_config_file(
    'config', None, 'The config file.', flag_values=values, sys_argv=['run', *args]
  )
  flags.DEFINE_string('workdir', None, "The run's folder.", flag_values=values)
  keys = _check_file_and_keys(args)
  try:
    rest = values(['run', *args])
  except flags.IllegalFlagValueError as e:
    raise UsageError(_wrong_type(str(e), keys)) from None
  except (flags.Error, KeyError, AttributeError, TypeError, ValueError) as e:
    raise UsageError(_one_line(e)) from None
  if len(rest) > 1:
    raise UsageError(f'unexpected argument {rest[1]!r}; {USAGE}')
  if not values.workdir:
    raise UsageError(f'--workdir is missing; {USAGE}')
  return values.config, values.workdir


def _check_file_and_keys(args: Sequence[str]) -> dict[str, type]:
  """Loads the file alone and compares the overrides with its keys; returns {key: type}."""
  path = None
  for i, arg in enumerate(args):
    if match := re.match(r'--?config(?:=(.*))?$', arg):
      path = match[1] if match[1] is not None else (list(args) + [''])[i + 1]
  if not path:
    raise UsageError(f'--config is missing; {USAGE}')
  file = pathlib.Path(path.split(':', 1)[0])
  if not file.is_file():
    found = [
      str(p)
      for p in file.parent.glob('*.py')
      if not p.stem.endswith('base') and p.stem != '__init__'
    ]
    near = difflib.get_close_matches(str(file), found, n=1, cutoff=0.3)
    raise UsageError(f'config file {file} does not exist{_did_you_mean(near)}')
  try:
    keys = _key_types(runpy.run_path(str(file))['get_config'](*path.split(':', 1)[1:]))
  except Exception as e:
    last = str(e).strip().splitlines()[-1] if str(e).strip() else type(e).__name__
    raise UsageError(f'config file {file} failed: {last}') from None
  for arg in args:
    if match := re.match(r'--?(?:no)?config\.([^=]*)', arg):
      if match[1] not in keys and match[1].removesuffix('.') not in keys:
        near = _nearest(match[1], keys)
        raise UsageError(f'unknown key --config.{match[1]}{_did_you_mean(near)}')
  return keys


def _key_types(config: ConfigDict, prefix: str = '') -> dict[str, type]:
  out: dict[str, type] = {}
  for key in config:
    if isinstance(config[key], ConfigDict):
      out |= _key_types(config[key], f'{prefix}{key}.')
    else:
      out[prefix + key] = config.get_type(key)
  return out


def _nearest(key: str, keys: Sequence[str] | dict[str, Any]) -> list[str]:
  """The known key closest to `key` as a whole, or in its last part where the section is wrong."""

  def likeness(known: str) -> float:
    whole = difflib.SequenceMatcher(None, key, known).ratio()
    last = difflib.SequenceMatcher(None, key.split('.')[-1], known.split('.')[-1]).ratio()
    return max(whole, 0.95 * last)

  best = max(keys, key=likeness)
  return [f'--config.{best}'] if likeness(best) > 0.5 else []


def _did_you_mean(near: Sequence[str]) -> str:
  return f'; did you mean {near[0]}?' if near else ''


def _wrong_type(message: str, keys: dict[str, type]) -> str:
  """absl's message says what failed to parse; add what the key holds."""
  match = re.match(r'flag --config\.([^=]*)=(.*?): ', message, re.DOTALL)
  if not match or match[1] not in keys:
    return message.splitlines()[0]
  kind = keys[match[1]].__name__
  return f'--config.{match[1]}={match[2]}: expected a value of type {kind}'


def _one_line(e: Exception) -> str:
  text = e.args[0] if isinstance(e, KeyError) and e.args else str(e)
  return ' '.join(str(text).split())


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status: 0 done or stopped on request, 1 the run failed, 2 wrong usage."""
  argv = list(sys.argv if argv is None else argv)
  if any(a in ('-h', '--help', '-help', '--helpfull') for a in argv[1:]):
    print(f'{__doc__}\n{USAGE}\n\nThe keys and their meaning: configs/base.py')
    return 0
  try:
    config, workdir = parse(argv)
  except UsageError as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  # Importing jax takes seconds; typing mistakes should not have to wait for it.
  from jax.errors import JaxRuntimeError

  from glm5_jax.data import DataError
  from glm5_jax.rl import loop as rl_loop
  from glm5_jax.train import distributed, loop, pipeline
  from glm5_jax.train.checkpoint import CheckpointError
  from glm5_jax.train.workdir import WorkdirError

  try:
    distributed.start()
    train = loop.train
    if 'stages' in config:
      train = pipeline.train
    elif 'rl' in config:
      distributed.check_alone('a config with an `rl` section')
      train = rl_loop.train
    return train(config, workdir, command=_command(argv))
  except distributed.ProcessError as e:
    print(f'error: {e}', file=sys.stderr)
    return 2
  except (loop.ConfigError, DataError, CheckpointError, WorkdirError) as e:
    distributed.end_if_alone(e)  # What failed may have been to reach the others.
    print(f'error: {e}', file=sys.stderr)
    return 2
  except JaxRuntimeError as e:
    distributed.end_if_alone(e)
    raise


def _command(argv: Sequence[str]) -> str:
  return ' '.join(['python -m experiments.run', *map(shlex.quote, argv[1:])])


if __name__ == '__main__':
  sys.exit(main())
