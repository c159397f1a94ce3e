"""Reasoning RL (section 3.2): play, judge, compare within groups, update, hand over the weights. Repeat.

Synchronous and fully on-policy: every update learns from episodes of the weights before it, which are
then pushed to the engine and compared by checksum. What a step plays depends on its number, the seed and
the weights alone, so a run that was killed continues as if it had not been, and a run's folder replays.

The folder has what a training run's has, and rollouts/STEP.jsonl: every episode with its tokens,
log-probabilities, weight versions, messages and reward.
"""

import collections
import dataclasses
import json
import pathlib
import time
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
import optax

from glm5_jax.compile import jit_once
from glm5_jax.config import ModelConfig
from glm5_jax.data.tokenizer import Tokenizer, load_tokenizer
from glm5_jax.envs.catalogue import make_environments
from glm5_jax.infer.engine import Engine, weights_checksum
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.infer.request import RequestError
from glm5_jax.losses.policy import PolicyConfig
from glm5_jax.modules.model import abstract_params
from glm5_jax.optim.build import build
from glm5_jax.rl import advantages, filters, report, tasks
from glm5_jax.rl.batch import PolicyBatch, pack
from glm5_jax.rl.learner import STAGE, Learner, make_policy_step
from glm5_jax.rl.rollout import Settings, Trajectory, check_prompt, groups, play
from glm5_jax.train import workdir
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.handover import Handover
from glm5_jax.train.metrics import MetricsWriter
from glm5_jax.train.prepare import ConfigError, build_model_config, fit_to_tokenizer, plain
from glm5_jax.train.progress import ProgressLine
from glm5_jax.train.state import TrainState

ADVANTAGES = {
  'group_normalised': advantages.group_normalised,
  'group_mean': advantages.group_mean,
}


class Parts(NamedTuple):
  """What depends on the config alone."""

  model: ModelConfig
  tx: optax.GradientTransformation
  learner: Learner
  settings: Settings
  engine: EngineConfig
  environments: list
  advantage: Any


def prepare(config: Mapping[str, Any]) -> Parts:
  """The parts of a run.

  Raises:
    ConfigError: a value is impossible.
  """
  rl = config['rl']
  try:
    settings = Settings(**dict(rl['episode'].items()), seed=config['seed'])
    engine: dict[str, Any] = {
      k: tuple(v) if isinstance(v, list | tuple) else v for k, v in rl['engine'].items()
    }
    parts = Parts(
      build_model_config(config['model']),
      build(config['optim'], config['train']['steps'])[0],
      Learner(
        PolicyConfig(**dict(rl['policy'].items())), rl['per'], settings.temperature,
        rl['micro_rows'],
      ),
      settings,
      EngineConfig(max_length=settings.max_tokens, **engine),
      make_environments(rl['environments']),
      ADVANTAGES[rl['advantage']],
    )  # fmt: skip
  except KeyError as e:
    raise ConfigError(f'rl.advantage={e} is none of {sorted(ADVANTAGES)}') from None
  except (ValueError, TypeError) as e:
    raise ConfigError(str(e)) from None
  for key in ('groups', 'group_size', 'micro_rows', 'seq_len', 'eval_tasks'):
    if rl[key] < 1:
      raise ConfigError(f'rl.{key}={rl[key]} must be at least 1')
  if rl['group_size'] < 2:
    raise ConfigError('rl.group_size=1 leaves nothing to compare a response with')
  if not config['init_from']:
    raise ConfigError(
      f'stage {config["stage"]!r} continues a trained model: set --config.init_from to the folder of'
      ' the run before'
    )
  if settings.max_tokens > rl['seq_len'] + 1:
    raise ConfigError(
      f'rl.episode.max_tokens={settings.max_tokens} must fit a row of rl.seq_len={rl["seq_len"]}'
    )
  return parts


