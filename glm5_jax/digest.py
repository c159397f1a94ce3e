"""What a checkpoint says about its arrays: name, type, shape, and a digest of the bits."""

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.compile import jit_once


def named_leaves(tree: Any) -> dict[str, Any]:
  """{'params.embed': leaf, ...} in the order of the tree."""
  leaves, _ = jax.tree_util.tree_flatten_with_path(tree)
  return {jax.tree_util.keystr(path, simple=True, separator='.'): leaf for path, leaf in leaves}


def describe(state: Any) -> dict[str, str]:
  """{name: 'dtype[shape] digest'}."""
  leaves = named_leaves(state)
  digests = jax.device_get(_jitted()(list(leaves.values())))
  return {
    k: f'{kind(x)} {int(digest):08x}'
    for (k, x), digest in zip(leaves.items(), digests, strict=True)
  }


def kind(x: Any) -> str:
  """'float32[3,4]', also of a `jax.ShapeDtypeStruct`."""
  return f'{np.dtype(x.dtype).name}[{",".join(map(str, x.shape))}]'


def _digests(leaves: list[jax.Array]) -> list[jax.Array]:
  """One uint32 per array: sum of word[i] * (2 i + 1) mod 2^32, so any one changed word shows.

  Runs where the arrays live, sharded or not; integer sums do not depend on the order.
  """

  def digest(x):
    if x.dtype == jnp.bool_:
      x = x.astype(jnp.uint8)
    bits = jnp.dtype(f'uint{8 * x.dtype.itemsize}')
    words = jax.lax.bitcast_convert_type(x, bits).astype(jnp.uint32)
    index = jnp.zeros(x.shape, jnp.uint32)
    for axis, size in enumerate(x.shape):
      index = index * np.uint32(size) + jax.lax.broadcasted_iota(jnp.uint32, x.shape, axis)
    return jnp.sum(words * (2 * index + 1), dtype=jnp.uint32)

  return [digest(x) for x in leaves]


@functools.cache
def _jitted() -> Callable[[list[jax.Array]], list[jax.Array]]:
  return jit_once(_digests)
