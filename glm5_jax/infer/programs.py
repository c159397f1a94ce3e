"""The engine's compiled programs, and the shapes they are compiled for.

Every call is padded to a bucket: of rows, of new tokens a row, of pages a row. All combinations are
compiled by `Engine.warm_up`; after it nothing is.
"""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jax.sharding import PartitionSpec as P

from glm5_jax import sharding
from glm5_jax.config import ModelConfig
from glm5_jax.infer import cache, sampling, speculative
from glm5_jax.infer.cache import pages_for
from glm5_jax.infer.request import MAX_TOP_LOGPROBS
from glm5_jax.kernels import Implementation, attention, check_paged, paged_cache
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import abstract_params, forward, unembed
from glm5_jax.ops import collectives


@dataclasses.dataclass(frozen=True)
class EngineConfig:
  """Sizes of the engine.

  Attributes:
    page_size: tokens of a cache page.
    pages: of the pool, one of which takes the padding. See `cache.token_bytes` for what they cost.
    max_length: tokens of a sequence, prompt and new ones; 0 is as many as model and pool allow.
    max_sequences: how many run at a time.
    max_step_tokens: token budget of a step; a decoding sequence counts 1 + draft_steps,
      prefill takes the rest.
    max_waiting: how many sequences may wait before `add` refuses.
    prefix_cache: whether finished sequences' pages are kept for those with the same beginning.
    draft_steps: tokens that the MTP layer drafts for each one that the model draws; 0..7.
    prefill_buckets, batch_buckets, page_buckets: sizes to compile for; by default a few, up to the
      largest that can occur.
    kernels: 'reference' is plain jax, 'pallas' the TPU kernels for the decoder's layers; the MTP layer
      is plain jax with both. Kernels want an index_head_dim that 128 divides, or copy the pool's keys.
    tensor: devices that divide the model's heads, widths and vocabulary; each has the whole pool.
    compiler_options: of jax.jit, as pairs.
  """

  page_size: int = 64
  pages: int = 1025
  max_length: int = 0
  max_sequences: int = 16
  max_step_tokens: int = 512
  max_waiting: int = 1024
  prefix_cache: bool = True
  draft_steps: int = 0
  prefill_buckets: tuple[int, ...] = ()
  batch_buckets: tuple[int, ...] = ()
  page_buckets: tuple[int, ...] = ()
  kernels: Implementation = 'reference'
  tensor: int = 1
  compiler_options: tuple[tuple[str, Any], ...] = ()

  def resolve(self, model: ModelConfig) -> 'EngineConfig':
    """This configuration for a model, with its defaults filled in, checked.

    Raises:
      ValueError: for sizes that do not fit together.
    """
    if model.attention != 'mla':
      raise ValueError('the engine pages the latent cache of MLA; run GQA models with `generate`')
    if min(self.page_size, self.max_sequences, self.max_waiting, self.tensor) < 1 or self.pages < 2:
      raise ValueError(f'sizes must be positive, and pages at least 2: {self}')
    check_paged(self.kernels, model, self.page_size)
    if not 0 <= self.draft_steps <= speculative.MAX_DRAFT_STEPS:
      raise ValueError(
        f'draft_steps={self.draft_steps} must be within 0..{speculative.MAX_DRAFT_STEPS}'
      )
    if self.draft_steps and model.num_nextn_predict_layers != 1:
      raise ValueError(
        f'drafting needs a model with one MTP layer; this one has {model.num_nextn_predict_layers}'
      )
    decoding = self.max_sequences * (1 + self.draft_steps)
    if self.max_step_tokens <= decoding:
      raise ValueError(
        f'max_step_tokens={self.max_step_tokens} must exceed max_sequences * (1 + draft_steps) ='
        f' {decoding}, or prefill never gets its turn'
      )
    room = min(model.max_position_embeddings, (self.pages - 1) * self.page_size)
    length = self.max_length or room
    if not 2 <= length <= room:
      raise ValueError(
        f'max_length={length} must be within 2..{room}: the model has'
        f' {model.max_position_embeddings} positions, the pool {self.pages - 1} pages of'
        f' {self.page_size} tokens'
      )
    pages = pages_for(length, self.page_size)
    prefill = self.prefill_buckets or _fourths(min(length, self.max_step_tokens), 32)
    batch = self.batch_buckets or _fourths(self.max_sequences, 1)
    tables = self.page_buckets or _fourths(pages, 4)
    for name, sizes, least in (('batch', batch, self.max_sequences), ('page', tables, pages)):
      if max(sizes) < least:
        raise ValueError(f'{name}_buckets={sizes} must reach {least}')
    if max(prefill) > max(tables) * self.page_size:
      raise ValueError(f'prefill_buckets={prefill} exceed the longest sequence, of {length} tokens')
    return dataclasses.replace(
      self, max_length=length, prefill_buckets=tuple(sorted(prefill)),
      batch_buckets=tuple(sorted(batch)), page_buckets=tuple(sorted(tables)),
    )  # fmt: skip


