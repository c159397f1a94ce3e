"""DeepSeek sparse attention over MLA (section 2.1.1): score visible keys, keep k, attend to those.

Queries are processed in chunks, so that no [B, N, T, S] or [B, T, S] tensor exists at long context.
A chunk attends in one of two forms (see mla.py): `expanded` computes all visible keys and masks, which
is fastest while S is a small multiple of index_topk; `absorbed` gathers the selected cache rows, and
its cost no longer grows with S but for the scoring.
"""

from collections.abc import Mapping
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from glm5_jax.config import ModelConfig
from glm5_jax.losses import indexer_kl
from glm5_jax.ops import chunks, collectives, indexer, mla, topk
from glm5_jax.shapes import Keys

Form = Literal['expanded', 'absorbed']
# Masked attention over S keys beats gathering index_topk rows below about this ratio.
_GATHER_RATIO = 8


class Index(NamedTuple):
  """The indexer's side of a layer: queries to score and keys to score against."""

  queries: indexer.Queries
  keys: Any  # [B, S, J], or what has them as `all()`: `pages.PagedKeys`.

  def read(self) -> 'Index':
    """With the keys as an array. (A cache in pages has to fetch them.)"""
    return self if isinstance(self.keys, jax.Array) else self._replace(keys=self.keys.all())


class Shared(NamedTuple):
  """What a layer leaves to those that share its indexer (IndexShare)."""

  positions: jax.Array  # [B, T, K] selected, -1 padded.
  scored_by: Index | None = None  # Its indexer, where their KL trains it as well.


class Request(NamedTuple):
  """Optional results of a layer; static."""

  kl: bool = False  # Indexer loss (losses/indexer_kl.py), per query.
  # Share of the dense attention mass that the selection holds, or would hold, per query.
  recall: bool = False
  selection: bool = False  # Selected positions [B, T, K], for IndexShare.
  scores: bool = False  # [B, T, S] index scores and selection mask, [B, T, N, S] probabilities.


def choose_form(config: ModelConfig, time: int, keys: int) -> Form:
  """Decoding a few tokens attends to the latents; long contexts gather; the rest is masked."""
  gather = config.sparse_attention and keys >= _GATHER_RATIO * config.index_topk
  return 'absorbed' if (time <= 8 and keys > time) or gather else 'expanded'


def attend(
  p: Mapping[str, jax.Array],
  q: mla.Queries,
  latents: Any,
  keys: Keys,
  index: Index | None,
  selection: jax.Array | None,
  config: ModelConfig,
  request: Request = Request(),
  form: Form | None = None,
  k: jax.Array | None = None,
) -> tuple[jax.Array, dict[str, Any]]:
  """Attention output before W_O, [B, T, N, Hv], and the results named in `request`.

  Args:
    p: the layer's attention parameters (w_uk, w_uv are used).
    q: queries of the T new tokens.
    latents: cache rows of all S keys: `mla.Latents`, or what has its `slots`, `all` and `take`.
    keys: which key each query may see.
    index: this layer's indexer, or None if it has none. With a `selection`, the indexer that made it:
      then it is for the KL only.
    selection: [B, T, K] positions selected by an earlier layer (IndexShare), -1 padded, or None.
    config: `sparse_attention=False` attends to every visible key; `index` then serves the loss, and the
      recall of what it would select.
    request: what else to return: 'kl', 'recall' [B, T] float32; 'selection' [B, T, K] int32;
      'index_scores', 'selected' [B, T, S], 'probs' [B, T, N, S].
    form: 'expanded' or 'absorbed'; None lets `choose_form` decide.
    k: int32 scalar in place of `index_topk`, for a selection that shrinks during training. The form is
      'expanded' then, since nothing of size k can be gathered.
  """
  index = None if index is None else index.read()
  keys, q = chunks.bind(keys, q)
  batch, time, heads = q.nope.shape[:3]
  size = latents.slots
  if k is not None and request.selection:
    raise ValueError(
      'a changing k has no list of selected positions to share: IndexShare needs a fixed'
    )
  form = 'expanded' if k is not None else form or choose_form(config, time, size)
  gathers = config.sparse_attention and size > config.index_topk and not request.scores
  if form == 'expanded':
    sides: Any = mla.expand(p, latents.all())
  else:
    sides = mla.absorb(p, q)
    if not gathers:
      latents = latents.all()

  def one_chunk(inputs):
    q, index_queries, selection, q_slot, q_segment, q_absorbed = inputs
    visible = Keys(q_slot, q_segment, keys.k_segment).visible()
    scores = None if index is None else indexer.scores(index_queries, index.keys)
    if not (config.sparse_attention or request.recall or request.selection):
      selected = visible
    elif selection is None and scores is not None:
      keep = config.index_topk if k is None else k
      selected = chunks.saved(topk.select_mask(jax.lax.stop_gradient(scores), visible, keep))
    else:
      selected = topk.indices_to_mask(selection, size) & visible
    mask = selected if config.sparse_attention else visible
    aux = {}
    if form == 'expanded':
      logits = mla.expanded_logits(q, sides[0], config.attention_scale)
      with jax.named_scope('attend'):
        probs = mla.masked_softmax(logits, mask[:, None])
        out = mla.expanded_output(probs, sides[1])
      logits_mask, logits_scores = mask, scores
    else:
      rows, logits_mask, logits_scores = latents, mask, scores
      if gathers:
        rows, logits_mask, logits_scores = _gather(latents, mask, scores, config.index_topk)
      logits = mla.absorbed_logits(q_absorbed, rows, config.attention_scale)
      with jax.named_scope('attend'):
        probs = mla.masked_softmax(logits, logits_mask[:, None])
        out = mla.absorbed_output(p, probs, rows)
    if request.kl and logits_scores is not None:
      target = collectives.pmean(jnp.mean(probs, axis=1), 'tensor')
      aux['kl'] = indexer_kl.kl_per_query(logits_scores, target, logits_mask)
    if request.recall:
      dense = jnp.mean(mla.masked_softmax(logits, visible[:, None]), axis=1)
      dense = collectives.pmean(dense, 'tensor')
      aux['recall'] = jnp.sum(jnp.where(selected, dense, 0.0), axis=-1)
    if request.selection:
      aux['selection'] = topk.mask_to_indices(selected, config.index_topk)
    if request.scores:
      aux['selected'] = mask
      aux['probs'] = jnp.moveaxis(probs, 1, 2)
      if scores is not None:
        aux['index_scores'] = scores
    return out, aux

  if request.recall and form != 'expanded':
    raise ValueError("recall needs every visible key's logit: use form='expanded'")
  inputs = (
    q, None if index is None else index.queries, selection, keys.q_slot, keys.q_segment,
    sides if form == 'absorbed' else None,
  )  # fmt: skip
  out, aux = chunks.over_queries(
    one_chunk, inputs, time, batch * size * heads, config.attention_chunk_elements
  )
  return checkpoint_name(out, chunks.ATTENTION), aux


def _gather(latents: Any, mask: jax.Array, scores: jax.Array | None, k: int):
  """Rows, validity and scores of the selected keys only: [B, T, K, ...]."""
  indices = topk.mask_to_indices(mask, k)
  safe = jnp.maximum(indices, 0)
  rows = latents.take(safe)
  if scores is not None:
    scores = jnp.take_along_axis(scores, safe, axis=-1)
  return rows, indices >= 0, scores
