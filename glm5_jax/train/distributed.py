"""A run in several processes: how they find each other, what they agree on, and who writes.

Every process runs the same program on its own devices. What they have to know of each other is in
the environment, under the names that JAX uses:

  JAX_NUM_PROCESSES        how many there are; absent or 1: this module does nothing. 'auto': JAX
                           finds them, and the two below, by itself (TPU pods, Slurm, Open MPI)
  JAX_PROCESS_ID           the number of this one, from 0
  JAX_COORDINATOR_ADDRESS  HOST:PORT on which process 0 listens and that all of them reach

Process 0 alone writes files (checkpoints are written by all) and what people read. All decisions
that change what is computed next are the same in every process, at the same step: otherwise some
would wait for ever for the others.
"""

import contextlib
import hashlib
import json
import os
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any, NoReturn, TextIO

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import multihost_utils
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from glm5_jax.compile import jit_once
from glm5_jax.train import workdir

# A process that is silent for as long counts as dead, and all others are ended.
HEARTBEAT_SECONDS = 30
# How long a process that has ended waits for the others to end as well. Then all are ended.
SHUTDOWN_SECONDS = 30
_NAMES = ('JAX_NUM_PROCESSES', 'JAX_PROCESS_ID', 'JAX_COORDINATOR_ADDRESS')


class ProcessError(Exception):
  """The processes of a run do not fit together. The message is for people."""


def start(environment: Mapping[str, str] = os.environ) -> None:
  """Finds the other processes; call before anything else uses JAX.

  Raises:
    ProcessError: the variables above are incomplete or impossible, or the others do not answer.
  """
  arguments = _arguments(environment)
  if arguments is None:
    return
  jax.config.update('jax_cpu_collectives_implementation', 'gloo')
  # It would take SIGTERM away from the loop, which agrees on when to stop by itself.
  jax.config.update('jax_enable_preemption_service', False)
  try:
    jax.distributed.initialize(
      **arguments,
      heartbeat_timeout_seconds=HEARTBEAT_SECONDS,
      shutdown_timeout_seconds=SHUTDOWN_SECONDS,
    )
  except (RuntimeError, ValueError) as e:
    raise ProcessError(
      f'the processes did not find each other ({_first_line(e)}): start all'
      f' {arguments.get("num_processes", "of them")} with the same {_NAMES[2]}, which every one of'
      ' them must be able to reach'
    ) from None
  print(
    f'process {jax.process_index()} of {jax.process_count()}, {jax.local_device_count()} of'
    f' {jax.device_count()} devices. If a process dies, JAX ends the others within a minute; start'
    ' all of them again with the same command to go on from the last checkpoint.',
    flush=True,
  )


def _arguments(environment: Mapping[str, str]) -> dict[str, Any] | None:
  """For `jax.distributed.initialize`; None if this is the only process."""
  count, number, address = (environment.get(name, '') for name in _NAMES)
  if count == 'auto':
    return {}
  if not count:
    if number or address:
      raise ProcessError(f'{_NAMES[1]} and {_NAMES[2]} need {_NAMES[0]} as well, or none of them')
    return None
  if not count.isdigit() or count == '0':
    raise ProcessError(f"{_NAMES[0]}={count} must be a positive number or 'auto'")
  if count == '1':
    return None
  if not number.isdigit() or int(number) >= int(count):
    raise ProcessError(f'{_NAMES[1]}={number} must be a number from 0 to {int(count) - 1}')
  if not address.rpartition(':')[0] or not address.rpartition(':')[2].isdigit():
    raise ProcessError(f'{_NAMES[2]}={address} must be HOST:PORT, where process 0 listens')
  return {
    'coordinator_address': address,
    'num_processes': int(count),
    'process_id': int(number),
    'cluster_detection_method': 'deactivate',
  }


def check_alone(what: str) -> None:
  """For what knows nothing of other processes.

  Raises:
    ProcessError: there are others.
  """
  if jax.process_count() > 1:
    raise ProcessError(f'{what} runs in one process; there are {jax.process_count()}')


def is_first() -> bool:
  """Whether this process writes files and what people read."""
  return jax.process_index() == 0


@contextlib.contextmanager
def output() -> Iterator[TextIO]:
  """Where to write what people read: nowhere in all processes but the first."""
  if is_first():
    yield sys.stdout
    return
  with open(os.devnull, 'w', encoding='utf-8') as nowhere:
    yield nowhere


# --- Agreement: all processes call these, in the same order ---


