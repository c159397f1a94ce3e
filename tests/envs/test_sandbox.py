"""What a model's code can and cannot do."""

import concurrent.futures
import os
import time

import pytest

from glm5_jax.envs import sandbox
from glm5_jax.envs.sandbox import Sandbox, SandboxError

pytestmark = pytest.mark.usefixtures('bubblewrap')
BOX = Sandbox(seconds=20.0)


def test_a_program_runs():
  result = BOX.python('import sys\nprint(sys.stdin.read().upper())\nsys.exit(3)', 'hé')
  assert (result.status, result.stdout, result.ok) == (3, 'HÉ\n', False)
  assert BOX.run(['cat', 'a/b.txt'], {'a/b.txt': 'x'}).stdout == 'x'


def test_it_has_no_network():
  result = BOX.python(
    'import socket\n'
    "print([n for _, n in socket.if_nameindex() if n != 'lo'])\n"
    "try: socket.create_connection(('192.0.2.1', 80), 2)\n"
    'except OSError as e: print(type(e).__name__, e.errno)\n'
  )
  assert result.stdout == '[]\nOSError 101\n'  # Network is unreachable.


def test_it_sees_neither_files_nor_environment_nor_processes_of_ours(tmp_path, monkeypatch):
  secret = tmp_path / 'secret'
  secret.write_text('x')
  secret.chmod(0o644)
  monkeypatch.setenv('SECRET_TOKEN', 'x')
  result = BOX.python(
    'import os\n'
    f'print(os.path.exists({str(secret)!r}), "SECRET_TOKEN" in os.environ, os.getuid() != 0)\n'
    'print(len([p for p in os.listdir("/proc") if p.isdigit()]) <= 3, os.listdir("/tmp"))\n'
    f'try: os.kill({os.getpid()}, 9)\n'
    'except ProcessLookupError: print("no such process")\n'
  )
  assert result.stdout == 'False False True\nTrue []\nno such process\n'


@pytest.mark.parametrize(
  'path', ['/usr/x', f'{sandbox.FOLDER}/x', f'{sandbox.FOLDER}/main.py', '/etc/x', '/x']
)
def test_it_writes_nowhere_but_tmp(path):
  result = BOX.python(f'open({path!r}, "w")')
  assert result.status == 1
  assert any(e in result.stderr for e in ('Read-only', 'Permission', 'No such file'))
  assert BOX.python('open("/tmp/x", "w").write("y"); print(open("/tmp/x").read())').stdout == 'y\n'
  assert BOX.python('import os; print(os.listdir("/tmp"))').stdout == '[]\n'


def test_limits():
  small = Sandbox(seconds=20.0, memory_bytes=256 << 20, processes=16, file_bytes=1 << 20)
  assert 'MemoryError' in small.python('x = bytearray(1 << 29)').stderr
  assert small.python('open("/tmp/x", "wb").write(bytes(1 << 21))').status
  many = small.python(
    'import os, time\n'
    'n = 0\n'
    'try:\n'
    '  while n < 500:\n'
    '    if os.fork() == 0: time.sleep(60); os._exit(0)\n'
    '    n += 1\n'
    'except OSError: pass\n'
    'print(n, flush=True)\n'
    'os._exit(0)\n'
  )
  assert 0 < int(many.stdout) < 16
  loud = small.python('print("x" * 500_000)')
  assert loud.stopped == 'output' and len(loud.stdout) == small.output_bytes


def test_time_is_up_for_children_too():
  start = time.monotonic()
  result = Sandbox(seconds=1.0).python(
    'import os, time\nos.fork()\nos.setsid() if os.getpid() != 2 else None\ntime.sleep(600)'
  )
  assert result.stopped == 'time' and not result.ok
  assert time.monotonic() - start < 30


def test_many_at_once():
  with concurrent.futures.ThreadPoolExecutor(4) as pool:
    results = list(pool.map(lambda i: BOX.python(f'print({i})').stdout, range(8)))
  assert results == [f'{i}\n' for i in range(8)]


@pytest.mark.parametrize('name', ['../x', '/x', 'a/../../x'])
def test_files_stay_inside(name):
  with pytest.raises(ValueError, match='leads out of the sandbox'):
    BOX.run(['true'], {name: ''})


def test_without_bubblewrap_it_refuses(monkeypatch):
  sandbox._prefix.cache_clear()
  monkeypatch.setenv('PATH', '')
  with pytest.raises(SandboxError, match='apt install bubblewrap'):
    BOX.python('print(1)')
  assert 'apt install' in sandbox.available()
  monkeypatch.undo()
  sandbox._prefix.cache_clear()
