"""The kernels of the indexer's KL against a float64 oracle, interpreted with race detection."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.indexer_kl import Tuning, Visible, indexer_kl
from pallas_kernels.indexer_kl.layout import APART, FILLER, keep_apart
from pallas_kernels.interpret import races_found
from pallas_kernels.sparse_mla.layout import row_lists

SCALE = 0.2
# Uninitialised memory, outputs included, reads as NaN.
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')
BLOCKS = Tuning(8, 2, 16, 8)


class Problem(NamedTuple):
  """Arguments of `indexer_kl` in float64, and what it is to be differentiated with."""

  q: np.ndarray
  latents: np.ndarray
  lse: np.ndarray
  index_q: np.ndarray
  weights: np.ndarray
  index_k: np.ndarray
  chosen: np.ndarray  # [B, T, S] bool.
  cotangent: np.ndarray


def problem(chosen, heads=3, width=10, index_heads=2, dim=5, seed=0, dtype='float32') -> Problem:
  """Random arguments, rounded to `dtype`, with the true log-sum-exp over `chosen` [B, T, S]."""
  rng = np.random.default_rng(seed)
  batch, time, size = chosen.shape

  def draw(*shape):
    return np.asarray(jnp.asarray(rng.standard_normal(shape), dtype), np.float64)

  q, latents = draw(batch, time, heads, width), draw(batch, size, width)
  logits = SCALE * np.einsum('btnl,bsl->btns', q, latents)
  logits = np.where(chosen[:, :, None], logits, -np.inf)
  lse = np.logaddexp.reduce(logits, axis=-1)
  index_q, index_k = draw(batch, time, index_heads, dim), draw(batch, size, dim)
  weights, cotangent = rng.standard_normal((2, batch, time, index_heads))
  return Problem(q, latents, lse, index_q, weights, index_k, chosen, cotangent[..., 0])


def oracle(x: Problem):
  """KL [B, T], then gradients for index_q, weights and index_k, by loops; zero without keys."""
  kl = np.zeros(x.chosen.shape[:2])
  d_q, d_weights, d_k = (np.zeros_like(a) for a in (x.index_q, x.weights, x.index_k))
  for b, t in np.ndindex(*kl.shape):
    keys = np.flatnonzero(x.chosen[b, t])
    if not len(keys):
      continue
    logits = SCALE * x.q[b, t] @ x.latents[b, keys].T
    probs = np.exp(logits - np.logaddexp.reduce(logits, axis=1)[:, None])
    target = probs.sum(axis=0) / probs.sum()  # The L1 norm of the sum over heads.
    dots = x.index_q[b, t] @ x.index_k[b, keys].T
    scores = x.weights[b, t] @ np.maximum(dots, 0)
    log_index = scores - np.logaddexp.reduce(scores)
    kl[b, t] = target @ (np.log(target) - log_index)
    d_scores = x.cotangent[b, t] * (np.exp(log_index) - target)
    d_weights[b, t] = np.maximum(dots, 0) @ d_scores
    d_dots = x.weights[b, t][:, None] * (dots > 0) * d_scores
    d_q[b, t] = d_dots @ x.index_k[b, keys]
    d_k[b, keys] += d_dots.T @ x.index_q[b, t]
  return kl, d_q, d_weights, d_k


def to_indices(chosen: np.ndarray, k: int) -> np.ndarray:
  """[B, T, S] bool -> [B, T, k] ascending positions, -1 padded."""
  indices = np.full((*chosen.shape[:2], k), -1, np.int32)
  for b, t in np.ndindex(*chosen.shape[:2]):
    keys = np.flatnonzero(chosen[b, t])
    indices[b, t, : len(keys)] = keys
  return indices


@functools.partial(jax.jit, static_argnames=('options',))
def _run(arguments, selection, cotangent, *, options):
  loss = functools.partial(indexer_kl, selection=selection, scale=SCALE, **dict(options))
  kl, pull = jax.vjp(loss, *arguments)
  return kl, pull(cotangent)


def run(x: Problem, selection, dtype='float32', **options):
  """KL and the gradients of all six arguments."""
  q, latents, index_q, index_k = (jnp.asarray(a, dtype) for a in (x[0], x[1], x[3], x[5]))
  lse, weights, cotangent = (jnp.asarray(a, jnp.float32) for a in (x.lse, x.weights, x.cotangent))
  arguments = q, latents, lse, index_q, weights, index_k
  options = {'implementation': 'tpu', 'chip': 'v6e', 'interpret': INTERPRET} | options
  options = {'forward': BLOCKS, 'backward': BLOCKS} | options
  return _run(arguments, selection, cotangent, options=tuple(options.items()))


def check(x: Problem, got, tolerance: float) -> None:
  """Values within `tolerance` of the largest, and no gradient for what makes the target."""
  kl, (d_q, d_latents, d_lse, *gradients) = got
  names = ('kl', 'index_q', 'weights', 'index_k')
  for name, a, b in zip(names, (kl, *gradients), oracle(x), strict=True):
    bound = tolerance * max(1.0, np.max(np.abs(b)))
    np.testing.assert_allclose(np.asarray(a, np.float64), b, rtol=0, atol=bound, err_msg=name)
  for name, a in (('q', d_q), ('latents', d_latents), ('lse', d_lse)):
    assert not np.any(a), f'{name} is the target: nothing may train it'


def random_selection(batch: int, time: int, size: int, k: int) -> np.ndarray:
  """Selections of 0 to k keys."""
  rng = np.random.default_rng(7)
  chosen = np.zeros((batch, time, size), bool)
  for b, t in np.ndindex(batch, time):
    count = min((3 * b + 2 * t) % (k + 1), size)
    chosen[b, t, rng.choice(size, count, replace=False)] = True
  return chosen


@pytest.mark.parametrize('regime', ['dense', 'gather'])
def test_sparse_stage(regime):
  """Two sequences of odd lengths in two kernel calls each way; rows with no, few and K keys."""
  x = problem(random_selection(2, 5, 37, 9))
  got = run(x, to_indices(x.chosen, 9), regime=regime, span=6)
  check(x, got, 1e-5)
  assert not races_found()


# Keys of a matmul: two units a chunk, and one.
@pytest.mark.parametrize(('chip', 'unit'), [('v5p', 8), ('v6e', 16)])
def test_rows_that_neighbouring_blocks_share_are_summed_in_order(chip, unit):
  """Rows that are to be written may not be fetched yet: of blocks without keys, of one chunk, and
  of several that begin where the one before ended, on one core and on two."""
  many, few, none, last = range(60), range(4), range(0), range(40, 100)
  blocks = (many, many, few, few, none, few, last, many, last, few, last, none)
  chosen = np.zeros((1, 8 * len(blocks), 100), bool)
  for t in range(chosen.shape[1]):
    chosen[0, t, list(blocks[t // 8])] = True
  x = problem(chosen, seed=5)
  options = {'regime': 'gather', 'chip': chip, 'backward': Tuning(8, 2, 16, unit)}
  first = run(x, to_indices(chosen, 60), **options)
  again = run(x, to_indices(chosen, 60), **options)
  check(x, first, 2e-5)
  assert not races_found()
  for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()


@pytest.mark.parametrize('cores', [1, 2])
@pytest.mark.parametrize('seed', range(4))
def test_chunks_that_are_near_in_the_walk_share_no_row(cores, seed):
  """What the gathered backward needs, filler rows and the walk's end included; nothing is lost."""
  rng = np.random.default_rng(seed)
  queries, chunk, total = 2, 4, 60
  indices = np.full((12 * queries, 16), -1, np.int32)
  for row in indices:
    low = rng.integers(total - 16)
    found = np.flatnonzero(rng.random(min(total, low + 24) - low) < rng.random())[:16]
    row[: len(found)] = low + found
  lists, masks, counts = row_lists(jnp.asarray(indices), queries, chunk, total)
  before = lists.reshape(12, -1, 1, chunk), masks.reshape(12, -1, 1, chunk), counts
  after = keep_apart(*before, total, cores)
  for block in range(12):
    kept = [
      [
        (int(row), int(mask))
        for row, mask in zip(x.ravel()[: n * chunk], y.ravel()[: n * chunk], strict=True)
        if row < total
      ]
      for x, y, n in (
        [np.asarray(z)[block] for z in before],
        [np.asarray(after[name])[block] for name in ('lists', 'masks', 'counts')],
      )
    ]
    assert kept[0] == kept[1]
  counts = np.asarray(after['counts'])
  assert np.all(counts - np.asarray(before[2]) <= APART)
  for blocks in np.split(np.arange(12), cores):
    walk = [np.asarray(after['lists'])[b, c] for b in blocks for c in range(counts[b])]
    walk += [np.asarray(after['lists'])[blocks[-1], c] for c in range(2)]
    for i, rows in enumerate(walk):
      assert len(np.unique(rows)) == chunk
      assert rows.max() < total + (FILLER - 1) * chunk
      for near in walk[max(0, i - APART) : i]:
        assert not np.intersect1d(rows, near).size


