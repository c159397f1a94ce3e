"""Checkpoints in INT4: offline quantisation of a Hugging Face checkpoint directory, and back.

  python -m glm5_jax.quant.checkpoint SOURCE TARGET [--group=32] [--parameters=PATTERN] [--restore]

A quantised matrix NAME [out, in] is stored as NAME_packed, uint8 [out, in / 2] (two's complement nibbles,
the even input in the low one), and NAME_scale, bfloat16 [out, in / group]; everything else as it was.
config.json says so under `quantization_config`. The numbers are those of training (int4.py), bit for
bit. One tensor is in memory at a time beside the file being written.
"""

import argparse
import json
import os
import pathlib
import shutil
import sys
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from safetensors import safe_open
from safetensors.numpy import save_file

from glm5_jax.config import ModelConfig
from glm5_jax.convert import hf_map, storage
from glm5_jax.quant.int4 import EXPERTS, Int4, Quantised, dequantise, pack, quantise, unpack

_METHOD = 'glm5_jax_int4'
_PACKED, _SCALE = '_packed', '_scale'
_INPUTS = (1,)  # Of a checkpoint's [out, in].


def quantise_checkpoint(
  source: str | os.PathLike, target: str | os.PathLike, int4: Int4 = Int4()
) -> int:
  """Writes `target`, `source` with the matrices that `int4` names in INT4; returns their number.

  Args:
    source: a checkpoint as `save_hf` writes it, in float32 or bfloat16.
    target: a new directory; it appears complete or not at all.
    int4: names parameters by their paths in our tree.

  Raises:
    FileExistsError: `target` exists.
    CheckpointError: `source` cannot be read, or is quantised already.
    ValueError: nothing is named, or a matrix whose inputs the groups do not divide.
  """
  source = pathlib.Path(source)
  config = _config(source)
  if config.get('quantization_config'):
    raise storage.CheckpointError(f'{source} is quantised already: {config["quantization_config"]}')
  stored = storage.read_headers(source)
  wanted = _named(ModelConfig.from_hf(config), int4)
  missing = sorted(wanted - stored.keys())
  if missing:
    raise storage.CheckpointError(f'{source} lacks {len(missing)} tensors, such as {missing[0]}')

  def convert(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    if name not in wanted:
      return {name: value}
    if value.shape[1] % int4.group:
      raise ValueError(
        f'{name} has {value.shape[1]} inputs, which groups of {int4.group} do not divide'
      )
    found = quantise(jnp.asarray(value), _INPUTS, int4.group)
    return {
      f'{name}{_PACKED}': pack(np.asarray(found.q)),
      f'{name}{_SCALE}': np.asarray(found.scale),
    }

  section = {
    'quant_method': _METHOD, 'bits': 4, 'group_size': int4.group, 'symmetric': True,
    'parameters': int4.parameters,
  }  # fmt: skip
  _write(source, pathlib.Path(target), config | {'quantization_config': section}, stored, convert)
  return len(wanted)


def restore_checkpoint(source: str | os.PathLike, target: str | os.PathLike) -> None:
  """Writes `target`, an ordinary checkpoint with what `quantise_checkpoint` left in `source`.

  What was quantised is float32 in it, which holds its values exactly. Errors as there.
  """
  source = pathlib.Path(source)
  config = _config(source)
  section = config.pop('quantization_config', None) or {}
  if section.get('quant_method') != _METHOD:
    raise storage.CheckpointError(f'{source} was not written by quantise_checkpoint: {section}')
  stored = storage.read_headers(source)

  def convert(name: str, value: np.ndarray) -> dict[str, np.ndarray]:
    original = name.removesuffix(_PACKED)
    if f'{original}{_SCALE}' not in stored:
      return {} if f'{name.removesuffix(_SCALE)}{_PACKED}' in stored else {name: value}
    scale = np.asarray(stored[f'{original}{_SCALE}'].map())
    found = Quantised(jnp.asarray(unpack(value)), jnp.asarray(scale))
    return {original: np.asarray(dequantise(found, _INPUTS, section['group_size']))}

  _write(source, pathlib.Path(target), config, stored, convert)


def _named(config: ModelConfig, int4: Int4) -> set[str]:
  """The checkpoint's names of what is quantised.

  Raises:
    ValueError: nothing is, or a tensor of which only a part is.
  """
  names = set()
  for name, held in hf_map.sources(config).items():
    covered = {leaf.path for leaf, _ in held if int4.covers(leaf.path)}
    if covered and len(covered) < len({leaf.path for leaf, _ in held}):
      raise ValueError(f'{name} holds {sorted(covered)} and more: quantise all of it or nothing')
    if covered:
      for leaf, _ in held:
        int4.axes(leaf.path, leaf.shape)
      names.add(name)
  if not names:
    raise ValueError(f'optim.int4_parameters={int4.parameters!r} matches no tensor of this model')
  return names


def _config(folder: pathlib.Path) -> dict[str, Any]:
  try:
    found = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  except (OSError, ValueError) as e:
    raise storage.CheckpointError(f'{folder} has no readable config.json: {e}') from None
  if not isinstance(found, dict):
    raise storage.CheckpointError(f'{folder}/config.json is no JSON object')
  return found


def _write(
  source: pathlib.Path,
  target: pathlib.Path,
  config: dict[str, Any],
  stored: dict[str, storage.Stored],
  convert: Callable[[str, np.ndarray], dict[str, np.ndarray]],
) -> None:
  """File by file as in `source`; what is no tensor (tokenizer, generation_config) is copied."""
  if target.exists():
    raise FileExistsError(f'{target} exists; name a new directory')
  work = target.with_name(f'.{target.name}.partial')
  shutil.rmtree(work, ignore_errors=True)
  work.mkdir(parents=True)
  try:
    weight_map: dict[str, str] = {}
    size = 0
    for file in sorted({s.file.name for s in stored.values()}):
      tensors: dict[str, np.ndarray] = {}
      with safe_open(source / file, 'np') as reader:
        for name in reader.keys():  # noqa: SIM118
          tensors |= convert(name, reader.get_tensor(name))
      # Empty where a file held scales only.
      save_file(tensors, work / file, {'format': 'pt'})
      weight_map |= dict.fromkeys(tensors, file)
      size += sum(value.nbytes for value in tensors.values())
    if (source / storage.INDEX).exists():
      _json(work / storage.INDEX, {'metadata': {'total_size': size}, 'weight_map': weight_map})
    _json(work / 'config.json', config)
    for path in source.iterdir():
      if path.is_file() and not (work / path.name).exists() and path.name != storage.INDEX:
        shutil.copy2(path, work / path.name)
    work.rename(target)
  except BaseException:
    shutil.rmtree(work, ignore_errors=True)
    raise


def _json(path: pathlib.Path, value: Any) -> None:
  path.write_text(json.dumps(value, indent=2) + '\n', encoding='utf-8')


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status: 0 done, 1 refused, with one line that says why."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('source', help='a Hugging Face checkpoint directory')
  parser.add_argument('target', help='a new directory')
  parser.add_argument('--group', type=int, default=32, help='inputs that share a scale, 32 or 128')
  parser.add_argument(
    '--parameters', default=EXPERTS, help='pattern of the paths that are quantised'
  )
  parser.add_argument('--restore', action='store_true', help='from INT4 to an ordinary checkpoint')
  args = parser.parse_args(argv)
  try:
    if args.restore:
      restore_checkpoint(args.source, args.target)
      print(f'{args.target}: float32 where {args.source} has INT4')
    else:
      count = quantise_checkpoint(args.source, args.target, Int4(args.group, args.parameters))
      print(f'{args.target}: {count} matrices of {args.source} in INT4, groups of {args.group}')
  except (OSError, ValueError) as e:
    print(f'error: {e}', file=sys.stderr)
    return 1
  return 0


if __name__ == '__main__':
  sys.exit(main())
