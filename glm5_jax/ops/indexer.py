"""The lightning indexer of DeepSeek sparse attention (section 2.1.1; arXiv 2512.02556 eq. 1).

  I[t, s] = sum_j w[t, j] * I^-0.5 * relu(q[t, j] . k[s] * J^-0.5)

It sees stop-gradient inputs: only its own KL loss trains it (losses/indexer_kl.py).
"""

from collections.abc import Mapping
from typing import NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.ops import norm, rope


class Queries(NamedTuple):
  """What scoring needs of the query side."""

  q: jax.Array  # [B, T, I, J]
  w: jax.Array  # [B, T, I] float32, both scales folded in


def _rotate_first(x, cos, sin, config: ModelConfig):
  """Rope on the first R dims of the index head; the rest pass through (MLA has them last)."""
  dim = config.qk_rope_head_dim
  rotated = rope.rotate(x[..., :dim], cos, sin, config.indexer_rope)
  return jnp.concatenate([rotated, x[..., dim:]], axis=-1)


def queries(
  p: Mapping[str, jax.Array],
  x: jax.Array,
  q_latent: jax.Array,
  cos: jax.Array,
  sin: jax.Array,
  config: ModelConfig,
) -> Queries:
  """Index queries from the normalised query latent [B, T, Q] and head weights from `x` [B, T, D]."""
  q = jnp.einsum('BTQ,QIJ->BTIJ', q_latent, p['w_q'].astype(x.dtype))
  w = jnp.einsum('BTD,DI->BTI', x, p['w_w'].astype(x.dtype), preferred_element_type=jnp.float32)
  scale = config.index_n_heads**-0.5 * config.index_head_dim**-0.5
  return Queries(_rotate_first(q, cos, sin, config), w * scale)


def keys(
  p: Mapping[str, jax.Array], x: jax.Array, cos: jax.Array, sin: jax.Array, config: ModelConfig
) -> jax.Array:
  """[B, S, J]: the one index key head, layer-normed, then rotated. This is what a cache holds."""
  k = jnp.einsum('BTD,DJ->BTJ', x, p['w_k'].astype(x.dtype))
  k = norm.layer_norm(k, p['k_norm_scale'], p['k_norm_bias'], config.index_norm_eps)
  return _rotate_first(k, cos, sin, config)


def scores(queries: Queries, k: jax.Array) -> jax.Array:
  """[B, T, S] float32 index scores, unmasked. The J^-0.5 sits in `w`: ReLU commutes with it."""
  with jax.named_scope('index_scores'):
    logits = jnp.einsum('BTIJ,BSJ->BTIS', queries.q, k, preferred_element_type=jnp.float32)
    return jnp.einsum('BTIS,BTI->BTS', jax.nn.relu(logits), queries.w)
