"""GLM-5: embedding, scanned stacks of decoder layers, final norm, head, and the MTP layer beside them.

Section 2.1 of the paper. `forward` is the public entry point; `GLM5` the module behind it.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from glm5_jax.config import BlockSpec, ModelConfig, Stack
from glm5_jax.modules import mtp
from glm5_jax.modules.attention import Context
from glm5_jax.modules.block import Block, Options
from glm5_jax.modules.params import LAYER_INPUT, declare, ones, rematerialised, weight
from glm5_jax.ops import collectives, indexer, norm, rope, sparse_attention
from glm5_jax.ops.pages import PagedCache
from glm5_jax.shapes import Keys

Params = dict[str, Any]


class Output(NamedTuple):
  """Result of a forward pass.

  aux maps a stack's name to {'block{j}': {...}} with a leading axis over the stack's repeats, and
  'mtp' to {...} with a leading axis over the steps; see Block for the entries.
  cache is the updated cache.
  """

  hidden: jax.Array  # [B, T, D] after the final norm
  mtp_hidden: jax.Array | None  # [steps, B, T, D], after shared_head.norm
  aux: dict[str, Any]
  cache: Any
  logits: jax.Array | None = None  # [B, T, V] float32
  mtp_logits: jax.Array | None = None  # [steps, B, T, V] float32


class Unit(nn.Module):
  """The blocks that one iteration of a stack's scan runs."""

  config: ModelConfig
  blocks: tuple[BlockSpec, ...]
  options: Options

  @nn.compact
  def __call__(self, carry, cache, ctx: Context):
    x, selection, pool = carry
    x = checkpoint_name(x, LAYER_INPUT)
    aux, new_cache = {}, {}
    for j, spec in enumerate(self.blocks):
      name = f'block{j}'
      emit = spec.indexer == 'full' and self.config.shares_selection
      block = Block(self.config, spec, self.options, emit, name=name)
      x, selection, aux[name], new_cache[name] = block(
        x, selection, ctx if pool is None else ctx._replace(paged=pool),
        None if cache is None else cache[name],
      )  # fmt: skip
      pool = pool if pool is None else new_cache.pop(name)
    return (x, selection, pool), (aux, None if cache is None else new_cache)


def _scanned(config: ModelConfig, stack: Stack, options: Options):
  """The module that runs a stack: a scan over its repeats, rematerialised if the config says so."""
  # What flax would check by tracing the body twice holds: no output is the same for all repeats.
  scan = nn.scan(
    rematerialised(Unit, config), variable_axes={'params': 0}, split_rngs={'params': True},
    in_axes=(0, nn.broadcast), out_axes=0, length=stack.repeats,
    unroll=min(config.scan_unroll, stack.repeats), check_constancy_invariants=False,
  )  # fmt: skip
  return scan(config, stack.blocks, options, name=stack.name)


def _nothing_shared(c: ModelConfig, batch: int, time: int, options: Options):
  """A `Shared` of the right shapes, for the carry of the first scan; nobody reads it."""
  index = None
  if options.indexer_loss:
    q = jnp.zeros((batch, time, c.index_n_heads, c.index_head_dim), c.dtype)
    queries = indexer.Queries(q, jnp.zeros((batch, time, c.index_n_heads), jnp.float32))
    keys = time * collectives.size('context')
    index = sparse_attention.Index(queries, jnp.zeros((batch, keys, c.index_head_dim), c.dtype))
  positions = jnp.full((batch, time, c.index_topk), -1, jnp.int32)
  return sparse_attention.Shared(positions, index)


