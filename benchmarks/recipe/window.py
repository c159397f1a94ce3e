"""Sliding-window attention in some layers of a trained dense model, the baseline of Tables 4 and 5.

It changes nothing of the library: a layer that shares another's selection (IndexShare) attends to
given positions, and here these are the last `window` ones.
"""

from collections.abc import Collection, Mapping
from typing import Any

import jax
import jax.numpy as jnp

from glm5_jax.config import BlockSpec, ModelConfig
from glm5_jax.modules.attention import Context
from glm5_jax.modules.block import Block, Options
from glm5_jax.ops import norm, rope
from glm5_jax.ops.sparse_attention import Shared
from glm5_jax.shapes import Keys


def window_positions(time: int, window: int) -> jax.Array:
  """[T, window] int32: the slots t - window + 1 .. t of every query; -1 where there is none."""
  slots = jnp.arange(time)[:, None] - jnp.arange(window - 1, -1, -1)
  return jnp.maximum(slots, -1).astype(jnp.int32)


def hidden_states(
  params: Any,
  batch: Mapping[str, jax.Array],
  config: ModelConfig,
  windowed: Collection[int],
  window: int,
) -> jax.Array:
  """[B, T, D] after the final norm, layer by layer; those in `windowed` see `window` keys each.

  Args:
    params: of an MLA model.
    batch: tokens, positions, segment_ids, each [B, T].
    config: the model; its other layers attend to every visible key.
    windowed: numbers of layers.
    window: keys that a query of them sees, its own included.
  """
  tokens, segments = jnp.asarray(batch['tokens']), jnp.asarray(batch['segment_ids'])
  rows, time = tokens.shape
  slots = jnp.broadcast_to(jnp.arange(time), (rows, time))
  cos, sin = rope.angles(jnp.asarray(batch['positions']), rope.frequencies(config))
  ctx = Context(Keys(slots, segments, segments), cos, sin, segments > 0, 0)
  full = config.replace(sparse_attention=False)
  narrow = config.replace(sparse_attention=True, index_topk=window)
  selection = Shared(jnp.broadcast_to(window_positions(time, window), (rows, time, window)))
  options = Options(form='expanded')

  x = jnp.take(params['embed'], tokens, axis=0).astype(config.dtype)
  layer = 0
  for stack in config.stacks:
    for repeat in range(stack.repeats):
      for j, spec in enumerate(stack.blocks):
        p = jax.tree.map(lambda a, r=repeat: a[r], params[stack.name][f'block{j}'])
        if layer in windowed:
          block = Block(narrow, BlockSpec(spec.mlp, 'shared'), options)
          applied: Any = block.apply({'params': p}, x, selection, ctx, None)
        else:
          applied = Block(full, spec, options).apply({'params': p}, x, None, ctx, None)
        x = applied[0]
        layer += 1
  return norm.rms_norm(x, params['final_norm'], config.rms_norm_eps)