def packed(q_slot, q_segment, k_segment) -> tuple[Visible, np.ndarray]:
  """Visibility for the op, and as a mask by loops."""
  visible = Visible(*(np.asarray(a, np.int32)[None] for a in (q_slot, q_segment, k_segment)))
  mask = np.zeros((1, len(q_slot), len(k_segment)), bool)
  for t, s in np.ndindex(*mask.shape[1:]):
    mask[0, t, s] = s <= q_slot[t] and q_segment[t] == k_segment[s] > 0
  return visible, mask


def test_dense_stage():
  """The last 10 queries of a packed sequence: two documents, then padding."""
  segments = [1] * 20 + [2] * 12 + [0] * 3
  visible, mask = packed(range(25, 35), segments[25:], segments)
  x = problem(mask, seed=1)
  check(x, run(x, visible), 1e-5)
  assert not races_found()
  # Rows without keys, rows of a few and keys of another document are all there.
  assert {0, 6, 12} <= set(mask.sum(axis=-1).ravel().tolist())


def test_dense_stage_equals_a_selection_of_everything():
  visible, mask = packed(range(6), [1] * 6, [1] * 6)
  x = problem(mask, seed=2)
  dense, sparse = (
    run(x, selection, implementation='reference', chip=None, interpret=False)
    for selection in (visible, to_indices(mask, 8))
  )
  check(x, dense, 1e-5)
  check(x, sparse, 1e-5)


