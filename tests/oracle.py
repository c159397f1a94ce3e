"""The whole model in float64 numpy, for comparison: forward pass, MTP steps and indexer losses.

Written from the published formulas, not from our code, and with as little cleverness as possible:
every tensor is dense, every mask explicit, rope rotates pairs in place. It reads checkpoint names
and the fields of config.json, so it also checks the naming. Sources: DeepSeek-V2 (2405.04434) for
MLA, DeepSeek-V3 (2412.19437) for router and MTP, DeepSeek-V3.2 (2512.02556) for sparse attention,
YaRN (2309.00071), and the differences that GLM-5 (2602.15763) makes.

Dimensions in einsum strings: b row, t query, s key, d model, q query latent, l key-value latent,
h head, e head dim, i index head, j index head dim.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

Array = np.ndarray


def rms_norm(x: Array, scale: Array, eps: float) -> Array:
  return scale * x / np.sqrt(np.mean(x**2, -1, keepdims=True) + eps)


def layer_norm(x: Array, scale: Array, bias: Array, eps: float) -> Array:
  mean, variance = np.mean(x, -1, keepdims=True), np.var(x, -1, keepdims=True)
  return scale * (x - mean) / np.sqrt(variance + eps) + bias


def sigmoid(x: Array) -> Array:
  return 1 / (1 + np.exp(-x))


def softmax(x: Array, mask: Array | None = None) -> Array:
  """Over the last axis where `mask`; rows without any entry are 0."""
  x = np.asarray(x, np.float64)
  mask = np.ones(x.shape, bool) if mask is None else np.broadcast_to(mask, x.shape)
  top = np.max(np.where(mask, x, -np.inf), -1, keepdims=True, initial=-1e300)
  e = np.where(mask, np.exp(np.where(mask, x - top, 0.0)), 0.0)
  return e / np.maximum(e.sum(-1, keepdims=True), 1e-300)


def swiglu(x: Array, gate: Array, up: Array, down: Array) -> Array:
  """The matrices are [out, in], as checkpoints have them."""
  z = x @ gate.T
  return (z * sigmoid(z) * (x @ up.T)) @ down.T


def top_k_mask(scores: Array, allowed: Array, k: int) -> Array:
  """The `k` largest allowed entries of each row, by a stable sort: of equal ones the first wins."""
  out = np.zeros(scores.shape, bool)
  for row in np.ndindex(scores.shape[:-1]):
    candidates = np.flatnonzero(allowed[row])
    best = candidates[np.argsort(-scores[row][candidates], kind='stable')[:k]]
    out[row][best] = True
  return out


def rope_frequencies(config: Mapping[str, Any]) -> Array:
  """Radians per token of each pair of dimensions."""
  dim, rope = config['qk_rope_head_dim'], config['rope_parameters']
  theta = rope['rope_theta']
  frequency = np.array([theta ** (-2.0 * i / dim) for i in range(dim // 2)])
  if rope['rope_type'] == 'default':
    return frequency
  # YaRN: a pair that turns more than beta_fast times within the original context keeps its
  # frequency, one that turns less than beta_slow times is slowed by `factor`, linear in between
  # (in the index of the pair, between bounds rounded outwards).
  context, bounds = rope['original_max_position_embeddings'], []
  for turns, outward in ((rope['beta_fast'], math.floor), (rope['beta_slow'], math.ceil)):
    # The i at which theta ** (-2 i / dim) * context == 2 pi turns.
    bounds.append(outward(dim / 2 * math.log(context / (2 * math.pi * turns), theta)))
  low, high = max(bounds[0], 0), min(bounds[1], dim - 1)
  out = []
  for i, f in enumerate(frequency):
    slowed = min(max((i - low) / max(high - low, 1e-3), 0.0), 1.0)
    out.append(f * (1 - slowed) + f / rope['factor'] * slowed)
  return np.array(out)


def rotate(x: Array, positions: Array, frequency: Array, layout: str) -> Array:
  """Rope of `x` [b, t, heads, dim]: pair i turns by position * frequency[i], and stays in place."""
  angle = positions[:, :, None, None] * frequency
  out = np.empty_like(x)
  for i in range(len(frequency)):
    first, second = (2 * i, 2 * i + 1) if layout == 'interleaved' else (i, i + len(frequency))
    c, s = np.cos(angle[..., i]), np.sin(angle[..., i])
    out[..., first] = x[..., first] * c - x[..., second] * s
    out[..., second] = x[..., first] * s + x[..., second] * c
  return out


def attention_scale(config: Mapping[str, Any]) -> float:
  scale = (config['qk_nope_head_dim'] + config['qk_rope_head_dim']) ** -0.5
  rope = config['rope_parameters']
  if rope['rope_type'] == 'yarn':
    scale *= (0.1 * rope['mscale_all_dim'] * math.log(rope['factor']) + 1) ** 2
  return scale


def index_scores(w, config, n: Array, q_latent: Array, positions: Array) -> Array:
  """Index scores [b, t, s] of every pair."""
  heads, dim, rope_dim = (
    config[k] for k in ('index_n_heads', 'index_head_dim', 'qk_rope_head_dim')
  )
  layout = 'interleaved' if config['indexer_rope_interleave'] else 'half'
  frequency = rope_frequencies(config)
  q = (q_latent @ w['indexer.wq_b.weight'].T).reshape(*n.shape[:2], heads, dim)
  k = layer_norm(
    n @ w['indexer.wk.weight'].T, w['indexer.k_norm.weight'], w['indexer.k_norm.bias'], 1e-6
  )[:, :, None]
  q, k = (
    np.concatenate([rotate(x[..., :rope_dim], positions, frequency, layout), x[..., rope_dim:]], -1)
    for x in (q, k)
  )
  weight = n @ w['indexer.weights_proj.weight'].T * heads**-0.5
  similarity = np.maximum(np.einsum('btij,bsj->btis', q, k[:, :, 0]) * dim**-0.5, 0)
  return np.einsum('bti,btis->bts', weight, similarity)


def attention(w, config, n: Array, visible: Array, positions: Array, selected, dense: bool):
  """MLA in expanded form over the selected keys; `w` holds the layer's self_attn.* tensors.

  `selected` is another layer's selection or None. Returns the output and a dict of intermediates;
  'dense_probs' are the probabilities over all visible keys.
  """
  heads, nope, rope_dim, dv, rank = (
    config[k] for k in ('num_attention_heads', 'qk_nope_head_dim', 'qk_rope_head_dim',
                        'v_head_dim', 'kv_lora_rank')
  )  # fmt: skip
  frequency, rows = rope_frequencies(config), n.shape[:2]
  latent_eps = config.get('latent_norm_eps', 1e-6)
  q_latent = rms_norm(n @ w['q_a_proj.weight'].T, w['q_a_layernorm.weight'], latent_eps)
  q = (q_latent @ w['q_b_proj.weight'].T).reshape(*rows, heads, nope + rope_dim)
  q_rope = rotate(q[..., nope:], positions, frequency, 'interleaved')
  kv = n @ w['kv_a_proj_with_mqa.weight'].T
  c = rms_norm(kv[..., :rank], w['kv_a_layernorm.weight'], latent_eps)
  k_rope = rotate(kv[:, :, None, rank:], positions, frequency, 'interleaved')[:, :, 0]
  kv = (c @ w['kv_b_proj.weight'].T).reshape(*rows, heads, nope + dv)
  logits = np.einsum('bthe,bshe->bhts', q[..., :nope], kv[..., :nope])
  logits += np.einsum('bthe,bse->bhts', q_rope, k_rope)
  logits *= attention_scale(config)
  out: dict[str, Array] = {}
  if 'indexer.wk.weight' in w and selected is None:
    out['index_scores'] = index_scores(w, config, n, q_latent, positions)
    selected = top_k_mask(out['index_scores'], visible, config['index_topk'])
  mask = visible if dense else selected
  out['selected'] = selected
  out['probs'] = softmax(logits, mask[:, None])
  out['dense_probs'] = softmax(logits, visible[:, None])
  mixed = np.einsum('bhts,bshe->bthe', out['probs'], kv[..., nope:])
  out['attn_out'] = mixed.reshape(*rows, heads * dv) @ w['o_proj.weight'].T
  if 'index_scores' in out:  # KL(mean attention || softmax of scores), per query.
    target = out['probs'].mean(1)
    q_index = softmax(out['index_scores'], mask)
    ratio = np.log(np.where(target > 0, target, 1)) - np.log(np.where(target > 0, q_index, 1))
    out['kl'] = (target * ratio).sum(-1)
  return out


def route(w, config, x: Array) -> tuple[Array, Array, Array]:
  """Router logits [n, E], chosen experts [n, k] (best first), their weights, of `x` [n, d]."""
  logits = x @ w['gate.weight'].T
  score = sigmoid(logits) if config['scoring_func'] == 'sigmoid' else softmax(logits)
  choice = score + w['gate.e_score_correction_bias']
  groups, kept = config['n_group'], config['topk_group']
  if groups > 1:
    members = choice.reshape(len(x), groups, -1)
    group_score = np.sort(members, -1)[:, :, -2:].sum(-1)
    keep = top_k_mask(group_score, np.ones_like(group_score, bool), kept)
    choice = np.where(np.repeat(keep, members.shape[-1], 1), choice, -np.inf)
  experts = np.argsort(-choice, -1, kind='stable')[:, : config['num_experts_per_tok']]
  weights = np.take_along_axis(score, experts, -1)
  if config['norm_topk_prob']:
    weights = weights / (weights.sum(-1, keepdims=True) + 1e-20)
  return logits, experts, weights * config['routed_scaling_factor']


def _ffn(w, prefix: str, x: Array) -> Array:
  return swiglu(x, *(w[f'{prefix}{part}_proj.weight'] for part in ('gate', 'up', 'down')))


def moe(w, config, n: Array) -> dict[str, Array]:
  x = n.reshape(-1, n.shape[-1])
  logits, experts, weights = route(w, config, x)
  y = _ffn(w, 'shared_experts.', x)
  for e in range(config['n_routed_experts']):
    weight = np.where(experts == e, weights, 0).sum(-1, keepdims=True)
    y = y + weight * _ffn(w, f'experts.{e}.', x)
  return {
    'mlp_out': y.reshape(n.shape), 'router_logits': logits, 'experts': experts, 'weights': weights,
  }  # fmt: skip


def _below(w: Mapping[str, Array], prefix: str) -> dict[str, Array]:
  return {k.removeprefix(prefix): v for k, v in w.items() if k.startswith(prefix)}


def block(w, config, x, visible, positions, selected, dense) -> tuple[Array, dict[str, Array]]:
  """One decoder layer from its tensors `w`; a layer with an MLP gate routes to experts."""
  eps = config['rms_norm_eps']
  n = rms_norm(x, w['input_layernorm.weight'], eps)
  out = attention(_below(w, 'self_attn.'), config, n, visible, positions, selected, dense)
  out['attn_in'] = n
  x = x + out['attn_out']
  n = rms_norm(x, w['post_attention_layernorm.weight'], eps)
  mlp = _below(w, 'mlp.')
  out |= moe(mlp, config, n) if 'gate.weight' in mlp else {'mlp_out': _ffn(mlp, '', n)}
  return x + out['mlp_out'], out


def forward(
  weights: Mapping[str, Array],
  config: Mapping[str, Any],
  ids: Array,
  *,
  segments: Array | None = None,
  positions: Array | None = None,
  prefix: Array | None = None,
  mtp_steps: int = 0,
  dense: bool = False,
) -> dict[str, Any]:
  """Everything the model computes for `ids` [b, t].

  Args:
    weights: by checkpoint name; converted to float64.
    config: config.json.
    segments: [b, t], 0 for padding; a token sees earlier ones of its own segment.
    positions: [b, t] rope positions.
    prefix: [b, t], tokens before it are seen as well (blank infilling).
    mtp_steps: that many MTP steps, taking turns in the layers from num_hidden_layers on.
    dense: attend to all visible keys (warm-up stage); the indexer then has its loss only.

  Returns:
    logits [b, t, V]; hidden: list of [b, t, d], embedding first, the last one after the final norm;
    layers: list of dicts of intermediates; mtp_logits, mtp_layers: lists, step k having t - k - 1
    positions.
  """
  w = {k: np.asarray(v, np.float64) for k, v in weights.items()}
  ids = np.asarray(ids)
  segments = np.ones_like(ids) if segments is None else np.asarray(segments)
  if positions is None:
    positions = np.broadcast_to(np.arange(ids.shape[1]), ids.shape)
  positions = np.asarray(positions)
  same = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
  earlier = np.broadcast_to(np.tri(ids.shape[1], dtype=bool), same.shape)
  if prefix is not None:
    earlier = earlier | (np.arange(ids.shape[1]) < np.asarray(prefix)[:, :, None])
  visible = same & earlier
  eps, count = config['rms_norm_eps'], config['num_hidden_layers']

  x = w['model.embed_tokens.weight'][ids]
  hidden, layers, selected = [x], [], None
  for i in range(count):
    if config['indexer_types'][i] == 'full':
      selected = None
    x, out = block(_below(w, f'model.layers.{i}.'), config, x, visible, positions, selected, dense)
    selected = out['selected']
    hidden.append(x)
    layers.append(out)
  hidden[-1] = rms_norm(x, w['model.norm.weight'], eps)
  result: dict[str, Any] = {
    'logits': hidden[-1] @ w['lm_head.weight'].T, 'hidden': hidden, 'layers': layers,
    'mtp_logits': [], 'mtp_layers': [],
  }  # fmt: skip

  h, selected = hidden[-1], None
  for k in range(1, mtp_steps + 1):
    depth = config.get('num_nextn_predict_layers', 1)  # One layer, or one for each step.
    layer = _below(w, f'model.layers.{count + (k - 1) % depth}.')
    kept = slice(0, ids.shape[1] - k)  # Position t needs token t + k.
    e = rms_norm(hidden[0][:, k:], layer['enorm.weight'], eps)
    h = rms_norm(h[:, kept], layer['hnorm.weight'], eps)
    z = np.concatenate([e, h], -1) @ layer['eh_proj.weight'].T
    seen = visible[:, kept, kept]
    if selected is not None:
      selected = selected[:, kept, kept]
    y, out = block(layer, config, z, seen, positions[:, kept], selected, dense)
    if config.get('index_share_for_mtp_iteration'):
      selected = out['selected']
    h = rms_norm(y, layer['shared_head.norm.weight'], eps)
    result['mtp_logits'].append(h @ w['lm_head.weight'].T)
    result['mtp_layers'].append(out)
  return result


def cross_entropy(logits: Array, targets: Array) -> float:
  """Mean negative log-likelihood in nats."""
  top = logits.max(-1, keepdims=True)
  log_total = np.log(np.exp(logits - top).sum(-1)) + top[..., 0]
  return float(np.mean(log_total - np.take_along_axis(logits, targets[..., None], -1)[..., 0]))
