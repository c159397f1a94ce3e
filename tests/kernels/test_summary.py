"""The tables of docs/kernels.md, from rows written by hand."""

import json

import pytest

from pallas_kernels import cases, summary, tuning
from pallas_kernels.schedule import CHIPS


def row(case: str, chip: str, **changes) -> dict:
  op, shape = case.split('/')
  return dict(
    op=op, shape=shape, chip=chip, steady_cycles=2000, mxu=0.9, spills=1, fills=2, dmas=500,
    cycles_per_query=2500.0, microseconds=1.0, of_floor=2.0, hbm_factor=1.5,
    stages={'scores': 3.0, 'threshold': 1.0},
  ) | changes  # fmt: skip


def all_rows(**changes):
  lists = {f'sparse_mla_lists/blocks-of-{m}' for m in (2, 4, 8, 16)}
  names = {*summary.SHOWN, *(aim.case for aim in summary.AIMS), *lists}
  lines = [json.dumps(row(name, chip, **changes)) for name in names for chip in CHIPS]
  return summary.read(['op  shape', *lines, json.dumps(dict(op='x', error='refused'))])


def test_every_case_exists():
  for name in (*summary.SHOWN, *(aim.case for aim in summary.AIMS)):
    cases.find(name)


def test_aims_are_met_or_missed():
  lines = summary.aims(all_rows()).splitlines()
  cycles = next(line for line in lines if 'cycles a query' in line)
  assert '2,500 (<= 2,630): met' in cycles and '2,500 (<= 2,190): missed' in cycles
  busy = next(line for line in lines if 'train-4k |' in line)
  assert '90 % (>= 90 %): met' in busy
  share = next(line for line in lines if 'selection' in line)
  assert '25 % (<= 33.3 %): met' in share


def test_costs_say_what_was_not_read():
  rows = all_rows()
  del rows['indexer_topk', 'train-128k', 'v6e']
  text = summary.costs(rows)
  assert '| indexer_topk/train-128k | v6e | not read |' in text
  assert '| indexer_topk/train-128k | v5p | 0.5 | 2,500 | 1 | 2.00 | 90 % |' in text


def test_a_layer_scores_half_of_all_pairs_and_reads_larger_unions():
  rows = all_rows()
  stages = summary.layer_seconds(rows, 'v6e', coincide=True)
  assert stages['indexer_topk'] == pytest.approx(0.5e-6 * 202_752)
  # Each of a query's two microseconds: the kernel, and the lists that it reads.
  assert stages['sparse_mla'] == stages['indexer_kl backward'] == pytest.approx(2e-6 * 202_752)
  grown = summary.layer_seconds(rows, 'v6e', coincide=False)
  queries = tuning.best_blocks('v6e', 'sparse_mla', 'gather', 'forward')[0]
  assert grown['sparse_mla'] == pytest.approx((1e-6 * (1 + (queries - 1) / 8) + 1e-6) * 202_752)
  assert grown['indexer_topk'] == stages['indexer_topk']
  assert len(summary.layer(rows).splitlines()) == 2 + 2 * len(CHIPS)
  del rows['indexer_kl', 'sparse-200k', 'v5p']
  assert len(summary.layer(rows).splitlines()) == 2 + 2 * (len(CHIPS) - 1)
  assert summary.layer({}) == ''