@pytest.mark.parametrize(('regime', 'runs'), [('dense', 3), ('gather', 20)])
def test_bfloat16_on_two_cores_is_deterministic(regime, runs):
  """v5p's two cores sum key gradients apart. Scores' gradients round to 8 bits before a matmul."""
  x = problem(random_selection(1, 16, 20, 20), heads=2, seed=3, dtype='bfloat16')
  indices = to_indices(x.chosen, 20)
  first = run(x, indices, 'bfloat16', regime=regime, chip='v5p')
  check(x, first, 1e-2)
  assert not races_found()
  for _ in range(runs - 1):
    again = run(x, indices, 'bfloat16', regime=regime, chip='v5p')
    for a, b in zip(jax.tree.leaves(first), jax.tree.leaves(again), strict=True):
      np.testing.assert_array_equal(np.asarray(a, np.float32), np.asarray(b, np.float32))


def test_large_scores_do_not_overflow():
  """Index scores of hundreds, of both signs: the softmax is relative to its maximum."""
  x = problem(random_selection(1, 8, 37, 20), seed=4)
  x = x._replace(weights=100 * x.weights)
  check(x, run(x, to_indices(x.chosen, 20), regime='dense'), 2e-5)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'implementation': 'gpu'}, "use 'reference' or 'tpu'"),
    ({'selection': np.zeros((1, 3, 2), np.int64)}, 'int32'),
    ({'index_k': np.zeros((1, 4, 5), jnp.bfloat16)}, 'bfloat16, float32'),
    (
      {'selection': Visible(*(np.zeros((1, n), np.int32) for n in (3, 3, 4))), 'regime': 'gather'},
      'all visible keys are dense',
    ),
    (
      {'selection': Visible(*(np.zeros((1, n), np.int32) for n in (3, 3, 5)))},
      r'k_segment has shape \(1, 5\), expected \(1, 4\)',
    ),
  ],
)
def test_errors_say_what_was_expected(change, message):
  arguments = {
    'q': np.zeros((1, 3, 2, 24), np.float32),
    'latents': np.zeros((1, 4, 24), np.float32),
    'lse': np.zeros((1, 3, 2), np.float32),
    'index_q': np.zeros((1, 3, 2, 5), np.float32),
    'index_weights': np.zeros((1, 3, 2), np.float32),
    'index_k': np.zeros((1, 4, 5), np.float32),
    'selection': np.zeros((1, 3, 2), np.int32),
    'scale': 1.0,
    'implementation': 'tpu',
  }
  with pytest.raises(ValueError, match=message):
    indexer_kl(**(arguments | change))


@pytest.mark.parametrize('sizes', [(12, 2, 16, 8), (8, 2, 16, 12)])
def test_impossible_blocks(sizes):
  with pytest.raises(ValueError, match='power of two'):
    Tuning(*sizes)
