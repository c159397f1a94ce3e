"""What a kernel costs, read from the TPU compiler's own schedule on a machine without a TPU.

One case is compiled ahead of time in a process of its own (the flags that make libtpu write its
listings must be set before jax is imported). Of each Mosaic kernel two listings are read:

  *-packed-bundles-post-ra.txt                      the VLIW instructions, one a cycle
  *-pre-delay_hlo-static-per-bundle-utilization.txt how many units of each kind they keep busy

Later listings are about code size: empty cycles are folded into their neighbours there. What this
cannot see is whatever depends on time or data: DMA latency and bandwidth, semaphore waits, how
often a loop runs or which branch is taken. Cycles are therefore a lower bound, the same every run.
"""

import bisect
import glob
import importlib
import json
import os
import pathlib
import re
import subprocess
import sys
import tempfile
import time
from typing import NamedTuple

import jax
import numpy as np

_TIMEOUT = 900  # Seconds a compile may take.


class Chip(NamedTuple):
  """Numbers of one TensorCore. Published peaks: 459, 918 and 2,307 bfloat16 TFLOP/s a chip."""

  topology: str  # Of the smallest slice that the compiler knows.
  cores: int  # TensorCores a chip.
  flops: int  # bfloat16 FLOP a cycle and core, all MXUs.
  clock: float  # Hz
  bandwidth: float  # HBM bytes/s of a chip.
  vmem: int  # Bytes of VMEM a core.
  delay_slots: int  # Cycles between a branch and its effect.

  @property
  def name(self) -> str:
    """'v5p' of 'v5p:2x2x1'."""
    return self.topology.partition(':')[0]


CHIPS = {
  'v5p': Chip('v5p:2x2x1', 2, 131_072, 1.75e9, 2.765e12, 64 * 2**20, 4),
  'v6e': Chip('v6e:2x2', 1, 524_288, 1.75e9, 1.640e12, 128 * 2**20, 4),
  'tpu7x': Chip('tpu7x:2x2x1', 2, 524_288, 2.20e9, 7.370e12, 64 * 2**20, 6),
}


class Steady(NamedTuple):
  """One pass through a piece of code, without the loops nested in it."""

  cycles: int
  busy: dict[str, float]  # Share of the cycles that units of a kind are busy: 'MXU', 'VALU', ...
  spills: int  # Registers written to VMEM for want of registers, and read back.
  fills: int
  matmuls: int
  dmas: int


class Loop(NamedTuple):
  """A loop of the kernel, in the order of the program; depth 1 is usually the grid."""

  depth: int
  body: Steady  # All code of it.
  steady: Steady  # The path through it with the most matmuls, then the fewest cycles.


class Kernel(NamedTuple):
  """A Mosaic kernel of the compiled program."""

  name: str
  whole: Steady
  loops: tuple[Loop, ...]
  vmem: int  # Bytes.


class Report(NamedTuple):
  """What compiling one case said."""

  compile_seconds: float
  temporary: int  # Bytes of HBM for temporaries of the whole program.
  kernels: tuple[Kernel, ...]


def hottest(kernel: Kernel) -> Steady:
  """One iteration of the loop with the most matmuls."""
  return max((loop.steady for loop in kernel.loops), key=lambda steady: steady.matmuls)


class CompileError(RuntimeError):
  """The compiler refused a case; the message holds its last words."""


_BUNDLE = re.compile(r'^ *(?:0x[0-9a-f]+|0) +(?:[A-Z]{2} *)*: *(?:> *)*\{', re.M)
_BRANCH = re.compile(r'sbr\.rel (\([^)]*\))? ?target bundleno = (\d+)')
_DMA = re.compile(r'= dma\.[a-z_]+')
_ALLOCATION = re.compile(r"#\w+ \[shape = '[^']*', space=vmem, size = (0x[0-9a-f]+)")


