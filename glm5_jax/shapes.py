"""The shape glossary. Einsum letters, array suffixes and docstrings all use these.

B batch                 N attention heads            E routed experts
T query time            M key-value heads (GQA)      F feed-forward width
S key time              H head dim (any)             V vocabulary
D model width           R rope dim                   K selected keys, or experts per token
Q query latent          L key-value latent           G group (experts, RL samples)
I indexer heads         J indexer head dim           P cache pages
"""

from typing import NamedTuple

import jax


class Keys(NamedTuple):
  """Which keys a query may see: key `s` is visible to query `t` of the same row iff
  `s <= q_slot[t]`, both carry the same segment id, and that id is not 0 (padding).

  A slot is an index into the key axis. `q_slot` is the query's own, except in the bidirectional part of a
  segment (`prefix` of modules/model.py), where it is the last slot of that part.
  """

  q_slot: jax.Array  # [B, T] int32
  q_segment: jax.Array  # [B, T] int32
  k_segment: jax.Array  # [B, S] int32

  def visible(self) -> jax.Array:
    """[B, T, S] bool. Call it on a chunk of queries when T is long (`take`)."""
    s = jax.lax.broadcasted_iota(self.q_slot.dtype, (1, 1, self.k_segment.shape[1]), 2)
    same = self.q_segment[:, :, None] == self.k_segment[:, None, :]
    return (s <= self.q_slot[:, :, None]) & same & (self.k_segment[:, None, :] > 0)
