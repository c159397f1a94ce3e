"""Small models for tests: the golden one, random ones, and ways to look into a forward pass."""

import functools
import json
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from safetensors.numpy import load_file, save_file

from glm5_jax.config import ModelConfig
from glm5_jax.convert import load_hf
from glm5_jax.modules import model
from glm5_jax.modules.block import Options

GOLDEN = pathlib.Path(__file__).parent / 'golden'
CHECKPOINT = GOLDEN / 'tiny_glm_moe_dsa'
# What the golden config.json leaves to the model type.
IMPLIED = {'scoring_func': 'sigmoid', 'indexer_rope_interleave': True}

# LLVM's optimisations take longer than tiny models take to run. XLA's own passes stay as they are.
FAST_COMPILE = {'xla_backend_optimization_level': 0}


def fast_jit(f=None, **kwargs):
  """jax.jit for functions that run a few times on small arrays."""
  if f is None:
    return functools.partial(fast_jit, **kwargs)
  return jax.jit(f, compiler_options=FAST_COMPILE, **kwargs)


def _forward(params, tokens, segments, positions, cache, config, options, mtp_steps):
  return model.forward(
    params, tokens, config=config, segment_ids=segments, positions=positions, cache=cache,
    options=options, mtp_steps=mtp_steps,
  )  # fmt: skip


_STATIC = ('config', 'options', 'mtp_steps')
_fast_forward = fast_jit(_forward, static_argnames=_STATIC)
_usual_forward = jax.jit(_forward, static_argnames=_STATIC)


def forward(
  params,
  tokens,
  config: ModelConfig,
  *,
  segments=None,
  positions=None,
  cache=None,
  options: Options = Options(),
  mtp_steps: int = 0,
  fast: bool = True,
) -> model.Output:
  """`model.forward`, compiled once per shape: with and without segments it is the same program."""
  tokens = np.asarray(tokens, np.int32)
  start = 0 if cache is None else int(cache['length'])
  if segments is None:
    segments = np.ones_like(tokens)
  if positions is None:
    positions = start + np.broadcast_to(np.arange(tokens.shape[1]), tokens.shape)
  integers = (np.asarray(a, np.int32) for a in (tokens, segments, positions))
  run = _fast_forward if fast else _usual_forward
  return run(params, *integers, cache, config, options, mtp_steps)


def golden(name: str) -> dict[str, np.ndarray]:
  with np.load(GOLDEN / f'{name}.npz') as file:
    return dict(file)


def load_golden_model(directory: pathlib.Path, **changes) -> tuple[ModelConfig, Any, dict, dict]:
  """The golden model with config.json `changes`: (config, params, tensors by name, config.json).

  With MTP layers in the config, the tensors of tiny_mtp.npz are added; indexers of layers that the
  config declares shared are left out. `directory` is a scratch folder.
  """
  raw = json.loads((CHECKPOINT / 'config.json').read_text()) | changes
  tensors = load_file(CHECKPOINT / 'model.safetensors')
  if raw.get('num_nextn_predict_layers'):
    mtp = golden('tiny_mtp')
    tensors |= {k.removeprefix('w/'): v for k, v in mtp.items() if k.startswith('w/')}
  for layer, kind in enumerate(raw['indexer_types']):
    if kind == 'shared':
      prefix = f'model.layers.{layer}.self_attn.indexer.'
      tensors = {k: v for k, v in tensors.items() if not k.startswith(prefix)}
  (directory / 'config.json').write_text(json.dumps(raw))
  save_file(tensors, directory / 'model.safetensors')
  config, params = load_hf(directory)
  # Not bound to a device, so that a fresh cache and a returned one run the same program.
  params = jax.tree.map(lambda a: jnp.asarray(np.asarray(a)), params)
  return config, params, tensors, raw | IMPLIED


def config(**changes) -> ModelConfig:
  """A model in which no two dimensions are equal, with S > index_topk from 10 tokens on."""
  base = ModelConfig(
    vocab_size=60, hidden_size=40, num_hidden_layers=2, first_k_dense_replace=1,
    intermediate_size=56, moe_intermediate_size=28, n_routed_experts=8, num_experts_per_tok=3,
    num_attention_heads=4, num_key_value_heads=2, q_lora_rank=26, kv_lora_rank=18,
    qk_nope_head_dim=10, qk_rope_head_dim=6, v_head_dim=14, index_n_heads=5, index_head_dim=12,
    index_topk=9, rope_theta=1e4, max_position_embeddings=512, eos_token_id=(), pad_token_id=None,
  )  # fmt: skip
  return base.replace(**changes)


def random_params(config: ModelConfig, seed: int = 0, std: float = 0.2):
  """Parameters large enough for every mechanism to matter, norms and biases random as well."""
  rng = np.random.default_rng(seed)

  def draw(path, leaf):
    name = path[-1].key
    x = rng.standard_normal(leaf.shape, np.float32)
    if name == 'bias':
      x *= 0.3
    elif 'norm' in name:
      x = 0.1 * x + ('bias' not in name)
    else:
      x *= std
    return jnp.asarray(x, leaf.dtype)

  return jax.tree_util.tree_map_with_path(draw, model.abstract_params(config))


def tokens(config: ModelConfig, batch: int, time: int, seed: int = 0) -> np.ndarray:
  return np.random.default_rng(seed).integers(0, config.vocab_size, (batch, time), np.int32)


def layers(config: ModelConfig, aux: Mapping[str, Any]) -> list[dict[str, np.ndarray]]:
  """The `aux` of a forward pass, one dict per decoder layer, in order."""
  return [
    {k: np.asarray(v[r]) for k, v in aux[stack.name][f'block{j}'].items()}
    for stack in config.stacks
    for r in range(stack.repeats)
    for j in range(len(stack.blocks))
  ]


