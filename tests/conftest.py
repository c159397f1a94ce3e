"""Settings and fixtures of all tests. Runs before jax is imported anywhere."""

import hashlib
import importlib.util
import os
import pathlib
import platform
import time
from collections.abc import Callable

import pytest

_ROOT = pathlib.Path(__file__).resolve().parents[1]
SHARED = _ROOT.parent / 'shared'


def _compilation_cache() -> pathlib.Path:
  """A folder for compiled programs of this very processor; XLA's CPU code is made for its features."""
  cpuinfo = pathlib.Path('/proc/cpuinfo')
  lines = cpuinfo.read_text().splitlines() if cpuinfo.exists() else []
  features = [line for line in lines if line.startswith(('flags', 'Features'))][:1]
  tag = '|'.join([platform.machine(), platform.processor(), platform.system(), *features])
  folder = _ROOT / '.cache' / 'jax' / hashlib.sha256(tag.encode()).hexdigest()[:12]
  week_ago = time.time() - 7 * 24 * 3600
  for entry in folder.glob('*-cache'):
    if entry.stat().st_mtime < week_ago:
      entry.unlink(missing_ok=True)
  return folder


# The tests compare numbers bit for bit in places, on any machine: CPU unless told otherwise.
os.environ.setdefault('JAX_PLATFORMS', 'cpu')
# Most of the time goes into compiling. The subprocesses that tests start inherit these.
os.environ.setdefault('JAX_COMPILATION_CACHE_DIR', str(_compilation_cache()))
os.environ.setdefault('JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS', '0.5')

import jax  # noqa: E402  After the settings above.

# tests/hf imports torch at its top; `make test` is without it and does not look there.
collect_ignore = [] if importlib.util.find_spec('torch') else ['hf']


def pytest_addoption(parser):
  parser.addoption(
    '--forbid-skips',
    action='store_true',
    help='a skipped test fails the run (for a complete machine)',
  )


def pytest_sessionfinish(session):
  """With --forbid-skips, a run in which anything was skipped ends with exit status 1."""
  reporter = session.config.pluginmanager.get_plugin('terminalreporter')
  if not session.config.getoption('--forbid-skips') or reporter is None:
    return
  skipped = reporter.stats.get('skipped', [])
  if skipped:
    reporter.write_line(f'\n--forbid-skips: {len(skipped)} skipped, see the list below', red=True)
    session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(scope='session')
def missing(request) -> Callable[[str], None]:
  """What to call where a machine lacks something: skips, and fails on a complete machine."""
  return pytest.fail if request.config.getoption('--forbid-skips') else pytest.skip


@pytest.fixture(scope='session')
def shared(missing) -> pathlib.Path:
  """The folder ../shared: reference data too large for the repository."""
  if not SHARED.is_dir():
    missing(f'needs the reference data in {SHARED.name}/ beside the checkout')
  return SHARED


@pytest.fixture(scope='module', autouse=True)
def _programs_end_with_their_file():
  """Every compiled program keeps hundreds of memory mappings, of which Linux allows a process 65,530."""
  yield
  jax.clear_caches()
