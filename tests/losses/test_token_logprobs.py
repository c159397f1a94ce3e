"""Log-probabilities of given tokens, chunk by chunk, against a float64 softmax of everything."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.losses.token_logprobs import token_logprobs
from tests import tiny

ROWS, LENGTH, WIDTH, VOCAB = 2, 7, 5, 23


@pytest.fixture(scope='module')
def inputs():
  rng = np.random.default_rng(0)
  hidden = rng.normal(size=(ROWS, LENGTH, WIDTH)).astype(np.float32) * 2
  head = rng.normal(size=(WIDTH, VOCAB)).astype(np.float32)
  targets = rng.integers(VOCAB, size=(ROWS, LENGTH)).astype(np.int32)
  cotangent = rng.normal(size=(ROWS, LENGTH)).astype(np.float32)
  return hidden, head, targets, cotangent


def _oracle(hidden, head, targets, cotangent, temperature):
  """(log-probs, entropies, gradients of sum(cotangent * log-probs)), token by token in float64."""
  hidden, head = hidden.astype(np.float64), head.astype(np.float64)
  logprob, entropy = np.zeros(targets.shape), np.zeros(targets.shape)
  dhidden, dhead = np.zeros_like(hidden), np.zeros_like(head)
  for i in np.ndindex(targets.shape):
    logits = hidden[i] @ head / temperature
    p = np.exp(logits - logits.max())
    p /= p.sum()
    logprob[i] = np.log(p[targets[i]])
    entropy[i] = -np.sum(p * np.log(p))
    dlogits = cotangent[i] * (np.eye(len(p))[targets[i]] - p) / temperature
    dhidden[i] = head @ dlogits
    dhead += np.outer(hidden[i], dlogits)
  return logprob, entropy, dhidden, dhead


@pytest.mark.parametrize('temperature', [1.0, 0.6, 1.7])
@pytest.mark.parametrize('chunk', [1, 4, 14, 1000])
def test_value_and_gradients(inputs, chunk, temperature):
  hidden, head, targets, cotangent = inputs

  def loss(hidden, head):
    out = token_logprobs(hidden, head, targets, temperature=temperature, chunk=chunk)
    return jnp.sum(cotangent * out.logprob), out

  gradients, out = tiny.fast_jit(jax.grad(loss, argnums=(0, 1), has_aux=True))(hidden, head)
  *values, dhidden, dhead = _oracle(hidden, head, targets, cotangent, temperature)
  for got, want in zip((*out, *gradients), (*values, dhidden, dhead), strict=True):
    assert got.shape == want.shape and got.dtype == jnp.float32
    np.testing.assert_allclose(got, want, atol=3e-6 * np.abs(want).max())


def test_entropy_is_only_reported(inputs):
  hidden, head, targets, _ = inputs
  gradient = jax.grad(lambda h: jnp.sum(token_logprobs(h, head, targets).entropy))(hidden)
  assert not np.any(gradient)


def test_large_logits():
  """Differences of 1e4 nats: no overflow, and an entropy of zero rather than of nan."""
  hidden = jnp.full((1, 2, 1), 1e4)
  head = jnp.array([[1.0, -1.0, 0.5]])
  targets = jnp.array([[0, 1]])
  out = token_logprobs(hidden, head, targets)
  np.testing.assert_allclose(out.logprob, [[0, -2e4]])
  np.testing.assert_allclose(out.entropy, 0, atol=1e-6)
  gradient = jax.grad(lambda h: jnp.sum(token_logprobs(h, head, targets).logprob))(hidden)
  np.testing.assert_allclose(gradient[..., 0], [[0, -2]])


def test_half_precision_sums_in_float32(inputs):
  """bfloat16 inputs: the numbers of the same, rounded, inputs in float32."""
  hidden, head, targets, _ = inputs
  rounded = jnp.asarray(hidden, jnp.bfloat16)
  weights = jnp.asarray(head, jnp.bfloat16)
  got = token_logprobs(rounded, weights.astype(jnp.float32), targets, chunk=4)
  want = token_logprobs(rounded.astype(jnp.float32), weights.astype(jnp.float32), targets)
  assert got.logprob.dtype == jnp.float32
  np.testing.assert_allclose(got.logprob, want.logprob, atol=1e-5)


def test_one_chunk_of_logits_at_a_time():
  """Forward and backward, as compiled: no array is larger than a chunk's logits."""
  tokens, vocab, chunk, width = 64, 1000, 8, 4

  def loss(hidden, head):
    return jnp.sum(token_logprobs(hidden, head, jnp.zeros((2, 32), int), chunk=chunk).logprob)

  def largest(size):
    args = jnp.zeros((2, tokens // 2, width)), jnp.zeros((width, vocab))
    step = jax.grad(lambda *a: loss(*a) if size == chunk else whole(*a), argnums=(0, 1))
    text = jax.jit(step).lower(*args).compile().as_text()
    shapes = re.findall(r'\b(?:f32|bf16|f16|s32|u32|pred)\[([\d,]*)\]', text)
    return max(int(np.prod([int(n) for n in shape.split(',') if n])) for shape in shapes)

  def whole(hidden, head):
    return jnp.sum(jax.nn.log_softmax(hidden @ head)[..., 0])

  assert largest(tokens) == tokens * vocab, 'the measurement sees no logits'
  assert largest(chunk) == chunk * vocab
