"""The indexer's KL over the selection against a float64 oracle written by loops."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import indexer_kl
from pallas_kernels.indexer_kl import reference

SCALE = 0.2
BATCH, TIME, SIZE, HEADS, WIDTH, INDEX_HEADS, DIM, K = 2, 7, 19, 3, 10, 4, 5, 6


def problem(seed=0):
  """Arguments of `indexer_kl` but the scale; selections of 0 to K keys; `lse` is the true one."""
  rng = np.random.default_rng(seed)
  indices = np.full((BATCH, TIME, K), -1, np.int32)
  for b, t in np.ndindex(BATCH, TIME):
    count = (b * TIME + t) % (K + 1)
    indices[b, t, :count] = np.sort(rng.choice(SIZE, count, replace=False))
  draw = rng.standard_normal
  q, latents = draw((BATCH, TIME, HEADS, WIDTH)), draw((BATCH, SIZE, WIDTH))
  index_q, index_k = draw((BATCH, TIME, INDEX_HEADS, DIM)), draw((BATCH, SIZE, DIM))
  weights = draw((BATCH, TIME, INDEX_HEADS))
  lse = np.full((BATCH, TIME, HEADS), -np.inf)
  for b, t in np.ndindex(BATCH, TIME):
    chosen = indices[b, t][indices[b, t] >= 0]
    if len(chosen):
      lse[b, t] = np.logaddexp.reduce(SCALE * q[b, t] @ latents[b, chosen].T, axis=1)
  return q, latents, lse, index_q, weights, index_k, indices


def oracle(q, latents, lse, index_q, weights, index_k, indices, cotangent):
  """KL [B, T], and gradients for index_q, weights, index_k."""
  kl = np.zeros((BATCH, TIME))
  d_q, d_weights, d_k = (np.zeros_like(x) for x in (index_q, weights, index_k))
  for b, t in np.ndindex(BATCH, TIME):
    chosen = indices[b, t][indices[b, t] >= 0]
    if not len(chosen):
      continue
    target = np.zeros(len(chosen))
    for n in range(HEADS):
      target += np.exp(SCALE * latents[b, chosen] @ q[b, t, n] - lse[b, t, n]) / HEADS
    dots = index_q[b, t] @ index_k[b, chosen].T
    scores = weights[b, t] @ np.maximum(dots, 0)
    log_index = scores - np.logaddexp.reduce(scores)
    kl[b, t] = np.sum(target * (np.log(target) - log_index))
    d_scores = cotangent[b, t] * (np.exp(log_index) - target)  # The target sums to 1.
    d_weights[b, t] = np.maximum(dots, 0) @ d_scores
    d_dots = weights[b, t][:, None] * (dots > 0) * d_scores
    d_q[b, t] = d_dots @ index_k[b, chosen]
    np.add.at(d_k[b], chosen, d_dots.T @ index_q[b, t])
  return kl, (d_q, d_weights, d_k)


@pytest.mark.parametrize('steps', ['one', 'three'])
def test_value_and_gradients(steps, monkeypatch):
  """Also where the queries are taken a few at a time, the last of them padding."""
  if steps == 'three':
    monkeypatch.setattr(reference, '_ROWS_PER_STEP', 3 * BATCH * K * WIDTH)
  arguments = problem()
  cotangent = np.random.default_rng(1).standard_normal((BATCH, TIME))
  want, gradients = oracle(*arguments, cotangent)
  single = [jnp.asarray(x, x.dtype if x.dtype == np.int32 else np.float32) for x in arguments]
  got, pull = jax.vjp(lambda *x: indexer_kl(*x, single[6], SCALE), *single[:6])
  np.testing.assert_allclose(got, want, rtol=1e-5, atol=1e-6)
  # Of no key or one there is nothing to learn.
  assert np.count_nonzero(want > 1e-6) == np.count_nonzero(np.sum(arguments[6] >= 0, axis=-1) > 1)
  pulled = pull(jnp.asarray(cotangent, jnp.float32))
  for name, got, want in zip(('q', 'weights', 'k'), pulled[3:], gradients, strict=True):
    np.testing.assert_allclose(got, want, rtol=1e-4, atol=1e-5, err_msg=f'index {name}')
  for name, got in zip(('q', 'latents', 'lse'), pulled[:3], strict=True):
    assert not np.any(got), f'{name} is the target: nothing may train it'


def test_a_perfect_indexer_has_no_loss():
  """One head of attention whose logits are the index scores."""
  q, latents, *_, indices = problem(2)
  rng = np.random.default_rng(3)
  q = np.abs(rng.standard_normal((BATCH, TIME, 1, WIDTH))).astype(np.float32)
  latents = np.abs(latents).astype(np.float32)  # All dots are positive: ReLU passes them.
  rows = np.take_along_axis(latents[:, None], np.maximum(indices, 0)[..., None], axis=2)
  logits = np.where(indices >= 0, SCALE * np.sum(rows * q, axis=-1), -np.inf)
  lse = np.logaddexp.reduce(logits, axis=-1, keepdims=True)
  weights = np.full((BATCH, TIME, 1), SCALE, np.float32)
  kl = indexer_kl(*map(jnp.asarray, (q, latents, lse, q, weights, latents, indices)), SCALE)
  np.testing.assert_allclose(kl, 0, atol=1e-6)


def test_shapes_that_disagree_are_named():
  arguments = [jnp.asarray(x, jnp.float32) for x in problem()]
  arguments[5] = arguments[5][:, :-1]
  with pytest.raises(
    ValueError, match=r'indexer_kl: index_k has shape \(2, 18, 5\), expected \(2, 19, 5\)'
  ):
    indexer_kl(*arguments, SCALE)
