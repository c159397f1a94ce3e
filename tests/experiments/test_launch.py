"""The launcher: what it would do, word for word; a real job of two processes; what is typed wrong."""

import contextlib
import os
import pathlib
import random
import shlex
import signal
import subprocess
import sys
import time
import types

import pytest

from experiments import launch
from glm5_jax.train import metrics
from glm5_jax.train.checkpoint import Checkpoints

ROOT = pathlib.Path(__file__).resolve().parents[2]
NANO = '--config=configs/nano_pretrain.py'


@pytest.fixture(autouse=True)
def _at_the_root(monkeypatch):
  monkeypatch.chdir(ROOT)


def _launch(capsys, *args: str) -> str:
  assert launch.main(['launch', *args]) == 0
  out, err = capsys.readouterr()
  assert err == ''
  return out


# --- Dry runs ---


def test_local(capsys, monkeypatch, tmp_path):
  monkeypatch.setenv('XLA_FLAGS', '--xla_x=1')
  workdir = tmp_path / 'run'
  out = _launch(
    capsys, NANO, f'--workdir={workdir}', '--processes=2', '--devices=4', '--config.mesh.fsdp=8',
    '--env=A=b c', '--dry_run',
  )  # fmt: skip
  *commands, note = out.splitlines()
  for i, command in enumerate(commands):
    assert shlex.split(command) == [
      'env', 'A=b c', 'PYTHONUNBUFFERED=1', 'JAX_PLATFORMS=cpu',
      'XLA_FLAGS=--xla_x=1 --xla_force_host_platform_device_count=4', 'JAX_NUM_PROCESSES=2',
      f'JAX_PROCESS_ID={i}', 'JAX_COORDINATOR_ADDRESS=127.0.0.1:PORT', sys.executable, '-m',
      'experiments.run', NANO, '--config.mesh.fsdp=8', f'--workdir={workdir}', '>>',
      f'{workdir}/.logs/process_{i}.log', '2>&1',
    ]  # fmt: skip
  assert len(commands) == 2 and 'PORT is a free one' in note
  assert not workdir.exists()


def test_one_process_takes_what_there_is(capsys):
  words = shlex.split(_launch(capsys, NANO, '--workdir=/w', '--dry_run'))
  assert words[:5] == ['env', 'PYTHONUNBUFFERED=1', sys.executable, '-m', 'experiments.run']


REMOTE = ['--config.optim.peak_lr=2e-3', '--workdir=/mnt/a b']


def test_xpk(capsys):
  out = _launch(
    capsys, NANO, '--backend=xpk', '--topology=v5p:4x4x8', '--cluster=pods', '--image=repo/glm5',
    '--zone=us-east5-a', '--project=us', '--name=My Run', '--env=A=b c', *REMOTE,
  )  # fmt: skip
  *words, command = shlex.split(out)
  assert words == [
    'xpk', 'workload', 'create', '--workload=my-run', '--cluster=pods', '--tpu-type=v5p-4x4x8',
    '--docker-image=repo/glm5', '--zone=us-east5-a', '--project=us',
  ]  # fmt: skip
  flag, _, command = command.partition('=')
  assert flag == '--command'
  assert shlex.split(command) == [
    'env', 'JAX_NUM_PROCESSES=auto', 'A=b c', 'python', '-m', 'experiments.run', NANO, *REMOTE
  ]  # fmt: skip


def test_gcloud(capsys):
  out = _launch(capsys, NANO, '--backend=gcloud', '--tpu=pod', '--zone=us-east5-a', *REMOTE)
  *words, command = shlex.split(out)
  assert words == [
    'gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', 'pod', '--worker=all', '--zone=us-east5-a'
  ]  # fmt: skip
  assert shlex.split(command.removeprefix('--command='))[3:] == [
    'env', 'JAX_NUM_PROCESSES=auto', 'python', '-m', 'experiments.run', NANO, *REMOTE
  ]  # fmt: skip


def test_xmanager_dry_run(capsys):
  out = _launch(
    capsys, NANO, '--workdir=/w', '--backend=xmanager', '--topology=v6e:4x4', '--dry_run'
  )
  assert f'JAX_NUM_PROCESSES=auto python -m experiments.run {NANO} --workdir=/w' in out
  assert "xm_local.Vertex(xm.JobRequirements({'tpu_v6e': '4x4'}))" in out


