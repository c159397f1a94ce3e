"""The tables of docs/kernels.md over all ops and chips, from what `bench` printed.

  python -m pallas_kernels.bench --topology=v5p:2x2x1 > v5p.txt      # And the other chips.
  python -m pallas_kernels.summary v5p.txt v6e.txt tpu7x.txt

Three tables in markdown: costs of an op and chip, what the ops aim at, and one layer over one
causal sequence of 202,752 tokens.
"""

import argparse
import json
import pathlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

from pallas_kernels.schedule import CHIPS
from pallas_kernels.tuning import best_blocks, block_rows

Row = Mapping[str, Any]  # A line of `bench`, the fields of `bench.Row`.
Rows = Mapping[tuple[str, str, str], Row]  # By op, shape and chip.

SHOWN = (
  'indexer_topk/train-128k', 'indexer_topk/train-200k',
  'sparse_mla/train-4k', 'sparse_mla/train-200k',
  'sparse_mla/train-4k-backward', 'sparse_mla/train-200k-backward',
  'indexer_kl/dense-200k', 'indexer_kl/sparse-200k',
  'indexer_kl/dense-200k-backward', 'indexer_kl/sparse-200k-backward',
  'sparse_mla_lists/blocks-of-8', 'sparse_mla_lists/blocks-of-16',
  'indexer_topk_paged/decode-128k', 'sparse_mla_paged/decode-4k', 'sparse_mla_paged/decode-128k',
)  # fmt: skip
TOKENS = 202_752
# What one layer runs, in this order.
_LAYER = (
  ('indexer_topk', 'train-200k'), ('sparse_mla', 'train-200k'), ('indexer_kl', 'sparse-200k'),
  ('sparse_mla', 'train-200k-backward'), ('indexer_kl', 'sparse-200k-backward'),
)  # fmt: skip
# Cycles at least that issuing one copy takes: 7 scalar operations on 2 slots.
_ISSUE = 3.5


class Aim(NamedTuple):
  """A bound of one case, on the chips in the order of `CHIPS`."""

  case: str
  what: str
  value: Callable[[Row], float]
  bounds: tuple[float, float, float]
  at_least: bool = False
  unit: str = ''


def _selection(row: Row) -> float:
  return 1 - row['stages']['scores'] / sum(row['stages'].values())


def _busy(row: Row) -> float:
  return 100 * row['mxu']


AIMS = (
  Aim('indexer_topk/train-128k', 'MXU busy, scores', _busy, (92, 92, 92), True, ' %'),
  Aim(
    'indexer_topk/train-128k', 'selection of all cycles', lambda r: 100 * _selection(r),
    (33.3, 33.3, 33.3), unit=' %',
  ),
  Aim('sparse_mla/train-4k', 'MXU busy, forward', _busy, (90, 65, 65), True, ' %'),
  Aim('sparse_mla/train-4k-backward', 'MXU busy, backward', _busy, (96, 83, 84), True, ' %'),
  Aim(
    'sparse_mla/train-200k', 'cycles a query', lambda r: r['cycles_per_query'], (2630, 2190, 2230)
  ),
  Aim(
    'sparse_mla/train-200k', 'issue of copies over cycles',
    lambda r: _ISSUE * r['dmas'] / r['steady_cycles'], (1, 1, 1),
  ),
  Aim('sparse_mla/train-200k-backward', 'MXU busy, backward', _busy, (96, 83, 84), True, ' %'),
  Aim(
    'sparse_mla/train-200k-backward', 'HBM over the floor', lambda r: r['hbm_factor'],
    (1.5, 1.5, 1.5),
  ),
)  # fmt: skip


def read(lines: Iterable[str]) -> dict[tuple[str, str, str], Row]:
  """The JSON lines among those that `bench` prints; cases that were refused are left out."""
  rows = [json.loads(line) for line in lines if line.startswith('{')]
  return {(row['op'], row['shape'], row['chip']): row for row in rows if 'error' not in row}


def _find(rows: Rows, case: str, chip: str) -> Row | None:
  op, shape = case.split('/')
  return rows.get((op, shape, chip))


def _markdown(lines: Sequence[Sequence[str]]) -> str:
  head, *body = lines
  text = ['| ' + ' | '.join(line) + ' |' for line in (head, ['---'] * len(head), *body)]
  return '\n'.join(text)