class GLM5(nn.Module):
  """The decoder and its MTP layer. Parameters: see the tree in convert/hf_map.py."""

  config: ModelConfig
  options: Options = Options()
  mtp_steps: int = 0
  mtp_rows: int | None = None

  @nn.compact
  def __call__(
    self, tokens: jax.Array, positions: jax.Array, segments: jax.Array, cache=None, prefix=None,
    topk=None,
  ):  # fmt: skip
    """`tokens`, `positions`, `segments`, `prefix` [B, T], `topk` []; `Output` without logits."""
    c = self.config
    batch, time = tokens.shape
    paged = cache if isinstance(cache, PagedCache) else None
    offset: Any = 0
    slot = collectives.own_slots(time)
    if paged is not None:
      # Keys after a row's own are not visible to it by their slot.
      offset, k_segment = paged.length[:, None], jnp.ones((batch, paged.slots), jnp.int32)
      cache = _layer_numbers(c)
    elif cache is None:
      k_segment = collectives.gather_sequence(segments)
    else:
      offset = cache['length']
      k_segment = jax.lax.dynamic_update_slice(cache['segments'], segments, (0, offset))
    slots = jnp.broadcast_to(offset + slot, (batch, time))
    if prefix is not None:
      slots = jnp.maximum(slots, prefix - 1)
    cos, sin = rope.angles(positions, rope.frequencies(c))
    # A pool that layers write goes from one to the next.
    pool = paged if paged is not None and paged.written_first else None
    shared = paged if pool is None else None
    ctx = Context(Keys(slots, segments, k_segment), cos, sin, segments > 0, offset, topk, shared)

    normal = nn.initializers.normal(c.initializer_range)
    embed = weight(self, 'embed', normal, (c.vocab_size, c.hidden_size), c.param_dtype)
    with jax.named_scope('embed'):
      embedded = embed_tokens(embed, tokens).astype(c.dtype)
    x, aux = embedded, {}
    new_cache: Any = {}
    # Row k of the selection is only read by shared layers, which always follow a full one.
    selection = None
    if c.shares_selection:
      selection = _nothing_shared(c, batch, time, self.options)
    for stack in c.stacks:
      scan = _scanned(c, stack, self.options)
      (x, selection, pool), (aux[stack.name], new_cache[stack.name]) = scan(
        (x, selection, pool), None if cache is None else cache[stack.name], ctx
      )
    hidden = norm.rms_norm(x, ones(self, c, 'final_norm', c.hidden_size), c.rms_norm_eps)
    if self.options.capture:
      aux['embedded'] = embedded

    mtp_hidden = None
    steps = c.num_nextn_predict_layers if self.is_initializing() else self.mtp_steps
    if steps:
      layers = mtp.scanned(c, self.options, name='mtp', new=self.is_initializing())
      rows = slice(self.mtp_rows)
      mtp_hidden, aux['mtp'] = mtp.predict(
        layers, hidden[rows], embedded[rows], ctx.rows(rows), steps
      )
    if self.is_initializing():
      declare(self, c, lm_head=(c.hidden_size, c.vocab_size))
    if paged is not None:
      if pool is None:
        first = {'latent': 0, 'index_k': 0}
        pool = paged.write(_in_layer_order(c, new_cache), segments > 0, first)
      new_cache = pool.grown(segments > 0)
    elif cache is not None:
      new_cache |= {'segments': k_segment, 'length': offset + time}
    return Output(hidden, mtp_hidden, aux, None if cache is None else new_cache)


def embed_tokens(embed: jax.Array, tokens: jax.Array) -> jax.Array:
  """Rows of the embedding, of which a device may have a part."""
  if not collectives.present('tensor'):
    return jnp.take(embed, tokens, axis=0)
  row = tokens - jax.lax.axis_index('tensor') * len(embed)
  here = (row >= 0) & (row < len(embed))
  found = jnp.take(embed, jnp.where(here, row, 0), axis=0)
  return collectives.psum(jnp.where(here[..., None], found, 0), 'tensor')


def _layer_numbers(config: ModelConfig) -> dict[str, Any]:
  """Where each layer's rows are in a paged cache, in the form of a stack's cache."""
  numbers, indexers = {}, 0
  for stack in config.stacks:
    full = [j for j, spec in enumerate(stack.blocks) if spec.indexer == 'full']
    first = jnp.arange(stack.repeats)
    numbers[stack.name] = layers = {
      f'block{j}': {'latent': stack.first_layer + len(stack.blocks) * first + j}
      for j in range(len(stack.blocks))
    }
    for i, j in enumerate(full):
      layers[f'block{j}']['index_k'] = indexers + len(full) * first + i
    indexers += stack.repeats * len(full)
  return numbers


def _in_layer_order(config: ModelConfig, rows: dict[str, Any]) -> dict[str, jax.Array]:
  """New cache rows of all stacks as {'latent': [layers, B, T, W], 'index_k': [indexers, B, T, W]}."""
  out: dict[str, jax.Array] = {}
  for name in ('latent', 'index_k'):
    stacks = []
    for stack in config.stacks:
      layers = [rows[stack.name][f'block{j}'] for j in range(len(stack.blocks))]
      blocks = [layer[name] for layer in layers if name in layer]
      if blocks:
        stacked = jnp.stack(blocks, axis=1)
        stacks.append(stacked.reshape(-1, *stacked.shape[2:]))
    out[name] = jnp.concatenate(stacks)
  return out


def init_params(config: ModelConfig, key: jax.Array) -> Params:
  """Random parameters: matrices ~ N(0, initializer_range), norms 1, biases 0."""
  tokens = jnp.zeros((1, 2), jnp.int32)
  return GLM5(config).init(key, tokens, tokens, tokens + 1)['params']


def abstract_params(config: ModelConfig) -> Params:
  """The parameter tree as ShapeDtypeStructs; allocates nothing."""
  return jax.eval_shape(functools.partial(init_params, config), jax.random.key(0))


def param_count(config: ModelConfig, *, include_mtp: bool = False, biases: bool = False) -> int:
  """Exact number of parameters; the router's correction biases are buffers and count on request."""
  leaves = jax.tree_util.tree_flatten_with_path(abstract_params(config))[0]
  total = 0
  for path, leaf in leaves:
    keys = [k.key for k in path]
    if (keys[0] == 'mtp' and not include_mtp) or (keys[-2:] == ['router', 'bias'] and not biases):
      continue
    total += leaf.size
  return total


