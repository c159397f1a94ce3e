"""The cache in pages: rows of many sequences in one pool, and what a layer sees of them.

Rows of latents are opaque here: `pack` makes them of a token's latents and `unpack` undoes that, so that a
subclass may hold them in another form (glm5_jax/kernels.py).
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.ops import mla


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

  @property
  def written_first(self) -> bool:
    """Whether a layer writes new rows before it attends; otherwise all are written after the layers."""
    return False

  @staticmethod
  def pack(new: mla.Latents) -> jax.Array:
    """[B, T, ...] as rows of the pool."""
    return jnp.concatenate(new, axis=-1)

  @staticmethod
  def unpack(rows: jax.Array, like: mla.Latents) -> mla.Latents:
    """Rows [..., L + R] of the pool as latents, of the widths and dtype of `like`."""
    return mla.Latents(*jnp.split(rows, [like.c.shape[-1]], axis=-1))

  def read(self, name: str, layer: jax.Array, new: jax.Array) -> jax.Array:
    """All keys [B, S, ...] of one layer: those in the pool, and `new` [B, T, ...] after them."""
    pool = getattr(self, name)
    old = self.get(pool, layer, self.table)
    old = old.reshape(new.shape[0], self.slots, *new.shape[2:])
    # What an earlier owner left behind is invisible, but 0 * NaN is not 0.
    known = jnp.arange(self.slots) < self.length[:, None]
    old = jnp.where(_before(known, old), old, 0)
    slot = self.length[:, None] + jnp.arange(new.shape[1])
    row = jnp.arange(new.shape[0])[:, None]
    return old.at[row, slot].set(new.astype(old.dtype), mode='drop')  # Padding may lie beyond.

  def take(self, name: str, layer: jax.Array, new: jax.Array, slots: jax.Array) -> jax.Array:
    """`read(name, layer, new)[b, slots[b]]`, [B, T, K, ...], without reading the others.

    `slots` [B, T, K] must each hold a key of their row.
    """
    pool = getattr(self, name)
    row = jnp.arange(slots.shape[0])[:, None, None]
    page = self.table[row, slots // pool.shape[2]]
    old = self.get(pool, layer, page, slots % pool.shape[2])
    fresh = slots - self.length[:, None, None]
    own = new[row, jnp.clip(fresh, 0, new.shape[1] - 1)].astype(old.dtype)
    return jnp.where(_before(fresh >= 0, old), own, old)

  def pages(self, name: str, layer: jax.Array) -> tuple[jax.Array, jax.Array]:
    """All pages [layers * P, page_size, ...], and the table of those of one layer."""
    pool = getattr(self, name)
    return pool.reshape(-1, *pool.shape[2:]), self.table + layer * pool.shape[1]

  def write(self, new: dict[str, jax.Array], valid: jax.Array, first: dict[str, Any]) -> Any:
    """The cache with `new` rows [layers, B, T, ...] of each name where `valid` [B, T].

    `first` has the numbers of their first layer and of their first indexer. The length is as before,
    see `grown`.
    """
    size, width = self.latent.shape[2], self.table.shape[1]
    slot = self.length[:, None] + jnp.arange(valid.shape[1])
    row = jnp.arange(valid.shape[0])[:, None]
    page = jnp.where(valid, self.table[row, jnp.minimum(slot // size, width - 1)], 0)

    def put(name, rows):
      layer = first[name] + jnp.arange(rows.shape[0])[:, None, None]
      return self.put(getattr(self, name), rows, layer, page, slot % size)

    return self._replace(**{name: put(name, rows) for name, rows in new.items()})

  @staticmethod
  def get(pool, layer, page, offset=None) -> jax.Array:
    """Pages [..., page_size, ...] of a layer of the pool, or of each the row at `offset` [..., ...]."""
    where = (layer, page) if offset is None else (layer, page, offset)
    return pool.at[where].get(mode='promise_in_bounds')

  @staticmethod
  def put(pool, rows, layer, page, offset) -> jax.Array:
    """The pool [layers, P, page_size, ...] with `rows` [n, B, T, ...] at these places [n, B, T]."""
    return pool.at[layer, page, offset].set(rows.astype(pool.dtype), mode='promise_in_bounds')

  def grown(self, valid: jax.Array) -> Any:
    """The cache with the tokens [B, T] counted as held where `valid`."""
    return self._replace(length=self.length + jnp.sum(valid, axis=1))


def _before(mask: jax.Array, rows: jax.Array) -> jax.Array:
  """`mask` with dimensions of 1 behind it, as many as `rows` has more."""
  return mask.reshape(*mask.shape, *[1] * (rows.ndim - mask.ndim))


class PagedLatents(NamedTuple):
  """A layer's `mla.Latents` in their pages: decoding reads those rows that the indexer selects."""

  cache: PagedCache
  layer: jax.Array  # [] its number in the pool
  new: mla.Latents  # [B, T, ...] of the new tokens, which the pool may not hold yet

  @property
  def slots(self) -> int:
    return self.cache.slots

  def all(self) -> mla.Latents:
    rows = self.cache.read('latent', self.layer, self.cache.pack(self.new))
    return self.cache.unpack(rows, self.new)

  def take(self, slots: jax.Array) -> mla.Latents:
    rows = self.cache.take('latent', self.layer, self.cache.pack(self.new), slots)
    return self.cache.unpack(rows, self.new)


class PagedKeys(NamedTuple):
  """A layer's index keys in their pages."""

  cache: PagedCache
  layer: jax.Array  # [] the number of its indexer
  new: jax.Array  # [B, T, J] of the new tokens, which the pool may not hold yet

  def all(self) -> jax.Array:
    """[B, S, J]."""
    return self.cache.read('index_k', self.layer, self.new)
