"""Dropless mixture-of-experts computation: only the chosen experts, any load.

Token-expert pairs are grouped by expert and laid out in fixed-size blocks, each belonging to one expert; an expert
with n tokens owns ceil(n / block) blocks. The number of blocks is bounded statically by
`rows / block + experts`, so shapes are static, no token is ever dropped, and the waste is at most one
block an expert, whatever the load. One batched matmul per projection does the work.
"""

import jax
import jax.numpy as jnp

from glm5_jax.ops.cumsum import cumulative_count
from glm5_jax.ops.router import Routing


def block_layout(rows: int, num_experts: int) -> tuple[int, int]:
  """(block size, number of blocks) for `rows` token-expert pairs over `num_experts` experts.

  Blocks are about a quarter of an even load: large enough for matmul, small enough to waste little.
  """
  block = 1
  while block < 256 and block * 4 * num_experts < rows:
    block *= 2
  return block, min(rows, (rows + num_experts * (block - 1)) // block)


@jax.custom_vjp
def _take_rows(x: jax.Array, index: jax.Array, inverse: jax.Array) -> jax.Array:
  """x[index], with zeros where index == len(x).

  `inverse` [len(x), r] lists where each row of `x` went (len(index) for nowhere), so that the
  gradient is a gather too; XLA's scatter-add is serial on CPU.
  """
  return jnp.concatenate([x, jnp.zeros_like(x[:1])])[index]


def _take_rows_fwd(x, index, inverse):
  return _take_rows(x, index, inverse), inverse


def _take_rows_bwd(inverse, g):
  g = jnp.concatenate([g, jnp.zeros_like(g[:1])])
  return sum(g[inverse[:, r]] for r in range(inverse.shape[1])), None, None


_take_rows.defvjp(_take_rows_fwd, _take_rows_bwd)


@jax.custom_vjp
def _block_matmul(x: jax.Array, w: jax.Array, expert: jax.Array) -> jax.Array:
  """[n, b, D] x [E, D, F] -> [n, b, F], block i with the weights of `expert[i]`."""
  return jnp.einsum('nbD,nDF->nbF', x, w[expert])


def _block_matmul_fwd(x, w, expert):
  return _block_matmul(x, w, expert), (x, w, expert)


def _block_matmul_bwd(residuals, g):
  x, w, expert = residuals
  dx = jnp.einsum('nbF,nDF->nbD', g, w[expert])
  per_block = jnp.einsum('nbD,nbF->nDF', x, g)
  return dx, jax.ops.segment_sum(per_block, expert, w.shape[0], indices_are_sorted=True), None


_block_matmul.defvjp(_block_matmul_fwd, _block_matmul_bwd)


def expert_ffn(
  x: jax.Array, routing: Routing, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array
) -> jax.Array:
  """sum over the chosen experts e of weight_e * down_e(silu(gate_e x) * up_e x), as [T, D].

  Args:
    x: [T, D] tokens.
    routing: their experts and weights, [T, K] each.
    w_gate, w_up: [E, D, F]; w_down: [E, F, D].
  """
  tokens, chosen = routing.experts.shape
  rows, num_experts = tokens * chosen, w_gate.shape[0]
  block, num_blocks = block_layout(rows, num_experts)
  slots = num_blocks * block

  with jax.named_scope('dispatch'):
    flat = routing.experts.reshape(-1)
    chosen_by = flat == jnp.arange(num_experts)[:, None]  # [E, rows]
    position = cumulative_count(chosen_by)
    counts = position[:, -1]
    blocks_of = (counts + block - 1) // block
    last_block = jnp.cumsum(blocks_of)
    first_slot = (last_block - blocks_of) * block
    slot_of_pair = jnp.sum(jnp.where(chosen_by, first_slot[:, None] + position - 1, 0), axis=0)
    pair_of_slot = (
      jnp.full(slots, rows, jnp.int32)
      .at[slot_of_pair]
      .set(jnp.arange(rows, dtype=jnp.int32), unique_indices=True)
    )
    # Block i belongs to the first expert whose blocks end after it; unused blocks to the last one.
    expert_of_block = jnp.sum(last_block[:-1] <= jnp.arange(num_blocks)[:, None], axis=1)
    token_of_slot = jnp.where(pair_of_slot < rows, pair_of_slot // chosen, tokens)
    x_blocks = _take_rows(x, token_of_slot, slot_of_pair.reshape(tokens, chosen))
    x_blocks = x_blocks.reshape(num_blocks, block, -1)

  with jax.named_scope('experts'):
    gate = _block_matmul(x_blocks, w_gate.astype(x.dtype), expert_of_block)
    up = _block_matmul(x_blocks, w_up.astype(x.dtype), expert_of_block)
    y = _block_matmul(jax.nn.silu(gate) * up, w_down.astype(x.dtype), expert_of_block)

  with jax.named_scope('combine'):
    y = _take_rows(y.reshape(slots, -1), slot_of_pair, pair_of_slot[:, None])
    y = y.reshape(tokens, chosen, -1)
    return jnp.einsum('TKD,TK->TD', y, routing.weights.astype(y.dtype))
