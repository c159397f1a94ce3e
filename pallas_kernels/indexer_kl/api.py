"""The loss that trains the lightning indexer while attention is sparse.

arXiv 2512.02556 section 2.1 (sparse stage); GLM-5, arXiv 2602.15763, section 2.1.1.
"""

import jax
import jax.numpy as jnp

from pallas_kernels.indexer_kl import reference


def indexer_kl(
  q: jax.Array,
  latents: jax.Array,
  lse: jax.Array,
  index_q: jax.Array,
  index_weights: jax.Array,
  index_k: jax.Array,
  indices: jax.Array,
  scale: float,
) -> jax.Array:
  """KL from attention to the index distribution over each query's selected keys, in nats.

    target[t, s] = mean over heads n of exp(scale * q[t, n] . latents[s] - lse[t, n])
    score[t, s] = sum over index heads i of index_weights[t, i] * relu(index_q[t, i] . index_k[s])
    kl[t] = sum over s in indices[t] of target (log target - log softmax_s(score))

  The gradient reaches the index side only. There is no TPU kernel yet: plain jax, which gathers a
  bounded number of rows at a time and never makes a [T, S] array.

  Args:
    q, latents, indices, scale: as `sparse_mla` takes them: [B, T, N, L + R], [B, S, L + R], [B, T, K].
    lse: [B, T, N] float32, as `sparse_mla` returns it.
    index_q, index_weights, index_k: as `indexer_topk` takes them: [B, T, I, J], [B, T, I], [B, S, J].

  Returns:
    [B, T] float32; 0 for a query without keys.

  Raises:
    ValueError: shapes that disagree.
  """
  batch, time, heads, width = q.shape
  size, index_heads, dim = latents.shape[1], index_q.shape[2], index_q.shape[3]
  wanted = {
    'latents': (latents, (batch, size, width)),
    'lse': (lse, (batch, time, heads)),
    'index_q': (index_q, (batch, time, index_heads, dim)),
    'index_weights': (index_weights, (batch, time, index_heads)),
    'index_k': (index_k, (batch, size, dim)),
    'indices': (indices, (batch, time, indices.shape[-1])),
  }
  for name, (x, shape) in wanted.items():
    if x.shape != shape:
      raise ValueError(
        f'indexer_kl: {name} has shape {x.shape}, expected {shape} beside q {q.shape}'
      )
  index_weights = index_weights.astype(jnp.float32)
  return reference.indexer_kl(q, latents, lse, index_q, index_weights, index_k, indices, scale)
