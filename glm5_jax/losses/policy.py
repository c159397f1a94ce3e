"""Policy-gradient objectives of GLM-5 and labelled alternatives: one function each, to be minimised.

GLM-5's own:
  double_sided   direct double-sided importance sampling, agentic RL (section 4.1, eq. 3-5)
  icepop         GRPO with IcePop, reasoning RL (section 3.2, eq. 1) and distillation (eq. 2)
Not in the paper, to compare with:
  on_policy      no correction at all
  importance     plain importance sampling
  truncated      truncated importance sampling, the ratio capped (rho-bar of V-trace)
  ppo            clipped surrogate (arXiv 1707.06347, eq. 7)
  gspo           sequence-level ratio (arXiv 2507.18071, eq. 5-7)
  cispo          clipped importance weight on log pi (arXiv 2506.13585, eq. 4)

All of them see the same things. A batch is [B, T] tokens, of which the model wrote those with a
positive weight; the weights hold the reduction (`token_weights`), so a loss is always
sum_t weight_t * loss_t, and micro-batches and packed rows need no other arithmetic. A token that an
objective rejects contributes nothing but keeps its weight: it stays in the denominator.
"""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

Metrics = dict[str, jax.Array]
# log2 of the borders of the ratio histogram.
RATIO_BINS = (-4.0, -2.0, -1.0, -0.5, -0.2, -0.05, 0.05, 0.2, 0.5, 1.0, 2.0, 4.0)


class Experience(NamedTuple):
  """What a policy was when it acted, and how good that was. All [B, T] float32 but `sequences`."""

  # log-probabilities that the engine sampled with: pi_rollout, pi^infer_old.
  rollout: jax.Array
  # The trainer's own before the update: pi^train_old. `rollout` where nothing was recomputed.
  old: jax.Array
  advantages: jax.Array
  weights: jax.Array  # See `token_weights`; 0 where the model did not write the token.
  sequences: jax.Array  # int32 segment ids of the row, 0 for padding.


@dataclasses.dataclass(frozen=True)
class PolicyConfig:
  """Which objective, and its constants. Each objective reads only its own."""

  objective: str = 'icepop'
  # Eq. 1: 0.2 and 0.28. Eq. 5: the paper names no values; our choice then is in the config.
  eps_low: float = 0.2
  eps_high: float = 0.28
  beta: float = 2.0  # Eq. 1: pop keeps train/infer ratios within [1 / beta, beta].
  rho_max: float = 2.0  # `truncated`: cap of the ratio.

  def __post_init__(self):
    if self.objective not in OBJECTIVES:
      known = ', '.join(OBJECTIVES)
      raise ValueError(f'unknown policy objective {self.objective!r}; known are {known}')
    if not (0 <= self.eps_low <= 1 and self.eps_high >= 0):
      raise ValueError(
        f'eps_low={self.eps_low}, eps_high={self.eps_high}: need 0 <= eps_low <= 1, eps_high >= 0'
      )
    if self.beta < 1 or self.rho_max <= 0:
      raise ValueError(f'beta={self.beta} must be at least 1 and rho_max={self.rho_max} positive')


def policy_loss(
  logprobs: jax.Array, experience: Experience, config: PolicyConfig
) -> tuple[jax.Array, Metrics]:
  """The loss (minimised) and its metrics.

  Args:
    logprobs: [B, T] of the policy that is trained; the gradient flows through these alone.
    experience: the rest, treated as constants.
    config: the objective.

  Returns:
    A float32 scalar, and sums weighted like the loss: 'masked' (fraction of tokens without gradient
    through the objective's own rule), 'kl_behaviour' (k3 estimate of KL(rollout || policy)), 'ratio'
    (mean of policy / rollout), 'logprob_gap' (mean of |old - rollout|), 'logprob_gap_max' (over
    tokens), and 'ratio_histogram' [len(RATIO_BINS) + 1] (weight of policy / rollout between 2^bins).
  """
  experience = jax.tree.map(jax.lax.stop_gradient, experience)
  used = experience.weights > 0
  # What a token of the prompt or the padding holds must not matter, not even if it is not finite.
  logprobs = jnp.where(used, logprobs.astype(jnp.float32), 0.0)
  rollout, old, advantages = (jnp.where(used, a, 0.0) for a in experience[:3])
  experience = experience._replace(rollout=rollout, old=old, advantages=advantages)
  objective, passes = OBJECTIVES[config.objective](logprobs, experience, config)
  weights = experience.weights

  log_ratio = jax.lax.stop_gradient(logprobs) - experience.rollout
  ratio = jnp.exp(log_ratio)
  gap = jnp.abs(experience.old - experience.rollout)
  bins = jnp.searchsorted(jnp.asarray(RATIO_BINS), log_ratio / jnp.log(2.0))
  metrics = {
    'masked': jnp.sum(weights * ~passes),
    'kl_behaviour': jnp.sum(weights * (ratio - 1.0 - log_ratio)),
    'ratio': jnp.sum(weights * ratio),
    'logprob_gap': jnp.sum(weights * gap),
    'logprob_gap_max': jnp.max(gap),
    'ratio_histogram': jnp.zeros(len(RATIO_BINS) + 1).at[bins].add(weights),
  }
  return -jnp.sum(weights * objective), metrics


