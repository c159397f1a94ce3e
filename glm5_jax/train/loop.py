"""THE training loop: from a config and a folder to a trained model and a report.

Read it top to bottom. The mathematics of a step is in step.py, what a stage of the recipe trains in
stages.py; everything here is about running it: the host never waits for the step it has just started,
and whatever happens (a crash, a kill, a full disk, numbers that stop being finite) the folder stays in a
state from which the run continues. With several processes (distributed.py) all of them run this, and
the first one writes.
"""

import dataclasses
import itertools
import pathlib
import time
from collections.abc import Mapping
from typing import Any, cast

import jax

from glm5_jax import config as model_configs
from glm5_jax import data
from glm5_jax.modules.model import abstract_params, init_params
from glm5_jax.train import distributed, flops, report, result, workdir
from glm5_jax.train.batches import prefetched
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.evaluate import evaluate
from glm5_jax.train.handover import Handover, saved_tokenizer
from glm5_jax.train.metrics import MetricsWriter, StepRecord
from glm5_jax.train.placement import Placement
from glm5_jax.train.prepare import ConfigError as ConfigError
from glm5_jax.train.prepare import (
  fit_to_tokenizer,
  plain,
  prepare,
  prepare_mesh,
  with_demonstrations,
)
from glm5_jax.train.progress import ProgressLine
from glm5_jax.train.stages import merge
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import make_eval_step, make_train_step
from glm5_jax.train.summary import Run, count_params


