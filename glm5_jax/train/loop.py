"""THE training loop: from a config and a folder to a trained model and a report.

Read it top to bottom. The mathematics of a step is in step.py; everything here is about running it:
the host never waits for the step it has just started, and whatever happens (a crash, a kill, a full
disk, numbers that stop being finite) the folder stays in a state from which the run continues.
"""

import itertools
import json
import time
from collections import deque
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple, cast

import jax
import numpy as np

from glm5_jax import config as model_configs
from glm5_jax import data
from glm5_jax.modules.model import init_params
from glm5_jax.optim.build import build
from glm5_jax.train import flops, report, workdir
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.compile import jit_once
from glm5_jax.train.evaluate import evaluate
from glm5_jax.train.metrics import MetricsWriter, StepRecord
from glm5_jax.train.progress import ProgressLine
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import Objective, make_eval_step, make_train_step
from glm5_jax.train.summary import Run, count_params


class ConfigError(ValueError):
  """The config asks for something impossible. The message is for people."""


def train(config: Mapping[str, Any], folder: str, *, command: str = '') -> int:
  """Trains to the end, or resumes what `folder` holds; writes report.md in any case.

  Args:
    config: sections as in configs/base.py.
    folder: the run's folder, see workdir.py.
    command: what a person typed, for the report.

  Returns:
    Exit status: 0 finished or stopped on request, 1 stopped because numbers stopped being finite.

  Raises:
    ConfigError, DataError, WorkdirError, CheckpointError: with messages for people.
  """
  started = time.monotonic()
  # --- What to run: whatever a person can get wrong in it is found before anything is written ---
  model, objective, (tx, schedule), data_config = prepare(config)
  steps = config['train']['steps']

  with workdir.claim(folder, plain(config)) as path, workdir.StopRequest() as stop:
    # --- Data: an endless resumable iterator, and the held-out files ---
    corpus = data.load_corpus(data_config)
    corpus.tokenizer.save(path)
    model = _fit_to_tokenizer(model, corpus.tokenizer)
    batches = data.make_train_iterator(corpus)
    held_out = data.make_eval_batches(corpus, overlap=config['eval']['overlap'])
    sample = held_out.batches[: config['eval']['batches']]
    print(f'data: {corpus.report}', flush=True)

    # --- State: the newest usable checkpoint, or a new one ---
    def init() -> TrainState:
      params = init_params(model, jax.random.key(config['seed']))
      return TrainState.create(params, tx, config['seed'])

    keep = config['checkpoint']
    checkpoints = Checkpoints(
      path / 'checkpoints', keep_last=keep['keep_last'], keep_best=keep['keep_best']
    )
    restored = checkpoints.restore(jax.eval_shape(init)) if checkpoints.steps() else None
    if restored:
      state, step = restored.state, restored.step
      batches.set_state(restored.data)
      print(f'resuming {path} from step {step}', flush=True)
    else:
      state, step = jit_once(init)(), 0
    best = checkpoints.best_value()
    print(f'model: {_describe(model, state.params)}; compiling', flush=True)

    # --- Compile, once: a compiled function, unlike a jitted one, cannot recompile ---
    upcoming = _prefetched(batches, model)
    first = next(upcoming)
    clock = time.monotonic()
    jitted = cast(jax.stages.Wrapped, make_train_step(model, objective, tx, schedule))
    train_step = jitted.lower(state, first.arrays).compile()
    compile_seconds = time.monotonic() - clock
    eval_step = make_eval_step(model, objective)
    mtp_fraction = objective.mtp_rows(first.arrays) / len(first.arrays['tokens'])
    upcoming = itertools.chain([first], upcoming)

    # --- The loop ---
    reason, evaluation = '', None
    with MetricsWriter(path, step) as writer, ProgressLine(steps, step) as progress:
      record = StepRecord(writer, progress, steps, config['log']['every'], int(state.skipped))
      while step < steps and not reason:
        batch = next(upcoming)
        state, step_metrics = train_step(state, batch.arrays)
        step += 1
        work = flops.train_flops(
          model, batch.tokens, batch.pairs, objective.mtp_steps, mtp_fraction
        )
        record.add(step, step_metrics, work)  # Looks at the step before, so it need not wait.

        # Evaluate.
        evaluation = None
        if step % config['eval']['every'] == 0 or step == steps:
          record.flush()
          evaluation = evaluate(eval_step, state.params, held_out, sample)
          record.evaluation(step, evaluation)

        # Stop?
        if record.skips_in_a_row >= config['train']['max_consecutive_skips']:
          reason = f'{record.skips_in_a_row} steps in a row were not finite'
          break  # The last checkpoint is the last good one: keep it.
        if stop:
          reason = stop.reason
        elif step < steps and _is_over(config['train']['max_minutes'], started):
          reason = f'train.max_minutes={config["train"]["max_minutes"]:g} are over'

        # Save.
        is_best = evaluation is not None and evaluation.loss < best and keep['keep_best'] > 0
        if is_best or reason or step == steps or step % keep['every'] == 0:
          best = min(best, evaluation.loss) if evaluation else best
          record.flush()
          writer.sync()
          row = evaluation.row() if evaluation else None
          checkpoints.save(step, state, data=batch.state_after, metrics=row)
          record.pause()
      record.flush()
    checkpoints.close()

    # --- The report ---
    run = Run(
      path=path, config=plain(config), command=command, model=model, corpus=corpus, step=step,
      stopped=reason, compile_seconds=compile_seconds, mtp_steps=objective.mtp_steps,
      parameters=count_params(state.params),
    )  # fmt: skip
    if not stop:  # Whoever sent a signal is waiting: then leave out what takes long.
      run = run.measured(state.params, evaluate(eval_step, state.params, held_out), held_out)
    print(report.write(run), flush=True)
    if reason:
      saved = checkpoints.steps()
      print(
        f'stopped at step {step}: {reason}. '
        + (f'Run the same command again to resume from step {saved[-1]}.' if saved else ''),
        flush=True,
      )
  return 1 if 'not finite' in reason else 0


