"""Tasks and their judges: solvable, never leaking, and not to be fooled."""

import itertools
import json
import random
import re

import pytest

from glm5_jax.data import chat
from glm5_jax.data.chat_parse import Reply, ToolCall
from glm5_jax.envs import protocol, sandbox
from glm5_jax.envs.functions import Functions
from glm5_jax.envs.lookup import Lookup
from glm5_jax.envs.numbers import Calculator, WordProblems, calculate, parse_answer
from glm5_jax.envs.protocol import answer_message, sample
from glm5_jax.envs.science import Science

ENVIRONMENTS = [
  WordProblems(careless=0),
  Calculator(careless=0),
  Lookup(careless=0),
  Science(careless=0),
  Functions(careless=0),
]
EACH = pytest.mark.parametrize('env', ENVIRONMENTS, ids=lambda e: e.name)
NEEDS_SANDBOX = pytest.mark.usefixtures('bubblewrap')


@EACH
def test_a_careful_demonstration_is_right_and_a_shorter_one_is_not(env, request):
  if env.name == 'code':
    request.getfixturevalue('bubblewrap')
  rng = random.Random(0)
  for i in range(12 if env.name == 'code' else 200):
    task = sample(env, i, held_out=bool(i % 2))
    messages = [*task.prompt, *env.demonstrate(task, rng)]
    assert env.reward(task, messages) == 1.0
    assert env.reward(task, [*task.prompt, answer_message('', '')]) == 0.0
    assert env.reward(task, task.prompt) == 0.0
    # Every demonstration can be rendered, and what its tools said is what they say.
    chat.render(messages, list(env.tools), close=True)
    for before, after in itertools.pairwise(messages):
      if before.get('tool_calls'):
        (call,) = before['tool_calls']
        reply = Reply('', '', (ToolCall(**call['function']),))
        assert env.respond(task, reply) == [after]


@EACH
def test_careless_demonstrations_are_wrong_about_as_often_as_asked(env):
  careless, rng = type(env)(careless=1.0), random.Random(1)
  tasks = [sample(careless, i, held_out=False) for i in range(300)]
  if env.name == 'code':  # Judging takes a sandbox: its mistake is that the last step is missing.
    for task in tasks:
      (message,) = careless.demonstrate(task, rng)
      first, _ = task.answer['lines']
      assert message['content'] == f'```python\ndef f(x):\n  x = {first}\n  return x\n```'
    return
  rewards = [careless.reward(t, [*t.prompt, *careless.demonstrate(t, rng)]) for t in tasks]
  assert sum(rewards) / 300 < 0.35


@EACH
def test_streams_are_reproducible_and_disjoint(env):
  train = [sample(env, i, held_out=False) for i in range(300)]
  test = [sample(env, i, held_out=True) for i in range(100)]
  assert train == [sample(env, i, held_out=False) for i in range(300)]
  assert not {t.key for t in train} & {t.key for t in test}
  assert len({t.key for t in train}) > 200
  assert train[:20] != [sample(env, i, held_out=False, seed=1) for i in range(20)]
  assert all(json.loads(json.dumps(t)) for t in train[:5])


@pytest.mark.parametrize(
  'content, number',
  [
    ('#### 7', 7),
    ('so\n#### -12\n', -12),
    ('7', None),
    ('#### 7 or 8', None),
    ('#### 7\n#### 8', None),
    ('#### 7\n#### 7', None),
    ('####7', None),
    ('#### 7.0', None),
    ('#### \N{ARABIC-INDIC DIGIT SEVEN}', None),
    ('#### 0x7', None),
    ('x #### 7', None),
    ('#### ' + '9' * 5000, None),
  ],
)
def test_answers_are_read_strictly(content, number):
  assert parse_answer(content) == number


@pytest.mark.parametrize(
  'expression, value',
  [
    ('2*3+4', '10'),
    (' -(2 - 5) * 3', '9'),
    ('9**9**9', 'error: only whole numbers, + - * and parentheses'),
    ("__import__('os')", 'error: only whole numbers, + - * and parentheses'),
    ('1/2', 'error: only whole numbers, + - * and parentheses'),
    ('True+1', 'error: only whole numbers, + - * and parentheses'),
    ('999999999999*999999999999', 'error: too large'),
    ('(' * 60 + ')' * 30, 'error: not a sum'),
    ('1+' * 60 + '1', 'error: longer than 100 characters'),
    ('', 'error: not a sum'),
    ('1\x00', 'error: not a sum'),
  ],
)
def test_the_calculator_computes_sums_and_nothing_else(expression, value):
  assert calculate(expression).startswith(value)