def token_weights(
  mask: jax.Array,
  sequences: jax.Array,
  *,
  per: str,
  add: Callable[[jax.Array], jax.Array] = lambda total: total,
) -> jax.Array:
  """Weights [B, T] by which per-token losses add up to a mean; 0 outside `mask`, sum 1.

  Args:
    mask: [B, T] bool, the tokens the model wrote.
    sequences: [B, T] int32, ids of the sequences packed in a row; 0 is padding.
    per: 'token': every token of the batch counts the same (eq. 3). 'sequence': every sequence does,
      and its tokens share that (1/G sum_i 1/|y_i| of eq. 1). Sequences without a token do not count.
    add: adds a number to those of other devices, if they have other rows of the batch.
  """
  mask = mask & (sequences > 0)
  if per == 'token':
    return mask / jnp.maximum(add(jnp.sum(mask)), 1.0)
  if per != 'sequence':
    raise ValueError(f"per={per!r} is neither 'token' nor 'sequence'")
  length = _sum_by_sequence(mask.astype(jnp.float32), sequences)
  share = jnp.where(mask, 1.0 / jnp.maximum(length, 1.0), 0.0)
  return share / jnp.maximum(add(jnp.sum(share)), 1.0)


def _sum_by_sequence(values: jax.Array, sequences: jax.Array) -> jax.Array:
  """[B, T] -> [B, T]: at every position the sum over its sequence. Ids lie in 0..T."""

  def row(values, ids):
    return jax.ops.segment_sum(values, ids, values.shape[0] + 1)[ids]

  return jax.vmap(row)(values, sequences)


# Each returns (objective to maximise, whether its own rule lets the token's gradient pass), [B, T].


def double_sided(logp: jax.Array, e: Experience, c: PolicyConfig) -> tuple[jax.Array, jax.Array]:
  """Eq. 3-5: f(r) A log pi, r = pi / pi_rollout, f(x) = x if 1 - eps_l < x < 1 + eps_h else 0.

  f is a constant: differentiated as well, it would add the term A log pi * r grad log pi.
  """
  ratio = jax.lax.stop_gradient(jnp.exp(logp - e.rollout))
  inside = (ratio > 1.0 - c.eps_low) & (ratio < 1.0 + c.eps_high)
  return jnp.where(inside, ratio, 0.0) * e.advantages * logp, inside


def icepop(logp: jax.Array, e: Experience, c: PolicyConfig) -> tuple[jax.Array, jax.Array]:
  """Eq. 1: pop(rho, 1/beta, beta) min(r A, clip(r, 1 - eps_l, 1 + eps_h) A).

  rho = pi^train_old / pi^infer_old is the mismatch of trainer and engine, pop(rho) = rho where it is
  within its bounds and 0 elsewhere; r = pi^train / pi^train_old.
  """
  rho = jnp.exp(e.old - e.rollout)
  inside = (rho >= 1.0 / c.beta) & (rho <= c.beta)
  clipped, passes = ppo(logp, e, c)
  return jnp.where(inside, rho, 0.0) * clipped, inside & passes


def on_policy(logp: jax.Array, e: Experience, c: PolicyConfig) -> tuple[jax.Array, jax.Array]:
  """A log pi: REINFORCE as if the tokens were the policy's own."""
  del c
  return e.advantages * logp, jnp.ones(logp.shape, bool)


def importance(logp: jax.Array, e: Experience, c: PolicyConfig) -> tuple[jax.Array, jax.Array]:
  """r A, r = pi / pi_rollout."""
  del c
  return jnp.exp(logp - e.rollout) * e.advantages, jnp.ones(logp.shape, bool)


