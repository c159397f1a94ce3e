"""Exact parameter counts of the named sizes, without allocating any of them."""

import functools

import jax
import pytest

from glm5_jax import config as config_lib
from glm5_jax.modules import model

_abstract_params = model.abstract_params


@functools.cache
def shapes(config):
  return _abstract_params(config)


@pytest.fixture(autouse=True)
def trace_once(monkeypatch):
  """param_count traces the model anew at each call; here every size is traced once."""
  monkeypatch.setattr(model, 'abstract_params', shapes)


def count(name: str, **kwargs) -> int:
  return model.param_count(config_lib.SIZES[name](), **kwargs)


@pytest.mark.parametrize(
  'name, main, on_disk',
  [
    ('glm5', 743_911_199_232, 753_864_139_008),
    ('glm5_1', 743_911_199_232, 753_864_139_008),
    ('glm5_2', 743_377_000_704, 753_329_940_480),
  ],
)
def test_released_models(name, main, on_disk):
  """The numbers of the released checkpoints; 76 x 256 correction biases are stored, not trained."""
  assert count(name) == main
  assert count(name, include_mtp=True, biases=True) == on_disk
  assert on_disk - count(name, include_mtp=True) == 76 * 256


def closed_form(c) -> dict[str, int]:
  """From the table of tensor shapes, tensor by tensor."""
  d, h = c.hidden_size, c.num_attention_heads
  attention = (
    c.q_lora_rank * d + c.q_lora_rank + h * (c.qk_nope_head_dim + c.qk_rope_head_dim) * c.q_lora_rank
    + (c.kv_lora_rank + c.qk_rope_head_dim) * d + c.kv_lora_rank
    + h * (c.qk_nope_head_dim + c.v_head_dim) * c.kv_lora_rank + d * h * c.v_head_dim
  )  # fmt: skip
  indexer = (
    c.index_n_heads * c.index_head_dim * c.q_lora_rank + c.index_head_dim * d
    + 2 * c.index_head_dim + c.index_n_heads * d
  )  # fmt: skip
  expert = 3 * d * c.moe_intermediate_size
  dense, moe = c.first_k_dense_replace, c.num_hidden_layers - c.first_k_dense_replace
  indexers = (c.indexer_types or ('full',) * c.num_hidden_layers).count('full')
  routed = {
    k: n * expert for k, n in (('all', c.n_routed_experts), ('chosen', c.num_experts_per_tok))
  }
  moe_layer = c.n_routed_experts * d + c.n_shared_experts * expert
  main = (
    2 * c.vocab_size * d + d + c.num_hidden_layers * (2 * d + attention) + indexers * indexer
    + dense * 3 * d * c.intermediate_size + moe * moe_layer
  )  # fmt: skip
  mtp = 3 * d + 2 * d * d + 2 * d + attention + indexer + moe_layer + routed['all']
  return {
    'main': main + moe * routed['all'], 'active': main + moe * routed['chosen'],
    'mtp': mtp * c.num_nextn_predict_layers,
  }  # fmt: skip


@pytest.mark.parametrize('name', ['glm5', 'glm5_2', 'deepseek_v32', 'nano', 'small', 'medium'])
def test_closed_form(name):
  want = closed_form(config_lib.SIZES[name]())
  leaves = jax.tree.leaves(shapes(config_lib.SIZES[name]()))
  assert all(isinstance(a, jax.ShapeDtypeStruct) for a in leaves)
  assert count(name) == want['main']
  assert count(name, include_mtp=True) == want['main'] + want['mtp']
  print(f'[count] {name}: {want["main"]:,} of which {want["active"]:,} active, MTP {want["mtp"]:,}')


def test_active_parameters_of_glm5():
  """742.0B in the decoder, 39.9B of them at work for a token, embedding and head apart."""
  c = config_lib.glm5()
  ends = 2 * c.vocab_size * c.hidden_size
  want = closed_form(c)
  assert want['main'] - ends == pytest.approx(742.008e9, rel=1e-6)
  assert want['active'] - ends == pytest.approx(39.88e9, rel=1e-3)


@pytest.mark.parametrize('name, millions', [('nano', 4), ('small', 30), ('medium', 120)])
def test_small_sizes(name, millions):
  """About the size they are named for, MTP layer included, and nothing of GLM-5 is idle in them."""
  c = config_lib.SIZES[name]()
  assert count(name, include_mtp=True) == pytest.approx(millions * 1e6, rel=0.15)
  assert c.model_type == 'glm_moe_dsa' and c.sparse_attention and c.attention == 'mla'
  assert 0 < c.first_k_dense_replace < c.num_hidden_layers
  assert 1 < c.num_experts_per_tok < c.n_routed_experts and c.n_shared_experts
  assert c.num_nextn_predict_layers == 1
  assert 4 * c.index_topk <= 1024 <= c.max_position_embeddings  # Rows select from several times k.
  assert c.index_head_dim > c.qk_rope_head_dim and c.qk_nope_head_dim != c.v_head_dim


def test_dtypes():
  """bfloat16 parameters leave the router in float32."""
  tree = model.abstract_params(config_lib.nano(param_dtype='bfloat16'))
  found = {}
  for path, leaf in jax.tree_util.tree_leaves_with_path(tree):
    found.setdefault(str(leaf.dtype), set()).add('router' in jax.tree_util.keystr(path))
  assert found == {'bfloat16': {False}, 'float32': {True}}
