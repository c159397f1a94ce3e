"""A run's folder: who owns it, which config it belongs to, and how to stop the run politely.

Layout: config.json, metrics.jsonl, tensorboard/, checkpoints/, plots/*.png, report.md.
"""

import contextlib
import fcntl
import json
import os
import pathlib
import signal
from collections.abc import Iterator, Mapping
from typing import Any

# May differ between a run and its continuation; everything else would bend the curve unseen.
# `init_from` is read at the start only: that folder may have moved. Another mesh adds up the same
# numbers in another order.
MAY_CHANGE = (
  'train.steps', 'train.max_minutes', 'eval.', 'checkpoint.', 'log.', 'init_from', 'mesh.',
)  # fmt: skip


class WorkdirError(Exception):
  """The folder cannot be used for this run. The message is for people."""


@contextlib.contextmanager
def claim(workdir: str | os.PathLike, config: Mapping[str, Any]) -> Iterator[pathlib.Path]:
  """Creates or re-opens a run's folder and holds it until the block ends.

  Writes config.json. The lock ends with the process, however it ends.

  Raises:
    WorkdirError: the path is a file or not writable, holds something else than a run, is in use by
      another process, or holds a run of another config (the error lists the differing keys).
  """
  path = pathlib.Path(workdir).expanduser().absolute()
  try:
    path.mkdir(parents=True, exist_ok=True)
    lock = (path / '.lock').open('a+')
  except (FileExistsError, NotADirectoryError):
    raise WorkdirError(
      f'--workdir={workdir} is not a folder; name a new or an existing folder'
    ) from None
  except OSError as e:
    raise WorkdirError(f'--workdir={workdir} is not writable: {e.strerror}') from None
  with lock:
    try:
      fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
      raise WorkdirError(
        f'--workdir={workdir} is in use by another run; wait or choose another'
      ) from None
    _check_config(path, config)
    write_atomically(path / 'config.json', json.dumps(config, indent=2, default=list) + '\n')
    yield path


def _check_config(path: pathlib.Path, config: Mapping[str, Any]) -> None:
  file = path / 'config.json'
  try:
    before = json.loads(file.read_text(encoding='utf-8'))
  except FileNotFoundError:
    strangers = [p.name for p in path.iterdir() if not p.name.startswith('.')]
    if strangers:
      raise WorkdirError(
        f'--workdir={path} holds {sorted(strangers)[0]!r} but no config.json, so it is not the folder'
        ' of a run; choose a new or empty one'
      ) from None
    return
  except ValueError as e:
    if not _has_checkpoints(path):
      return
    raise WorkdirError(f'{file} is damaged ({e}); restore it or choose another --workdir') from None
  old, new = flatten(before), flatten(json.loads(json.dumps(config, default=list)))
  changed = [
    f'{key}: was {json.dumps(old.get(key))}, is {json.dumps(new.get(key))}'
    for key in sorted(old.keys() | new.keys())
    if old.get(key) != new.get(key) and not key.startswith(MAY_CHANGE)
  ]
  if changed and _has_checkpoints(path):  # Without one there is nothing to resume, nor to protect.
    raise WorkdirError(
      f'--workdir={path} holds a run of another config ({"; ".join(changed)}). Use the same values to'
      ' resume it, or another --workdir to start afresh.'
    )


def _has_checkpoints(path: pathlib.Path) -> bool:
  folder = path / 'checkpoints'
  return folder.is_dir() and any(p.name.isdigit() for p in folder.iterdir())


def flatten(tree: Mapping[str, Any], prefix: str = '') -> dict[str, Any]:
  """{'model.size': 'nano', ...}."""
  out: dict[str, Any] = {}
  for key, value in tree.items():
    if isinstance(value, Mapping):
      out |= flatten(value, f'{prefix}{key}.')
    else:
      out[f'{prefix}{key}'] = value
  return out


def write_atomically(path: pathlib.Path, text: str) -> None:
  """A reader sees the old file or the whole new one, never a part."""
  new = path.with_name(f'.{path.name}.new')
  with new.open('w', encoding='utf-8') as f:
    f.write(text)
    f.flush()
    os.fsync(f.fileno())
  new.replace(path)


class StopRequest:
  """Turns SIGTERM and the first Ctrl-C into a flag that the loop reads; the second Ctrl-C kills.

  Use as a context manager in the main thread; `reason` is None until asked to stop.
  """

  def __init__(self):
    self.reason: str | None = None
    self._previous: dict[int, Any] = {}

  def __bool__(self) -> bool:
    return self.reason is not None

  def _handle(self, number: int, _frame: Any) -> None:
    self.reason = {signal.SIGTERM: 'SIGTERM', signal.SIGINT: 'Ctrl-C'}[signal.Signals(number)]
    # A stage's request stands within a pipeline's: both are to stop.
    outer = getattr(self._previous.get(number), '__self__', None)
    if isinstance(outer, StopRequest):
      outer.reason = self.reason
    os.write(2, f'\n{self.reason}: saving after this step; Ctrl-C kills\n'.encode())
    signal.signal(signal.SIGINT, signal.SIG_DFL)

  def __enter__(self):
    for number in (signal.SIGTERM, signal.SIGINT):
      self._previous[number] = signal.signal(number, self._handle)
    return self

  def __exit__(self, *_):
    for number, handler in self._previous.items():
      signal.signal(number, handler)
