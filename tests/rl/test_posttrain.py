"""SFT, RL and distillation in one pipeline: what each is measured on, and that it goes on where it was."""

import itertools
import json
import pathlib

import pytest
from ml_collections import ConfigDict

from configs.base import base
from experiments import run
from glm5_jax.envs.functions import Functions
from glm5_jax.envs.numbers import WordProblems
from glm5_jax.rl import loop as rl_loop
from glm5_jax.train import loop, metrics, pipeline, result
from glm5_jax.train.prepare import ConfigError
from tests.rl import tiny_run

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = ('1_pretrain', '2_sft', '3_reasoning_rl', '4_distill')


def _config(corpus: pathlib.Path) -> ConfigDict:
  c = ConfigDict()
  c.order = ('pretrain', 'sft', 'reasoning_rl', 'distill')
  c.stages = ConfigDict()
  for name in c.order:
    if name in ('pretrain', 'sft'):
      s = base()
      s.stage = name
      tiny_run.model_section(s)
    else:
      s = tiny_run.config('')
      s.stage = name
    s.data.sources.kind, s.data.sources.path = 'text', str(corpus)
    s.data.tokenizer.kind = 'byte'
    s.data.cache_dir = ''
    s.data.validation_fraction = 0.3
    s.data.seq_len, s.data.batch_size = 64, 2
    s.train.mtp_steps = 0
    s.train.steps = s.eval.every = s.checkpoint.every = 2
    s.optim.warmup_steps = 0
    s.eval.batches, s.eval.sample_tokens = 1, 0
    c.stages[name] = s
  sft = c.stages.sft
  sft.data.packing, sft.data.seq_len = 'best_fit', 256
  sft.data.long_documents = 'skip'
  sft.demonstrations.environments = ('math', 'code')
  sft.demonstrations.count = 12
  # The text of the stages before, not only demonstrations.
  sft.rl = rl_play()
  distill = c.stages.distill
  distill.rl.advantage, distill.rl.group_size = 'teacher', 1
  distill.rl.teachers = ConfigDict({'math': 'stage:sft', 'code': 'stage:reasoning_rl'})
  return c


def rl_play() -> ConfigDict:
  section = tiny_run.config('').rl
  return ConfigDict({k: section[k] for k in
                     ('environments', 'eval_environments', 'eval_tasks', 'episode', 'engine')})  # fmt: skip


@pytest.fixture(scope='module')
def corpus(tmp_path_factory) -> pathlib.Path:
  folder = tmp_path_factory.mktemp('corpus')
  for i in range(12):
    (folder / f'{i}.txt').write_text(f'def f{i}(x):\n  return x + {i}\n' * 6)
  return folder


@pytest.fixture(autouse=True, scope='module')
def free_judge():
  """A random model solves nothing, and the sandbox is not what this is about."""
  with pytest.MonkeyPatch.context() as patch:
    for env in (Functions, WordProblems):
      patch.setattr(env, 'reward', lambda self, task, messages: float(len(str(messages)) % 2))
    yield


@pytest.fixture(scope='module')
def whole(corpus, tmp_path_factory) -> pathlib.Path:
  """The folder of an uninterrupted pipeline."""
  folder = tmp_path_factory.mktemp('whole') / 'run'
  assert pipeline.train(_config(corpus), str(folder), command='the command') == 0
  return folder


def test_the_stages_hand_over(whole):
  for i, name in enumerate(STAGES):
    config = json.loads((whole / name / 'config.json').read_text())
    assert config['init_from'] == (str(whole / STAGES[i - 1]) if i else '')
    assert result.read(whole / name)['step'] == 2
  # What a stage plays before its first step is what the stage before it could do in the end.
  scores = [result.read(whole / name).get('tasks') for name in STAGES]
  assert scores[0] is None
  for before, after in itertools.pairwise(scores[1:]):
    assert before['accuracy']['after'] == after['accuracy']['before']
    assert before['valid']['after'] == after['valid']['before']
  assert scores[3]['teacher']['before'] == {
    'math': scores[1]['accuracy']['after']['math'], 'code': scores[2]['accuracy']['after']['code']
  }  # fmt: skip


def test_the_report_of_the_pipeline(whole):
  text = (whole / 'report.md').read_text()
  assert text.startswith('# pretrain -> sft -> reasoning_rl -> distill: 4 of 4 stages\n')
  table = text.partition('## Accuracy on held-out tasks, greedy\n\n')[2].splitlines()
  assert table[0] == (
    '| domain | before sft | after sft | before reasoning_rl | after reasoning_rl | before distill |'
    ' after distill |'
  )
  assert [line.split('|')[1].strip() for line in table[2:5]] == ['code', 'math', 'mean']
  last = result.read(whole / STAGES[3])['tasks']['accuracy']['after']
  assert table[2].split('|')[7].strip() == f'{100 * last["code"]:.1f} %'
  assert '[4_distill](4_distill/report.md) | sparse | 448 |' in text
  assert (whole / 'plots' / 'stages.png').stat().st_size


def test_the_report_of_sft(whole):
  """Its loss by category is that of the categories together; every turn that was played is counted."""
  found = result.read(whole / '2_sft')
  categories = found['categories']
  assert categories.keys() >= {'math', 'code'}
  losses = [c['loss'] for c in categories.values()]
  assert min(losses) <= found['evaluations']['sparse']['loss'] <= max(losses)
  text = (whole / '2_sft' / 'report.md').read_text()
  section = text.partition('## By category')[2]
  assert (
    f'| math | {categories["math"]["documents"]} | {categories["math"]["loss"]:.4f} |' in section
  )
  assert '**math**' in section and '**code**' in section
  played = (whole / '2_sft' / 'rollouts' / 'held_out.jsonl').read_text().splitlines()
  episodes = [json.loads(line) for line in played]
  assert len(episodes) == 6
  for name in ('math', 'code'):
    own = [e for e in episodes if e['env'] == name]
    bad = sum(e['malformed'] for e in own) / sum(e['turns'] for e in own)
    assert found['tasks']['valid']['after'][name] == pytest.approx(1 - bad)


