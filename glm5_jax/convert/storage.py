"""Safetensors files: headers, single tensors by memory map, and a writer that streams.

The format (https://github.com/huggingface/safetensors): 8 bytes with the header's length, a JSON
header {name: {dtype, shape, data_offsets}}, then the data. The library checks each file when it is
opened; the data itself is mapped here, because its numpy side knows no float8 and can only slice
whole axes, while a head-major matrix must be viewed as [N, H, D] to read one device's heads.
"""

import dataclasses
import json
import math
import os
import pathlib
from collections.abc import Iterable, Iterator
from typing import Any

import ml_dtypes
import numpy as np
import safetensors

SINGLE = 'model.safetensors'
INDEX = 'model.safetensors.index.json'
DTYPES = {
  'F32': np.dtype(np.float32),
  'BF16': np.dtype(ml_dtypes.bfloat16),
  'F8_E4M3': np.dtype(ml_dtypes.float8_e4m3fn),
}
NAMES = {dtype: name for name, dtype in DTYPES.items()}
_SHOWN = 5  # Tensors named per kind of problem; the rest are counted.


class CheckpointError(ValueError):
  """A checkpoint is unreadable, or does not fit the model; the message lists what and why."""


@dataclasses.dataclass(frozen=True)
class Stored:
  """Where one tensor lies on disk."""

  file: pathlib.Path
  dtype: str  # As in the header: F32, BF16, ...
  shape: tuple[int, ...]
  offset: int  # In bytes from the start of the file.

  def map(self) -> np.ndarray:
    """The tensor as a read-only memory map, closed again with the last reference to it."""
    dtype = DTYPES[self.dtype]
    if not math.prod(self.shape):
      return np.empty(self.shape, dtype)
    return np.memmap(self.file, dtype, 'r', self.offset, self.shape)

  def __str__(self) -> str:
    return f'{list(self.shape)} {self.dtype}'


def problem(kind: str, details: Iterable[str]) -> str | None:
  """One line for a report: 'KIND (COUNT): first few details, and N more'; None without details."""
  details = list(details)
  if not details:
    return None
  more = f'; and {len(details) - _SHOWN} more' if len(details) > _SHOWN else ''
  return f'{kind} ({len(details)}): ' + '; '.join(details[:_SHOWN]) + more


def fail(subject: str, problems: Iterable[str | None], advice: str = '') -> None:
  """Raises one CheckpointError with all problems, if there are any."""
  found = [p for p in problems if p]
  if found:
    lines = [f'{subject}:', *(f'  {p}' for p in found)]
    raise CheckpointError('\n'.join(lines + ([advice] if advice else [])))


def read_headers(directory: pathlib.Path) -> dict[str, Stored]:
  """Every tensor of a checkpoint directory (one file, or an index and its files); reads no data.

  Raises:
    CheckpointError: no weights, an unreadable index, missing, truncated or damaged files, an index
      that contradicts the files.
  """
  if (directory / SINGLE).exists():
    weight_map, files = None, [SINGLE]
  elif (directory / INDEX).exists():
    weight_map = _read_index(directory / INDEX)
    files = sorted(set(weight_map.values()))
  else:
    found = sorted(p.name for p in directory.iterdir())[:8] if directory.is_dir() else 'nothing'
    raise CheckpointError(
      f'{directory}: neither {SINGLE} nor {INDEX} is there; found {found}.'
      ' Only safetensors checkpoints can be read.'
    )
  tensors: dict[str, Stored] = {}
  absent, damaged, twice = [], [], []
  for file in files:
    path = directory / file
    if not path.exists():
      count = sum(f == file for f in weight_map.values()) if weight_map else 0
      absent.append(f'{file}, which should hold {count} tensors')
      continue
    try:
      header = _read_header(path)
    except (OSError, ValueError, safetensors.SafetensorError) as e:
      damaged.append(f'{file}: {e}')
      continue
    for name, stored in header.items():
      if name in tensors:
        twice.append(f'{name} in {tensors[name].file.name} and {file}')
      tensors[name] = stored
  misplaced = []
  if weight_map and not (absent or damaged):
    for name in sorted(weight_map.keys() | tensors.keys()):
      held = tensors[name].file.name if name in tensors else 'no file'
      if weight_map.get(name) != held:
        misplaced.append(f'{name} is in {held}, the index says {weight_map.get(name, "nothing")}')
  fail(
    f'checkpoint {directory} cannot be read',
    [
      problem('missing files', absent),
      problem('truncated or damaged files', damaged),
      problem('tensors stored twice', twice),
      problem('tensors not where the index says', misplaced),
    ],
    'Nothing was loaded. Download or copy these files again.',
  )
  return tensors


