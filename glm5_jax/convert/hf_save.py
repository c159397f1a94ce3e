"""Writes our parameter tree as a Hugging Face checkpoint directory.

Tensors are fetched and written one at a time, whatever the parameters' sharding; the directory
appears under its name only when it is complete.
"""

import functools
import json
import os
import pathlib
import shutil
import tempfile
from collections.abc import Iterator
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from glm5_jax.config import ModelConfig
from glm5_jax.convert import hf_map, storage
from glm5_jax.convert.hf_map import Leaf

# A device's part of a parameter up to this size is copied to the host whole, a larger one is cut
# on the device first.
HOST_BYTES = 16 << 20


def save_hf(
  directory: str | os.PathLike,
  config: ModelConfig,
  params: dict[str, Any],
  *,
  max_shard_bytes: int = 5_000_000_000,
  dtype: str | None = None,
) -> None:
  """Writes config.json, generation_config.json and safetensors that transformers loads.

  `load_hf` gives back the same bits. A float32 router of a bfloat16 model is written as bfloat16
  where that is exact (as after loading a released checkpoint), otherwise as float32.

  Args:
    directory: a new or empty directory; it appears complete or not at all.
    config: the model's config.
    params: the parameters, numpy or (sharded) jax arrays in float32 or bfloat16.
    max_shard_bytes: more data than this is spread over several files with an index.
    dtype: 'float32' or 'bfloat16' converts all tensors but the router's correction bias, which is
      always float32. None keeps each array's dtype.

  Raises:
    FileExistsError: the directory exists and is not empty. It is left as it is.
    CheckpointError: the parameters do not fit the config.
    ValueError: the model has no Hugging Face form, or an array is spread over several hosts.
  """
  target = pathlib.Path(directory)
  _check_absent(target)
  if dtype not in (None, 'float32', 'bfloat16'):
    raise ValueError(f'dtype must be None, "float32" or "bfloat16", found {dtype!r}')
  leaves, flat = hf_map.leaves(config), hf_map.flatten(params)
  _validate(config, leaves, flat)
  sources = hf_map.sources(config)
  if config.model_type == 'deepseek_v32':
    sources |= {name: sources[original] for name, original in hf_map.copies(config).items()}
  files = storage.plan_files(_plan(sources, flat, dtype), max_shard_bytes)

  target.parent.mkdir(parents=True, exist_ok=True)
  work = pathlib.Path(tempfile.mkdtemp(prefix=f'.{target.name}.', dir=target.parent))
  try:
    work.chmod(0o777 & ~_umask())
    for file, tensors in files.items():
      values = (_tensor(sources[t.name], flat, t.dtype) for t in tensors)
      storage.write_file(work / file, tensors, values)
    if list(files) != [storage.SINGLE]:
      _write_json(work / storage.INDEX, _index(files))
    written = dtype or _common_dtype(leaves, flat)
    _write_json(work / 'config.json', config.replace(param_dtype=written).to_hf())
    _write_json(work / 'generation_config.json', _generation_config(config))
    try:
      work.rename(target)  # Replaces an empty directory, and nothing else.
    except OSError as e:
      _check_absent(target)
      raise e
  except BaseException:
    shutil.rmtree(work, ignore_errors=True)
    raise


def _check_absent(target: pathlib.Path) -> None:
  if target.exists() and not (target.is_dir() and not any(target.iterdir())):
    raise FileExistsError(
      f'{target} exists and is not empty; it was left as it is. Save to a new directory, or remove'
      ' this one first.'
    )


def _validate(config: ModelConfig, leaves: dict[str, Leaf], flat: dict[str, Any]) -> None:
  misshapen, dtypes, remote = [], [], []
  for path, leaf in leaves.items():
    array = flat.get(path)
    if array is None:
      continue
    if tuple(array.shape) != leaf.shape:
      misshapen.append(f'{path}: found {list(array.shape)}, expected {list(leaf.shape)}')
    if np.dtype(array.dtype).name not in ('float32', 'bfloat16'):
      dtypes.append(f'{path}: found {array.dtype}, expected float32 or bfloat16')
    if isinstance(array, jax.Array) and not array.is_fully_addressable:
      remote.append(path)
  storage.fail(
    f'the parameters do not fit the config ({config.model_type})',
    [
      storage.problem('missing', (f'{p} {list(leaves[p].shape)}' for p in leaves if p not in flat)),
      storage.problem('unknown', (p for p in flat if p not in leaves)),
      storage.problem('misshapen', misshapen),
      storage.problem('of another dtype', dtypes),
    ],
    'Nothing was written.',
  )
  if remote:
    raise ValueError(
      f'{len(remote)} parameters (such as {remote[0]}) are spread over several hosts; save_hf runs'
      ' on one. Save an Orbax checkpoint and convert it on one host.'
    )


