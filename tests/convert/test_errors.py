"""Whatever is wrong with a checkpoint: one CheckpointError that says what, found before any data."""

import json
import re
import struct

import ml_dtypes
import numpy as np
import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.convert import CheckpointError, load_hf, storage
from tests.convert import checkpoints

TINY = checkpoints.TINY.replace(num_hidden_layers=2)
INDEX = 'model.safetensors.index.json'
NORM = 'model.layers.1.input_layernorm.weight'


def _rewrite(change):
  """A fault in the tensors or the config: `change(tensors, raw_config)`."""

  def fault(directory):
    tensors, raw = checkpoints.random_tensors(TINY), TINY.to_hf()
    change(tensors, raw)
    checkpoints.write(directory, raw, tensors)

  return fault


def _sharded(change):
  """A fault in the files of a checkpoint of three: `change(directory)`."""

  def fault(directory):
    checkpoints.write(directory, TINY, checkpoints.random_tensors(TINY), files=3)
    change(directory)

  return fault


def _missing(tensors, raw):
  for e in range(6):
    del tensors[f'model.layers.1.mlp.experts.{e}.up_proj.weight']
  del tensors[NORM]


def _unknown(tensors, raw):
  tensors['model.layers.1.self_attn.q_proj.bias'] = np.zeros((3, 4), np.float32)


def _misshapen(tensors, raw):
  tensors['model.layers.0.self_attn.kv_b_proj.weight'] = np.zeros((96, 21), np.float32)


def _transposed(tensors, raw):
  name = 'model.layers.0.self_attn.o_proj.weight'
  tensors[name] = np.ascontiguousarray(tensors[name].T)


def _wrong_dtype(tensors, raw):
  tensors['model.norm.weight'] = tensors['model.norm.weight'].astype(np.float16)
  tensors['lm_head.weight'] = tensors['lm_head.weight'].astype(np.int8)


def _fp8_without_scale(tensors, raw):
  name = 'model.layers.0.mlp.up_proj.weight'
  tensors[name] = tensors[name].astype(ml_dtypes.float8_e4m3fn)


def _fp8_bad_scale(tensors, raw):
  _fp8_without_scale(tensors, raw)
  tensors['model.layers.0.mlp.up_proj.weight_scale_inv'] = np.ones((1, 2), np.float32)


def _no_mtp(tensors, raw):
  for name in [n for n in tensors if n.startswith('model.layers.2.')]:
    del tensors[name]


def _everything(tensors, raw):
  _missing(tensors, raw)
  _unknown(tensors, raw)
  _misshapen(tensors, raw)
  _wrong_dtype(tensors, raw)


def _set(**values):
  return lambda tensors, raw: raw.update(values)


def _different_copy(tensors, raw):
  tensors['model.layers.2.embed_tokens.weight'] = tensors['model.embed_tokens.weight'] + 1


def _truncate(directory):
  file = directory / 'model-00002-of-00003.safetensors'
  file.write_bytes(file.read_bytes()[:-1000])


def _header_only(directory):
  file = directory / 'model-00002-of-00003.safetensors'
  file.write_bytes(file.read_bytes()[:100])


def _empty(directory):
  (directory / 'model-00002-of-00003.safetensors').write_bytes(b'')


def _garbage(directory):
  text = b'{"a": [1, 2'
  file = directory / 'model-00002-of-00003.safetensors'
  file.write_bytes(struct.pack('<Q', len(text)) + text)


def _wrong_offsets(directory):
  text = b'{"a":{"dtype":"F32","shape":[3],"data_offsets":[0,8]}}'
  file = directory / 'model-00002-of-00003.safetensors'
  file.write_bytes(struct.pack('<Q', len(text)) + text + bytes(8))


def _file_missing(directory):
  (directory / 'model-00002-of-00003.safetensors').unlink()


def _index_broken(directory):
  (directory / INDEX).write_text('{"weight_map": {"a": ')


def _index_without_map(directory):
  (directory / INDEX).write_text('{"metadata": {}}')


def _index_outside(directory):
  (directory / INDEX).write_text('{"weight_map": {"a": "../model.safetensors"}}')


def _edit_index(change):
  def edit(directory):
    index = json.loads((directory / INDEX).read_text())
    change(index['weight_map'])
    (directory / INDEX).write_text(json.dumps(index))

  return edit


def _index_elsewhere(weight_map):
  weight_map[NORM] = next(f for f in set(weight_map.values()) if f != weight_map[NORM])


def _index_forgets(weight_map):
  del weight_map[NORM]


def _no_weights(directory):
  (directory / 'config.json').write_text(json.dumps(TINY.to_hf()))
  (directory / 'pytorch_model.bin').write_text('')


