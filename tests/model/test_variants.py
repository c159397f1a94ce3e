"""Other members of the family against the oracle: DeepSeek-V3.2, softmax router, GQA, head shapes."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.config import Yarn, deepseek_v32, glm5
from glm5_jax.modules import model
from glm5_jax.modules.block import Options
from tests import oracle, tiny

# Half-split index rope, YaRN, group-limited routing, and GLM-5.2's shared MTP selection on top.
DEEPSEEK = tiny.config(
  num_hidden_layers=1, first_k_dense_replace=0, model_type='deepseek_v32', indexer_rope='half', n_group=4, topk_group=2, rms_norm_eps=1e-6,
  rope_scaling=Yarn(factor=4.0, beta_fast=4.0, original_max_position_embeddings=16),
  index_share_for_mtp_iteration=True, index_n_heads=11,
)  # fmt: skip
# Experts in every layer, two shared ones, unnormalised softmax weights, two MTP layers.
SOFTMAX = tiny.config(
  num_hidden_layers=1, first_k_dense_replace=0, n_shared_experts=2, scoring_func='softmax',
  norm_topk_prob=False, routed_scaling_factor=1.5, num_nextn_predict_layers=2, rope_theta=100.0,
)  # fmt: skip
STEPS = 2


@tiny.fast_jit(static_argnames='config')
def with_gradients(params, ids, config):
  """Loss, outputs and gradients of main loss + 0.3 * the MTP steps' mean loss."""

  def cross_entropy(logits, targets):
    log_probs = jax.nn.log_softmax(logits)
    return -jnp.mean(jnp.take_along_axis(log_probs, targets[..., None], axis=-1))

  def loss(params):
    out = model.forward(params, ids, config=config, mtp_steps=STEPS)
    extra = [cross_entropy(out.mtp_logits[k][:, : -k - 2], ids[:, k + 2 :]) for k in range(STEPS)]
    return cross_entropy(out.logits[:, :-1], ids[:, 1:]) + 0.3 * sum(extra) / STEPS, out

  (value, out), gradients = jax.value_and_grad(loss, has_aux=True)(params)
  return value, out, gradients


def oracle_loss(tensors, raw, ids) -> float:
  out = oracle.forward(tensors, raw, ids, mtp_steps=STEPS)
  extra = [
    oracle.cross_entropy(out['mtp_logits'][k][:, :-1], ids[:, k + 2 :]) for k in range(STEPS)
  ]
  return oracle.cross_entropy(out['logits'][:, :-1], ids[:, 1:]) + 0.3 * sum(extra) / STEPS


def check(out, want):
  """Logits of the main model and the MTP steps; another selection or routing would be far off."""
  tiny.close('logits', out.logits, want['logits'], 1e-5)
  for k in range(STEPS):
    t = out.logits.shape[1] - k - 1
    tiny.close(f'MTP step {k + 1}', out.mtp_logits[k][:, :t], want['mtp_logits'][k], 1e-5)


def test_deepseek_v32_and_shared_mtp_selection():
  ids = tiny.tokens(DEEPSEEK, 2, 31)
  params = tiny.random_params(DEEPSEEK)
  value, out, gradients = with_gradients(params, ids, DEEPSEEK)
  tensors, raw = tiny.checkpoint_names(params, DEEPSEEK), DEEPSEEK.to_hf()
  want = oracle.forward(tensors, raw, ids, mtp_steps=STEPS)
  check(out, want)
  # The second step attends where the first one did; scoring anew would have selected otherwise.
  anew = oracle.forward(
    tensors, raw | {'index_share_for_mtp_iteration': False}, ids, mtp_steps=STEPS
  )
  assert np.abs(anew['mtp_logits'][1] - want['mtp_logits'][1]).max() > 0.1
  tiny.close('loss', value, oracle_loss(tensors, raw, ids), 2e-6)

  # All gradients at once, along a random direction, against central differences in float64.
  rng = np.random.default_rng(0)
  tensors = {k: v.astype(np.float64) for k, v in tensors.items()}
  trained = [k for k in tensors if '.indexer.' not in k and 'correction_bias' not in k]
  step = {k: rng.standard_normal(tensors[k].shape) for k in trained}
  epsilon = 1e-7  # No choice flips: all margins are above 1e-4.
  up, down = (
    oracle_loss({k: v + s * epsilon * step.get(k, 0) for k, v in tensors.items()}, raw, ids)
    for s in (1, -1)
  )
  found = tiny.checkpoint_names(gradients, DEEPSEEK)
  slope = sum(float(np.vdot(found[k], step[k])) for k in trained)
  tiny.close_relative('directional derivative', slope, (up - down) / (2 * epsilon), 1e-4)
  mtp = [k for k in trained if k.startswith('model.layers.1.')]
  assert len(mtp) > 30 and all(found[k].any() for k in mtp if '.experts.' not in k)


