"""Reads a Hugging Face checkpoint directory into our parameter tree.

All names, shapes and dtypes are checked from the files' headers before any data is read. Then each
parameter is built shard by shard, reading of each tensor only what the shard's device needs; at any
time the host holds no more than one tensor, or `HOST_BYTES` of small ones.
"""

import functools
import json
import os
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from absl import logging
from jax.sharding import Mesh, Sharding, SingleDeviceSharding

from glm5_jax import sharding as sharding_lib
from glm5_jax.config import ModelConfig
from glm5_jax.convert import hf_map, storage
from glm5_jax.convert.storage import CheckpointError, Stored

# A shard up to this size is stacked on the host; a larger one tensor by tensor on its device.
HOST_BYTES = 64 << 20
FP8_BLOCK = 128  # Each 128 x 128 block of an FP8 weight has one float32 factor.
_SCALE = '_scale_inv'


def load_hf(
  directory: str | os.PathLike,
  mesh: Mesh | None = None,
  *,
  param_dtype: str | None = None,
  mtp: bool = True,
  **overrides: Any,
) -> tuple[ModelConfig, dict[str, Any]]:
  """Loads config.json and model.safetensors (or its indexed shards).

  Tensors may be float32, bfloat16 or FP8 (e4m3 with a float32 `<name>_scale_inv` per 128 x 128
  block, as DeepSeek and Z.ai release them); FP8 is dequantised in float32.

  Args:
    directory: the checkpoint.
    mesh: places the parameters by the table of `glm5_jax.sharding`; None is the default device.
    param_dtype: 'float32' or 'bfloat16'. None takes the dtype that config.json names, or float32 if
      it names none and any tensor is wider than bfloat16. Router weights are always float32.
    mtp: False leaves the multi-token-prediction layers out.
    **overrides: other fields of ModelConfig to change, such as dtype='bfloat16'.

  Returns:
    The config and the parameters, a nested dict of jax arrays.

  Raises:
    CheckpointError: everything that is wrong with the checkpoint, in one message: unreadable
      files, another model type, missing, unknown or misshapen tensors, unsupported dtypes.
  """
  directory = pathlib.Path(directory)
  config, raw = _read_config(directory)
  if not mtp:
    overrides['num_nextn_predict_layers'] = 0
  layers_on_disk = config.num_nextn_predict_layers
  config = config.replace(**overrides)
  tensors = storage.read_headers(directory)
  if config.num_nextn_predict_layers == 0 and (layers_on_disk or not mtp):
    tensors = _without_mtp(tensors, config.num_hidden_layers)
  leaves = hf_map.leaves(config)
  _validate(directory, config, tensors)
  _check_copies(directory, config, tensors)
  config = config.replace(param_dtype=_choose_dtype(raw, tensors, param_dtype))
  shapes = hf_map.param_shapes(config)
  if mesh is None:
    shardings = jax.tree.map(lambda _: SingleDeviceSharding(_default_device()), shapes)
  else:
    shardings = sharding_lib.param_shardings(shapes, mesh)
  dtypes, shardings = hf_map.flatten(shapes), hf_map.flatten(shardings)
  params = {
    path: _build(leaf, np.dtype(dtypes[path].dtype), shardings[path], tensors)
    for path, leaf in leaves.items()
  }
  return config, hf_map.unflatten(params)


def _read_config(directory: pathlib.Path) -> tuple[ModelConfig, dict[str, Any]]:
  try:
    config = ModelConfig.from_hf(directory / 'config.json')
  except (ValueError, TypeError) as e:
    raise CheckpointError(f'checkpoint {directory}: {e}') from e
  raw = json.loads((directory / 'config.json').read_text(encoding='utf-8'))
  quantization = raw.get('quantization_config') or {}
  method = quantization.get('quant_method', 'fp8')
  block = quantization.get('weight_block_size') or [FP8_BLOCK] * 2
  if method != 'fp8' or list(block) != [FP8_BLOCK] * 2:
    raise CheckpointError(
      f'checkpoint {directory}: config.json has quant_method {method!r} with blocks {block};'
      f' supported is "fp8" with blocks [{FP8_BLOCK}, {FP8_BLOCK}]'
    )
  return config, raw


def _layer_of(name: str) -> int:
  """The layer of a tensor; -1 for those of no layer."""
  parts = name.split('.')
  return int(parts[2]) if name.startswith('model.layers.') and parts[2].isdigit() else -1


