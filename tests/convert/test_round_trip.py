"""Saving and loading give the same bits, in every dtype and split; nothing existing is damaged."""

import json
import tracemalloc

import jax
import ml_dtypes
import numpy as np
import pytest

from glm5_jax.config import ModelConfig
from glm5_jax.convert import CheckpointError, hf_load, hf_map, hf_save, load_hf, save_hf, storage
from tests.convert import checkpoints

CONFIGS = {
  'tiny': checkpoints.TINY,
  'shared': checkpoints.TINY_SHARED,
  'deepseek': checkpoints.TINY_DEEPSEEK,
}


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('name', CONFIGS)
def test_load_of_save_is_the_same(name, dtype, tmp_path):
  config = CONFIGS[name].replace(param_dtype=dtype)
  params = checkpoints.random_params(config)
  save_hf(tmp_path / 'out', config, params)
  loaded_config, loaded = load_hf(tmp_path / 'out')
  assert loaded_config == config
  checkpoints.assert_same_bits(hf_map.flatten(loaded), hf_map.flatten(params))


@pytest.mark.parametrize('dtype', ['float32', 'bfloat16'])
@pytest.mark.parametrize('files', [1, 3])
def test_save_of_load_is_the_same(files, dtype, tmp_path):
  """Every tensor keeps its name, shape, dtype and bytes; the router of a bfloat16 file as well."""
  tensors = checkpoints.random_tensors(checkpoints.TINY_SHARED, dtype)
  config = checkpoints.TINY_SHARED.replace(param_dtype=dtype)
  source = checkpoints.write(tmp_path / 'in', config, tensors, files)
  config, params = load_hf(source)
  assert params['moe']['block0']['moe']['router']['w'].dtype == np.float32
  save_hf(tmp_path / 'out', config, params)
  checkpoints.assert_same_bits(checkpoints.read(tmp_path / 'out'), tensors)


def test_golden_checkpoint(tmp_path):
  """A directory that transformers wrote: no MTP layer, and its config.json says nothing of one."""
  config, params = load_hf(checkpoints.GOLDEN)
  assert config.num_nextn_predict_layers == 0 and 'mtp' not in params
  save_hf(tmp_path / 'out', config, params)
  golden = checkpoints.read(checkpoints.GOLDEN)
  checkpoints.assert_same_bits(checkpoints.read(tmp_path / 'out'), golden)
  assert ModelConfig.from_hf(tmp_path / 'out') == config
  assert (tmp_path / 'out').stat().st_mode & 0o777 == tmp_path.stat().st_mode & 0o777 | 0o055


def test_large_arrays_take_the_same_values(tmp_path, monkeypatch):
  """Above HOST_BYTES arrays are built and cut on the device; force that for ten of them."""
  monkeypatch.setattr(hf_load, 'HOST_BYTES', 9_000)
  monkeypatch.setattr(hf_save, 'HOST_BYTES', 9_000)
  config = checkpoints.TINY.replace(
    param_dtype='bfloat16', num_hidden_layers=2, first_k_dense_replace=0, vocab_size=140,
    num_attention_heads=12, index_n_heads=16, num_nextn_predict_layers=0,
  )  # fmt: skip
  large = [p for p, leaf in hf_map.leaves(config).items() if 2 * np.prod(leaf.shape) > 9_000]
  assert [p.rpartition('/')[2] for p in large] == [
    'embed', 'lm_head', 'w_uq', 'w_uk', 'w_uv', 'w_o', 'w_q', 'w_gate', 'w_up', 'w_down'
  ]  # fmt: skip
  params = checkpoints.random_params(config)
  save_hf(tmp_path / 'a', config, jax.tree.map(jax.numpy.asarray, params))
  _, loaded = load_hf(tmp_path / 'a')
  checkpoints.assert_same_bits(hf_map.flatten(loaded), hf_map.flatten(params))


