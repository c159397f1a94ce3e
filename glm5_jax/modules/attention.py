"""Attention modules: MLA with its lightning indexer, and GQA for the ablation of Table 1."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.modules.params import declare, ones
from glm5_jax.ops import collectives, gqa, indexer, mla, sparse_attention
from glm5_jax.ops.pages import PagedCache, PagedKeys, PagedLatents
from glm5_jax.shapes import Keys


class Context(NamedTuple):
  """What every layer of one forward pass shares."""

  keys: Keys
  cos: jax.Array  # [B, T, R/2] float32
  sin: jax.Array
  valid: jax.Array  # [B, T] bool, false for padding
  offset: jax.Array | int | None  # Cache slot of the first new token; 0 without a cache.
  topk: jax.Array | None = None  # Overrides index_topk, see `model.forward`.
  paged: PagedCache | None = None  # In place of the layers' own caches.

  def rows(self, which: slice) -> 'Context':
    """The context of some rows of the batch."""
    arrays = jax.tree.map(lambda a: a[which], self._replace(offset=None, topk=None))
    return arrays._replace(offset=self.offset, topk=self.topk)


Cache = dict[str, jax.Array] | None


def _append(cache: Cache, name: str, new: jax.Array, offset) -> jax.Array:
  """All keys seen so far: the layer's cache with `new` [B, T, ...] written at slot `offset`.

  Without a cache, those of the whole sequence, of which `new` may be a device's part.
  """
  if cache is None:
    return collectives.gather_sequence(new)
  start = (0, offset) + (0,) * (new.ndim - 2)
  return jax.lax.dynamic_update_slice(cache[name], new.astype(cache[name].dtype), start)


def _with_past(
  cache: Cache, new: mla.Latents, index_k: jax.Array | None, ctx: Context
) -> tuple[mla.Latents | PagedLatents, jax.Array | PagedKeys | None, Any]:
  """Latents and index keys of all keys, given those of the new tokens; and the layer's new cache.

  Without an indexer `index_k` is None. A paged layer's cache is its number in the pool, `latent`, and that
  of its indexer, `index_k`; its new cache are the new rows only, or the whole pool if these are written
  first.
  """
  if ctx.paged is None or cache is None:
    latents = mla.Latents(
      _append(cache, 'c', new.c, ctx.offset), _append(cache, 'k_rope', new.k_rope, ctx.offset)
    )
    new_cache = {'c': latents.c, 'k_rope': latents.k_rope}
    if index_k is not None:
      new_cache['k_index'] = index_k = _append(cache, 'k_index', index_k, ctx.offset)
    return latents, index_k, new_cache
  paged = ctx.paged
  rows = {'latent': paged.pack(new)} | ({} if index_k is None else {'index_k': index_k})
  if paged.written_first:
    paged = paged.write({name: row[None] for name, row in rows.items()}, ctx.valid, cache)
  keys = None if index_k is None else PagedKeys(paged, cache['index_k'], index_k)
  return PagedLatents(paged, cache['latent'], new), keys, paged if paged.written_first else rows


def _after(out: jax.Array, rows: dict[str, jax.Array]) -> dict[str, jax.Array]:
  """`rows` [B, T, W], but XLA knows that attention's `out` [B, T, N, H] comes first.

  So what writes them to the pool follows all reads of it. Where it may come before some, XLA copies the
  pool. (A barrier does not tell: it is gone when copies are decided on.)
  """
  sound = jnp.where(jnp.isnan(out[:, :, 0, :1]), jnp.nan, 1.0)
  return {name: row * sound.astype(row.dtype) for name, row in rows.items()}


class Indexer(nn.Module):
  """The lightning indexer's parameters; trained by its own loss, so its inputs are detached."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x, q_latent, ctx: Context) -> tuple[indexer.Queries, jax.Array]:
    c = self.config
    p = declare(
      self, c, w_q=(c.q_lora_rank, c.index_n_heads, c.index_head_dim),
      w_k=(c.hidden_size, c.index_head_dim), w_w=(c.hidden_size, c.index_n_heads),
    )  # fmt: skip
    p['k_norm_scale'] = ones(self, c, 'k_norm_scale', c.index_head_dim)
    p['k_norm_bias'] = self.param(
      'k_norm_bias', nn.initializers.zeros, (c.index_head_dim,), jnp.dtype(c.param_dtype)
    )
    x, q_latent = jax.lax.stop_gradient((x, q_latent))
    queries = indexer.queries(p, x, q_latent, ctx.cos, ctx.sin, c)
    return queries, indexer.keys(p, x, ctx.cos, ctx.sin, c)


