"""One small model and one geometry of the engine, so that its programs are compiled once."""

import dataclasses

import jax
import numpy as np
import pytest

from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import EngineConfig
from tests import tiny

MAX_LENGTH = 48
SIZES = EngineConfig(
  page_size=4, pages=25, max_length=MAX_LENGTH, max_sequences=4, max_step_tokens=12,
  prefill_buckets=(8,), batch_buckets=(1, 4), page_buckets=(4, 12),
  compiler_options=tuple(tiny.FAST_COMPILE.items()),
)  # fmt: skip


class Letters:
  """A tokenizer whose token i is the i-th letter."""

  def decode(self, ids) -> str:
    return ''.join(chr(ord('A') + i) for i in ids)


class Model:
  """The model, engines of it, and what its training forward pass says."""

  def __init__(self):
    # One kind of layer compiles in half the time of two.
    self.config = tiny.config(first_k_dense_replace=0)
    self.params = tiny.random_params(self.config)
    self.other_params = tiny.random_params(self.config, seed=1)

  def engine(self, params=None, **changes) -> Engine:
    params = self.params if params is None else params
    return Engine(params, self.config, Letters(), dataclasses.replace(SIZES, **changes))

  def prompt(self, length: int, seed: int = 0) -> list[int]:
    return tiny.tokens(self.config, 1, length, seed)[0].tolist()

  def logits(self, ids, params=None) -> np.ndarray:
    """[len(ids), V] float64 of the forward pass without a cache, which training runs."""
    padded = np.zeros((1, MAX_LENGTH), np.int32)
    padded[0, : len(ids)] = ids
    out = tiny.forward(self.params if params is None else params, padded, self.config)
    return np.asarray(out.logits[0, : len(ids)], np.float64)

  def raw_logprobs(self, prompt, ids, params=None) -> np.ndarray:
    logits = self.logits([*prompt, *ids], params)[len(prompt) - 1 : -1]
    return log_softmax(logits)[np.arange(len(ids)), ids]


def log_softmax(logits: np.ndarray) -> np.ndarray:
  top = logits.max(-1, keepdims=True)
  return logits - top - np.log(np.exp(logits - top).sum(-1, keepdims=True))


@pytest.fixture(scope='session')
def model() -> Model:
  return Model()


@pytest.fixture
def engine(model):
  """An engine that the test must leave without a leaked page."""
  engine = model.engine()
  yield engine
  no_leaks(engine)


def no_leaks(engine: Engine) -> None:
  for sequence in engine._scheduler.sequences():
    engine.cancel(sequence.request_id)
  engine.clear_prefix_cache()
  allocator = engine._scheduler.allocator
  assert allocator.used == 0
  assert sorted(allocator._free) == list(range(1, allocator.pages))
  assert not allocator._references.any()


class Lowerings:
  """Counts the programs that JAX lowers for compilation, in all of the process."""

  def __init__(self):
    self.count = 0

  def __call__(self, event: str, duration: float, **kwargs) -> None:
    del duration, kwargs
    self.count += event == '/jax/core/compile/jaxpr_to_mlir_module_duration'


@pytest.fixture(scope='session')
def lowerings() -> Lowerings:
  counter = Lowerings()
  jax.monitoring.register_event_duration_secs_listener(counter)
  return counter
