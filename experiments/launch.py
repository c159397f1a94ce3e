"""Starts a run in one or many processes, here or on a cluster.

  python -m experiments.launch --config=configs/nano_pretrain.py --workdir=DIR \\
      --processes=2 --devices=4 --config.mesh.fsdp=8

A job is an executable, its arguments, a topology and an environment, as in XManager. `--backend` says
where it runs:

  local     here: --processes of --devices simulated CPU devices each, or one process with what this
            machine has. Process 0's output is shown, every process's kept in DIR/.logs. Signals are
            passed on to all. If a process fails, the others are ended; exit status as its. On Linux
            they save and end as well if the launcher is killed.
  xmanager  as an XManager experiment (the package is needed), on --topology or here
  xpk       prints the command for a GKE cluster of TPUs: --topology --cluster --image [--zone --project]
  gcloud    prints the command for TPU VMs that exist: --tpu [--zone --project]

`--dry_run` prints what would happen and does nothing. `--env=NAME=VALUE`, any number of times, adds to
the environment. What a person can get wrong ends in one line and exit status 2.
"""

import contextlib
import ctypes
import dataclasses
import os
import pathlib
import re
import shlex
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, BinaryIO

from absl import flags

from experiments import run
from experiments.run import UsageError

USAGE = (
  'usage: python -m experiments.launch --config=configs/NAME.py --workdir=DIR [--config.KEY=VALUE ...]'
  ' [--backend=local|xmanager|xpk|gcloud] [--processes=N --devices=N | --topology=CHIP:NxNxN]'
  ' [--dry_run]'
)
_ROOT = pathlib.Path(__file__).resolve().parents[1]
# Hidden, because a folder that holds anything else but no config.json is not taken for a new run's.
LOGS = '.logs'
# After one process has failed, the others notice by themselves and say so in their logs.
GRACE_SECONDS = 45
CHIPS = ('v4', 'v5litepod', 'v5p', 'v6e', 'tpu7x')


@dataclasses.dataclass(frozen=True)
class Executable:
  """A module of this repository, as `python -m` takes it."""

  module: str


@dataclasses.dataclass(frozen=True)
class Topology:
  """What a job runs on.

  Attributes:
    processes: How many, on this machine.
    devices: Simulated CPU devices of each; 0 for what the machine has.
    chip: Kind of TPU, or empty.
    grid: The slice, such as '4x4x4'; it says how many processes there are.
  """

  processes: int = 1
  devices: int = 0
  chip: str = ''
  grid: str = ''


@dataclasses.dataclass(frozen=True)
class Job:
  """What is to be run.

  Attributes:
    name: For people, and for the cluster.
    executable: What.
    args: Its arguments, in order.
    topology: On what.
    env: What is added to the environment of every process.
    workdir: The run's folder.
  """

  name: str
  executable: Executable
  args: tuple[str, ...]
  topology: Topology
  env: Mapping[str, str]
  workdir: str

  def command(self, python: str = 'python') -> list[str]:
    """Of every process."""
    return [python, '-m', self.executable.module, *self.args]


# --- The command line ---


