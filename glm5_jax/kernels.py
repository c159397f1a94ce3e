"""Attention by the Pallas kernels, in place of ops/sparse_attention.py's own mathematics.

Modules take an attention function as an argument (`Options.attend`); this is the one place that knows
the kernels.
"""

import functools
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp

import pallas_kernels
from glm5_jax.config import ModelConfig
from glm5_jax.ops import chunks, collectives, mla, sparse_attention
from glm5_jax.shapes import Keys
from pallas_kernels import residuals

# 'reference' is plain jax on any backend, 'pallas' the TPU kernels.
Implementation = Literal['reference', 'pallas']

# The kernels stand alone, and name what they leave by themselves.
assert residuals.ATTENTION == chunks.ATTENTION


def attention(implementation: Implementation) -> Callable[..., Any]:
  """The attention function of a run, for `Options.attend`; equal choices give the same function."""
  if implementation not in ('reference', 'pallas'):
    raise ValueError(f"kernels must be 'reference' or 'pallas', got {implementation!r}")
  return attend if implementation == 'pallas' else sparse_attention.attend


@functools.cache
def interpreted(params: Any) -> Callable[..., Any]:
  """The kernels as an interpreter runs them, without a TPU; `params` as `pallas_call` takes them."""
  return functools.partial(attend, interpret=params)


def attend(
  p: Any,
  q: mla.Queries,
  latents: mla.Latents,
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
  if selection is None:
    assert index is not None  # A layer without an indexer is given a selection.
    selection, _ = pallas_kernels.indexer_topk(
      index.queries.q, index.queries.w, index.keys, keys.q_slot, keys.q_segment, keys.k_segment,
      config.index_topk, implementation='tpu', interpret=interpret,
    )  # fmt: skip
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
  k, v = mla.expand(p, latents)
  out, lse = pallas_kernels.dense_mla(
    jnp.concatenate([q.nope, q.rope], axis=-1), k, v, keys.q_segment, keys.k_segment,
    config.attention_scale, part=part, want_lse=index is not None, implementation='tpu',
    interpret=bool(interpret),
  )  # fmt: skip
  if index is None or lse is None:
    return out, {}
  kl = pallas_kernels.indexer_kl(
    mla.absorb(p, q), jnp.concatenate(latents, axis=-1), lse, index.queries.q, index.queries.w,
    index.keys, pallas_kernels.Visible(*keys), config.attention_scale, implementation='tpu',
    interpret=interpret,
  )  # fmt: skip
  return out, {'kl': kl}