def test_what_is_finished_is_not_done_again(whole, corpus, capsys):
  before = {p: p.stat().st_mtime_ns for p in whole.rglob('metrics.jsonl')}
  assert len(before) == 4 and pipeline.train(_config(corpus), str(whole)) == 0
  out = capsys.readouterr().out
  assert [f'{name} is finished' in out for name in STAGES] == [True] * 4 and 'compiling' not in out
  assert {p: p.stat().st_mtime_ns for p in whole.rglob('metrics.jsonl')} == before


def _curve(folder: pathlib.Path) -> list[dict]:
  clock = metrics.TIMING | {'generation_seconds', 'training_seconds'}
  rows = metrics.read(folder / 'metrics.jsonl')
  return [{k: v for k, v in row.items() if k not in clock} for row in rows]


def test_a_killed_pipeline_goes_on(whole, corpus, tmp_path, monkeypatch):
  """Killed after the SFT's training but before it was measured, and again within RL; then moved."""
  folder = tmp_path / 'run'

  class Killed(Exception):  # noqa: N818
    pass

  def kill(*args, **kwargs):
    raise Killed

  with monkeypatch.context() as patch:
    patch.setattr(rl_loop.supervised, 'play_held_out', kill)
    with pytest.raises(Killed):
      pipeline.train(_config(corpus), str(folder))
  assert result.is_finished(folder / '2_sft', 2) and not (folder / '3_reasoning_rl').exists()
  with monkeypatch.context() as patch:
    patch.setattr(rl_loop.report, 'write', kill)
    with pytest.raises(Killed):
      pipeline.train(_config(corpus), str(folder))
  assert result.read(folder / '2_sft')['tasks'] == result.read(whole / '2_sft')['tasks']
  assert (folder / '3_reasoning_rl').exists() and not result.read(folder / '3_reasoning_rl')
  folder = folder.rename(tmp_path / 'moved')
  assert pipeline.train(_config(corpus), str(folder)) == 0
  for name in STAGES:
    assert _curve(folder / name) == _curve(whole / name), name


@pytest.mark.parametrize(
  'stage, key, value, said',
  [
    ('distill', 'rl.teachers.math', 'stage:later', "is none of the stages before: ['pretrain', 'sft', 'reasoning_rl']"),
    ('distill', 'rl.teachers.math', 'stage:distill', 'is none of the stages before'),
    ('distill', 'rl.policy.beta', 0.5, 'stages.distill: beta=0.5 must be at least 1'),
    ('sft', 'rl.episode.temperature', -1.0, 'stages.sft: temperature=-1.0'),
    ('reasoning_rl', 'model.hidden_size', 48, 'stages.reasoning_rl cannot start from stages.sft'),
  ],
)  # fmt: skip
def test_errors_come_before_anything_is_written(corpus, tmp_path, stage, key, value, said):
  c = _config(corpus)
  *sections, last = key.split('.')
  section = c.stages[stage]
  for name in sections:
    section = section[name]
  section[last] = value
  with pytest.raises(ConfigError) as error:
    pipeline.train(c, str(tmp_path / 'run'))
  assert said in str(error.value)
  assert not (tmp_path / 'run').exists()


# --- The configs ---


@pytest.fixture
def nano(monkeypatch):
  monkeypatch.chdir(ROOT)
  return run.parse(['run', '--config=configs/nano_posttrain.py', '--workdir=w'])[0]


def test_the_nano_posttraining_fits_together(nano):
  runs = pipeline.stage_runs(nano, pathlib.Path('w').absolute())
  assert [r.name for r in runs] == ['pretrain', 'sft', 'reasoning_rl', 'agent_rl', 'distill']
  assert [r.config['init_from'] for r in runs[1:]] == [str(r.folder) for r in runs[:-1]]
  assert [r.trains for r in runs[2:]] == ['everything but indexers'] * 3
  shown = set(runs[1].config['demonstrations']['environments'])
  for r in runs[2:]:
    assert {e.name for e in r.parts.play.environments} == shown
    assert {e.name for e in r.parts.environments} <= shown
  teachers = runs[4].config['rl']['teachers']
  trained = {r.name: r.config['rl']['environments'] for r in runs[2:4]}
  assert all(env in trained[t.removeprefix('stage:')] for env, t in teachers.items())
  assert teachers.keys() == shown
  # The paper: group 1; eps 0.2 and 0.28, beta 2.
  policy = runs[4].parts.learner.policy
  assert runs[4].config['rl']['group_size'] == 1
  assert (policy.objective, policy.eps_low, policy.eps_high, policy.beta) == (
    'icepop',
    0.2,
    0.28,
    2,
  )


@pytest.mark.parametrize('name', ['nano_sft', 'nano_reasoning_rl', 'nano_distill'])
def test_each_stage_on_its_own(monkeypatch, name):
  monkeypatch.chdir(ROOT)
  c, _ = run.parse(['run', f'--config=configs/{name}.py', '--workdir=w'])
  assert c.init_from and 'rl' in c
  pipeline.loop_of(c).prepare(c)
  c.init_from = ''
  with pytest.raises(ConfigError, match=r'set --config\.init_from'):
    pipeline.loop_of(c).prepare(c)
  assert loop.prepare  # SFT without an `rl` section is the plain loop's.
