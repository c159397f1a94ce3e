"""What the parts measure with: the model, engines, prompts, and tables."""

import json
import pathlib
import statistics
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.hf_cpu import CONFIG
from glm5_jax.compile import jit_once
from glm5_jax.config import ModelConfig
from glm5_jax.data import Tokenizer, load_tokenizer
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.infer.request import Output, Request
from glm5_jax.modules.model import abstract_params, init_params
from glm5_jax.train.handover import Handover
from glm5_jax.train.prepare import build_model_config, fit_to_tokenizer
from glm5_jax.train.stages import STAGES, resolve

__all__ = ['CONFIG', 'Model', 'Timed', 'engine', 'loaded', 'markdown', 'median', 'random_model',
           'random_prompts', 'timed', 'turns']  # fmt: skip


class Model(NamedTuple):
  """Weights, the config they belong to, and a tokenizer where the weights are trained."""

  config: ModelConfig
  params: Any
  tokenizer: Tokenizer | None = None


class Timed(NamedTuple):
  """What requests gave, and how long they took together."""

  seconds: float
  outputs: list[list[Output]]
  stats: dict[str, float]  # What the engine's counters gained.

  @property
  def ids(self) -> list[list[int]]:
    return [output.ids for outputs in self.outputs for output in outputs]

  @property
  def tokens_per_second(self) -> float:
    return sum(map(len, self.ids)) / self.seconds


def random_model(config: ModelConfig = CONFIG, **changes: Any) -> Model:
  """Random weights, always the same ones for a config."""
  config = config.replace(**changes)
  return Model(config, jit_once(lambda key: init_params(config, key))(jax.random.key(0)))


def loaded(folder: pathlib.Path) -> Model:
  """The newest checkpoint of a training run, with the tokenizer it was trained with."""
  settings = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  tokenizer = load_tokenizer(folder)
  config = build_model_config(settings['model'])
  if settings.get('stage') in STAGES:
    config, _ = resolve(settings['stage'], config, settings['model'].get('sparse_attention'))
  config = fit_to_tokenizer(config, tokenizer)
  _, params = Handover(str(folder), config).params(abstract_params(config))
  return Model(config, params, tokenizer)


def engine(model: Model, sizes: EngineConfig) -> Engine:
  """An engine that is compiled."""
  made = Engine(model.params, model.config, model.tokenizer, sizes)
  made.warm_up()
  return made


def random_prompts(config: ModelConfig, count: int, length: int, seed: int = 0) -> list[list[int]]:
  """`count` prompts of `length` token ids."""
  rng = np.random.default_rng(seed)
  return rng.integers(0, config.vocab_size, (count, length)).tolist()


def timed(engine: Engine, requests: Iterable[Request]) -> Timed:
  """Runs requests to their end."""
  before = engine.stats()
  start = time.perf_counter()
  outputs = engine.run(requests)
  seconds = time.perf_counter() - start
  after = engine.stats()
  return Timed(seconds, outputs, {k: after[k] - before[k] for k in after})


def turns(sides: Mapping[Any, Callable[[], Any]], repeats: int) -> dict[Any, list[Any]]:
  """Runs each side once for nothing, then in turns: whatever else the machine does hits all."""
  for run in sides.values():
    run()
  results: dict[Any, list[Any]] = {name: [] for name in sides}
  for _ in range(repeats):
    for name, run in sides.items():
      results[name].append(run())
  return results


def median(values: Iterable[float]) -> float:
  """Of several measurements of the same."""
  return statistics.median(values)


def markdown(head: Sequence[str], body: Iterable[Sequence[Any]]) -> str:
  """A table; numbers are given with three digits, whole ones with all."""

  def cell(value: Any) -> str:
    if isinstance(value, float):
      return f'{value:.0f}' if abs(value) >= 100 else f'{value:.3g}'
    return str(value)

  lines = [head, ['---'] * len(head), *([cell(v) for v in row] for row in body)]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)