def gather(text: str) -> list[str]:
  """What each process gave, by their numbers."""
  if jax.process_count() == 1:
    return [text]
  data = text.encode()
  lengths = multihost_utils.process_allgather(np.int32(len(data)))
  width = 1 << int(max(lengths)).bit_length()  # Few different shapes: each is compiled.
  rows = multihost_utils.process_allgather(np.frombuffer(data.ljust(width, b'\0'), np.uint8))
  return [row.tobytes()[:n].decode() for row, n in zip(rows, lengths, strict=True)]


def from_first(value: Any) -> Any:
  """Process 0's value, which is JSON-able."""
  return json.loads(gather(json.dumps(value) if is_first() else '')[0])


def problem_of_any(problem: str) -> str:
  """The problems of all processes as one text; empty if there is none."""
  problems = gather(problem)
  if len(problems) == 1:
    return problem
  return '; '.join(f'process {i}: {text}' for i, text in enumerate(problems) if text)


def check_same(what: str, value: Any) -> None:
  """Every process must have the same JSON-able value.

  Raises:
    ProcessError: they have not.
  """
  digests = gather(hashlib.sha256(json.dumps(value, default=list).encode()).hexdigest())
  others = [i for i, digest in enumerate(digests) if digest != digests[0]]
  if others:
    raise ProcessError(
      f'process {", ".join(map(str, others))} of {len(digests)} has another {what} than process 0;'
      ' all of them must be started with the same command and read the same files'
    )


class Votes:
  """The highest of the numbers that the processes name at each step.

  With several processes the answer is that to the call before, so that nobody waits for the step
  that the devices have just begun: one small all-reduce a step, fetched a step later.
  """

  def __init__(self):
    self.delay = int(jax.process_count() > 1)
    self._before: jax.Array | None = None
    if self.delay:
      mesh = jax.make_mesh((jax.device_count(),), ('all',), axis_types=(AxisType.Explicit,))
      self._everyone = NamedSharding(mesh, PartitionSpec('all'))
      self._max = jit_once(jnp.max, out_shardings=NamedSharding(mesh, PartitionSpec()))

  def highest(self, number: int) -> int:
    """Of non-negative numbers; 0 for the call before the first."""
    if not self.delay:
      return number
    local = np.full(jax.local_device_count(), number, np.int32)
    votes = jax.make_array_from_process_local_data(self._everyone, local)
    before, self._before = self._before, self._max(votes)
    return 0 if before is None else int(before)


@contextlib.contextmanager
def first_before_others() -> Iterator[None]:
  """Process 0 runs the block before the others do, which then find the files that it left.

  Raises:
    ProcessError: in the others, if the block failed in process 0.
  """
  if not is_first():
    if problem := gather('')[0]:
      raise ProcessError(f'process 0 failed: {problem}')
    yield
    return
  try:
    yield
  except Exception as e:
    gather(_first_line(e))
    raise
  gather('')


@contextlib.contextmanager
def claim(folder: str | os.PathLike, config: Mapping[str, Any]) -> Iterator[pathlib.Path]:
  """`workdir.claim` by process 0, for all of them.

  Raises:
    WorkdirError: as there, in every process; or a process does not see what process 0 wrote.
    ProcessError: the processes have different configs.
  """
  check_same('config', config)
  path = pathlib.Path(folder).expanduser().absolute()
  with contextlib.ExitStack() as held:
    problem = ''
    if is_first():
      try:
        path = held.enter_context(workdir.claim(folder, config))
      except workdir.WorkdirError as e:
        problem = str(e)
    if problem := gather(problem)[0]:
      raise workdir.WorkdirError(problem)
    if not (path / 'config.json').is_file():
      problem = f'--workdir={folder} is not the folder that process 0 writes to'
    if problem := problem_of_any(problem):
      raise workdir.WorkdirError(f'{problem}; name one on a file system that all processes share')
    yield path


# --- The end ---


def end_if_alone(error: Exception) -> None:
  """Ends this process if `error` is that of a collective whose other members are gone.

  Otherwise it returns, and `error` is this process's own. Nothing is saved: the checkpoints are
  whole at any time. To wait for the others, as Python does when it ends, would be in vain.
  """
  text = str(error).lower()
  if jax.process_count() > 1 and any(word in text for word in ('gloo', 'coordination')):
    _end(f'lost the connection to another process ({_first_line(error)})')


def _end(problem: str) -> NoReturn:
  print(
    f'error: process {jax.process_index()} of {jax.process_count()} {problem}. The log of the one'
    ' that ended first says why. Start all of them again with the same command to go on from the'
    ' last checkpoint.',
    file=sys.stderr,
    flush=True,
  )
  sys.stdout.flush()
  os._exit(1)


def _first_line(error: Exception) -> str:
  return (str(error).strip() or type(error).__name__).splitlines()[0]
