"""The reader of compiler listings, on one written by hand and on a matmul compiled for real."""

import pytest

from pallas_kernels import bench, cases, schedule

# A loop over cycles 2 to 13: a branch at 3 skips the matmuls of 6 and 7, one at 8 goes round again.
# Delay slots: 2.
HEADER = '== CAPACITY:\nMXU, VALU, VLOAD:FILL, VSTORE:SPILL\n 2 4 3 2\n== UTILIZATION:\n'


def listing(loop_end: int = 11):
  bundles = ['{ nop }'] * 14
  bundles[3] = '{ sbr.rel (%p1) target bundleno = 8 }'
  bundles[6] = '{ %1 = vmatmul.f32 ;; %2 = vmatmul.f32 }'
  bundles[7] = '{ %3 = dma.hbm_to_vmem }'
  bundles[loop_end - 3] = '{ sbr.rel (!%p2) target bundleno = 2 }'
  units = [[0, 0, 0, 0] for _ in bundles]
  units[6], units[7], units[9] = [2, 1, 0, 0], [1, 4, 3, 0], [0, 2, 0, 2]
  text = HEADER + '\n'.join(' '.join(map(str, row)) for row in units)
  return schedule._Listing(bundles, text, delay_slots=2)


def test_loop_and_its_busy_units():
  found = listing()
  assert found.loops == [(2, 11)]
  body = found.steady([(2, 11)])
  assert body.cycles == 9
  assert (body.matmuls, body.dmas, body.spills, body.fills) == (2, 1, 2, 3)
  assert body.busy['MXU'] == pytest.approx(3 / 2 / 9)


def test_path_prefers_matmuls():
  """The branch around the matmuls is not taken, though it is shorter."""
  found = listing()
  ranges = found.path((2, 11))
  assert sum(b - a for a, b in ranges) == 9
  assert found.steady(ranges).matmuls == 2


def test_path_skips_code_without_matmuls():
  found = listing()
  found.sums[:, 0] = 0  # As if cycles 6 and 7 were a rare branch: 2..5 are run, then 8..10.
  assert sum(b - a for a, b in found.path((2, 11))) == 7


def test_listing_and_utilization_must_agree():
  with pytest.raises(ValueError, match='14 bundles but 1 lines'):
    schedule._Listing(['{}'] * 14, HEADER + '0 0 0 0', 2)


def test_loops_must_be_named():
  """A kernel that changed without `cases` is an error that says what to do, not a wrong number."""
  op, shape = cases.find('indexer_topk/train-4k')
  empty = schedule.Steady(1, {'MXU': 0.0, 'VALU': 0.0}, 0, 0, 1, 0)
  kernel = schedule.Kernel('k', empty, (schedule.Loop(1, empty, empty),), 0)
  with pytest.raises(cases.LoopsChangedError, match='Change Op.loops'):
    bench.summarize(f'{op.name}/{shape.name}', 'v5p', schedule.Report(1.0, 0, (kernel,)))


def test_names_are_unique():
  names = [f'{op.name}/{shape.name}' for op in (*cases.OPS, *cases.PEERS) for shape in op.shapes]
  assert len(names) == len(set(names))


@pytest.mark.tpu
@pytest.mark.parametrize('chip', schedule.CHIPS)
def test_a_matmul_runs_at_peak(chip):
  """Busy MXU cycles times FLOPs a cycle are the matmul's FLOPs: the unit of all shares."""
  op, shape = cases.find('matmul/512x1024x1024')
  report = schedule.analyze(f'pallas_kernels.cases:build:{op.name}/{shape.name}', chip)
  row = bench.summarize(f'{op.name}/{shape.name}', chip, report)
  assert row.peak == pytest.approx(row.mxu, abs=0.01)
  assert row.mxu > 0.75


def test_floors_need_no_compiler(capsys):
  """One token of a 128K context: all index keys, 256 bytes each, dominate; by HBM on a v6e."""
  assert bench.main(['--topology=v6e:2x2', '--op=indexer_topk_paged', '--floors']) == 0
  assert 'drafts-128k' in capsys.readouterr().out
  op, shape = cases.find('indexer_topk_paged/decode-128k')
  floor = bench.floor(op, shape, schedule.CHIPS['v6e'])
  assert floor.mflop == pytest.approx(2 * 131072 * 32 * 128 / 1e6, abs=0.1)
  assert floor.hbm_microseconds == pytest.approx(131072 * 256 / 1.64e12 * 1e6, rel=1e-3)
