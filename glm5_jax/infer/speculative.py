"""Speculative decoding with the MTP layer (section 2.1): several tokens a step, the same tokens as without.

The MTP layer turns the hidden state before a token and the token's embedding into a state that predicts
the next token. Fed with its own output, after its norm, and the token it predicted, it drafts up to seven
more. The model then scores all of them in one pass, and the longest right beginning is kept, with the
model's own next token behind it.

A drafted token is drawn with the very noise that the model's own draw uses at that position, and is right
if the model draws it too. So speculation does not only keep the distribution: every token is the one
that decoding without it gives, at any temperature and for any filter. Classical rejection sampling (arXiv
2211.17192) accepts with probability 1 - TV of the two distributions, this coupling with (1 - TV) / (1 + TV)
at least (arXiv 2408.07978), but there the tokens depend on the draft, and so on what is cached.
"""

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.infer import sampling
from glm5_jax.modules.attention import Context
from glm5_jax.modules.block import Block, Options
from glm5_jax.modules.model import embed_tokens, forward, unembed
from glm5_jax.ops import norm, rope
from glm5_jax.ops.pages import PagedCache
from glm5_jax.shapes import Keys

MAX_DRAFT_STEPS = 7


class Verified(NamedTuple):
  """The tokens of a step: the first `kept` of each row count, the others were drawn in vain."""

  drawn: sampling.Drawn  # [B, steps + 1] each
  kept: jax.Array  # [B] int32, 1..steps + 1
  carry: jax.Array  # [B, D] the model's hidden state before the last of them


def mtp_layer(
  params: Any,
  config: ModelConfig,
  hidden: jax.Array,
  tokens: jax.Array,
  paged: PagedCache,
  valid: jax.Array,
  first: tuple[int, int],
) -> tuple[jax.Array, PagedCache]:
  """Hidden states [B, T, D] after shared_head.norm that predict the tokens after `tokens`.

  Args:
    params: of the whole model.
    config: a model with one MTP layer.
    hidden: [B, T, D] state at the position before each token: the model's after its final norm, or this
      function's own result.
    tokens: [B, T] int32.
    paged: cache; the row of a token is at the token's slot. Slot 0 has none: nothing is before it.
    valid: [B, T] bool.
    first: the layer's number in the cache, and its indexer's.

  Returns:
    The states, and the cache with the tokens' rows.
  """
  p = jax.tree.map(lambda a: a[0], params['mtp'])
  embedded = embed_tokens(params['embed'], tokens).astype(hidden.dtype)
  e = norm.rms_norm(embedded, p['embed_norm'], config.rms_norm_eps)
  h = norm.rms_norm(hidden, p['hidden_norm'], config.rms_norm_eps)
  z = jnp.einsum('BTC,CD->BTD', jnp.concatenate([e, h], axis=-1), p['w_proj'].astype(e.dtype))
  slots = paged.length[:, None] + jnp.arange(tokens.shape[1])
  k_segment = jnp.broadcast_to(jnp.arange(paged.slots) > 0, (tokens.shape[0], paged.slots))
  keys = Keys(slots, valid.astype(jnp.int32), k_segment.astype(jnp.int32))
  cos, sin = rope.angles(slots, rope.frequencies(config))
  ctx = Context(keys, cos, sin, valid, paged.length[:, None], None, paged)
  cache: Any = {'latent': first[0], 'index_k': first[1]}
  # In plain jax: the kernels of decoding cannot leave out slot 0.
  block = Block(config, config.mtp_block, Options())
  with jax.named_scope('mtp'):
    applied: Any = block.apply({'params': p['block']}, z, None, ctx, cache)
  y, _, _, rows = applied
  if paged.written_first:
    paged = rows
  else:
    paged = paged.write(jax.tree.map(lambda a: a[None], rows), valid, cache)
  return norm.rms_norm(y, p['norm'], config.rms_norm_eps), paged.grown(valid)


def layer_numbers(config: ModelConfig) -> tuple[int, int]:
  """The numbers of the MTP layer and of its indexer in the pool: after those of the decoder."""
  return len(config.blocks), sum(block.indexer == 'full' for block in config.blocks)


def _own_pages(paged: PagedCache, config: ModelConfig) -> PagedCache:
  """A cache of the MTP layer alone, with the pages of these rows only.

  Drafts write there what the pool need not know: carried through the loop, the pool would be copied.
  """
  rows, width = paged.table.shape

  def local(pool, layer):
    pages = paged.get(pool, layer, paged.table)
    pages = pages.reshape(1, rows * width, *pages.shape[2:])
    return jnp.concatenate([jnp.zeros_like(pages[:, :1]), pages], axis=1)

  layer, indexer = layer_numbers(config)
  table = 1 + jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
  return paged._replace(
    latent=local(paged.latent, layer), index_k=local(paged.index_k, indexer), table=table
  )


