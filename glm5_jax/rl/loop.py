"""THE loop of reinforcement learning: play, judge, compare, update, hand over the weights. Repeat.

Reasoning RL (section 3.2) compares the episodes of a group by their rewards; distillation (section 3.5,
eq. 2) compares every token of an episode with what a teacher would have said. All else is the same.

Synchronous and fully on-policy: every update learns from episodes of the weights before it, which are
then pushed to the engine and compared by checksum. What a step plays depends on its number, the seed and
the weights alone, so a run that was killed continues as if it had not been, and a run's folder replays.

The folder has what a training run's has, and rollouts/STEP.jsonl: every episode with its tokens,
log-probabilities, weight versions, messages and reward.
"""

import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.compile import jit_once
from glm5_jax.data.tokenizer import load_tokenizer
from glm5_jax.infer.engine import Engine, weights_checksum
from glm5_jax.modules.model import abstract_params
from glm5_jax.rl import filters, report, supervised, tasks
from glm5_jax.rl.batch import PolicyBatch, join, pack
from glm5_jax.rl.evaluation import by_environment, check_prompts, evaluate, said
from glm5_jax.rl.learner import STAGE, make_policy_step
from glm5_jax.rl.prepare import Parts, prepare_rl
from glm5_jax.rl.rollout import Trajectory, groups, play, save_episodes
from glm5_jax.rl.teachers import Teachers
from glm5_jax.train import metrics, pipeline, result, workdir
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.handover import Handover
from glm5_jax.train.metrics import MetricsWriter
from glm5_jax.train.prepare import fit_to_tokenizer, plain
from glm5_jax.train.progress import ProgressLine
from glm5_jax.train.state import TrainState


def prepare(config: Mapping[str, Any]) -> Any:
  """The parts of a run: `Parts`, or train/prepare.py's of a supervised one.

  Raises:
    ConfigError: a value is impossible.
  """
  return supervised.prepare(config) if config['stage'] == 'sft' else prepare_rl(config)


def train(config: Mapping[str, Any], folder: str, *, command: str = '') -> int:
  """Trains to the end, or resumes what `folder` holds; writes report.md and result.json in any case.

  A config of stage 'sft' has an `rl` section as well, which says how its model is measured on tasks:
  that is rl/supervised.py.

  Arguments, result and errors as `glm5_jax.train.loop.train`.
  """
  if config['stage'] == 'sft':
    return supervised.train(config, folder, command=command)
  clock = time.monotonic()
  parts = prepare_rl(config)
  rl, steps, keep = config['rl'], config['train']['steps'], config['checkpoint']
  path = pathlib.Path(folder).expanduser().absolute()
  checkpoints = Checkpoints(
    path / 'checkpoints', keep_last=keep['keep_last'], keep_best=keep['keep_best'],
    best_metric='eval/error',
  )  # fmt: skip
  resume = bool(checkpoints.steps())
  before = None if resume else Handover(config['init_from'], parts.model)

  with workdir.claim(folder, plain(config)), workdir.StopRequest() as stop:
    # --- Tokenizer, state, teachers, engine ---
    if before:
      load_tokenizer(before.folder / 'tokenizer.json').save(path)
    tokenizer = load_tokenizer(path / 'tokenizer.json')
    model = fit_to_tokenizer(parts.model, tokenizer)
    teachers = None
    if parts.advantage is None:
      teachers = Teachers(rl['teachers'], path, model, tokenizer, parts.learner)

    def init(params: Any) -> TrainState:
      return TrainState.create(params, parts.tx, config['seed'], STAGE)

    if before:
      number, params = before.params(abstract_params(model))
      print(f'starting from step {number} of {before.folder}', flush=True)
      state, step = jit_once(init)(params), 0
    else:
      restored = checkpoints.restore(jax.eval_shape(init, abstract_params(model)))
      assert restored is not None
      state, step = restored.state, restored.step
      print(f'resuming {path} from step {step}', flush=True)
    check_prompts(parts.play, tokenizer)
    engine = Engine(state.params, model, tokenizer, parts.play.engine, version=step)
    print(f'engine: {engine.sizes}; compiling', flush=True)
    engine.warm_up()
    policy_step = make_policy_step(model, parts.learner, parts.tx)
    keep_group = filters.Filter(rl['group_size'], drop_equal=teachers is None)

    # --- The loop ---
    reason, row = '', {}
    with (
      MetricsWriter(path, step) as writer,
      ProgressLine(steps, step, value='reward') as progress,
    ):
      if not step:
        row = evaluate(engine, tokenizer, parts.play)
        progress.note(said(row))
        if teachers:
          row |= _measured_teachers(teachers, engine, tokenizer, parts)
          if engine.version != step:
            engine.update_weights(state.params, step)
        writer.write(0, row)
      while step < steps and not reason:
        # Play.
        started = time.monotonic()
        jobs = tasks.jobs_of_step(
          parts.environments, step, rl['groups'], rl['group_size'], config['seed']
        )
        played = play(engine, tokenizer, jobs, parts.play.settings)
        generation_seconds = time.monotonic() - started
        # Filter, compare, update.
        started = time.monotonic()
        verdicts = [keep_group(g, step) for g in groups(played).values()]
        batch = _batch(verdicts, parts, rl, tokenizer.eot_id, teachers)
        found: dict[str, Any] = {}
        if batch is not None:
          arrays, filled = batch
          state, step_metrics = policy_step(state, arrays, jnp.int32(filled))
          found = jax.device_get(step_metrics)
        step += 1
        engine.update_weights(state.params, step, checksum=weights_checksum(state.params))
        training_seconds = time.monotonic() - started
        # Record.
        save_episodes(path, f'{step:06d}', played)
        row = _row(played, verdicts, found, generation_seconds, training_seconds)
        writer.write(step, row)
        progress.update(step, row['reward'], row['tokens_per_second'])
        if step % config['eval']['every'] == 0 or step == steps:
          evaluation = evaluate(engine, tokenizer, parts.play)
          writer.write(step, evaluation)
          progress.note(said(evaluation))
        else:
          evaluation = None
        if stop:
          reason = stop.reason or ''
        if reason or evaluation or step % keep['every'] == 0:
          writer.sync()
          checkpoints.save(step, state, metrics=evaluation)
    checkpoints.close()
  print(report.write(path, plain(config), command, reason), flush=True)
  measured = [r for r in metrics.read(path / 'metrics.jsonl') if 'eval/accuracy' in r]
  result.write_fields(
    path, step=step, stopped=reason, minutes=round((time.monotonic() - clock) / 60, 2),
    tasks=result.task_scores(measured[0], measured[-1]),
  )  # fmt: skip
  if reason:
    print(f'stopped at step {step}: {reason}. Run the same command again to resume.', flush=True)
  return 0


