"""The largest attention logit of every head, the quantity that grows when attention is unstable.

The logit of query t and key s is what the softmax gets: q . k / sqrt(head dim), rope included. Muon
with whole matrices needs it clipped in other models (MuonClip, arXiv 2507.20534, section 2.1); with
Muon Split it stays stable without (section 2.1 of the paper).
"""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import forward
from glm5_jax.ops import gqa, mla, rope
from glm5_jax.shapes import Keys


def _head_logits(p, x, cos, sin, config: ModelConfig) -> jax.Array:
  """[B, N, T, S] float32 logits of one layer from its normalised input `x` [B, T, D]."""
  if config.attention == 'mla':
    q = mla.queries(p, x, cos, sin, config)
    k, _ = mla.expand(p, mla.latents(p, x, cos, sin, config))
    return mla.expanded_logits(q, k, config.attention_scale)
  query = gqa.queries(p, x, cos, sin, config)
  group = config.num_attention_heads // config.num_key_value_heads
  key = jnp.repeat(gqa.key_values(p, x, cos, sin, config).k, group, axis=2)
  return jnp.einsum('BTNH,BSNH->BNTS', query * config.attention_scale, key)


@functools.partial(jax.jit, static_argnames='config')
def logit_maxima(params: Any, batch: Mapping[str, jax.Array], config: ModelConfig) -> jax.Array:
  """[layers, N] float32: the maximum over all pairs of a query and a visible key in `batch`.

  Args:
    params: of the model.
    batch: tokens, positions, segment_ids, each [B, T]. Rows are processed one after another.
    config: a model with dense attention.

  Raises:
    ValueError: for a model with sparse attention, whose logits exist for selected keys only.
  """
  if config.attention == 'mla' and config.sparse_attention:
    raise ValueError('logits are those of dense attention: set sparse_attention=False')

  def one_row(row):
    tokens, positions, segments = (a[None] for a in row)
    out = forward(
      params, tokens, config=config, positions=positions, segment_ids=segments, logits=False,
      options=Options(capture=True),
    )  # fmt: skip
    cos, sin = rope.angles(positions, rope.frequencies(config))
    slots = jnp.arange(tokens.shape[1])[None]
    visible = Keys(slots, segments, segments).visible()[:, None]

    def layer(p, x):
      logits = _head_logits(p, x, cos, sin, config)
      return jnp.max(jnp.where(visible, logits, -jnp.inf), axis=(0, 2, 3))

    maxima = []
    for stack in config.stacks:
      blocks = [f'block{j}' for j in range(len(stack.blocks))]
      each = [
        jax.vmap(layer)(params[stack.name][b]['attn'], out.aux[stack.name][b]['attn_in'])
        for b in blocks
      ]
      maxima.append(jnp.stack(each, axis=1).reshape(-1, each[0].shape[-1]))
    return jnp.concatenate(maxima)

  inputs = (batch['tokens'], batch['positions'], batch['segment_ids'])
  return jnp.max(jax.lax.map(one_row, jax.tree.map(jnp.asarray, inputs)), axis=0)