def truncated(logp: jax.Array, e: Experience, c: PolicyConfig) -> tuple[jax.Array, jax.Array]:
  """min(r, rho_max) A log pi with the weight a constant; with V-trace's advantages, its gradient."""
  ratio = jax.lax.stop_gradient(jnp.exp(logp - e.rollout))
  return jnp.minimum(ratio, c.rho_max) * e.advantages * logp, jnp.ones(logp.shape, bool)


def ppo(logp: jax.Array, e: Experience, c: PolicyConfig) -> tuple[jax.Array, jax.Array]:
  """min(r A, clip(r, 1 - eps_l, 1 + eps_h) A), r = pi / pi_old."""
  return _clipped_surrogate(logp - e.old, e.advantages, c)


def gspo(logp: jax.Array, e: Experience, c: PolicyConfig) -> tuple[jax.Array, jax.Array]:
  """The clipped surrogate of s = (prod_t r_t)^(1/|y|); a token of a sequence carries s_t of GSPO-token.

  s_t = sg[s] pi_t / sg[pi_t] has the value s, and each token its own gradient (eq. 13 there); with
  weights per sequence and one advantage a sequence, the gradient is that of the sequence-level form.
  """
  written = (e.weights > 0).astype(jnp.float32)
  log_ratio = jax.lax.stop_gradient(logp) - e.old
  length = jnp.maximum(_sum_by_sequence(written, e.sequences), 1.0)
  log_s = _sum_by_sequence(log_ratio * written, e.sequences) / length
  log_s += logp - jax.lax.stop_gradient(logp)
  return _clipped_surrogate(log_s, e.advantages, c)


def cispo(logp: jax.Array, e: Experience, c: PolicyConfig) -> tuple[jax.Array, jax.Array]:
  """sg[clip(r, 1 - eps_l, 1 + eps_h)] A log pi: no token loses its gradient."""
  ratio = jax.lax.stop_gradient(jnp.exp(logp - e.old))
  weight = jnp.clip(ratio, 1.0 - c.eps_low, 1.0 + c.eps_high)
  return weight * e.advantages * logp, jnp.ones(logp.shape, bool)


def _clipped_surrogate(log_ratio, advantages, c: PolicyConfig):
  # Were it infinite, the gradient of a token that is clipped or popped would be 0 * inf.
  ratio = jnp.exp(jnp.minimum(log_ratio, 60.0))
  clipped = jnp.clip(ratio, 1.0 - c.eps_low, 1.0 + c.eps_high)
  unclipped, clipped = ratio * advantages, clipped * advantages
  # Where the clipped branch is the smaller one its gradient is zero.
  return jnp.minimum(unclipped, clipped), unclipped <= clipped


Rule = Callable[[jax.Array, Experience, PolicyConfig], tuple[jax.Array, jax.Array]]
OBJECTIVES: dict[str, Rule] = {
  f.__name__: f for f in (double_sided, icepop, on_policy, importance, truncated, ppo, gspo, cispo)
}


def kl_penalty(logp: jax.Array, reference: jax.Array, weights: jax.Array, *, kind: str) -> Any:
  """Estimate of KL(policy || reference) from the policy's own tokens (Schulman, 2020).

  GLM-5 has none (section 3.2). k1 = x, k2 = x^2 / 2, k3 = exp(-x) - 1 + x with
  x = log policy - log reference. Only k2's gradient is that of the KL in expectation; k1's is zero.
  """
  x = jnp.where(weights > 0, logp - jax.lax.stop_gradient(reference), 0.0)
  kinds = {'k1': x, 'k2': 0.5 * x**2, 'k3': jnp.exp(-x) - 1.0 + x}
  if kind not in kinds:
    raise ValueError(f'unknown KL estimate {kind!r}; known are {", ".join(kinds)}')
  return jnp.sum(weights * kinds[kind])


def value_loss(
  values: jax.Array, old_values: jax.Array, returns: jax.Array, weights: jax.Array, clip: float
) -> jax.Array:
  """PPO's value loss: 1/2 max((v - R)^2, (v_clipped - R)^2), v_clipped within `clip` of v_old."""
  values, old_values, returns = (
    jnp.where(weights > 0, a, 0.0) for a in (values, old_values, returns)
  )
  near = old_values + jnp.clip(values - old_values, -clip, clip)
  worse = jnp.maximum((values - returns) ** 2, (near - returns) ** 2)
  return 0.5 * jnp.sum(weights * worse)
