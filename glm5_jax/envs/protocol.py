"""What an environment is: tasks, replies to a model's tool calls, and a verdict.

An environment is stateless; an episode is a task and the list of its messages, so that it can be
replayed, moved and judged anywhere. Messages have OpenAI's form.
"""

import hashlib
import json
import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple, Protocol

from glm5_jax.data.chat_parse import Reply

Message = dict[str, Any]


class Task(NamedTuple):
  """One problem.

  Attributes:
    prompt: the messages that pose it.
    answer: what the judge needs and the model does not see; JSON-able.
  """

  prompt: tuple[Message, ...]
  answer: Any

  @property
  def key(self) -> str:
    """Hash of the problem: equal for equal problems."""
    text = json.dumps([self.prompt, self.answer], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


class EnvironmentFailureError(Exception):
  """The environment itself failed, not the model: such an episode has no reward (section 4.1.2)."""


class Environment(Protocol):
  """A family of tasks."""

  @property
  def name(self) -> str:
    """What reports call it."""
    ...

  @property
  def tools(self) -> Sequence[Mapping[str, Any]]:
    """Functions on offer, in OpenAI's form; may be empty."""
    ...

  def make(self, rng: random.Random) -> Task:
    """A random task."""
    ...

  def respond(self, task: Task, reply: Reply) -> list[Message]:
    """Results of the reply's calls, one `tool` message each; none ends the episode.

    Raises:
      EnvironmentFailureError: a tool is broken.
    """
    ...

  def reward(self, task: Task, messages: Sequence[Message]) -> float:
    """1.0 if the episode solves the task, else 0.0.

    Raises:
      EnvironmentFailureError: the judge is broken.
    """
    ...

  def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
    """What a teacher would do: a model's first examples. Not always right, as real data is not."""
    ...


def sample(env: Environment, index: int, *, held_out: bool, seed: int = 0) -> Task:
  """Task number `index` of a stream that never ends.

  Whether a problem is held out depends on the problem alone, one in ten is: no task of one stream ever
  appears in the other.
  """
  rng = random.Random(f'{env.name}/{seed}/{held_out}/{index}')
  for _ in range(10_000):
    task = env.make(rng)
    if (int(task.key[:8], 16) % 10 == 0) == held_out:
      return task
  raise RuntimeError(f'environment {env.name!r} has too few different tasks to hold some out')


def tool_message(text: str) -> Message:
  """The result of a call."""
  return {'role': 'tool', 'content': text}


def call_message(reasoning: str, name: str, arguments: Mapping[str, Any]) -> Message:
  """An assistant's message that calls one function."""
  function = {'name': name, 'arguments': dict(arguments)}
  return {
    'role': 'assistant',
    'content': '',
    'reasoning_content': reasoning,
    'tool_calls': [{'type': 'function', 'function': function}],
  }


def answer_message(reasoning: str, content: str) -> Message:
  """An assistant's message that answers."""
  return {'role': 'assistant', 'content': content, 'reasoning_content': reasoning}
