"""A run in several processes is the run in one: same curve, same checkpoints, every row once."""

import inspect
import json
import os
import pathlib
import random
import socket
import subprocess
import sys

import numpy as np
import pytest

from glm5_jax import data
from glm5_jax.train import distributed, metrics
from glm5_jax.train.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[2]
ROWS, MICRO_BATCHES = 16, 2
# On two processes of four devices the last divides the sequence between them, the others the rows.
MESHES = (
  {'fsdp': 8},
  {'expert': 2, 'context': 2, 'tensor': 2},
  {'data': 2, 'context': 4},
  {'context': 2, 'tensor': 4},
)


def _run(function, processes: int, devices: int, *args) -> list[str]:
  """Calls `function(*args)` in several processes of `devices` each; what each printed."""
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    port = s.getsockname()[1]
  file = inspect.getsourcefile(function)
  code = f'import runpy; runpy.run_path({file!r})[{function.__name__!r}](*{args!r})'
  env = os.environ | {
    'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT),
    # LLVM's optimisations take longer than the runs.
    'XLA_FLAGS': f'--xla_force_host_platform_device_count={devices}'
                 ' --xla_backend_optimization_level=0',
  }  # fmt: skip
  if processes > 1:
    env |= {'JAX_NUM_PROCESSES': str(processes), 'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}'}
  started = [
    subprocess.Popen(
      [sys.executable, '-c', code],
      env=env | ({'JAX_PROCESS_ID': str(i)} if processes > 1 else {}),
      cwd=ROOT, text=True, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )
    for i in range(processes)
  ]  # fmt: skip
  try:
    outputs = [process.communicate(timeout=3600)[0] for process in started]
  finally:
    for process in started:
      process.kill()
      process.wait()
  assert [p.returncode for p in started] == [0] * processes, '\n---\n'.join(outputs)
  return outputs


def _config(base: pathlib.Path, steps: int, **mesh: int):
  """The tiny run of this folder without what makes compilation long: no MTP, no indexer."""
  sys.path.insert(0, str(ROOT))
  from tests.train import tiny_config

  config = tiny_config.get_config()
  config.model.attention = 'gqa'
  config.model.sparse_attention = False
  config.data.sources.path = str(base / 'corpus')
  config.data.batch_size = ROWS
  config.optim.schedule = 'constant'
  config.optim.warmup_steps = 1
  config.train.steps = steps
  config.train.mtp_steps = 0
  config.train.grad_accum = MICRO_BATCHES
  config.eval.every = 2
  config.eval.batches = 1
  config.mesh.update(mesh)
  return config


def _one_process(folder: str):
  from glm5_jax.train import loop

  base = pathlib.Path(folder)
  assert loop.train(_config(base, 4, expert=2, fsdp=-1), str(base / 'one')) == 0
  assert loop.train(_config(base, 2, expert=2, fsdp=-1), str(base / 'one then two')) == 0


def _two_processes(folder: str):
  distributed.start()
  import jax

  from glm5_jax.train import loop

  assert (jax.process_count(), jax.local_device_count(), jax.device_count()) == (2, 4, 8)
  base = pathlib.Path(folder)
  found = {'agreement': _agreement(), 'rows': _rows_of_meshes(base)}
  print('FOUND ' + json.dumps(found), flush=True)
  assert loop.train(_config(base, 2, fsdp=4, context=2), str(base / 'two then one')) == 0
  assert loop.train(_config(base, 4, fsdp=4, context=2), str(base / 'one then two')) == 0


def _one_again(folder: str):
  from glm5_jax.train import loop

  base = pathlib.Path(folder)
  assert loop.train(_config(base, 4, expert=2, fsdp=-1), str(base / 'two then one')) == 0


def _agreement() -> list:
  """What this process learns where process 0 and process 1 say different things."""
  me = 0 if distributed.is_first() else 1
  votes = distributed.Votes()
  told = [votes.highest((0, vote)[me]) for vote in (0, 2, 0, 1)]
  try:
    distributed.check_same('thing', me)
    different = ''
  except distributed.ProcessError as e:
    different = str(e)
  try:
    with distributed.first_before_others():
      if me == 0:
        raise ValueError('no disk')
    failed = ''
  except (ValueError, distributed.ProcessError) as e:
    failed = str(e)
  return [told, distributed.gather('ab' * me), distributed.from_first([me]),
          distributed.problem_of_any('broken' if me else ''), different, failed]  # fmt: skip


def _rows_of_meshes(base: pathlib.Path) -> list:
  """Per mesh: which rows this process has, and the tokens of the third and fourth batch there."""
  from glm5_jax import sharding

  out = []
  position = json.loads((base / 'position.json').read_text())
  for shape in MESHES:
    mesh = sharding.make_mesh(shape)
    own = sharding.local_rows(mesh, ROWS, MICRO_BATCHES)
    iterator = data.make_train_iterator(_corpus(base), rows=own)
    iterator.set_state(position)
    batches = [next(iterator) for _ in range(2)]
    out.append([own.tolist(), [b['tokens'].tolist() for b in batches]])
    # What the devices get from a part of the rows is what they get from all of them.
    x = np.arange(ROWS * 8).reshape(ROWS, 8)
    whole = sharding.place_batch({'x': x, 'n': np.int32(7)}, mesh, MICRO_BATCHES)
    part = sharding.place_batch({'x': x[own], 'n': np.int32(7)}, mesh, MICRO_BATCHES, whole=False)
    for name in whole:
      assert whole[name].shape == part[name].shape
      shards = zip(whole[name].addressable_shards, part[name].addressable_shards, strict=True)
      for a, b in shards:
        assert a.index == b.index
        np.testing.assert_array_equal(a.data, b.data)
  return out


