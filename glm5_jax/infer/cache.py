"""The latent cache in pages: what a token costs, the pool on the device, and who owns which page.

A token leaves L + R values in every layer and J in every layer with an indexer (section 2.1; MLA of
DeepSeek-V2, arXiv 2405.04434). The pool holds them in pages of `page_size` tokens; a request's page
table says where its tokens are. Pages are counted, so that requests with a common prefix share them.
"""

import dataclasses
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.kernels import Implementation, paged_cache
from glm5_jax.ops import mla
from glm5_jax.ops.pages import PagedCache


class TokenBytes(NamedTuple):
  """Bytes that a token takes in the caches of three kinds of attention at one model size."""

  latent: int  # MLA with its lightning indexer: what we keep.
  indexer: int  # The part of `latent` that is the indexer's.
  mha: int  # Keys and values of all N heads.
  gqa: int  # Keys and values of `groups` heads.

  @property
  def saved_to_mha(self) -> float:
    """1 - latent / mha."""
    return 1 - self.latent / self.mha

  @property
  def saved_to_gqa(self) -> float:
    """1 - latent / gqa."""
    return 1 - self.latent / self.gqa


def token_bytes(
  config: ModelConfig, *, groups: int = 8, head_dim: int | None = None, itemsize: int = 2
) -> TokenBytes:
  """Cache bytes of one token over all layers, without MTP layers.

  Args:
    config: layers, heads and widths.
    groups: key-value heads of the grouped-query attention to compare with.
    head_dim: width of its keys and of its values; None takes this model's, as the ablation of
      Table 1 does.
    itemsize: bytes of a value; 2 is bfloat16.
  """
  layers = config.num_hidden_layers
  indexers = sum(block.indexer == 'full' for block in config.blocks)
  index = indexers * config.index_head_dim
  latent = layers * (config.kv_lora_rank + config.qk_rope_head_dim) + index
  head = config.qk_head_dim + config.v_head_dim
  grouped = head if head_dim is None else 2 * head_dim
  mha, gqa = layers * config.num_attention_heads * head, layers * groups * grouped
  return TokenBytes(*(itemsize * values for values in (latent, index, mha, gqa)))


def init_pool(
  config: ModelConfig,
  pages: int,
  page_size: int,
  mtp_layers: int = 0,
  kernels: Implementation = 'reference',
) -> PagedCache:
  """An empty pool of `pages` pages, the trash page 0 included; its table is that of no row.

  Args:
    config: an MLA model.
    pages: P.
    page_size: tokens of a page.
    mtp_layers: how many MTP layers have rows too, after those of the decoder.
    kernels: what will attend to it; 'pallas' wants packed rows.
  """
  dtype = jnp.dtype(config.dtype)
  layers = config.num_hidden_layers + mtp_layers
  indexers = sum(block.indexer == 'full' for block in config.blocks) + mtp_layers
  kind = paged_cache(kernels)

  def new(width):
    return jax.ShapeDtypeStruct((pages, page_size, width), dtype)

  latents = mla.Latents(new(config.kv_lora_rank), new(config.qk_rope_head_dim))
  row = jax.eval_shape(kind.pack, latents)
  return kind(
    jnp.zeros((layers, *row.shape), row.dtype),
    jnp.zeros((indexers, pages, page_size, config.index_head_dim), dtype),
    jnp.zeros((0, 1), jnp.int32),
    jnp.zeros((0,), jnp.int32),
  )


def copy_page(
  latent: jax.Array, index_k: jax.Array, source: jax.Array, target: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The pool's arrays with page `target` a copy of page `source` in every layer."""
  return latent.at[:, target].set(latent[:, source]), index_k.at[:, target].set(index_k[:, source])


def pages_for(tokens: int, page_size: int) -> int:
  """Pages that hold `tokens` tokens."""
  return -(-tokens // page_size)


@dataclasses.dataclass
class PageAllocator:
  """Free pages and how often each other one is referenced. Page 0 is never handed out.

  Attributes:
    pages: P, page 0 included.
  """

  pages: int

  def __post_init__(self):
    if self.pages < 2:
      raise ValueError(f'a pool of {self.pages} pages has none to give: page 0 takes the padding')
    self._free = list(range(self.pages - 1, 0, -1))
    self._references = np.zeros(self.pages, np.int64)

  @property
  def free(self) -> int:
    return len(self._free)

  @property
  def used(self) -> int:
    return self.pages - 1 - len(self._free)

  def references(self, page: int) -> int:
    return int(self._references[page])

  def allocate(self, count: int) -> list[int] | None:
    """`count` pages with one reference each, or None (and nothing taken) if there are not so many."""
    if count > len(self._free):
      return None
    taken = [self._free.pop() for _ in range(count)]
    self._references[taken] = 1
    return taken

  def retain(self, page: int) -> None:
    """One more owner of a page in use."""
    if self._references[page] < 1:
      raise ValueError(f'page {page} is free: nobody can share it')
    self._references[page] += 1

  def release(self, page: int) -> None:
    """One owner less; the last one frees the page."""
    if self._references[page] < 1:
      raise ValueError(f'page {page} is free already')
    self._references[page] -= 1
    if self._references[page] == 0:
      self._free.append(page)
