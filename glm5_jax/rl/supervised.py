"""Supervised fine-tuning (section 3.1) and what came of it: the model plays the tasks it was shown.

The training is that of train/loop.py. A config whose `rl` section says how episodes are played is run
from here: when the training is over, the held-out conversations are scored category by category, and
the model before and after plays held-out tasks.
"""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax

from glm5_jax import data
from glm5_jax.data.tokenizer import load_tokenizer
from glm5_jax.infer.engine import Engine
from glm5_jax.modules.model import abstract_params
from glm5_jax.rl import report
from glm5_jax.rl.evaluation import check_prompts, play_held_out, said, scores
from glm5_jax.rl.prepare import Play, prepare_play
from glm5_jax.rl.rollout import save_episodes
from glm5_jax.train import loop, result, workdir
from glm5_jax.train import prepare as train_prepare
from glm5_jax.train.checkpoint import CheckpointError
from glm5_jax.train.evaluate import evaluate
from glm5_jax.train.handover import Handover, saved_tokenizer
from glm5_jax.train.step import make_eval_step


def prepare(config: Mapping[str, Any]) -> train_prepare.Parts:
  """The parts of the training.

  Raises:
    ConfigError: a value is impossible, of the episodes as well.
  """
  _prepare_play(config)
  return train_prepare.prepare(config)


def train(config: Mapping[str, Any], folder: str, *, command: str = '') -> int:
  """Trains, or goes on with what `folder` holds, then measures. As `glm5_jax.train.loop.train`."""
  parts, how = prepare(config), _prepare_play(config)
  tokenizer = pathlib.Path(config['init_from'] or folder).expanduser() / 'tokenizer.json'
  if tokenizer.exists():
    check_prompts(how, load_tokenizer(tokenizer))
  status = loop.train(config, folder, command=command)
  path = pathlib.Path(folder).expanduser().absolute()
  if status or not result.is_finished(path, config['train']['steps']):
    return status
  with workdir.claim(folder, train_prepare.plain(config)):
    _measure(config, parts, how, path)
  return 0


def _prepare_play(config: Mapping[str, Any]) -> Play:
  try:
    return prepare_play(config)
  except (ValueError, TypeError) as e:
    raise train_prepare.ConfigError(str(e)) from None


def _measure(
  config: Mapping[str, Any], parts: train_prepare.Parts, how: Play, path: pathlib.Path
) -> None:
  """Adds to the finished run's result.json and report.md."""
  tokenizer = load_tokenizer(path / 'tokenizer.json')
  model = train_prepare.fit_to_tokenizer(parts.model, tokenizer)
  _, params = Handover(str(path), model).params(abstract_params(model))
  losses = _losses(config, parts, path, params)
  before = None
  first = _params_before(config['init_from'], model)
  engine = Engine(params if first is None else first, model, tokenizer, how.engine)
  print(f'playing held-out tasks; engine: {engine.sizes}; compiling', flush=True)
  engine.warm_up()
  if first is not None:
    before = scores(play_held_out(engine, tokenizer, how))
    engine.update_weights(params, 1)
  played = play_held_out(engine, tokenizer, how)
  after = scores(played)
  print(said(after), flush=True)
  save_episodes(path, 'held_out', played)
  found = result.task_scores(before, after)
  report.add_tasks(path, losses, found)
  categories = {name: {'documents': n, 'loss': loss} for name, (n, loss) in losses.items()}
  fields = (result.read(path) or {}) | {'categories': categories, 'tasks': found}
  result.write_fields(path, **fields)


def _losses(
  config: Mapping[str, Any], parts: train_prepare.Parts, path: pathlib.Path, params: Any
) -> dict[str, tuple[int, float]]:
  """Source -> held-out documents, and their loss in nats per learnt token."""
  tokenizer = saved_tokenizer(path, config['data']['tokenizer'])
  settings = dataclasses.replace(parts.data, tokenizer=tokenizer)
  corpus = data.load_corpus(
    train_prepare.with_demonstrations(settings, config['demonstrations'], path)
  )
  model = train_prepare.fit_to_tokenizer(parts.model, corpus.tokenizer)
  eval_step = make_eval_step(model, parts.objective, recall=False)
  losses = {}
  for part in corpus.validation:
    alone = dataclasses.replace(corpus, validation=(part,))
    held_out = data.make_eval_batches(alone, overlap=config['eval']['overlap'])
    loss = evaluate(eval_step, params, held_out).loss
    losses[part.source.name] = (len(part.documents), loss)
  return losses


def _params_before(folder: str, model: Any) -> Any:
  """The parameters that the run started from; None if that folder is gone, or lacks the indexers."""
  try:
    _, params = Handover(folder, model).params(abstract_params(model))
  except CheckpointError:
    return None
  complete = all(x is not None for x in jax.tree.leaves(params, is_leaf=lambda x: x is None))
  return params if complete else None
