"""A run that is killed and resumed is the run that was not, bit for bit."""

import json
import pathlib
import random
import shutil
import signal
import time

import jax
import numpy as np
import orbax.checkpoint as ocp
import pytest

from glm5_jax.train import checkpoint, loop, metrics
from glm5_jax.train.workdir import WorkdirError


def _curve(folder: pathlib.Path) -> list[dict]:
  lines = (folder / 'metrics.jsonl').read_text().splitlines()
  return [{k: v for k, v in json.loads(x).items() if k not in metrics.TIMING} for x in lines]


def _assert_same_run(a: pathlib.Path, b: pathlib.Path):
  assert _curve(a) == _curve(b)
  with ocp.StandardCheckpointer() as reader:
    for item in ('params', 'train'):
      x, y = (reader.restore(folder / 'checkpoints' / '40' / item) for folder in (a, b))
      assert jax.tree.structure(x) == jax.tree.structure(y)
      jax.tree.map(np.testing.assert_array_equal, x, y)
  x, y = ((f / 'checkpoints' / '40' / 'meta' / 'metadata').read_text() for f in (a, b))
  assert json.loads(x) == json.loads(y)


def _wait_for_steps(process) -> str:
  """Reads the output up to the first progress line, i.e. until the loop runs."""
  text = ''
  for line in process.stdout:
    text += line
    if line.startswith('step '):
      return text
  raise AssertionError(f'the run ended before its first step:\n{text}')


def _wait_until(condition, process, seconds=900):
  end = time.monotonic() + seconds
  while not condition():
    assert process.poll() is None, process.stdout.read()
    assert time.monotonic() < end
    time.sleep(0.0005)


def _kill(process):
  process.kill()
  assert process.wait() == -signal.SIGKILL


def test_killed_at_any_moment_and_resumed_it_is_the_same_run(start, finished, tmp_path):
  run = tmp_path / 'run'
  file, checkpoints = run / 'metrics.jsonl', run / 'checkpoints'

  # kill -9 after step 20.
  process = start(run)
  _wait_until(lambda: file.exists() and len(metrics.read(file)) >= 22, process)
  _kill(process)
  assert metrics.read(file)[-1]['step'] >= 20

  # kill -9 while a checkpoint is being written.
  committed = checkpoints.exists() and any(p.name.isdigit() for p in checkpoints.iterdir())
  process = start(run)
  assert ('resuming' in _wait_for_steps(process)) == committed
  _wait_until(lambda: any('tmp' in p.name for p in checkpoints.iterdir()), process)
  _kill(process)

  # kill -9 at a random moment of the loop.
  process = start(run)
  _wait_for_steps(process)
  time.sleep(random.uniform(0, 0.1))
  _kill(process)

  # SIGTERM saves and exits 0, wherever it comes.
  process = start(run)
  _wait_for_steps(process)
  process.send_signal(signal.SIGTERM)
  output = process.stdout.read()
  assert process.wait() == 0, output
  step = max(int(p.name) for p in checkpoints.iterdir() if p.name.isdigit())
  if step < 40:
    assert f'Run the same command again to resume from step {step}' in output
    assert 'Stopped early' in (run / 'report.md').read_text()

  process = start(run)
  output = process.stdout.read()
  assert process.wait() == 0, output
  assert f'from step {step}' in output
  assert 'Stopped early' not in (run / 'report.md').read_text()
  _assert_same_run(run, finished)


def test_the_same_config_and_seed_give_the_same_curve(tiny_config, finished, tmp_path):
  assert loop.train(tiny_config, tmp_path / 'run') == 0
  _assert_same_run(tmp_path / 'run', finished)


def test_a_damaged_last_checkpoint_costs_only_time(tiny_config, finished, tmp_path, monkeypatch):
  warnings: list[str] = []
  monkeypatch.setattr(checkpoint.logging, 'warning', lambda text, *a: warnings.append(text % a))
  run = tmp_path / 'run'
  shutil.copytree(finished, run)
  for data in (run / 'checkpoints' / '40' / 'params').rglob('d/*'):
    data.write_bytes(data.read_bytes()[:-100])
  with (run / 'metrics.jsonl').open('a') as f:
    f.write('{"step": 41, "lo')
  assert loop.train(tiny_config, run) == 0
  text = '\n'.join(warnings)
  assert str(run / 'checkpoints' / '40') in text and 'resume from step 30' in text
  _assert_same_run(run, finished)


def test_another_config_does_not_resume(tiny_config, finished):
  tiny_config.optim.peak_lr = 5e-4
  tiny_config.model.index_topk = 4
  tiny_config.checkpoint.every = 7  # May change.
  with pytest.raises(WorkdirError) as error:
    loop.train(tiny_config, finished)
  message = str(error.value)
  assert 'optim.peak_lr: was 0.001, is 0.0005' in message
  assert 'model.index_topk: was 8, is 4' in message
  assert 'checkpoint.every' not in message
