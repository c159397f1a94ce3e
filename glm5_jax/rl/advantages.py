"""Advantages: how much better a response, or a token, was than expected.

GLM-5 has no critic: a response is compared with the others of its group (section 3.2 with, section 4.1
without division by the standard deviation), and every token of it gets the same advantage. GAE and
V-trace, which need a value of every token, are alternatives to compare with; the paper has neither.
"""

from typing import NamedTuple

import jax
import jax.numpy as jnp


def group_mean(rewards: jax.Array) -> jax.Array:
  """r - mean(r) within each group (section 4.1). `rewards` [groups, G]."""
  rewards = jnp.asarray(rewards, jnp.float32)
  # Counted from the first one, the mean of equal rewards has no rounding error.
  rewards -= rewards[..., :1]
  return rewards - jnp.mean(rewards, axis=-1, keepdims=True)


def group_normalised(rewards: jax.Array, epsilon: float = 1e-6) -> jax.Array:
  """(r - mean(r)) / (std(r) + epsilon) within each group (eq. 1). `rewards` [groups, G].

  The standard deviation is the population's (divided by G; the paper is silent). A group of equal
  rewards gives zeros.
  """
  centred = group_mean(rewards)
  return centred / (jnp.std(centred, axis=-1, keepdims=True) + epsilon)


class Estimates(NamedTuple):
  """Of every action token; 0 elsewhere. [B, T] float32."""

  advantages: jax.Array
  targets: jax.Array  # What the value head should have said.


def gae(
  rewards: jax.Array,
  values: jax.Array,
  mask: jax.Array,
  sequences: jax.Array,
  *,
  discount: float = 1.0,
  decay: float = 0.95,
) -> Estimates:
  """Generalised advantage estimation (arXiv 1506.02438, eq. 16), with the lambda-return as target.

    delta_t = r_t + discount V_t+1 - V_t,    A_t = delta_t + discount decay A_t+1

  "t + 1" is the next token that the model wrote in the same sequence: what the environment wrote in
  between is no action. After the last one V is 0: a sequence ends there.

  Args:
    rewards: [B, T], of the token that earned them (an outcome: of the last one).
    values: [B, T], the value before each token.
    mask: [B, T] bool, the tokens the model wrote.
    sequences: [B, T] int32, ids of the sequences packed in a row, ascending; 0 is padding.
    discount: per action.
    decay: lambda; 1 is Monte Carlo, 0 one step.
  """

  def step(later, now):
    reward, value, action, sequence = now
    advantage, next_value = _same_sequence(later, sequence)
    delta = reward + discount * next_value - value
    new = delta + discount * decay * advantage
    kept = jnp.where(action, new, advantage), jnp.where(action, value, next_value)
    return (*kept, sequence), jnp.where(action, new, 0.0)

  mask = mask & (sequences > 0)
  advantages = _backwards(step, 2, rewards, values, mask, sequences)
  return Estimates(advantages, jnp.where(mask, advantages + values, 0.0))


def vtrace(
  rewards: jax.Array,
  values: jax.Array,
  log_ratio: jax.Array,
  mask: jax.Array,
  sequences: jax.Array,
  *,
  discount: float = 1.0,
  rho_max: float = 1.0,
  c_max: float = 1.0,
) -> Estimates:
  """V-trace targets and advantages (arXiv 1802.01561, eq. 1 and section 4.2).

    v_t = V_t + delta_t + discount c_t (v_t+1 - V_t+1),   delta_t = rho_t (r_t + discount V_t+1 - V_t)
    A_t = r_t + discount v_t+1 - V_t
    rho_t = min(rho_max, r), c_t = min(c_max, r), r = policy / behaviour

  The policy gradient is rho_t A_t grad log pi: objective `truncated` of losses/policy.py multiplies by
  rho_t, so it is not in A_t. "t + 1", `rewards` ... `sequences` as in `gae`.

  Args:
    rewards: see `gae`.
    values: see `gae`.
    log_ratio: [B, T], log pi_policy - log pi_behaviour of every token.
    mask: see `gae`.
    sequences: see `gae`.
    discount: per action.
    rho_max: bounds the fixed point: the value of a policy between behaviour and target.
    c_max: bounds how far corrections travel.
  """
  ratio = jnp.exp(jnp.where(mask, log_ratio, 0.0))

  def step(later, now):
    reward, value, ratio, action, sequence = now
    target, next_value = _same_sequence(later, sequence)
    delta = jnp.minimum(ratio, rho_max) * (reward + discount * next_value - value)
    new = value + delta + discount * jnp.minimum(ratio, c_max) * (target - next_value)
    kept = jnp.where(action, new, target), jnp.where(action, value, next_value)
    out = jnp.where(action, reward + discount * target - value, 0.0), jnp.where(action, new, 0.0)
    return (*kept, sequence), out

  mask = mask & (sequences > 0)
  return Estimates(*_backwards(step, 2, rewards, values, ratio, mask, sequences))


def _same_sequence(later, sequence):
  """The carried numbers, 0 where the token after belongs to another sequence."""
  *carried, of = later
  return [jnp.where(of == sequence, a, 0.0) for a in carried]


def _backwards(step, carried: int, *arrays):
  """Scans [B, T] arrays from the last token to the first, all rows at once."""
  rows = arrays[0].shape[0]
  zero = jnp.zeros(rows, jnp.float32)
  start = (*[zero] * carried, jnp.zeros(rows, jnp.int32))
  columns = jax.tree.map(lambda a: jnp.moveaxis(a, 1, 0), arrays)
  _, out = jax.lax.scan(step, start, columns, reverse=True)
  return jax.tree.map(lambda a: jnp.moveaxis(a, 0, 1), out)
