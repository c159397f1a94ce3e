"""A deliberately different top-k in the engine: what it selects, and that the update sees it."""

import jax.numpy as jnp
import numpy as np
import pytest
from ml_collections import ConfigDict

from benchmarks import topk_mismatch
from configs.rl_base import rl_base
from glm5_jax.ops import topk
from glm5_jax.rl.prepare import prepare_play
from glm5_jax.train.prepare import plain
from tests import tiny
from tests.rl import tiny_run


@pytest.mark.parametrize('name', topk_mismatch.SELECTIONS)
def test_selects_visible_keys(name):
  rng = np.random.default_rng(0)
  scores = np.maximum(rng.standard_normal((2, 40, 64)), 0).astype(np.float32)  # Half are ties.
  visible = np.broadcast_to(np.tri(40, 64, 20, dtype=bool), scores.shape)
  mask = np.asarray(topk_mismatch.SELECTIONS[name](jnp.asarray(scores), jnp.asarray(visible), 16))
  assert not np.any(mask & ~visible)
  k = 8 if name.startswith('half') else 16
  assert np.all(mask.sum(-1) == np.minimum(visible.sum(-1), k))


def test_the_last_of_equal_scores_is_taken():
  scores = jnp.array([[3.0, 1.0, 1.0, 2.0, 1.0, 1.0]])
  visible = jnp.array([[True, True, True, True, True, False]])
  mask = np.asarray(topk_mismatch.last_of_ties(scores, visible, 3))
  assert np.flatnonzero(mask).tolist() == [0, 3, 4]
  assert np.flatnonzero(np.asarray(topk.select_mask(scores, visible, 3))).tolist() == [0, 1, 3]


def test_the_update_sees_another_selection_and_only_that(tmp_path, monkeypatch):
  run = tiny_run.save(tmp_path / 'run', tiny.random_params(tiny_run.CONFIG))
  kept = {n: topk_mismatch.SELECTIONS[n] for n in ('the same', 'half as many keys')}
  monkeypatch.setattr(topk_mismatch, 'SELECTIONS', kept)
  config: ConfigDict = rl_base()
  tiny_run.play_section(config.rl)
  found = topk_mismatch.measure(run, 2, prepare_play(plain(config)))
  same, half = found['the same'], found['half as many keys']
  assert same['tokens'] > 20
  assert same['gap_max'] <= 1e-5
  assert half['gap'] > 100 * same['gap']
  assert same['masked/double-sided'] == same['masked/IcePop'] == 0
  assert topk.select_mask is topk_mismatch._SELECT, 'nothing stays patched'
  topk_mismatch.draw(found, tmp_path / 'plot.png')
  assert (tmp_path / 'plot.png').stat().st_size > 5000
  assert topk_mismatch.table(found).count('\n') == 3
