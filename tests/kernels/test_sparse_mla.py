"""Sparse MLA against a float64 numpy oracle, in TPU interpret mode with race detection."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import races_found
from pallas_kernels.sparse_mla import Tuning, layout, sparse_mla

SCALE = 0.2
# Uninitialised memory, outputs included, reads as NaN.
INTERPRET = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')


def oracle(q, latents, indices, latent_dim, dout, dlse):
  """out, lse, dq, dlatents by loops over queries; everything float64."""
  q, latents, dout, dlse = (np.asarray(x, np.float64) for x in (q, latents, dout, dlse))
  batch, time, heads, _ = q.shape
  out = np.zeros((batch, time, heads, latent_dim))
  lse = np.full((batch, time, heads), -np.inf)
  dq, dlatents = np.zeros_like(q), np.zeros_like(latents)
  for b in range(batch):
    for t in range(time):
      chosen = [i for i in np.asarray(indices[b, t]) if i >= 0]
      if not chosen:
        continue
      rows = latents[b, chosen]
      logits = SCALE * q[b, t] @ rows.T
      lse[b, t] = np.logaddexp.reduce(logits, axis=1)
      p = np.exp(logits - lse[b, t][:, None])
      out[b, t] = p @ rows[:, :latent_dim]
      dp = dout[b, t] @ rows[:, :latent_dim].T
      ds = p * (dp - np.sum(dp * p, axis=1, keepdims=True) + dlse[b, t][:, None]) * SCALE
      dq[b, t] = ds @ rows
      drows = ds.T @ q[b, t]
      drows[:, :latent_dim] += p.T @ dout[b, t]
      np.add.at(dlatents[b], chosen, drows)
  return out, lse, dq, dlatents


def problem(seed, batch, time, keys, heads, latent_dim, rope_dim, k, dtype, causal=False):
  """Random queries, latents, ascending selections of 0 to k keys, cotangents."""
  rng = np.random.default_rng(seed)
  width = latent_dim + rope_dim
  indices = np.full((batch, time, k), -1, np.int32)
  for b in range(batch):
    for t in range(time):
      visible = keys - time + t + 1 if causal else keys
      count = min(k, visible) if causal else min(rng.integers(0, k + 1), keys)
      indices[b, t, :count] = np.sort(rng.choice(visible, count, replace=False))

  def array(*shape):
    return jnp.asarray(rng.normal(size=shape), dtype)

  return (
    array(batch, time, heads, width),
    array(batch, keys, width),
    jnp.asarray(indices),
    array(batch, time, heads, latent_dim),
    jnp.asarray(rng.normal(size=(batch, time, heads)), jnp.float32),
  )


@functools.partial(jax.jit, static_argnums=(3,), static_argnames=('options',))
def _run(q, latents, indices, latent_dim, dout, dlse, *, options):
  attend = functools.partial(sparse_mla, scale=SCALE, latent_dim=latent_dim, **dict(options))
  results, pull = jax.vjp(lambda q, latents: attend(q, latents, indices), q, latents)
  return (*results, *pull((dout.astype(results[0].dtype), dlse.astype(results[1].dtype))))


def run(*args, **options):
  """out, lse, dq, dlatents of one implementation."""
  return _run(*args, options=tuple(options.items()))


def kernel(*args, regime, chip='v6e', tuning=Tuning(4, 2, 16), backward=None, **more):
  return run(
    *args, implementation='tpu', regime=regime, chip=chip, forward=tuning,
    backward=backward or tuning, interpret=INTERPRET, **more,
  )  # fmt: skip


def check(got, want, tolerance):
  for name, a, b in zip(('out', 'lse', 'dq', 'dlatents'), got, want, strict=True):
    np.testing.assert_allclose(
      np.asarray(a, np.float64), b, rtol=tolerance, atol=tolerance, err_msg=name
    )


# batch, time, keys, heads, L, R, K
CASES = {
  'two sequences, odd lengths, empty rows': (2, 5, 41, 3, 16, 8, 9),
  'one query': (1, 1, 33, 2, 16, 8, 12),
  'K above the keys': (1, 3, 7, 2, 16, 8, 20),
  'two lane tiles of latents': (1, 4, 24, 1, 136, 4, 8),
}


@pytest.mark.parametrize('regime', ['gather', 'dense'])
@pytest.mark.parametrize('case', CASES)
def test_float32_matches_oracle(case, regime):
  args = problem(0, *CASES[case], jnp.float32)
  args = (*args[:3], CASES[case][4], *args[3:])
  # A span below the time: several kernel calls, which sum the latents' gradients one after the
  # other.
  got = kernel(*args, regime=regime, span=6)
  check(got, oracle(*args), 2e-5)
  assert not races_found()


@pytest.mark.parametrize('regime', ['gather', 'dense'])
def test_bfloat16_causal_on_two_cores_is_deterministic(regime):
  """v5p's two cores sum gradients apart; a prefill chunk sees the keys before it."""
  args = problem(1, 2, 6, 40, 2, 16, 8, 9, jnp.bfloat16, causal=True)
  args = (*args[:3], 16, *args[3:])
  sizes = {'tuning': Tuning(2, 2, 16), 'backward': Tuning(4, 2, 16, sum_beside=True)}
  got = kernel(*args, regime=regime, chip='v5p', **sizes)
  check(got, oracle(*args), 4e-2)
  for _ in range(19):
    again = kernel(*args, regime=regime, chip='v5p', **sizes)
    for a, b in zip(got, again, strict=True):
      assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  assert not races_found()


