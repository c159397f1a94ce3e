"""Block sizes: how they are chosen from measured cycles, and that the table is what was measured."""

import pathlib

import jax
import pytest

from pallas_kernels import schedule, tune, tuning, tuning_table
from pallas_kernels.indexer_kl import api as kl
from pallas_kernels.sparse_mla import api as sparse
from pallas_kernels.sparse_mla import paged

CASES = [(chip, *case) for chip in schedule.CHIPS for case in tune.CANDIDATES]


def test_cost_of_a_query():
  """Gathered: four queries read 2,048 + 3 * 256 rows, and half a chunk in vain."""
  assert tuning.cost('sparse_mla', 'gather', (4, 2, 512), 2048) == pytest.approx(
    2048 * (2816 + 256) / 512 / 4
  )
  assert tuning.cost('sparse_mla', 'gather', (1, 1, 512), 2500) == pytest.approx(2500 * 4)
  assert tuning.cost('sparse_mla', 'dense', (16, 4, 1024), 8192) == pytest.approx(
    8192 * (4096 + 512) / 1024 / 16
  )


def test_the_cheapest_wins_and_a_new_chip_gets_the_default(monkeypatch):
  key = 'sparse_mla', 'gather', 'forward'
  # A chunk of twice as many keys for twice the cycles wastes more at the end.
  cycles = {(4, 2, 512): 1000, (4, 2, 1024): 2000, (8, 4, 512): 1900}
  table = {('v5p', *key): cycles, (tuning.DEFAULT_CHIP, *key): {(8, 4, 512): 1}}
  monkeypatch.setattr(tuning_table, 'CYCLES', table)
  tuning.best_blocks.cache_clear()
  assert tuning.best_blocks('v5p', *key) == (4, 2, 512)
  assert tuning.best_blocks('v9', *key) == (8, 4, 512)
  tuning.best_blocks.cache_clear()
  cycles[4, 2, 1024] = 1850  # 0.2 % more than shorter chunks.
  assert tuning.best_blocks('v5p', *key) == (4, 2, 1024)
  tuning.best_blocks.cache_clear()
  cycles[4, 2, 1024], cycles[8, 4, 512] = 2000, 1510  # 0.7 % more than 4 queries a block.
  assert tuning.best_blocks('v5p', *key) == (8, 4, 512)
  tuning.best_blocks.cache_clear()


@pytest.mark.parametrize(('chip', 'op', 'regime', 'direction'), CASES)
def test_every_case_is_measured_and_its_blocks_are_possible(chip, op, regime, direction):
  measured = tuning_table.CYCLES[chip, op, regime, direction]
  best = tuning.best_blocks(chip, op, regime, direction)
  assert set(measured) <= set(tune.CANDIDATES[op, regime, direction])
  if op == 'sparse_mla_paged':
    assert paged.choose_chunk(chip, regime) == best[2]
    return
  api, made = (kl, kl.Tuning(*best)) if op == 'indexer_kl' else (sparse, sparse.tuned(best))
  config = api.make_config(1 / 16, 512, 202_752, regime, chip)
  assert getattr(config, direction) == made


def test_an_unknown_chip_is_refused_by_name():
  with pytest.raises(ValueError, match=r"\['tpu7x', 'v5p', 'v6e'\].*'v5'"):
    sparse.make_config(1 / 16, 512, 4096, chip='v5')


def test_the_table_is_written_as_it_stands():
  text = tune.render(tuning_table.CYCLES)
  assert text == pathlib.Path(tuning_table.__file__).read_text()
  found = {}
  exec(text, found)
  assert found['CYCLES'] == tuning_table.CYCLES


@pytest.mark.parametrize('case', tune.CANDIDATES)
def test_candidates_trace(case):
  """The kernel of the first candidate, with arguments that fit it."""
  blocks = ','.join(map(str, tune.CANDIDATES[case][0]))
  function, arguments = tune.build('/'.join((*case, blocks)), schedule.CHIPS['v6e'])
  assert jax.tree.leaves(jax.eval_shape(function, *arguments))


@pytest.mark.tpu
@pytest.mark.parametrize('chip', schedule.CHIPS)
def test_the_compiler_says_it_again(chip):
  key = chip, 'indexer_kl', 'gather', 'forward'
  blocks = tuning.best_blocks(*key)
  assert tune.measure(key, [blocks])[blocks] == pytest.approx(
    tuning_table.CYCLES[key][blocks], rel=0.05
  )
