"""Unions of neighbouring queries' selections, counted and by chance, and what they say of blocks."""

import dataclasses

import numpy as np
import pytest

from benchmarks import selection_overlap
from pallas_kernels import tuning
from tests import tiny


def test_unions_are_those_of_sets():
  rng = np.random.default_rng(0)
  selected = rng.random((2, 3, 32, 40)) < 0.2
  for queries in (1, 4, 16):
    sizes = selection_overlap.union_sizes(selected, queries)
    assert sizes.shape == (2, 3, 32 // queries)
    for where in np.ndindex(sizes.shape):
      rows = selected[where[:2]][where[2] * queries : (where[2] + 1) * queries]
      assert sizes[where] == len(set().union(*(np.flatnonzero(row) for row in rows)))


def test_by_chance():
  """Of draws that do not know of each other."""
  rng = np.random.default_rng(0)
  draws = np.zeros((2000, 4, 50), bool)
  for row in draws.reshape(-1, 50):
    row[rng.choice(50, 10, replace=False)] = True
  found = selection_overlap.union_sizes(draws, 4).mean()
  assert selection_overlap.by_chance(np.array(50.0), 10, 4) == pytest.approx(found, rel=0.01)


def _selected(shift: int, time: int = 256, topk: int = 16) -> np.ndarray:
  """[2, 1, T, T]: the last keys of each query in layer 0; in layer 1 a window that moves by `shift`."""
  age = np.arange(time)[:, None] - np.arange(time)
  start = np.arange(time)[:, None] * shift % (time // 4)
  moving = (np.arange(time) >= start) & (np.arange(time) < start + topk)
  return np.stack([(age >= 0) & (age < topk), moving])[:, None]


def test_summary():
  """A window that moves by one key a query adds one; one that stays adds none."""
  found = selection_overlap.summary(_selected(0), 16)
  for queries, layers in found['layers'].items():
    assert layers == pytest.approx([1 + (queries - 1) / 16, 1.0])
    assert selection_overlap.new_rows(layers[0], queries) == pytest.approx(1 / 16)
    assert len(found['by_position'][queries]) == 8
    assert layers[0] < found['chance'][queries] < queries
  assert selection_overlap.mean(found, 8) == pytest.approx((1 + 7 / 16 + 1) / 2)


def test_blocks_for_what_was_measured(tmp_path):
  """Selections that coincide ask for blocks that are no smaller, disjoint ones for none larger."""
  same = selection_overlap.summary(_selected(0)[1:], 16)
  disjoint = {m: [float(m)] for m in selection_overlap.QUERIES}
  for op in ('sparse_mla', 'indexer_kl'):
    chosen, ours, large, least = selection_overlap.best('v5p', op, 'backward', same)
    assert least <= ours and large[0] >= chosen[0]
    _, ours, small, least = selection_overlap.best(
      'v5p', op, 'backward', same | {'layers': disjoint}
    )
    assert least <= ours and small[0] <= chosen[0]
  text = selection_overlap.tables(same)
  assert '| 16 | 1.00 | 1.00 | 0.000 | 2.88 |' in text and text.count('| v5p |') == 4
  selection_overlap.draw(same, tmp_path / 'plot.png')
  assert (tmp_path / 'plot.png').stat().st_size > 5000
  assert tuning.block_rows(16) / tuning.SELECTED == 2.875


def test_selections_of_a_model():
  """Of every layer in order, causal, index_topk a query or all that it sees."""
  config = dataclasses.replace(tiny.config(), index_topk=5)
  tokens = tiny.tokens(config, 2, 24)
  found = np.asarray(selection_overlap.selections(tiny.random_params(config), tokens, config))
  assert found.shape == (config.num_hidden_layers, 2, 24, 24)
  assert not np.any(found & ~np.tri(24, dtype=bool))
  assert (found.sum(-1) == np.minimum(np.arange(24) + 1, 5)).all()
  assert (found[0] != found[1]).any()
