"""A pipeline of four tiny stages: what it hands on, and that no interruption changes the result."""

import itertools
import json
import pathlib
import shutil
import signal
import subprocess
import sys
import time

import flax.traverse_util
import matplotlib.image
import numpy as np
import orbax.checkpoint as ocp
import pytest

from experiments import run
from glm5_jax.train import metrics, pipeline, result
from glm5_jax.train.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[2]
STAGES = ('1_pretrain', '2_midtrain', '3_dsa_warmup', '4_dsa_sparse')
STEPS = {'pretrain': 12, 'midtrain': 20, 'dsa_warmup': 8, 'dsa_sparse': 4}
CONFIG = """
from ml_collections import ConfigDict
from tests.train.tiny_config import get_config as tiny

STEPS = {steps}

def get_config():
  c = ConfigDict()
  c.order = ('pretrain', 'midtrain', 'dsa_warmup', 'dsa_sparse')
  c.stages = ConfigDict()
  for name, steps in STEPS.items():
    s = tiny()
    s.stage = name
    s.data.sources.path = {corpus!r}
    s.train.steps, s.checkpoint.every, s.eval.every = steps, 4, 100
    s.checkpoint.keep_best = 0
    s.eval.both_attentions = True
    s.optim.warmup_steps = 0
    if name in ('pretrain', 'midtrain'):
      s.model.sparse_attention = False
    if name != 'pretrain':
      s.model.rope_theta = 1e6
      s.data.seq_len, s.data.packing = 48, 'best_fit'
    c.stages[name] = s
  return c
"""


@pytest.fixture(scope='module')
def config_file(corpus_dir, tmp_path_factory) -> pathlib.Path:
  file = tmp_path_factory.mktemp('config') / 'tiny_pipeline.py'
  file.write_text(CONFIG.format(steps=STEPS, corpus=str(corpus_dir)))
  return file


@pytest.fixture(scope='module')
def go(config_file):
  """go(workdir, *overrides) runs the pipeline here and returns the exit status."""
  return lambda workdir, *overrides: run.main(
    ['run', f'--config={config_file}', f'--workdir={workdir}', *overrides]
  )


@pytest.fixture(scope='module')
def whole(go, tmp_path_factory) -> pathlib.Path:
  """The folder of an uninterrupted pipeline."""
  folder = tmp_path_factory.mktemp('whole') / 'run'
  assert go(folder) == 0
  return folder


def params(folder: pathlib.Path) -> dict[str, np.ndarray]:
  """Of the newest checkpoint."""
  step = Checkpoints(folder / 'checkpoints').steps()[-1]
  with ocp.StandardCheckpointer() as reader:
    tree = reader.restore(folder / 'checkpoints' / str(step) / 'params')
  return flax.traverse_util.flatten_dict(tree, sep='/')


def curve(folder: pathlib.Path) -> list[dict]:
  rows = metrics.read(folder / 'metrics.jsonl')
  return [{k: v for k, v in row.items() if k not in metrics.TIMING} for row in rows]


def assert_same(a: pathlib.Path, b: pathlib.Path, stages=STAGES):
  for stage in stages:
    assert curve(a / stage) == curve(b / stage), stage
    x, y = result.read(a / stage), result.read(b / stage)
    assert x['evaluations'] == y['evaluations'], stage
    found, expected = params(a / stage), params(b / stage)
    assert found.keys() == expected.keys()
    for name, value in found.items():
      np.testing.assert_array_equal(value, expected[name], err_msg=f'{stage} {name}')


def test_each_stage_goes_on_from_the_one_before(whole):
  folders = sorted(p.name for p in whole.iterdir() if p.is_dir())
  assert folders == [*STAGES, 'plots']
  for i, name in enumerate(STAGES):
    config = json.loads((whole / name / 'config.json').read_text())
    assert config['init_from'] == (str(whole / STAGES[i - 1]) if i else '')
    assert result.is_finished(whole / name, STEPS[config['stage']])
    assert [r['step'] for r in curve(whole / name) if 'loss' in r] == list(
      range(1, 1 + STEPS[config['stage']])
    )
  trained = [params(whole / name) for name in STAGES]
  for stage, (before, after) in enumerate(itertools.pairwise(trained), 1):
    changed = {n for n, value in after.items() if (value != before[n]).any()}
    indexers = {n for n in after if '/indexer/' in n}
    expected = (set(after) - indexers, indexers, set(after))[stage - 1]
    assert changed == expected, STAGES[stage]