def parse(argv: Sequence[str]) -> tuple[Job, flags.FlagValues]:
  """The job, and the flags for its backend.

  Raises:
    UsageError: an unknown or impossible flag, or one that `experiments.run` would not take.
  """
  values = flags.FlagValues()
  define: Any = lambda kind, *args: kind(*args, flag_values=values)  # noqa: E731
  define(flags.DEFINE_string, 'config', None, 'The config file.')
  define(flags.DEFINE_string, 'workdir', None, "The run's folder.")
  define(flags.DEFINE_enum, 'backend', 'local', list(BACKENDS), 'Where to run.')
  define(flags.DEFINE_integer, 'processes', 1, 'Processes on this machine.')
  define(flags.DEFINE_integer, 'devices', 0, 'Simulated CPU devices of each process.')
  define(flags.DEFINE_string, 'topology', '', 'A TPU slice, such as v5p:4x4x4.')
  define(flags.DEFINE_string, 'name', '', "Of the job; by default the config's.")
  define(flags.DEFINE_multi_string, 'env', [], 'NAME=VALUE, added to the environment.')
  define(flags.DEFINE_string, 'cluster', '', 'xpk: the GKE cluster.')
  define(flags.DEFINE_string, 'image', '', 'xpk: a Docker image with this repository.')
  define(flags.DEFINE_string, 'tpu', '', 'gcloud: the name of the TPU VMs.')
  define(flags.DEFINE_string, 'zone', '', 'xpk, gcloud: Google Cloud zone.')
  define(flags.DEFINE_string, 'project', '', 'xpk, gcloud: Google Cloud project.')
  define(flags.DEFINE_bool, 'dry_run', False, 'Only print what would happen.')
  is_key = re.compile(r'--?(no)?config\.')
  keys = [arg for arg in argv[1:] if is_key.match(arg)]
  try:
    rest = values(['launch', *(arg for arg in argv[1:] if not is_key.match(arg))])
  except flags.Error as e:
    raise UsageError(' '.join(str(e).split())) from None
  if len(rest) > 1:
    raise UsageError(f'unexpected argument {rest[1]!r} (write --config.KEY=VALUE); {USAGE}')
  config = [] if values.config is None else [f'--config={values.config}']
  args = [*config, *keys]
  if values.workdir:
    args.append(f'--workdir={values.workdir}')
  run.parse(['run', *args])
  for entry in values.env:
    if not re.match(r'[A-Za-z_]\w*=', entry):
      raise UsageError(f'--env={entry} must be NAME=VALUE')
  name = values.name or pathlib.Path(values.config.split(':', 1)[0]).stem
  job = Job(
    # Clusters take letters, digits and dashes.
    name=re.sub(r'[^a-z0-9]+', '-', name.lower()).strip('-'),
    executable=Executable('experiments.run'),
    args=tuple(args),
    topology=_topology(values),
    env=dict(entry.split('=', 1) for entry in values.env),
    workdir=values.workdir,
  )
  return job, values


def _topology(values: flags.FlagValues) -> Topology:
  here = values['processes'].present or values['devices'].present
  on_tpus = values.backend in ('xpk', 'gcloud') or values.topology
  if here and on_tpus:
    raise UsageError(
      '--processes and --devices are for CPU devices simulated on this machine; a TPU slice has'
      ' as many as its --topology'
    )
  if values.topology and values.backend == 'local':
    raise UsageError('--topology is for the backends xmanager and xpk; local has --processes')
  if values.processes < 1 or values.devices < 0:
    raise UsageError(
      f'--processes={values.processes} must be at least 1, --devices={values.devices} at least 0'
    )
  if values.processes > 1 and not values.devices:
    raise UsageError(
      f'--processes={values.processes} on one machine need --devices, the CPU devices that each'
      ' simulates; a single process takes all that the machine has'
    )
  if not values.topology:
    return Topology(values.processes, values.devices)
  chip, _, grid = values.topology.partition(':')
  if chip not in CHIPS or not re.fullmatch(r'\d+(x\d+){1,2}', grid):
    raise UsageError(
      f'--topology={values.topology} must be CHIP:NxN or CHIP:NxNxN; chips are {", ".join(CHIPS)}'
    )
  return Topology(chip=chip, grid=grid)


def _need(values: flags.FlagValues, *names: str) -> None:
  missing = [f'--{name}' for name in names if not getattr(values, name)]
  if missing:
    raise UsageError(f'--backend={values.backend} needs {" and ".join(missing)}')


# --- Backend: local ---


def local_env(job: Job, process: int, port: int | str) -> dict[str, str]:
  """What a process's environment has besides the launcher's own."""
  env = {'PYTHONUNBUFFERED': '1'}
  if job.topology.devices:
    wanted = job.env.get('XLA_FLAGS', os.environ.get('XLA_FLAGS', ''))
    count = f'--xla_force_host_platform_device_count={job.topology.devices}'
    env |= {'JAX_PLATFORMS': 'cpu', 'XLA_FLAGS': f'{wanted} {count}'.strip()}
  if job.topology.processes > 1:
    env |= {
      'JAX_NUM_PROCESSES': str(job.topology.processes),
      'JAX_PROCESS_ID': str(process),
      'JAX_COORDINATOR_ADDRESS': f'127.0.0.1:{port}',
    }
  return dict(job.env) | env


