"""Small functions to write in Python, run against hidden tests in the sandbox."""

import json
import random
import re
from collections.abc import Mapping, Sequence
from typing import Any

from glm5_jax.data.chat_parse import Reply
from glm5_jax.envs.protocol import EnvironmentFailureError, Message, Task, answer_message
from glm5_jax.envs.sandbox import Sandbox, SandboxError

# The right values never enter the sandbox, so whatever the model's code does there, it can only pass by
# computing them.
_RUN = """
import json, sys
names = {}
exec(compile(open('answer.py').read(), 'answer.py', 'exec'), names)
print(json.dumps([names['f'](x) for x in json.load(sys.stdin)]))
"""
_CODE = re.compile(r'\A```python\n(.*?)```\s*\Z', re.DOTALL)
# A phrase, and the expression that it means.
_STEPS = {
  'add {n}': 'x + {n}',
  'subtract {n}': 'x - {n}',
  'multiply by {n}': 'x * {n}',
  'square': 'x * x',
  'negate': '-x',
}


class Functions:
  """`Write f(x): add 3, then square.`

  Args:
    careless: share of demonstrations that forget the last step.
    sandbox: its limits.
  """

  name = 'code'
  tools: Sequence[Mapping[str, Any]] = ()

  def __init__(self, careless: float = 0.6, sandbox: Sandbox = Sandbox()):
    self._careless = careless
    self._sandbox = sandbox

  def make(self, rng: random.Random) -> Task:
    """Two steps on a whole number."""
    steps = [(rng.choice(list(_STEPS)), rng.randint(2, 9)) for _ in range(2)]
    text = ', then '.join(phrase.format(n=n) for phrase, n in steps)
    inputs = rng.sample(range(-50, 50), 5)
    lines = [_STEPS[phrase].format(n=n) for phrase, n in steps]
    outputs = []
    for x in inputs:
      for line in lines:
        x = eval(line, {'__builtins__': {}}, {'x': x})
      outputs.append(x)
    answer = {'lines': lines, 'inputs': inputs, 'outputs': outputs}
    return Task(({'role': 'user', 'content': f'Write f(x): {text}.'},), answer)

  def respond(self, task: Task, reply: Reply) -> list[Message]:
    """No tools: every reply ends the episode."""
    return []

  def reward(self, task: Task, messages: Sequence[Message]) -> float:
    """Whether the one block of code passes every hidden test."""
    code = _CODE.match(messages[-1]['content'].strip())
    if messages[-1]['role'] != 'assistant' or not code:
      return 0.0
    try:
      inputs = json.dumps(task.answer['inputs'])
      result = self._sandbox.python(_RUN, inputs, {'answer.py': code[1]})
    except SandboxError as e:
      raise EnvironmentFailureError(str(e)) from e
    lines = result.stdout.splitlines()
    try:
      values = json.loads(lines[-1]) if result.ok and lines else None
    except (ValueError, RecursionError):
      return 0.0
    right = task.answer['outputs']
    return float(isinstance(values, list) and list(map(repr, values)) == list(map(repr, right)))

  def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
    """The function, or one without its last step."""
    lines = task.answer['lines']
    kept = lines[:1] if rng.random() < self._careless else lines
    body = ''.join(f'  x = {line}\n' for line in kept)
    return [answer_message('code', f'```python\ndef f(x):\n{body}  return x\n```')]
