"""Costs of the kernels on a chip, from the compiler's schedule: a table, then JSON lines.

  python -m pallas_kernels.bench --topology=v5p:2x2x1 [--op=NAME] [--shape=NAME] [--peer]
  python -m pallas_kernels.bench --topology=v5p:2x2x1 [--op=NAME] [--shape=NAME] --floors

Needs jax[tpu], no TPU; the floors need neither. Cycles count what the schedule shows: no DMA, HBM
or semaphore waits (see schedule.py), so a time is the larger of cycles and bytes and a lower bound.
A "unit" is what one pass over the kernel works on, for example a block of queries that sees all
keys.
"""

import argparse
import json
import sys
from collections.abc import Sequence
from typing import NamedTuple

from pallas_kernels import cases, schedule
from pallas_kernels.schedule import CHIPS, Chip, Kernel


class Row(NamedTuple):
  """One case on one chip."""

  op: str
  shape: str
  chip: str
  compile_seconds: float  # Writing the listings included.
  vmem_mib: float
  temporary_mib: float  # HBM, of the whole call.
  steady_cycles: int  # One pass of the loop with the most matmuls.
  mxu: float  # Of that pass, the share of cycles in which the units are busy.
  valu: float
  spills: int
  fills: int
  dmas: int
  cycles_per_query: float
  peak: float  # Useful FLOPs of all cycles, as a share of the bfloat16 peak.
  bytes_per_query: float
  microseconds: float  # Per query and chip: the larger of cycles and bytes.
  of_floor: float  # How many times the floor: the larger of FLOPs at peak and bytes at least moved.
  hbm_factor: float  # Bytes of HBM over those that must be moved.
  stages: dict[str, float]  # Cycles a query.


def _stages(op: cases.Op, shape, chip: Chip, kernel: Kernel) -> dict[str, float]:
  """Cycles of one unit of work by stage."""
  if op.loops is None:
    return {'all': max(loop.steady for loop in kernel.loops if loop.steady.matmuls).cycles}
  named = op.loops(shape, chip)
  if len(named) != len(kernel.loops):
    found = [(loop.depth, loop.steady.cycles) for loop in kernel.loops]
    raise cases.LoopsChangedError(
      f'{op.name}/{shape.name}: {len(named)} loops are named, the kernel has {len(kernel.loops)}; '
      f'(depth, cycles) of each: {found}. Change Op.loops of cases.py accordingly'
    )
  stages: dict[str, float] = {}
  for (stage, trips), loop in zip(named, kernel.loops, strict=True):
    if stage is not None:
      stages[stage] = stages.get(stage, 0.0) + trips * loop.steady.cycles
  return stages


def summarize(name: str, chip_name: str, report: schedule.Report) -> Row:
  """The table's row of one case, 'op/shape'."""
  op, shape = cases.find(name)
  chip = CHIPS[chip_name]
  kernel = max(report.kernels, key=lambda k: (k.whole.matmuls, k.whole.cycles))
  work = op.work(shape, chip)
  stages = _stages(op, shape, chip, kernel)
  cycles = sum(stages.values())
  hottest = schedule.hottest(kernel)
  bandwidth = chip.bandwidth / chip.cores
  seconds = max(cycles / chip.clock, work.moved_bytes / bandwidth)
  floor = max(work.flops / (chip.flops * chip.clock), work.floor_bytes / bandwidth)
  return Row(
    op=op.name,
    shape=shape.name,
    chip=chip_name,
    compile_seconds=round(report.compile_seconds, 1),
    vmem_mib=round(kernel.vmem / 2**20, 1),
    temporary_mib=round(report.temporary / 2**20, 1),
    steady_cycles=hottest.cycles,
    mxu=round(hottest.busy['MXU'], 3),
    valu=round(hottest.busy['VALU'], 3),
    spills=hottest.spills,
    fills=hottest.fills,
    dmas=hottest.dmas,
    cycles_per_query=round(cycles / work.queries, 1),
    peak=round(work.flops / cycles / chip.flops, 3),
    bytes_per_query=round(work.moved_bytes / work.queries),
    microseconds=round(seconds * 1e6 / work.queries / chip.cores, 3),
    of_floor=round(seconds / floor, 2),
    hbm_factor=round(work.moved_bytes / work.floor_bytes, 2),
    stages={stage: round(c / work.queries, 1) for stage, c in stages.items()},
  )


