"""A run on a mesh: the curve of one device, and a checkpoint that another mesh takes up."""

import os
import pathlib
import random
import sys
import tempfile

import jax
import numpy as np
import pytest

from glm5_jax.train import loop, metrics
from glm5_jax.train.checkpoint import Checkpoints
from tests.simulated import run_on_devices

ROOT = pathlib.Path(__file__).resolve().parents[2]


def _config(folder: pathlib.Path, **mesh: int):
  """The tiny run of tests/train, on a few text files in `folder`."""
  sys.path.insert(0, str(ROOT))
  from tests.train import tiny_config

  rng = random.Random(0)
  words = 'def return if else for in x y self value ( ) : = + 1 2'.split()
  for i in range(20):
    text = ' '.join(rng.choice(words) for _ in range(rng.randint(20, 120)))
    (folder / f'{i}.txt').write_text(text + '\n')
  config = tiny_config.get_config()
  config.data.sources.path = str(folder)
  config.data.batch_size = 8
  config.optim.name = 'muon_split'
  config.optim.schedule = 'constant'
  config.optim.warmup_steps = 1
  config.train.grad_accum = 2
  config.train.mtp_steps = 1
  config.eval.every = 3
  config.train.steps = 6
  config.mesh.update(mesh)
  return config


def _rows(folder, key):
  return [r[key] for r in metrics.read(folder / 'metrics.jsonl') if key in r]


def _a_run_that_changes_its_mesh():
  # Most of the time goes into compiling; read when jax starts its backend, with the first array.
  os.environ['XLA_FLAGS'] += ' --xla_backend_optimization_level=0'
  with tempfile.TemporaryDirectory() as name:
    base = pathlib.Path(name)
    corpus = base / 'corpus'
    corpus.mkdir()
    config = _config(corpus)
    assert loop.train(config, str(base / 'one')) == 0
    config = _config(corpus, fsdp=2, tensor=2, context=2)
    config.train.steps = 3
    assert loop.train(config, str(base / 'mesh')) == 0
    config = _config(corpus, data=-1, expert=2, context=2)
    config.eval.sample_tokens = 4
    assert loop.train(config, str(base / 'mesh')) == 0
    for key in ('loss', 'indexer_kl', 'grad_norm', 'eval/loss'):
      one, mesh = (np.array(_rows(base / run, key)) for run in ('one', 'mesh'))
      print(f'[max] {key}: {np.abs(one / mesh - 1).max():.1e} of {one}')
      np.testing.assert_allclose(mesh, one, rtol=2e-3)
    assert _rows(base / 'mesh', 'dropped') == [0] * 3  # Of the second half: it divides the experts.
    found = Checkpoints(base / 'mesh' / 'checkpoints').steps()
    assert found[-1] == 6 and '⟦' in (base / 'mesh' / 'report.md').read_text()


def test_a_run_that_changes_its_mesh():
  print(run_on_devices(_a_run_that_changes_its_mesh, timeout=1200))


def test_what_does_not_divide(tmp_path):
  config = _config(tmp_path, fsdp=len(jax.devices()) + 1)
  with pytest.raises(loop.ConfigError, match=r'is for 2 devices; there are 1'):
    loop.train(config, str(tmp_path / 'run'))
