"""Trajectories as a training batch: packed rows, with what the policy's objective reads of each token."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from glm5_jax.data import packing
from glm5_jax.rl.rollout import Trajectory


class PolicyBatch(NamedTuple):
  """Rows of packed trajectories, [rows, T] each; position t is about the token after it.

  Numpy arrays as `pack` makes them, and jax's inside of a step.

  Attributes:
    tokens, targets, segment_ids, positions: int32 as in pre-training.
    mask: bool, targets that the model wrote.
    rollout: float32, the log-probabilities they were sampled with.
    advantages: float32.
    teacher: float32, log-probabilities of the targets under a teacher; None without one.
  """

  tokens: Any
  targets: Any
  segment_ids: Any
  positions: Any
  mask: Any
  rollout: Any
  advantages: Any
  teacher: Any = None


def pack(
  trajectories: Sequence[Trajectory],
  advantages: Sequence[float],
  seq_len: int,
  rows_multiple: int,
  pad_id: int,
) -> PolicyBatch:
  """Packs whole trajectories, longest first, each into the fullest row with room.

  Args:
    trajectories: at most `seq_len` + 1 tokens each.
    advantages: one for each; all its tokens get it.
    seq_len: T.
    rows_multiple: rows are filled up with padding to a multiple of it.
    pad_id: token of the padding.

  Raises:
    ValueError: a trajectory is too long for a row.
  """
  lengths = np.array([len(t.ids) - 1 for t in trajectories], np.int64)
  if lengths.max() > seq_len:
    raise ValueError(f'a trajectory of {lengths.max() + 1} tokens does not fit rows of {seq_len}')
  row_of = packing.best_fit(lengths, seq_len)
  count = -(-(int(row_of.max()) + 1) // rows_multiple) * rows_multiple
  ints = {name: np.zeros((count, seq_len), np.int32) for name in ('segment_ids', 'positions')}
  ints |= {name: np.full((count, seq_len), pad_id, np.int32) for name in ('tokens', 'targets')}
  mask = np.zeros((count, seq_len), bool)
  floats = [np.zeros((count, seq_len), np.float32) for _ in range(2)]
  used, segments = np.zeros(count, np.int64), np.zeros(count, np.int64)
  for t, advantage, length, row in zip(trajectories, advantages, lengths, row_of, strict=True):
    at = (row, slice(used[row], used[row] + length))
    used[row] += length
    segments[row] += 1
    ints['tokens'][at], ints['targets'][at] = t.ids[:-1], t.ids[1:]
    ints['segment_ids'][at], ints['positions'][at] = segments[row], np.arange(length)
    mask[at] = t.sampled[1:]
    floats[0][at], floats[1][at] = t.logprobs[1:], advantage
  floats[1][~mask] = 0.0
  return PolicyBatch(mask=mask, rollout=floats[0], advantages=floats[1], **ints)


def join(parts: Sequence[PolicyBatch], rows: int) -> PolicyBatch:
  """The rows of all parts one after another, then empty rows up to `rows`: always the same shape."""
  missing = rows - sum(len(part.tokens) for part in parts)
  joined = jax.tree.map(lambda *arrays: np.concatenate(arrays), *parts)
  return jax.tree.map(lambda a: np.pad(a, ((0, missing), (0, 0))), joined)