class Floor(NamedTuple):
  """What any implementation of one case takes, per query and chip."""

  op: str
  shape: str
  chip: str
  mflop: float
  kilobytes: float  # Of HBM.
  peak_microseconds: float  # At the bfloat16 peak.
  hbm_microseconds: float


def floor(op: cases.Op, shape, chip: Chip) -> Floor:
  """The floor of one case, whose larger time is `Row.of_floor`'s unit."""
  work = op.work(shape, chip)
  flops, size = work.flops / work.queries, work.floor_bytes / work.queries
  return Floor(
    op=op.name,
    shape=shape.name,
    chip=chip.name,
    mflop=round(flops / 1e6, 1),
    kilobytes=round(size / 1e3, 1),
    peak_microseconds=round(flops / (chip.flops * chip.clock * chip.cores) * 1e6, 3),
    hbm_microseconds=round(size / chip.bandwidth * 1e6, 3),
  )


def _table(rows: Sequence[Row]) -> str:
  """One line a case."""
  columns = [field for field in Row._fields if field != 'stages']
  lines = [columns] + [[str(getattr(row, c)) for c in columns] for row in rows]
  for line, row in zip(lines[1:], rows, strict=True):
    line.append(' '.join(f'{stage} {cycles:g}' for stage, cycles in row.stages.items()))
  lines[0] = [*columns, 'cycles a query by stage']
  return _align(lines)


def _align(lines: list[list[str]]) -> str:
  """Columns as wide as their content."""
  widths = [max(len(line[i]) for line in lines) for i in range(len(lines[0]))]
  return '\n'.join('  '.join(map(str.ljust, line, widths)).rstrip() for line in lines)


def main(argv: Sequence[str] | None = None) -> int:
  """Compiles the chosen cases and prints; returns how many could not be measured."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--topology', default='v5p:2x2x1', help='of ' + ', '.join(CHIPS))
  parser.add_argument('--op', help='only this one')
  parser.add_argument('--shape', help='only this one')
  parser.add_argument('--peer', action='store_true', help='public kernels instead of ours')
  parser.add_argument('--floors', action='store_true', help='compile nothing, print floors')
  options = parser.parse_args(argv)
  chip = options.topology.split(':')[0]
  if chip not in CHIPS:
    parser.error(f'--topology={options.topology}: choose one of ' + ', '.join(CHIPS))
  chosen = [
    (op, shape)
    for op in (cases.PEERS if options.peer else cases.OPS)
    for shape in op.shapes
    if options.op in (None, op.name) and options.shape in (None, shape.name)
  ]
  if options.floors:
    floors = [floor(op, shape, CHIPS[chip]) for op, shape in chosen]
    print(_align([list(Floor._fields), *(list(map(str, row)) for row in floors)]))
    return 0
  rows, refused = [], []
  for op, shape in chosen:
    name = f'{op.name}/{shape.name}'
    print(f'{name} for {chip} ...', file=sys.stderr)
    try:
      report = schedule.analyze(f'pallas_kernels.cases:build:{name}', chip)
      rows.append(summarize(name, chip, report))
    except (schedule.CompileError, cases.LoopsChangedError) as error:
      refused.append(dict(op=op.name, shape=shape.name, chip=chip, error=str(error)))
      print(error, file=sys.stderr)
  if rows:
    print(_table(rows))
  for line in [*(row._asdict() for row in rows), *refused]:
    print(json.dumps(line))
  return len(refused)


if __name__ == '__main__':
  sys.exit(main())