class MLA(nn.Module):
  """Multi-head latent attention with DeepSeek sparse attention.

  `indexer` is 'full' (a lightning indexer of its own) or 'shared' (an earlier layer's selection).
  """

  config: ModelConfig
  indexer: str
  request: sparse_attention.Request
  form: sparse_attention.Form | None
  attend: Callable[..., Any]

  @nn.compact
  def __call__(self, x, selection, ctx: Context, cache: Cache):
    c = self.config
    heads = c.num_attention_heads
    p = declare(
      self, c, w_dq=(c.hidden_size, c.q_lora_rank), w_uq=(c.q_lora_rank, heads, c.qk_head_dim),
      w_dkv=(c.hidden_size, c.kv_lora_rank + c.qk_rope_head_dim),
      w_uk=(c.kv_lora_rank, heads, c.qk_nope_head_dim), w_uv=(c.kv_lora_rank, heads, c.v_head_dim),
      w_o=(heads, c.v_head_dim, c.hidden_size),
    )  # fmt: skip
    p['q_norm'] = ones(self, c, 'q_norm', c.q_lora_rank)
    p['kv_norm'] = ones(self, c, 'kv_norm', c.kv_lora_rank)

    q = mla.queries(p, x, ctx.cos, ctx.sin, c)
    new = mla.latents(p, x, ctx.cos, ctx.sin, c)
    index_k: Any = None
    if self.indexer != 'shared':
      with jax.named_scope('indexer'):
        index_queries, index_k = Indexer(c, name='indexer')(x, q.latent, ctx)
    latents, index_k, new_cache = _with_past(cache, new, index_k, ctx)
    if self.indexer == 'shared':
      positions, index = selection
    else:
      positions, index = None, sparse_attention.Index(index_queries, index_k)
    out, aux = self.attend(
      p, q, latents, ctx.keys, index, positions, c, self.request, self.form, ctx.topk
    )
    if self.request.selection:
      aux['selection'] = sparse_attention.Shared(
        aux['selection'], index if self.request.kl else None
      )
    if ctx.paged is not None and cache is not None and not ctx.paged.written_first:
      new_cache = _after(out, new_cache)
    out = jnp.einsum('BTNH,NHD->BTD', out, p['w_o'].astype(x.dtype))
    return out, aux, (None if cache is None else new_cache)


class GQA(nn.Module):
  """Grouped-query attention with QK-norm, dense."""

  config: ModelConfig

  @nn.compact
  def __call__(self, x, ctx: Context, cache: Cache) -> tuple[jax.Array, dict[str, Any], Cache]:
    c = self.config
    heads, groups = c.num_attention_heads, c.num_key_value_heads
    p = declare(
      self, c, w_q=(c.hidden_size, heads, c.qk_head_dim), w_k=(c.hidden_size, groups, c.qk_head_dim),
      w_v=(c.hidden_size, groups, c.v_head_dim), w_o=(heads, c.v_head_dim, c.hidden_size),
    )  # fmt: skip
    p['q_norm'] = ones(self, c, 'q_norm', c.qk_head_dim)
    p['k_norm'] = ones(self, c, 'k_norm', c.qk_head_dim)
    q = gqa.queries(p, x, ctx.cos, ctx.sin, c)
    new = gqa.key_values(p, x, ctx.cos, ctx.sin, c)
    kv = gqa.KeyValues(
      _append(cache, 'k', new.k, ctx.offset), _append(cache, 'v', new.v, ctx.offset)
    )
    out = gqa.attend(q, kv, ctx.keys, c)
    out = jnp.einsum('BTNH,NHD->BTD', out, p['w_o'].astype(x.dtype))
    return out, {}, (None if cache is None else {'k': kv.k, 'v': kv.v})
