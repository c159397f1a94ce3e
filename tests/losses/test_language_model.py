"""The chunked cross-entropy and its hand-written gradient, against the plain formula."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.losses import language_model

ROWS, LENGTH, WIDTH, VOCAB = 2, 11, 6, 29


@pytest.fixture(scope='module')
def inputs():
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32) * 2
  head = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)
  targets = rng.integers(VOCAB, size=(ROWS, LENGTH)).astype(np.int32)
  weights = (rng.random((ROWS, LENGTH)) < 0.7).astype(np.float32)
  weights[0, 3] = 0.25
  return hidden, head, targets, weights


def _plain(hidden, head, targets, weights, z_loss):
  logits = jnp.einsum('BTD,DV->BTV', hidden, head)
  log_z = jax.nn.logsumexp(logits, axis=-1)
  nll = log_z - jnp.take_along_axis(logits, targets[..., None], axis=-1)[..., 0]
  correct = jnp.argmax(logits, axis=-1) == targets
  return jnp.sum(weights * (nll + z_loss * log_z**2)), (
    jnp.sum(weights * nll),
    jnp.sum(weights * correct),
  )


@pytest.mark.parametrize('chunk', [4, 11, 22, 1000])
@pytest.mark.parametrize('z_loss', [0.0, 0.05])
def test_value_and_gradients(inputs, chunk, z_loss):
  hidden, head, targets, weights = inputs

  def ours(hidden, head):
    sums = language_model.cross_entropy(hidden, head, targets, weights, chunk=chunk, z_loss=z_loss)
    return 0.3 * sums.loss, sums

  def plain(hidden, head):
    loss, rest = _plain(hidden, head, targets, weights, z_loss)
    return 0.3 * loss, (loss, *rest)

  gradients, sums = jax.grad(ours, argnums=(0, 1), has_aux=True)(hidden, head)
  expected, (loss, nll, correct) = jax.grad(plain, argnums=(0, 1), has_aux=True)(hidden, head)
  np.testing.assert_allclose(sums.loss, loss, rtol=2e-6)
  np.testing.assert_allclose(sums.nll, nll, rtol=2e-6)
  np.testing.assert_allclose(sums.correct, correct)
  np.testing.assert_allclose(sums.weight, weights.sum())
  for got, want in zip(gradients, expected, strict=True):
    np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(want).max())


def test_forward_alone_is_the_forward_of_the_gradient(inputs):
  """The two code paths (with and without a gradient) give one value."""
  hidden, head, targets, weights = inputs

  def loss(hidden):
    return language_model.cross_entropy(hidden, head, targets, weights, chunk=4).loss

  assert loss(hidden) == jax.value_and_grad(loss)(hidden)[0]


def test_large_logits_do_not_overflow():
  hidden = jnp.full((1, 2, 1), 1e4)
  head = jnp.array([[1.0, -1.0, 0.5]])
  targets = jnp.array([[0, 1]])
  sums = language_model.cross_entropy(hidden, head, targets, jnp.ones((1, 2)))
  np.testing.assert_allclose(sums.nll, 2e4, rtol=1e-6)


def _sizes(jaxpr) -> set[int]:
  """Element counts of everything that a jaxpr and those inside it compute."""
  out = {int(np.prod(v.aval.shape)) for eqn in jaxpr.eqns for v in eqn.outvars}
  for eqn in jaxpr.eqns:
    for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, 'jaxpr')):
      if hasattr(param, 'jaxpr'):
        out |= _sizes(param.jaxpr)
  return out


def test_logits_of_one_chunk_at_a_time():
  tokens, vocab, chunk = 64, 1000, 8

  def loss(hidden, head):
    targets = jnp.zeros((1, tokens), jnp.int32)
    weights = jnp.ones((1, tokens))
    return language_model.cross_entropy(hidden, head, targets, weights, chunk=chunk).loss

  args = jnp.zeros((1, tokens, 4)), jnp.zeros((4, vocab))
  sizes = _sizes(jax.make_jaxpr(jax.grad(loss, argnums=(0, 1)))(*args).jaxpr)
  assert max(sizes) == chunk * vocab


def test_mtp_targets_stay_in_their_segment():
  segments = jnp.array([[1, 1, 1, 2, 2, 0]])
  targets = jnp.array([[11, 12, 13, 21, 22, 0]])
  weights = jnp.array([[1.0, 1.0, 0.5, 1.0, 1.0, 0.0]])
  ids, counted = language_model.mtp_targets(targets, weights, segments, 1)
  assert counted.tolist() == [[1.0, 0.5, 0.0, 1.0, 0.0, 0.0]]
  assert ids[0, :2].tolist() == [12, 13]
  assert ids[0, 3] == 22
  ids, counted = language_model.mtp_targets(targets, weights, segments, 2)
  assert counted.tolist() == [[0.5, 0.0, 0.0, 0.0, 0.0, 0.0]]
  assert ids[0, 0] == 13
  assert not language_model.mtp_targets(targets, weights, segments, 9)[1].any()
