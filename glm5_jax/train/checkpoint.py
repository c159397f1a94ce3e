"""Checkpoints: asynchronous, atomic, verified, on Orbax's CheckpointManager.

A checkpoint is one directory `<step>/` with three items:

  params   the parameters, as the nested dict that the model uses
  train    every other array of the training state (optimizer, step, RNG), flat, named by path
  meta     JSON: step, the data iterator's state, and for each array its dtype, shape and digest

Orbax writes into a temporary directory and renames it when every byte is there, so a killed process
leaves either a whole checkpoint or none. What remains is damage after the fact (a truncated file, a
flipped bit, a half-copied directory): `restore` recomputes the digests, and on any difference says
so and takes the checkpoint before. A checkpoint of another model is a different matter: that is an
error, never a reason to fall back.

With several processes all of them call these methods, in the same order, on one shared folder.
"""

import contextlib
import gc
import json
import logging as std_logging
import math
import os
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import flax.traverse_util
import jax
import jax.numpy as jnp
import orbax.checkpoint as ocp
from absl import logging
from jax.sharding import NamedSharding, PartitionSpec, Sharding, SingleDeviceSharding
from orbax.checkpoint import checkpoint_managers as policies

from glm5_jax.digest import describe, kind, named_leaves
from glm5_jax.train import distributed


class CheckpointError(Exception):
  """No usable checkpoint, or one that does not belong to this model. The message is for people."""


class Restored(NamedTuple):
  """What `Checkpoints.restore` returns."""

  step: int
  state: Any
  data: Any


class _Read(NamedTuple):
  """Arrays as a tree whose leaves have their saved names (`digest.named_leaves`), and `meta`."""

  arrays: Any
  meta: dict[str, Any]


