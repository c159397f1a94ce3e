"""Key-value look-up in two hops: an agent has to act on what it finds."""

import itertools
import random
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.data.chat_parse import Reply
from glm5_jax.envs.protocol import Message, Task, answer_message, call_message, tool_message

_LETTERS = 'abcdefghijklmnopqrstuvwxyz'


class Lookup:
  """`get(key)` gives the next key; the value of that is the answer.

  Args:
    hops: how many calls it takes.
    careless: share of demonstrations that stop a hop too early.
  """

  name = 'lookup'
  tools: Sequence[Mapping[str, Any]] = (
    {
      'type': 'function',
      'function': {
        'name': 'get',
        'parameters': {'type': 'object', 'properties': {'k': {'type': 'string'}}},
      },
    },
  )

  def __init__(self, hops: int = 2, careless: float = 0.7):
    self._hops = hops
    self._careless = careless

  def make(self, rng: random.Random) -> Task:
    """`qz`: the first key and nothing else, so that it has the same tokens as in a call."""
    keys: list[str] = []
    while len(keys) < self._hops + 1:
      key = ''.join(rng.choices(_LETTERS, k=2))
      if key not in keys:
        keys.append(key)
    return Task(({'role': 'user', 'content': keys[0]},), keys)

  def respond(self, task: Task, reply: Reply) -> list[Message]:
    """Values of the keys; `none` for an unknown one."""
    table = dict(zip(task.answer[:-1], task.answer[1:], strict=True))
    if not reply.calls and not reply.failures:
      return []
    results = [tool_message(table.get(str(c.arguments.get('k')), 'none')) for c in reply.calls]
    return results + [tool_message(f'error: {failure}') for failure in reply.failures]

  def reward(self, task: Task, messages: Sequence[Message]) -> float:
    """Whether the last message is the last key and nothing else."""
    last = messages[-1]
    done = last['role'] == 'assistant' and not last.get('tool_calls')
    return float(done and last['content'].strip() == task.answer[-1])

  def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
    """All hops, or fewer."""
    keys = task.answer
    hops = rng.randrange(1, self._hops) if rng.random() < self._careless else self._hops
    out: list[Message] = []
    for key, value in itertools.pairwise(keys[: hops + 1]):
      out += [call_message('next', 'get', {'k': key}), tool_message(value)]
    return [*out, answer_message('done', keys[hops])]
