"""The command line: what a person types wrong ends in one line that helps, before jax is imported."""

import dataclasses
import pathlib
import subprocess
import sys
import typing

import pytest

from configs import base, rl_base
from experiments import run
from glm5_jax.config import ModelConfig

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = f'--config={ROOT}/configs/nano_pretrain.py'


@pytest.mark.parametrize(
  'args, message',
  [
    ([NANO, '--config.model.index_topkk=32'], 'did you mean --config.model.index_topk?'),
    ([NANO, '--config.index_topk=32'], 'did you mean --config.model.index_topk?'),
    ([NANO, '--config.modl.size=nano'], 'did you mean --config.model.size?'),
    ([NANO, '--config.optim.peaklr=1'], 'did you mean --config.optim.peak_lr?'),
    (
      [NANO, '--config.data.tokenizer.vocabsize=9'],
      'did you mean --config.data.tokenizer.vocab_size?',
    ),
    ([NANO, '--config.train=3'], 'unknown key --config.train'),
    (
      [NANO, '--config.train.steps=many'],
      '--config.train.steps=many: expected a value of type int',
    ),
    ([NANO, '--config.model.index_topk=1.5'], 'expected a value of type int'),
    ([NANO, '--config.model.sparse_attention=perhaps'], 'expected a value of type bool'),
    ([NANO, '--config.optim.peak_lr=fast'], 'expected a value of type float'),
    ([NANO, '--config.train.steps'], 'Missing value for flag --config.train.steps'),
    ([NANO, '--wrkdir=x'], 'Did you mean: workdir'),
    ([NANO, 'now'], "unexpected argument 'now'"),
    ([NANO], '--workdir is missing'),
    (['--workdir=x'], '--config is missing'),
    (['--config=', '--workdir=x'], '--config is missing'),
    ([f'--config={ROOT}/configs/nano_pretrian.py'], 'did you mean'),
    (['--config=README.md', '--workdir=x'], 'config file README.md failed'),
  ],
)
def test_usage_errors_are_one_line(args, message, capsys, monkeypatch):
  monkeypatch.chdir(ROOT)
  assert run.main(['run', *args]) == 2
  out, err = capsys.readouterr()
  assert out == '' and err.count('\n') == 1 and err.startswith('error: ')
  assert message in err


def test_a_config_file_that_fails(tmp_path, capsys):
  file = tmp_path / 'c.py'
  file.write_text(
    'from configs.base import model\ndef get_config():\n  return model("nano", topk=3)\n'
  )
  assert run.main(['run', f'--config={file}', '--workdir=x']) == 2
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and str(file) in err and 'topk' in err


@pytest.mark.parametrize(
  'args',
  [
    [NANO, '--config.model.index_topk=32', '--workdir=w', '--config.optim.peak_lr=2e-3'],
    ['--config.model.index_topk=32', '--config.optim.peak_lr=2e-3', '--workdir=w', NANO],
    ['--workdir', 'w', '--config.model.index_topk', '32', '--config.optim.peak_lr', '2e-3', NANO],
  ],
)
def test_overrides_in_any_order(args):
  config, workdir = run.parse(['run', *args])
  assert workdir == 'w'
  assert config.model.index_topk == 32 and config.optim.peak_lr == 2e-3


def test_overrides_of_every_kind():
  config, _ = run.parse(
    ['run', NANO, '--workdir=w', '--config.model.sparse_attention=false', '--config.model.dtype=bfloat16',
     '--config.model.rope_theta=10000', "--config.model.indexer_types=('full', 'shared')",
     "--config.model.rope_scaling={'factor': 4.0}", '--config.train.max_minutes=5',
     '--config.data.sources.kind=text', '--config.data.sources.path=/x',
     "--config.data.validation_sources=({'kind': 'text', 'path': '/y'},)"]
  )  # fmt: skip
  m = config.model
  assert (m.sparse_attention, m.dtype, m.rope_theta) == (False, 'bfloat16', 10000.0)
  assert m.indexer_types == ('full', 'shared') and m.rope_scaling == {'factor': 4.0}
  assert config.train.max_minutes == 5.0
  assert config.data.sources.kind == 'text'
  assert config.data.validation_sources == ({'kind': 'text', 'path': '/y'},)