class Checkpoints:
  """The checkpoints of one run: the newest `keep_last` and the `keep_best` lowest by `best_metric`.

  Args:
    directory: created when absent; holds one directory a step.
    keep_last: how many of the newest to keep, at least 1.
    keep_best: how many of those with the lowest `best_metric` to keep besides; 0 for none. Only
      checkpoints saved with that metric take part.
    best_metric: a key of the `metrics` given to `save`.
  """

  def __init__(
    self,
    directory: str | os.PathLike,
    *,
    keep_last: int = 2,
    keep_best: int = 1,
    best_metric: str = 'eval/loss',
  ):
    if keep_last < 1 or keep_best < 0:
      raise ValueError(
        f'checkpoint.keep_last={keep_last} must be at least 1, keep_best={keep_best} at least 0'
      )
    self.directory = pathlib.Path(directory).absolute()
    self._best_metric = best_metric
    best = policies.BestN(get_metric_fn=self._rank, n=keep_best, reverse=True)
    self._keep = policies.AnyPreservationPolicy([policies.LatestN(keep_last), best])
    self._manager: ocp.CheckpointManager | None = None

  def steps(self) -> list[int]:
    """The steps that have a committed checkpoint, ascending."""
    if not self.directory.is_dir():
      return []
    return sorted(int(p.name) for p in self.directory.iterdir() if p.name.isdigit() and p.is_dir())

  def best_value(self) -> float:
    """The lowest `best_metric` among the kept checkpoints; infinity without one."""
    manager, best = self._open(), math.inf
    for step in manager.all_steps():
      best = min(best, self._rank(manager.metrics(step) or {}))
    return distributed.from_first(best)

  def _rank(self, metrics: Mapping[str, float | None]) -> float:
    value = metrics.get(self._best_metric)
    return math.inf if value is None else value

  def save(
    self, step: int, state: Any, *, data: Any = None, metrics: Mapping[str, float] | None = None
  ) -> bool:
    """Starts to write `state` and returns once it is copied off the device; the write goes on.

    Args:
      step: the number of optimizer steps that led to `state`.
      state: a dataclass of arrays with a field `params`. It may be donated right after.
      data: JSON-able state of the data iterator, such that the next batch is step + 1's.
      metrics: the evaluation at this step, if there was one.

    Returns:
      False where this step has a checkpoint already (nothing is written then).

    Raises:
      CheckpointError: the previous asynchronous write failed (disk full, folder gone).
    """
    params, rest = _split(state)
    meta = {'step': step, 'data': data, 'arrays': describe(state)}
    metric = (metrics or {}).get(self._best_metric)
    try:
      manager = self._open()
      if step in manager.all_steps():
        return False
      manager.save(
        step,
        args=ocp.args.Composite(
          params=ocp.args.StandardSave(params),
          train=ocp.args.StandardSave(rest),
          meta=ocp.args.JsonSave(meta),
        ),
        # NaN cannot be ranked: such a checkpoint counts as one without an evaluation.
        metrics={self._best_metric: metric if metric is None or math.isfinite(metric) else None},
        force=True,
      )
    except Exception as e:
      raise CheckpointError(f'cannot write checkpoint {self.directory / str(step)}: {e}') from e
    return True

  def restore(self, abstract_state: Any) -> Restored | None:
    """The newest usable checkpoint, in the shapes, dtypes and shardings of `abstract_state`.

    An unusable one (missing or damaged files) is reported by a warning that names it and the reason,
    and renamed to `unusable-<step>` once an older one has been restored.

    Args:
      abstract_state: the state's tree of `jax.ShapeDtypeStruct` (or arrays). Leaves with a
        `sharding` are restored into it, the others onto the default device.

    Returns:
      None if there is no checkpoint at all.

    Raises:
      CheckpointError: the checkpoint is of another model, optimizer or shape (lists the
        differences), or checkpoints exist but none is usable (lists each reason; deletes nothing).
    """
    step, found, problems = self._newest(lambda folder: self._read(folder, abstract_state))
    if found is None:
      if problems:
        raise self._none_usable(problems)
      return None
    if distributed.is_first():
      for bad in problems:
        aside = _free_name(self.directory / f'unusable-{bad.name}')
        bad.rename(aside)
        logging.warning('moved %s to %s, and resume from step %d', bad, aside, step)
    return Restored(step, found.arrays, found.meta['data'])

  def restore_params(self, like: Any, *, optional: str) -> tuple[int, Any]:
    """The parameters alone of the newest usable checkpoint, to start another run; changes nothing.

    Args:
      like: the parameter tree of the new run (`jax.ShapeDtypeStruct`s or arrays), with shardings as
        in `restore`.
      optional: parameters whose name ('params.moe.block0...') contains this may be absent or have
        another shape, and come back as None then. The checkpoint may have others of that name.

    Returns:
      The step, and a tree like `like`.

    Raises:
      CheckpointError: no checkpoint is usable, or the other parameters do not fit.
    """
    kinds = {k: kind(x) for k, x in named_leaves({'params': like}).items()}
    step, found, problems = self._newest(
      lambda folder: self._read_params(folder, like, kinds, optional)
    )
    if found is None:
      raise self._none_usable(problems)
    values = named_leaves(found.arrays)
    fits = [
      values[k] if k in values and kind(values[k]) == its_kind else None
      for k, its_kind in kinds.items()
    ]
    return step, jax.tree.unflatten(jax.tree.structure(like), fits)

  def _newest(
    self, read: Callable[[pathlib.Path], _Read]
  ) -> tuple[int, _Read | None, dict[pathlib.Path, str]]:
    """The newest checkpoint that every process can read and whose arrays have their digests.

    Returns:
      Its step, what was read (None if no checkpoint is usable), and what is wrong with newer ones.
    """
    problems: dict[pathlib.Path, str] = {}
    for step in reversed(distributed.from_first(self.steps())):
      folder = self.directory / str(step)
      found, problem = None, ''
      try:
        with _quiet_asyncio():
          found = read(folder)
      except CheckpointError:
        raise
      except Exception as e:  # Every kind of damage surfaces as a different exception type.
        problem = _first_line(e)
      problem = distributed.problem_of_any(problem)
      # All processes take the digests together: none may have failed before.
      if found and not problem:
        problem = _wrong_digest(found)
        if not problem:
          return step, found, problems
      problems[folder] = problem
      logging.warning('checkpoint %s is unusable (%s); trying the one before', folder, problem)
    return 0, None, problems

  def _read_params(
    self, folder: pathlib.Path, like: Any, kinds: Mapping[str, str], optional: str
  ) -> _Read:
    with _reader() as reader:
      args = ocp.args.Composite(meta=ocp.args.JsonRestore())
      meta = reader.restore(folder, args=args).meta
      saved = {k: v.split(' ')[0] for k, v in meta['arrays'].items() if k.startswith('params.')}
      wanted = named_leaves({'params': jax.tree.map(_with_sharding, like)})
      _check_fits(
        folder,
        {k: v for k, v in saved.items() if optional not in k},
        {k: v for k, v in kinds.items() if optional not in k},
      )
      # All that is there, in its own shapes: Orbax does not restore a part.
      anywhere = _everywhere(next(iter(wanted.values())).sharding)
      flat = {
        tuple(k.split('.')): wanted[k] if kinds.get(k) == v else _of_kind(v, anywhere)
        for k, v in saved.items()
      }
      abstract = flax.traverse_util.unflatten_dict(flat)['params']
      args = ocp.args.Composite(params=ocp.args.StandardRestore(abstract))
      return _Read({'params': reader.restore(folder, args=args).params}, meta)

  def _none_usable(self, problems: Mapping[pathlib.Path, str]) -> CheckpointError:
    reasons = '; '.join(f'{folder}: {reason}' for folder, reason in problems.items())
    return CheckpointError(
      f'none of the {len(problems)} checkpoints in {self.directory} is usable ({reasons}).'
      ' Nothing was deleted. Repair one, or start again in another --workdir.'
    )

  def _read(self, folder: pathlib.Path, abstract_state: Any) -> _Read:
    with _reader() as reader:
      args = ocp.args.Composite(meta=ocp.args.JsonRestore())
      meta = reader.restore(folder, args=args).meta
      if not isinstance(meta, dict) or str(meta.get('step')) != folder.name or 'arrays' not in meta:
        raise ValueError(f'{folder}/meta does not describe step {folder.name}')
      _check_matches(folder, meta['arrays'], abstract_state)
      params, rest = _split(jax.tree.map(_with_sharding, abstract_state))
      args = ocp.args.Composite(
        params=ocp.args.StandardRestore(params), train=ocp.args.StandardRestore(rest)
      )
      items = reader.restore(folder, args=args)
    return _Read(_join(abstract_state, items.params, items.train), meta)

  def _open(self) -> ocp.CheckpointManager:
    if self._manager is None:
      with distributed.first_before_others():
        for step in self.steps():  # Orbax reads them all and does not survive a damaged one.
          _set_damaged_metrics_aside(self.directory / str(step))
      self._manager = ocp.CheckpointManager(
        self.directory,
        options=ocp.CheckpointManagerOptions(
          preservation_policy=self._keep,
          best_fn=self._rank,  # Only makes Orbax write the metrics; the policy above decides.
          cleanup_tmp_directories=True,
          save_root_metadata=False,
        ),
      )
    return self._manager

  def wait(self) -> None:
    """Returns when every started write is committed.

    Raises:
      CheckpointError: a write failed.
    """
    if self._manager is None:
      return
    try:
      self._manager.wait_until_finished()
      self._manager.check_for_errors()
    except Exception as e:
      raise CheckpointError(f'cannot write a checkpoint in {self.directory}: {e}') from e

  def close(self) -> None:
    """Waits, then ends the writer threads."""
    self.wait()
    if self._manager is not None:
      self._manager.close()
      self._manager = None


