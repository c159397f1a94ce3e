"""Decoding from pages against float64 numpy, in TPU interpret mode with race detection.

Whatever no sequence owns is NaN: pages of nobody, the rows behind a sequence's end, and the pages
that a table's unused entries name.
"""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import indexer_topk_paged, sparse_mla_paged
from pallas_kernels.interpret import races_found
from pallas_kernels.sparse_mla import pack_pages, read_pages, unpack_pages, write_pages

INTERPRET = pltpu.InterpretParams(detect_races=True)


def paged(rows: list[np.ndarray], page_size: int, width: int, rng: np.random.Generator):
  """Rows [S, W] of each sequence in a pool [P, page_size, W] of shuffled pages, and its table."""
  count = [-(-len(x) // page_size) for x in rows]
  pages = rng.permutation(np.arange(1, sum(count) + 3))
  pool = np.full((len(pages) + 1, page_size, rows[0].shape[1]), np.nan, np.float32)
  table = np.full((len(rows), width), pages[-1], np.int32)  # A page of nobody.
  for b, x in enumerate(rows):
    own, pages = pages[: count[b]], pages[count[b] :]
    table[b, : count[b]] = own
    for n, page in enumerate(own):
      part = x[n * page_size : (n + 1) * page_size]
      pool[page, : len(part)] = part
  return pool, table


SCALE, LATENT = 0.2, 16


def attention_problem(lengths, time, k, page_size, width, dtype, seed):
  """q, pages, table, indices, and the rows of each sequence in float64."""
  rng = np.random.default_rng(seed)
  heads, features = 3, LATENT + 8
  rows = [
    np.asarray(jnp.asarray(rng.normal(size=(n, features)), dtype), np.float32) for n in lengths
  ]
  pool, table = paged(rows, page_size, width, rng)
  indices = np.full((len(lengths), time, k), -1, np.int32)
  for b, length in enumerate(lengths):
    for t in range(time):
      visible = max(0, length - time + t + 1)
      chosen = np.sort(rng.permutation(visible)[:k])
      indices[b, t, : len(chosen)] = chosen
  q = jnp.asarray(rng.normal(size=(len(lengths), time, heads, features)), dtype)
  return q, jnp.asarray(pool, dtype), jnp.asarray(table), jnp.asarray(indices), rows


def attention_oracle(q, indices, rows):
  q = np.asarray(q, np.float64)
  out = np.zeros((*q.shape[:3], LATENT))
  lse = np.full(q.shape[:3], -np.inf)
  for b, t in np.ndindex(*q.shape[:2]):
    chosen = [i for i in np.asarray(indices[b, t]) if i >= 0]
    if chosen:
      keys = rows[b][chosen].astype(np.float64)
      logits = SCALE * q[b, t] @ keys.T
      lse[b, t] = np.logaddexp.reduce(logits, axis=1)
      out[b, t] = np.exp(logits - lse[b, t][:, None]) @ keys[:, :LATENT]
  return out, lse


@functools.partial(jax.jit, static_argnames=('options',))
def _attend(q, pages, table, indices, *, options):
  return sparse_mla_paged(q, pages, table, indices, SCALE, LATENT, **dict(options))


# Lengths of the sequences, one of them 1 and none a multiple of the page; new tokens a sequence; K;
# page size; pages of a row.
PAGED = {
  'one token': ((1, 37, 61), 1, 12, 8, 9),
  'drafts': ((1, 45, 3), 4, 10, 16, 4),
  'five tokens, an empty sequence': ((29, 0), 5, 40, 8, 6),
}


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=['float32', 'bfloat16'])
@pytest.mark.parametrize('case', PAGED)
@pytest.mark.parametrize('regime', ['reference', 'gather', 'dense'])
def test_attends_to_selected_rows_in_pages(regime, case, dtype):
  q, pages, table, indices, rows = attention_problem(*PAGED[case], dtype, seed=0)
  options = {'implementation': 'reference'}
  if regime != 'reference':
    pages = pack_pages(pages, LATENT)
    chip = 'v5p' if case == 'drafts' else 'v6e'  # Three sequences on two cores; one core.
    options = {'implementation': 'tpu', 'regime': regime, 'chip': chip, 'chunk': 16}
    options['interpret'] = INTERPRET
  out, lse = _attend(q, pages, table, indices, options=tuple(options.items()))
  expected = attention_oracle(q, indices, rows)
  tolerance = 2e-5 if dtype == jnp.float32 else 3e-2
  np.testing.assert_allclose(np.asarray(out, np.float64), expected[0], tolerance, tolerance)
  np.testing.assert_allclose(np.asarray(lse), expected[1], tolerance, tolerance)
  assert regime == 'reference' or not races_found()


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16], ids=['float32', 'bfloat16'])
def test_packing_is_undone(dtype):
  rows = jnp.asarray(np.random.default_rng(0).normal(size=(2, 3, 150)), dtype)
  packed = pack_pages(rows, 140)
  assert packed.dtype == jnp.uint32 and packed.shape[:3] == (2, 3, 1)
  np.testing.assert_array_equal(unpack_pages(packed, 140, 10, dtype), rows)


