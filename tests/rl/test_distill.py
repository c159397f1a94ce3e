"""Distillation (eq. 2): teachers score what the student sampled, and the student moves towards them."""

import dataclasses
import json
import random

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from ml_collections import ConfigDict

from glm5_jax.envs.functions import Functions
from glm5_jax.envs.numbers import WordProblems
from glm5_jax.losses.policy import PolicyConfig
from glm5_jax.rl import loop
from glm5_jax.rl.learner import Learner, make_policy_step, of_teacher
from glm5_jax.rl.rollout import Trajectory
from glm5_jax.rl.teachers import Teachers, folder_of
from glm5_jax.train import result
from glm5_jax.train.checkpoint import CheckpointError
from glm5_jax.train.prepare import ConfigError
from tests import tiny
from tests.rl import tiny_run
from tests.rl.tiny_run import BYTES, CONFIG

LEARNER = Learner(PolicyConfig('icepop'), micro_rows=2, temperature=0.7, advantages=of_teacher)


@pytest.fixture(scope='module')
def params():
  return tiny.random_params(CONFIG)


@pytest.fixture(scope='module')
def folders(tmp_path_factory, params):
  """Three runs with different parameters: the student's, then two teachers'."""
  root = tmp_path_factory.mktemp('runs')
  kinds = [params, tiny.random_params(CONFIG, seed=1), tiny.random_params(CONFIG, seed=2)]
  return [tiny_run.save(root / f'{i}_{name}', p)
          for i, (name, p) in enumerate(zip(('student', 'one', 'two'), kinds, strict=True))]  # fmt: skip


def _logprobs(params, t: Trajectory, temperature: float) -> np.ndarray:
  """Of all tokens but the first, in float64, from a forward pass of this trajectory alone."""
  logits = np.float64(tiny.forward(params, [t.ids[:-1]], CONFIG).logits[0]) / temperature
  logits -= logits.max(axis=-1, keepdims=True)
  logp = logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))
  return logp[np.arange(len(t.ids) - 1), t.ids[1:]]


def _trajectories(params, lengths, temperature: float, seed: int = 0):
  """As the policy itself would have sampled them: its own log-probabilities, random tokens."""
  rng = random.Random(seed)
  out = []
  for i, n in enumerate(lengths):
    sampled = [False, *(rng.random() < 0.7 for _ in range(n - 2)), True]
    t = Trajectory(
      rng.choice(('math', 'code')), i, 0, ids=[rng.randrange(200) for _ in range(n)],
      sampled=sampled, logprobs=[], token_versions=[0 if s else -1 for s in sampled],
    )  # fmt: skip
    t.logprobs = [0.0, *(_logprobs(params, t, temperature) * sampled[1:])]
    out.append(t)
  return out


def _find(rows, t: Trajectory):
  """Where a trajectory lies in the rows."""
  for r in range(len(rows.tokens)):
    for segment in range(1, int(rows.segment_ids[r].max()) + 1):
      here = rows.segment_ids[r] == segment
      if rows.tokens[r][here].tolist() == t.ids[:-1]:
        return r, here
  raise AssertionError(f'trajectory {t.index} is in no row')


@pytest.fixture(scope='module')
def teachers(folders):
  wanted = {'math': str(folders[1]), 'code': str(folders[2])}
  return Teachers(wanted, folders[0], CONFIG, BYTES, LEARNER)


def test_each_teacher_scores_its_own_domain(teachers, params):
  """Packed rows of both, against forward passes of the right teacher, one trajectory at a time."""
  played = _trajectories(params, [9, 21, 14, 30, 5, 26], 0.7)
  assert {t.env for t in played} == {'math', 'code'}
  needed = teachers.rows_needed(len(played))
  rows, filled = teachers.batch(played, 32, BYTES.eot_id, needed)
  assert len(rows.tokens) == needed and 2 * filled <= needed
  assert not rows.mask[2 * filled :].any() and rows.mask[: 2 * filled].any(axis=1).sum() > 2
  for t in played:
    row, here = _find(rows, t)
    teacher = teachers.params[teachers.folders.index(teachers.folders[t.env == 'code'])]
    expected = _logprobs(teacher, t, LEARNER.temperature)
    np.testing.assert_allclose(rows.teacher[row][here], expected, atol=2e-5)
    np.testing.assert_allclose(rows.rollout[row][here], t.logprobs[1:], atol=1e-6)
  assert [teachers.environments(i) for i in range(2)] == [['math'], ['code']]


