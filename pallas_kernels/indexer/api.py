"""`indexer_topk`: which keys each query attends to, by the lightning indexer.

arXiv 2512.02556 eq. 1; GLM-5, arXiv 2602.15763, section 2.1.1.
"""

from typing import Any, Literal

import jax
import jax.numpy as jnp

from pallas_kernels.indexer import kernel_tpu, reference

Implementation = Literal['reference', 'tpu']


def _check(q, weights, k, q_slot, q_segment, k_segment, topk, implementation):
  batch, time, heads, dim = q.shape if q.ndim == 4 else (0,) * 4
  size = k.shape[1] if k.ndim == 3 else 0
  shapes = {
    'q': (q, (batch, time, heads, dim)),
    'weights': (weights, (batch, time, heads)),
    'k': (k, (batch, size, dim)),
    'q_slot': (q_slot, (batch, time)),
    'q_segment': (q_segment, (batch, time)),
    'k_segment': (k_segment, (batch, size)),
  }
  for name, (x, wanted) in shapes.items():
    if x.shape != wanted:
      raise ValueError(
        f'indexer_topk: {name} has shape {x.shape}; expected q [B, T, I, J], weights [B, T, I], '
        'k [B, S, J], q_slot and q_segment [B, T], k_segment [B, S] with equal letters equal'
      )
  if q.dtype != k.dtype or q.dtype not in (jnp.bfloat16, jnp.float32):
    raise TypeError(
      f'indexer_topk: q is {q.dtype} and k {k.dtype}; cast both to bfloat16, or both to float32'
    )
  if min(topk, *q.shape, size) < 1:
    raise ValueError(
      f'indexer_topk: K={topk} and all sizes of q {q.shape}, S={size} must be positive'
    )
  if implementation not in ('reference', 'tpu'):
    raise ValueError(f"indexer_topk: implementation={implementation!r}; use 'reference' or 'tpu'")


def indexer_topk(
  q: jax.Array,
  weights: jax.Array,
  k: jax.Array,
  q_slot: jax.Array,
  q_segment: jax.Array,
  k_segment: jax.Array,
  topk: int,
  *,
  implementation: Implementation = 'reference',
  block_q: int | None = None,
  vmem: int = kernel_tpu.VMEM,
  interpret: Any = False,
) -> tuple[jax.Array, jax.Array]:
  """The `topk` best keys of each query by index score, exactly and deterministically.

    score[t, s] = sum over heads i of weights[t, i] * relu(q[t, i] . k[s])

  Key s is visible to query t if s <= q_slot[t] and both carry the same segment id, above 0.
  Among equal scores the lowest position wins; -0.0 equals 0.0 and NaN is above everything. Memory
  grows with T * topk and with S, never with T * S. Integers have no gradient: train the indexer
  through its own loss.

  Args:
    q: [B, T, I, J] bfloat16 or float32 index queries, rotated.
    weights: [B, T, I] head weights with both scales, I**-0.5 and J**-0.5, folded in; float32.
    k: [B, S, J] index keys of q's dtype, rotated.
    q_slot: [B, T] int32, last key position that the query may see; beyond S - 1 means all.
    q_segment: [B, T] int32 segment ids; queries of segment 0 see nothing.
    k_segment: [B, S] int32 segment ids; 0 is padding.
    topk: how many keys to select, K.
    implementation: 'reference' is plain jax, 'tpu' the Pallas kernel. They round scores differently
      in the last bits, since they sum over heads in another order.
    block_q: queries a block of the kernel, a power of two from 8 to 128; None picks one that fits
      `vmem`.
    vmem: bytes of VMEM of a core; v6e has 128 MiB.
    interpret: for the kernel on CPU, as in `pallas_call` (`pltpu.InterpretParams()`).

  Returns:
    [B, T, K] int32 selected positions, ascending, then -1; and [B, T] float32, the K-th largest
    visible score, or -inf where fewer than K keys are visible (all of them are selected).

  Raises:
    ValueError: shapes that disagree, an unknown implementation, a block that is not possible.
    TypeError: dtypes other than the above.
  """
  _check(q, weights, k, q_slot, q_segment, k_segment, topk, implementation)
  q, weights, k = jax.lax.stop_gradient((q, weights, k))
  q_slot, q_segment, k_segment = (x.astype(jnp.int32) for x in (q_slot, q_segment, k_segment))
  if implementation == 'reference':
    return reference.indexer_topk(q, weights, k, q_slot, q_segment, k_segment, topk)
  blocks = kernel_tpu.choose_blocks(q.shape[1], k.shape[1], block_q, vmem)
  return kernel_tpu.indexer_topk(
    q, weights, k, q_slot, q_segment, k_segment, topk, **blocks, interpret=interpret
  )
