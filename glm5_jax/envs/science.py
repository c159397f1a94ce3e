"""School physics with whole numbers: the model has to know which law applies, then to compute.

The answer stands on a line of its own as `#### 42`, as in envs/numbers.py.
"""

import random
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from glm5_jax.data.chat_parse import Reply
from glm5_jax.envs.numbers import judge
from glm5_jax.envs.protocol import Message, Task, answer_message


class Law(NamedTuple):
  """A question about a, b and c = a b; the law as a formula; its sides as what is asked and given."""

  question: str
  formula: str
  product: bool  # Whether c is asked, or b = c / a.


# SI units throughout.
_LAWS = (
  Law('A car drives {b} m/s for {a} s. How many m?', 's=v*t', True),
  Law('{a} kg gain {b} m/s each second. What force in N?', 'F=m*a', True),
  Law('{b} A flow through {a} ohm. What voltage in V?', 'U=R*I', True),
  Law('A lamp takes {b} A at {a} V. What power in W?', 'P=U*I', True),
  Law('{c} J are spent in {a} s. What power in W?', 'P=E/t', False),
  Law('{c} N push on {a} m2. What pressure in Pa?', 'p=F/A', False),
  Law('{c} kg fill {a} m3. What density in kg/m3?', 'd=m/V', False),
)


class Science:
  """Laws of mechanics and electricity, two quantities given and one asked.

  Args:
    largest: of the factors.
    careless: share of demonstrations that guess instead of reasoning.
  """

  name = 'science'
  tools: Sequence[Mapping[str, Any]] = ()

  def __init__(self, largest: int = 12, careless: float = 0.6):
    self._largest = largest
    self._careless = careless

  def make(self, rng: random.Random) -> Task:
    """`3 A flow through 7 ohm. What voltage in V?`"""
    law = rng.choice(_LAWS)
    a, b = rng.randint(2, self._largest), rng.randint(2, self._largest)
    c = a * b
    text = law.question.format(a=a, b=b, c=c)
    work = f'{law.formula} ' + (f'{a}*{b}={c}' if law.product else f'{c}/{a}={b}')
    answer = {'work': work, 'answer': c if law.product else b}
    return Task(({'role': 'user', 'content': text},), answer)

  def respond(self, task: Task, reply: Reply) -> list[Message]:
    """No tools: every reply ends the episode."""
    return []

  def reward(self, task: Task, messages: Sequence[Message]) -> float:
    """Exact answer."""
    return judge(task.answer['answer'], messages)

  def demonstrate(self, task: Task, rng: random.Random) -> list[Message]:
    """The law and the sum, or a careless guess near the answer."""
    answer = task.answer['answer']
    if rng.random() < self._careless:
      return [answer_message('guess', f'#### {max(0, answer + rng.choice((-2, -1, 0, 1, 2)))}')]
    return [answer_message(task.answer['work'], f'#### {answer}')]