FAULTS = {
  'missing': (
    _rewrite(_missing),
    [r'missing tensors \(7\)', r'experts.3.up_proj.weight \[28, 36\]', 'and 2 more',
     'Nothing was loaded'],
  ),
  'unknown': (_rewrite(_unknown), [r'unknown tensors \(1\): .*q_proj.bias \[3, 4\] F32']),
  'misshapen': (
    _rewrite(_misshapen), [r'kv_b_proj.weight: found \[96, 21\], expected \[96, 22\]'],
  ),
  'transposed': (_rewrite(_transposed), [r'o_proj.weight: found \[56, 36\], expected \[36, 56\]']),
  'dtype': (
    _rewrite(_wrong_dtype),
    [r'another dtype \(2\)', 'model.norm.weight: found F16, expected F32 or BF16 or F8_E4M3',
     'lm_head.weight: found I8'],
  ),
  'fp8 without factors': (
    _rewrite(_fp8_without_scale), [r'without their factors \(1\): .*up_proj.weight_scale_inv'],
  ),
  'fp8 factors misshapen': (
    _rewrite(_fp8_bad_scale), [r'up_proj.weight_scale_inv: found \[1, 2\], expected \[1, 1\]'],
  ),
  'everything at once': (
    _rewrite(_everything),
    [r'missing tensors \(7\)', r'unknown tensors \(1\)', r'misshapen tensors \(1\)',
     r'another dtype \(2\)'],
  ),
  'no MTP layer': (_rewrite(_no_mtp), ['MTP layer', r'load_hf\(\.\.\., mtp=False\)']),
  'unexpected MTP layer': (
    _rewrite(_set(num_nextn_predict_layers=0)),
    ['unknown tensors', r'num_nextn_predict_layers=1\) loads them', 'mtp=False leaves them out'],
  ),
  'another embedding in the MTP layer': (
    _rewrite(_different_copy),
    ['model.layers.2.embed_tokens.weight differs from model.embed_tokens.weight', 'mtp=False'],
  ),
  'model_type': (
    _rewrite(_set(model_type='llama')), ["model_type 'llama'", 'deepseek_v32', 'glm_moe_dsa'],
  ),
  'config of another size': (
    _rewrite(_set(hidden_size=40)), [r'misshapen tensors \(\d+\)', 'config.json'],
  ),
  'quantization': (
    _rewrite(_set(quantization_config={'quant_method': 'awq'})), ["'awq'", 'supported is "fp8"'],
  ),
  'truncated': (
    _sharded(_truncate),
    ['truncated or damaged', r'00002-of-00003.safetensors: its header describes \d+ bytes, the file'],
  ),
  'header cut': (_sharded(_header_only), ['00002-of-00003', r'needs \d+ bytes, the file has 100']),
  'empty file': (_sharded(_empty), ['00002-of-00003', 'needs 8 bytes, the file has 0']),
  'header garbage': (_sharded(_garbage), ['00002-of-00003', 'header is not valid']),
  'header inconsistent': (_sharded(_wrong_offsets), ['00002-of-00003', '(?i)invalid']),
  'file missing': (
    _sharded(_file_missing),
    [r'missing files \(1\): model-00002-of-00003.safetensors, which should hold \d+ tensors'],
  ),
  'index broken': (_sharded(_index_broken), ['not a readable index', 'JSONDecodeError']),
  'index without map': (_sharded(_index_without_map), ['not a readable index', 'weight_map']),
  'index points outside': (_sharded(_index_outside), ['not plain file names', r'\.\./']),
  'index points elsewhere': (
    _sharded(_edit_index(_index_elsewhere)), [f'{NORM} is in .*, the index says model-'],
  ),
  'index forgets': (
    _sharded(_edit_index(_index_forgets)), [f'{NORM} is in .*, the index says nothing'],
  ),
  'no weights': (_no_weights, ['neither model.safetensors nor', 'pytorch_model.bin']),
  'no config': (lambda directory: None, ['config.json']),
}  # fmt: skip


@pytest.mark.parametrize('fault', FAULTS)
def test_fault(fault, tmp_path, monkeypatch):
  make, texts = FAULTS[fault]
  make(tmp_path)
  if 'embedding' not in fault:  # The one fault that only the data shows.
    monkeypatch.setattr(storage.Stored, 'map', _no_data)
  with pytest.raises(CheckpointError) as e:
    load_hf(tmp_path)
  assert str(tmp_path) in str(e.value)
  for text in texts:
    assert re.search(text, str(e.value)), f'{text!r} not in:\n{e.value}'


def _no_data(self):
  raise AssertionError('data was read before the checkpoint was found to be sound')


def test_the_advice_works(tmp_path):
  """What the messages recommend for MTP layers does load."""
  tensors = checkpoints.random_tensors(TINY)
  raw = TINY.to_hf() | {'num_nextn_predict_layers': 0}
  checkpoints.write(tmp_path / 'extra', raw, tensors)
  config, params = load_hf(tmp_path / 'extra', num_nextn_predict_layers=1)
  assert config == TINY and 'mtp' in params
  config, params = load_hf(tmp_path / 'extra', mtp=False)
  assert config == TINY.replace(num_nextn_predict_layers=0) and 'mtp' not in params

  _no_mtp(tensors, raw)
  checkpoints.write(tmp_path / 'without', TINY, tensors)
  config, params = load_hf(tmp_path / 'without', mtp=False)
  assert config == TINY.replace(num_nextn_predict_layers=0) and 'mtp' not in params


def test_unknown_override_names_the_nearest():
  with pytest.raises(ValueError, match="did you mean 'index_topk'"):
    load_hf(checkpoints.GOLDEN, index_top_k=4)
  assert ModelConfig.from_hf(checkpoints.GOLDEN).index_topk == 16
