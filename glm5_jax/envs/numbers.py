"""Two families with a whole number as the answer: word problems, and sums for a calculator.

The answer stands on a line of its own as `#### 42`, as in GSM8K (arXiv 2110.14168).
"""

import ast
import operator
import random
import re
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from glm5_jax.data.chat_parse import Reply
from glm5_jax.envs.protocol import Message, Task, answer_message, call_message, tool_message

_ANSWER = re.compile(r'^#### (-?[0-9]{1,18})$', re.MULTILINE | re.ASCII)
# A number a calculator may reach; beyond, 9**9**9 would never end.
_LARGEST = 10**18
_MAX_EXPRESSION = 100
_OPERATORS: dict[type, Callable[..., int]] = {
  ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul, ast.USub: operator.neg,
}  # fmt: skip


def parse_answer(content: str) -> int | None:
  """The number of the one line `#### N`; None if there is no such line, or more than one."""
  found = _ANSWER.findall(content)
  return int(found[0]) if len(found) == 1 else None


def judge(answer: int, messages: Sequence[Message]) -> float:
  """1 if the last message is an assistant's and gives exactly this answer."""
  last = messages[-1]
  if last['role'] != 'assistant' or last.get('tool_calls'):
    return 0.0
  return float(parse_answer(last['content']) == answer)


def calculate(expression: str) -> str:
  """Value of a sum of whole numbers with + - * and parentheses, or what is wrong with it."""
  if len(expression) > _MAX_EXPRESSION:
    return f'error: longer than {_MAX_EXPRESSION} characters'
  try:
    with (
      warnings.catch_warnings()
    ):  # Python has opinions about `2x`; they are no part of the result.
      warnings.simplefilter('ignore')
      tree = ast.parse(expression.strip(), mode='eval')
    return str(_value(tree.body))
  except (SyntaxError, ValueError, RecursionError, MemoryError) as e:
    return f'error: {e.args[0] if isinstance(e, ValueError) and e.args else "not a sum"}'


def _value(node: ast.AST) -> int:
  if isinstance(node, ast.Constant) and type(node.value) is int:
    value = node.value
  elif isinstance(node, ast.BinOp) and type(node.op) in _OPERATORS:
    value = _OPERATORS[type(node.op)](_value(node.left), _value(node.right))
  elif isinstance(node, ast.UnaryOp) and type(node.op) in _OPERATORS:
    value = _OPERATORS[type(node.op)](_value(node.operand))
  else:
    raise ValueError('only whole numbers, + - * and parentheses')
  if abs(value) > _LARGEST:
    raise ValueError('too large')
  return value


_NAMES = ('Ann', 'Ben', 'Cem', 'Dia', 'Eva')
_THINGS = ('pens', 'cups', 'figs', 'nuts', 'maps')


class WordProblems:
  """Additions and subtractions told as stories: the model has to reason by itself.

  Args:
    largest: of the first number.
    careless: share of demonstrations that guess instead of reasoning.
  """

  name = 'math'
  tools: Sequence[Mapping[str, Any]] = ()

  def __init__(self, largest: int = 9, careless: float = 0.6):
    self._largest = largest
    self._careless = careless

  def make(self, rng: random.Random) -> Task:
    """`Ann has 3 pens. Ann gets 4, then gives 2. How many?`"""
    who, what = rng.choice(_NAMES), rng.choice(_THINGS)
    a, b = rng.randint(1, self._largest), rng.randint(1, self._largest)
    c = rng.randint(1, min(a + b, self._largest))
    text = f'{who} has {a} {what}. {who} gets {b}, then gives {c}. How many {what}?'
    return Task(({'role': 'user', 'content': text},), {'steps': [a, b, c], 'answer': a + b - c})

  def respond(self, task: Task, reply: Reply) -> list[Message]:
    """No tools: every reply ends the episode."""
    return []

  def reward(self, task: Task, messages: Sequence[Message]) -> float:
    """Exact answer."""
    return judge(task.answer['answer'], messages)

  def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
    """Step by step, or a careless guess near the answer."""
    a, b, c = task.answer['steps']
    answer = task.answer['answer']
    if rng.random() < self._careless:
      return [answer_message('guess', f'#### {max(0, answer + rng.choice((-2, -1, 0, 1, 2)))}')]
    return [answer_message(f'{a}+{b}={a + b} {a + b}-{c}={answer}', f'#### {answer}')]


class Calculator:
  """Products too large for the model's head, and a calculator: tool-integrated reasoning.

  Args:
    largest: of each factor.
    careless: share of demonstrations that guess instead of calling.
  """

  name = 'tool'
  tools: Sequence[Mapping[str, Any]] = (
    {
      'type': 'function',
      'function': {
        'name': 'calc',
        'parameters': {'type': 'object', 'properties': {'e': {'type': 'string'}}},
      },
    },
  )

  def __init__(self, largest: int = 99, careless: float = 0.6):
    self._largest = largest
    self._careless = careless

  def make(self, rng: random.Random) -> Task:
    """`12*34+56`: the very text, hence the very tokens, that the call needs."""
    a, b, c = (rng.randint(2, self._largest) for _ in range(3))
    expression = f'{a}*{b}+{c}'
    answer = {'expression': expression, 'answer': a * b + c}
    return Task(({'role': 'user', 'content': expression},), answer)

  def respond(self, task: Task, reply: Reply) -> list[Message]:
    """The calculator's results."""
    if not reply.calls and not reply.failures:
      return []
    results = [tool_message(calculate(str(c.arguments.get('e', '')))) for c in reply.calls]
    return results + [tool_message(f'error: {failure}') for failure in reply.failures]

  def reward(self, task: Task, messages: Sequence[Message]) -> float:
    """Exact answer, however it was found."""
    return judge(task.answer['answer'], messages)

  def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
    """A call and its result, or a careless guess of the right length."""
    answer, expression = task.answer['answer'], task.answer['expression']
    if rng.random() < self._careless:
      guess = rng.randint(10 ** (len(str(answer)) - 1), 10 ** len(str(answer)) - 1)
      return [answer_message('guess', f'#### {guess}')]
    return [
      call_message('calc', 'calc', {'e': expression}),
      tool_message(calculate(expression)),
      answer_message('done', f'#### {answer}'),
    ]
