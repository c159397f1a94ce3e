"""Derives glm5_manifest.json.gz and glm5_2_manifest.json.gz; needs torch and transformers.

    python tests/golden/make_manifest.py

The manifests list every tensor of the released checkpoints with its shape, and they do not use this
project's own map (glm5_jax.convert.hf_map), so that a test can compare the two. They come from

1. transformers: `GlmMoeDsaForCausalLM` built on the meta device from the released config values,
   its state_dict taken through the conversion that `save_pretrained` applies (which un-fuses the
   experts), again on meta tensors;
2. the MTP layer, which transformers does not build: a complete MoE layer with its own indexer, at
   index num_hidden_layers, plus enorm, hnorm, eh_proj and shared_head.norm. GLM-5 stores no
   embedding and no head there.

The counts asserted below are those of the released checkpoints.
"""

import gzip
import json
import math
import pathlib

import torch
import transformers
from transformers.core_model_loading import revert_weight_conversion

RELEASED = {
  'vocab_size': 154880, 'hidden_size': 6144, 'num_hidden_layers': 78, 'first_k_dense_replace': 3,
  'intermediate_size': 12288, 'moe_intermediate_size': 2048, 'num_attention_heads': 64,
  'num_key_value_heads': 64, 'qk_nope_head_dim': 192, 'qk_rope_head_dim': 64, 'v_head_dim': 256,
  'q_lora_rank': 2048, 'kv_lora_rank': 512, 'n_routed_experts': 256, 'num_experts_per_tok': 8,
  'n_shared_experts': 1, 'index_n_heads': 32, 'index_head_dim': 128, 'index_topk': 2048,
}  # fmt: skip
MODELS = {
  'glm5': ({}, 743_911_199_232, 753_864_139_008),
  'glm5_2': (
    {'index_topk_freq': 4, 'index_skip_topk_offset': 3}, 743_377_000_704, 753_329_940_480,
  ),
}  # fmt: skip


def manifest(changes: dict) -> tuple[int, dict[str, list[int]]]:
  """(parameters of the main model, {name on disk: shape})."""
  config = transformers.GlmMoeDsaConfig(**RELEASED, **changes)
  with torch.device('meta'):
    model = transformers.GlmMoeDsaForCausalLM(config)
  parameters = sum(p.numel() for p in model.parameters())
  stored = revert_weight_conversion(model, model.state_dict())
  shapes = {name: list(tensor.shape) for name, tensor in stored.items()}

  last, width = config.num_hidden_layers, config.hidden_size
  full = max(i for i, kind in enumerate(config.indexer_types) if kind == 'full')
  pattern = f'model.layers.{full}.'
  prefix = f'model.layers.{last}.'
  mtp = {prefix + n.removeprefix(pattern): s for n, s in shapes.items() if n.startswith(pattern)}
  mtp |= {
    prefix + 'enorm.weight': [width],
    prefix + 'hnorm.weight': [width],
    prefix + 'eh_proj.weight': [width, 2 * width],
    prefix + 'shared_head.norm.weight': [width],
  }
  assert len(mtp) == 791, len(mtp)
  return parameters, dict(sorted((shapes | mtp).items()))


def main():
  """Writes both manifests beside this file."""
  for name, (changes, main_parameters, on_disk) in MODELS.items():
    parameters, tensors = manifest(changes)
    elements = sum(map(math.prod, tensors.values()))
    assert (parameters, elements) == (main_parameters, on_disk), (name, parameters, elements)
    out = {
      'derived_with': f'transformers {transformers.__version__}',
      'main_model_parameters': parameters,
      'elements_on_disk': elements,
      'tensors': tensors,
    }
    path = pathlib.Path(__file__).with_name(f'{name}_manifest.json.gz')
    data = json.dumps(out, separators=(',', ':')).encode()
    path.write_bytes(gzip.compress(data, compresslevel=9, mtime=0))
    print(f'{path.name}: {len(tensors)} tensors, {elements} elements, {path.stat().st_size} bytes')


if __name__ == '__main__':
  main()
