"""Dropless mixture-of-experts computation: only the chosen experts, any load.

Token-expert pairs are grouped by expert, in one of three ways. 'blocks', for every backend: they are
laid out in fixed-size blocks, each belonging to one expert; an expert with n tokens owns ceil(n /
block) blocks. The number of blocks is bounded statically by `rows / block + experts`, so shapes are
static, no token is ever dropped, and the waste is at most one block an expert, whatever the load.
One batched matmul per projection does the work. A block has a copy of its expert's weights, which the
gradient of few large blocks is worth; 'rounds', for inference, has no gradient and makes no copies:
all experts take the same number of their tokens at a time, in as many rounds as the largest load
needs. 'ragged_dot', for TPUs: pairs are sorted by expert without gaps, and a grouped matmul takes the
length of each group. (On a CPU ragged_dot computes every expert.)

Experts that other devices have: ops/expert_parallel.py.
"""

import functools
import math
from typing import Literal

import jax
import jax.numpy as jnp
from jax.experimental.pallas.ops.tpu.megablox.gmm import tgmm

from glm5_jax.ops import collectives
from glm5_jax.ops.cumsum import cumulative_count
from glm5_jax.ops.router import Routing

Matmul = Literal['blocks', 'ragged_dot', 'rounds']


def block_layout(rows: int, num_experts: int) -> tuple[int, int]:
  """(block size, number of blocks) for `rows` token-expert pairs over `num_experts` experts.

  Blocks are about a quarter of an even load: large enough for matmul, small enough to waste little.
  """
  block = 1
  while block < 256 and block * 4 * num_experts < rows:
    block *= 2
  return block, min(rows, (rows + num_experts * (block - 1)) // block)


@functools.partial(jax.custom_vjp, nondiff_argnums=(3,))
def take_rows(x: jax.Array, index: jax.Array, inverse: jax.Array, gaps: bool = False) -> jax.Array:
  """x[index]; with `gaps`, zeros where index == len(x).

  `inverse` [len(x), r] lists where each row of `x` went (with gaps, len(index) for nowhere), so that the
  gradient is a gather too; XLA's scatter-add is serial on CPU.
  """
  return _rows(x, index, gaps)


def _rows(x: jax.Array, index: jax.Array, gaps: bool) -> jax.Array:
  if gaps:  # Costs a copy of x.
    x = jnp.concatenate([x, jnp.zeros_like(x[:1])])
  return jnp.asarray(x).at[index].get(mode='promise_in_bounds')


def _take_rows_fwd(x, index, inverse, gaps):
  return _rows(x, index, gaps), inverse


def _take_rows_bwd(gaps, inverse, g):
  return sum(_rows(g, inverse[:, r], gaps) for r in range(inverse.shape[1])), None, None


take_rows.defvjp(_take_rows_fwd, _take_rows_bwd)


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
  x: jax.Array,
  routing: Routing,
  w_gate: jax.Array,
  w_up: jax.Array,
  w_down: jax.Array,
  matmul: Matmul = 'blocks',
) -> jax.Array:
  """sum over the chosen experts e of weight_e * down_e(silu(gate_e x) * up_e x), as [T, D].

  Args:
    x: [T, D] tokens.
    routing: their experts and weights, [T, K] each.
    w_gate, w_up: [E, D, F]; w_down: [E, F, D].
    matmul: how, see above.
  """
  y = pair_outputs(x, routing.experts, routing.weights, w_gate, w_up, w_down, matmul)
  with jax.named_scope('combine'):
    return combine(y, routing.experts.shape)


def combine(y: jax.Array, shape: tuple[int, ...]) -> jax.Array:
  """[T, D] from the weighted outputs of every token-expert pair, [T * K, D]; `shape` is (T, K)."""
  return jnp.sum(y.reshape(*shape, -1), axis=1)