def selection(pattern, rng, batch, time, keys, k):
  """[B, T, K] int32, ascending, -1 behind; what each pattern is for stands in `PATTERNS`."""
  indices = np.full((batch, time, k), -1, np.int32)
  for b in range(batch):
    common = rng.permutation(keys)[:k]
    bounds = np.sort(rng.integers(0, keys + 1, 2))  # Three segments, any of which may be empty.
    for t in range(time):
      seen = {
        'any': np.arange(keys),
        'causal': np.arange(max(1, keys - time + t + 1)),
        'shared': common,
        'segments': np.split(np.arange(keys), bounds)[t % 3],
      }[pattern]
      count = rng.integers(0, k + 1) if pattern == 'any' else k
      chosen = np.sort(rng.permutation(seen)[:count])
      indices[b, t, : len(chosen)] = chosen
  return jnp.asarray(indices)


# Rows of any length down to none; causal, hence rows shorter than K; one selection that all queries
# share; packed segments, some empty.
PATTERNS = ('any', 'causal', 'shared', 'segments')
# One program each, since interpret mode spends its time on compiling: regime, dtype, sizes as in
# CASES. Odd lengths, one query, K beyond the keys.
SWEEP = (
  ('gather', jnp.float32, (2, 5, 19, 3, 16, 8, 6)),
  ('gather', jnp.bfloat16, (1, 3, 33, 2, 16, 8, 9)),
  ('dense', jnp.float32, (1, 7, 23, 2, 16, 8, 30)),
  ('dense', jnp.bfloat16, (2, 1, 17, 1, 16, 8, 5)),
)