def _plan(sources, flat, dtype: str | None) -> Iterator[storage.Planned]:
  bfloat16, float32 = storage.DTYPES['BF16'], storage.DTYPES['F32']
  narrow_model = np.dtype(flat['embed'].dtype) == bfloat16
  for name, held in sources.items():
    leaf = held[0][0]
    if leaf.path.endswith(hf_map.CORRECTION_BIAS):
      kind = float32
    elif dtype:
      kind = np.dtype(dtype)
    elif leaf.float32 and narrow_model:
      router = _tensor(held, flat, float32)
      with np.errstate(invalid='ignore'):
        exact = np.array_equal(_bits(router), _bits(router.astype(bfloat16).astype(float32)))
      kind = bfloat16 if exact else float32
    else:
      # Parts of one tensor (W_UK, W_UV) might differ in dtype: the wider holds both.
      kind = max((np.dtype(flat[part.path].dtype) for part, _ in held), key=lambda d: d.itemsize)
    yield storage.Planned(name, kind, leaf.layout.hf_shape)


def _tensor(held: list[tuple[Leaf, tuple[int, ...]]], flat, dtype: np.dtype) -> np.ndarray:
  """One checkpoint tensor on the host, put together from the parameters that it holds."""
  layout = held[0][0].layout
  out = np.empty(layout.view, dtype)
  for leaf, lead in held:
    _fetch(flat[leaf.path], leaf, lead, out)
  return out.reshape(layout.hf_shape)


def _fetch(array, leaf: Leaf, lead: tuple[int, ...], out: np.ndarray) -> None:
  """Writes `array[lead]` into its place in `out` [view]."""
  layout = leaf.layout
  if not isinstance(array, jax.Array):
    whole = tuple(slice(None) for _ in layout.shape)
    out[layout.locate(whole)] = np.asarray(array)[lead].transpose(layout.inverse)
    return
  depth = len(lead)
  for shard in array.addressable_shards:
    ranges = [s.indices(n)[:2] for s, n in zip(shard.index, array.shape, strict=True)]
    inside = all(start <= i < stop for i, (start, stop) in zip(lead, ranges, strict=False))
    if not inside or shard.replica_id != 0:
      continue
    where = layout.locate(tuple(slice(*r) for r in ranges[depth:]))
    local = tuple(i - start for i, (start, _) in zip(lead, ranges, strict=False))
    if shard.data.nbytes <= HOST_BYTES:
      out[where] = np.asarray(shard.data)[local].transpose(layout.inverse)
      continue
    start = np.array(local + (0,) * (array.ndim - depth), np.int32)
    # Computations on one device of a mesh must not see the mesh that the caller may have set.
    with jax.set_mesh(Mesh(np.array([shard.device]), ('shard',))):
      bits = np.asarray(_cut(shard.data, start, depth, layout.inverse))
      out[where] = bits.view(array.dtype)


@functools.partial(jax.jit, static_argnums=(2, 3))
def _cut(array, start, depth, order):
  sizes = (1,) * depth + array.shape[depth:]
  # As integers: XLA may compute bfloat16 in float32, which changes signalling NaNs.
  array = jax.lax.bitcast_convert_type(array, f'uint{8 * array.dtype.itemsize}')
  piece = jax.lax.dynamic_slice(array, [start[i] for i in range(array.ndim)], sizes)
  return piece.reshape(array.shape[depth:]).transpose(order)


def _bits(x: np.ndarray) -> np.ndarray:
  return np.ascontiguousarray(x).view(np.uint32)


def _common_dtype(leaves: dict[str, Leaf], flat: dict[str, Any]) -> str:
  names = {np.dtype(flat[p].dtype).name for p, leaf in leaves.items() if not leaf.float32}
  return 'bfloat16' if names == {'bfloat16'} else 'float32'


def _index(files: dict[str, list[storage.Planned]]) -> dict[str, Any]:
  return {
    'metadata': {'total_size': sum(t.nbytes for tensors in files.values() for t in tensors)},
    'weight_map': {t.name: file for file, tensors in files.items() for t in tensors},
  }


def _generation_config(config: ModelConfig) -> dict[str, Any]:
  out: dict[str, Any] = {'_from_model_config': True}
  if config.eos_token_id:
    out['eos_token_id'] = list(config.eos_token_id)
  if config.pad_token_id is not None:
    out['pad_token_id'] = config.pad_token_id
  return out


def _write_json(path: pathlib.Path, value: Any) -> None:
  with open(path, 'w', encoding='utf-8') as f:
    f.write(json.dumps(value, indent=2) + '\n')
    f.flush()
    os.fsync(f.fileno())


def _umask() -> int:
  mask = os.umask(0)
  os.umask(mask)
  return mask
