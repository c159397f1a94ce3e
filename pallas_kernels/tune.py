"""Measures candidates for block sizes and writes `tuning_table.py`.

  python -m pallas_kernels.tune --topology=v6e:2x2 [--op=NAME] [--regime=NAME]

Needs jax[tpu], no TPU: cycles are those of the compiler's schedule (schedule.py), so a second run
finds the same. What the table has is not measured again: delete it there, for instance when the
compiler is another one. A candidate that the compiler refuses is left out.
"""

import argparse
import pathlib
from collections.abc import Mapping, Sequence

from pallas_kernels import schedule, shapes, tuning, tuning_table
from pallas_kernels.indexer_kl import api as kl
from pallas_kernels.indexer_kl import cases as kl_cases
from pallas_kernels.schedule import CHIPS, Chip
from pallas_kernels.sparse_mla import api as sparse
from pallas_kernels.sparse_mla import cases as sparse_cases

Key = tuple[str, str, str, str]  # chip, op, regime, direction
Blocks = tuple[int, ...]

# (op, regime, direction) -> what is tried on every chip.
CANDIDATES: dict[tuple[str, str, str], tuple[Blocks, ...]] = {
  ('sparse_mla', 'gather', 'forward'): (
    (4, 1, 512), (4, 2, 512), (4, 2, 1024), (8, 4, 512), (8, 4, 1024),
  ),
  ('sparse_mla', 'gather', 'backward'): (
    (4, 2, 512), (8, 2, 512), (8, 4, 512), (16, 4, 512), (8, 2, 512, 1), (16, 4, 512, 1),
  ),
  ('sparse_mla', 'dense', 'forward'): ((16, 2, 1024), (16, 4, 512), (16, 4, 1024)),
  ('sparse_mla', 'dense', 'backward'): ((8, 4, 512), (16, 4, 256), (16, 4, 512)),
  # Contexts and the unions of drafts are rounded up to chunks, so that longer ones are not tried.
  ('sparse_mla_paged', 'gather', 'forward'): ((1, 1, 256), (1, 1, 512)),
  ('sparse_mla_paged', 'dense', 'forward'): ((1, 1, 512), (1, 1, 1024)),
  ('indexer_kl', 'gather', 'forward'): (
    (8, 4, 512, 256), (16, 4, 512, 256), (16, 4, 512, 512), (16, 4, 1024, 256),
  ),
  ('indexer_kl', 'gather', 'backward'): ((8, 4, 512, 256), (16, 4, 512, 256), (16, 4, 512, 512)),
  ('indexer_kl', 'dense', 'forward'): (
    (16, 4, 512, 256), (16, 4, 1024, 256), (16, 4, 1024, 512),
  ),
  ('indexer_kl', 'dense', 'backward'): (
    (16, 4, 512, 256), (16, 4, 1024, 256), (16, 4, 1024, 512),
  ),
}  # fmt: skip


def build(name: str, chip: Chip):
  """For `schedule.analyze`: 'op/regime/direction/sizes' -> (function, abstract arguments).

  Sizes are separated by commas. Kernels are those of GLM-5's shapes; the dense ones at the longest
  sequence that `sparse_mla` takes them for, whose gradients VMEM must hold.
  """
  op, regime, direction, sizes = name.split('/')
  blocks = tuple(map(int, sizes.split(',')))
  backward = direction == 'backward'
  if op == 'indexer_kl':
    stage = 'sparse' if regime == 'gather' else 'dense'
    kl_shape = kl_cases.IndexerKl(name, 'train', 4096, 202_752, stage, backward)
    return kl_cases.build(kl_shape, chip.name, kl.Tuning(*blocks))
  if op == 'sparse_mla':
    keys = 202_752 if regime == 'gather' else sparse.DENSE_KEYS
    shape = sparse_cases.SparseMla(name, 'train', 4096, keys, backward)
    return sparse_cases.build(shape, chip.name, sparse.tuned(blocks))
  decode = shapes.Decode(name, 'decode', 16, 1, 131_072 if regime == 'gather' else 4096)
  return sparse_cases.build_decode(decode, chip.name, chunk=blocks[2])


def measure(key: Key, candidates: Sequence[Blocks]) -> dict[Blocks, int]:
  """Cycles of one chunk of keys for a block of queries, of each candidate that compiles."""
  chip, *case = key
  found = {}
  for blocks in candidates:
    name = '/'.join((*case, ','.join(map(str, blocks))))
    try:
      report = schedule.analyze(f'pallas_kernels.tune:build:{name}', chip)
    except schedule.CompileError as error:
      print(f'{chip} {name}: refused: {str(error)[-200:]}', flush=True)
      continue
    steady = schedule.hottest(max(report.kernels, key=lambda k: k.whole.matmuls))
    found[blocks] = steady.cycles
    cost = tuning.cost(case[0], case[1], blocks, steady.cycles)
    busy = f'MXU {steady.busy["MXU"]:.1%}, spill / fill {steady.spills} / {steady.fills}'
    print(f'{chip} {name}: {steady.cycles} cycles, {busy}, {cost:,.0f} a query', flush=True)
  return found


def render(cycles: Mapping[Key, Mapping[Blocks, int]]) -> str:
  """The text of `tuning_table.py`."""
  lines = [
    '"""Cycles of one chunk of keys for a block of queries, by the blocks that were tried.',
    '',
    'Written by `python -m pallas_kernels.tune`; `tuning.py` chooses from it.',
    '"""',
    '',
    'CYCLES: dict[tuple[str, str, str, str], dict[tuple[int, ...], int]] = {',
  ]
  for key, tried in sorted(cycles.items()):
    lines.append('  ({}): {{'.format(', '.join(f"'{name}'" for name in key)))
    lines += [f'    {blocks}: {count},' for blocks, count in sorted(tried.items())]
    lines.append('  },')
  return '\n'.join([*lines, '}', ''])


def main(argv: Sequence[str] | None = None) -> None:
  """Measures what is asked for and rewrites the table after each row."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--topology', required=True, help='of ' + ', '.join(CHIPS))
  parser.add_argument('--op', help='only this one')
  parser.add_argument('--regime', help='only this one')
  options = parser.parse_args(argv)
  chip = options.topology.split(':')[0]
  if chip not in CHIPS:
    parser.error(f'--topology={options.topology}: choose one of ' + ', '.join(CHIPS))
  table = dict(tuning_table.CYCLES)
  for case, candidates in CANDIDATES.items():
    if options.op in (None, case[0]) and options.regime in (None, case[1]):
      known = {b: n for b, n in table.get((chip, *case), {}).items() if b in candidates}
      table[chip, *case] = known | measure((chip, *case), [b for b in candidates if b not in known])
      pathlib.Path(tuning_table.__file__).write_text(render(table))


if __name__ == '__main__':
  main()
