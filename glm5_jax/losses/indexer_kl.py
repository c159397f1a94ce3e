"""The indexer's loss: KL from the attention distribution to the index distribution.

DeepSeek-V3.2 (arXiv 2512.02556) section 2.1, which GLM-5 follows (section 2.1.1):
  dense warm-up   L_I = sum_t KL( p[t, :]   || softmax(I[t, :])   ), over every visible key
  sparse stage    L_I = sum_t KL( p[t, S_t] || softmax(I[t, S_t]) ), over the selected keys
with p the attention probabilities summed over heads and L1-normalised, i.e. their mean.
"""

import jax
import jax.numpy as jnp


def kl_per_query(scores: jax.Array, target: jax.Array, mask: jax.Array) -> jax.Array:
  """KL(target || softmax(scores)) over the keys where `mask`; [B, T] float32, in nats.

  The gradient reaches `scores` only: dL/dI = softmax(I) - p on the support.

  Args:
    scores: [B, T, S] index scores.
    target: [B, T, S] mean attention probability, summing to 1 over `mask` (0 in empty rows).
    mask: [B, T, S] bool; the selection in the sparse stage, everything visible in the warm-up.
  """
  target = jax.lax.stop_gradient(target)
  scores = jnp.where(mask, scores, -jnp.inf)
  highest = jax.lax.stop_gradient(jnp.max(scores, axis=-1, keepdims=True, initial=-1e30))
  centred = jnp.where(mask, scores - highest, 0.0)
  log_total = jnp.log(jnp.maximum(jnp.sum(jnp.exp(centred) * mask, axis=-1, keepdims=True), 1e-30))
  log_q = centred - log_total
  log_p = jnp.log(jnp.maximum(target, 1e-30))
  return jnp.sum(jnp.where(mask, target * (log_p - log_q), 0.0), axis=-1)