def test_xmanager(capsys, monkeypatch):
  """With a stand-in for the package: what it is given."""
  added = []

  class Experiment:
    def __enter__(self):
      return self

    def __exit__(self, *_):
      pass

    def package(self, packages):
      return packages

    def add(self, job):
      added.append(job)

  def record(name):
    return lambda *args, **kwargs: types.SimpleNamespace(
      name=name, given=args, Spec=lambda: f'{name} spec', **kwargs
    )

  xm = types.SimpleNamespace(
    **{n: record(n) for n in ('PythonContainer', 'ModuleName', 'Packageable', 'Job')},
    JobRequirements=dict,
  )
  titles = []
  xm_local = types.SimpleNamespace(
    Vertex=record('Vertex'), Local=record('Local'),
    create_experiment=lambda experiment_title: titles.append(experiment_title) or Experiment(),
  )  # fmt: skip
  package = types.ModuleType('xmanager')
  package.xm, package.xm_local = xm, xm_local  # type: ignore[attr-defined]
  monkeypatch.setitem(sys.modules, 'xmanager', package)
  _launch(capsys, NANO, '--workdir=/w', '--backend=xmanager', '--topology=v5p:2x2x4')
  (job,) = added
  assert titles == ['nano-pretrain'] and job.args == [NANO, '--workdir=/w']
  assert job.env_vars == {'JAX_NUM_PROCESSES': 'auto'}
  assert job.executor.name == 'Vertex' and job.executor.given == ({'tpu_v5p': '2x2x4'},)
  assert job.executable.executor_spec == 'Vertex spec'
  assert job.executable.executable_spec.entrypoint.given == ('experiments.run',)
  assert job.executable.executable_spec.path == str(ROOT)


# --- What is typed wrong ---


@pytest.mark.parametrize(
  'args, message',
  [
    ([], '--config is missing'),
    ([NANO], '--workdir is missing'),
    ([NANO, '--workdir=w', '--backend=slurm'], '<local|xmanager|xpk|gcloud>'),
    ([NANO, '--workdir=w', '--proceses=2'], 'Did you mean: processes'),
    ([NANO, '--workdir=w', '--processes=two'], '--processes=two'),
    ([NANO, '--workdir=w', '--processes=0'], '--processes=0 must be at least 1'),
    ([NANO, '--workdir=w', '--processes=2'], 'need --devices'),
    ([NANO, '--workdir=w', '--config.trian.steps=2'], 'did you mean --config.train.steps?'),
    ([NANO, '--workdir=w', '--config.train.steps', '2'], 'write --config.KEY=VALUE'),
    ([NANO, '--workdir=w', '--env=A'], '--env=A must be NAME=VALUE'),
    ([NANO, '--workdir=w', '--topology=v5p:4x4x4'], 'local has --processes'),
    ([NANO, '--workdir=w', '--backend=xpk'], 'needs --topology and --cluster and --image'),
    ([NANO, '--workdir=w', '--backend=xpk', '--topology=h100:8'], 'v5p, v6e, tpu7x'),
    ([NANO, '--workdir=w', '--backend=xpk', '--topology=v5p:64'], 'CHIP:NxNxN'),
    ([NANO, '--workdir=w', '--backend=gcloud'], 'needs --tpu'),
    ([NANO, '--workdir=w', '--backend=gcloud', '--tpu=t', '--processes=4'], 'simulated'),
    ([NANO, '--workdir=w', '--backend=xmanager', '--devices=4'], 'takes a --topology'),
    ([NANO, '--workdir=README.md'], '--workdir=README.md cannot be written'),
  ],
)
def test_usage_errors_are_one_line(args, message, capsys):
  assert launch.main(['launch', *args]) == 2
  out, err = capsys.readouterr()
  assert out == '' and err.count('\n') == 1 and err.startswith('error: ')
  assert message in err


def test_without_xmanager(capsys, monkeypatch):
  monkeypatch.setitem(sys.modules, 'xmanager', None)
  assert launch.main(['launch', NANO, '--workdir=w', '--backend=xmanager']) == 2
  assert 'pip install xmanager' in capsys.readouterr().err


# --- Processes ---

PROGRAM = """
import os, sys, time
me = os.environ['JAX_PROCESS_ID']
print('I am', me, sys.argv[1:], os.environ['JAX_COORDINATOR_ADDRESS'])
if 'fail' in sys.argv:
  if me == '1':
    sys.exit(3)
  time.sleep(600)
"""


@pytest.mark.parametrize('word, status', [('work', 0), ('fail', 3)])
def test_processes_and_their_logs(word, status, tmp_path, capfd, monkeypatch):
  (tmp_path / 'program.py').write_text(PROGRAM)
  monkeypatch.setattr(launch, 'GRACE_SECONDS', 1)
  job = launch.Job(
    name='job', executable=launch.Executable('program'), args=(word,),
    topology=launch.Topology(processes=2, devices=1), env={'PYTHONPATH': str(tmp_path)},
    workdir=str(tmp_path / 'run'),
  )  # fmt: skip
  for _ in range(2):  # The second start adds to the logs, and shows what is new.
    assert launch.local(job, types.SimpleNamespace(dry_run=False)) == status
    out = capfd.readouterr().out
    assert out.count(f"I am 0 ['{word}'] 127.0.0.1:") == 1 and 'I am 1' not in out
    assert ('launch: process 1 ended with status 3' in out) == bool(status)
  for i in range(2):
    assert (tmp_path / 'run' / '.logs' / f'process_{i}.log').read_text().count(f'I am {i}') == 2


