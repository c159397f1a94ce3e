"""The config's arithmetic of layers, and what it refuses."""

import json

import pytest

from glm5_jax import config as config_lib
from glm5_jax.config import BlockSpec, ModelConfig, Yarn
from tests import tiny


def numbered(config: ModelConfig) -> dict[int, tuple[str, int, int, BlockSpec]]:
  """Checkpoint layer -> (stack, row, block, spec), by the rule in the Stack docstring."""
  out = {}
  for stack in config.stacks:
    for r in range(stack.repeats):
      for j, spec in enumerate(stack.blocks):
        layer = stack.first_layer + r * len(stack.blocks) + j
        assert layer not in out
        out[layer] = (stack.name, r, j, spec)
  return out


def test_glm5_stacks():
  stacks = config_lib.glm5().stacks
  assert [(s.name, s.repeats, len(s.blocks), s.first_layer) for s in stacks] == [
    ('dense', 3, 1, 0), ('moe', 75, 1, 3),
  ]  # fmt: skip


def test_glm5_2_index_share():
  """Indexers on layers 0, 1, 2, 6, 10, ..., 74: 21 of 78; layers in between use the one before."""
  c = config_lib.glm5_2()
  layers = numbered(c)
  assert sorted(layers) == list(range(78))
  full = [layer for layer, (_, _, _, spec) in layers.items() if spec.indexer == 'full']
  assert sorted(full) == [0, 1, 2, *range(6, 75, 4)] and len(full) == 21
  assert [spec.mlp for _, (_, _, _, spec) in sorted(layers.items())] == ['dense'] * 3 + ['moe'] * 75
  assert layers[5][:3] == ('moe', 2, 0)  # The three after the dense ones share layer 2's selection.
  assert layers[6][:3] == ('moe1', 0, 0) and layers[77][:3] == ('moe1', 17, 3)
  assert c.shares_selection and not config_lib.glm5().shares_selection
  assert c.mtp_block.indexer == 'full'  # The MTP layer keeps its own.


@pytest.mark.parametrize(
  'dense, types',
  [
    (0, 'FSFS'), (4, 'FFSS'), (1, 'FSSS'), (2, 'FSSF'), (2, 'FFFF'), (1, 'FFSFSS'), (3, 'FFSSFS'),
  ],
)  # fmt: skip
def test_any_pattern_keeps_every_layer_once(dense, types):
  kinds = tuple({'F': 'full', 'S': 'shared'}[t] for t in types)
  c = tiny.config(num_hidden_layers=len(types), first_k_dense_replace=dense, indexer_types=kinds)
  layers = numbered(c)
  assert [layers[i][3] for i in range(len(types))] == list(c.blocks)
  assert [b.indexer for b in c.blocks] == list(kinds)
  assert len({s.name for s in c.stacks}) == len(c.stacks)


def test_reads_and_writes_config_json():
  raw = json.loads((tiny.CHECKPOINT / 'config.json').read_text())
  c = ModelConfig.from_hf(tiny.CHECKPOINT)
  assert c == ModelConfig.from_hf(raw)
  written = c.to_hf()
  for key, value in raw.items():
    if key in written:
      expected = [value] if key == 'eos_token_id' else value
      assert written[key] == expected, key
  assert {k for k in raw if k not in written} <= {
    'bos_token_id', 'output_router_logits', 'transformers_version'
  }  # fmt: skip
  for size in ('glm5', 'glm5_2', 'deepseek_v32', 'nano'):
    c = config_lib.SIZES[size]()
    assert ModelConfig.from_hf(json.loads(json.dumps(c.to_hf()))) == c


def test_legacy_head_dim_is_not_the_rope_dim():
  """The released config.json says head_dim 192; it once overwrote qk_rope_head_dim elsewhere."""
  raw = config_lib.glm5().to_hf() | {'head_dim': 192}
  assert ModelConfig.from_hf(raw).qk_rope_head_dim == 64


def test_index_share_from_frequency_and_offset():
  raw = config_lib.glm5_2().to_hf() | {'index_topk_freq': 4, 'index_skip_topk_offset': 3}
  del raw['indexer_types']
  assert ModelConfig.from_hf(raw) == config_lib.glm5_2()


DEEPSEEK_YARN = {
  'type': 'yarn', 'factor': 40, 'beta_fast': 32, 'beta_slow': 1, 'mscale': 1.0,
  'mscale_all_dim': 1.0, 'original_max_position_embeddings': 4096,
}  # fmt: skip


def test_reads_the_older_rope_fields():
  """DeepSeek's own config.json: rope_theta outside, rope_scaling with `type`."""
  raw = config_lib.deepseek_v32().to_hf()
  del raw['rope_parameters']
  raw |= {'rope_theta': 10000, 'rope_scaling': DEEPSEEK_YARN}
  assert ModelConfig.from_hf(raw) == config_lib.deepseek_v32()


@pytest.mark.parametrize(
  'change',
  [
    {'mscale': 0.7}, {'mscale': None}, {'attention_factor': 1.2}, {'truncate': False},
  ],
)  # fmt: skip
def test_refuses_yarn_that_it_does_not_compute(change):
  """These scale cos and sin or shift the ramp; ignoring them would be silently wrong."""
  raw = config_lib.deepseek_v32().to_hf()
  rope = {k: v for k, v in (raw['rope_parameters'] | change).items() if v is not None}
  with pytest.raises(ValueError, match=next(iter(change))):
    ModelConfig.from_hf(raw | {'rope_parameters': rope})


@pytest.mark.parametrize(
  'change, message',
  [
    ({'n_group': 8, 'topk_group': 4}, 'group'),  # Groups of one expert: no two best to sum.
    ({'n_group': 4, 'topk_group': 1}, 'num_experts_per_tok'),  # One group of 2 for 3 experts.
    ({'n_group': 3}, 'n_group'),
    ({'num_experts_per_tok': 9}, 'num_experts_per_tok'),
    ({'qk_rope_head_dim': 5}, 'even'),
    ({'index_head_dim': 4}, 'index_head_dim'),
    ({'first_k_dense_replace': 3}, 'first_k_dense_replace'),
    ({'indexer_types': ('shared', 'full')}, 'first one "full"'),
    ({'indexer_types': ('full',)}, '1 entries for 2 layers'),
    ({'scoring_func': 'relu'}, 'scoring_func'),
    ({'attention': 'gqa', 'num_key_value_heads': 3}, 'num_key_value_heads'),
    ({'index_topk': 0}, 'index_topk'),
    ({'index_topkk': 4}, "did you mean 'index_topk'"),
  ],
)
def test_refuses_what_cannot_be(change, message):
  with pytest.raises(ValueError, match=message):
    tiny.config(**change)


def test_yarn_is_part_of_the_hash():
  a, b = (tiny.config(rope_scaling=Yarn(factor=f)) for f in (4.0, 8.0))
  assert a != b and len({a, b, tiny.config(rope_scaling=Yarn(factor=4.0))}) == 2