def _without_mtp(tensors: dict[str, Stored], num_layers: int) -> dict[str, Stored]:
  kept = {name: t for name, t in tensors.items() if _layer_of(name) < num_layers}
  if len(kept) < len(tensors):
    logging.info('left out %d tensors of the MTP layers', len(tensors) - len(kept))
  return kept


def _validate(directory: pathlib.Path, config: ModelConfig, tensors: dict[str, Stored]) -> None:
  """Compares names, shapes and dtypes with what the config asks for; reads no data."""
  expected = hf_map.hf_shapes(config)
  copies = hf_map.copies(config)
  allowed = expected | {n: expected[original] for n, original in copies.items()}
  scales = {
    name + _SCALE: tuple(-(-n // FP8_BLOCK) for n in t.shape)
    for name, t in tensors.items()
    if t.dtype == 'F8_E4M3' and name in allowed
  }
  missing = [n for n in expected if n not in tensors]
  missing_scales = [n for n in scales if n not in tensors]
  unknown = [n for n in tensors if n not in allowed and n not in scales]
  misshapen = [
    f'{n}: found {list(tensors[n].shape)}, expected {list(shape)}'
    for n, shape in (allowed | scales).items()
    if n in tensors and tensors[n].shape != shape
  ]
  dtypes = [
    f'{n}: found {tensors[n].dtype}, expected {" or ".join(kinds)}'
    for names, kinds in ((allowed, storage.DTYPES), (scales, ('F32',)))
    for n in names
    if n in tensors and tensors[n].dtype not in kinds
  ]
  problems = [
    storage.problem('missing tensors', (f'{n} {list(expected[n])}' for n in missing)),
    storage.problem('FP8 tensors without their factors', missing_scales),
    storage.problem('unknown tensors', (f'{n} {tensors[n]}' for n in unknown)),
    storage.problem('misshapen tensors', misshapen),
    storage.problem('tensors of another dtype', dtypes),
  ]
  advice = ['Nothing was loaded.']
  last = config.num_hidden_layers
  if missing and all(_layer_of(n) >= last for n in missing):
    advice.append(
      f'All missing tensors are of the MTP layer ({last}), which many exports leave out:'
      ' load_hf(..., mtp=False) loads the model without it.'
    )
  elif unknown and all(_layer_of(n) >= last for n in unknown):
    layers = len({_layer_of(n) for n in unknown})
    advice.append(
      f'config.json says {last} layers and {config.num_nextn_predict_layers} MTP layers. If the'
      f' unknown tensors are MTP layers, load_hf(..., num_nextn_predict_layers={layers}) loads them'
      ' and mtp=False leaves them out.'
    )
  else:
    advice.append('Is this the config.json that belongs to these files?')
  storage.fail(
    f'checkpoint {directory} does not fit its config.json ({config.model_type})', problems,
    ' '.join(advice),
  )  # fmt: skip


def _check_copies(directory, config: ModelConfig, tensors: dict[str, Stored]) -> None:
  """The MTP layer's embedding and head must repeat the main ones, since we keep only those."""
  different = []
  for name, original in hf_map.copies(config).items():
    if name not in tensors:
      continue
    a, b = tensors[name], tensors[original]
    if a.dtype != b.dtype or not _same_bytes(a, b):
      different.append(f'{name} differs from {original}')
    else:
      logging.info('%s repeats %s: one copy is kept', name, original)
  storage.fail(
    f'checkpoint {directory} cannot be represented',
    [storage.problem('MTP layers with an embedding or head of their own', different)],
    'The MTP layer shares both with the main model here. load_hf(..., mtp=False) leaves it out.',
  )


def _same_bytes(a: Stored, b: Stored, rows: int = 4096) -> bool:
  for i in range(0, a.shape[0], rows):
    x, y = (np.ascontiguousarray(t.map()[i : i + rows]).view(np.uint8) for t in (a, b))
    if not np.array_equal(x, y):
      return False
  return True


def _choose_dtype(raw: dict[str, Any], tensors: dict[str, Stored], asked: str | None) -> str:
  wide = [
    n for n, t in tensors.items()
    if t.dtype == 'F32' and not n.endswith(_SCALE) and '.mlp.gate.' not in n
  ]  # fmt: skip
  named = raw.get('dtype') or raw.get('torch_dtype')
  if named not in ('float32', 'bfloat16'):
    named = 'float32' if wide else 'bfloat16'
  chosen = asked or named
  if wide and chosen == 'bfloat16':
    logging.warning('rounding %d float32 tensors to bfloat16 (such as %s)', len(wide), wide[0])
  return chosen


def _default_device() -> jax.Device:
  device = getattr(jax.config, 'jax_default_device', None)
  return device if isinstance(device, jax.Device) else jax.local_devices(backend=device)[0]


def _build(
  leaf: hf_map.Leaf, dtype: np.dtype, sharding: Sharding, tensors: dict[str, Stored]
) -> jax.Array:
  """One parameter: each distinct shard is read once and given to every device that holds it."""
  holders: dict[tuple, list[jax.Device]] = {}
  for device, index in sharding.addressable_devices_indices_map(leaf.shape).items():
    assert index is not None
    ranges = tuple(s.indices(n)[:2] for s, n in zip(index, leaf.shape, strict=True))
    holders.setdefault(ranges, []).append(device)
  shards = []
  for ranges, devices in holders.items():
    first = _build_shard(leaf, dtype, ranges, devices[0], tensors)
    shards += [first, *(jax.device_put(first, d) for d in devices[1:])]
  return jax.make_array_from_single_device_arrays(leaf.shape, sharding, shards)


def _build_shard(leaf, dtype, ranges, device, tensors) -> jax.Array:
  depth = len(leaf.stack)
  shape = tuple(stop - start for start, stop in ranges)
  index = tuple(slice(*r) for r in ranges[depth:])
  begin = np.array([start for start, _ in ranges[:depth]], np.int32)
  leads = np.ndindex(*shape[:depth])
  read = functools.partial(_read, leaf, dtype=dtype, index=index, tensors=tensors)
  if np.prod(shape, dtype=np.int64) * dtype.itemsize <= HOST_BYTES:
    out = np.empty(shape, dtype)
    for lead in leads:
      out[lead] = read(tuple(begin + lead)).transpose(leaf.layout.order)
    return jax.device_put(out, device).block_until_ready()
  # Computations on one device of a mesh must not see the mesh that the caller may have set.
  with jax.set_mesh(Mesh(np.array([device]), ('shard',))):
    # As integers: XLA may compute bfloat16 in float32, which changes signalling NaNs.
    bits = np.dtype(f'uint{8 * dtype.itemsize}')
    buffer = jnp.zeros(shape, bits, device=device)
    for lead in leads:
      piece = jax.device_put(read(tuple(begin + lead)).view(bits), device)
      start = (*lead, *(0,) * len(index))
      buffer = _insert(buffer, piece, np.array(start, np.int32), leaf.layout.order)
      buffer.block_until_ready()  # Before the next piece is read: bounds the host's memory.
    return _as_floats(buffer, dtype)


@functools.partial(jax.jit, donate_argnums=0, static_argnums=3)
def _insert(buffer, piece, start, order):
  piece = piece.transpose(order)
  piece = piece.reshape((1,) * (buffer.ndim - piece.ndim) + piece.shape)
  return jax.lax.dynamic_update_slice(buffer, piece, [start[i] for i in range(buffer.ndim)])


@functools.partial(jax.jit, donate_argnums=0, static_argnums=1)
def _as_floats(bits, dtype):
  return jax.lax.bitcast_convert_type(bits, dtype)


def _read(leaf: hf_map.Leaf, lead, *, dtype, index, tensors) -> np.ndarray:
  """The slices `index` of `leaf[lead]`, in the order of the tensor's own axes."""
  name = leaf.name(tuple(int(i) for i in lead))
  layout, stored = leaf.layout, tensors[name]
  where = layout.locate(index)
  values = stored.map().reshape(layout.view)[where]
  if stored.dtype == 'F8_E4M3':
    scale = tensors[name + _SCALE].map()
    values = values.astype(np.float32) * _factors(layout, where, np.asarray(scale))
  return np.array(values, dtype)


def _factors(layout: hf_map.Layout, where: tuple[slice, ...], scale: np.ndarray) -> np.ndarray:
  """The FP8 factor of every element of `view[where]`, from the factor of every block."""
  blocks, axis = [], 0
  for group in layout.groups:
    rows = np.arange(np.prod(group)).reshape(group)[where[axis : axis + len(group)]]
    blocks.append(rows.reshape(-1) // FP8_BLOCK)
    axis += len(group)
  sizes = [np.arange(n)[part].size for n, part in zip(layout.view, where, strict=True)]
  return scale[np.ix_(*blocks)].reshape(sizes)
