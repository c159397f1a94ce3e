"""What a model does on held-out tasks: how many it solves, and how many of its turns parse."""

import collections
import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from glm5_jax.data.tokenizer import Tokenizer
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.request import RequestError
from glm5_jax.rl import tasks
from glm5_jax.rl.prepare import Play
from glm5_jax.rl.rollout import Trajectory, check_prompt, play
from glm5_jax.train.prepare import ConfigError


def check_prompts(how: Play, tokenizer: Tokenizer) -> None:
  """That the tasks fit, before anything is compiled.

  Raises:
    ConfigError: a prompt leaves no room for an answer.
  """
  try:
    for job in tasks.held_out_jobs(how.environments, how.tasks, how.seed):
      check_prompt(job, tokenizer, how.settings)
  except RequestError as e:
    raise ConfigError(f'rl.episode: {e}') from None


def evaluate(engine: Engine, tokenizer: Tokenizer, how: Play) -> dict[str, Any]:
  """Greedy play of the held-out tasks, as a row of metrics; see `scores`."""
  return scores(play_held_out(engine, tokenizer, how))


def play_held_out(engine: Engine, tokenizer: Tokenizer, how: Play) -> list[Trajectory]:
  """One greedy episode of each held-out task."""
  jobs = tasks.held_out_jobs(how.environments, how.tasks, how.seed)
  return play(engine, tokenizer, jobs, dataclasses.replace(how.settings, temperature=0.0))


def scores(played: Sequence[Trajectory]) -> dict[str, Any]:
  """Of each environment eval/accuracy/NAME and eval/valid/NAME, and what they come to.

  Accuracy is the share solved, without those episodes whose environment failed; valid the share of the
  model's turns that parse. eval/accuracy and eval/valid are the means over the environments; eval/error
  is 1 - accuracy; eval/failures counts the episodes whose environment failed.
  """
  rewards, turns, malformed = (collections.defaultdict(list) for _ in range(3))
  for t in played:
    if t.failure is None:
      rewards[t.env].append(t.reward)
    turns[t.env].append(t.turns)
    malformed[t.env].append(t.malformed)
  accuracy = {name: float(np.mean(r)) for name, r in rewards.items()}
  valid = {name: 1.0 - sum(malformed[name]) / max(1, sum(n)) for name, n in turns.items()}
  row: dict[str, Any] = {}
  for key, values in (('accuracy', accuracy), ('valid', valid)):
    row |= {f'eval/{key}/{name}': value for name, value in values.items()}
    row[f'eval/{key}'] = float(np.mean(list(values.values()))) if values else 0.0
  row['eval/error'] = 1.0 - row['eval/accuracy']
  row['eval/failures'] = sum(t.failure is not None for t in played)
  return row


def by_environment(row: Mapping[str, Any], key: str) -> dict[str, float]:
  """{'math': 0.5, ...}: a row's values of `key`, such as 'eval/accuracy'."""
  prefix = f'{key}/'
  return {k.removeprefix(prefix): v for k, v in row.items() if k.startswith(prefix)}


def said(row: Mapping[str, Any]) -> str:
  """A row of `evaluate` in one line."""
  each = ', '.join(f'{k} {v:.2f}' for k, v in by_environment(row, 'eval/accuracy').items())
  return f'held-out accuracy {row["eval/accuracy"]:.3f} ({each})'
