"""Attention by the Pallas kernels, in place of ops/sparse_attention.py's own mathematics.

Modules take an attention function as an argument (`Options.attend`); this is the one place that knows
the kernels.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

import pallas_kernels
from glm5_jax.config import ModelConfig
from glm5_jax.ops import chunks, collectives, mla, sparse_attention
from glm5_jax.ops.pages import PagedCache, PagedKeys, PagedLatents
from glm5_jax.shapes import Keys
from pallas_kernels import residuals
from pallas_kernels.sparse_mla import pack_pages, paged, read_pages, unpack_pages, write_pages

# 'reference' is plain jax on any backend, 'pallas' the TPU kernels.
Implementation = Literal['reference', 'pallas']

# Dense attention makes the keys and values of as many heads at a time as have this many elements (2 GB in
# bfloat16): all 64 of GLM-5 up to 32K keys, 8 at 202,752, where those of all would take 13 GB, and their
# gradients as much.
EXPANDED_ELEMENTS = 1 << 30

# Every chip's kernels of decoding read a multiple of so many keys at a time.
PAGES_DIVIDE = 1024

# The kernels stand alone, and name what they leave by themselves.
assert residuals.ATTENTION == chunks.ATTENTION
assert residuals.STATISTICS == chunks.STATISTICS


def attention(implementation: Implementation) -> Callable[..., Any]:
  """The attention function of a run, for `Options.attend`; equal choices give the same function."""
  if implementation not in ('reference', 'pallas'):
    raise ValueError(f"kernels must be 'reference' or 'pallas', got {implementation!r}")
  return attend if implementation == 'pallas' else sparse_attention.attend


class PackedCache(PagedCache):
  """A `PagedCache` that `attend` decodes from: latents are packed, rows are written before a layer attends.

  `latent` is [layers, P, page_size, 1, W] uint32, rows that one copy fetches.
  """

  __slots__ = ()

  @property
  def written_first(self) -> bool:
    return True

  @staticmethod
  def pack(new: mla.Latents) -> jax.Array:
    """[B, T, 1, W] uint32."""
    return pack_pages(jnp.concatenate(new, axis=-1), new.c.shape[-1])

  @staticmethod
  def unpack(rows: jax.Array, like: mla.Latents) -> mla.Latents:
    """Rows [..., 1, W] of the pool as latents, of the widths and dtype of `like`."""
    widths = like.c.shape[-1], like.k_rope.shape[-1]
    both = unpack_pages(rows, *widths, like.c.dtype)
    return mla.Latents(*jnp.split(both, widths[:1], axis=-1))

  @staticmethod
  def get(pool, layer, page, offset=None) -> jax.Array:
    """As the base class does; of packed rows on a TPU, where that copies the pool, by a kernel."""
    if pool.dtype != jnp.uint32:
      return PagedCache.get(pool, layer, page, offset)
    where = [(layer * pool.shape[1] + page).reshape(-1)]
    where += [] if offset is None else [offset.reshape(-1)]
    found = _on_tpu_or_not(read_pages, pool.reshape(-1, *pool.shape[2:]), *where)
    return found.reshape(*page.shape, *found.shape[1:])

  @staticmethod
  def put(pool, rows, layer, page, offset) -> jax.Array:
    """As the base class does; of packed rows on a TPU by a kernel, and nothing into page 0."""
    if pool.dtype != jnp.uint32:
      return PagedCache.put(pool, rows, layer, page, offset)
    page = jnp.where(page > 0, layer * pool.shape[1] + page, -1)
    where = [jnp.broadcast_to(a, rows.shape[:3]).reshape(-1) for a in (page, offset)]
    rows = rows.reshape(-1, *rows.shape[3:])
    written = _on_tpu_or_not(write_pages, pool.reshape(-1, *pool.shape[2:]), rows, *where)
    return written.reshape(pool.shape)


def _on_tpu_or_not(op: Callable[..., Any], *args: jax.Array) -> Any:
  """`op` by its kernel where the program is for a TPU, by its reference elsewhere."""
  on_tpu = functools.partial(op, implementation='tpu')
  return jax.lax.platform_dependent(*args, tpu=on_tpu, default=op)


def paged_cache(implementation: Implementation) -> type[PagedCache]:
  """The kind of paged cache that `attention(implementation)` decodes from."""
  return PackedCache if implementation == 'pallas' else PagedCache


def check_paged(implementation: Implementation, config: ModelConfig, page_size: int) -> None:
  """Whether `attend` can decode from such pages.

  Raises:
    ValueError: it cannot, or there is no such implementation.
  """
  attention(implementation)
  if implementation == 'pallas' and not config.sparse_attention:
    raise ValueError(
      "kernels='pallas' decodes with sparse attention only: dense attention needs kernels='reference'"
    )
  if implementation == 'pallas' and PAGES_DIVIDE % page_size:
    raise ValueError(
      f"kernels='pallas' needs a page_size that divides {PAGES_DIVIDE}, not {page_size}"
    )


@functools.cache
def interpreted(params: Any) -> Callable[..., Any]:
  """The kernels as an interpreter runs them, without a TPU; `params` as `pallas_call` takes them."""
  return functools.partial(attend, interpret=params)


def attend(
  p: Any,
  q: mla.Queries,
  latents: mla.Latents | PagedLatents,
  keys: Keys,
  index: sparse_attention.Index | None,
  selection: jax.Array | None,
  config: ModelConfig,
  request: sparse_attention.Request = sparse_attention.Request(),
  form: sparse_attention.Form | None = None,
  k: jax.Array | None = None,
  *,
  interpret: Any = False,
) -> tuple[jax.Array, dict[str, Any]]:
  """`sparse_attention.attend` by kernels: same arguments, same results.

  One to eight tokens read what they select out of the pages of a `PackedCache`, of which they may see
  all up to their own slot; longer chunks are prefill, whose keys are fetched out of them first.

  Raises:
    ValueError: for what the kernels do not compute: recall, captured scores, a changing k, a prescribed
      form, dense attention over a cache or that leaves a selection to other layers, the indexer's loss with
      heads split over devices.
  """
  dense = not config.sparse_attention
  cached = q.nope.shape[1] * collectives.size('context') != latents.slots
  refused = {
    'dense attention over a cache': dense and cached, 'recall': request.recall,
    'dense attention with IndexShare': dense and (request.selection or selection is not None),
    'captured scores': request.scores, 'a changing k': k is not None, 'a form': form is not None,
    'the KL of heads on several devices': request.kl and bool(collectives.present('tensor')),
  }  # fmt: skip
  if any(refused.values()):
    wanted = ', '.join(name for name, asked in refused.items() if asked)
    raise ValueError(f"the attention kernels do not do {wanted}: use kernels='reference'")
  if dense:
    return _dense(p, q, latents.all(), keys, index if request.kl else None, config, interpret)
  if isinstance(latents, PagedLatents) and isinstance(latents.cache, PackedCache):
    if q.nope.shape[1] <= paged.MAX_QUERIES:
      out, selection = _paged(p, q, latents, keys, index, selection, config, interpret)
      return out, {'selection': selection} if request.selection else {}
  if index is not None:
    index = index.read()
  if selection is None:
    assert index is not None  # A layer without an indexer is given a selection.
    selection, _ = pallas_kernels.indexer_topk(
      index.queries.q, index.queries.w, index.keys, keys.q_slot, keys.q_segment, keys.k_segment,
      config.index_topk, implementation='tpu', interpret=interpret,
    )  # fmt: skip
    selection = checkpoint_name(selection, chunks.SELECTION)
  queries, rows = mla.absorb(p, q), jnp.concatenate(latents.all(), axis=-1)
  scale = config.attention_scale
  out, lse = pallas_kernels.sparse_mla(
    queries, rows, selection, scale, config.kv_lora_rank, implementation='tpu', interpret=interpret
  )  # fmt: skip
  aux = {}
  if request.kl and index is not None:
    aux['kl'] = pallas_kernels.indexer_kl(
      queries, rows, lse, index.queries.q, index.queries.w, index.keys, selection, scale,
      implementation='tpu', interpret=interpret,
    )  # fmt: skip
  if request.selection:
    aux['selection'] = selection
  return mla.unabsorb(p, out), aux


def _paged(
  p: Any,
  q: mla.Queries,
  latents: PagedLatents,
  keys: Keys,
  index: sparse_attention.Index | None,
  selection: jax.Array | None,
  config: ModelConfig,
  interpret: Any,
) -> tuple[jax.Array, jax.Array]:
  """Attention of 1 to 8 new tokens, whose rows the pool holds already, and their selection."""
  if selection is None:
    assert index is not None and isinstance(index.keys, PagedKeys)
    pool, table = index.keys.cache.pages('index_k', index.keys.layer)
    last = jnp.where(keys.q_segment > 0, keys.q_slot, -1)  # Padding sees nothing.
    selection, _ = pallas_kernels.indexer_topk_paged(
      index.queries.q, index.queries.w, pool, table, last, config.index_topk,
      implementation='tpu', interpret=interpret,
    )  # fmt: skip
  pool, table = latents.cache.pages('latent', latents.layer)
  out, _ = pallas_kernels.sparse_mla_paged(
    mla.absorb(p, q), pool, table, selection, config.attention_scale, config.kv_lora_rank,
    implementation='tpu', interpret=interpret,
  )  # fmt: skip
  return mla.unabsorb(p, out), selection


def _dense(
  p: Any,
  q: mla.Queries,
  latents: mla.Latents,
  keys: Keys,
  index: sparse_attention.Index | None,
  config: ModelConfig,
  interpret: Any,
) -> tuple[jax.Array, dict[str, Any]]:
  """Every visible key, and with an `index` its KL over them (the warm-up's). Causal: no Part A."""
  part = jax.lax.axis_index('context') if collectives.present('context') else 0

  def of_heads(q, w_uk, w_uv, latents):
    k, v = mla.expand({'w_uk': w_uk, 'w_uv': w_uv}, latents)
    return pallas_kernels.dense_mla(
      q, k, v, keys.q_segment, keys.k_segment, config.attention_scale, part=part,
      want_lse=index is not None, implementation='tpu', interpret=bool(interpret),
    )  # fmt: skip

  both = jnp.concatenate([q.nope, q.rope], axis=-1)
  out, lse = _in_head_groups(of_heads, both, p['w_uk'], p['w_uv'], latents)
  if index is None or lse is None:
    return out, {}
  kl = pallas_kernels.indexer_kl(
    mla.absorb(p, q), jnp.concatenate(latents, axis=-1), lse, index.queries.q, index.queries.w,
    index.keys, pallas_kernels.Visible(*keys), config.attention_scale, implementation='tpu',
    interpret=interpret,
  )  # fmt: skip
  return out, {'kl': kl}


def _in_head_groups(of_heads, q, w_uk, w_uv, latents: mla.Latents) -> Any:
  """`of_heads` of all heads, axis 2 of q and of the results, axis 1 of the weights, by groups of them.

  What it expands of a group's keys does not outlive the group: the backward pass expands them again.
  """
  batch, _, heads, dim = q.shape
  elements = batch * latents.slots * (dim + w_uv.shape[-1])
  fitting = [n for n in range(1, heads + 1) if heads % n == 0 and n * elements <= EXPANDED_ELEMENTS]
  groups = heads // max(fitting, default=1)
  if groups == 1:
    return of_heads(q, w_uk, w_uv, latents)
  # Gradients of the latents add up over groups: not in bfloat16.
  wide = jax.tree.map(lambda a: a.astype(jnp.float32), latents)

  @functools.partial(
    jax.checkpoint,
    policy=jax.checkpoint_policies.save_only_these_names(chunks.ATTENTION, chunks.STATISTICS),
  )
  def group(inputs):
    return of_heads(*inputs, jax.tree.map(lambda a: a.astype(q.dtype), wide))

  def split(a, axis):
    shape = *a.shape[:axis], groups, heads // groups, *a.shape[axis + 1 :]
    return jnp.moveaxis(a.reshape(shape), axis, 0)

  def join(a):  # [groups, B, T, N / groups, ...]
    a = jnp.moveaxis(a, 0, 2)
    return a.reshape(*a.shape[:2], heads, *a.shape[4:])

  found = jax.lax.map(group, (split(q, 2), split(w_uk, 1), split(w_uv, 1)))
  return jax.tree.map(join, found)