@contextlib.contextmanager
def _quiet_asyncio():
  """Orbax leaves failed reads to asyncio, which would log a page of each besides our one line."""
  logger = std_logging.getLogger('asyncio')
  level = logger.level
  logger.setLevel(std_logging.CRITICAL)
  try:
    yield
  except Exception as e:
    # The frames hold the failed futures; let go of them while they are quiet.
    e.__traceback__ = None
    gc.collect()
    raise e from None
  finally:
    logger.setLevel(level)


def _reader() -> ocp.Checkpointer:
  """Reads without waiting for other processes, so that each may find damage by itself.

  It is not the manager that saves: that must not see checkpoints that turn out unusable.
  """
  alone = ocp.options.MultiprocessingOptions(
    primary_host=jax.process_index(), active_processes={jax.process_index()}
  )
  handler = ocp.CompositeCheckpointHandler(
    composite_options=ocp.CompositeOptions(multiprocessing_options=alone)
  )
  return ocp.Checkpointer(handler, multiprocessing_options=alone)


def _wrong_digest(found: _Read) -> str:
  """Which array is not what was saved; empty if all are."""
  for name, digest in describe(found.arrays).items():
    if digest != found.meta['arrays'][name]:
      return f'array {name} does not have the digest it was saved with'
  return ''