def _corpus(base: pathlib.Path) -> data.Corpus:
  config = data.DataConfig.from_mapping(_config(base, 4).data)
  return data.load_corpus(config)


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  """The folder with all runs, and what the two processes found."""
  base = tmp_path_factory.mktemp('runs')
  (base / 'corpus').mkdir()
  rng = random.Random(0)
  words = 'def return if else for in x y self value ( ) : = + 1 2'.split()
  for i in range(20):
    text = ' '.join(rng.choice(words) for _ in range(rng.randint(20, 120)))
    (base / 'corpus' / f'{i}.txt').write_text(text + '\n')
  iterator = data.make_train_iterator(_corpus(base))
  next(iterator), next(iterator)
  (base / 'position.json').write_text(json.dumps(iterator.get_state()))
  _run(_one_process, 1, 8, str(base))
  outputs = _run(_two_processes, 2, 4, str(base))
  _run(_one_again, 1, 8, str(base))
  found = [
    json.loads(line.partition('FOUND ')[2])
    for output in outputs
    for line in output.splitlines()
    if line.startswith('FOUND ')
  ]
  assert len(found) == 2
  return base, found, outputs


@pytest.mark.parametrize('name', ['one then two', 'two then one'])
def test_the_curve_does_not_depend_on_the_number_of_processes(runs, name):
  base, _, _ = runs
  for key in ('loss', 'grad_norm', 'tokens', 'eval/loss', 'eval/accuracy'):
    one, other = (
      [row[key] for row in metrics.read(base / run / 'metrics.jsonl') if key in row]
      for run in ('one', name)
    )
    assert len(one) == (2 if 'eval' in key else 4)
    np.testing.assert_allclose(other, one, rtol=1e-4, err_msg=key)


def test_process_0_writes_and_all_take_part_in_checkpoints(runs):
  base, _, outputs = runs
  for name in ('one then two', 'two then one'):
    steps = [r['step'] for r in metrics.read(base / name / 'metrics.jsonl') if 'loss' in r]
    assert steps == [1, 2, 3, 4]
    assert len(list((base / name / 'tensorboard').iterdir())) == 2  # One of each start.
    assert (base / name / 'report.md').exists()
    folder = base / name / 'checkpoints'
    assert Checkpoints(folder).steps()[-1] == 4
    kinds = {p.name for p in (folder / '4' / 'params').iterdir()}
    assert ('ocdbt.process_1' in kinds) == (name == 'one then two')
  assert 'resuming' in outputs[0] and 'report: ' in outputs[0]
  assert 'process 1 of 2' in outputs[1]
  assert not any(word in outputs[1] for word in ('resuming', 'report: ', 'step 1', 'data: '))


@pytest.mark.parametrize('number', range(len(MESHES)))
def test_rows_are_dealt_without_overlap_or_loss(runs, number):
  base, found, _ = runs
  iterator = data.make_train_iterator(_corpus(base))
  whole = [next(iterator)['tokens'] for _ in range(4)][2:]  # The position was saved after two.
  mine, others = (process['rows'][number] for process in found)
  together = sorted(mine[0] + others[0])
  if 'tensor' in MESHES[number] and 'expert' not in MESHES[number]:
    assert mine[0] == others[0] == list(range(ROWS))  # They divide the sequence, not the rows.
  else:
    assert together == list(range(ROWS)) and len(mine[0]) == ROWS // 2
  for rows, batches in (mine, others):
    for batch, expected in zip(batches, whole, strict=True):
      np.testing.assert_array_equal(batch, expected[rows])


def test_processes_agree(runs):
  for process in runs[1]:
    told, gathered, first, problem, different, failed = process['agreement']
    assert told == [0, 0, 2, 0]  # One call late.
    assert gathered == ['', 'ab'] and first == [0]
    assert problem == 'process 1: broken'
    assert 'process 1 of 2 has another thing than process 0' in different
    assert 'no disk' in failed


@pytest.mark.parametrize(
  'environment, message',
  [
    ({'JAX_PROCESS_ID': '1'}, 'need JAX_NUM_PROCESSES as well'),
    ({'JAX_NUM_PROCESSES': 'two'}, "must be a positive number or 'auto'"),
    ({'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '2'}, 'a number from 0 to 1'),
    ({'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1'}, 'must be HOST:PORT'),
    (
      {'JAX_NUM_PROCESSES': '2', 'JAX_PROCESS_ID': '1', 'JAX_COORDINATOR_ADDRESS': 'host'},
      'must be HOST:PORT',
    ),
  ],
)
def test_impossible_environments(environment, message):
  with pytest.raises(distributed.ProcessError, match=message):
    distributed.start(environment)


def test_one_process_needs_nothing():
  distributed.start({})
  distributed.start({'JAX_NUM_PROCESSES': '1', 'JAX_PROCESS_ID': '0'})
  assert distributed.gather('x') == ['x'] and distributed.from_first([1]) == [1]
  assert distributed.Votes().highest(2) == 2 and distributed.is_first()
  distributed.check_same('thing', {})
  distributed.check_alone('this')
