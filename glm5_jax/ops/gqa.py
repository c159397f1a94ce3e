"""Grouped-query attention, the baseline of Table 1 (GQA-8, as in GLM-4.5): dense, with QK-norm."""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.ops import chunks, mla, norm, rope
from glm5_jax.shapes import Keys


class KeyValues(NamedTuple):
  """What a token leaves in the cache."""

  k: jax.Array  # [B, S, M, H], normalised, last R dims rotated
  v: jax.Array  # [B, S, M, Hv]


def _norm_and_rotate(x, scale, cos, sin, config: ModelConfig):
  x = norm.rms_norm(x, scale, config.rms_norm_eps)
  plain, rotary = jnp.split(x, [config.qk_nope_head_dim], axis=-1)
  return jnp.concatenate([plain, rope.rotate(rotary, cos, sin)], axis=-1)


def queries(p: Mapping[str, jax.Array], x, cos, sin, config: ModelConfig) -> jax.Array:
  """[B, T, N, H] from `x` [B, T, D]."""
  q = jnp.einsum('BTD,DNH->BTNH', x, p['w_q'].astype(x.dtype))
  return _norm_and_rotate(q, p['q_norm'], cos, sin, config)


def key_values(p: Mapping[str, jax.Array], x, cos, sin, config: ModelConfig) -> KeyValues:
  """The M key-value heads of `x` [B, T, D]."""
  k = jnp.einsum('BTD,DMH->BTMH', x, p['w_k'].astype(x.dtype))
  v = jnp.einsum('BTD,DMH->BTMH', x, p['w_v'].astype(x.dtype))
  return KeyValues(_norm_and_rotate(k, p['k_norm'], cos, sin, config), v)


def attend(q: jax.Array, kv: KeyValues, keys: Keys, config: ModelConfig) -> jax.Array:
  """[B, T, N, Hv]; each key-value head serves N / M query heads."""
  keys, q = chunks.bind(keys, q)
  batch, time, heads, dim = q.shape
  groups = kv.k.shape[2]

  def one_chunk(inputs):
    q, q_slot, q_segment = inputs
    visible = Keys(q_slot, q_segment, keys.k_segment).visible()
    grouped = q.reshape(batch, q.shape[1], groups, heads // groups, dim)
    logits = jnp.einsum(
      'BTMGH,BSMH->BMGTS', grouped * config.attention_scale, kv.k,
      preferred_element_type=jnp.float32,
    )  # fmt: skip
    probs = mla.masked_softmax(logits, visible[:, None, None])
    out = jnp.einsum('BMGTS,BSMH->BTMGH', probs.astype(kv.v.dtype), kv.v)
    return out.reshape(batch, q.shape[1], heads, -1)

  inputs = (q, keys.q_slot, keys.q_segment)
  elements = batch * kv.k.shape[1] * heads
  return chunks.over_queries(one_chunk, inputs, time, elements, config.attention_chunk_elements)
