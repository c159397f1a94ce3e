"""A run of seconds for RL's tests: the tiny model over bytes, a folder to start from, a config."""

import dataclasses
import json
import pathlib
from typing import Any

import jax
import jax.numpy as jnp
import optax
from ml_collections import ConfigDict

from configs.rl_base import rl_base
from glm5_jax.data.tokenizer import ByteTokenizer
from glm5_jax.rl.learner import STAGE
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.state import TrainState
from tests import tiny

BYTES = ByteTokenizer()
CONFIG = tiny.config(vocab_size=BYTES.vocab_size)


def state(params: Any, tx: optax.GradientTransformation) -> TrainState:
  """A state that may be donated."""
  return TrainState.create(jax.tree.map(jnp.copy, params), tx, 0, STAGE)


def save(folder: pathlib.Path, params: Any, step: int = 7) -> pathlib.Path:
  """Makes `folder` what a training run might have left, and returns it."""
  folder.mkdir(parents=True, exist_ok=True)
  model = {k: v for k, v in dataclasses.asdict(CONFIG).items() if v is not None}
  (folder / 'config.json').write_text(
    json.dumps({'model': {'size': 'nano'} | model, 'data': {'tokenizer': {}}})
  )
  BYTES.save(folder)
  checkpoints = Checkpoints(folder / 'checkpoints')
  checkpoints.save(step, state(params, optax.adam(1e-3)))
  checkpoints.close()
  return folder


def model_section(config: ConfigDict) -> None:
  """Sets `config.model` to the tiny model."""
  config.model.size = 'nano'
  for key, value in dataclasses.asdict(CONFIG).items():
    if key in config.model and value not in ((), None):
      config.model[key] = value


def play_section(section: ConfigDict) -> None:
  """Sets an `rl` section's episodes and engine to sizes that the tiny model plays in seconds."""
  section.environments = ('code', 'math')
  section.eval_tasks = 3
  section.episode.max_tokens = 448
  section.episode.max_turn_tokens = 8
  section.engine.pages, section.engine.max_sequences = 300, 8
  section.engine.batch_buckets, section.engine.prefill_buckets = (8,), (64,)
  section.engine.max_step_tokens, section.engine.page_buckets = 256, (28,)
  section.engine.compiler_options = tuple(tiny.FAST_COMPILE.items())


def config(start_from: pathlib.Path | str) -> ConfigDict:
  """Four updates of two groups of four."""
  c = rl_base()
  model_section(c)
  c.init_from = str(start_from)
  play_section(c.rl)
  c.rl.groups, c.rl.group_size = 2, 4
  c.rl.seq_len, c.rl.micro_rows = 448, 2
  c.rl.policy.objective = 'double_sided'
  c.train.steps = 4
  c.eval.every = 2
  c.checkpoint.every = 1
  return c