def checkpoint_names(params, config: ModelConfig) -> dict[str, np.ndarray]:
  """Our parameters (or their gradients) under their checkpoint names, in checkpoint layout.

  Written apart from convert/, of which it is a check.
  """
  heads = config.num_attention_heads

  def linear(w):
    return np.asarray(w).T

  def block(b, at):
    a = b['attn']
    per_head = np.concatenate([a['w_uk'], a['w_uv']], axis=-1)  # [L, N, nope + v]
    w_o, w_uq = np.asarray(a['w_o']), np.asarray(a['w_uq'])
    out = {
      'input_layernorm.weight': b['attn_norm'],
      'post_attention_layernorm.weight': b['mlp_norm'],
      'self_attn.q_a_proj.weight': linear(a['w_dq']),
      'self_attn.q_a_layernorm.weight': a['q_norm'],
      'self_attn.q_b_proj.weight': linear(w_uq.reshape(w_uq.shape[0], -1)),
      'self_attn.kv_a_proj_with_mqa.weight': linear(a['w_dkv']),
      'self_attn.kv_a_layernorm.weight': a['kv_norm'],
      'self_attn.kv_b_proj.weight': linear(per_head.reshape(per_head.shape[0], -1)),
      'self_attn.o_proj.weight': linear(w_o.reshape(heads * w_o.shape[1], -1)),
    }
    if 'indexer' in a:
      i = a['indexer']
      w_q = np.asarray(i['w_q'])
      out |= {
        'self_attn.indexer.wq_b.weight': linear(w_q.reshape(w_q.shape[0], -1)),
        'self_attn.indexer.wk.weight': linear(i['w_k']),
        'self_attn.indexer.k_norm.weight': i['k_norm_scale'],
        'self_attn.indexer.k_norm.bias': i['k_norm_bias'],
        'self_attn.indexer.weights_proj.weight': linear(i['w_w']),
      }
    if 'mlp' in b:
      out |= {f'mlp.{p}_proj.weight': linear(b['mlp'][f'w_{p}']) for p in ('gate', 'up', 'down')}
    else:
      m = b['moe']
      out['mlp.gate.weight'] = linear(m['router']['w'])
      out['mlp.gate.e_score_correction_bias'] = m['router']['bias']
      for part in ('gate', 'up', 'down'):
        out[f'mlp.shared_experts.{part}_proj.weight'] = linear(m['shared'][f'w_{part}'])
        for e, w in enumerate(m['experts'][f'w_{part}']):
          out[f'mlp.experts.{e}.{part}_proj.weight'] = linear(w)
    return {f'model.layers.{at}.{k}': np.asarray(v) for k, v in out.items()}

  params = jax.tree.map(np.asarray, params)
  out = {
    'model.embed_tokens.weight': params['embed'], 'model.norm.weight': params['final_norm'],
    'lm_head.weight': linear(params['lm_head']),
  }  # fmt: skip
  for stack in config.stacks:
    for r in range(stack.repeats):
      for j in range(len(stack.blocks)):
        row = jax.tree.map(lambda a, r=r: a[r], params[stack.name][f'block{j}'])
        out |= block(row, stack.first_layer + r * len(stack.blocks) + j)
  for r in range(config.num_nextn_predict_layers if 'mtp' in params else 0):
    row = jax.tree.map(lambda a, r=r: a[r], params['mtp'])
    at = config.num_hidden_layers + r
    out |= block(row['block'], at)
    out |= {
      f'model.layers.{at}.enorm.weight': row['embed_norm'],
      f'model.layers.{at}.hnorm.weight': row['hidden_norm'],
      f'model.layers.{at}.eh_proj.weight': linear(row['w_proj']),
      f'model.layers.{at}.shared_head.norm.weight': row['norm'],
    }
  return out


def fused(tensors: Mapping[str, np.ndarray]) -> dict[str, np.ndarray]:
  """Tensors by checkpoint name, the experts stacked as transformers keeps them in memory: gate rows,
  then up rows."""
  out = {k: v for k, v in tensors.items() if '.experts.' not in k}
  for name in tensors:
    prefix, found, _ = name.partition('.experts.0.')
    if found:
      count = sum(k.startswith(f'{prefix}.experts.') for k in tensors) // 3
      gate, up, down = (
        np.stack([tensors[f'{prefix}.experts.{e}.{p}_proj.weight'] for e in range(count)])
        for p in ('gate', 'up', 'down')
      )
      out[f'{prefix}.experts.gate_up_proj'] = np.concatenate([gate, up], axis=1)
      out[f'{prefix}.experts.down_proj'] = down
  return out


def close(label: str, got, want, absolute: float, where=None) -> float:
  """Asserts max |got - want| <= absolute (over `where`), prints and returns the maximum."""
  got, want = np.asarray(got, np.float64), np.asarray(want, np.float64)
  assert got.shape == want.shape, f'{label}: shape {got.shape}, expected {want.shape}'
  difference = np.abs(got - want)
  if where is not None:
    difference = difference[np.broadcast_to(where, got.shape)]
  worst = float(np.max(difference, initial=0.0))
  print(f'[max] {label}: {worst:.2e} (allowed {absolute:.0e})')
  assert worst <= absolute, f'{label}: off by {worst:.3e}, allowed {absolute:.0e}'
  return worst


def close_relative(label: str, got, want, relative: float) -> float:
  """Asserts max |got - want| <= relative * max |want|."""
  scale = float(np.max(np.abs(np.asarray(want, np.float64))))
  assert scale > 0, f'{label}: the reference is all zero'
  return close(f'{label}, relative', np.asarray(got) / scale, np.asarray(want) / scale, relative)