@pytest.mark.parametrize('implementation', ['reference', 'tpu'])
def test_rows_are_written_and_read_in_place(implementation):
  """More rows than copies under way; a negative page is none."""
  rng = np.random.default_rng(0)
  options: dict = {'implementation': implementation}
  if implementation == 'tpu':
    options['interpret'] = INTERPRET
  pages = rng.integers(0, 1 << 32, (9, 8, 1, 128), np.uint32)
  rows = rng.integers(0, 1 << 32, (40, 1, 128), np.uint32)
  places = rng.permutation(72)[:40].astype(np.int32)
  page, offset = places // 8, places % 8
  there = np.arange(40) % 5 > 0
  want = pages.copy()
  want[page[there], offset[there]] = rows[there]
  got = jax.jit(functools.partial(write_pages, **options))(
    jnp.asarray(pages), rows, np.where(there, page, -1), offset
  )
  np.testing.assert_array_equal(got, want)
  assert implementation == 'reference' or not races_found()
  read = jax.jit(functools.partial(read_pages, **options))
  np.testing.assert_array_equal(read(got, page, offset), want[page, offset])
  np.testing.assert_array_equal(read(got, page[:5]), want[page[:5]])
  assert implementation == 'reference' or not races_found()


def index_problem(lengths, time, page_size, width, seed, grid=2):
  """q, weights, pages, table, q_slot and the sequences' keys; on a grid, so that scores tie."""
  rng = np.random.default_rng(seed)
  heads, dim = 3, 16
  keys = [rng.integers(-grid, grid + 1, (n, dim)).astype(np.float32) for n in lengths]
  pool, table = paged(keys, page_size, width, rng)
  q = rng.integers(-grid, grid + 1, (len(lengths), time, heads, dim)).astype(np.float32)
  weights = rng.integers(-4, 5, (len(lengths), time, heads)).astype(np.float32) / 8
  # The last of the new tokens is the last of the sequence; -1 where it is shorter than that.
  q_slot = np.maximum(np.array(lengths)[:, None] - time + np.arange(time), -1).astype(np.int32)
  return q, weights, pool, table, q_slot, keys


def index_oracle(q, weights, q_slot, keys, k):
  indices = np.full((*q_slot.shape, k), -1)
  threshold = np.full(q_slot.shape, -np.inf)
  for b, t in np.ndindex(*q_slot.shape):
    seen = keys[b][: q_slot[b, t] + 1].astype(np.float64)
    score = weights[b, t].astype(np.float64) @ np.maximum(q[b, t].astype(np.float64) @ seen.T, 0)
    best = np.argsort(-score, kind='stable')[:k]
    indices[b, t, : len(best)] = np.sort(best)
    if len(best) == k:
      threshold[b, t] = score[best[-1]]
  return indices, threshold


@functools.partial(jax.jit, static_argnames=('topk', 'options'))
def _select(q, weights, pages, table, q_slot, *, topk, options):
  return indexer_topk_paged(q, weights, pages, table, q_slot, topk, **dict(options))


