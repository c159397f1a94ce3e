"""Cross-stage distillation: eq. 2 through the loss of eq. 1, and the dense divergences."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glm5_jax.losses import distillation, policy
from tests import tiny

K = 4


def _log_softmax(x):
  x = np.asarray(x, np.float64)
  x = x - x.max(-1, keepdims=True)
  return x - np.log(np.exp(x).sum(-1, keepdims=True))


def _kl(student, teacher):
  """sum_v s_v (log s_v - log t_v) of log-probabilities, outcome by outcome."""
  out = np.zeros(student.shape[:-1])
  for i in np.ndindex(out.shape):
    out[i] = sum(np.exp(a) * (a - b) for a, b in zip(student[i], teacher[i], strict=True))
  return out


def _top(teacher_logits, k):
  logp = _log_softmax(teacher_logits)
  ids = np.argsort(-logp, axis=-1, kind='stable')[..., :k]
  return ids.astype(np.int32), np.take_along_axis(logp, ids, -1)


def _lumped(logits, ids):
  """Log-probabilities of the k ids and of everything else."""
  p = np.exp(_log_softmax(logits))
  chosen = np.take_along_axis(p, ids, -1)
  mask = np.ones(p.shape, bool)
  np.put_along_axis(mask, ids, False, -1)
  return np.log(np.concatenate([chosen, np.sum(p * mask, -1, keepdims=True)], -1))


def _logits(seed=0, shape=(2, 3, 9)):
  rng = np.random.default_rng(seed)
  return (2 * rng.normal(size=(2, *shape))).astype(np.float32)


def test_advantage_is_the_log_ratio_without_gradient():
  """A = sg[log teacher - log student]: positive where the teacher likes the token better."""
  teacher, student = jnp.array([[-1.0, -3.0]]), jnp.array([[-2.0, -0.5]])
  np.testing.assert_allclose(distillation.advantages(teacher, student), [[1.0, -2.5]])
  for argument in (0, 1):
    slope = jax.grad(lambda *a: jnp.sum(distillation.advantages(*a)), argument)
    gradient = slope(teacher, student)
    assert not np.any(gradient)


def test_eq_2_through_eq_1():
  """Gradient -w pop(rho) A on-policy, with several teachers, each for its own row."""
  rng = np.random.default_rng(0)
  student, *teachers = (-rng.gamma(2.0, 0.5, (3, 2, 5))).astype(np.float32)
  of = np.array([0, 1])
  teacher = np.stack(teachers)[of, np.arange(2)]
  rollout = student + np.array([0.1, -0.2, 0.0, 0.9, -0.9], np.float32)
  mask = np.array([[0, 1, 1, 1, 1], [0, 0, 1, 0, 1]], bool)
  sequences = np.ones((2, 5), np.int32)
  weights = policy.token_weights(mask, sequences, per='sequence')
  config = policy.PolicyConfig('icepop')

  def loss(logp):
    a = distillation.advantages(teacher, logp)
    e = policy.Experience(rollout, jax.lax.stop_gradient(logp), a, weights, sequences)
    return policy.policy_loss(logp, e, config)[0]

  want = np.zeros((2, 5))
  for b, t in np.argwhere(mask):
    rho = np.exp(float(student[b, t]) - float(rollout[b, t]))
    pop = rho if 0.5 <= rho <= 2 else 0.0
    want[b, t] = -pop * (float(teacher[b, t]) - float(student[b, t])) / mask[b].sum() / 2
  assert np.any(want) and not np.any(want[:, 3:])  # e^0.9 > 2: the last two are popped.
  np.testing.assert_allclose(tiny.fast_jit(jax.grad(loss))(student), want, rtol=1e-5, atol=1e-8)


def test_full_kl():
  student, teacher = _logits()
  want = _kl(_log_softmax(student), _log_softmax(teacher))
  np.testing.assert_allclose(distillation.full_kl(student, teacher), want, rtol=1e-5)
  both = jax.grad(lambda *a: jnp.sum(distillation.full_kl(*a)), (0, 1))
  ours, theirs = tiny.fast_jit(both)(student, teacher)
  logp = _log_softmax(student)
  slope = np.exp(logp) * (logp - _log_softmax(teacher) - want[..., None])
  np.testing.assert_allclose(ours, slope, atol=1e-6)
  assert not np.any(theirs)
  np.testing.assert_allclose(distillation.full_kl(student, student + 3), 0, atol=1e-6)


def test_top_k_kl():
  student, teacher = _logits(1)
  ids, logp = _top(teacher, K)
  want = _kl(_lumped(student, ids), _lumped(teacher, ids))
  np.testing.assert_allclose(distillation.top_k_kl(student, ids, logp), want, rtol=1e-4)

  def loss(student, logp):
    return jnp.sum(distillation.top_k_kl(student, ids, logp))

  ours, theirs = tiny.fast_jit(jax.grad(loss, (0, 1)))(student, logp.astype(np.float32))
  assert not np.any(theirs)
  numeric = np.zeros(student.shape)
  for i in np.ndindex(student.shape):
    moved = np.zeros(student.shape)
    moved[i] = 1e-6
    up, down = (
      _kl(_lumped(student + d, ids), _lumped(teacher, ids)).sum() for d in (moved, -moved)
    )
    numeric[i] = (up - down) / 2e-6
  np.testing.assert_allclose(ours, numeric, atol=1e-5)


def test_a_teacher_who_is_sure():
  """ "Anything else" is 1e-4 for the teacher and most of the student: many nats, not cut short."""
  student = np.zeros((1, 20), np.float32)
  teacher = np.where(np.arange(20) < K, 0, np.log(4e-4 / 16)).astype(np.float32)[None]
  ids, logp = _top(teacher, K)
  want = _kl(_lumped(student, ids), _lumped(teacher, ids))
  assert want > 6
  np.testing.assert_allclose(distillation.top_k_kl(student, ids, logp), want, atol=2e-3)


def test_everything_is_the_top_k():
  """k = V: the full divergence and its gradient."""
  student, teacher = _logits(2)
  ids, logp = _top(teacher, student.shape[-1])
  np.testing.assert_allclose(
    distillation.top_k_kl(student, ids, logp), distillation.full_kl(student, teacher), atol=1e-5
  )
  top = tiny.fast_jit(jax.grad(lambda s: jnp.sum(distillation.top_k_kl(s, ids, logp))))(student)
  full = tiny.fast_jit(jax.grad(lambda s: jnp.sum(distillation.full_kl(s, teacher))))(student)
  np.testing.assert_allclose(top, full, atol=1e-5)


@tiny.fast_jit
def _full_and_top(student, teacher, ids, logp):
  return distillation.full_kl(student, teacher), distillation.top_k_kl(student, ids, logp)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(hnp.arrays(np.float32, (2, 12), elements=st.floats(-8, 8, width=32)))
def test_bounds(logits):
  """0 <= top-k <= full, whatever the distributions, but for the rounding of 1 - sum of k."""
  student, teacher = logits
  ids, logp = _top(teacher, K)
  full, top = _full_and_top(student, teacher, ids, logp.astype(np.float32))
  ours, theirs = (np.exp(_lumped(a, ids)[-1]) for a in (student, teacher))
  slack = 1e-5 + ours * 4e-7 / theirs
  assert -slack <= top <= full + slack


def test_half_precision_logits_are_compared_in_float32():
  student, teacher = (jnp.asarray(a, jnp.bfloat16) for a in _logits(3))
  got = distillation.full_kl(student, teacher)
  assert got.dtype == jnp.float32
  want = _kl(
    _log_softmax(np.asarray(student, np.float32)), _log_softmax(np.asarray(teacher, np.float32))
  )
  np.testing.assert_allclose(got, want, rtol=1e-5)
