"""Runs code that a model wrote: bubblewrap, no network, read-only root, limits on everything.

Where bubblewrap or user namespaces are missing it refuses; there is no unsafe way around it.
"""

import dataclasses
import functools
import os
import pathlib
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Mapping, Sequence
from typing import NamedTuple

_NOBODY = 65534
# Who can be read without rights of its own. Absent ones are left out.
_SYSTEM = ('/usr', '/lib', '/lib64', '/bin', '/sbin', '/etc/alternatives', '/etc/ld.so.cache')
FOLDER = '/sandbox'


class SandboxError(RuntimeError):
  """There is no sandbox on this machine. Says why and what to install."""


class Result(NamedTuple):
  """How a program ended.

  Attributes:
    status: its exit status; negative for a signal.
    stdout: as text, cut at the limit.
    stderr: the same.
    stopped: why it was stopped ('time', 'output'), or ''.
  """

  status: int
  stdout: str
  stderr: str
  stopped: str = ''

  @property
  def ok(self) -> bool:
    """Whether it ended by itself with status 0."""
    return not self.status and not self.stopped


@dataclasses.dataclass(frozen=True)
class Sandbox:
  """Limits of one program and all its children.

  Attributes:
    seconds: wall-clock time, and CPU time of each process.
    memory_bytes: address space of each process.
    processes: at once, threads included.
    file_bytes: of each file, and of all of /tmp, which lives in memory.
    output_bytes: of stdout and of stderr.
  """

  seconds: float = 5.0
  memory_bytes: int = 512 << 20
  processes: int = 32
  file_bytes: int = 16 << 20
  output_bytes: int = 64 << 10

  def run(
    self, command: Sequence[str], files: Mapping[str, str] | None = None, stdin: str = ''
  ) -> Result:
    """Runs `command` in /sandbox, which holds `files` (path -> text) and is read-only, as is the rest.

    Only /tmp can be written, and it is gone afterwards.

    Raises:
      SandboxError: there is none on this machine.
      ValueError: a file's path leads out of /sandbox.
    """
    prefix = _prefix()
    with tempfile.TemporaryDirectory(prefix='sandbox-') as name:
      folder = pathlib.Path(name)
      folder.chmod(0o755)
      _write(folder, files or {})
      mounts = ['--ro-bind', name, FOLDER, '--chdir', FOLDER, '--size', str(self.file_bytes)]
      mounts += ['--tmpfs', '/tmp', '--remount-ro', '/dev', '--remount-ro', '/']
      # The limits are set inside, in the namespace of this one program: those outside would be shared by
      # all sandboxes of a user.
      return self._run([*prefix, *mounts, '--', *self._limits(), *command], stdin)

  def python(self, source: str, stdin: str = '', files: Mapping[str, str] | None = None) -> Result:
    """Runs a Python program, without site packages. Errors as `run`."""
    return self.run([_python(), '-I', '-S', 'main.py'], {**(files or {}), 'main.py': source}, stdin)

  def _limits(self) -> list[str]:
    return [
      _program('prlimit', 'util-linux'), f'--as={self.memory_bytes}',
      f'--cpu={max(1, round(self.seconds))}', f'--nproc={self.processes}',
      f'--fsize={self.file_bytes}', '--core=0', '--nofile=256',
    ]  # fmt: skip

  def _run(self, argv: list[str], stdin: str) -> Result:
    # Output goes to files, which the file-size limit bounds: a pipe would fill this process's memory.
    with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
      process = subprocess.Popen(
        argv, stdin=subprocess.PIPE, stdout=out, stderr=err, cwd='/', start_new_session=True,
        env={}, **_drop_root(),
      )  # fmt: skip
      stopped = ''
      try:
        process.communicate(stdin.encode(), timeout=self.seconds)
      except subprocess.TimeoutExpired:
        stopped = 'time'
      finally:
        _kill(process)
      texts = []
      for file in (out, err):
        file.seek(0)
        data = file.read(self.output_bytes + 1)
        if len(data) > self.output_bytes:
          stopped = stopped or 'output'
        texts.append(data[: self.output_bytes].decode('utf-8', 'replace'))
    return Result(process.returncode, texts[0], texts[1], stopped)


def available() -> str:
  """'' if programs can be run, else why not."""
  try:
    result = Sandbox(seconds=20).run(['/bin/sh', '-c', 'echo yes'])
  except SandboxError as e:
    return str(e)
  return (
    '' if result.stdout == 'yes\n' else f'bubblewrap does not work here: {result.stderr.strip()}'
  )


@functools.cache
def _prefix() -> tuple[str, ...]:
  if not sys.platform.startswith('linux'):
    raise SandboxError(f'programs are run in bubblewrap, which needs Linux; this is {sys.platform}')
  argv = [
    _program('bwrap', 'bubblewrap'), '--unshare-all', '--die-with-parent', '--new-session',
    '--cap-drop', 'ALL', '--clearenv', '--setenv', 'PATH', '/usr/bin:/bin', '--setenv', 'HOME',
    '/tmp', '--setenv', 'LANG', 'C.UTF-8', '--proc', '/proc', '--dev', '/dev',
  ]  # fmt: skip
  for path in _SYSTEM:
    if os.path.islink(path):
      argv += ['--symlink', os.readlink(path), path]
    elif os.path.exists(path):
      argv += ['--ro-bind', path, path]
  base = os.path.realpath(sys.base_prefix)
  if not base.startswith('/usr') and _is_public(base):
    argv += ['--ro-bind', base, base]
  return tuple(argv)


def _program(name: str, package: str) -> str:
  found = shutil.which(name)
  if not found:
    raise SandboxError(
      f'running code that a model wrote needs {name!r}, which is not installed: apt install {package}'
    )
  return found


@functools.cache
def _python() -> str:
  """An interpreter that exists inside."""
  base = os.path.realpath(sys.base_prefix)
  mine = os.path.join(base, 'bin', f'python{sys.version_info.major}.{sys.version_info.minor}')
  if os.path.exists(mine) and (base.startswith('/usr') or _is_public(base)):
    return mine
  if os.path.exists('/usr/bin/python3'):
    return '/usr/bin/python3'
  raise SandboxError(
    f'no Python that an unprivileged user can run: {base} is private and there is no /usr/bin/python3'
  )


def _is_public(path: str) -> bool:
  """Whether everyone may enter `path`."""
  p = pathlib.Path(path)
  return all(q.stat().st_mode & 0o001 for q in (p, *p.parents))


def _drop_root() -> dict:
  """Root's processes would be counted nowhere and read everything: become nobody first."""
  if os.geteuid():
    return {}
  return {'user': _NOBODY, 'group': _NOBODY, 'extra_groups': []}


def _write(folder: pathlib.Path, files: Mapping[str, str]) -> None:
  for name, text in files.items():
    path = folder / name
    if pathlib.PurePath(name).is_absolute() or '..' in pathlib.PurePath(name).parts:
      raise ValueError(f'{name!r} leads out of the sandbox; give a relative path')
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text, encoding='utf-8', errors='replace')


def _kill(process: subprocess.Popen) -> None:
  """The process and whatever it started; bubblewrap's children die with it."""
  if process.poll() is None:
    os.killpg(process.pid, signal.SIGKILL)
  process.wait()