class Fetched(NamedTuple):
  """A batch on its way to the device, and what the host wants to know about it."""

  arrays: dict[str, jax.Array]
  tokens: int
  pairs: flops.Pairs
  state_after: dict[str, Any]  # Of the iterator: where the next batch comes from.


def _prefetched(batches: data.TrainIterator, model: model_configs.ModelConfig) -> Iterator[Fetched]:
  """Batches in order, one transfer ahead. (A thread of Grain's makes them further ahead still.)"""
  topk = model.index_topk if model.sparse_attention else None
  queue: deque[Fetched] = deque()
  for batch in batches:
    positions, used = batch['positions'], batch['weights']
    if 'prefix' in batch:  # Infilling: Part A is work as well, though it has no targets.
      used = batch['segment_ids']
      positions = flops.infilling_positions(used, batch['prefix'])
    pairs = flops.count_pairs(positions, used, topk)
    tokens = int(np.count_nonzero(used))
    queue.append(Fetched(jax.device_put(batch), tokens, pairs, batches.get_state()))
    if len(queue) > 1:
      yield queue.popleft()


def build_model_config(section: Mapping[str, Any]) -> model_configs.ModelConfig:
  """The ModelConfig that a config's `model` section means: a size, and every field that is set.

  Raises:
    ValueError: an unknown size or an impossible combination.
  """
  changes = {k: v for k, v in section.items() if k != 'size' and v is not None}
  if isinstance(changes.get('rope_scaling'), Mapping):
    changes['rope_scaling'] = model_configs.Yarn(**changes['rope_scaling'])
  return model_configs.from_size(section['size'], **changes)


def _fit_to_tokenizer(model: model_configs.ModelConfig, tokenizer: data.Tokenizer):
  if tokenizer.vocab_size > model.vocab_size:
    raise ConfigError(
      f'the tokenizer has {tokenizer.vocab_size} tokens and the model an embedding of'
      f' {model.vocab_size}: set --config.model.vocab_size={tokenizer.vocab_size} or more'
    )
  return model if model.eos_token_id else model.replace(eos_token_id=(tokenizer.eot_id,))


def prepare(config: Mapping[str, Any]):
  """The parts of a run that depend on the config alone.

  Raises:
    ConfigError: a value is impossible.
  """
  positive = (
    ('train', 'steps'), ('train', 'grad_accum'), ('train', 'max_consecutive_skips'),
    ('eval', 'every'), ('eval', 'batches'), ('checkpoint', 'every'), ('checkpoint', 'keep_last'),
    ('log', 'every'),
  )  # fmt: skip
  for section, key in positive:
    if config[section][key] < 1:
      raise ConfigError(f'{section}.{key}={config[section][key]} must be at least 1')
  rows, micro = config['data']['batch_size'], config['train']['grad_accum']
  if rows % micro:
    raise ConfigError(f'train.grad_accum={micro} must divide data.batch_size={rows}')
  if config['data'].get('objective') == 'infilling' and config['train']['mtp_steps']:
    raise ConfigError(
      "data.objective='infilling' hides tokens out of order, which MTP steps cannot predict: set"
      ' train.mtp_steps=0'
    )
  try:
    return (
      build_model_config(config['model']),
      Objective.from_config(config['train']),
      build(config['optim'], config['train']['steps']),
      data.DataConfig.from_mapping(config['data']),
    )
  except (ValueError, TypeError) as e:
    raise ConfigError(str(e)) from e


def _is_over(minutes: float | None, started: float) -> bool:
  return minutes is not None and 0 < 60 * minutes < time.monotonic() - started


def _describe(model: model_configs.ModelConfig, params: Any) -> str:
  main, mtp = count_params(params)
  return (
    f'{main / 1e6:.2f}M parameters (+{mtp / 1e6:.2f}M MTP), {flops.matmul_params(model) / 1e6:.2f}M of'
    f' them used per token; {model.num_hidden_layers} layers, {model.n_routed_experts} experts,'
    f' {model.dtype}'
  )


def plain(config: Mapping[str, Any]) -> dict[str, Any]:
  """The config as JSON-able dicts and lists."""
  to_dict = getattr(config, 'to_dict', None)
  return json.loads(json.dumps(to_dict() if to_dict else config, default=list))
