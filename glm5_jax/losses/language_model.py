"""Next-token and multi-token cross-entropy, chunked so that [B, T, V] logits never exist.

Section 2.4.1 of the paper: output projection and loss run chunk by chunk, forward and backward
together, and a chunk's activations are released before the next one starts. The gradient of a mean
of cross-entropies is known as soon as the logits are, so the forward pass computes it on the spot and
the backward pass only scales it: no logits are kept and none are recomputed.
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
  """Weighted sums over tokens, float32 scalars; divide by `weight` for means."""

  loss: jax.Array  # nll plus the z-loss term
  nll: jax.Array  # nats
  correct: jax.Array  # tokens whose target has the highest logit
  weight: jax.Array


def cross_entropy(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  weights: jax.Array,
  *,
  chunk: int = 1024,
  z_loss: float = 0.0,
) -> Sums:
  """Sums of -log softmax(hidden @ head)[target] over all tokens; only `loss` carries gradients.

  Args:
    hidden: [B, T, D] final hidden states.
    head: [D, V] output matrix.
    targets: [B, T] int32; ignored where the weight is 0.
    weights: [B, T] float32.
    chunk: tokens per chunk; at most [chunk, V] logits exist at once, in float32.
    z_loss: coefficient of log(Z)^2, PaLM's regulariser of the normaliser; 0 for none.
  """
  dim = hidden.shape[-1]
  tokens = targets.size
  chunk = min(chunk, tokens)
  pad = -tokens % chunk

  def chunked(a, *shape):
    a = a.reshape(tokens, *shape)
    a = jnp.pad(a, [(0, pad)] + [(0, 0)] * len(shape))
    return a.reshape(-1, chunk, *shape)

  inputs = chunked(hidden, dim), chunked(targets), chunked(weights.astype(jnp.float32))
  with jax.named_scope('cross_entropy'):
    loss, nll, correct = _chunked(*inputs, head, z_loss)
  return Sums(loss, nll, correct, jnp.sum(weights, dtype=jnp.float32))


def _chunk_sums(h, targets, weights, head, z_loss):
  """Sums of one chunk, and what its gradient needs."""
  logits = jnp.einsum('TD,DV->TV', h, head.astype(h.dtype), preferred_element_type=jnp.float32)
  highest = jnp.max(logits, axis=-1)
  log_z = jnp.log(jnp.sum(jnp.exp(logits - highest[:, None]), axis=-1)) + highest
  target_logit = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
  nll = jnp.sum((log_z - target_logit) * weights)
  loss = nll + z_loss * jnp.sum(log_z**2 * weights)
  correct = jnp.sum((target_logit >= highest) * weights)
  return (loss, nll, correct), (logits, log_z)


@functools.partial(jax.custom_vjp, nondiff_argnums=(4,))
def _chunked(h, targets, weights, head, z_loss):
  def body(sums, xs):
    h, targets, weights = xs
    new, _ = _chunk_sums(h, targets, weights, head, z_loss)
    return jax.tree.map(jnp.add, sums, new), None

  return jax.lax.scan(body, (jnp.float32(0),) * 3, (h, targets, weights))[0]


def _chunked_fwd(h, targets, weights, head, z_loss):
  def body(carry, xs):
    sums, dhead = carry
    h, targets, weights = xs
    new, (logits, log_z) = _chunk_sums(h, targets, weights, head, z_loss)
    # d loss / d logits = weight * (softmax * (1 + 2 z log Z) - onehot)
    row = weights * (1.0 + 2.0 * z_loss * log_z)
    hit = jnp.arange(logits.shape[1]) == targets[:, None]
    dlogits = jnp.exp(logits - log_z[:, None]) * row[:, None] - hit * weights[:, None]
    dlogits = dlogits.astype(h.dtype)
    dh = jnp.einsum('TV,DV->TD', dlogits, head.astype(h.dtype))
    dhead += jnp.einsum('TD,TV->DV', h, dlogits, preferred_element_type=jnp.float32)
    return (jax.tree.map(jnp.add, sums, new), dhead), dh

  start = (jnp.float32(0),) * 3, jnp.zeros(head.shape, jnp.float32)
  (sums, dhead), dh = jax.lax.scan(body, start, (h, targets, weights))
  return sums, (dh, dhead.astype(head.dtype))


def _chunked_bwd(z_loss, residuals, g):
  del z_loss
  dh, dhead = residuals
  return dh * g[0].astype(dh.dtype), None, None, dhead * g[0].astype(dhead.dtype)


_chunked.defvjp(_chunked_fwd, _chunked_bwd)


def mtp_targets(
  targets: jax.Array, weights: jax.Array, segment_ids: jax.Array, step: int
) -> tuple[jax.Array, jax.Array]:
  """Targets and weights of MTP step `step` (1, 2, ...): the token `step` beyond the next one.

  A position counts if that token lies in the same segment of the row and counts itself.
  All arrays [B, T].
  """
  length = targets.shape[1]
  by = min(step, length)

  def shift(a):
    return jnp.pad(a[:, by:], ((0, 0), (0, by)))

  same = (shift(segment_ids) == segment_ids) & (segment_ids > 0)
  return shift(targets), shift(weights) * same