def unembed(params: Params, hidden: jax.Array) -> jax.Array:
  """[..., V] float32 logits of hidden states; for losses prefer the chunked ones of losses/."""
  head = params['lm_head'].astype(hidden.dtype)
  logits = jnp.einsum('...D,DV->...V', hidden, head, preferred_element_type=jnp.float32)
  return collectives.all_parts(logits, 'tensor')


def forward(
  params: Params,
  tokens: jax.Array,
  *,
  config: ModelConfig,
  positions: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  prefix: jax.Array | None = None,
  cache: dict[str, Any] | PagedCache | None = None,
  mtp_steps: int = 0,
  mtp_rows: int | None = None,
  topk: jax.Array | None = None,
  options: Options = Options(),
  logits: bool = True,
) -> Output:
  """Runs the model. Jit it with `config`, `mtp_steps`, `mtp_rows`, `options` and `logits`
  static.

  Args:
    params: nested dict as made by `init_params` or `load_hf`.
    tokens: [B, T] int32 ids.
    positions: [B, T] int32; default 0, 1, ... (continuing the cache).
    segment_ids: [B, T] int32, 0 for padding; tokens attend within their segment; default all 1.
    prefix: [B, T] int32, the slot of the row (of the cache, if there is one) at which the bidirectional
      part of each token's segment ends: all keys before it are visible to the whole segment (GLM's
      Part A, see `Keys`). It is bidirectional only within one call. Default none.
    cache: from `init_cache`, to append to; attention covers everything in it. The caller sees to it
      that there is room: a full cache is overwritten at its end, which jit cannot report. The caller sees to
      it that cache['length'] + T stays within its capacity; beyond, the result is undefined.
      Or a `PagedCache`, whose rows may differ in length; padding (`segment_ids` 0) follows a row's tokens.
    mtp_steps: how many tokens beyond the next one to predict with the (shared) MTP layer.
    mtp_rows: predict them for the first rows of the batch only; default all.
    topk: int32 scalar in place of config.index_topk, which may then change from call to call.
    options: extra results, see `Options`.
    logits: False skips the head, as training does.

  Raises:
    ValueError: for MTP steps with a cache or a prefix, more tokens than the cache can ever hold, or a
      prefix under dense attention by kernels, which are causal.
  """
  if cache is not None and mtp_steps:
    raise ValueError('MTP steps keep no cache: run them without `cache`, on whole rows')
  if prefix is not None and mtp_steps:
    raise ValueError('MTP steps predict tokens in order: they cannot run with `prefix` (infilling)')
  if prefix is not None and not (
    config.sparse_attention or options.attend == sparse_attention.attend
  ):
    raise ValueError("dense attention by kernels is causal: infilling needs kernels='reference'")
  if cache is not None and tokens.shape[1] > (room := _capacity(cache)):
    raise ValueError(f'{tokens.shape[1]} tokens do not fit a cache for {room}')
  if segment_ids is None:
    segment_ids = jnp.ones_like(tokens)
  if positions is None:
    start = 0 if cache is None else _length(cache)
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
  module = GLM5(config, options, mtp_steps, mtp_rows)
  out: Any = module.apply({'params': params}, tokens, positions, segment_ids, cache, prefix, topk)
  if logits:
    with jax.named_scope('unembed'):
      out = out._replace(logits=unembed(params, out.hidden))
      if out.mtp_hidden is not None:
        out = out._replace(mtp_logits=unembed(params, out.mtp_hidden))
  return out


def _capacity(cache: dict[str, Any] | PagedCache) -> int:
  return cache.slots if isinstance(cache, PagedCache) else cache['segments'].shape[1]


def _length(cache: dict[str, Any] | PagedCache) -> jax.Array:
  """Tokens in the cache: [] or [B, 1]."""
  return cache.length[:, None] if isinstance(cache, PagedCache) else cache['length']


def init_cache(config: ModelConfig, batch: int, capacity: int) -> dict[str, Any]:
  """An empty cache for `capacity` tokens a row: L + R values a layer, and J per indexer."""
  dtype = jnp.dtype(config.dtype)

  def zeros(repeats, *shape):
    return jnp.zeros((repeats, batch, capacity, *shape), dtype)

  cache: dict[str, Any] = {
    'segments': jnp.zeros((batch, capacity), jnp.int32), 'length': jnp.zeros((), jnp.int32)
  }  # fmt: skip
  for stack in config.stacks:
    layers = {}
    for j, spec in enumerate(stack.blocks):
      if spec.indexer == 'none':
        groups = config.num_key_value_heads
        layer = {
          'k': zeros(stack.repeats, groups, config.qk_head_dim),
          'v': zeros(stack.repeats, groups, config.v_head_dim),
        }
      else:
        layer = {
          'c': zeros(stack.repeats, config.kv_lora_rank),
          'k_rope': zeros(stack.repeats, config.qk_rope_head_dim),
        }
        if spec.indexer == 'full':
          layer['k_index'] = zeros(stack.repeats, config.index_head_dim)
      layers[f'block{j}'] = layer
    cache[stack.name] = layers
  return cache
