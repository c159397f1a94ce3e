"""Environments by name, and a teacher's demonstrations of them as conversations to learn from."""

import json
import pathlib
import random
from collections.abc import Iterator, Sequence
from typing import Any

from glm5_jax.envs.functions import Functions
from glm5_jax.envs.lookup import Lookup
from glm5_jax.envs.numbers import Calculator, WordProblems
from glm5_jax.envs.protocol import Environment, sample
from glm5_jax.envs.science import Science

# Section 3.2 mixes four domains in about equal parts: mathematics, science, code and reasoning with
# tools ('tool'). 'lookup' is an agent's task: it has to act on what it finds.
ENVIRONMENTS: dict[str, Any] = {
  e.name: e for e in (WordProblems, Science, Functions, Calculator, Lookup)
}


def make_environments(names: Sequence[str]) -> list[Environment]:
  """Environments with their defaults.

  Raises:
    ValueError: a name is unknown or given twice, or there is none.
  """
  if not names or len(set(names)) < len(names) or not set(names) <= set(ENVIRONMENTS):
    raise ValueError(
      f'environments={list(names)} must name at least one of {sorted(ENVIRONMENTS)}, each once'
    )
  return [ENVIRONMENTS[name]() for name in names]


def demonstrations(env: Environment, count: int, tasks: int, seed: int) -> Iterator[dict[str, Any]]:
  """Conversations on training tasks, as records of a 'chat' source; no held-out task is ever shown.

  A conversation poses `tasks` of them one after another: the description of the tools, most of a short
  conversation's tokens, is read once for all.
  """
  for i in range(count):
    rng = random.Random(f'demonstration/{env.name}/{seed}/{i}')
    messages: list[Any] = []
    for number in range(i * tasks, (i + 1) * tasks):
      task = sample(env, number, held_out=False, seed=seed)
      messages += [*task.prompt, *env.demonstrate(task, rng)]
    yield {'messages': messages} | ({'tools': list(env.tools)} if env.tools else {})


def write_demonstrations(
  folder: pathlib.Path, names: Sequence[str], count: int, tasks: int, seed: int
) -> list[pathlib.Path]:
  """Writes `folder`/NAME.jsonl of each environment, where it is not there already.

  Raises:
    ValueError: see `make_environments`; or `count` or `tasks` is not positive.
  """
  if min(count, tasks) < 1:
    raise ValueError(f'count={count} and tasks={tasks} must be at least 1')
  folder.mkdir(parents=True, exist_ok=True)
  paths = []
  for env in make_environments(names):
    path = folder / f'{env.name}.jsonl'
    text = ''.join(json.dumps(record) + '\n' for record in demonstrations(env, count, tasks, seed))
    # The cache of tokens goes by the time of the file, so an equal one stays.
    if not path.exists() or path.read_text() != text:
      partial = path.with_name(f'.{path.name}')
      partial.write_text(text)
      partial.replace(path)
    paths.append(path)
  return paths