def _read_index(path: pathlib.Path) -> dict[str, str]:
  try:
    weight_map = json.loads(path.read_text(encoding='utf-8'))['weight_map']
    pairs = list(weight_map.items())
  except (OSError, ValueError, KeyError, TypeError, AttributeError) as e:
    raise CheckpointError(
      f'{path} is not a readable index: {type(e).__name__}: {e};'
      ' expected a JSON object whose "weight_map" maps tensor names to file names'
    ) from e
  bad = [f'{n}: {f!r}' for n, f in pairs if not isinstance(f, str) or f != os.path.basename(f)]
  fail(f'{path} is not a readable index', [problem('not plain file names', bad)])
  return weight_map


def _read_header(path: pathlib.Path) -> dict[str, Stored]:
  size = path.stat().st_size
  with open(path, 'rb') as f:
    length = int.from_bytes(f.read(8), 'little')
    if size < 8 + length:
      raise ValueError(f'its header needs {8 + length} bytes, the file has {size}')
    text = f.read(length)
  try:
    header = json.loads(text)
    header.pop('__metadata__', None)
    end = 8 + length + max((entry['data_offsets'][1] for entry in header.values()), default=0)
  except (ValueError, AttributeError, KeyError, TypeError, IndexError) as e:
    raise ValueError(f'its header is not valid ({type(e).__name__}: {e})') from e
  if size != end:
    raise ValueError(f'its header describes {end} bytes, the file has {size}')
  with safetensors.safe_open(path, 'np'):  # Checks offsets against shapes and dtypes.
    pass
  return {
    name: Stored(path, e['dtype'], tuple(e['shape']), 8 + length + e['data_offsets'][0])
    for name, e in header.items()
  }


@dataclasses.dataclass(frozen=True)
class Planned:
  """A tensor to be written."""

  name: str
  dtype: np.dtype
  shape: tuple[int, ...]

  @property
  def nbytes(self) -> int:
    """Bytes of data."""
    return math.prod(self.shape) * self.dtype.itemsize


def plan_files(tensors: Iterable[Planned], max_bytes: int) -> dict[str, list[Planned]]:
  """Distributes tensors over files of at most `max_bytes` of data (or one tensor)."""
  files: list[list[Planned]] = []
  room = -1
  for tensor in tensors:
    if tensor.nbytes > room:
      files.append([])
      room = max_bytes
    files[-1].append(tensor)
    room -= tensor.nbytes
  for file in files:  # Wide dtypes first, so that every tensor stays aligned.
    file.sort(key=lambda t: -t.dtype.itemsize)
  if len(files) == 1:
    return {SINGLE: files[0]}
  total = len(files)
  return {f'model-{i:05d}-of-{total:05d}.safetensors': f for i, f in enumerate(files, 1)}


def write_file(path: pathlib.Path, tensors: list[Planned], values: Iterator[np.ndarray]) -> None:
  """Writes one file, taking the values one at a time; `values` follows the order of `tensors`."""
  header: dict[str, Any] = {'__metadata__': {'format': 'pt'}}
  position = 0
  for t in tensors:
    end = position + t.nbytes
    entry = {'dtype': NAMES[t.dtype], 'shape': list(t.shape), 'data_offsets': [position, end]}
    header[t.name], position = entry, end
  text = json.dumps(header, separators=(',', ':')).encode()
  text += b' ' * (-len(text) % 8)  # The data starts on a multiple of 8 bytes.
  with open(path, 'wb') as f:
    f.write(len(text).to_bytes(8, 'little') + text)
    for t, value in zip(tensors, values, strict=True):
      if value.shape != t.shape or value.dtype != t.dtype:
        raise AssertionError(f'{t}: got {value.shape} {value.dtype}')
      f.write(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
    f.flush()
    os.fsync(f.fileno())