def test_the_report(whole):
  text = (whole / 'report.md').read_text()
  assert text.startswith('# pretrain -> midtrain -> dsa_warmup -> dsa_sparse: 4 of 4 stages\n')
  table = [
    [cell.strip() for cell in line.strip('|').split('|')]
    for line in text.splitlines()
    if line.startswith('| [')
  ]
  assert [row[0] for row in table] == [f'[{s}]({s}/report.md)' for s in STAGES]
  assert [row[1] for row in table] == ['dense', 'dense', 'dense', 'sparse']
  assert [row[2] for row in table] == ['32', '48', '48', '48']
  assert [row[3] for row in table] == [str(n) for n in STEPS.values()]
  assert [row[5] for row in table] == [
    'everything but indexers', 'everything but indexers', 'the indexers only', 'everything'
  ]  # fmt: skip
  for stage, row in zip(STAGES, table, strict=True):
    found = result.read(whole / stage)
    tokens = sum(r['tokens'] for r in curve(whole / stage) if 'loss' in r)
    assert row[4] == f'{tokens:,.0f}'
    bits = [found['evaluations'][kind]['bits_per_byte'] for kind in ('dense', 'sparse')]
    assert row[6:8] == [f'{b:.3f}' for b in bits] and bits[0] != bits[1]
    assert row[8] == f'{np.mean(found["evaluations"]["sparse"]["recall"]):.1%}'
    assert row[9] == f'{found["minutes"]:.1f}'
  # The warm-up leaves the dense model as it was.
  assert table[1][6] == table[2][6]
  picture = matplotlib.image.imread(whole / 'plots' / 'stages.png')
  assert picture.shape[0] > 500 and picture.std() > 0.05
  assert '--config=' in text.split('## Reproduce')[1]


def test_what_is_finished_is_not_done_again(whole, go, capsys):
  before = {p: p.stat().st_mtime_ns for p in whole.rglob('metrics.jsonl')}
  assert len(before) == 4 and go(whole) == 0
  out = capsys.readouterr().out
  assert [f'{name} is finished' in out for name in STAGES] == [True] * 4 and 'compiling' not in out
  assert {p: p.stat().st_mtime_ns for p in whole.rglob('metrics.jsonl')} == before


def test_stopped_between_and_within_stages_it_is_the_same(whole, go, tmp_path, capsys):
  folder = tmp_path / 'run'
  assert go(folder, "--config.order=('pretrain',)") == 0
  assert sorted(p.name for p in folder.iterdir() if p.is_dir()) == [STAGES[0], 'plots']
  assert '1 of 1 stages' in (folder / 'report.md').read_text()

  assert go(folder, '--config.stages.midtrain.train.max_minutes=1e-6') == 0
  out = capsys.readouterr().out
  assert 'stopped in or after 2_midtrain; the same command continues' in out
  assert not (folder / STAGES[2]).exists()
  report = (folder / 'report.md').read_text()
  assert ': 1 of 4 stages\n' in report and '| 1 of 20 |' in report and '| 0 of 8 |' in report

  # Moved elsewhere meanwhile.
  folder = folder.rename(tmp_path / 'moved')
  assert go(folder) == 0
  assert_same(folder, whole)
  assert ': 4 of 4 stages\n' in (folder / 'report.md').read_text()


def _start(config_file, folder) -> subprocess.Popen:
  command = [
    sys.executable, '-m', 'experiments.run', f'--config={config_file}', f'--workdir={folder}'
  ]  # fmt: skip
  return subprocess.Popen(
    command, cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT
  )


def _kill_when(condition, process):
  """kill -9 as soon as `condition()`; the process must be at work then."""
  end = time.monotonic() + 900
  try:
    while not condition():
      assert process.poll() is None, process.stdout.read()
      assert time.monotonic() < end
      time.sleep(0.0005)
  finally:
    process.kill()
    process.stdout.close()
  assert process.wait() == -signal.SIGKILL


def test_killed_within_a_stage_and_at_its_beginning_it_is_the_same(
  whole, go, config_file, tmp_path
):
  folder = tmp_path / 'run'
  file = folder / STAGES[1] / 'metrics.jsonl'
  _kill_when(lambda: len(metrics.read(file)) >= 7, _start(config_file, folder))
  assert not result.is_finished(folder / STAGES[1], 20) and not (folder / STAGES[2]).exists()
  _kill_when((folder / STAGES[2] / 'config.json').exists, _start(config_file, folder))
  assert not Checkpoints(folder / STAGES[2] / 'checkpoints').steps()
  assert go(folder) == 0
  assert_same(folder, whole)


