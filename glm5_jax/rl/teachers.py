"""The teachers of a distillation (section 3.5): frozen checkpoints of earlier runs, one for each domain.

The paper takes their log-probabilities from inference engines; here the trainer's own forward pass
computes them, over the very rows that the student learns from, so that both see the same numerics.
"""

import itertools
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.config import ModelConfig
from glm5_jax.data.tokenizer import Tokenizer, load_tokenizer
from glm5_jax.modules.model import abstract_params
from glm5_jax.rl.batch import PolicyBatch, join, pack
from glm5_jax.rl.learner import Learner, make_scorer
from glm5_jax.rl.rollout import Trajectory
from glm5_jax.train.checkpoint import CheckpointError
from glm5_jax.train.handover import Handover

# A teacher that is an earlier stage of the same pipeline, wherever that lies now.
STAGE = 'stage:'


class Teachers:
  """The checkpoints that `wanted` names, each held once, and the scoring of what they are asked about.

  Args:
    wanted: environment -> folder of a run, or 'stage:NAME' for the folder '*_NAME' beside `run`.
    run: the folder of the run that learns.
    model: the student's, and so theirs.
    tokenizer: the student's, and so theirs.
    learner: its temperature and micro-batches hold for the teachers as well.

  Raises:
    CheckpointError: a folder is no run, has no checkpoint, or is of another model or tokenizer.
  """

  def __init__(
    self,
    wanted: Mapping[str, str],
    run: pathlib.Path,
    model: ModelConfig,
    tokenizer: Tokenizer,
    learner: Learner,
  ):
    folders = {env: folder_of(text, run) for env, text in wanted.items() if text}
    self.folders = sorted(set(folders.values()))
    self._of = {env: self.folders.index(folder) for env, folder in folders.items()}
    self.params = [_params(folder, model, tokenizer) for folder in self.folders]
    self._score = make_scorer(model, learner)
    self._micro_rows = learner.micro_rows

  def environments(self, number: int) -> list[str]:
    """What teacher `number` teaches."""
    return [env for env, teacher in self._of.items() if teacher == number]

  def batch(
    self, trajectories: Sequence[Trajectory], seq_len: int, pad_id: int, rows: int
  ) -> tuple[PolicyBatch, int]:
    """The trajectories in rows with their teachers' log-probabilities, and how many micro-batches.

    Each teacher's trajectories have rows of their own, which it alone reads.

    Args:
      trajectories: at least one.
      seq_len, pad_id: of the rows.
      rows: of the batch, the last ones empty; at least `rows_needed`.
    """
    parts, borders = [], [0]
    for number in range(len(self.folders)):
      own = [t for t in trajectories if self._of[t.env] == number]
      if own:
        parts.append(pack(own, [0.0] * len(own), seq_len, self._micro_rows, pad_id))
      borders.append(sum(len(part.tokens) for part in parts) // self._micro_rows)
    batch = join(parts, rows)
    found = jnp.zeros(batch.tokens.shape, jnp.float32)
    for params, (first, last) in zip(self.params, itertools.pairwise(borders), strict=True):
      if first < last:
        found += self._score(params, batch, jnp.int32(first), jnp.int32(last))
    return batch._replace(teacher=np.asarray(found)), borders[-1]

  def rows_needed(self, episodes: int) -> int:
    """Rows that always suffice: one an episode, and the padding of every teacher's last micro-batch."""
    whole = -(-episodes // self._micro_rows) + len(self.folders) - 1
    return whole * self._micro_rows


def folder_of(text: str, run: pathlib.Path) -> pathlib.Path:
  """The folder that a config's 'DIR' or 'stage:NAME' means for the run in `run`.

  Raises:
    CheckpointError: there is no such stage beside it.
  """
  if not text.startswith(STAGE):
    return pathlib.Path(text).expanduser().absolute()
  name = text.removeprefix(STAGE)
  found = sorted(p for p in run.parent.glob(f'[0-9]*_{name}') if p.name.partition('_')[2] == name)
  if len(found) != 1:
    raise CheckpointError(
      f'teacher {text!r}: {len(found)} folders beside {run} are called NUMBER_{name}; it stands for a'
      ' stage of the same pipeline, outside of one name the folder of a run'
    )
  return found[0]


def _params(folder: pathlib.Path, model: ModelConfig, tokenizer: Tokenizer) -> Any:
  try:
    handover = Handover(str(folder), model)
  except CheckpointError as e:
    raise CheckpointError(f'rl.teachers: {e}'.replace('init_from=', '')) from None
  theirs = load_tokenizer(folder / 'tokenizer.json')
  if theirs.fingerprint != tokenizer.fingerprint:
    raise CheckpointError(
      f'teacher {folder} has another tokenizer: its probabilities are of other tokens. Teachers and'
      ' student must descend from one pre-trained model'
    )
  _, params = handover.params(abstract_params(model))
  if any(leaf is None for leaf in jax.tree.leaves(params, is_leaf=lambda x: x is None)):
    raise CheckpointError(f'teacher {folder} has no indexers such as the student has')
  return params