def test_every_model_field_can_be_set():
  hints = typing.get_type_hints(ModelConfig)
  fields = {f.name: hints[f.name] for f in dataclasses.fields(ModelConfig)}
  assert set(base.MODEL_FIELDS) == set(fields)
  for name, kind in base.MODEL_FIELDS.items():
    default = getattr(ModelConfig(), name)
    assert default is None or kind is object or isinstance(default, kind), name


def test_a_misspelt_change_of_a_size():
  with pytest.raises((KeyError, AttributeError), match='index_topk'):
    base.model('nano', index_topkk=3)


@pytest.mark.parametrize('file', sorted((ROOT / 'configs').glob('*.py')), ids=lambda p: p.stem)
def test_configs_say_what_they_are(file):
  """What can be run here says how long it takes and how good it gets; what cannot, its size and cost."""
  if file.stem == '__init__' or file.stem.endswith('base'):
    return
  from glm5_jax.rl import loop as rl_loop
  from glm5_jax.train import loop

  config, _ = run.parse(['run', f'--config={file}', '--workdir=w'])
  if 'stages' in config:
    assert set(config) == {'order', 'stages'} and set(config.order) == set(config.stages)
  for part in config.stages.values() if 'stages' in config else (config,):
    if part.stage != 'pretrain' and not part.init_from:
      part.init_from = 'the stage before'
    (rl_loop if 'rl' in part else loop).prepare(part)
    assert set(part) == set(rl_base.rl_base() if 'rl' in part else base.base())
  text = file.read_text()
  assert f'--config=configs/{file.name}' in text
  if file.stem.startswith('glm5_744b'):
    expected = ('tokens', 'model FLOPs', 'v5p chips', 'never run', 'ur choice')
  else:
    expected = ('minutes on 2 CPU cores', 'bits per byte')
  assert [words for words in expected if words not in ' '.join(text.split())] == []


@pytest.mark.parametrize(
  'args, message',
  [
    (
      ['--config.data.sources.kind=text', '--config.data.sources.path=/no/such/folder'],
      '/no/such/folder',
    ),
    (['--config.model.size=nanno'], "did you mean 'nano'"),
    (['--config.optim.name=adma'], 'unknown optimizer'),
    (['--config.model.vocab_size=300'], '--config.model.vocab_size=4096'),
  ],
)
def test_errors_behind_the_command_line_are_one_line_too(
  args, message, tmp_path, capsys, monkeypatch
):
  monkeypatch.chdir(ROOT)
  assert run.main(['run', NANO, *args, f'--workdir={tmp_path}/run']) == 2
  err = capsys.readouterr().err
  assert err.count('\n') == 1 and err.startswith('error: ') and message in err


def test_the_program(tmp_path):
  """As typed: exit status 2, one line, no traceback, and quickly (jax takes longer to import)."""
  (tmp_path / 'file').write_text('')
  command = [sys.executable, '-X', 'importtime', '-m', 'experiments.run']
  done = subprocess.run(
    [*command, '--config=configs/nano_pretrain.py', '--config.trian.steps=5', f'--workdir={tmp_path}/w'],
    cwd=ROOT, text=True, capture_output=True,
  )  # fmt: skip
  lines = [line for line in done.stderr.splitlines() if not line.startswith('import time:')]
  assert done.returncode == 2
  assert lines == ['error: unknown key --config.trian.steps; did you mean --config.train.steps?']
  assert not any(line.endswith('| jax') for line in done.stderr.splitlines())
  assert run.main(['run', NANO, f'--workdir={tmp_path}/file']) == 2
