"""The expert router: sigmoid scores, a selection-only correction bias, optional group limit.

Section 2.1; DeepSeek-V3 (arXiv 2412.19437) section 2.1.2; auxiliary-loss-free balancing 2408.15664.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.ops import collectives
from glm5_jax.sharding import BATCH_AXES


class Routing(NamedTuple):
  """Who computes each token, and with what weight."""

  experts: jax.Array  # [T, K] int32
  weights: jax.Array  # [T, K] float32
  logits: jax.Array  # [T, E] float32
  scores: jax.Array  # [T, E] float32, sigmoid or softmax of the logits


def route(x: jax.Array, w: jax.Array, bias: jax.Array, config: ModelConfig) -> Routing:
  """Chooses `num_experts_per_tok` experts for each row of `x` [T, D].

  The choice maximises score + `bias`; the weights use the scores alone, so `bias` gets no gradient.
  Float32 throughout. Among equal scores the lowest expert wins.
  """
  logits = jnp.einsum('TD,DE->TE', x.astype(jnp.float32), w.astype(jnp.float32))
  activation = jax.nn.sigmoid if config.scoring_func == 'sigmoid' else jax.nn.softmax
  scores = activation(logits)
  choice = jax.lax.stop_gradient(scores) + jax.lax.stop_gradient(bias)
  if config.n_group > 1:
    choice = _limit_groups(choice, config)
  _, experts = jax.lax.top_k(choice, config.num_experts_per_tok)
  weights = jnp.take_along_axis(scores, experts, axis=1)
  if config.norm_topk_prob:
    weights = weights / (jnp.sum(weights, axis=1, keepdims=True) + 1e-20)
  return Routing(experts, weights * config.routed_scaling_factor, logits, scores)


def _limit_groups(choice: jax.Array, config: ModelConfig) -> jax.Array:
  """Keeps the `topk_group` groups whose two best experts sum highest; the others become -inf."""
  grouped = choice.reshape(choice.shape[0], config.n_group, -1)
  group_score = jnp.sum(jax.lax.top_k(grouped, 2)[0], axis=-1)
  _, best = jax.lax.top_k(group_score, config.topk_group)
  keep = jnp.any(best[:, :, None] == jnp.arange(config.n_group), axis=1)
  return jnp.where(keep[:, :, None], grouped, -jnp.inf).reshape(choice.shape)


def load(routing: Routing, valid: jax.Array, num_experts: int) -> jax.Array:
  """[E] float32: the share of the valid tokens' choices that each expert received; sums to 1."""
  hits = jnp.any(routing.experts[:, :, None] == jnp.arange(num_experts), axis=1)  # [T, E]
  counts = jnp.sum(hits & valid[:, None], axis=0, dtype=jnp.float32)
  counts = collectives.psum(counts, *collectives.TOKEN_AXES)
  return counts / jnp.maximum(jnp.sum(counts), 1.0)


def balance_loss(routing: Routing, valid: jax.Array, batch: int, config: ModelConfig) -> jax.Array:
  """Sequence-wise balance loss, arXiv 2412.19437 eq. 17-20, mean over the `batch` rows; 1 if even.

  sum_e f_e P_e with f_e = E / (K T) * (tokens of the sequence that chose e), P_e = mean over the
  sequence of e's normalised score. `valid` [batch * T] excludes padding.
  """
  num_experts = config.n_routed_experts

  def over_sequence(x):
    return collectives.psum(jnp.sum(x, axis=1), 'context')

  mask = valid.reshape(batch, -1, 1).astype(jnp.float32)
  tokens = jnp.maximum(over_sequence(mask), 1.0)
  hits = jnp.any(routing.experts[:, :, None] == jnp.arange(num_experts), axis=1)
  hits = hits.reshape(batch, -1, num_experts).astype(jnp.float32)
  f = over_sequence(hits * mask) * num_experts / (config.num_experts_per_tok * tokens)
  scores = routing.scores / (jnp.sum(routing.scores, axis=-1, keepdims=True) + 1e-20)
  p = over_sequence(scores.reshape(batch, -1, num_experts) * mask) / tokens
  return collectives.pmean(jnp.mean(jnp.sum(f * p, axis=-1)), *BATCH_AXES)


def updated_bias(bias: jax.Array, load: jax.Array, rate: float | jax.Array) -> jax.Array:
  """Loss-free balancing: b_e += rate * sign(mean load - load_e) (arXiv 2408.15664, alg. 1)."""
  mean = jnp.mean(load, axis=-1, keepdims=True)
  return bias + rate * jnp.sign(mean - load)
