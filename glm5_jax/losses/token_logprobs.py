"""log pi(token) of given tokens from hidden states, chunked so that [B, T, V] logits never exist."""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp


class TokenLogprobs(NamedTuple):
  """Per token, float32."""

  logprob: jax.Array  # [B, T], nats
  entropy: jax.Array  # [B, T], nats, of the whole distribution; no gradient


def token_logprobs(
  hidden: jax.Array,
  head: jax.Array,
  targets: jax.Array,
  *,
  temperature: float = 1.0,
  chunk: int = 1024,
) -> TokenLogprobs:
  """log softmax(hidden @ head / temperature)[target] of every token; differentiable.

  The backward pass recomputes a chunk's logits, so that at most [chunk, V] exist at a time.

  Args:
    hidden: [B, T, D] final hidden states.
    head: [D, V] output matrix.
    targets: [B, T] int32 ids.
    temperature: of the distribution the tokens were sampled from.
    chunk: tokens per chunk.
  """
  tokens = targets.size
  chunk = min(chunk, tokens)
  pad = -tokens % chunk
  h = jnp.pad(hidden.reshape(tokens, -1), ((0, pad), (0, 0)))
  t = jnp.pad(targets.reshape(tokens), (0, pad))
  one = jax.checkpoint(functools.partial(_chunk, head=head, temperature=temperature))
  with jax.named_scope('token_logprobs'):
    result = jax.lax.map(one, (h.reshape(-1, chunk, h.shape[-1]), t.reshape(-1, chunk)))
  return TokenLogprobs(*(a.reshape(-1)[:tokens].reshape(targets.shape) for a in result))


def _chunk(inputs, *, head, temperature):
  h, targets = inputs
  logits = jnp.einsum('TD,DV->TV', h, head.astype(h.dtype), preferred_element_type=jnp.float32)
  logp = jax.nn.log_softmax(logits / temperature, axis=-1)
  entropy = -jnp.sum(jnp.exp(logp) * logp, axis=-1)
  chosen = jnp.take_along_axis(logp, targets[:, None], axis=-1)[:, 0]
  return chosen, jax.lax.stop_gradient(entropy)