def test_killed_before_its_report_a_stage_gets_one(whole, go, tmp_path):
  folder = tmp_path / 'run'
  shutil.copytree(whole, folder)
  (folder / STAGES[3] / 'result.json').unlink()
  (folder / 'report.md').unlink()
  assert go(folder) == 0
  assert_same(folder, whole)
  assert ': 4 of 4 stages\n' in (folder / 'report.md').read_text()


def test_a_signal_during_the_last_step_is_not_a_finish(whole, tmp_path):
  """Then there is a result without an evaluation, which a later stage's table would miss."""
  found = result.read(whole / STAGES[0])
  (tmp_path / 'result.json').write_text(json.dumps(found))
  assert result.is_finished(tmp_path, 12) and not result.is_finished(tmp_path, 13)
  for change in ({'evaluations': {}}, {'stopped': 'SIGTERM'}, {'step': 11}):
    (tmp_path / 'result.json').write_text(json.dumps(found | change))
    assert not result.is_finished(tmp_path, 12)
  (tmp_path / 'result.json').write_text('{"st')
  assert not result.is_finished(tmp_path, 12)


def test_sigterm_between_stages_ends_the_pipeline(go, tmp_path, monkeypatch, whole):
  """It comes when no stage is there to catch it."""
  folder = tmp_path / 'run'

  def train(config, path, *, command):
    shutil.copytree(whole / pathlib.Path(path).name, path)
    signal.raise_signal(signal.SIGTERM)
    return 0

  monkeypatch.setattr(pipeline.loop, 'train', train)
  assert go(folder) == 0
  assert (folder / STAGES[0]).exists() and not (folder / STAGES[1]).exists()


# --- One clear error ---


@pytest.mark.parametrize(
  'override, message',
  [
    ('stages.pretrain.train.step=1', 'did you mean --config.stages.pretrain.train.steps?'),
    ('stages.pretrian.train.steps=1', 'did you mean --config.stages.pretrain.train.steps?'),
    ('train.topk_anneal_steps=1', 'train.topk_anneal_steps?'),
    ('stages.midtrain.train.steps=few', 'expected a value of type int'),
    ("order=('pretrain', 'sft')", "must name each stage once at most, out of ['dsa_sparse'"),
    ("order=('midtrain', 'midtrain')", 'must name each stage once at most'),
    ('order=()', 'must name each stage once at most'),
    ("order=('midtrain',)", "stages.midtrain: stage 'midtrain' continues a trained model"),
    ('stages.dsa_sparse.train.steps=0', 'stages.dsa_sparse: train.steps=0 must be at least 1'),
    ('stages.midtrain.model.hidden_size=48', 'stages.midtrain cannot start from stages.pretrain: hidden_size was 32, is 48'),
    ('stages.dsa_warmup.data.tokenizer.kind=bpe', "stages.dsa_warmup cannot start from stages.midtrain: data.tokenizer.kind was 'byte', is 'bpe'"),
  ],
)  # fmt: skip
def test_errors_come_before_anything_is_written(go, tmp_path, capsys, override, message):
  assert go(tmp_path / 'run', f'--config.{override}') == 2
  err = capsys.readouterr().err
  assert err.startswith('error: ') and err.count('\n') == 1 and message in err
  assert not (tmp_path / 'run').exists()


@pytest.mark.parametrize(
  'override, message',
  [
    ('stages.pretrain.train.steps=16', '2_midtrain was started from 1_pretrain as it was'),
    ('stages.midtrain.optim.peak_lr=1.0', 'optim.peak_lr: was 0.001, is 1.0'),
  ],
)
def test_a_finished_stage_is_not_bent(whole, go, capsys, override, message):
  """Neither trained further under its successors, nor passed off as that of another config."""
  before = {p: p.stat().st_mtime_ns for p in whole.rglob('metrics.jsonl')}
  assert go(whole, f'--config.{override}') == 2
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and message in err
  assert {p: p.stat().st_mtime_ns for p in whole.rglob('metrics.jsonl')} == before


def test_a_folder_of_something_else(go, tmp_path, capsys):
  (tmp_path / 'thesis.tex').write_text('')
  assert go(tmp_path) == 2
  assert "holds 'thesis.tex'" in capsys.readouterr().err