def _log(job: Job, process: int) -> pathlib.Path:
  return pathlib.Path(job.workdir).expanduser().absolute() / LOGS / f'process_{process}.log'


def local(job: Job, values: flags.FlagValues) -> int:
  """Runs the job to its end; returns its exit status."""
  numbers = range(job.topology.processes)
  if values.dry_run:
    for i in numbers:
      words = [f'{k}={v}' for k, v in local_env(job, i, 'PORT').items()]
      command = shlex.join(['env', *words, *job.command(sys.executable)])
      print(f'{command} >> {shlex.quote(str(_log(job, i)))} 2>&1')
    if len(numbers) > 1:
      print('# all at the same time; PORT is a free one of this machine')
    return 0
  processes: list[subprocess.Popen] = []
  with contextlib.ExitStack() as stack:
    try:
      _log(job, 0).parent.mkdir(parents=True, exist_ok=True)
      logs = [stack.enter_context(_log(job, i).open('ab')) for i in numbers]
    except OSError as e:
      raise UsageError(f'--workdir={job.workdir} cannot be written: {e.strerror}') from None
    shown = stack.enter_context(_log(job, 0).open('rb'))
    shown.seek(0, os.SEEK_END)  # What an earlier start left is not shown again.
    stack.enter_context(_forwarding(processes))
    stack.callback(_end, processes)
    port = _free_port()
    for i in numbers:
      process = subprocess.Popen(
        job.command(sys.executable),
        env=os.environ | local_env(job, i, port), stdin=subprocess.DEVNULL,
        stdout=logs[i], stderr=subprocess.STDOUT,
        start_new_session=True,  # Otherwise a Ctrl-C would reach it twice.
        preexec_fn=_end_with_launcher,
      )  # fmt: skip
      processes.append(process)
      print(f'launch: process {i} has pid {process.pid}, log {_log(job, i)}', flush=True)
    return _watch(job, processes, shown)


def _end_with_launcher() -> None:
  """Has this process sent SIGTERM when its parent is killed, which can pass nothing on then (Linux)."""
  if sys.platform == 'linux':
    ctypes.CDLL(None).prctl(1, signal.SIGTERM)  # PR_SET_PDEATHSIG; stays over exec.


def _free_port() -> int:
  with socket.socket() as s:
    s.bind(('127.0.0.1', 0))
    return s.getsockname()[1]


@contextlib.contextmanager
def _forwarding(processes: Sequence[subprocess.Popen]) -> Iterator[None]:
  """Within it SIGTERM and Ctrl-C go to all processes, which save and end by themselves."""

  def forward(number: int, _frame: Any) -> None:
    for process in processes:
      process.send_signal(number)  # Does nothing to one that has ended.

  before = {n: signal.signal(n, forward) for n in (signal.SIGTERM, signal.SIGINT)}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)


def _end(processes: Sequence[subprocess.Popen]) -> None:
  for process in processes:
    process.kill()
    process.wait()


def _watch(job: Job, processes: Sequence[subprocess.Popen], shown: BinaryIO) -> int:
  """Shows process 0's log until all have ended; the status of the first that failed, or 0."""
  failed: int | None = None
  deadline = float('inf')
  running = True
  while running:
    states = [p.poll() for p in processes]
    running = None in states
    sys.stdout.buffer.write(shown.read())
    sys.stdout.flush()
    if failed is None and any(states):
      failed = first_failed(states)
      deadline = time.monotonic() + GRACE_SECONDS
      others = f'; the others are ended within {GRACE_SECONDS} s' if running else ''
      print(f'launch: process {failed} {_fate(processes[failed].returncode)}{others}', flush=True)
    if time.monotonic() > deadline:
      _end(processes)
    time.sleep(0.01 if running else 0)  # Shorter than the others need to notice and end as well.
  if failed is None:
    return 0
  status = processes[failed].returncode
  print(f'launch: see {_log(job, failed)}. The same command goes on from the last checkpoint.')
  return status if status > 0 else 128 - status


def first_failed(states: Sequence[int | None]) -> int:
  """The number of the process to blame, of statuses seen at once, at least one of them a failure.

  One that was killed did not end because of another; those that lost it may have ended since.
  """
  killed = [i for i, state in enumerate(states) if state == -signal.SIGKILL]
  return (killed or [i for i, state in enumerate(states) if state])[0]


