"""Dense MLA attention: a float64 oracle written by loops, the reference, and the interpreted kernel."""

import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.sharding import row_order
from pallas_kernels import dense_mla

SCALE = 0.3


def problem(keys: int, heads: int, dim: int, dim_v: int):
  """q, k, v, segments of two rows, and the output's cotangent; documents, and padding in the second."""
  rng = np.random.default_rng(keys + dim)
  q, k = rng.standard_normal((2, 2, keys, heads, dim))
  v, g = rng.standard_normal((2, 2, keys, heads, dim_v))
  third = keys // 3
  segments = np.repeat([[1, 2, 3], [7, 2, 0]], [third, third, keys - 2 * third], axis=1)
  return q, k, v, segments, g


def oracle(q, k, v, segments, g):
  """Output, log-sum-exp (0 for padding), and gradients, one query at a time, in float64."""
  out, lse = np.zeros_like(v), np.zeros(q.shape[:3])
  d_q, d_k, d_v = (np.zeros_like(x) for x in (q, k, v))
  for b, t, n in np.ndindex(q.shape[:3]):
    seen = np.flatnonzero(segments[b, : t + 1] == segments[b, t])
    if segments[b, t] == 0:
      continue
    logits = SCALE * k[b, seen, n] @ q[b, t, n]
    lse[b, t, n] = np.logaddexp.reduce(logits)
    probs = np.exp(logits - lse[b, t, n])
    out[b, t, n] = probs @ v[b, seen, n]
    d_probs = v[b, seen, n] @ g[b, t, n]
    d_logits = SCALE * probs * (d_probs - probs @ d_probs)
    d_q[b, t, n] = d_logits @ k[b, seen, n]
    d_k[b, seen, n] += d_logits[:, None] * q[b, t, n]
    d_v[b, seen, n] += probs[:, None] * g[b, t, n]
  return out, lse, (d_q, d_k, d_v)


def run(implementation, part, parts, want_lse, q, k, v, segments, g, dtype=jnp.float32):
  """The same of `dense_mla`, for one of the parts of the queries."""
  own = row_order(parts, q.shape[1]).reshape(parts, -1)[part]
  segments = jnp.asarray(segments, jnp.int32)

  def loss(q, k, v):
    out, lse = dense_mla(
      q[:, own], k, v, segments[:, own], segments, SCALE, part=jnp.int32(part), want_lse=want_lse,
      implementation=implementation, interpret=True,
    )  # fmt: skip
    return jnp.sum(out * jnp.asarray(g[:, own], out.dtype)), (out, lse)

  arguments = (jnp.asarray(x, dtype) for x in (q, k, v))
  (_, (out, lse)), grads = jax.jit(jax.value_and_grad(loss, (0, 1, 2), has_aux=True))(*arguments)
  return out, lse, grads


def check(got, want, segments, tolerance):
  out, lse, grads = got
  valid = (segments > 0)[..., None]
  found = {'output': (out, want[0])}
  if lse is not None:
    found['log-sum-exp'] = np.where(valid, lse, 0), want[1]
  found |= {f'gradient of {n}': pair for n, *pair in zip('qkv', grads, want[2], strict=True)}
  for name, (x, y) in found.items():
    np.testing.assert_allclose(x, y, atol=tolerance * np.max(np.abs(y)), rtol=0, err_msg=name)


# An odd length with small heads, and whole blocks with lanes to spare.
SHAPES = [(37, 3, 24, 40), (256, 2, 128, 64)]


@pytest.mark.parametrize('want_lse', [False, True], ids=['', 'lse'])
@pytest.mark.parametrize('shape', SHAPES, ids=str)
@pytest.mark.parametrize('implementation', ['reference', 'tpu'])
def test_output_and_gradients(implementation, shape, want_lse):
  arguments = problem(*shape)
  got = run(implementation, 0, 1, want_lse, *arguments)
  check(got, oracle(*arguments), arguments[3], 5e-6)


@pytest.mark.parametrize('implementation', ['reference', 'tpu'])
def test_parts_of_a_row_add_up(implementation):
  """What devices along `context` compute: their queries' outputs, and shares of the keys' gradients."""
  arguments = problem(360, 2, 32, 32)
  parts = [run(implementation, part, 4, True, *arguments) for part in range(4)]
  places = np.argsort(row_order(4, 360))
  out, lse = (np.concatenate([p[i] for p in parts], axis=1)[:, places] for i in (0, 1))
  grads = [sum(np.asarray(p[2][i]) for p in parts) for i in range(3)]
  check((out, lse, grads), oracle(*arguments), arguments[3], 5e-6)


def test_two_backward_kernels_give_the_same(monkeypatch):
  """Of long rows, dq has a kernel of its own."""
  arguments = problem(256, 2, 32, 32)
  together = run('tpu', 0, 1, False, *arguments)
  monkeypatch.setattr(sys.modules[dense_mla.__module__], 'FUSED_KEYS', 0)
  apart = run('tpu', 0, 1, False, *arguments)
  for x, y in zip(together[2], apart[2], strict=True):
    np.testing.assert_allclose(x, y, atol=2e-6)


def test_bfloat16_is_as_far_from_float64_as_the_references_is():
  arguments = problem(256, 2, 128, 128)
  want = oracle(*arguments)[0]
  errors = {
    name: np.sqrt(
      np.mean((np.float64(run(name, 0, 1, False, *arguments, jnp.bfloat16)[0]) - want) ** 2)
    )
    for name in ('reference', 'tpu')
  }
  print(f'[bf16] {errors}')
  assert errors['tpu'] < 1.5 * errors['reference']


def test_what_does_not_fit_is_said():
  q, k, v, segments, _ = problem(256, 2, 32, 32)
  segments = jnp.asarray(segments)
  with pytest.raises(ValueError, match='an even divisor of it'):
    dense_mla(q[:, :100], k, v, segments[:, :100], segments, SCALE)
  with pytest.raises(ValueError, match=r'segments \(2, 100\)'):
    dense_mla(q, k, v, segments[:, :100], segments, SCALE)
  with pytest.raises(ValueError, match="implementation='gpu'"):
    dense_mla(q, k, v, segments, segments, SCALE, implementation='gpu')