pipeline.LOOPS['rl'] = pipeline.Loop(
  prepare,
  lambda *args, **kwargs: train(*args, **kwargs),
  lambda folder, steps: result.is_finished(folder, steps, 'tasks'),
)


def _measured_teachers(
  teachers: Teachers, engine: Engine, tokenizer: Any, parts: Parts
) -> dict[str, float]:
  """eval/teacher/NAME: the greedy accuracy of each environment's teacher. Leaves the last one's weights."""
  row: dict[str, float] = {}
  for number, params in enumerate(teachers.params):
    own = [e for e in parts.play.environments if e.name in teachers.environments(number)]
    if own:
      engine.update_weights(params, -1 - number)
      found = evaluate(engine, tokenizer, parts.play._replace(environments=own))
      row |= {f'eval/teacher/{k}': v for k, v in by_environment(found, 'eval/accuracy').items()}
  return row


def _batch(
  verdicts: Sequence[filters.Verdict],
  parts: Parts,
  rl: Mapping[str, Any],
  pad_id: int,
  teachers: Teachers | None,
) -> tuple[PolicyBatch, int] | None:
  """The groups that were kept in rows, always as many, and how many micro-batches they fill.

  None if no group was kept.
  """
  kept = [v.group for v in verdicts if not v.reason]
  if not kept:
    return None
  flat = [t for group in kept for t in group]
  episodes, micro_rows = rl['groups'] * rl['group_size'], rl['micro_rows']
  # Room for one episode a row, so that the shape never changes and nothing is compiled again.
  if teachers:
    return teachers.batch(flat, rl['seq_len'], pad_id, teachers.rows_needed(episodes))
  rewards = np.array([[t.reward for t in group] for group in kept], np.float32)
  values = np.asarray(parts.advantage(jnp.asarray(rewards))).ravel()
  batch = pack(flat, values.tolist(), rl['seq_len'], micro_rows, pad_id)
  return join([batch], -(-episodes // micro_rows) * micro_rows), len(batch.tokens) // micro_rows


def _row(
  played: Sequence[Trajectory],
  verdicts: Sequence[filters.Verdict],
  found: Mapping[str, Any],
  generation_seconds: float,
  training_seconds: float,
) -> dict[str, Any]:
  valid = [t for t in played if t.failure is None]
  written = [t.response_tokens for t in played]
  row: dict[str, Any] = {
    'time': time.time(), 'seconds': generation_seconds + training_seconds,
    'generation_seconds': generation_seconds, 'training_seconds': training_seconds,
    'tokens_per_second': sum(written) / (generation_seconds + training_seconds),
    'reward': float(np.mean([t.reward for t in valid])) if valid else 0.0,
    'response_tokens': float(np.mean(written)), 'turns': float(np.mean([t.turns for t in played])),
    'cut_off': float(np.mean([t.end != 'done' for t in played])),
    'malformed': sum(t.malformed for t in played) / max(1, sum(t.turns for t in played)),
    'failures': len(played) - len(valid),
    'groups_kept': sum(not v.reason for v in verdicts), 'groups': len(verdicts),
  }  # fmt: skip
  for name in sorted({t.env for t in valid}):
    row[f'reward/{name}'] = float(np.mean([t.reward for t in valid if t.env == name]))
  return row | dict(found)