def test_files_are_split_and_indexed(tmp_path):
  config, params = load_hf(checkpoints.GOLDEN)
  save_hf(tmp_path / 'out', config, params, max_shard_bytes=300_000)
  files = sorted(p.name for p in (tmp_path / 'out').glob('*.safetensors'))
  assert len(files) > 3 and files[0] == f'model-00001-of-{len(files):05d}.safetensors'
  index = json.loads((tmp_path / 'out' / storage.INDEX).read_text())
  golden = checkpoints.read(checkpoints.GOLDEN)
  assert index['metadata']['total_size'] == sum(x.nbytes for x in golden.values())
  assert index['weight_map'].keys() == golden.keys()
  for name, file in index['weight_map'].items():
    assert name in storage.read_headers(tmp_path / 'out') and file in files
  for file in files:
    data = sum(golden[n].nbytes for n, f in index['weight_map'].items() if f == file)
    assert data <= 300_000
  _, again = load_hf(tmp_path / 'out')
  checkpoints.assert_same_bits(hf_map.flatten(again), hf_map.flatten(params))


def test_dtypes_on_request(tmp_path):
  config, params = load_hf(checkpoints.GOLDEN)
  save_hf(tmp_path / 'bf16', config, params, dtype='bfloat16')
  golden = checkpoints.read(checkpoints.GOLDEN)
  narrow = {
    n: x if n.endswith('correction_bias') else x.astype(ml_dtypes.bfloat16)
    for n, x in golden.items()
  }
  checkpoints.assert_same_bits(checkpoints.read(tmp_path / 'bf16'), narrow)

  config, params = load_hf(tmp_path / 'bf16')
  assert config.param_dtype == 'bfloat16' and params['embed'].dtype == ml_dtypes.bfloat16
  wide_config, wide = load_hf(tmp_path / 'bf16', param_dtype='float32')
  assert wide_config.param_dtype == 'float32' and wide['embed'].dtype == np.float32
  np.testing.assert_array_equal(wide['embed'], np.asarray(params['embed'], np.float32))
  narrow_config, _ = load_hf(checkpoints.GOLDEN, param_dtype='bfloat16', index_topk=4)
  assert (narrow_config.param_dtype, narrow_config.index_topk) == ('bfloat16', 4)


def test_float32_router_of_a_bfloat16_model_is_not_rounded(tmp_path):
  config = checkpoints.TINY.replace(param_dtype='bfloat16')
  params = checkpoints.random_params(config)
  params['moe']['block0']['moe']['router']['w'][:] = 1 + 2**-20
  save_hf(tmp_path / 'out', config, params)
  assert checkpoints.read(tmp_path / 'out')['model.layers.2.mlp.gate.weight'].dtype == np.float32
  _, loaded = load_hf(tmp_path / 'out')
  checkpoints.assert_same_bits(hf_map.flatten(loaded), hf_map.flatten(params))


def test_deepseek_repeats_embedding_and_head_in_its_mtp_layer(tmp_path):
  config = checkpoints.TINY_DEEPSEEK
  save_hf(tmp_path / 'out', config, checkpoints.random_params(config))
  stored = checkpoints.read(tmp_path / 'out')
  for copy, original in (
    ('model.layers.4.embed_tokens.weight', 'model.embed_tokens.weight'),
    ('model.layers.4.shared_head.head.weight', 'lm_head.weight'),
  ):
    assert stored[copy].tobytes() == stored[original].tobytes()
  without, params = load_hf(tmp_path / 'out', mtp=False)
  assert without.num_nextn_predict_layers == 0 and 'mtp' not in params


def test_existing_directory_is_refused_and_kept(tmp_path):
  config, params = load_hf(checkpoints.GOLDEN)
  (tmp_path / 'empty').mkdir()
  save_hf(tmp_path / 'empty', config, params)
  before = {p: p.read_bytes() for p in (tmp_path / 'empty').iterdir()}
  with pytest.raises(FileExistsError, match='not empty; it was left as it is'):
    save_hf(tmp_path / 'empty', config, params)
  (tmp_path / 'file').write_text('mine')
  with pytest.raises(FileExistsError):
    save_hf(tmp_path / 'file', config, params)
  assert {p: p.read_bytes() for p in (tmp_path / 'empty').iterdir()} == before
  assert (tmp_path / 'file').read_text() == 'mine'


