"""Query chunking: bounds the size of attention's score tensors without changing its result."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# For the policies of config.remat, the names of attention's output (and the log-sum-exp of sparse attention
# by kernels), of the keys that the kernels have selected, and of what they know of a query after a pass over
# all of its keys.
ATTENTION = 'attention_output'
SELECTION = 'attention_selection'
STATISTICS = 'attention_statistics'
_SAVED = 'saved_in_chunk'
_POLICY = jax.checkpoint_policies.save_only_these_names(_SAVED)


def saved(mask: jax.Array) -> jax.Array:
  """Marks the bool `mask` [..., S], a chunk's expensive result, to be kept for the backward pass.

  What is kept takes a bit a key: 2 GB a layer at 128K tokens, where bytes would take 16.
  """
  bits = checkpoint_name(jnp.packbits(mask, axis=-1), _SAVED)
  return jnp.unpackbits(bits, axis=-1, count=mask.shape[-1]).astype(bool)


def bind(keys: Any, x: Any) -> tuple[Any, Any]:
  """Both unchanged, but `keys` counts as depending on the activations `x`.

  The layers' scan moves out whatever depends on its constants only. Visibility masks are that, and
  would be built once for all chunks and heads: a [B, N, T, S] tensor.
  """
  return jax.lax.optimization_barrier((keys, x))


def over_queries(
  one_chunk: Callable[[Any], Any], inputs: Any, time: int, elements_per_query: int, budget: int
) -> Any:
  """Runs `one_chunk` on slices of the query axis, so that no chunk exceeds `budget` elements.

  Every array of `inputs` and of the result has the query axis of length `time` at position 1. Several
  chunks run one after another. The backward pass recomputes each from its inputs and what was marked
  with `saved`, so that no score tensor outlives its chunk.
  """
  one_chunk = jax.checkpoint(one_chunk, policy=_POLICY)
  chunk = min(time, max(1, budget // elements_per_query))
  if chunk == time:
    return one_chunk(inputs)
  count = -(-time // chunk)

  def split(a):
    a = jnp.pad(a, [(0, 0), (0, count * chunk - time)] + [(0, 0)] * (a.ndim - 2))
    return jnp.moveaxis(a.reshape(a.shape[0], count, chunk, *a.shape[2:]), 1, 0)

  def join(a):
    a = jnp.moveaxis(a, 0, 1)
    return a.reshape(a.shape[0], count * chunk, *a.shape[3:])[:, :time]

  result = jax.lax.map(one_chunk, jax.tree.map(split, inputs))
  return jax.tree.map(join, result)
