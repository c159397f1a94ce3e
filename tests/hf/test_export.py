"""What `save_hf` writes, transformers loads: same logits, no tensor missing or left over.

And the other way round: what transformers writes, `load_hf` reads.
"""

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.convert import hf_map, load_hf, save_hf
from glm5_jax.modules.model import abstract_params, forward
from tests.convert import checkpoints

pytestmark = pytest.mark.hf

# Longer than index_topk, so that the selection matters. With few index heads, ReLU leaves many keys
# at a score of exactly 0, and which of them is selected would depend on torch's top-k.
LENGTH = 40
WIDER = {'index_topk': 12, 'index_n_heads': 16, 'vocab_size': 200}
CONFIGS = {
  'glm5': checkpoints.TINY.replace(**WIDER),
  'glm5_2': checkpoints.TINY_SHARED.replace(**WIDER, num_nextn_predict_layers=1),
  'deepseek_v32': checkpoints.TINY_DEEPSEEK.replace(**WIDER),
}
CLASSES = {'glm_moe_dsa': 'GlmMoeDsaForCausalLM', 'deepseek_v32': 'DeepseekV32ForCausalLM'}
_forward = jax.jit(forward, static_argnames='config')


@pytest.fixture
def torch():
  import torch

  return torch


@pytest.fixture
def transformers(torch):
  import transformers

  return transformers


def _read(transformers, directory, config, **kwargs):
  model = getattr(transformers, CLASSES[config.model_type])
  return model.from_pretrained(directory, **kwargs)


def _params(config):
  """Random, and large enough for every part to matter; correction biases and norms too."""
  rng = np.random.default_rng(3)

  def leaf(path, shape):
    values = rng.standard_normal(shape.shape, np.float32)
    if 'norm' in path and not path.endswith('bias'):
      return 1 + 0.2 * values
    if path.endswith('bias'):
      return 0.3 * values
    return values if path == 'embed' else values / np.sqrt(_fan_in(path, shape.shape))

  flat = hf_map.flatten(abstract_params(config))
  return hf_map.unflatten({p: jnp.asarray(leaf(p, s)) for p, s in flat.items()})


def _fan_in(path, shape):
  inputs = shape if path in ('embed', 'lm_head') else shape[1:]
  if '/experts/' in path:
    inputs = inputs[1:]
  return inputs[0] * (inputs[1] if path.endswith('w_o') else 1)


@pytest.mark.parametrize('name', CONFIGS)
def test_transformers_loads_our_export(name, tmp_path, torch, transformers):
  config = CONFIGS[name]
  params = _params(config)
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (2, LENGTH))
  ours = np.asarray(_forward(params, jnp.asarray(tokens), config=config).logits)
  assert ours.std() > 0.3

  save_hf(tmp_path / 'out', config, params, max_shard_bytes=200_000)
  model, info = _read(
    transformers, tmp_path / 'out', config, attn_implementation='eager', output_loading_info=True
  )
  assert not info['missing_keys'] and not info['mismatched_keys']
  mtp = rf'model\.layers\.{config.num_hidden_layers}\.'
  unexpected = list(info['unexpected_keys'])
  assert unexpected and all(re.match(mtp, key) for key in unexpected)
  with torch.no_grad():
    theirs = model.eval()(input_ids=torch.tensor(tokens), use_cache=False).logits.numpy()
  np.testing.assert_allclose(ours, theirs, atol=1e-5, rtol=0)  # 5e-6 measured.
  # The comparison would see a wrong selection: dense attention is far away.
  dense = _forward(params, jnp.asarray(tokens), config=config.replace(sparse_attention=False))
  assert np.abs(np.asarray(dense.logits) - theirs).max() > 1e-2

  generation = transformers.GenerationConfig.from_pretrained(tmp_path / 'out')
  assert generation.eos_token_id == list(config.eos_token_id)
  assert generation.pad_token_id == config.pad_token_id


@pytest.mark.parametrize('name', CONFIGS)
def test_we_load_what_transformers_saves(name, tmp_path, transformers):
  config = CONFIGS[name].replace(num_nextn_predict_layers=0)
  params = _params(config)
  save_hf(tmp_path / 'ours', config, params)
  model = _read(transformers, tmp_path / 'ours', config)
  model.save_pretrained(tmp_path / 'theirs')
  loaded_config, loaded = load_hf(tmp_path / 'theirs')
  assert loaded_config == config
  checkpoints.assert_same_bits(hf_map.flatten(loaded), hf_map.flatten(params))
  checkpoints.assert_same_bits(
    checkpoints.read(tmp_path / 'theirs'), checkpoints.read(tmp_path / 'ours')
  )


def test_bfloat16_export_keeps_its_dtypes(tmp_path, torch, transformers):
  config = CONFIGS['glm5'].replace(num_nextn_predict_layers=0)
  save_hf(tmp_path / 'out', config, _params(config), dtype='bfloat16')
  model = _read(transformers, tmp_path / 'out', config, dtype='auto')
  state = model.state_dict()
  assert state['model.embed_tokens.weight'].dtype == torch.bfloat16
  assert state['model.layers.1.mlp.gate.e_score_correction_bias'].dtype == torch.float32
  _, params = load_hf(tmp_path / 'out')
  bias = np.asarray(params['moe']['block0']['moe']['router']['bias'][0])
  np.testing.assert_array_equal(
    state['model.layers.1.mlp.gate.e_score_correction_bias'].numpy(), bias
  )
  assert jax.tree.leaves(params)[0].dtype == jnp.bfloat16
