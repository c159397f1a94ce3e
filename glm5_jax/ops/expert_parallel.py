"""Experts divided among the devices along `expert`: tokens travel to their experts and back.

Every device sorts its token-expert pairs by expert, which is by device as well, and sends each
device the rows for its experts (`jax.lax.ragged_all_to_all`). How many those are depends on the
data, so the receiver's buffer is bounded: by the largest load that is possible, or by
`expert_capacity` times an even load. Rows that do not fit are not sent: they count as dropped, and
it is for the training step to refuse them or not (`expert_overflow`).
"""

import functools
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.ops import collectives, dispatch
from glm5_jax.ops.router import Routing

_AXIS = 'expert'


class Transfer(NamedTuple):
  """What one device sends to each of the others and receives from them; all [devices] int32.

  The arguments of `jax.lax.ragged_all_to_all`, in its order.
  """

  start: jax.Array  # First row to send, of the sender's array.
  size: jax.Array  # Rows to send.
  target: jax.Array  # Where they begin in the receiver's array.
  expected: jax.Array  # Rows to receive.


class Plan(NamedTuple):
  """Where the token-expert pairs of a device go, where they come back, and what does not fit."""

  there: Transfer
  back: Transfer
  expert: jax.Array  # [capacity] int32, of each received row; the number of local experts for none.
  dropped: jax.Array  # int32: pairs of this device that found no room.


def make_plan(counts: jax.Array, me: jax.Array, capacity: int) -> Plan:
  """The plan of device `me`.

  Args:
    counts: [devices, E] int32, how many pairs of each device chose each expert. Device i
      has experts i * E / devices and following.
    me: int32.
    capacity: rows that a device can receive.
  """
  devices, num_experts = counts.shape
  local = num_experts // devices
  size = jnp.sum(counts.reshape(devices, devices, local), axis=2)  # [sender, receiver]
  start = jnp.cumsum(size, axis=1) - size
  target = jnp.minimum(jnp.cumsum(size, axis=0) - size, capacity)
  sent = jnp.clip(capacity - target, 0, size)
  there = Transfer(start[me], sent[me], target[me], sent[:, me])
  back = Transfer(target[:, me], sent[:, me], start[:, me], sent[me])
  # A device's rows come sender by sender, those of each in the order of the experts.
  runs = jax.lax.dynamic_slice_in_dim(counts, me * local, local, axis=1).reshape(-1)
  ends = jnp.cumsum(runs)
  row = jnp.arange(capacity)
  run = jnp.sum(ends <= row[:, None], axis=1)
  expert = jnp.where(row < ends[-1], run % local, local)
  return Plan(there, back, expert, jnp.sum(size[me] - sent[me]))


@functools.partial(jax.custom_vjp, nondiff_argnums=(3, 4))
def exchange(x: jax.Array, there: Transfer, back: Transfer, rows: int, home: bool) -> jax.Array:
  """[rows, D]: what this device receives of the `x` [n, D] of all.

  Rows where nothing arrives are zeros if the pairs come `home`, where dropped ones count as zero, and
  undefined at the experts, who compute nothing from them. `back` is the opposite of `there`, which the
  gradient takes.
  """
  del back
  if collectives.platform() == 'cpu':  # XLA:CPU has no ragged all-to-all.
    return _by_gathering(x, there, rows, 0.0 if home else jnp.nan)
  shape = rows, *x.shape[1:]
  buffer = jnp.zeros(shape, x.dtype) if home else jax.lax.empty(shape, x.dtype)
  return jax.lax.ragged_all_to_all(x, buffer, *there, axis_name=_AXIS)


def _exchange_fwd(x, there, back, rows, home):
  return exchange(x, there, back, rows, home), (there, back, x.shape[0])


def _exchange_bwd(rows, home, residuals, g):
  del rows
  there, back, n = residuals
  return exchange(g, back, there, n, not home), None, None


exchange.defvjp(_exchange_fwd, _exchange_bwd)


def _by_gathering(x: jax.Array, transfer: Transfer, rows: int, missing: float) -> jax.Array:
  """`exchange` by gathering all rows of all devices; `missing` where nothing arrives."""
  me = jax.lax.axis_index(_AXIS)
  everything = jax.lax.all_gather(x, _AXIS, tiled=True)
  start, size, target, _ = (a[:, me] for a in jax.lax.all_gather(transfer, _AXIS))
  row = jnp.arange(rows)[:, None]
  arrives = (row >= target) & (row < target + size)  # [rows, sender], of which one at most.
  source = jnp.arange(len(start)) * len(x) + start + row - target
  source = jnp.sum(jnp.where(arrives, source, 0), axis=1)
  return jnp.where(jnp.any(arrives, axis=1)[:, None], everything[source], missing)


def capacity(pairs: int, tokens: int, config: ModelConfig) -> int:
  """Rows of a receiver's buffer where each device has `tokens` tokens, that is `pairs` pairs."""
  devices = collectives.size(_AXIS)
  local = config.n_routed_experts // devices
  largest = devices * tokens * min(config.num_experts_per_tok, local)
  if not config.expert_capacity:
    return largest
  unit = 512 if pairs >= 512 else 8  # Grouped matmuls work on tiles of rows.
  return min(largest, -(-int(config.expert_capacity * pairs) // unit) * unit)


def expert_ffn(
  x: jax.Array,
  routing: Routing,
  w_gate: jax.Array,
  w_up: jax.Array,
  w_down: jax.Array,
  config: ModelConfig,
) -> tuple[jax.Array, jax.Array]:
  """`dispatch.expert_ffn` with this device's share of the experts' weights.

  Returns:
    [T, D], and how many token-expert pairs of the whole batch were dropped: those count as zero.
  """
  tokens, chosen = routing.experts.shape
  pairs = tokens * chosen
  with jax.named_scope('dispatch'):
    flat = routing.experts.reshape(-1)
    order, inverse, counts = dispatch.by_expert(flat, config.n_routed_experts)
    counts = jax.lax.all_gather(counts, _AXIS)
    rows = capacity(pairs, tokens, config)
    plan = make_plan(counts, jax.lax.axis_index(_AXIS), rows)
    x_sorted = dispatch.take_rows(x, order // chosen, inverse.reshape(tokens, chosen))
    share = dispatch.take_rows(routing.weights.reshape(-1, 1), order, inverse[:, None])
    received, share = (
      exchange(a, plan.there, plan.back, rows, home=False) for a in (x_sorted, share)
    )
  y = dispatch.pair_outputs(
    received, plan.expert[:, None], share, w_gate, w_up, w_down, config.expert_matmul, nobody=True
  )
  with jax.named_scope('combine'):
    y = exchange(y, plan.back, plan.there, pairs, home=True)
    y = dispatch.take_rows(y, inverse, order[:, None])
    dropped = collectives.psum(plan.dropped, *collectives.TOKEN_AXES)
    return dispatch.combine(y, routing.experts.shape), dropped
