"""Next-token and multi-token cross-entropy, chunked so that [B, T, V] logits never exist.

Section 2.4.1 of the paper: output projection and loss run chunk by chunk, forward and backward
together, and a chunk's activations are released before the next one starts. The gradient of a mean
of cross-entropies is known as soon as the logits are, so the forward pass computes it on the spot and
the backward pass only scales it: no logits are kept and none are recomputed.
"""

import functools
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp


class Sums(NamedTuple):
  """Weighted sums over tokens, float32 scalars; divide by `weight` for means."""

  loss: jax.Array  # nll plus the z-loss term
  nll: jax.Array  # nats
  correct: jax.Array  # tokens whose target has the highest logit
  weight: jax.Array


class Tokens(NamedTuple):
  """Tokens whose summed loss counts `factor` times.

  hidden [B, T, D] are final hidden states, targets [B, T] int32 (ignored where the weight is 0), weights
  [B, T] float32, factor a scalar.
  """

  hidden: jax.Array
  targets: jax.Array
  weights: jax.Array
  factor: jax.Array | float = 1.0


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

  Arguments are those of `Tokens` and `total_loss`.
  """
  total, (sums,) = total_loss([Tokens(hidden, targets, weights)], head, chunk=chunk, z_loss=z_loss)
  return sums._replace(loss=total)


def total_loss(
  groups: Sequence[Tokens],
  head: jax.Array,
  *,
  chunk: int = 1024,
  z_loss: float = 0.0,
  whole: Callable[[jax.Array], jax.Array] = lambda head: head,
) -> tuple[jax.Array, list[Sums]]:
  """The sum of all groups' losses times their factors, and the sums of each.

  All groups share one whole gradient of the head, [D, V] in float32, which exists no longer than the
  loss is computed. Only the total carries gradients.

  Args:
    groups: the main model's tokens, and those of every MTP step.
    head: [D, V] output matrix, or the part of it that a device has.
    chunk: tokens per chunk; at most [chunk, V] logits exist at once, in float32.
    z_loss: coefficient of log(Z)^2, PaLM's regulariser of the normaliser; 0 for none.
    whole: makes `head` whole. What is kept until the backward pass is the gradient of the part.
  """
  sizes = [group.targets.size for group in groups]
  count = -(-sum(sizes) // chunk)
  rows = -(-sum(sizes) // count)  # As even as can be: padding costs as much as tokens.

  def chunked(parts):
    flat = jnp.concatenate([a.reshape(n, *a.shape[2:]) for n, a in zip(sizes, parts, strict=True)])
    flat = jnp.pad(flat, [(0, count * rows - sum(sizes))] + [(0, 0)] * (flat.ndim - 1))
    return flat.reshape(count, rows, *flat.shape[1:])

  tokens = [
    (g.hidden, g.targets, g.weights.astype(jnp.float32), jnp.full(g.weights.shape, g.factor, 'f4'))
    for g in groups
  ]
  inputs = map(chunked, zip(*tokens, strict=True))
  with jax.named_scope('cross_entropy'):
    total, sums = _chunked(*inputs, head, z_loss, whole)
  loss, nll, correct = (a.reshape(-1) for a in jax.lax.stop_gradient(sums))
  found, end = [], 0
  for size, group in zip(sizes, groups, strict=True):
    own = slice(end, end := end + size)
    parts = jnp.sum(loss[own]), jnp.sum(nll[own]), jnp.sum(correct[own])
    found.append(Sums(*parts, jnp.sum(group.weights, dtype=jnp.float32)))
  return total, found


def _of_tokens(h, targets, weights, head, z_loss):
  """Weighted loss, nll and hits [T] of the tokens of a chunk, and what their gradient needs."""
  logits = jnp.einsum('TD,DV->TV', h, head.astype(h.dtype), preferred_element_type=jnp.float32)
  highest = jnp.max(logits, axis=-1)
  log_z = jnp.log(jnp.sum(jnp.exp(logits - highest[:, None]), axis=-1)) + highest
  target_logit = jnp.take_along_axis(logits, targets[:, None], axis=-1)[:, 0]
  nll = (log_z - target_logit) * weights
  loss = nll + z_loss * log_z**2 * weights
  return (loss, nll, (target_logit >= highest) * weights), (logits, log_z)


@functools.partial(jax.custom_vjp, nondiff_argnums=(5, 6))
def _chunked(h, targets, weights, factors, head, z_loss, whole):
  head = whole(head)

  def body(total, xs):
    h, targets, weights, factors = xs
    tokens, _ = _of_tokens(h, targets, weights, head, z_loss)
    return total + jnp.sum(factors * tokens[0]), tokens

  return jax.lax.scan(body, jnp.float32(0), (h, targets, weights, factors))


def _chunked_fwd(h, targets, weights, factors, head, z_loss, whole):
  head, to_part = jax.vjp(whole, head)

  def body(carry, xs):
    total, dhead = carry
    h, targets, weights, factors = xs
    tokens, (logits, log_z) = _of_tokens(h, targets, weights, head, z_loss)
    # d loss / d logits = weight * (softmax * (1 + 2 z log Z) - onehot)
    weights = weights * factors
    row = weights * (1.0 + 2.0 * z_loss * log_z)
    hit = jnp.arange(logits.shape[1]) == targets[:, None]
    dlogits = jnp.exp(logits - log_z[:, None]) * row[:, None] - hit * weights[:, None]
    dlogits = dlogits.astype(h.dtype)
    dh = jnp.einsum('TV,DV->TD', dlogits, head.astype(h.dtype))
    dhead += jnp.einsum('TD,TV->DV', h, dlogits, preferred_element_type=jnp.float32)
    return (total + jnp.sum(factors * tokens[0]), dhead), (tokens, dh)

  start = jnp.float32(0), jnp.zeros(head.shape, jnp.float32)
  (total, dhead), (tokens, dh) = jax.lax.scan(body, start, (h, targets, weights, factors))
  (dhead,) = to_part(dhead.astype(head.dtype))
  return (total, tokens), (dh, dhead)


def _chunked_bwd(z_loss, whole, residuals, g):
  del z_loss, whole
  dh, dhead = residuals
  return dh * g[0].astype(dh.dtype), None, None, None, dhead * g[0].astype(dhead.dtype)


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
