"""Loading onto a mesh and saving from it, on 8 simulated devices, equals one device bit for bit."""

import pathlib
import tempfile

import jax
import ml_dtypes
import numpy as np

from glm5_jax import sharding
from glm5_jax.convert import hf_load, hf_map, hf_save, load_hf, save_hf, storage
from tests.convert import checkpoints
from tests.simulated import run_on_devices

MESHES = (
  {'fsdp': 2, 'expert': 2, 'tensor': 2},
  {'data': 2, 'fsdp': 4},
  {'expert': 2, 'context': 2, 'tensor': 2},
)


def _sharded_equals_single():
  assert jax.device_count() == 8
  config, single = load_hf(checkpoints.GOLDEN)
  golden = checkpoints.read(checkpoints.GOLDEN)
  single = hf_map.flatten(single)
  on_disk = sum(x.nbytes for x in golden.values())
  for i, shape in enumerate(MESHES):
    # The last mesh also takes the path of large arrays, inside of the caller's mesh.
    hf_load.HOST_BYTES = hf_save.HOST_BYTES = 20_000 if i == 2 else 1 << 30
    mesh = sharding.make_mesh(shape)
    read = _count_bytes()
    with jax.set_mesh(mesh):
      loaded_config, params = load_hf(checkpoints.GOLDEN, mesh)
    assert loaded_config == config
    # Each part of the files is read once, though several devices may hold it.
    assert sum(read) == on_disk, (sum(read), on_disk)
    specs = hf_map.flatten(sharding.param_specs(params, mesh))
    params = hf_map.flatten(params)
    checkpoints.assert_same_bits(params, single)
    for path, x in params.items():
      assert x.sharding == jax.NamedSharding(mesh, specs[path]), path
    heads = params['moe/block0/attn/w_uq'].addressable_shards[0].data.shape[2]
    assert heads == 4 // shape.get('tensor', 1)
    experts = params['moe/block0/moe/experts/w_up'].addressable_shards[0].data.shape[1]
    assert experts == 8 // shape.get('expert', 1)
    width = params['embed'].addressable_shards[0].data.shape[1]
    assert width == config.hidden_size // (shape.get('fsdp', 1) * shape.get('context', 1))
    with tempfile.TemporaryDirectory() as d:
      out = pathlib.Path(d) / 'out'
      with jax.set_mesh(mesh):
        save_hf(out, config, hf_map.unflatten(params))
      checkpoints.assert_same_bits(checkpoints.read(out), golden)


def _count_bytes() -> list[int]:
  """Bytes of each piece that is read from now on."""
  counts, read = [], hf_load._read.__dict__.get('original', hf_load._read)

  def counted(*args, **kwargs):
    out = read(*args, **kwargs)
    counts.append(out.nbytes)
    return out

  counted.original = read
  hf_load._read = counted
  return counts


def _fp8_on_a_mesh():
  """A device that holds some heads of an FP8 matrix also finds their factors."""
  config = checkpoints.TINY.replace(
    num_hidden_layers=1, num_nextn_predict_layers=0, hidden_size=144, q_lora_rank=160,
    kv_lora_rank=136, qk_nope_head_dim=50, v_head_dim=34,
  )  # fmt: skip
  rng = np.random.default_rng(0)
  tensors = checkpoints.random_tensors(config)
  for name in [n for n in tensors if 'proj' in n and 'weights_proj' not in n]:
    w = tensors[name]
    tensors[name] = w.astype(ml_dtypes.float8_e4m3fn)
    blocks = [-(-n // 128) for n in w.shape]
    tensors[name + '_scale_inv'] = rng.standard_normal(blocks, np.float32)
  with tempfile.TemporaryDirectory() as d:
    directory = checkpoints.write(pathlib.Path(d), config, tensors)
    assert sum(t.dtype == 'F8_E4M3' for t in storage.read_headers(directory).values()) == 8
    _, single = load_hf(directory)
    _, params = load_hf(directory, sharding.make_mesh({'fsdp': 4, 'tensor': 2}))
  checkpoints.assert_same_bits(hf_map.flatten(params), hf_map.flatten(single))


def _all():
  _sharded_equals_single()
  _fp8_on_a_mesh()


def test_sharded_equals_single():
  run_on_devices(_all)
