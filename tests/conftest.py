"""Settings and fixtures of all tests. Runs before jax is imported anywhere."""

import hashlib
import importlib.util
import os
import pathlib
import platform
import time

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


def _lacking() -> dict[str, str]:
  """Fixture -> why this machine cannot run the tests that use it."""
  from glm5_jax.envs import sandbox

  why = {}
  if not SHARED.is_dir():
    why['shared'] = f'no reference data in {SHARED.name}/ beside the checkout'
  if reason := sandbox.available():
    why['bubblewrap'] = reason
  return why


def pytest_collection_modifyitems(config, items):
  """Leaves out what this machine cannot run, and says so; with --forbid-skips it is run, and fails."""
  if config.getoption('--forbid-skips') or not (lacking := _lacking()):
    return
  left_out = [i for i in items if not lacking.keys().isdisjoint(getattr(i, 'fixturenames', ()))]
  items[:] = [item for item in items if item not in set(left_out)]
  config.hook.pytest_deselected(items=left_out)


def pytest_report_header(config):
  """Why tests are left out."""
  return [f'left out: {why}' for why in _lacking().values()]


@pytest.fixture(scope='session')
def shared() -> pathlib.Path:
  """The folder ../shared: reference data too large for the repository."""
  assert SHARED.is_dir(), f'needs the reference data in {SHARED.name}/ beside the checkout'
  return SHARED


@pytest.fixture(scope='module', autouse=True)
def _programs_end_with_their_file():
  """Every compiled program keeps hundreds of memory mappings, of which Linux allows a process 65,530."""
  yield
  jax.clear_caches()