def train(config: Mapping[str, Any], folder: str, *, command: str = '') -> int:
  """Trains to the end, or resumes what `folder` holds; writes report.md in any case.

  Arguments, result and errors as `glm5_jax.train.loop.train`.
  """
  parts = prepare(config)
  rl, steps, keep = config['rl'], config['train']['steps'], config['checkpoint']
  path = pathlib.Path(folder).expanduser().absolute()
  checkpoints = Checkpoints(
    path / 'checkpoints', keep_last=keep['keep_last'], keep_best=keep['keep_best'],
    best_metric='eval/error',
  )  # fmt: skip
  resume = bool(checkpoints.steps())
  before = None if resume else Handover(config['init_from'], parts.model)

  with workdir.claim(folder, plain(config)), workdir.StopRequest() as stop:
    # --- Tokenizer, state, engine ---
    if before:
      load_tokenizer(before.folder / 'tokenizer.json').save(path)
    tokenizer = load_tokenizer(path / 'tokenizer.json')
    model = fit_to_tokenizer(parts.model, tokenizer)

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
    _check_prompts(parts, rl, tokenizer, config['seed'])
    engine = Engine(state.params, model, tokenizer, parts.engine, version=step)
    print(f'engine: {engine.sizes}; compiling', flush=True)
    engine.warm_up()
    policy_step = make_policy_step(model, parts.learner, parts.tx)
    keep_group = filters.Filter(rl['group_size'], drop_equal=True)

    # --- The loop ---
    reason, row = '', {}
    with MetricsWriter(path, step) as writer, ProgressLine(steps, step) as progress:
      if not step:
        row = _evaluate(engine, tokenizer, parts, rl['eval_tasks'], config['seed'])
        writer.write(0, row)
        progress.note(_said(row))
      while step < steps and not reason:
        # Play.
        started = time.monotonic()
        jobs = tasks.jobs_of_step(
          parts.environments, step, rl['groups'], rl['group_size'], config['seed']
        )
        played = play(engine, tokenizer, jobs, parts.settings)
        generation_seconds = time.monotonic() - started
        # Filter, compare, update.
        started = time.monotonic()
        verdicts = [keep_group(g, step) for g in groups(played).values()]
        batch = _batch(verdicts, parts, rl, tokenizer.eot_id)
        metrics: dict[str, Any] = {}
        if batch is not None:
          arrays, filled = batch
          state, found = policy_step(state, arrays, filled)
          metrics = jax.device_get(found)
        step += 1
        engine.update_weights(state.params, step, checksum=weights_checksum(state.params))
        training_seconds = time.monotonic() - started
        # Record.
        _save_rollouts(path / 'rollouts', step, played)
        row = _row(played, verdicts, metrics, generation_seconds, training_seconds)
        writer.write(step, row)
        progress.update(step, row['reward'], row['tokens_per_second'])
        if step % config['eval']['every'] == 0 or step == steps:
          evaluation = _evaluate(engine, tokenizer, parts, rl['eval_tasks'], config['seed'])
          writer.write(step, evaluation)
          progress.note(_said(evaluation))
        else:
          evaluation = None
        if stop:
          reason = stop.reason or ''
        if reason or evaluation or step % keep['every'] == 0:
          writer.sync()
          checkpoints.save(step, state, metrics=evaluation)
    checkpoints.close()
  print(report.write(path, plain(config), command, reason), flush=True)
  if reason:
    print(f'stopped at step {step}: {reason}. Run the same command again to resume.', flush=True)
  return 0


def _check_prompts(parts: Parts, rl: Mapping[str, Any], tokenizer: Tokenizer, seed: int) -> None:
  """That the tasks fit, before anything is compiled.

  Raises:
    ConfigError: a prompt leaves no room for an answer.
  """
  try:
    for job in tasks.held_out_jobs(parts.environments, rl['eval_tasks'], seed):
      check_prompt(job, tokenizer, parts.settings)
  except RequestError as e:
    raise ConfigError(f'rl.episode: {e}') from None


def _batch(
  verdicts: Sequence[filters.Verdict], parts: Parts, rl: Mapping[str, Any], pad_id: int
) -> tuple[PolicyBatch, jax.Array] | None:
  """The groups that were kept as rows in whole micro-batches, always as many; None if there is none."""
  kept = [v.group for v in verdicts if not v.reason]
  if not kept:
    return None
  rewards = np.array([[t.reward for t in group] for group in kept], np.float32)
  values = np.asarray(parts.advantage(jnp.asarray(rewards))).ravel()
  flat = [t for group in kept for t in group]
  batch = pack(flat, values.tolist(), rl['seq_len'], rl['micro_rows'], pad_id)
  filled = len(batch.tokens) // rl['micro_rows']
  # Room for one episode a row, so that the shape never changes and nothing is compiled again.
  most = -(-rl['groups'] * rl['group_size'] // rl['micro_rows']) * rl['micro_rows']
  missing = ((0, most - len(batch.tokens)), (0, 0))
  return PolicyBatch(*(np.pad(a, missing) for a in batch)), jnp.int32(filled)


def _evaluate(
  engine: Engine, tokenizer: Tokenizer, parts: Parts, count: int, seed: int
) -> dict[str, Any]:
  """Greedy accuracy on held-out tasks, of each environment and their mean."""
  jobs = tasks.held_out_jobs(parts.environments, count, seed)
  settings = dataclasses.replace(parts.settings, temperature=0.0)
  played = play(engine, tokenizer, jobs, settings)
  by_env = collections.defaultdict(list)
  for t in played:
    if t.failure is None:
      by_env[t.env].append(t.reward)
  row: dict[str, Any] = {f'eval/accuracy/{k}': float(np.mean(v)) for k, v in by_env.items()}
  row['eval/accuracy'] = float(np.mean(list(row.values()))) if row else 0.0
  row['eval/error'] = 1.0 - row['eval/accuracy']
  row['eval/failures'] = sum(t.failure is not None for t in played)
  return row


def _said(row: Mapping[str, Any]) -> str:
  each = ', '.join(
    f'{k.rpartition("/")[2]} {v:.2f}' for k, v in row.items() if k.startswith('eval/accuracy/')
  )
  return f'held-out accuracy {row["eval/accuracy"]:.3f} ({each})'


def _row(
  played: Sequence[Trajectory],
  verdicts: Sequence[filters.Verdict],
  metrics: Mapping[str, Any],
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
    'failures': len(played) - len(valid),
    'groups_kept': sum(not v.reason for v in verdicts), 'groups': len(verdicts),
  }  # fmt: skip
  for name in sorted({t.env for t in valid}):
    row[f'reward/{name}'] = float(np.mean([t.reward for t in valid if t.env == name]))
  return row | dict(metrics)


def _save_rollouts(folder: pathlib.Path, step: int, played: Sequence[Trajectory]) -> None:
  folder.mkdir(exist_ok=True)
  lines = [json.dumps(dataclasses.asdict(t), ensure_ascii=False) + '\n' for t in played]
  workdir.write_atomically(folder / f'{step:06d}.jsonl', ''.join(lines))