def test_softmax_router_and_two_mtp_layers():
  ids = tiny.tokens(SOFTMAX, 2, 31)
  params = tiny.random_params(SOFTMAX)
  out = tiny.forward(params, ids, SOFTMAX, options=Options(capture=True), mtp_steps=STEPS)
  tensors, raw = tiny.checkpoint_names(params, SOFTMAX), SOFTMAX.to_hf()
  want = oracle.forward(tensors, raw, ids, mtp_steps=STEPS)
  check(out, want)
  for ours, theirs in zip(tiny.layers(SOFTMAX, out.aux), want['layers'], strict=True):
    np.testing.assert_array_equal(ours['selected'], theirs['selected'])
    np.testing.assert_array_equal(ours['router_experts'], theirs['experts'])


# GLM-5.2's flag means nothing without an indexer, and must do no harm.
GQA = tiny.config(attention='gqa', index_share_for_mtp_iteration=True)


def gqa_reference(params, config, ids, segments):
  """Grouped-query attention with QK-norm in float64; the rest is the oracle's."""
  params = jax.tree.map(lambda a: np.asarray(a, np.float64), params)
  heads, groups = config.num_attention_heads, config.num_key_value_heads
  raw, nope = config.replace(attention='mla').to_hf(), config.qk_nope_head_dim
  positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
  frequency = oracle.rope_frequencies(raw)
  visible = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
  visible &= np.tri(ids.shape[1], dtype=bool)

  def rotated(x):
    turned = oracle.rotate(x[..., nope:], positions, frequency, 'interleaved')
    return np.concatenate([x[..., :nope], turned], -1)

  x = params['embed'][ids]
  for name in ('dense', 'moe'):
    b = jax.tree.map(lambda a: a[0], params[name]['block0'])
    n, a = oracle.rms_norm(x, b['attn_norm'], config.rms_norm_eps), b['attn']
    q, k, v = (np.einsum('btd,dhe->bthe', n, a[w]) for w in ('w_q', 'w_k', 'w_v'))
    q = rotated(oracle.rms_norm(q, a['q_norm'], config.rms_norm_eps))
    k = rotated(oracle.rms_norm(k, a['k_norm'], config.rms_norm_eps))
    k, v = (np.repeat(y, heads // groups, axis=2) for y in (k, v))  # Heads 0, 1 share group 0.
    logits = np.einsum('bthe,bshe->bhts', q, k) * config.qk_head_dim**-0.5
    probs = oracle.softmax(logits, visible[:, None])
    x = x + np.einsum('bhts,bshe,hed->btd', probs, v, a['w_o'])
    n = oracle.rms_norm(x, b['mlp_norm'], config.rms_norm_eps)
    if name == 'dense':
      x = x + oracle.swiglu(n, *(b['mlp'][f'w_{p}'].T for p in ('gate', 'up', 'down')))
    else:
      m = b['moe']
      w = {'gate.weight': m['router']['w'].T, 'gate.e_score_correction_bias': m['router']['bias']}
      for part in ('gate', 'up', 'down'):
        w[f'shared_experts.{part}_proj.weight'] = m['shared'][f'w_{part}'].T
        w |= {
          f'experts.{e}.{part}_proj.weight': v.T for e, v in enumerate(m['experts'][f'w_{part}'])
        }
      x = x + oracle.moe(w, raw, n)['mlp_out']
  return oracle.rms_norm(x, params['final_norm'], config.rms_norm_eps) @ params['lm_head']


def test_gqa():
  """The baseline of Table 1: dense, key-value heads shared by groups of query heads; with a cache,
  packed rows and chunks of 7 queries.
  """
  ids, params = tiny.tokens(GQA, 2, 24), tiny.random_params(GQA)
  assert 'indexer' not in params['moe']['block0']['attn']
  segments = np.array([[1] * 24, [1] * 10 + [2] * 11 + [0] * 3])
  want = gqa_reference(params, GQA, ids, segments)
  where = (segments > 0)[..., None]
  chunked = GQA.replace(attention_chunk_elements=7 * 2 * 24 * 4)
  out = tiny.forward(params, ids, chunked, segments=segments)
  tiny.close('GQA logits', out.logits, want, 1e-5, where=where)

  cache, logits = model.init_cache(GQA, 2, 30), []
  for start in range(0, 24, 8):
    piece = slice(start, start + 8)
    out = tiny.forward(params, ids[:, piece], GQA, segments=segments[:, piece], cache=cache)
    cache = out.cache
    logits.append(out.logits)
  with_mtp = jax.eval_shape(lambda: model.forward(params, ids, config=GQA, mtp_steps=STEPS))
  assert with_mtp.mtp_logits.shape == (STEPS, *with_mtp.logits.shape)
  tiny.close('GQA cached logits', np.concatenate(logits, 1), want, 1e-5, where=where)


def attention_sizes(config) -> dict[str, int]:
  shapes = jax.tree.map(lambda a: a.size, model.abstract_params(config))['dense']['block0']['attn']
  return {k: v for k, v in shapes.items() if k.startswith('w_')}


def test_mla_192_with_96_heads_next_to_mla_256_with_64():
  """Section 2.1: heads of 192 + 64 instead of 128 + 64 dims, a third fewer of them. The keys' widths
  are equal exactly, the model's size within 0.2 %, and decoding does a third fewer products.
  """
  base = {'num_hidden_layers': 1, 'first_k_dense_replace': 1, 'num_nextn_predict_layers': 0}
  wide, narrow = glm5(), glm5(num_attention_heads=96, qk_nope_head_dim=128, v_head_dim=192)
  assert wide.qk_head_dim == 256 and narrow.qk_head_dim == 192
  a, b = attention_sizes(wide.replace(**base)), attention_sizes(narrow.replace(**base))
  assert a['w_uk'] == b['w_uk'] == 512 * 12288
  for name in ('w_uq', 'w_uv', 'w_o'):  # 96 * 192 / (64 * 256)
    assert 8 * b[name] == 9 * a[name]
  assert (a['w_dq'], a['w_dkv']) == (b['w_dq'], b['w_dkv'])
  sizes = [model.param_count(c) for c in (wide, narrow)]
  assert abs(sizes[1] / sizes[0] - 1) < 0.002

  def products_per_key(c):  # Absorbed decoding: scores over L + R, values over L.
    return c.num_attention_heads * (2 * c.kv_lora_rank + c.qk_rope_head_dim)

  assert 3 * products_per_key(wide) == 2 * products_per_key(narrow)


def test_deepseek_v32_shapes():
  """671 billion parameters, as published for DeepSeek-V3, and the indexers on top."""
  c = deepseek_v32()
  indexer = 61 * (1536 * 64 * 128 + 7168 * 128 + 2 * 128 + 7168 * 64)
  assert model.param_count(c) - indexer == pytest.approx(671.0e9, rel=1e-3)