def pair_outputs(
  x: jax.Array,
  experts: jax.Array,
  share: jax.Array,
  w_gate: jax.Array,
  w_up: jax.Array,
  w_down: jax.Array,
  matmul: Matmul,
  *,
  nobody: bool = False,
) -> jax.Array:
  """What each chosen expert makes of each token, times its weight, [T * K, D].

  The weight multiplies what goes into W_down: the same, since that is linear, but the weight's gradient
  then needs no output of W_down, which the backward pass would have to compute again and, between
  devices, send again.

  Args:
    x: [T, D] tokens.
    experts: [T, K] of each. With `nobody`, E stands for none: what comes out for it is undefined, and
      so may be what goes in.
    share: [T, K] float32, the routers' weights.
    w_gate, w_up, w_down, matmul: as in `expert_ffn`.
    nobody: see `experts`.
  """
  if matmul == 'ragged_dot':
    return _sorted(x, experts, share, w_gate, w_up, w_down)
  weights = w_gate.astype(x.dtype), w_up.astype(x.dtype), w_down.astype(x.dtype)
  # With fewer pairs than experts, copies of the few that are chosen are cheaper than to read all.
  if matmul == 'rounds' and not nobody and 2 * experts.size > len(w_gate):
    return _in_rounds(x, experts, share, *weights)
  return _in_blocks(x, experts, share, *weights, nobody)


def _activation(gate: jax.Array, up: jax.Array, share: jax.Array) -> jax.Array:
  """share * silu(gate) * up, [..., F] and `share` [..., 1] float32."""
  return ((jax.nn.silu(gate) * up).astype(jnp.float32) * share).astype(gate.dtype)


