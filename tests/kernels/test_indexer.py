"""The indexer's selection, plain jax and the TPU kernel in interpret mode, against float64 numpy.

Inputs lie on a coarse grid, so that float32 sums over heads are exact in any order and scores tie
often: the selection must then be equal to the oracle's, key by key.
"""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels import indexer_topk, shapes
from pallas_kernels.indexer import kernel_tpu
from pallas_kernels.interpret import races_found


def inputs(case: shapes.Indexer, seed: int, grid: int = 2):
  """(q, weights, k, q_slot, q_segment, k_segment) in numpy: causal, three segments, padding."""
  rng = np.random.default_rng(seed)
  b, t, s = case.batch, case.time, case.keys
  q = rng.integers(-grid, grid + 1, (b, t, case.heads, case.dim)).astype(np.float32)
  k = rng.integers(-grid, grid + 1, (b, s, case.dim)).astype(np.float32)
  weights = rng.integers(-4, 5, (b, t, case.heads)).astype(np.float32) / 8
  q_slot = np.sort(rng.integers(0, s, (b, t)), axis=1).astype(np.int32)
  k_segment = np.minimum(np.arange(s) * 3 // s + 1, 3)[None].repeat(b, 0).astype(np.int32)
  k_segment[rng.random((b, s)) < 0.05] = 0
  q_segment = np.take_along_axis(k_segment, q_slot, axis=1)
  return q, weights, k, q_slot, q_segment, k_segment


def oracle(q, weights, k, q_slot, q_segment, k_segment, topk):
  """Indices and thresholds by sorting every row; float64."""
  q, weights, k = (np.asarray(x, np.float64) for x in (q, weights, k))
  batch, time = q_slot.shape
  indices = np.full((batch, time, topk), -1)
  threshold = np.full((batch, time), -np.inf)
  for b in range(batch):
    for t in range(time):
      score = weights[b, t] @ np.maximum(q[b, t] @ k[b].T, 0)
      may = k_segment[b] == q_segment[b, t]
      may &= (k_segment[b] > 0) & (np.arange(len(may)) <= q_slot[b, t])
      (seen,) = np.nonzero(may)
      best = seen[np.argsort(-score[seen], kind='stable')][:topk]
      indices[b, t, : len(best)] = np.sort(best)
      if len(best) == topk:
        threshold[b, t] = score[best[-1]]
  return indices, threshold


@functools.cache
def compiled(case: shapes.Indexer, implementation: str):
  """One program per shape: in interpret mode nearly all the time goes into compiling."""
  interpret = pltpu.InterpretParams(detect_races=True) if implementation == 'tpu' else False
  block_q = case.block_q if implementation == 'tpu' else None
  return jax.jit(
    functools.partial(
      indexer_topk,
      topk=case.topk,
      implementation=implementation,
      block_q=block_q,
      interpret=interpret,
    )
  )


def run(case, implementation, arguments):
  q, weights, k, *rest = arguments
  q, k = (jnp.asarray(x, case.dtype) for x in (q, k))
  return jax.tree.map(np.asarray, compiled(case, implementation)(q, weights, k, *rest))


def check(case, implementation, arguments):
  indices, threshold = run(case, implementation, arguments)
  expected = oracle(*arguments, case.topk)
  np.testing.assert_array_equal(indices, expected[0])
  np.testing.assert_array_equal(threshold, expected[1].astype(np.float32))
  assert implementation != 'tpu' or not races_found()


IMPLEMENTATIONS = ['reference', 'tpu']
CASES = shapes.select(shapes.Indexer, 'test')
BY_NAME = {case.name: case for case in CASES}


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@pytest.mark.parametrize('case', CASES, ids=lambda case: case.name)
def test_selects_what_sorting_selects(case, implementation, capfd):
  """Causal, packed, exact ties; among the shapes: one query, odd lengths, K beyond S, float32."""
  for seed in range(2):
    check(case, implementation, inputs(case, seed))
  check(case, implementation, inputs(case, 2, grid=0))  # All scores equal: the lowest positions.
  assert 'RACE DETECTED' not in capfd.readouterr().out


@pytest.mark.parametrize(
  ('keys', 'vmem', 'block_q', 'step'),
  [
    (4096, 64, 128, 1024),
    (131_072, 64, 64, 2048),
    (131_072, 128, 128, 2048),
    (202_752, 64, 64, 1024),  # No room for longer steps.
    (202_752, 128, 128, 2048),
  ],
)
def test_blocks_fit_vmem(keys, vmem, block_q, step):
  found = kernel_tpu.choose_blocks(4096, keys, vmem=vmem << 20)
  assert (found['block_q'], found['step']) == (block_q, step)
  assert found['vmem'] <= (vmem - 2) << 20


@pytest.mark.parametrize(('name', 'block_q'), [('test-blocks', 128), ('test-four-groups', 64)])
def test_long_steps(name, block_q, monkeypatch):
  """The steps that sequences of more than 65,536 keys have, on short ones."""
  monkeypatch.setattr(kernel_tpu, 'LONG_KEYS', 0)
  # Another name is another program.
  case = BY_NAME[name]._replace(name=f'{name}-long-steps', block_q=block_q)
  check(case, 'tpu', inputs(case, 0))
  check(case, 'tpu', inputs(case, 2, grid=0))


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
@hypothesis.settings(max_examples=15, deadline=None, derandomize=True)
@hypothesis.given(st.data())
def test_any_slots_and_segments(implementation, data):
  """Slots before the first and beyond the last key; segments empty, absent or not contiguous."""
  case = BY_NAME['test-odd']
  q, weights, k, q_slot, q_segment, k_segment = inputs(case, data.draw(st.integers(0, 99)))
  rng = np.random.default_rng(data.draw(st.integers(0, 99)))
  slots = data.draw(st.sampled_from([(-2, 3), (0, case.keys), (case.keys - 1, 2 * case.keys)]))
  segments = data.draw(st.sampled_from([(0, 1), (1, 2), (0, 3), (-1, 4), (5, 9)]))
  q_slot = rng.integers(*slots, q_slot.shape, np.int32)
  q_segment = rng.integers(*segments, q_segment.shape, np.int32)
  k_segment = rng.integers(*data.draw(st.sampled_from([(1, 2), (0, 3)])), k_segment.shape, np.int32)
  check(case, implementation, (q, weights, k, q_slot, q_segment, k_segment))


def test_twenty_runs_are_bit_identical():
  """Real-valued scores: a sum in another order would show."""
  case = BY_NAME['test-odd']
  q, weights, k, *rest = inputs(case, 3)
  rng = np.random.default_rng(3)
  arguments = (*(rng.standard_normal(x.shape, np.float32) for x in (q, weights, k)), *rest)
  first = [x.tobytes() for x in run(case, 'tpu', arguments)]
  for _ in range(19):
    assert [x.tobytes() for x in run(case, 'tpu', arguments)] == first


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
def test_close_scores(implementation):
  """Real-valued scores: whatever is selected is at least as good as the K-th, but for rounding."""
  case = BY_NAME['test-odd']
  rng = np.random.default_rng(0)
  arguments = list(inputs(case, 0))
  for i in range(3):
    x = rng.standard_normal(arguments[i].shape)
    arguments[i] = np.asarray(jnp.asarray(x, case.dtype if i != 1 else jnp.float32), np.float64)
  indices, threshold = run(
    case, implementation, [a.astype(np.float32) for a in arguments[:3]] + arguments[3:]
  )
  expected, kth = oracle(*arguments, case.topk)
  np.testing.assert_allclose(threshold, kth, rtol=1e-5, atol=1e-5)
  np.testing.assert_array_equal((indices >= 0).sum(-1), (expected >= 0).sum(-1))
  q, weights, k = arguments[:3]
  logits = np.maximum(np.einsum('btij,bsj->btis', q, k), 0)
  scores = np.einsum('btis,bti->bts', logits, weights)
  chosen = np.take_along_axis(scores, np.maximum(indices, 0), -1)
  assert np.all((chosen >= kth[..., None] - 1e-4) | (indices < 0))


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
def test_special_values(implementation):
  """-0.0 ties with 0.0, and NaN is above everything."""
  case = BY_NAME['test-odd']
  q, weights, k, q_slot, q_segment, k_segment = inputs(case, 0)
  q_slot[:], q_segment[:], k_segment[:] = case.keys - 1, 1, 1
  weights[:] = 0
  weights[:, ::2, 0], weights[:, 1::2, 0] = 1, -1
  q[:], k[:] = 0, 0
  q[..., 0] = 1
  # Scores of even queries: 0 everywhere but for these; of odd ones -0.0 and the negated values.
  k[:, [5, 11, 17], 0] = np.nan, np.inf, 1
  indices, threshold = run(case, implementation, (q, weights, k, q_slot, q_segment, k_segment))
  others = [s for s in range(case.keys) if s not in (5, 11, 17)]
  # The other heads' weights are 0, and 0 * inf is NaN only for the infinite key.
  finite = sorted([5, 11, 17, *others[: case.topk - 3]])
  for t in range(case.time):
    row = finite if t % 2 == 0 else sorted([5, 11, *others[: case.topk - 2]])
    np.testing.assert_array_equal(indices[0, t], row)
  np.testing.assert_array_equal(threshold, 0.0)


@pytest.mark.parametrize('implementation', IMPLEMENTATIONS)
def test_candidates_in_few_cells(implementation):
  """Keys 4,096 apart have almost equal scores: the kernel's cells, two entries each, overflow."""
  case = BY_NAME['test-long']
  q, weights, k, q_slot, q_segment, k_segment = inputs(case, 0)
  rng = np.random.default_rng(0)
  cell = (rng.random(4096) ** 6 * 2**20).astype(np.int64)
  s = np.arange(case.keys)
  score = cell[s % 4096] * 8 + s // 4096
  q[:], k[:], weights[:], k_segment[:], q_segment[:] = 0, 0, 0, 1, 1
  weights[..., 0] = 1
  q[..., 0, :3] = 2.0**16, 2.0**8, 1
  k[0, :, :3] = np.stack([score >> 16, score >> 8 & 255, score & 255], axis=-1)
  q_slot[0] = case.keys - 1 - np.arange(case.time) * 700
  check(case, implementation, (q, weights, k, q_slot, q_segment, k_segment))


def test_reference_does_not_hold_all_scores():
  """Compiled temporary memory is far below one [T, S] array of float32."""
  time, keys = 8192, 8192
  s = jax.ShapeDtypeStruct
  arguments = (
    s((1, time, 2, 8), jnp.float32), s((1, time, 2), jnp.float32), s((1, keys, 8), jnp.float32),
    s((1, time), jnp.int32), s((1, time), jnp.int32), s((1, keys), jnp.int32),
  )  # fmt: skip
  program = jax.jit(functools.partial(indexer_topk, topk=16)).lower(*arguments).compile()
  assert program.memory_analysis().temp_size_in_bytes < time * keys * 4


def test_gradient_stops():
  case = BY_NAME['test-odd']
  q, weights, k, *rest = inputs(case, 0)
  grad = jax.grad(
    lambda q: jnp.sum(jnp.where(jnp.isinf(t := indexer_topk(q, weights, k, *rest, 4)[1]), 0, t))
  )(q)
  assert not np.any(grad)


def test_errors_say_what_was_expected():
  case = BY_NAME['test-odd']
  q, weights, k, *rest = inputs(case, 0)
  with pytest.raises(ValueError, match='weights has shape'):
    indexer_topk(q, weights[:, :1], k, *rest, 4)
  with pytest.raises(TypeError, match='cast both'):
    indexer_topk(q.astype(jnp.bfloat16), weights, k, *rest, 4)
  with pytest.raises(ValueError, match='K=0'):
    indexer_topk(q, weights, k, *rest, 0)
  with pytest.raises(ValueError, match="use 'reference' or 'tpu'"):
    indexer_topk(q, weights, k, *rest, 4, implementation='gpu')
  with pytest.raises(ValueError, match='block_q=100'):
    indexer_topk(q, weights, k, *rest, 4, implementation='tpu', block_q=100)
