"""The map: against manifests that were derived without it, and every element covered once."""

import gzip
import json
import math
import pathlib

import jax
import numpy as np
import pytest

from glm5_jax import config as configs
from glm5_jax.convert import hf_map, load_hf
from glm5_jax.modules.model import abstract_params
from tests.convert import checkpoints

_MANIFESTS = pathlib.Path(__file__).resolve().parents[1] / 'golden'


@pytest.mark.parametrize(
  'config, main, on_disk, count',
  [
    (configs.glm5(), 743_911_199_232, 753_864_139_008, 59_870),
    (configs.glm5_2(), 743_377_000_704, 753_329_940_480, 59_585),
  ],
  ids=['glm5', 'glm5_2'],
)
def test_map_and_released_checkpoint_agree_both_ways(config, main, on_disk, count, request):
  name = request.node.callspec.id
  manifest = json.loads(gzip.decompress((_MANIFESTS / f'{name}_manifest.json.gz').read_bytes()))
  released = {n: tuple(shape) for n, shape in manifest['tensors'].items()}
  mapped = hf_map.hf_shapes(config)
  assert mapped == released  # Names and shapes, none more, none fewer.
  assert len(mapped) == count
  assert sum(map(math.prod, mapped.values())) == on_disk

  ours = hf_map.flatten(hf_map.param_shapes(config))
  assert sum(math.prod(s.shape) for s in ours.values()) == on_disk
  biases = sum(s.size for p, s in ours.items() if p.endswith('router/bias'))
  mtp = sum(s.size for p, s in ours.items() if p.startswith('mtp/'))
  assert biases == 76 * 256
  assert on_disk - mtp - (biases - 256) == main


@pytest.mark.parametrize(
  'config',
  [checkpoints.TINY, checkpoints.TINY_SHARED, checkpoints.TINY_DEEPSEEK,
   checkpoints.TINY.replace(num_nextn_predict_layers=0, first_k_dense_replace=4)],
  ids=['tiny', 'shared', 'deepseek', 'dense'],
)  # fmt: skip
def test_every_element_is_read_once(config, tmp_path):
  """Fills the checkpoint with 0, 1, 2, ...: our tree must hold each number exactly once."""
  tensors, start = {}, 0
  for name, shape in hf_map.hf_shapes(config).items():
    size = math.prod(shape)
    tensors[name] = np.arange(start, start + size, dtype=np.float32).reshape(shape)
    start += size
  assert start < 1 << 24  # All exact in float32.
  _, params = load_hf(checkpoints.write(tmp_path / 'a', config, tensors))
  seen = np.concatenate([np.ravel(x) for x in jax.tree.leaves(params)])
  np.testing.assert_array_equal(np.sort(seen), np.arange(start, dtype=np.float32))


@pytest.mark.parametrize(
  'config',
  [configs.glm5(), configs.glm5_2(), configs.deepseek_v32(), configs.nano(param_dtype='bfloat16'),
   checkpoints.TINY, checkpoints.TINY_SHARED],
  ids=['glm5', 'glm5_2', 'deepseek_v32', 'nano_bf16', 'tiny', 'shared'],
)  # fmt: skip
def test_shapes_are_those_of_the_model(config):
  def spec(tree):
    return {p: (s.shape, np.dtype(s.dtype)) for p, s in hf_map.flatten(tree).items()}

  assert spec(hf_map.param_shapes(config)) == spec(abstract_params(config))


def test_values_of_the_golden_checkpoint():
  """Where each tensor goes, written out by hand for one dense and one sparse layer."""
  hf = checkpoints.read(checkpoints.GOLDEN)
  config, params = load_hf(checkpoints.GOLDEN)
  assert [s.name for s in config.stacks] == ['dense', 'moe']
  params = jax.tree.map(np.asarray, params)
  heads, nope, rope, v, latent = 4, 12, 8, 20, 16

  def same(ours, theirs):
    np.testing.assert_array_equal(ours, theirs)

  same(params['embed'], hf['model.embed_tokens.weight'])
  same(params['lm_head'], hf['lm_head.weight'].T)
  same(params['final_norm'], hf['model.norm.weight'])
  for layer, block, row in ((0, params['dense']['block0'], 0), (3, params['moe']['block0'], 2)):
    prefix = f'model.layers.{layer}.'
    attn, block = block['attn'], jax.tree.map(lambda x, row=row: x[row], block)
    attn = block['attn']
    same(block['attn_norm'], hf[prefix + 'input_layernorm.weight'])
    same(block['mlp_norm'], hf[prefix + 'post_attention_layernorm.weight'])
    same(attn['w_dq'], hf[prefix + 'self_attn.q_a_proj.weight'].T)
    same(attn['q_norm'], hf[prefix + 'self_attn.q_a_layernorm.weight'])
    same(attn['w_dkv'], hf[prefix + 'self_attn.kv_a_proj_with_mqa.weight'].T)
    same(attn['kv_norm'], hf[prefix + 'self_attn.kv_a_layernorm.weight'])
    q_b = hf[prefix + 'self_attn.q_b_proj.weight']
    kv_b = hf[prefix + 'self_attn.kv_b_proj.weight']
    o = hf[prefix + 'self_attn.o_proj.weight']
    for h in range(heads):
      same(attn['w_uq'][:, h], q_b[h * (nope + rope) : (h + 1) * (nope + rope)].T)
      head = kv_b[h * (nope + v) : (h + 1) * (nope + v)]
      same(attn['w_uk'][:, h], head[:nope].T)
      same(attn['w_uv'][:, h], head[nope:].T)
      same(attn['w_o'][h], o[:, h * v : (h + 1) * v].T)
    assert attn['w_uk'].shape == (latent, heads, nope)
    indexer, theirs = attn['indexer'], prefix + 'self_attn.indexer.'
    same(indexer['w_q'].reshape(32, 6 * 24), hf[theirs + 'wq_b.weight'].T)
    same(indexer['w_k'], hf[theirs + 'wk.weight'].T)
    same(indexer['k_norm_scale'], hf[theirs + 'k_norm.weight'])
    same(indexer['k_norm_bias'], hf[theirs + 'k_norm.bias'])
    same(indexer['w_w'], hf[theirs + 'weights_proj.weight'].T)
    mlps = {'mlp.': block.get('mlp')}
    if layer:
      moe = block['moe']
      same(moe['router']['w'], hf[prefix + 'mlp.gate.weight'].T)
      same(moe['router']['bias'], hf[prefix + 'mlp.gate.e_score_correction_bias'])
      mlps = {'mlp.shared_experts.': moe['shared']}
      for e in range(8):
        mlps[f'mlp.experts.{e}.'] = {k: x[e] for k, x in moe['experts'].items()}
    for name, mlp in mlps.items():
      for kind in ('gate', 'up', 'down'):
        same(mlp[f'w_{kind}'], hf[f'{prefix}{name}{kind}_proj.weight'].T)


def test_gqa_has_no_hugging_face_form():
  with pytest.raises(ValueError, match='only attention="mla"'):
    hf_map.leaves(configs.nano(attention='gqa'))
