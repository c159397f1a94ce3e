"""Attention modules: MLA with its lightning indexer, and GQA for the ablation of Table 1."""

from collections.abc import Callable
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.modules.params import declare, ones
from glm5_jax.ops import collectives, gqa, indexer, mla, sparse_attention
from glm5_jax.shapes import Keys


class PagedCache(NamedTuple):
  """Cache rows of many sequences, in pages of one pool; a row of the batch finds its own by `table`.

  A sequence's token at slot s is row s % page_size of page table[b, s // page_size]. Padding writes to
  page 0, which belongs to nobody. Layers are counted in order; so are layers with an indexer.
  """

  latent: jax.Array  # [layers, P, page_size, L + R]: the normalised latent, then the rotated key.
  index_k: jax.Array  # [indexers, P, page_size, J]
  table: jax.Array  # [B, pages of a row] int32
  length: jax.Array  # [B] int32, tokens that the pool already holds of each row

  @property
  def slots(self) -> int:
    """How many keys a row can have: S of every score tensor."""
    return self.table.shape[1] * self.latent.shape[2]

  def read(self, name: str, layer: jax.Array, new: jax.Array) -> jax.Array:
    """All keys [B, S, W] of one layer: those in the pool, and `new` [B, T, W] after them."""
    pool = getattr(self, name)
    old = pool.at[layer, self.table].get(mode='promise_in_bounds')
    old = old.reshape(new.shape[0], self.slots, -1)
    # What an earlier owner left behind is invisible, but 0 * NaN is not 0.
    known = jnp.arange(self.slots) < self.length[:, None]
    old = jnp.where(known[:, :, None], old, 0)
    slot = self.length[:, None] + jnp.arange(new.shape[1])
    row = jnp.arange(new.shape[0])[:, None]
    return old.at[row, slot].set(new.astype(old.dtype), mode='drop')  # Padding may lie beyond.

  def take(self, name: str, layer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """`read(name, layer, new)[b, slots[b]]`, [B, T, K, W], without reading the others.

    `slots` [B, T, K] must each hold a key of their row.
    """
    pool = getattr(self, name)
    row = jnp.arange(slots.shape[0])[:, None, None]
    page = self.table[row, slots // pool.shape[2]]
    old = pool.at[layer, page, slots % pool.shape[2]].get(mode='promise_in_bounds')
    fresh = slots - self.length[:, None, None]
    own = new[row, jnp.clip(fresh, 0, new.shape[1] - 1)].astype(old.dtype)
    return jnp.where(fresh[..., None] >= 0, own, old)

  def write(
    self, new: dict[str, jax.Array], valid: jax.Array, first: tuple[int, int] = (0, 0)
  ) -> 'PagedCache':
    """The cache with `new` rows [layers, B, T, W] added where `valid` [B, T].

    `first` are the numbers of their first layer and of their first indexer.
    """
    size, width = self.latent.shape[2], self.table.shape[1]
    slot = self.length[:, None] + jnp.arange(valid.shape[1])
    row = jnp.arange(valid.shape[0])[:, None]
    page = jnp.where(valid, self.table[row, jnp.minimum(slot // size, width - 1)], 0)

    def put(pool, rows, first):
      layer = first + jnp.arange(rows.shape[0])[:, None, None]
      return pool.at[layer, page, slot % size].set(
        rows.astype(pool.dtype), mode='promise_in_bounds'
      )

    return self._replace(
      latent=put(self.latent, new['latent'], first[0]),
      index_k=put(self.index_k, new['index_k'], first[1]),
      length=self.length + jnp.sum(valid, axis=1),
    )


class PagedLatents(NamedTuple):
  """A layer's `mla.Latents` in their pages: decoding reads those rows that the indexer selects."""

  cache: PagedCache
  layer: jax.Array  # [] its number in the pool
  new: mla.Latents  # [B, T, ...] of the new tokens, which the pool does not hold yet

  @property
  def slots(self) -> int:
    return self.cache.slots

  def all(self) -> mla.Latents:
    return self._split(self.cache.read('latent', self.layer, self.rows()))

  def take(self, slots: jax.Array) -> mla.Latents:
    return self._split(self.cache.take('latent', self.layer, self.rows(), slots))

  def rows(self) -> jax.Array:
    """The new rows [B, T, L + R] as the pool holds them."""
    return jnp.concatenate(self.new, axis=-1)

  def _split(self, rows: jax.Array) -> mla.Latents:
    return mla.Latents(*jnp.split(rows, [self.new.c.shape[-1]], axis=-1))


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
  cache: Cache, new: mla.Latents, ctx: Context
) -> tuple[mla.Latents | PagedLatents, dict[str, jax.Array]]:
  """Latents of all keys, and the layer's new cache; of a paged one, the new rows only.

  A paged layer's cache is its number in the pool, `latent`, and that of its indexer, `index_k`.
  """
  if ctx.paged is not None and cache is not None:
    paged = PagedLatents(ctx.paged, cache['latent'], new)
    return paged, {'latent': paged.rows()}
  latents = mla.Latents(
    _append(cache, 'c', new.c, ctx.offset), _append(cache, 'k_rope', new.k_rope, ctx.offset)
  )
  return latents, {'c': latents.c, 'k_rope': latents.k_rope}


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
    latents, new_cache = _with_past(cache, new, ctx)
    if self.indexer == 'shared':
      positions, index = selection
    else:
      positions = None
      with jax.named_scope('indexer'):
        index_queries, index_k = Indexer(c, name='indexer')(x, q.latent, ctx)
        if ctx.paged is not None and cache is not None:
          new_cache['index_k'] = index_k
          index_k = ctx.paged.read('index_k', cache['index_k'], index_k)
        else:
          new_cache['k_index'] = index_k = _append(cache, 'k_index', index_k, ctx.offset)
      index = sparse_attention.Index(index_queries, index_k)
    out, aux = self.attend(
      p, q, latents, ctx.keys, index, positions, c, self.request, self.form, ctx.topk
    )
    if self.request.selection:
      aux['selection'] = sparse_attention.Shared(
        aux['selection'], index if self.request.kl else None
      )
    if ctx.paged is not None and cache is not None:
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