def _fate(status: int) -> str:
  if status < 0:
    return f'was ended by {signal.Signals(-status).name}'
  return f'ended with status {status}'


# --- Other backends ---


def xmanager(job: Job, values: flags.FlagValues) -> int:
  """Adds the job to a new XManager experiment."""
  here = not job.topology.chip
  if here and (job.topology.processes > 1 or job.topology.devices):
    raise UsageError('--backend=xmanager runs one process here, or takes a --topology')
  resource = {} if here else {f'tpu_{job.topology.chip.removeprefix("tpu")}': job.topology.grid}
  env = _cluster_env(job)
  if values.dry_run:
    words = shlex.join([*(f'{k}={v}' for k, v in env.items()), *job.command()])
    executor = 'xm_local.Local()' if here else f'xm_local.Vertex(xm.JobRequirements({resource}))'
    print(f'experiment {job.name!r}: {words}\non {executor}, packaged from {_ROOT}')
    return 0
  try:
    from xmanager import xm, xm_local
  except ImportError:
    raise UsageError(
      '--backend=xmanager needs the package: pip install xmanager; without it there are'
      ' local, xpk and gcloud'
    ) from None
  try:
    executor = xm_local.Local() if here else xm_local.Vertex(xm.JobRequirements(resource))
  except KeyError as e:
    raise UsageError(f'this XManager does not know {e.args[0]}; use --backend=xpk') from None
  with xm_local.create_experiment(experiment_title=job.name) as experiment:
    spec = xm.PythonContainer(path=str(_ROOT), entrypoint=xm.ModuleName(job.executable.module))
    package = xm.Packageable(executable_spec=spec, executor_spec=executor.Spec())
    [executable] = experiment.package([package])
    experiment.add(
      xm.Job(executable=executable, executor=executor, args=list(job.args), env_vars=env)
    )
  return 0


def _cluster_env(job: Job) -> dict[str, str]:
  """On TPUs every process finds the others by itself."""
  return ({'JAX_NUM_PROCESSES': 'auto'} if job.topology.chip else {}) | dict(job.env)


def _remote_command(job: Job) -> str:
  env = [f'{k}={v}' for k, v in {'JAX_NUM_PROCESSES': 'auto', **job.env}.items()]
  return shlex.join(['env', *env, *job.command()])


def _google_flags(values: flags.FlagValues) -> list[str]:
  return [f'--{name}={values[name].value}' for name in ('zone', 'project') if values[name].value]


def xpk(job: Job, values: flags.FlagValues) -> int:
  """Prints the command that starts the job on a cluster of Google Kubernetes Engine."""
  _need(values, 'topology', 'cluster', 'image')
  command = [
    'xpk', 'workload', 'create', f'--workload={job.name}', f'--cluster={values.cluster}',
    f'--tpu-type={job.topology.chip}-{job.topology.grid}', f'--docker-image={values.image}',
    *_google_flags(values), f'--command={_remote_command(job)}',
  ]  # fmt: skip
  print(shlex.join(command))
  return 0


def gcloud(job: Job, values: flags.FlagValues) -> int:
  """Prints the command that starts the job on all workers of a TPU slice, in this repository there."""
  _need(values, 'tpu')
  command = [
    'gcloud', 'compute', 'tpus', 'tpu-vm', 'ssh', values.tpu, '--worker=all',
    *_google_flags(values), f'--command=cd {_ROOT.name} && {_remote_command(job)}',
  ]  # fmt: skip
  print(shlex.join(command))
  return 0


BACKENDS: dict[str, Callable[[Job, flags.FlagValues], int]] = {
  'local': local, 'xmanager': xmanager, 'xpk': xpk, 'gcloud': gcloud,
}  # fmt: skip


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status: that of the job, 0 where there is none, 2 for wrong usage."""
  argv = list(sys.argv if argv is None else argv)
  if any(a in ('-h', '--help', '-help', '--helpfull') for a in argv[1:]):
    print(f'{__doc__}\n{USAGE}')
    return 0
  try:
    job, values = parse(argv)
    return BACKENDS[values.backend](job, values)
  except UsageError as e:
    print(f'error: {e}', file=sys.stderr)
    return 2


if __name__ == '__main__':
  sys.exit(main())
