"""One tiny finished run that many tests look at."""

import importlib.util
import pathlib
import random
import subprocess
import sys

import pytest

ROOT = pathlib.Path(__file__).resolve().parents[2]
TINY = 'tests/train/tiny_config.py'


@pytest.fixture(scope='session')
def corpus_dir(tmp_path_factory) -> pathlib.Path:
  """Twenty files of pseudo-code."""
  folder = tmp_path_factory.mktemp('corpus')
  rng = random.Random(0)
  words = 'def return if else for in x y self value ( ) : = + 1 2'.split()
  for i in range(20):
    text = ' '.join(rng.choice(words) for _ in range(rng.randint(20, 120)))
    (folder / f'{i}.txt').write_text(text + '\n')
  return folder


@pytest.fixture
def tiny_config(corpus_dir):
  """The config of tiny_config.py, on the corpus."""
  return _tiny_config(corpus_dir)


def _tiny_config(corpus_dir):
  spec = importlib.util.spec_from_file_location('tiny_config', ROOT / TINY)
  module = importlib.util.module_from_spec(spec)
  spec.loader.exec_module(module)
  config = module.get_config()
  config.data.sources.path = str(corpus_dir)
  return config


@pytest.fixture(scope='session')
def finished(corpus_dir, tmp_path_factory) -> pathlib.Path:
  """The folder of an uninterrupted run of 40 steps, with all its checkpoints."""
  from glm5_jax.train import loop

  config = _tiny_config(corpus_dir)
  config.checkpoint.keep_last = 9
  config.eval.sample_tokens = 8
  folder = tmp_path_factory.mktemp('finished') / 'run'
  assert loop.train(config, folder, command='the command') == 0
  return folder


@pytest.fixture
def start(corpus_dir):
  """start(workdir, *overrides) -> a running `python -m experiments.run` on the tiny config."""
  started = []

  def popen(workdir, *overrides: str) -> subprocess.Popen:
    command = [
      sys.executable, '-u', '-m', 'experiments.run', f'--config={TINY}',
      f'--config.data.sources.path={corpus_dir}', f'--workdir={workdir}', *overrides,
    ]  # fmt: skip
    process = subprocess.Popen(
      command, cwd=ROOT, text=True,
      stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    started.append(process)
    return process

  yield popen
  for process in started:
    if process.poll() is None:
      process.kill()
    process.stdout.close()
    process.wait()
