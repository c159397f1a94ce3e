"""Multi-head latent attention (section 2.1; DeepSeek-V2, arXiv 2405.04434, section 2.1).

A token leaves one row of L + R values in the cache, shared by all heads: the normalised latent `c`
and one rotated key `k_rope`. The expanded form rebuilds per-head keys and values from `c` (training,
prefill); the absorbed form moves W_UK into the query and W_UV behind the sum, and attends to the
latents directly (decoding, and sparse attention over gathered rows). Both are the same function.
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.ops import norm, rope


class Queries(NamedTuple):
  """Per-head queries, and the latent they come from (the indexer reads it too)."""

  nope: jax.Array  # [B, T, N, H]
  rope: jax.Array  # [B, T, N, R], rotated
  latent: jax.Array  # [B, T, Q], normalised


class Latents(NamedTuple):
  """What a token leaves in the cache."""

  c: jax.Array  # [B, S, L], normalised
  k_rope: jax.Array  # [B, S, R], rotated, not normalised

  @property
  def slots(self) -> int:
    """S."""
    return self.c.shape[1]

  def all(self) -> 'Latents':
    """Those of all keys. (A cache in pages has to fetch them.)"""
    return self

  def take(self, slots: jax.Array) -> 'Latents':
    """Rows [B, T, K, ...] of the keys at `slots` [B, T, K]."""
    return jax.tree.map(lambda a: jax.vmap(lambda rows, i: rows[i])(a, slots), self)


def queries(
  p: Mapping[str, jax.Array], x: jax.Array, cos: jax.Array, sin: jax.Array, config: ModelConfig
) -> Queries:
  """W_DQ, norm, W_UQ, rope. `x` [B, T, D]."""
  latent = jnp.einsum('BTD,DQ->BTQ', x, p['w_dq'].astype(x.dtype))
  latent = norm.rms_norm(latent, p['q_norm'], config.latent_norm_eps)
  q = jnp.einsum('BTQ,QNH->BTNH', latent, p['w_uq'].astype(x.dtype))
  nope, rotary = jnp.split(q, [config.qk_nope_head_dim], axis=-1)
  return Queries(nope, rope.rotate(rotary, cos, sin), latent)


def latents(
  p: Mapping[str, jax.Array], x: jax.Array, cos: jax.Array, sin: jax.Array, config: ModelConfig
) -> Latents:
  """W_DKV, norm on the latent part only, rope on the shared key. `x` [B, T, D]."""
  kv = jnp.einsum('BTD,DL->BTL', x, p['w_dkv'].astype(x.dtype))
  c, k_rope = jnp.split(kv, [config.kv_lora_rank], axis=-1)
  return Latents(
    norm.rms_norm(c, p['kv_norm'], config.latent_norm_eps), rope.rotate(k_rope, cos, sin)
  )


def masked_softmax(logits: jax.Array, mask: jax.Array) -> jax.Array:
  """float32 softmax over the last axis where `mask`; rows without any key give zeros."""
  logits = jnp.where(mask, logits.astype(jnp.float32), -jnp.inf)
  highest = jnp.max(logits, axis=-1, keepdims=True)
  unnormalised = jnp.exp(logits - jax.lax.stop_gradient(jnp.maximum(highest, -1e30)))
  total = jnp.sum(unnormalised, axis=-1, keepdims=True)
  return unnormalised / jnp.where(total > 0, total, 1.0)


def expand(p: Mapping[str, jax.Array], latents: Latents) -> tuple[jax.Array, jax.Array]:
  """Keys [B, S, N, H + R] and values [B, S, N, Hv] of every head (W_UK, W_UV)."""
  c = latents.c
  k_nope = jnp.einsum('BSL,LNH->BSNH', c, p['w_uk'].astype(c.dtype))
  k_rope = jnp.broadcast_to(
    latents.k_rope[:, :, None], (*k_nope.shape[:3], latents.k_rope.shape[-1])
  )
  v = jnp.einsum('BSL,LNH->BSNH', c, p['w_uv'].astype(c.dtype))
  return jnp.concatenate([k_nope, k_rope], axis=-1), v


def expanded_logits(q: Queries, k: jax.Array, scale: float) -> jax.Array:
  """[B, N, T, S] float32 attention logits against the expanded keys of `expand`."""
  q_full = jnp.concatenate([q.nope, q.rope], axis=-1)
  return jnp.einsum('BTNH,BSNH->BNTS', q_full * scale, k, preferred_element_type=jnp.float32)


def expanded_output(probs: jax.Array, v: jax.Array) -> jax.Array:
  """[B, T, N, Hv] from probabilities [B, N, T, S] and values [B, S, N, Hv]."""
  return jnp.einsum('BNTS,BSNH->BTNH', probs.astype(v.dtype), v)


def absorb(p: Mapping[str, jax.Array], q: Queries) -> jax.Array:
  """[B, T, N, L + R]: queries against cache rows, W_UK absorbed."""
  q_c = jnp.einsum('BTNH,LNH->BTNL', q.nope, p['w_uk'].astype(q.nope.dtype))
  return jnp.concatenate([q_c, q.rope], axis=-1)


def absorbed_logits(q_absorbed: jax.Array, latents: Latents, scale: float) -> jax.Array:
  """[B, N, T, S] float32 logits; latents [B, S, ...] shared by all queries, or [B, T, K, ...] gathered.

  Gathered rows give [B, N, T, K].
  """
  rows = jnp.concatenate(latents, axis=-1)
  spec = 'BTNL,BSL->BNTS' if rows.ndim == 3 else 'BTNL,BTKL->BNTK'
  return jnp.einsum(spec, q_absorbed * scale, rows, preferred_element_type=jnp.float32)


def absorbed_output(p: Mapping[str, jax.Array], probs: jax.Array, latents: Latents) -> jax.Array:
  """[B, T, N, Hv]: the probability-weighted latent of each head, then W_UV."""
  c = latents.c
  spec = 'BNTS,BSL->BTNL' if c.ndim == 3 else 'BNTK,BTKL->BTNL'
  return unabsorb(p, jnp.einsum(spec, probs.astype(c.dtype), c))


def unabsorb(p: Mapping[str, jax.Array], mixed: jax.Array) -> jax.Array:
  """W_UV of each head's mixture of latents [B, T, N, L]: [B, T, N, Hv]."""
  return jnp.einsum('BTNL,LNH->BTNH', mixed, p['w_uv'].astype(mixed.dtype))