# Lengths; new tokens a sequence; K; page size; pages of a row; dtype; chip. The kernel reads 4,096
# keys at a time: two such steps, several sequences on two cores, more steps than it fetches ahead.
# Pages are large, since interpret mode takes milliseconds a copy.
INDEXED = {
  'one token': ((1, 300, 4500), 1, 40, 512, 10, 'bfloat16', 'v6e'),
  'drafts on two cores': ((4200, 1, 130), 3, 150, 1024, 5, 'float32', 'v5p'),
  'eight tokens, an empty sequence': ((700, 0), 8, 12, 512, 2, 'bfloat16', 'tpu7x'),
  'many sequences, long tables': (tuple(range(3, 123, 10)), 2, 20, 2048, 9, 'bfloat16', 'v6e'),
}


@pytest.mark.parametrize('case', INDEXED)
@pytest.mark.parametrize('implementation', ['reference', 'tpu'])
def test_selects_from_pages_what_sorting_selects(implementation, case):
  lengths, time, k, page_size, width, dtype, chip = INDEXED[case]
  options: dict = {'implementation': implementation}
  if implementation == 'tpu':
    options |= {'chip': chip, 'interpret': INTERPRET}
  for seed, grid in ((0, 2), (1, 2), (2, 0)):  # The last: all scores equal, the lowest positions.
    q, weights, pool, table, q_slot, keys = index_problem(
      lengths, time, page_size, width, seed, grid
    )
    indices, threshold = _select(
      jnp.asarray(q, dtype), weights, jnp.asarray(pool, dtype), table, q_slot,
      topk=k, options=tuple(options.items()),
    )  # fmt: skip
    expected = index_oracle(q, weights, q_slot, keys, k)
    np.testing.assert_array_equal(np.asarray(indices), expected[0])
    np.testing.assert_array_equal(np.asarray(threshold), expected[1].astype(np.float32))
    assert implementation == 'reference' or not races_found()


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'q': np.zeros((2, 9, 3, 24), np.float32)}, 'expected q'),
    (
      {'q': np.zeros((2, 9, 3, 24), np.float32), 'indices': np.zeros((2, 9, 5), np.int32)},
      '1 to 8',
    ),
    ({'pages': np.zeros((4, 8, 23), np.float32)}, 'do not fit q'),
    ({'pages': np.zeros((4, 8, 24), np.float16)}, 'use one dtype'),
    ({'pages': np.zeros((4, 8, 1, 256), np.uint32)}, 'not yet packed'),
    ({'table': np.zeros((3, 4), np.int32)}, 'the table 3'),
    ({'table': np.zeros((2, 4), np.int64)}, 'must be int32'),
    ({'implementation': 'gpu'}, "'reference' or 'tpu'"),
    (
      {'implementation': 'tpu', 'regime': 'dense', 'chip': 'v6e', 'chunk': 20},
      'do not divide a chunk of 20',
    ),
  ],
)
def test_attention_errors_say_what_was_expected(change, message):
  arguments = {
    'q': np.zeros((2, 1, 3, 24), np.float32),
    'pages': np.zeros((4, 8, 24), np.float32),
    'table': np.zeros((2, 4), np.int32),
    'indices': np.zeros((2, 1, 5), np.int32),
    'scale': 1.0,
    'latent_dim': 16,
  }
  with pytest.raises(ValueError, match=message):
    sparse_mla_paged(**(arguments | change))


@pytest.mark.parametrize(
  ('change', 'error', 'message'),
  [
    ({'weights': np.zeros((2, 1, 4), np.float32)}, ValueError, 'weights'),
    ({'table': np.zeros((3, 4), np.int32)}, ValueError, 'table'),
    ({'q': np.zeros((2, 1, 3, 16), np.float16)}, TypeError, 'cast both'),
    ({'topk': 0}, ValueError, 'K=0'),
    ({'implementation': 'gpu'}, ValueError, "'reference' or 'tpu'"),
    (
      {'implementation': 'tpu', 'pages': np.zeros((4, 24, 16), np.float32)},
      ValueError,
      'power of two',
    ),
  ],
)
def test_index_errors_say_what_was_expected(change, error, message):
  arguments = {
    'q': np.zeros((2, 1, 3, 16), np.float32),
    'weights': np.zeros((2, 1, 3), np.float32),
    'pages': np.zeros((4, 8, 16), np.float32),
    'table': np.zeros((2, 4), np.int32),
    'q_slot': np.zeros((2, 1), np.int32),
    'topk': 5,
  }
  with pytest.raises(error, match=message):
    indexer_topk_paged(**(arguments | change))
