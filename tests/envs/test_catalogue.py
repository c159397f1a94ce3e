"""Demonstrations: conversations that a model can learn from, and no held-out task among them."""

import json

import pytest

from glm5_jax.data import conversations
from glm5_jax.data.config import SourceConfig
from glm5_jax.envs import catalogue
from glm5_jax.envs.protocol import sample


@pytest.mark.parametrize('name', sorted(catalogue.ENVIRONMENTS))
def test_conversations_pose_several_tasks_and_are_learnt_from(name, tmp_path):
  (path,) = catalogue.write_demonstrations(tmp_path, [name], count=20, tasks=3, seed=1)
  (env,) = catalogue.make_environments([name])
  held_out = {sample(env, i, held_out=True, seed=s).prompt[0]['content']
              for i in range(200) for s in (0, 1)}  # fmt: skip
  for i, line in enumerate(path.read_text().splitlines()):
    record = json.loads(line)
    posed = [m['content'] for m in record['messages'] if m['role'] == 'user']
    wanted = [sample(env, 3 * i + k, held_out=False, seed=1) for k in range(3)]
    assert posed == [task.prompt[0]['content'] for task in wanted]
    # Word problems differ in their answers too, look-ups only in what the table holds.
    assert name in ('code', 'lookup') or not held_out & set(posed)
    assert bool(record.get('tools')) == bool(env.tools)
    (learnt,) = conversations.samples(line, SourceConfig('chat', 'unused'))
    assert sum(learnt.learnt) == sum(m['role'] == 'assistant' for m in record['messages'])


def test_an_equal_file_stays(tmp_path):
  (path,) = catalogue.write_demonstrations(tmp_path, ['math'], 5, 1, 0)
  before = path.stat().st_mtime_ns
  catalogue.write_demonstrations(tmp_path, ['math'], 5, 1, 0)
  assert path.stat().st_mtime_ns == before
  catalogue.write_demonstrations(tmp_path, ['math'], 5, 1, 1)
  assert path.stat().st_mtime_ns != before


@pytest.mark.parametrize(
  'names, count, tasks, said',
  [
    (['maths'], 1, 1, "one of ['code', 'lookup', 'math', 'science', 'tool']"),
    ([], 1, 1, 'at least one'),
    (['math', 'math'], 1, 1, 'each once'),
    (['math'], 0, 1, 'count=0'),
    (['math'], 1, 0, 'tasks=0'),
  ],
)
def test_impossible_requests(tmp_path, names, count, tasks, said):
  with pytest.raises(ValueError) as error:
    catalogue.write_demonstrations(tmp_path, names, count, tasks, 0)
  assert said in str(error.value)