class _Listing:
  """Running sums over a kernel's cycles, its loops and its branches."""

  def __init__(self, bundles: list[str], utilization: str, delay_slots: int):
    lines = utilization.splitlines()
    start = next(n for n, line in enumerate(lines) if line.startswith('== UTIL'))
    self.names = [name.split(':')[-1] for name in lines[1].split(', ')]
    self.capacity = [int(x) for x in lines[2].split()]
    units = [[int(x) for x in line.split()] for line in lines[start + 1 :] if line.strip()]
    if len(units) != len(bundles):
      raise ValueError(f'{len(bundles)} bundles but {len(units)} lines of utilization')
    counts = [(b.count('vmatmul.'), len(_DMA.findall(b))) for b in bundles]
    columns = np.concatenate([np.array(counts), np.array(units)[:, : len(self.capacity)]], axis=1)
    self.sums = np.concatenate([np.zeros_like(columns[:1]), np.cumsum(columns, axis=0)])
    self.slots = delay_slots
    self.branches = [
      (n, int(target), bool(condition))
      for n, b in enumerate(bundles)
      for condition, target in _BRANCH.findall(b)
    ]
    ends: dict[int, int] = {}
    for source, target, _ in self.branches:
      if target <= source:
        end = min(len(bundles), source + 1 + delay_slots)
        ends[target] = max(end, ends.get(target, 0))
    self.loops = sorted(ends.items())  # Half-open ranges of cycles.

  def steady(self, ranges: list[tuple[int, int]]) -> Steady:
    """Of the cycles in half-open, disjoint ranges."""
    cycles = sum(b - a for a, b in ranges)
    sums = sum((self.sums[b] - self.sums[a] for a, b in ranges), np.zeros_like(self.sums[0]))
    units = dict(zip(self.names, sums[2:].tolist(), strict=True))
    busy = {
      name: units[name] / capacity / max(1, cycles)
      for name, capacity in zip(self.names, self.capacity, strict=True)
    }
    return Steady(cycles, busy, units['SPILL'], units['FILL'], int(sums[0]), int(sums[1]))

  def inner(self, loop: tuple[int, int]) -> list[tuple[int, int]]:
    """The loops directly inside."""
    nested = [x for x in self.loops if x != loop and loop[0] <= x[0] and x[1] <= loop[1]]
    return [x for x in nested if not any(y != x and y[0] <= x[0] and x[1] <= y[1] for y in nested)]

  def path(self, loop: tuple[int, int]) -> list[tuple[int, int]]:
    """The way through one iteration with the most matmuls, then the fewest cycles."""
    inner = dict(self.inner(loop))
    skips = {}  # Where control may jump from, to which later cycle, and whether it must.
    for source, target, conditional in self.branches:
      inside = any(a <= source < b for a, b in inner.items())
      if loop[0] <= source < loop[1] and source < target <= loop[1] and not inside:
        skips[min(source + 1 + self.slots, target)] = (target, conditional)
    points = sorted({*loop, *inner, *inner.values(), *skips, *(t for t, _ in skips.values())})
    best: dict[int, tuple[tuple[int, int], list[tuple[int, int]]]] = {loop[0]: ((0, 0), [])}

    def reach(point, score, ranges):
      if point not in best or score > best[point][0]:
        best[point] = (score, ranges)

    for point in points[:-1]:
      if point not in best:
        continue
      score, ranges = best[point]
      if point in inner:
        reach(inner[point], score, ranges)
        continue
      if point in skips:
        reach(skips[point][0], score, ranges)
      if skips.get(point, (0, True))[1]:
        following = points[bisect.bisect_right(points, point)]
        matmuls = int(self.sums[following][0] - self.sums[point][0])
        longer = (score[0] + matmuls, score[1] - (following - point))
        reach(following, longer, [*ranges, (point, following)])
    return best.get(loop[1], ((0, 0), []))[1]


