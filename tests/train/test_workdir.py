"""A run's folder: who may use it, and how a run is stopped."""

import json
import os
import pathlib
import signal
import subprocess
import sys
import textwrap

import pytest

from glm5_jax.train import workdir
from glm5_jax.train.workdir import WorkdirError, claim

ROOT = pathlib.Path(__file__).resolve().parents[2]
CONFIG = {'seed': 1, 'model': {'size': 'nano'}, 'train': {'steps': 5}, 'eval': {'every': 2}}


def test_creates_the_folder_and_writes_the_config(tmp_path):
  with claim(tmp_path / 'a' / 'b', CONFIG) as path:
    assert json.loads((path / 'config.json').read_text()) == CONFIG


def test_not_a_folder(tmp_path):
  (tmp_path / 'file').write_text('')
  for path in (tmp_path / 'file', tmp_path / 'file' / 'below'):
    with pytest.raises(WorkdirError, match='is not a folder'), claim(path, CONFIG):
      pass


def test_somebody_elses_folder(tmp_path):
  (tmp_path / 'thesis.tex').write_text('')
  with pytest.raises(WorkdirError, match=r"holds 'thesis\.tex' but no config\.json"):
    with claim(tmp_path, CONFIG):
      pass
  assert (tmp_path / 'thesis.tex').exists() and not (tmp_path / 'config.json').exists()


def test_two_runs_do_not_share_a_folder(tmp_path):
  with claim(tmp_path, CONFIG):
    with pytest.raises(WorkdirError, match='in use by another run'), claim(tmp_path, CONFIG):
      pass
  with claim(tmp_path, CONFIG):
    pass


def test_what_may_change_and_what_may_not(tmp_path):
  (tmp_path / 'checkpoints' / '5').mkdir(parents=True)
  (tmp_path / 'config.json').write_text(json.dumps(CONFIG))
  longer = CONFIG | {'train': {'steps': 9}, 'eval': {'every': 3}}
  with claim(tmp_path, longer):
    assert json.loads((tmp_path / 'config.json').read_text()) == longer
  other = CONFIG | {'seed': 2, 'model': {'size': 'small'}}
  with pytest.raises(WorkdirError) as error, claim(tmp_path, other):
    pass
  assert 'model.size: was "nano", is "small"; seed: was 1, is 2' in str(error.value)
  assert json.loads((tmp_path / 'config.json').read_text()) == longer


def test_without_a_checkpoint_the_config_may_change(tmp_path):
  with claim(tmp_path, CONFIG):
    pass
  with claim(tmp_path, CONFIG | {'seed': 2}):
    assert json.loads((tmp_path / 'config.json').read_text())['seed'] == 2


_SCRIPT = """
  import time
  from glm5_jax.train.workdir import StopRequest
  with StopRequest() as stop:
    print('ready', flush=True)
    while not stop:
      time.sleep(0.01)
    print(stop.reason, flush=True)
    time.sleep(60)
"""


def _stoppable() -> subprocess.Popen:
  process = subprocess.Popen(
    [sys.executable, '-c', textwrap.dedent(_SCRIPT)], cwd=ROOT, text=True,
    stdout=subprocess.PIPE, stderr=subprocess.PIPE,
  )  # fmt: skip
  assert process.stdout.readline() == 'ready\n'
  return process


@pytest.mark.parametrize('number, reason', [(signal.SIGTERM, 'SIGTERM'), (signal.SIGINT, 'Ctrl-C')])
def test_the_first_signal_asks_and_ctrl_c_after_it_kills(number, reason):
  process = _stoppable()
  process.send_signal(number)
  assert process.stdout.readline() == f'{reason}\n'
  process.send_signal(signal.SIGINT)
  _, err = process.communicate(timeout=30)
  assert process.returncode == -signal.SIGINT
  assert 'saving after this step; Ctrl-C kills' in err


def test_handlers_are_put_back():
  before = signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)
  with workdir.StopRequest() as stop:
    os.kill(os.getpid(), signal.SIGTERM)
    assert stop.reason == 'SIGTERM'
  assert (signal.getsignal(signal.SIGTERM), signal.getsignal(signal.SIGINT)) == before


def test_a_stage_passes_the_request_on_to_its_pipeline():
  with workdir.StopRequest() as pipeline:
    with workdir.StopRequest() as stage:
      os.kill(os.getpid(), signal.SIGTERM)
      assert stage.reason == 'SIGTERM'
    assert pipeline.reason == 'SIGTERM'