LAUNCHER = """
import sys, types
from experiments import launch
workdir, = sys.argv[1:]
job = launch.Job(
  name='job', executable=launch.Executable('program'), args=('wait',),
  topology=launch.Topology(processes=2, devices=1), env={'PYTHONPATH': workdir}, workdir=workdir,
)
launch.local(job, types.SimpleNamespace(dry_run=False))
"""


def test_a_killed_launcher_takes_its_processes_along(tmp_path):
  (tmp_path / 'program.py').write_text('import time\ntime.sleep(3600)')
  output = tmp_path / 'output'
  with output.open('w') as file:
    process = subprocess.Popen([sys.executable, '-c', LAUNCHER, tmp_path], cwd=ROOT, stdout=file)
  _wait(lambda: _pid(output, 1), process, output)
  pids = [_pid(output, i) for i in range(2)]
  process.kill()
  process.wait()
  end = time.monotonic() + 60
  while any(_runs(pid) for pid in pids):
    assert time.monotonic() < end, pids
    time.sleep(0.01)


def _runs(pid: int) -> bool:
  """Whether Linux has such a process, and not only what waits for its parent to read its status."""
  try:
    return 'State:\tZ' not in pathlib.Path(f'/proc/{pid}/status').read_text()
  except FileNotFoundError:
    return False


@pytest.mark.parametrize(
  'states, number',
  [([None, 3], 1), ([0, 1, 2], 1), ([1, -9], 1), ([1, -9, -9, None], 1), ([-6, None, -9], 2)],
)
def test_who_failed_first(states, number):
  """Others that lost a process to SIGKILL may have ended before the launcher looks."""
  assert launch.first_failed(states) == number


def _command(tmp_path: pathlib.Path, steps: int) -> list[str]:
  return [
    sys.executable, '-m', 'experiments.launch', '--config=tests/train/tiny_config.py',
    f'--workdir={tmp_path / "run"}', '--processes=2', '--devices=1', '--config.mesh.fsdp=2',
    f'--config.data.sources.path={tmp_path / "corpus"}', '--config.data.batch_size=2',
    f'--config.train.steps={steps}', '--config.train.mtp_steps=0', '--config.checkpoint.every=2',
    '--config.eval.every=1000000', '--config.model.attention=gqa',
    '--config.model.sparse_attention=false',
    '--env=XLA_FLAGS=--xla_backend_optimization_level=0',
  ]  # fmt: skip


def _wait(condition, process, log: pathlib.Path, seconds: float = 3600):
  end = time.monotonic() + seconds
  while not (found := condition()):
    assert process.poll() is None and time.monotonic() < end, log.read_text()
    time.sleep(0.1)
  return found


def _pid(output: pathlib.Path, number: int) -> int:
  for line in output.read_text().splitlines():
    if line.startswith(f'launch: process {number} has pid '):
      return int(line.split()[5].rstrip(','))
  return 0


def test_a_real_job_is_killed_and_goes_on(tmp_path):
  """kill -9 of one process ends the job; the same command resumes it; SIGTERM saves."""
  (tmp_path / 'corpus').mkdir()
  rng = random.Random(0)
  for i in range(20):
    text = ' '.join(rng.choice('def return if x y ( ) : = 1 2'.split()) for _ in range(100))
    (tmp_path / 'corpus' / f'{i}.txt').write_text(text + '\n')
  run, output = tmp_path / 'run', tmp_path / 'output'
  checkpoints = Checkpoints(run / 'checkpoints')

  def start() -> subprocess.Popen:
    with output.open('w') as file:
      return subprocess.Popen(
        _command(tmp_path, 10**6), cwd=ROOT, stdout=file, stderr=subprocess.STDOUT
      )

  process = start()
  try:
    _wait(checkpoints.steps, process, output)
    os.kill(_pid(output, 1), signal.SIGKILL)
    assert process.wait(timeout=3600) == 128 + signal.SIGKILL
    text = output.read_text()
    assert 'launch: process 1 was ended by SIGKILL' in text
    assert 'The same command goes on from the last checkpoint' in text
    # The other process noticed by itself, and its log says what happened.
    assert 'lost the connection to another process' in text or 'another task died' in text

    step = checkpoints.steps()[-1]
    process = start()
    _wait(lambda: f'from step {step}' in output.read_text(), process, output)
    _wait(lambda: metrics.read(run / 'metrics.jsonl')[-1]['step'] > step, process, output)
    process.send_signal(signal.SIGTERM)
    assert process.wait(timeout=3600) == 0, output.read_text()
    last = checkpoints.steps()[-1]
    assert f'Run the same command again to resume from step {last}' in output.read_text()
    rows = [row['step'] for row in metrics.read(run / 'metrics.jsonl')]
    assert rows == list(range(1, last + 1)) and last > step
  finally:
    if process.poll() is None:  # The test has failed: leave nothing behind.
      process.kill()
      for pid in filter(None, (_pid(output, number) for number in range(2))):
        with contextlib.suppress(ProcessLookupError):
          os.kill(pid, signal.SIGKILL)
      process.wait()
  assert 'process 1 of 2' in (run / '.logs' / 'process_1.log').read_text()