def costs(rows: Rows) -> str:
  """One line an op and chip; 'not read' where there is no row."""
  lines = [
    ['op/shape', 'chip', 'floor, us', 'cycles a query', 'us', 'times the floor', 'MXU',
     'spill / fill', 'copies', 'HBM over the floor'],
  ]  # fmt: skip
  for case in SHOWN:
    for chip in CHIPS:
      row = _find(rows, case, chip)
      if row is None:
        lines.append([case, chip, 'not read', *[''] * (len(lines[0]) - 3)])
        continue
      lines.append([
        case, chip, f'{row["microseconds"] / row["of_floor"]:.3g}',
        f'{row["cycles_per_query"]:,.0f}', f'{row["microseconds"]:.3g}', f'{row["of_floor"]:.2f}',
        f'{100 * row["mxu"]:.0f} %', f'{row["spills"]:,} / {row["fills"]:,}',
        f'{row["dmas"]:,}', f'{row["hbm_factor"]:.2f}',
      ])  # fmt: skip
  return _markdown(lines)


def aims(rows: Rows) -> str:
  """One line an aim: value and bound of each chip, and whether it is met."""
  lines = [['op/shape', 'aim', *CHIPS]]
  for aim in AIMS:
    line = [aim.case, aim.what]
    for chip, bound in zip(CHIPS, aim.bounds, strict=True):
      row = _find(rows, aim.case, chip)
      if row is None:
        line.append('not read')
        continue
      value = aim.value(row)
      met = value >= bound if aim.at_least else value <= bound
      sign = '>=' if aim.at_least else '<='
      digits = f'{value:,.0f}' if value >= 1000 else f'{value:.3g}'
      verdict = 'met' if met else 'missed'
      line.append(f'{digits}{aim.unit} ({sign} {bound:,.4g}{aim.unit}): {verdict}')
    lines.append(line)
  return _markdown(lines)


def _block(chip: str, op: str, shape: str) -> int:
  """Queries of a block of a gathered op."""
  direction = 'backward' if shape.endswith('backward') else 'forward'
  return best_blocks(chip, op, 'gather', direction)[0]


def layer_seconds(rows: Rows, chip: str, coincide: bool) -> dict[str, float]:
  """Seconds of a chip by stage; causal, so that the indexer scores half of all pairs.

  A gathered op has its lists made within it, for blocks of its own.

  Args:
    rows: with 'train-200k' and 'sparse-200k' of `chip`, forward and backward, and the lists.
    chip: a key of `CHIPS`.
    coincide: whether queries of a block select the same keys, or share what `tuning` assumes.

  Raises:
    KeyError: a row is missing.
  """

  def seconds(op: str, shape: str) -> float:
    query = rows[op, shape, chip]['microseconds']
    if op != 'indexer_topk':
      queries = _block(chip, op, shape)
      query *= 1.0 if coincide else block_rows(queries) / block_rows(1)
      query += rows['sparse_mla_lists', f'blocks-of-{queries}', chip]['microseconds']
    return query * 1e-6 * TOKENS

  stages = {}
  for op, shape in _LAYER:
    name = f'{op} backward' if shape.endswith('backward') else op
    stages[name] = seconds(op, shape) / (2 if op == 'indexer_topk' else 1)
  return stages


def layer(rows: Rows) -> str:
  """One line a chip and assumption, of the chips with all rows; none if there are none."""
  lines: list[list[str]] = []
  for chip in CHIPS:
    gathered = [case for case in _LAYER if case[0] != 'indexer_topk']
    lists = [('sparse_mla_lists', f'blocks-of-{_block(chip, *case)}') for case in gathered]
    if any((*case, chip) not in rows for case in (*_LAYER, *lists)):
      continue
    for coincide in (True, False):
      stages = layer_seconds(rows, chip, coincide)
      if not lines:
        lines.append(['chip', 'selections of a block', *stages, 'forward', 'with backward'])
      names = 'coincide' if coincide else '1/8 new a query'
      forward = stages['indexer_topk'] + stages['sparse_mla']
      numbers = [*stages.values(), forward, sum(stages.values())]
      lines.append([chip, names, *(f'{number:.3f}' for number in numbers)])
  return _markdown(lines) if lines else ''


def main(argv: Sequence[str] | None = None) -> None:
  """Prints the tables."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('files', nargs='+', help='what bench printed, any number of chips')
  options = parser.parse_args(argv)
  lines = [line for file in options.files for line in pathlib.Path(file).read_text().splitlines()]
  rows = read(lines)
  print('\n\n'.join((costs(rows), aims(rows), layer(rows))))


if __name__ == '__main__':
  main()
