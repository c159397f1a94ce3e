"""GLM-5: embedding, scanned stacks of decoder layers, final norm, head, and the MTP layer beside them.

Section 2.1 of the paper. `forward` is the public entry point; `GLM5` the module behind it.
"""

import functools
from typing import Any, NamedTuple

import flax.linen as nn
import jax
import jax.numpy as jnp

from glm5_jax.config import BlockSpec, ModelConfig, Stack
from glm5_jax.modules import mtp
from glm5_jax.modules.attention import Context
from glm5_jax.modules.block import Block, Options
from glm5_jax.modules.params import declare, ones
from glm5_jax.ops import norm, rope
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
  cache: dict[str, Any] | None
  logits: jax.Array | None = None  # [B, T, V] float32
  mtp_logits: jax.Array | None = None  # [steps, B, T, V] float32


class Unit(nn.Module):
  """The blocks that one iteration of a stack's scan runs."""

  config: ModelConfig
  blocks: tuple[BlockSpec, ...]
  options: Options

  @nn.compact
  def __call__(self, carry, cache, ctx: Context):
    x, selection = carry
    aux, new_cache = {}, {}
    for j, spec in enumerate(self.blocks):
      name = f'block{j}'
      emit = spec.indexer == 'full' and self.config.shares_selection
      block = Block(self.config, spec, self.options, emit, name=name)
      x, selection, aux[name], new_cache[name] = block(
        x, selection, ctx, None if cache is None else cache[name]
      )
    return (x, selection), (aux, None if cache is None else new_cache)


def _scanned(config: ModelConfig, stack: Stack, options: Options):
  """The module that runs a stack: a scan over its repeats, rematerialised if the config says so."""
  unit = Unit
  if config.remat == 'block':
    unit = nn.remat(Unit, prevent_cse=False)
  scan = nn.scan(
    unit, variable_axes={'params': 0}, split_rngs={'params': True}, in_axes=(0, nn.broadcast),
    out_axes=0, length=stack.repeats, unroll=min(config.scan_unroll, stack.repeats),
  )  # fmt: skip
  return scan(config, stack.blocks, options, name=stack.name)


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
    offset = 0 if cache is None else cache['length']
    if cache is None:
      k_segment = segments
    else:
      k_segment = jax.lax.dynamic_update_slice(cache['segments'], segments, (0, offset))
    slots = jnp.broadcast_to(offset + jnp.arange(time), (batch, time))
    if prefix is not None:
      slots = jnp.maximum(slots, prefix - 1)
    cos, sin = rope.angles(positions, rope.frequencies(c))
    ctx = Context(Keys(slots, segments, k_segment), cos, sin, segments > 0, offset, topk)

    embed = declare(self, c, embed=(c.vocab_size, c.hidden_size))['embed']
    with jax.named_scope('embed'):
      embedded = jnp.take(embed, tokens, axis=0).astype(c.dtype)
    x, aux, new_cache = embedded, {}, {}
    # Row k of the selection is only read by shared layers, which always follow a full one.
    selection = None
    if c.shares_selection:
      selection = jnp.full((batch, time, c.index_topk), -1, jnp.int32)
    for stack in c.stacks:
      (x, selection), (aux[stack.name], new_cache[stack.name]) = _scanned(c, stack, self.options)(
        (x, selection), None if cache is None else cache[stack.name], ctx
      )
    hidden = norm.rms_norm(x, ones(self, c, 'final_norm', c.hidden_size), c.rms_norm_eps)
    if self.options.capture:
      aux['embedded'] = embedded

    mtp_hidden = None
    steps = c.num_nextn_predict_layers if self.is_initializing() else self.mtp_steps
    if steps:
      layers = mtp.scanned(c, self.options, name='mtp')
      rows = slice(self.mtp_rows)
      mtp_hidden, aux['mtp'] = mtp.predict(
        layers, hidden[rows], embedded[rows], ctx.rows(rows), steps
      )
    if self.is_initializing():
      declare(self, c, lm_head=(c.hidden_size, c.vocab_size))
    if cache is not None:
      new_cache |= {'segments': k_segment, 'length': offset + time}
    return Output(hidden, mtp_hidden, aux, None if cache is None else new_cache)


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
  return jnp.einsum('...D,DV->...V', hidden, head, preferred_element_type=jnp.float32)


def forward(
  params: Params,
  tokens: jax.Array,
  *,
  config: ModelConfig,
  positions: jax.Array | None = None,
  segment_ids: jax.Array | None = None,
  prefix: jax.Array | None = None,
  cache: dict[str, Any] | None = None,
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
    mtp_steps: how many tokens beyond the next one to predict with the (shared) MTP layer.
    mtp_rows: predict them for the first rows of the batch only; default all.
    topk: int32 scalar in place of config.index_topk, which may then change from call to call.
    options: extra results, see `Options`.
    logits: False skips the head, as training does.

  Raises:
    ValueError: for MTP steps with a cache or a prefix, or more tokens than the cache can ever hold.
  """
  if cache is not None and mtp_steps:
    raise ValueError('MTP steps keep no cache: run them without `cache`, on whole rows')
  if prefix is not None and mtp_steps:
    raise ValueError('MTP steps predict tokens in order: they cannot run with `prefix` (infilling)')
  if cache is not None and tokens.shape[1] > cache['segments'].shape[1]:
    raise ValueError(
      f'{tokens.shape[1]} tokens do not fit a cache for {cache["segments"].shape[1]}'
    )
  if segment_ids is None:
    segment_ids = jnp.ones_like(tokens)
  if positions is None:
    start = 0 if cache is None else cache['length']
    positions = jnp.broadcast_to(start + jnp.arange(tokens.shape[1]), tokens.shape)
  module = GLM5(config, options, mtp_steps, mtp_rows)
  out: Any = module.apply({'params': params}, tokens, positions, segment_ids, cache, prefix, topk)
  if logits:
    with jax.named_scope('unembed'):
      out = out._replace(logits=unembed(params, out.hidden))
      if out.mtp_hidden is not None:
        out = out._replace(mtp_logits=unembed(params, out.mtp_hidden))
  return out


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