@hypothesis.settings(max_examples=24, deadline=None, derandomize=True)
@hypothesis.given(
  st.sampled_from(SWEEP), st.sampled_from(PATTERNS), st.integers(0, 2**16), st.booleans()
)
def test_any_selection_matches_oracle(case, pattern, seed, ties):
  """Forward and all gradients; with `ties`, rows are equal in threes, so logits are too."""
  regime, dtype, sizes = case
  q, latents, _, dout, dlse = problem(seed, *sizes, dtype)
  indices = selection(pattern, np.random.default_rng(seed), *sizes[:3], sizes[-1])
  if ties:
    latents = latents[:, jnp.arange(sizes[2]) // 3]
  args = (q, latents, indices, sizes[4], dout, dlse)
  check(kernel(*args, regime=regime), oracle(*args), 2e-5 if dtype == jnp.float32 else 4e-2)
  assert not races_found()


# Queries of a block and of one matmul: one group, two, and three, of which one writes.
@pytest.mark.parametrize(
  ('queries', 'together', 'chip', 'sum_beside'),
  [(2, 2, 'v5p', False), (2, 2, 'v5p', True), (2, 1, 'v6e', True), (3, 1, 'v6e', False)],
)
def test_rows_that_neighbouring_blocks_share_are_summed_in_order(
  queries, together, chip, sum_beside
):
  """A block's first chunk holds rows of the last chunk of the block before it, which are being
  written: in blocks of one chunk, of several, and without keys."""
  many, few, none = np.arange(24), np.arange(4), np.arange(0)
  blocks = (many, many, few, few, none, few, none, many)
  time = queries * len(blocks)
  q, latents, _, dout, dlse = problem(9, 1, time, 24, 2, 16, 8, 24, jnp.float32)
  indices = np.full((1, time, 24), -1, np.int32)
  for t in range(time):
    rows = blocks[t // queries]
    indices[0, t, : len(rows)] = rows
  args = (q, latents, jnp.asarray(indices), 16, dout, dlse)
  sizes = {'chip': chip, 'tuning': Tuning(queries, together, 16, sum_beside=sum_beside)}
  got = kernel(*args, regime='gather', **sizes)
  again = kernel(*args, regime='gather', **sizes)
  check(got, oracle(*args), 2e-5)
  for a, b in zip(got, again, strict=True):
    assert np.asarray(a).tobytes() == np.asarray(b).tobytes()
  assert not races_found()


def test_no_selected_key_gives_zero():
  args = problem(2, 1, 3, 16, 2, 16, 8, 4, jnp.float32)
  indices = jnp.full_like(args[2], -1)
  for options in (
    {'implementation': 'reference'},
    {'implementation': 'tpu', 'regime': 'gather', 'chip': 'v6e', 'interpret': INTERPRET,
     'forward': Tuning(2, 1, 16), 'backward': Tuning(2, 1, 16)},
  ):  # fmt: skip
    out, lse, dq, dlatents = run(args[0], args[1], indices, 16, args[3], args[4], **options)
    assert np.all(np.asarray(lse) == -np.inf)
    for x in (out, dq, dlatents):
      np.testing.assert_array_equal(np.asarray(x), 0)


@pytest.mark.parametrize('case', CASES)
def test_reference_matches_oracle(case):
  with jax.enable_x64(True):
    args = problem(3, *CASES[case], jnp.float64)
    args = (*args[:3], CASES[case][4], *args[3:])
    check(run(*args, implementation='reference'), oracle(*args), 1e-12)


def test_reference_in_steps_is_the_same(monkeypatch):
  from pallas_kernels.sparse_mla import reference

  args = problem(4, 2, 7, 30, 2, 16, 8, 6, jnp.float32)
  args = (*args[:3], 16, *args[3:])
  whole = run(*args, implementation='reference')
  monkeypatch.setattr(reference, '_ROWS_PER_STEP', 2 * 2 * 6 * 24)
  check(run(*args, implementation='reference'), [np.asarray(x) for x in whole], 1e-6)


def test_reference_gradients_by_finite_differences():
  with jax.enable_x64(True):
    q, latents, indices, dout, dlse = problem(5, 1, 3, 12, 2, 16, 8, 5, jnp.float64)

    def loss(q, latents):
      out, lse = sparse_mla(q, latents, indices, SCALE, 16)
      return jnp.sum(out * dout) + jnp.sum(jnp.where(lse > -jnp.inf, lse * dlse, 0.0))

    rng = np.random.default_rng(6)
    dq, dlatents = jax.grad(loss, (0, 1))(q, latents)
    for _ in range(4):
      u, v = rng.normal(size=q.shape), rng.normal(size=latents.shape)
      step = 1e-6
      slope = (loss(q + step * u, latents + step * v) - loss(q - step * u, latents - step * v)) / (
        2 * step
      )
      np.testing.assert_allclose(np.sum(dq * u) + np.sum(dlatents * v), slope, rtol=1e-7)


@pytest.mark.parametrize('total_rows', [9, 200])
def test_row_lists_are_the_unions(total_rows):
  rng = np.random.default_rng(7)
  blocks, queries, k, chunk = 3, 4, 6, 8
  indices = np.full((blocks * queries, k), -1, np.int32)
  for row in indices[: 2 * queries]:
    count = rng.integers(0, k + 1)
    row[:count] = np.sort(rng.choice(total_rows, count, replace=False))
  rows, masks, counts = layout.row_lists(jnp.asarray(indices), queries, chunk, total_rows)
  for g in range(blocks):
    want = {}
    for m in range(queries):
      for i in indices[g * queries + m]:
        if i >= 0:
          want[i] = want.get(i, 0) | 1 << m
    size = len(want)
    assert dict(zip(rows[g, :size].tolist(), masks[g, :size].tolist(), strict=True)) == want
    assert rows[g, :size].tolist() == sorted(want)
    assert not masks[g, size:].any()
    assert counts[g] == max(1, -(-size // chunk))
    for c in range(0, rows.shape[1], chunk):
      assert len(set(rows[g, c : c + chunk].tolist())) == chunk


def test_dense_masks_hold_the_selection():
  rng = np.random.default_rng(8)
  indices = np.full((2, 4, 10), -1, np.int32)
  for row in indices.reshape(8, 10)[:6]:
    row[:7] = np.sort(rng.choice(90, 7, replace=False))
  masks, starts, counts = layout.dense_masks(jnp.asarray(indices), 2, 16, 96)
  selected = np.zeros((8, 96), bool)
  for t, row in enumerate(indices.reshape(8, 10)):
    selected[t, row[row >= 0]] = True
  for g in range(4):
    for m in range(2):
      np.testing.assert_array_equal((np.asarray(masks[g]) >> m) & 1, selected[2 * g + m])
    positions = np.flatnonzero(selected[2 * g : 2 * g + 2].any(0))
    if positions.size:
      assert starts[g] == positions[0] // 16
      assert starts[g] + counts[g] - 1 == positions[-1] // 16
    else:
      assert counts[g] == 1


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'latent_dim': 24}, 'latent_dim'),
    ({'implementation': 'gpu'}, "'reference' or 'tpu'"),
    ({'indices': np.zeros((1, 3, 2), np.int64)}, 'int32'),
    ({'latents': np.zeros((2, 4, 24), np.float32)}, 'batch'),
    ({'latents': np.zeros((1, 4, 24), np.float16)}, 'one dtype'),
  ],
)
def test_errors_say_what_was_expected(change, message):
  arguments = {
    'q': np.zeros((1, 3, 2, 24), np.float32),
    'latents': np.zeros((1, 4, 24), np.float32),
    'indices': np.zeros((1, 3, 2), np.int32),
    'scale': 1.0,
    'latent_dim': 16,
  }
  with pytest.raises(ValueError, match=message):
    sparse_mla(**(arguments | change))
