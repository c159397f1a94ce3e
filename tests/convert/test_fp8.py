"""FP8 checkpoints (e4m3, 128 x 128 blocks) against an independent numpy dequantisation."""

import ml_dtypes
import numpy as np
import pytest

from glm5_jax.convert import hf_load, hf_map, load_hf, storage
from tests.convert import checkpoints

# Blocks that are cut at both ends of every matrix, and heads that straddle block borders.
CONFIG = checkpoints.TINY.replace(
  hidden_size=196, q_lora_rank=150, kv_lora_rank=140, num_hidden_layers=2, vocab_size=140,
  qk_nope_head_dim=30, v_head_dim=44, intermediate_size=300, n_routed_experts=2,
)  # fmt: skip
# Everything but these is FP8 in the released checkpoints.
_KEPT = ('norm', 'embed_tokens', 'lm_head', 'mlp.gate.', 'weights_proj', 'eh_proj')


def _quantise(w: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """(e4m3 values, one factor per block), block by block."""
  rows, columns = (-(-n // 128) for n in w.shape)
  values = np.empty(w.shape, ml_dtypes.float8_e4m3fn)
  factors = np.empty((rows, columns), np.float32)
  for i in range(rows):
    for j in range(columns):
      part = np.s_[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128]
      factors[i, j] = np.abs(w[part]).max() / 448
      values[part] = (w[part] / factors[i, j]).astype(ml_dtypes.float8_e4m3fn)
  return values, factors


def _dequantise(values: np.ndarray, factors: np.ndarray) -> np.ndarray:
  """The oracle: every block times its factor, in float32."""
  out = values.astype(np.float32)
  for i, row in enumerate(factors):
    for j, factor in enumerate(row):
      out[i * 128 : (i + 1) * 128, j * 128 : (j + 1) * 128] *= factor
  return out


@pytest.fixture
def fp8(tmp_path):
  """(directory of an FP8 checkpoint, directory of the same values in float32)."""
  stored, plain = {}, {}
  for name, w in checkpoints.random_tensors(CONFIG).items():
    if any(part in name for part in _KEPT):
      stored[name] = w if 'bias' in name else w.astype(ml_dtypes.bfloat16)
      plain[name] = stored[name].astype(np.float32)
    else:
      scale = name + '_scale_inv'
      stored[name], stored[scale] = _quantise(w * np.exp(np.arange(w.shape[1]) / 50))
      plain[name] = _dequantise(stored[name], stored[scale])
  raw = CONFIG.to_hf() | {
    'quantization_config': {'quant_method': 'fp8', 'fmt': 'e4m3', 'weight_block_size': [128, 128]}
  }
  raw['dtype'] = 'bfloat16'
  blocks = [x for n, x in stored.items() if n.endswith('_scale_inv')]
  assert any(x.shape[0] > 1 < x.shape[1] for x in blocks)
  return checkpoints.write(tmp_path / 'fp8', raw, stored), checkpoints.write(
    tmp_path / 'plain', CONFIG, plain
  )


def test_dequantised_values(fp8):
  config, params = load_hf(fp8[0], param_dtype='float32')
  assert config == CONFIG
  _, expected = load_hf(fp8[1])
  checkpoints.assert_same_bits(hf_map.flatten(params), hf_map.flatten(expected))


def test_rounded_once_to_the_dtype_of_the_config(fp8):
  config, params = load_hf(fp8[0])
  assert config.param_dtype == 'bfloat16'
  _, expected = load_hf(fp8[1], param_dtype='bfloat16')
  checkpoints.assert_same_bits(hf_map.flatten(params), hf_map.flatten(expected))


def test_slices_find_their_factors(fp8):
  """Any slice of a head-major matrix (one device's heads) equals that slice of the whole."""
  tensors = storage.read_headers(fp8[0])
  _, expected = load_hf(fp8[1])
  expected = hf_map.flatten(expected)
  rng = np.random.default_rng(0)
  for path in ('attn/w_uk', 'attn/w_uv', 'attn/w_uq', 'attn/w_o', 'attn/w_dkv'):
    leaf = hf_map.leaves(CONFIG)[f'moe/block0/{path}']
    for _ in range(8):
      cuts = [np.sort(rng.choice(n + 1, 2, replace=False)) for n in leaf.layout.shape]
      index = tuple(slice(int(a), int(b)) for a, b in cuts)
      part = hf_load._read(leaf, (0,), dtype=np.dtype('f4'), index=index, tensors=tensors)
      whole = np.asarray(expected[leaf.path])[0]
      np.testing.assert_array_equal(part.transpose(leaf.layout.order), whole[index])
