"""What a result was measured on."""

import importlib.metadata
import os
import pathlib
import platform
import resource
import sys

import jax

_PACKAGES = ('jax', 'jaxlib', 'flax', 'optax', 'orbax-checkpoint', 'grain', 'numpy', 'tokenizers')


def describe() -> dict[str, str]:
  """Processor, cores, memory, devices, system: name -> text."""
  devices = jax.devices()
  return {
    'processor': _processor(),
    'cores': str(len(os.sched_getaffinity(0)) if sys.platform == 'linux' else os.cpu_count()),
    'memory': _memory(),
    'devices': f'{len(devices)} x {devices[0].device_kind} ({devices[0].platform})',
    'system': f'{platform.system()} {platform.release()}',
  }


def versions() -> dict[str, str]:
  """Python and the packages that a number can depend on."""
  return {'python': platform.python_version()} | {
    p: importlib.metadata.version(p) for p in _PACKAGES
  }


def peak_memory_gib() -> float:
  """The largest resident size of this process so far."""
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**30


def _processor() -> str:
  info = pathlib.Path('/proc/cpuinfo')
  if info.exists():
    for line in info.read_text(errors='replace').splitlines():
      if line.startswith('model name'):
        return line.partition(':')[2].strip()
  return platform.processor() or platform.machine()


def _memory() -> str:
  try:
    return f'{os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30:.1f} GiB'
  except (ValueError, OSError):
    return 'unknown'