def extend(
  params: Any,
  config: ModelConfig,
  carry: jax.Array,
  tokens: jax.Array,
  paged: PagedCache,
  valid: jax.Array,
  options: Options = Options(),
) -> tuple[jax.Array, PagedCache]:
  """Runs the model and, on its hidden states, the MTP layer: hidden states [B, T, D] and the cache.

  `carry` [B, D] is the hidden state before the first of `tokens` [B, T]; zeros if it is not known, which
  only makes drafts worse. `options` are the model's.
  """
  out = forward(
    params,
    tokens,
    config=config,
    segment_ids=valid.astype(jnp.int32),
    cache=paged,
    options=options,
    logits=False,
  )
  before = jnp.concatenate([carry[:, None].astype(out.hidden.dtype), out.hidden[:, :-1]], axis=1)
  written = out.cache._replace(length=paged.length)
  _, written = mtp_layer(params, config, before, tokens, written, valid, layer_numbers(config))
  return out.hidden, written


def _mark(seen: jax.Array, token: jax.Array) -> jax.Array:
  """`seen` [B, V] after one more generated `token` [B]."""
  hit = token[:, None] == jnp.arange(seen.shape[1])
  return seen | jnp.where(hit, jnp.uint8(sampling.IN_CONTEXT | sampling.GENERATED), jnp.uint8(0))


def _draw_all(
  logits: jax.Array, settings: sampling.Settings, seen: jax.Array | None, tokens: jax.Array
) -> sampling.Drawn:
  """The tokens [B, T] that follow `tokens`, from `logits` [B, T, V]; the first of them is in `seen`."""
  batch, time = tokens.shape
  at = jax.tree.map(lambda a: jnp.repeat(a, time, axis=0), settings)
  at = at._replace(position=at.position + jnp.tile(jnp.arange(time), batch))
  if seen is not None:
    after = [seen]
    for i in range(1, time):
      after.append(_mark(after[-1], tokens[:, i]))
    seen = jnp.stack(after, axis=1).reshape(batch * time, -1)
  drawn = sampling.sample(logits.reshape(batch * time, -1), at, seen)
  return sampling.Drawn(*(column.reshape(batch, time) for column in drawn))


def decode(
  params: Any,
  config: ModelConfig,
  steps: int,
  carry: jax.Array,
  token: jax.Array,
  limit: jax.Array,
  paged: PagedCache,
  settings: sampling.Settings,
  seen: jax.Array | None,
  options: Options = Options(),
) -> tuple[Verified, PagedCache]:
  """Drafts `steps` tokens, scores them, and keeps what the model draws itself.

  Args:
    params, config: the model.
    steps: 1..7; static.
    carry: [B, D] hidden state before `token`.
    token: [B] the last token of each row, whose own cache rows are to be computed.
    limit: [B] int32, how many tokens may be kept at most; 0 for a row that is none.
    paged: cache of all tokens before `token`, with pages for `limit` more.
    settings: of the first token to be drawn; the position counts up from there.
    seen: as for `sampling.sample`.
    options: of the model; the MTP layer has none.
  """
  start = paged.length

  def draft(state, i):
    hidden, token, own, seen = state
    own, valid = own._replace(length=start + i), (i < limit)[:, None]
    out, own = mtp_layer(params, config, hidden[:, None], token[:, None], own, valid, (0, 0))
    hidden = out[:, 0]
    at = settings._replace(position=settings.position + i)
    following = sampling.sample(unembed(params, hidden), at, seen).token
    seen = None if seen is None else _mark(seen, following)
    return (hidden, following, own, seen), following

  state = (carry.astype(jnp.dtype(config.dtype)), token, _own_pages(paged, config), seen)
  with jax.named_scope('draft'):
    _, drafts = jax.lax.scan(draft, state, jnp.arange(steps))
  tokens = jnp.concatenate([token[:, None], drafts.T], axis=1)
  valid = jnp.arange(steps + 1) < limit[:, None]
  with jax.named_scope('verify'):
    hidden, paged = extend(params, config, carry, tokens, paged, valid, options)
    result = _draw_all(unembed(params, hidden), settings, seen, tokens)
  right = (result.token[:, :-1] == tokens[:, 1:]) & valid[:, 1:]
  kept = 1 + jnp.sum(jnp.cumprod(right, axis=1), axis=1)
  last = jnp.take_along_axis(hidden, (kept - 1)[:, None, None], axis=1)[:, 0]
  return Verified(result, kept, last), paged