def test_science_follows_the_laws():
  """The answers recomputed from the questions' own words; every law occurs."""
  laws = {
    'drives': lambda v, t: v * t, 'gain': lambda m, a: m * a, 'flow': lambda i, r: r * i,
    'takes': lambda i, u: u * i, 'spent': lambda e, t: e / t, 'push': lambda f, a: f / a,
    'fill': lambda m, v: m / v,
  }  # fmt: skip
  seen = set()
  for i in range(200):
    task = sample(Science(), i, held_out=False)
    text = task.prompt[0]['content']
    (law,) = (name for name in laws if name in text.split())
    numbers = [int(n) for n in re.findall(r'(?<![a-z])\d+', text)]
    assert task.answer['answer'] == laws[law](*numbers), text
    left, _, right = task.answer['work'].split()[1].partition('=')
    assert eval(left) == int(right) == task.answer['answer']
    seen.add(law)
  assert seen == set(laws)


def test_tools_answer_malformed_calls():
  for env in (Calculator(), Lookup()):
    task = sample(env, 0, held_out=False)
    assert env.respond(task, Reply('', 'x')) == []
    (result,) = env.respond(task, Reply('', '', failures=('a <tool_call> is not closed',)))
    assert result['content'] == 'error: a <tool_call> is not closed'
    assert len(env.respond(task, Reply('', '', (ToolCall('f', {}), ToolCall('f', {'e': 3}))))) == 2


@NEEDS_SANDBOX
@pytest.mark.parametrize(
  'attack',
  [
    'x = 1',
    'def f(x):\n  return x',
    'def f(x):\n  return True',
    'def f(x):\n  return float({right})',
    'import sys\ndef f(x):\n  sys.exit(0)',
    'import os\nprint("[0, 0, 0, 0, 0]")\nos._exit(0)',
    'class A(int):\n  def __eq__(self, o): return True\n  def __repr__(self): return "0"\ndef f(x):\n  return A()',
    'print("right")\nraise SystemExit(0)',
    'def f(x):\n  while True: pass',
    'def f(x):\n  return "9" * 10**9',
  ],
)
def test_code_that_does_not_compute_fails(attack):
  env = Functions(careless=0, sandbox=sandbox.Sandbox(seconds=2.0))
  task = sample(env, 3, held_out=False)
  line = task.answer['lines'][-1]
  block = f'```python\n{attack.replace("{right}", line)}\n```'
  assert env.reward(task, [*task.prompt, answer_message('', block)]) == 0.0


@NEEDS_SANDBOX
def test_only_one_block_of_code_counts():
  env = Functions(careless=0)
  task = sample(env, 0, held_out=False)
  (right,) = env.demonstrate(task, random.Random(0))
  assert env.reward(task, [*task.prompt, right]) == 1.0
  for content in (f'Here: {right["content"]}', right['content'] + '\nDone', right['content'][3:]):
    assert env.reward(task, [*task.prompt, answer_message('', content)]) == 0.0


def test_a_broken_judge_is_no_reward(monkeypatch):
  def refuse(*_):
    raise sandbox.SandboxError('no bubblewrap')

  monkeypatch.setattr(sandbox.Sandbox, 'python', refuse)
  env = Functions(careless=0)
  task = sample(env, 0, held_out=False)
  messages = [*task.prompt, *env.demonstrate(task, random.Random(0))]
  with pytest.raises(protocol.EnvironmentFailureError, match='no bubblewrap'):
    env.reward(task, messages)


def test_too_few_tasks_is_an_error():
  class Single(WordProblems):
    def make(self, rng):
      return protocol.Task(({'role': 'user', 'content': 'x'},), 0)

  with pytest.raises(RuntimeError, match='too few different tasks'):
    [sample(Single(), 0, held_out=h) for h in (True, False)]
