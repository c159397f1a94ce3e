"""Prefill and decode with a cache equal the forward pass without one."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.modules import model
from tests import oracle, tiny

CAPACITY = 64  # More than the 48 tokens: the rest must not matter.


def pieces(golden, lengths, cache=None, segments=None, positions=None):
  """Logits of the golden ids, run through the cache in pieces of `lengths`; and the cache."""
  if cache is None:
    cache = model.init_cache(golden.config, 2, CAPACITY)
  logits, at = [], 0
  for length in lengths:
    piece = slice(at, at + length)
    out = tiny.forward(
      golden.params, golden.ids[:, piece], golden.config, cache=cache,
      segments=None if segments is None else segments[:, piece],
      positions=None if positions is None else positions[:, piece],
    )  # fmt: skip
    cache, at = out.cache, at + length
    logits.append(out.logits)
  assert at == golden.ids.shape[1] == int(cache['length'])
  return np.concatenate(logits, axis=1), cache


def test_prefill_and_decode(plain):
  logits, cache = pieces(plain, [40] + [1] * 8)
  tiny.close('cached logits, 40 + 8 x 1', logits, plain.reference['logits_cached'], 1e-5)
  tiny.close('cached logits against the full forward', logits, plain.reference['logits'], 1e-5)
  layer = jax.tree.map(lambda a: np.asarray(a[0, :, :40]), cache['dense']['block0'])
  tiny.close('cached latents', layer['c'], plain.reference['cache0.latent'][:, 0], 2e-6)
  tiny.close('cached rope keys', layer['k_rope'], plain.reference['cache0.k_rope'][:, 0], 2e-6)
  tiny.close('cached index keys', layer['k_index'], plain.reference['cache0.indexer_keys'], 2e-6)


def test_decode_from_the_first_token(plain):
  """48 single steps; the cache was used before and holds rubbish, not zeros."""
  cache = model.init_cache(plain.config, 2, CAPACITY)
  rng = np.random.default_rng(0)
  rubbish = jax.tree.map(lambda a: jnp.asarray(100 * rng.standard_normal(a.shape, 'f4')), cache)
  rubbish |= {'segments': cache['segments'], 'length': cache['length']}
  logits, _ = pieces(plain, [1] * 48, cache=rubbish)
  tiny.close('cached logits, 48 x 1', logits, plain.reference['logits'], 1e-5)


def test_left_padded_cache(plain):
  mask, positions = (plain.reference[f'{k}_leftpad'] for k in ('attention_mask', 'position_ids'))
  logits, _ = pieces(plain, [40] + [1] * 8, segments=mask, positions=positions)
  want = oracle.forward(plain.tensors, plain.raw, plain.ids, segments=mask, positions=positions)
  where = (mask > 0)[..., None]
  tiny.close('cached logits, left-padded', logits, want['logits'], 1e-5, where=where)
  assert np.isfinite(logits).all()


def test_index_share_chunked_prefill(index_share):
  """Shared layers keep no index keys; prefill in three pieces, then single steps."""
  config = index_share.config
  assert 'k_index' in model.init_cache(config, 2, CAPACITY)['moe']['block0']
  assert 'k_index' not in model.init_cache(config, 2, CAPACITY)['moe']['block1']
  logits, _ = pieces(index_share, [16, 16] + [1] * 16)
  tiny.close('IndexShare cached logits', logits, index_share.reference['logits'], 1e-5)
  tiny.close('IndexShare cached logits', logits, index_share.reference['logits_cached'], 1e-5)


def test_cache_size_is_the_latent(plain):
  """L + R values a token and layer, J per indexer: what MLA is for."""
  c = plain.config
  layers = {k: v for k, v in model.init_cache(c, 1, 7).items() if k not in ('segments', 'length')}
  values = sum(a.size for a in jax.tree.leaves(layers))
  assert values == 7 * 4 * (c.kv_lora_rank + c.qk_rope_head_dim + c.index_head_dim)
  assert {a.dtype for a in jax.tree.leaves(layers)} == {jnp.dtype('float32')}
  half = model.init_cache(c.replace(dtype='bfloat16'), 1, 7)
  assert half['moe']['block0']['c'].dtype == jnp.bfloat16


def test_more_tokens_than_the_cache_holds(plain):
  cache = model.init_cache(plain.config, 2, 8)
  with pytest.raises(ValueError, match='9 tokens do not fit a cache for 8'):
    model.forward(plain.params, plain.ids[:, :9], config=plain.config, cache=cache)
