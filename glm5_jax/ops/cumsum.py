"""Cumulative counts by triangular matmuls: a few small dots instead of a log-depth scan.

XLA lowers `jnp.cumsum` to a chain of pads and adds that is slow to compile and to run on CPU.
"""

import jax
import jax.numpy as jnp
import numpy as np

_BLOCK = 128


def cumulative_count(x: jax.Array) -> jax.Array:
  """Inclusive cumulative sum over the last axis of bools or small counts, as int32.

  Exact while totals stay below 2**24 (float32 matmul).
  """
  size = x.shape[-1]
  block = min(_BLOCK, size)
  blocks = -(-size // block)
  x = x.astype(jnp.float32)
  x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, blocks * block - size)])
  x = x.reshape(*x.shape[:-1], blocks, block)
  upper = np.triu(np.ones((block, block), np.float32))
  counts = jnp.einsum('...ns,st->...nt', x, upper, precision='highest').astype(jnp.int32)
  if blocks > 1:
    totals = counts[..., -1]
    counts = counts + (cumulative_count(totals) - totals)[..., None]
  return counts.reshape(*counts.shape[:-2], -1)[..., :size]