def test_room_for_every_distribution_over_teachers(teachers, params):
  """However the episodes fall to the teachers, they fit the rows that are always there."""
  for lengths in ([32] * 5, [32] * 4, [3]):
    played = _trajectories(params, lengths, 0.7, seed=len(lengths))
    for split in range(len(played) + 1):
      for i, t in enumerate(played):
        t.env = 'math' if i < split else 'code'
      rows, filled = teachers.batch(played, 32, 0, teachers.rows_needed(len(played)))
      assert rows.mask.sum() == sum(sum(t.sampled[1:]) for t in played)
      assert len(rows.tokens) == teachers.rows_needed(len(played)) >= 2 * filled


def test_the_update_is_equation_2(teachers, params):
  """SGD's step is that of REINFORCE with log pi_teacher - log pi_theta of every token as advantage."""
  played = _trajectories(params, [9, 21, 14, 30], 0.7)
  rows, filled = teachers.batch(played, 32, 0, teachers.rows_needed(4))
  sgd = optax.sgd(1.0)
  state, metrics = make_policy_step(CONFIG, LEARNER, sgd)(
    tiny_run.state(params, sgd), rows, jnp.int32(filled)
  )
  # The oracle: advantages from single forward passes, given; and no importance ratio at all.
  given = np.zeros_like(rows.rollout)
  gaps = []
  for t in played:
    row, here = _find(rows, t)
    teacher = teachers.params[int(t.env == 'code')]
    gap = _logprobs(teacher, t, 0.7) - _logprobs(params, t, 0.7)
    given[row, here] = gap
    gaps.append(np.mean(-gap[np.array(t.sampled[1:])]))
  plain = dataclasses.replace(
    LEARNER, policy=PolicyConfig('on_policy'), advantages=Learner().advantages
  )
  expected, _ = make_policy_step(CONFIG, plain, sgd)(
    tiny_run.state(params, sgd), rows._replace(advantages=given, teacher=None), jnp.int32(filled)
  )
  moved = 0.0
  for old, got, want in zip(
    *map(jax.tree.leaves, (params, state.params, expected.params)), strict=True
  ):
    scale = float(np.abs(np.asarray(want - old)).max())
    moved = max(moved, scale)
    np.testing.assert_allclose(got - old, want - old, atol=3e-4 * max(scale, 1e-2))
  assert moved > 1e-2
  np.testing.assert_allclose(metrics['reverse_kl'], np.mean(gaps), rtol=1e-4)


def test_the_student_comes_closer(teachers, params):
  """The exact KL(student || teacher) of the next token falls, from one-token answers it samples."""
  rng = np.random.default_rng(0)
  prompts = rng.integers(0, 200, (4, 8))

  def log_probs(params):
    logits = np.float64(tiny.forward(params, prompts, CONFIG).logits[:, -1]) / 0.7
    return logits - np.log(np.exp(logits).sum(axis=-1, keepdims=True))

  def kl(student):
    teacher = log_probs(teachers.params[0])
    return float(np.mean(np.sum(np.exp(student) * (student - teacher), axis=-1)))

  tx = optax.adam(3e-3)
  step, state = make_policy_step(CONFIG, LEARNER, tx), tiny_run.state(params, tx)
  found = []
  for _ in range(20):
    student = log_probs(state.params)
    found.append(kl(student))
    played = []
    for prompt, logp in zip(prompts, student, strict=True):
      for token in rng.choice(len(logp), 24, p=np.exp(logp) / np.exp(logp).sum()):
        sampled = [False] * 8 + [True]
        played.append(
          Trajectory('math', len(played), 0, [*map(int, prompt), int(token)], sampled,
                     [0.0] * 8 + [float(logp[token])], [-1] * 8 + [0])
        )  # fmt: skip
    rows, filled = teachers.batch(played, 32, 0, 26)
    state, metrics = step(state, rows, jnp.int32(filled))
    assert metrics['masked'] == 0
  assert found[-1] < 0.7 * found[0], found