def _split(state: Any) -> tuple[Any, dict[str, Any]]:
  """The parameters, and all other leaves by name (optimizer states are no plain dicts)."""
  rest = {k: v for k, v in named_leaves(state).items() if not k.startswith('params.')}
  return state.params, rest


def _join(like: Any, params: Any, rest: dict[str, Any]) -> Any:
  named = {f'params.{k}': v for k, v in named_leaves(params).items()} | rest
  return jax.tree.unflatten(jax.tree.structure(like), [named[k] for k in named_leaves(like)])


def _with_sharding(x: Any) -> jax.ShapeDtypeStruct:
  sharding = getattr(x, 'sharding', None) or SingleDeviceSharding(jax.devices()[0])
  return jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding)


def _everywhere(sharding: Sharding) -> Sharding:
  """Whole on every device of a mesh; as it is without one."""
  if isinstance(sharding, NamedSharding):
    return NamedSharding(sharding.mesh, PartitionSpec())
  return sharding


def _of_kind(text: str, sharding: Sharding) -> jax.ShapeDtypeStruct:
  """The inverse of `kind`."""
  dtype, _, shape = text.rstrip(']').partition('[')
  sizes = tuple(int(n) for n in shape.split(',') if n)
  return jax.ShapeDtypeStruct(sizes, jnp.dtype(dtype), sharding=sharding)


def _check_matches(folder: pathlib.Path, found: Mapping[str, str], abstract_state: Any) -> None:
  expected = {k: kind(x) for k, x in named_leaves(abstract_state).items()}
  _check_fits(folder, {k: v.split(' ')[0] for k, v in found.items()}, expected)


def _check_fits(
  folder: pathlib.Path, found: Mapping[str, str], expected: Mapping[str, str]
) -> None:
  lines = [
    f'{k}: checkpoint {found.get(k, "lacks it")}, this run {expected.get(k, "lacks it")}'
    for k in sorted(found.keys() | expected.keys())
    if found.get(k) != expected.get(k)
  ]
  if lines:
    more = f' and {len(lines) - 5} more' if len(lines) > 5 else ''
    raise CheckpointError(
      f'checkpoint {folder} does not fit this model and optimizer: {"; ".join(lines[:5])}{more}.'
      ' Use the config it was trained with, or another --workdir.'
    )


def _set_damaged_metrics_aside(folder: pathlib.Path) -> None:
  file = folder / 'metrics' / 'metrics'
  try:
    if isinstance(json.loads(file.read_bytes()), dict):
      return
    reason = 'not a JSON object'
  except FileNotFoundError:
    return
  except ValueError as e:
    reason = str(e)
  aside = _free_name(folder / 'metrics.unusable')
  file.parent.rename(aside)
  logging.warning(
    '%s is unusable (%s): moved to %s, this checkpoint has no rank', file, reason, aside
  )


def _first_line(e: Exception) -> str:
  text = (str(e).strip() or type(e).__name__).splitlines()[0]
  return text if len(text) < 300 else text[:297] + '...'


def _free_name(path: pathlib.Path) -> pathlib.Path:
  candidate, n = path, 1
  while candidate.exists():
    candidate, n = path.with_name(f'{path.name}-{n}'), n + 1
  return candidate