def _read_kernel(bundles_file: pathlib.Path, chip: Chip) -> list[Kernel]:
  """The kernel of one listing; none for what XLA generated itself."""
  stem = re.sub(r'-\d+-packed-bundles-post-ra\.txt$', '', str(bundles_file))

  def sibling(ending):
    found = glob.glob(glob.escape(stem) + f'-*-{ending}.txt')
    return pathlib.Path(found[0]).read_text(errors='replace') if found else ''

  utilization = sibling('pre-delay_hlo-static-per-bundle-utilization')
  # XLA's own fusions are listed too; a Mosaic kernel's HLO is a custom call.
  if not utilization or 'tpu_custom_call' not in sibling(
    'schedule-analysis_packed-bundles-post-ra'
  ):
    return []
  bundles = _BUNDLE.split(bundles_file.read_text(errors='replace'))[1:]
  listing = _Listing(bundles, utilization, chip.delay_slots)

  def without(loop):
    points = [loop[0], *(x for nested in listing.inner(loop) for x in nested), loop[1]]
    return list(zip(points[::2], points[1::2], strict=True))

  loops = []
  for loop in listing.loops:
    depth = sum(a <= loop[0] and loop[1] <= b for a, b in listing.loops)
    body = listing.steady(without(loop))
    loops.append(Loop(depth, body, listing.steady(listing.path(loop))))
  allocations = _ALLOCATION.findall(sibling('post-delay-converter'))
  name = re.sub(r'^\d+-', '', pathlib.Path(stem).name)
  vmem = sum(int(size, 16) for size in allocations)
  return [Kernel(name, listing.steady([(0, len(bundles))]), tuple(loops), vmem)]


def _child(target: str, chip: Chip, folder: pathlib.Path) -> None:
  """Compiles `module:function:argument` and writes what only the compiling process knows."""
  from jax.experimental import topologies

  module, function, argument = target.split(':')
  fn, arguments = getattr(importlib.import_module(module), function)(argument, chip)
  topology = topologies.get_topology_desc(platform='tpu', topology_name=chip.topology)
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ('chip',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
  )
  start = time.perf_counter()
  program = jax.jit(fn).trace(*arguments).lower(lowering_platforms=('tpu',)).compile()
  seconds = time.perf_counter() - start
  temporary = program.memory_analysis().temp_size_in_bytes
  (folder / 'compiled.json').write_text(json.dumps([seconds, temporary]))


def analyze(target: str, chip_name: str, python: str = sys.executable) -> Report:
  """Compiles a case for one chip and reads its kernels.

  Args:
    target: 'module:function:argument'; `function(argument, chip)` returns the function to compile
      and its arguments as `jax.ShapeDtypeStruct`s. What XLA itself generates is not reported.
    chip_name: a key of `CHIPS`.
    python: an interpreter that has jax and libtpu.

  Raises:
    CompileError: the compiler refused.
  """
  with tempfile.TemporaryDirectory(prefix='schedule-') as name:
    folder = pathlib.Path(name)
    flags = (
      f'--xla_jf_dump_to={name} --xla_jf_dump_llo_text=true '
      '--xla_jf_dump_hlo_text=false --xla_jf_dump_llo_html=false'
    )
    environment = dict(
      os.environ,
      LIBTPU_INIT_ARGS=flags,
      JAX_PLATFORMS='cpu',
      TPU_SKIP_MDS_QUERY='1',
      # Two compilers may work side by side: no TPU is touched.
      ALLOW_MULTIPLE_LIBTPU_LOAD='1',
    )
    environment.pop('JAX_COMPILATION_CACHE_DIR', None)  # A cached program writes no listings.
    command = [python, '-m', 'pallas_kernels.schedule', target, chip_name, name]
    try:
      result = subprocess.run(
        command, env=environment, capture_output=True, text=True, timeout=_TIMEOUT, check=False
      )
    except subprocess.TimeoutExpired as error:
      raise CompileError(f'{target} for {chip_name}: not done after {_TIMEOUT} s') from error
    if result.returncode:
      lines = [line for line in result.stderr.splitlines() if line.strip()]
      raise CompileError(f'{target} for {chip_name}: ' + '\n'.join(lines[-5:])[-1500:])
    seconds, temporary = json.loads((folder / 'compiled.json').read_text())
    kernels = []
    for path in sorted(folder.glob('*-packed-bundles-post-ra.txt')):
      if 'schedule-analysis' not in path.name:
        kernels.extend(_read_kernel(path, CHIPS[chip_name]))
  return Report(seconds, temporary, tuple(kernels))


if __name__ == '__main__':
  _child(sys.argv[1], CHIPS[sys.argv[2]], pathlib.Path(sys.argv[3]))