def _fourths(largest: int, least: int) -> tuple[int, ...]:
  """`largest`, a fourth of it, and so on while above `least`; ascending."""
  sizes = [largest]
  while sizes[0] > least:
    sizes.insert(0, -(-sizes[0] // 4))
  return tuple(sizes)


def make_mesh(tensor: int) -> Mesh | None:
  """The mesh of an engine on so many of this process's devices; None for one.

  Raises:
    ValueError: there are fewer.
  """
  if tensor == 1:
    return None
  return sharding.make_mesh({'tensor': tensor}, jax.local_devices()[:tensor])


def bucket(size: int, sizes: tuple[int, ...]) -> int:
  """The smallest of `sizes` that is at least `size`."""
  return next(s for s in sizes if s >= size)


def by_layer(params: Any, config: ModelConfig) -> Any:
  """The parameters as the programs take them: on a CPU, of each stack a list of its repeats' leaves.

  XLA:CPU copies a layer's weights out of a stack before it uses them, every time. Elsewhere they stay
  stacked: a program of 78 layers in a row takes long to compile.
  """
  if not _unrolls():
    return params
  names = {stack.name for stack in config.stacks}
  return {
    name: jax.tree.map(lambda a: list(jnp.unstack(a)), tree) if name in names else tree
    for name, tree in params.items()
  }


def without_gradients(config: ModelConfig) -> ModelConfig:
  """The same model, computed as is best for forward passes alone."""
  return config.replace(
    remat='none',
    offload_inputs=False,
    scan_unroll=config.num_hidden_layers if _unrolls() else config.scan_unroll,
    expert_matmul='rounds' if config.expert_matmul == 'blocks' else config.expert_matmul,
  )


def _unrolls() -> bool:
  return jax.default_backend() == 'cpu'


def _stacked(params: Any) -> Any:
  """Undoes `by_layer`. Under jit with all layers unrolled, no stack is ever made."""
  return jax.tree.map(
    lambda a: jnp.stack(a) if isinstance(a, list) else a,
    params,
    is_leaf=lambda a: isinstance(a, list),
  )


def _forward(params, latent, index_k, carry, tokens, count, table, length, *, config, kernels):
  """Runs each row's `count` new tokens [B, T].

  Returns (logits [B, V] after the last of them, the hidden state [B, D] there, the pool). With a `carry`
  [B, D], the hidden state before the first of them, the MTP layer's cache rows are made too.
  """
  params = _stacked(params)
  valid = jnp.arange(tokens.shape[1]) < count[:, None]
  paged: Any = paged_cache(kernels)(latent, index_k, table, length)
  options = Options(attend=attention(kernels))
  if carry is None:
    out = forward(
      params, tokens, config=config, segment_ids=valid.astype(jnp.int32), cache=paged, logits=False,
      options=options,
    )  # fmt: skip
    hidden, paged = out.hidden, out.cache
  else:
    hidden, paged = speculative.extend(params, config, carry, tokens, paged, valid, options)
  last = jnp.maximum(count - 1, 0)[:, None, None]
  hidden = jnp.take_along_axis(hidden, last, axis=1)[:, 0]
  return unembed(params, hidden), hidden, paged.latent, paged.index_k


def _speculate(
  params, latent, index_k, carry, token, limit, table, length, settings, seen, *, config, steps, kernels
):  # fmt: skip
  paged = paged_cache(kernels)(latent, index_k, table, length)
  verified, paged = speculative.decode(
    _stacked(params), config, steps, carry, token, limit, paged, settings, seen,
    Options(attend=attention(kernels)),
  )  # fmt: skip
  return verified, paged.latent, paged.index_k


@dataclasses.dataclass(frozen=True)
class Programs:
  """Jitted functions; the pool's arrays are donated, parameters are those of `by_layer`."""

  forward: Callable[..., Any]
  speculate: Callable[..., Any]
  sample: Callable[..., sampling.Drawn]
  top_logprobs: Callable[..., Any]
  copy_page: Callable[..., Any]


@functools.cache
def programs(
  config: ModelConfig,
  draft_steps: int,
  compiler_options: tuple[tuple[str, Any], ...],
  kernels: Implementation = 'reference',
  mesh: Mesh | None = None,
) -> Programs:
  """One set for all engines of a model, so that a second engine compiles nothing.

  On a mesh, each device has its shards of the parameters and all of everything else.
  """
  config = without_gradients(config)
  params = sharding.param_specs(abstract_params(config), mesh) if mesh else P()

  # The functions are wrapped, so that another set has compiled programs of its own.
  def jit(f, *specs, donate=(), **settings):
    f = collectives.on_mesh(functools.partial(f, **settings), mesh, specs or P(), P())
    return jax.jit(f, compiler_options=dict(compiler_options) or None, donate_argnums=donate)

  model = {'config': config, 'kernels': kernels}
  return Programs(
    forward=jit(_forward, params, *[P()] * 7, donate=(1, 2), **model),
    speculate=jit(_speculate, params, *[P()] * 9, donate=(1, 2), steps=draft_steps, **model),
    sample=jit(sampling.sample),
    top_logprobs=jit(sampling.top_logprobs, count=MAX_TOP_LOGPROBS),
    copy_page=jit(cache.copy_page, donate=(0, 1)),
  )