def train(config: Mapping[str, Any], folder: str, *, command: str = '') -> int:
  """Trains to the end, or resumes what `folder` holds; writes report.md in any case.

  Args:
    config: sections as in configs/base.py.
    folder: the run's folder, see workdir.py.
    command: what a person typed, for the report.

  Returns:
    Exit status: 0 finished or stopped on request, 1 stopped because numbers stopped being finite or
    a buffer was too small.

  Raises:
    ConfigError, DataError, WorkdirError, CheckpointError, ProcessError: with messages for people.
  """
  started = time.monotonic()
  # --- What to run: whatever a person can get wrong in it is found before anything is written ---
  model, objective, (tx, schedule), data_config, plan = parts = prepare(config)
  mesh = prepare_mesh(config, parts)
  place = Placement(mesh, plan.micro_batches)
  steps, keep = config['train']['steps'], config['checkpoint']
  path = pathlib.Path(folder).expanduser().absolute()
  checkpoints = Checkpoints(
    path / 'checkpoints', keep_last=keep['keep_last'], keep_best=keep['keep_best']
  )
  # A run that has begun needs the one before it no longer, wherever that is now.
  before, tokenizer = None, data_config.tokenizer
  if config['init_from'] and checkpoints.steps():
    tokenizer = saved_tokenizer(path, config['data']['tokenizer'])
  elif config['init_from']:
    before = Handover(config['init_from'], model)
    tokenizer = before.tokenizer(config['data']['tokenizer'])
  data_config = dataclasses.replace(data_config, tokenizer=tokenizer)

  with (
    distributed.claim(folder, plain(config)),
    distributed.output() as out,
    workdir.StopRequest() as stop,
  ):
    # --- Data: an endless resumable iterator, and the held-out files ---
    with distributed.first_before_others():
      corpus = data.load_corpus(with_demonstrations(data_config, config['demonstrations'], path))
    if distributed.is_first():
      corpus.tokenizer.save(path)
    model = fit_to_tokenizer(model, corpus.tokenizer)
    read = dataclasses.replace(corpus.config, batch_size=plan.rows_per_read)
    rows = place.rows_read(plan)
    batches = data.make_train_iterator(dataclasses.replace(corpus, config=read), rows=rows)
    distributed.check_same('data', batches.get_state())
    held_out = data.make_eval_batches(corpus, overlap=config['eval']['overlap'])
    sample = held_out.batches[: config['eval']['batches']]
    print(f'data: {corpus.report}', file=out, flush=True)

    # --- State: the newest usable checkpoint, or the parameters of the stage before, or new ones ---
    def init_model() -> Any:
      return init_params(model, jax.random.key(config['seed']))

    def init(params: Any) -> TrainState:
      return TrainState.create(params, tx, config['seed'], objective.stage)

    abstract_state = place.abstract(jax.eval_shape(lambda: init(init_model())))
    restored = checkpoints.restore(abstract_state)
    if restored:
      state, step = restored.state, restored.step
      batches.set_state(restored.data)
      print(f'resuming {path} from step {step}', file=out, flush=True)
    else:
      params, step = place.make(init_model), 0
      if before:
        number, taken = before.params(place.abstract(abstract_params(model)))
        params = merge(taken, params)
        print(f'starting from step {number} of {before.folder}', file=out, flush=True)
      state = place.make(init, params)
    best = checkpoints.best_value()
    print(f'model: {_describe(model, state.params)}; compiling', file=out, flush=True)

    # --- Compile, once: a compiled function, unlike a jitted one, cannot recompile ---
    upcoming = prefetched(batches, plan, step, place.batch)
    first = next(upcoming)
    clock = time.monotonic()
    jitted = cast(jax.stages.Wrapped, make_train_step(model, objective, tx, schedule, mesh))
    with place.context():
      train_step = jitted.lower(state, first.arrays).compile()
    compile_seconds = time.monotonic() - clock
    eval_step = place.eval_step(make_eval_step(model, objective, mesh=mesh))
    mtp_fraction = objective.mtp_rows(place.rows(plan)) / place.rows(plan)
    share = len(rows) / plan.rows_per_read
    upcoming = itertools.chain([first], upcoming)

    # --- The loop ---
    minutes = config['train']['max_minutes']
    reasons = ['', 'SIGTERM', 'Ctrl-C', f'train.max_minutes={minutes or 0:g} are over']
    votes = distributed.Votes()
    reason, evaluation = '', None
    with (
      MetricsWriter(path if distributed.is_first() else None, step) as writer,
      ProgressLine(steps, step, stream=out) as progress,
    ):
      record = StepRecord(writer, progress, steps, config['log']['every'], int(state.skipped))
      while step < steps and not reason:
        batch = next(upcoming)
        state, step_metrics = train_step(state, batch.arrays)
        step += 1
        work = flops.train_flops(
          model, batch.tokens, batch.pairs, objective.mtp_steps, mtp_fraction, objective.stage
        )
        work = round(work / share)  # The other processes' rows are taken to be like these.
        record.add(step, step_metrics, work)  # Looks at the step before, so it need not wait.

        # Evaluate.
        evaluation = None
        if step % config['eval']['every'] == 0 or step == steps:
          record.flush()
          evaluation = evaluate(eval_step, state.params, held_out, sample)
          record.evaluation(step, evaluation)

        # Stop?
        if record.overflow and model.expert_overflow == 'error':
          reason = (
            f'a device had no room for {record.overflow} tokens of its experts, so numbers would be'
            f' wrong: raise model.expert_capacity={model.expert_capacity:g} (0: room for every load)'
          )
          break
        if record.skips_in_a_row >= config['train']['max_consecutive_skips']:
          reason = f'{record.skips_in_a_row} steps in a row were not finite'
          break  # The last checkpoint is the last good one: keep it.
        wish = stop.reason or ''
        if not wish and step + votes.delay < steps and _is_over(minutes, started):
          wish = reasons[-1]
        reason = reasons[votes.highest(reasons.index(wish))]

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
      stopped=reason, compile_seconds=compile_seconds, objective=objective,
      parameters=count_params(state.params),
    )  # fmt: skip
    # Whoever sent a signal is waiting: then leave out what takes long.
    if not any(distributed.gather(stop.reason or '')):
      evaluation = evaluate(eval_step, state.params, held_out)
      run = run.measured(state.params, evaluation, held_out, place)
    if distributed.is_first():
      print(report.write(run), flush=True)
      result.write(run, minutes=(time.monotonic() - started) / 60)
    if reason:
      saved = checkpoints.steps()
      print(
        f'stopped at step {step}: {reason}. '
        + (f'Run the same command again to resume from step {saved[-1]}.' if saved else ''),
        file=out,
        flush=True,
      )
    distributed.gather('')  # Nobody leaves before the report is there.
  return 1 if 'not finite' in reason or 'no room' in reason else 0


def _is_over(minutes: float | None, started: float) -> bool:
  return minutes is not None and 0 < 60 * minutes < time.monotonic() - started


def _describe(model: model_configs.ModelConfig, params: Any) -> str:
  main, mtp = count_params(params)
  return (
    f'{main / 1e6:.2f}M parameters (+{mtp / 1e6:.2f}M MTP), {flops.matmul_params(model) / 1e6:.2f}M of'
    f' them used per token; {model.num_hidden_layers} layers, {model.n_routed_experts} experts,'
    f' {model.dtype}'
  )