def test_a_failed_save_leaves_nothing(tmp_path, monkeypatch):
  config, params = load_hf(checkpoints.GOLDEN)
  write, calls = storage.write_file, []

  def full_disk(*args):
    calls.append(args)
    if len(calls) == 3:
      raise OSError(28, 'No space left on device')
    write(*args)

  monkeypatch.setattr(storage, 'write_file', full_disk)
  with pytest.raises(OSError, match='No space left'):
    save_hf(tmp_path / 'out', config, params, max_shard_bytes=300_000)
  assert len(calls) == 3 and list(tmp_path.iterdir()) == []


def test_another_process_took_the_name(tmp_path, monkeypatch):
  config, params = load_hf(checkpoints.GOLDEN)
  write = storage.write_file

  def slow(*args):
    write(*args)
    (tmp_path / 'out').mkdir()
    (tmp_path / 'out' / 'theirs').write_text('theirs')

  monkeypatch.setattr(storage, 'write_file', slow)
  with pytest.raises(FileExistsError):
    save_hf(tmp_path / 'out', config, params)
  assert [p.name for p in tmp_path.iterdir()] == ['out']
  assert [p.name for p in (tmp_path / 'out').iterdir()] == ['theirs']


def test_parameters_must_fit_the_config(tmp_path):
  config, params = load_hf(checkpoints.GOLDEN)
  flat = hf_map.flatten(params)
  del flat['final_norm']
  flat['extra'] = flat['lm_head']
  flat['embed'] = flat['embed'][:, :-1]
  flat['lm_head'] = flat['lm_head'].astype(np.float16)
  with pytest.raises(CheckpointError) as e:
    save_hf(tmp_path / 'out', config, hf_map.unflatten(flat))
  for text in (
    'missing (1): final_norm [64]', 'unknown (1): extra',
    'embed: found [256, 63], expected [256, 64]',
    'lm_head: found float16, expected float32 or bfloat16',
  ):  # fmt: skip
    assert text in str(e.value)
  assert list(tmp_path.iterdir()) == []


def test_host_memory_is_bounded_by_one_tensor(tmp_path, monkeypatch):
  """Numpy's peak while saving and loading: a few tensors, not the model or a stack of layers."""
  monkeypatch.setattr(hf_load, 'HOST_BYTES', 100_000)
  monkeypatch.setattr(hf_save, 'HOST_BYTES', 100_000)
  config = checkpoints.TINY.replace(
    hidden_size=256, moe_intermediate_size=512, n_routed_experts=16, num_hidden_layers=4,
    vocab_size=256, num_nextn_predict_layers=0,
  )  # fmt: skip
  params = jax.tree.map(
    lambda s: jax.numpy.ones(s.shape, s.dtype), hf_map.param_shapes(config)
  )  # fmt: skip
  total = sum(x.nbytes for x in jax.tree.leaves(params))
  largest = max(4 * np.prod(s) for s in hf_map.hf_shapes(config).values())
  stack = params['moe']['block0']['moe']['experts']['w_up'].nbytes
  assert total > 80 * largest and stack > 20 * largest
  tracemalloc.start()
  save_hf(tmp_path / 'out', config, params)
  saving = tracemalloc.get_traced_memory()[1]
  tracemalloc.reset_peak()
  base = tracemalloc.get_traced_memory()[0]
  load_hf(tmp_path / 'out')
  loading = tracemalloc.get_traced_memory()[1] - base
  tracemalloc.stop()
  assert saving < 8 * largest, (saving, largest)
  assert loading < 8 * largest, (loading, largest)