# --- The loop ---


def _config(folders) -> ConfigDict:
  c = tiny_run.config(folders[0])
  c.stage = 'distill'
  c.rl.advantage = 'teacher'
  c.rl.teachers = ConfigDict({'math': str(folders[1]), 'code': str(folders[2])})
  c.rl.group_size, c.rl.groups = 1, 6
  c.rl.policy.objective = 'icepop'
  return c


@pytest.fixture
def free_judge(monkeypatch):
  """A random model solves nothing, and the sandbox is not what this is about."""
  for env in (Functions, WordProblems):
    monkeypatch.setattr(env, 'reward', lambda self, task, messages: float(len(str(messages)) % 2))


def test_a_run_and_its_resumption(folders, tmp_path, free_judge):
  whole, parts = tmp_path / 'whole', tmp_path / 'parts'
  assert loop.train(_config(folders), str(whole), command='the command') == 0
  config = _config(folders)
  config.train.steps = 2
  assert loop.train(config, str(parts)) == 0
  config.train.steps = 4
  assert loop.train(config, str(parts)) == 0
  for step in range(1, 5):
    files = [p / 'rollouts' / f'{step:06d}.jsonl' for p in (whole, parts)]
    assert files[0].read_text() == files[1].read_text()
  rows = [json.loads(line) for line in (whole / 'metrics.jsonl').read_text().splitlines()]
  again = [json.loads(line) for line in (parts / 'metrics.jsonl').read_text().splitlines()]
  assert [r.get('reverse_kl') for r in rows] == [r.get('reverse_kl') for r in again]
  updates = [r for r in rows if 'reverse_kl' in r]
  assert len(updates) == 4 and all(r['groups_kept'] == 6 for r in updates)
  assert max(r['logprob_gap_max'] for r in updates) < 1e-5
  found = result.read(whole)
  assert found['step'] == 4 and not found['stopped']
  tasks = found['tasks']
  assert tasks['accuracy']['before'].keys() == tasks['accuracy']['after'].keys() == {'code', 'math'}
  assert tasks['teacher']['before'].keys() == {'code', 'math'}
  assert 0.0 <= tasks['valid']['after']['math'] <= 1.0
  report = (whole / 'report.md').read_text()
  assert '| held-out accuracy, greedy | before | after | teacher |' in report
  assert str(folders[1]) in report and 'the command' in report


@pytest.mark.parametrize(
  'change, said',
  [
    ({'rl.teachers': {'math': 'x'}}, "names no run for ['code']"),
    ({'rl.advantage': 'group_mean'}, "the advantage of stage 'distill'"),
    ({'stage': 'reasoning_rl'}, "the advantage of stage 'distill'"),
  ],
)
def test_impossible_configs(folders, change, said):
  c = _config(folders)
  for key, value in change.items():
    section, _, last = key.rpartition('.')
    (c[section] if section else c)[last] = ConfigDict(value) if isinstance(value, dict) else value
  with pytest.raises(ConfigError) as error:
    loop.prepare(c)
  assert said in str(error.value)


def test_teachers_that_cannot_teach(folders, tmp_path):
  def make(folder):
    return Teachers({'math': str(folder)}, folders[0], CONFIG, BYTES, LEARNER)

  with pytest.raises(CheckpointError, match=r'^rl\.teachers: .*nowhere does not exist'):
    make(tmp_path / 'nowhere')
  with pytest.raises(CheckpointError, match='hidden_size was 40, is 48'):
    Teachers({'math': str(folders[1])}, folders[0], CONFIG.replace(hidden_size=48), BYTES, LEARNER)
  other = tiny_run.save(tmp_path / 'other', tiny.random_params(CONFIG))
  file = other / 'tokenizer.json'
  file.write_text(file.read_text().replace('<|endoftext|>', '<|endoftexts|>'))
  with pytest.raises(Exception, match='tokenizer|endoftext'):
    make(other)


def test_a_stage_of_the_same_pipeline(folders):
  assert folder_of('stage:one', folders[0]) == folders[1]
  assert folder_of(str(folders[2]), folders[0]) == folders[2]
  with pytest.raises(CheckpointError, match='0 folders beside .* are called NUMBER_three'):
    folder_of('stage:three', folders[0])