def _in_blocks(x, experts, share, w_gate, w_up, w_down, nobody: bool) -> jax.Array:
  tokens, chosen = experts.shape
  rows, num_experts = tokens * chosen, w_gate.shape[0]
  block, num_blocks = block_layout(rows, num_experts)
  slots = num_blocks * block

  with jax.named_scope('dispatch'):
    flat = experts.reshape(-1)
    chosen_by = flat == jnp.arange(num_experts)[:, None]  # [E, rows]
    position = cumulative_count(chosen_by)
    counts = position[:, -1]
    blocks_of = (counts + block - 1) // block
    last_block = jnp.cumsum(blocks_of)
    first_slot = (last_block - blocks_of) * block
    slot_of_pair = jnp.sum(jnp.where(chosen_by, first_slot[:, None] + position - 1, 0), axis=0)
    if nobody:
      slot_of_pair = jnp.where(flat < num_experts, slot_of_pair, slots)
    pair_of_slot = (
      jnp.full(slots, rows, jnp.int32)
      .at[slot_of_pair]
      .set(jnp.arange(rows, dtype=jnp.int32), unique_indices=not nobody)
    )
    # Block i belongs to the first expert whose blocks end after it; unused blocks to the last one.
    expert_of_block = jnp.sum(last_block[:-1] <= jnp.arange(num_blocks)[:, None], axis=1)
    token_of_slot = jnp.where(pair_of_slot < rows, pair_of_slot // chosen, tokens)
    x_blocks = take_rows(x, token_of_slot, slot_of_pair.reshape(tokens, chosen), True)
    x_blocks = x_blocks.reshape(num_blocks, block, -1)
    share = take_rows(share.reshape(-1, 1), pair_of_slot, slot_of_pair[:, None], True)
    share = share.reshape(num_blocks, block, 1)

  with jax.named_scope('experts'):
    gate = _block_matmul(x_blocks, w_gate, expert_of_block)
    up = _block_matmul(x_blocks, w_up, expert_of_block)
    y = _block_matmul(_activation(gate, up, share), w_down, expert_of_block)

  with jax.named_scope('combine'):
    return take_rows(y.reshape(slots, -1), slot_of_pair, pair_of_slot[:, None], True)


def round_size(tokens: int, rows: int, num_experts: int) -> int:
  """Tokens that each expert takes in a round, of `rows` token-expert pairs.

  Few tokens: so many that one round is enough for most loads, since a round costs the reading of all
  weights. Many: about half an even load, so that little is computed for experts with nothing left.
  """
  return min(tokens, max(16, rows // num_experts // 2))


def _in_rounds(x, experts, share, w_gate, w_up, w_down) -> jax.Array:
  tokens, chosen = experts.shape
  rows, num_experts = tokens * chosen, w_gate.shape[0]
  size = round_size(tokens, rows, num_experts)
  slots = num_experts * size

  with jax.named_scope('dispatch'):
    flat = experts.reshape(-1)
    chosen_by = flat == jnp.arange(num_experts)[:, None]  # [E, rows]
    position = cumulative_count(chosen_by)
    rank = jnp.sum(jnp.where(chosen_by, position - 1, 0), axis=0)  # Among its expert's pairs.
    rounds = (jnp.max(position[:, -1]) + size - 1) // size
    x = jnp.concatenate([x, jnp.zeros_like(x[:1])])
    share = jnp.append(share.reshape(-1), 0.0)

  def one_round(carry):
    i, y = carry
    with jax.named_scope('dispatch'):
      slot_of_pair = jnp.where(rank // size == i, flat * size + rank % size, slots)
      pair_of_slot = (
        jnp.full(slots + 1, rows, jnp.int32)
        .at[slot_of_pair]
        .set(jnp.arange(rows, dtype=jnp.int32))[:-1]
      )
      token_of_slot = jnp.where(pair_of_slot < rows, pair_of_slot // chosen, tokens)
      x_slots = x[token_of_slot].reshape(num_experts, size, -1)
      share_slots = share[pair_of_slot].reshape(num_experts, size, 1)
    with jax.named_scope('experts'):
      gate = jnp.einsum('EcD,EDF->EcF', x_slots, w_gate)
      up = jnp.einsum('EcD,EDF->EcF', x_slots, w_up)
      out = jnp.einsum('EcF,EFD->EcD', _activation(gate, up, share_slots), w_down)
      out = out.reshape(slots, -1)
    with jax.named_scope('combine'):
      now = (slot_of_pair < slots)[:, None]
      return i + 1, jnp.where(now, out[jnp.minimum(slot_of_pair, slots - 1)], y)

  y = jnp.zeros((rows, x.shape[1]), x.dtype)
  _, y = jax.lax.while_loop(lambda carry: carry[0] < rounds, one_round, (jnp.int32(0), y))
  return y


def _sorted(x, experts, share, w_gate, w_up, w_down) -> jax.Array:
  tokens, chosen = experts.shape
  num_experts = w_gate.shape[0]
  with jax.named_scope('dispatch'):
    flat = experts.reshape(-1)
    order, inverse, counts = by_expert(flat, num_experts)
    x_sorted = take_rows(x, order // chosen, inverse.reshape(tokens, chosen))
    share = take_rows(share.reshape(-1, 1), order, inverse[:, None])

  with jax.named_scope('experts'):
    gate = _grouped_matmul(x_sorted, w_gate, counts)
    up = _grouped_matmul(x_sorted, w_up, counts)
    y = _grouped_matmul(_activation(gate, up, share), w_down, counts)

  with jax.named_scope('combine'):
    return take_rows(y, inverse, order[:, None])


def by_expert(flat: jax.Array, num_experts: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """Token-expert pairs [rows] in the order of their experts, equals as they come.

  Returns the order, its inverse, and how many pairs each expert has, [E] int32. Those of nobody (E)
  come last. By counting: TPUs take minutes to compile a sort.
  """
  chosen_by = flat == jnp.arange(num_experts + 1)[:, None]
  position = cumulative_count(chosen_by)
  counts = position[:, -1]
  start = jnp.cumsum(counts) - counts
  inverse = jnp.sum(jnp.where(chosen_by, start[:, None] + position - 1, 0), axis=0)
  rows = jnp.arange(len(flat), dtype=jnp.int32)
  order = jnp.zeros_like(rows).at[inverse].set(rows, unique_indices=True)
  return order, inverse, counts[:-1]


@jax.custom_vjp
def _grouped_matmul(x: jax.Array, w: jax.Array, counts: jax.Array) -> jax.Array:
  """[rows, D] x [E, D, F] -> [rows, F], the first counts[0] rows with expert 0's weights etc.

  Rows beyond the last group come out undefined, and have no part in the weights' gradient, which has
  w's type. The product has that of x.
  """
  return jax.lax.ragged_dot(x, w.astype(x.dtype), counts)


def _grouped_matmul_fwd(x, w, counts):
  return _grouped_matmul(x, w, counts), (x, w, counts)


def _grouped_matmul_bwd(residuals, g):
  x, w, counts = residuals
  dx = jax.lax.ragged_dot(g, w.astype(g.dtype).swapaxes(1, 2), counts)
  if collectives.platform() == 'tpu':
    # XLA has a kernel for the two products above, but would compute this one for every expert.
    tiling = (math.gcd(len(x), 512), min(1024, x.shape[1]), min(1024, g.shape[1]))
    dw = tgmm(x.swapaxes(0, 1), g, counts, w.dtype, tiling)
  else:
    product = lambda w: jax.lax.ragged_dot(x, w.astype(x.dtype), counts)  # noqa: E731
    (dw,) = jax.linear_transpose(product, w)(g)
  return dx, dw, None


_grouped_matmul.defvjp(_grouped_matmul_fwd, _grouped_matmul_bwd)
