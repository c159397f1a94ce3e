"""Small checkpoints for the tests of convert/: written with the safetensors library, not ours."""

import json
import pathlib

import ml_dtypes
import numpy as np
from safetensors.numpy import load_file, save_file

from glm5_jax.config import ModelConfig, Yarn
from glm5_jax.convert import hf_map

GOLDEN = pathlib.Path(__file__).resolve().parents[1] / 'golden' / 'tiny_glm_moe_dsa'

# Every dimension differs from every other, and divides by 2.
TINY = ModelConfig(
  vocab_size=50, hidden_size=36, num_hidden_layers=4, first_k_dense_replace=1, intermediate_size=52,
  moe_intermediate_size=28, n_routed_experts=6, n_shared_experts=2, num_experts_per_tok=2,
  num_attention_heads=4, num_key_value_heads=4, q_lora_rank=26, kv_lora_rank=22,
  qk_nope_head_dim=10, qk_rope_head_dim=8, v_head_dim=14, index_n_heads=2, index_head_dim=12,
  index_topk=8, rope_theta=1e4, eos_token_id=(3, 5), pad_token_id=3,
)  # fmt: skip
TINY_SHARED = TINY.replace(
  num_hidden_layers=6, num_nextn_predict_layers=2,
  indexer_types=('full', 'full', 'shared', 'full', 'shared', 'shared'),
)  # fmt: skip
TINY_DEEPSEEK = TINY.replace(
  model_type='deepseek_v32', n_group=2, topk_group=1, indexer_rope='half', pad_token_id=None,
  rope_scaling=Yarn(original_max_position_embeddings=64), rms_norm_eps=1e-6,
)  # fmt: skip
DTYPES = {'float32': np.float32, 'bfloat16': ml_dtypes.bfloat16}


def random_bits(shape, dtype, rng) -> np.ndarray:
  """Any bit pattern: NaNs with payloads, infinities, denormals, minus zero."""
  dtype = np.dtype(dtype)
  return rng.integers(0, 256, (*shape, dtype.itemsize), np.uint8).view(dtype)[..., 0]


def random_params(config: ModelConfig, seed: int = 0) -> dict:
  """Our tree, filled with random bits in the config's dtype (the router in float32)."""
  rng = np.random.default_rng(seed)
  leaves = hf_map.flatten(hf_map.param_shapes(config))
  return hf_map.unflatten({p: random_bits(s.shape, s.dtype, rng) for p, s in leaves.items()})


def random_tensors(config: ModelConfig, dtype: str = 'float32', seed: int = 0) -> dict:
  """Tensors by their names on disk, standard normal; the correction bias in float32."""
  rng = np.random.default_rng(seed)
  return {
    name: rng.standard_normal(shape, np.float32).astype(
      np.float32 if name.endswith('bias') and '.gate.' in name else DTYPES[dtype]
    )
    for name, shape in hf_map.hf_shapes(config).items()
  }


def write(directory: pathlib.Path, config: ModelConfig | dict, tensors: dict, files: int = 1):
  """A checkpoint directory in the released form: one file, or `files` files and an index."""
  directory.mkdir(parents=True, exist_ok=True)
  raw = config if isinstance(config, dict) else config.to_hf()
  (directory / 'config.json').write_text(json.dumps(raw))
  if files == 1:
    save_file(tensors, directory / 'model.safetensors', {'format': 'pt'})
    return directory
  names = list(tensors)
  weight_map = {}
  for i in range(files):
    file = f'model-{i + 1:05d}-of-{files:05d}.safetensors'
    part = {n: tensors[n] for n in names[i::files]}
    save_file(part, directory / file, {'format': 'pt'})
    weight_map |= dict.fromkeys(part, file)
  index = {'metadata': {}, 'weight_map': weight_map}
  (directory / 'model.safetensors.index.json').write_text(json.dumps(index))
  return directory


def read(directory: pathlib.Path) -> dict[str, np.ndarray]:
  """All tensors of a directory, read with the safetensors library."""
  out = {}
  for file in sorted(directory.glob('*.safetensors')):
    out |= load_file(file)
  return out


def assert_same_bits(a: dict, b: dict):
  """Two {name: array} hold the same names, shapes, dtypes and bytes."""
  assert a.keys() == b.keys()
  for name, x in a.items():
    x, y = np.asarray(x), np.asarray(b[name])
    assert (x.shape, x.dtype) == (y.shape, y.dtype), name
    assert x.tobytes() == y.tobytes(), name
