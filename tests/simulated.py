"""Runs a function on several simulated CPU devices, in a process of its own.

The number of devices is fixed when jax starts, so a test that wants more than one cannot run in
pytest's process. Write the body as a top-level function of the test file:

  def _sharded_equals_single():
    assert jax.device_count() == 8
    ...

  def test_sharded_equals_single():
    run_on_devices(_sharded_equals_single)
"""

import inspect
import os
import pathlib
import subprocess
import sys
from collections.abc import Callable

_ROOT = pathlib.Path(__file__).resolve().parents[1]


def run_on_devices(function: Callable[[], object], n: int = 8, timeout: float = 600) -> str:
  """Calls `function()` where `jax.device_count() == n`; returns what it printed.

  Args:
    function: a top-level function without arguments. Its file is executed anew, so nothing but its
      own code and what the file defines is available to it.
    n: the number of devices.
    timeout: seconds.

  Raises:
    AssertionError: if it raised or ran out of time; the message holds all it printed.
  """
  file = inspect.getsourcefile(function)
  name = function.__qualname__
  if file is None or '.' in name or name == '<lambda>':
    raise ValueError(f'{name} must be a top-level function of a file')
  code = f'import runpy; runpy.run_path({file!r})[{name!r}]()'
  flags = f'{os.environ.get("XLA_FLAGS", "")} --xla_force_host_platform_device_count={n}'
  path = os.pathsep.join(filter(None, [str(_ROOT), os.environ.get('PYTHONPATH')]))
  env = os.environ | {'XLA_FLAGS': flags.strip(), 'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': path}
  try:
    done = subprocess.run(
      [sys.executable, '-c', code],
      env=env, cwd=_ROOT, timeout=timeout, text=True, stdout=subprocess.PIPE,
      stderr=subprocess.STDOUT,
    )  # fmt: skip
  except subprocess.TimeoutExpired as e:
    raise AssertionError(f'{name} on {n} devices: no end after {timeout} s\n{e.output}') from e
  if done.returncode:
    raise AssertionError(f'{name} on {n} devices: exit status {done.returncode}\n{done.stdout}')
  return done.stdout
