"""Batches that grow and selections that shrink: sizes by step, and no row lost or repeated."""

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.train.batches import Plan, prefetched
from glm5_jax.train.stages import EVERYTHING
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import Objective, make_train_step
from tests import tiny

TIME = 24


class Stream:
  """Rows 0, 1, 2, ... as a data iterator with a position; row i holds nothing but the number i."""

  def __init__(self, rows_per_read: int, start: int = 0):
    self.rows, self.at = rows_per_read, start

  def __next__(self):
    rows = np.arange(self.at, self.at + self.rows, dtype=np.int32)[:, None]
    self.at += self.rows
    whole = np.broadcast_to(rows, (self.rows, TIME))
    ones = np.ones_like(whole)
    position = np.broadcast_to(np.arange(TIME, dtype=np.int32), whole.shape)
    return {
      'tokens': whole, 'targets': whole, 'weights': ones.astype(np.float32),
      'segment_ids': ones, 'positions': position,
    }  # fmt: skip

  def get_state(self):
    return self.at


def take(plan: Plan, step: int, start: int, count: int):
  """`count` fetched batches from `step` on, of a stream that stands at row `start`."""
  return list(itertools.islice(prefetched(Stream(plan.rows_per_read, start), plan, step), count))


def rows_of(fetched, plan: Plan) -> list[int]:
  """The row numbers of a batch's filled part; asserts that the rest holds nothing."""
  arrays = jax.device_get(fetched.arrays)
  filled = int(arrays.get('micro_batches', plan.micro_batches)) * plan.micro_rows
  assert arrays['tokens'].shape == (plan.rows, TIME)
  assert not any(a[filled:].any() for a in arrays.values() if np.ndim(a))
  assert arrays['weights'][:filled].all()
  return arrays['tokens'][:filled, 0].tolist()


GROWING = Plan(rows=12, micro_batches=6, first_rows=4, warmup_steps=8, seq_len=TIME)


def test_the_batch_grows_linearly_from_the_first_size_to_the_full_one():
  sizes = [GROWING.filled(s) * GROWING.micro_rows for s in range(12)]
  assert sizes[0] == 4 and sizes[8:] == [12] * 4
  assert sizes == sorted(sizes)
  # On the line from 4 at step 0 to 12 at step 8, to the nearest micro-batch of 2 rows.
  assert all(abs(size - (4 + s)) <= 1 for s, size in enumerate(sizes[:9]))


def test_sums_of_the_sizes():
  for step in range(15):
    rows = sum(GROWING.filled(s) * 2 for s in range(step))
    assert GROWING.rows_until(step) == rows and GROWING.tokens_until(step) == rows * TIME
  constant = Plan(rows=6, micro_batches=3, seq_len=TIME)
  assert [constant.rows_until(s) for s in (0, 1, 7)] == [0, 6, 42]
  assert constant.rows_per_read == 6 and GROWING.rows_per_read == 2


@pytest.mark.parametrize('plan', [GROWING, Plan(rows=6, micro_batches=3, seq_len=TIME)])
def test_every_row_comes_once_and_in_order(plan):
  batches = take(plan, 0, 0, 12)
  rows = [rows_of(b, plan) for b in batches]
  assert [len(r) for r in rows] == [plan.filled(s) * plan.micro_rows for s in range(12)]
  assert list(itertools.chain(*rows)) == list(range(plan.rows_until(12)))
  for step, batch in enumerate(batches):
    assert batch.state_after == plan.rows_until(step + 1)
    assert batch.tokens == len(rows[step]) * TIME
    assert batch.pairs.visible == len(rows[step]) * TIME * (TIME + 1) // 2


@pytest.mark.parametrize('stop', range(11))
def test_resumed_anywhere_the_stream_is_the_same(stop):
  whole = take(GROWING, 0, 0, 12)
  position = whole[stop - 1].state_after if stop else 0
  resumed = take(GROWING, stop, position, 12 - stop)
  for a, b in zip(whole[stop:], resumed, strict=True):
    jax.tree.map(np.testing.assert_array_equal, a.arrays, b.arrays)
    assert a[1:] == b[1:]


def _sparse_plan(**changes) -> Plan:
  sizes = {'rows': 2, 'seq_len': TIME, 'topk': 6, 'anneal_steps': 10} | changes
  return Plan(**sizes)


def test_k_falls_geometrically_from_all_keys_to_index_topk():
  plan = _sparse_plan(seq_len=2048, topk=64, anneal_steps=10)
  ks = [plan.topk_at(s) for s in range(14)]
  assert ks[0] == 2048 and ks[10:] == [64] * 4
  # Every step keeps the same share: 32 ** -0.1.
  np.testing.assert_allclose(np.divide(ks[1:11], ks[:10]), 32**-0.1, rtol=0.01)
  assert ks == [2048, 1448, 1024, 724, 512, 362, 256, 181, 128, 91, 64, 64, 64, 64]


def test_k_travels_with_the_batch_and_counts_in_the_pairs():
  plan = _sparse_plan()
  batches = take(plan, 0, 0, 13)
  ks = [int(b.arrays['topk']) for b in batches]
  assert ks == [plan.topk_at(s) for s in range(13)] and ks[0] == TIME and ks[-1] == 6
  for k, batch in zip(ks, batches, strict=True):
    assert batch.pairs.selected == 2 * sum(min(t + 1, k) for t in range(TIME))
  assert all(b.arrays['topk'].dtype == jnp.int32 for b in batches)


def test_without_annealing_k_is_fixed_and_nothing_travels():
  for plan, k in ((_sparse_plan(anneal_steps=0), 6), (Plan(rows=2, seq_len=TIME), None)):
    assert {plan.topk_at(s) for s in range(20)} == {k}
    assert 'topk' not in take(plan, 0, 0, 1)[0].arrays
  # Rows that are shorter than index_topk are dense anyway.
  assert _sparse_plan(topk=TIME + 1).topk_at(0) == TIME + 1


@pytest.mark.parametrize(
  'sizes, message',
  [
    ({'rows': 8, 'micro_batches': 3}, 'train.grad_accum=3 must divide data.batch_size=8'),
    ({'rows': 8, 'micro_batches': 0}, 'train.grad_accum=0'),
    ({'rows': 8, 'first_rows': 4}, 'go together'),
    ({'rows': 8, 'warmup_steps': 4}, 'go together'),
    ({'rows': 8, 'first_rows': -4, 'warmup_steps': 4}, 'both positive'),
    ({'rows': 8, 'first_rows': 4, 'warmup_steps': 4}, 'raise train.grad_accum'),
    ({'rows': 8, 'micro_batches': 4, 'first_rows': 3, 'warmup_steps': 4}, 'multiple of the 2 rows'),
    ({'rows': 8, 'micro_batches': 4, 'first_rows': 10, 'warmup_steps': 4}, 'at most data.batch_size=8'),
    ({'rows': 8, 'anneal_steps': 5}, 'train.topk_anneal_steps is for sparse attention'),
  ],
)  # fmt: skip
def test_impossible_sizes(sizes, message):
  with pytest.raises(ValueError, match=message) as error:
    Plan(**sizes)
  assert '\n' not in str(error.value)


# --- A step on a batch that is partly empty ---

CONFIG = tiny.config()


def _batch(rows: int, padded: bool):
  """Random rows, some targets without weight; with `padded`, rows end in padding of various lengths."""
  rng = np.random.default_rng(5)
  tokens = tiny.tokens(CONFIG, rows, TIME + 1, seed=6)
  segments = np.ones((rows, TIME), np.int32)
  if padded:
    segments *= np.arange(TIME) < rng.integers(TIME // 2, TIME + 1, (rows, 1))
  return {
    'tokens': tokens[:, :-1] * segments, 'targets': tokens[:, 1:] * segments,
    'weights': ((rng.random((rows, TIME)) < 0.8) * segments).astype(np.float32),
    'segment_ids': segments, 'positions': np.broadcast_to(np.arange(TIME, dtype=np.int32), segments.shape),
  }  # fmt: skip


def _step(batch, grad_accum: int):
  """New parameters (so that old - new is the gradient), the metrics."""
  objective = Objective(EVERYTHING, mtp_steps=2, grad_accum=grad_accum, indexer_loss_weight=0.5)
  tx = optax.sgd(1.0)
  step = make_train_step(CONFIG, objective, tx, optax.constant_schedule(1.0))
  state = TrainState.create(tiny.random_params(CONFIG), tx, 0)
  run = step.lower(state, batch).compile(compiler_options=tiny.FAST_COMPILE)
  state, metrics = run(state, batch)
  return jax.device_get((state.params, metrics))


@pytest.mark.parametrize(
  'filled, padded, plain_accum', [(3, False, 1), (3, True, 3), (1, False, 1)]
)
def test_a_partly_filled_step_is_a_plain_step_on_its_rows(filled, padded, plain_accum):
  """With rows of equal length also without accumulation; else means are those over micro-batches."""
  rows = _batch(2 * filled, padded)
  full = {k: np.pad(a, ((0, 8 - 2 * filled), (0, 0))) for k, a in rows.items()}
  # What is empty must not even be looked at: fill it with what would show.
  full['tokens'][2 * filled :] = 7
  got, got_metrics = _step(full | {'micro_batches': np.int32(filled)}, 4)
  want, want_metrics = _step(rows, plain_accum)
  assert got_metrics.keys() == want_metrics.keys()
  for name in sorted(want_metrics):
    scale = max(1.0, float(np.max(np.abs(want_metrics[name]))))
    tiny.close(
      f'{filled} of 4: {name}', got_metrics[name] / scale, want_metrics[name] / scale, 2e-6
    )
  before = jax.device_get(tiny.random_params(CONFIG))
  for (path, a), b, start in zip(
    jax.tree_util.tree_leaves_with_path(got), jax.tree.leaves(want), jax.tree.leaves(before),
    strict=True,
  ):  # fmt: skip
    gradient = start - b
    tiny.close(jax.tree_util.keystr(path), a, b, 2e-6 + 2e-5 * float(np.max(np.abs(gradient))))
  moved = [bool((a != b).any()) for a, b in zip(*map(jax.tree.leaves, (want, before)), strict=True)]
  assert all(moved), 'the comparison sees every parameter'
