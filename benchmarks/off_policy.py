"""Learning from old rollouts: what each correction makes of a policy that lags behind.

  python -m benchmarks.off_policy [--seeds=3] [--updates=48] [--lags=0,8,24] [--out=runs/off_policy]

A model of 0.3M parameters learns word problems from demonstrations of which half guess (one start a seed),
then by RL from episodes of the policy `lag` updates ago, always with the log-probabilities that these
recorded. Six ways to deal with that: none, plain importance sampling, PPO's clip, the double-sided mask
(arXiv 2602.15763, eq. 3-5), IcePop (eq. 1) and V-trace (arXiv 1802.01561, with the group's mean as the
value; not in the paper). Lag, seed and tasks are the same for all, and no update sees another batch than
its own; nothing but the objective differs.

Writes OUT/off_policy.json (every curve; the last line of the output is its table) and OUT/off_policy.png.
What is there already is not run again. About 50 core-minutes with three seeds.
"""

import argparse
import collections
import dataclasses
import functools
import json
import pathlib
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from matplotlib import pyplot
from ml_collections import ConfigDict

from configs.base import base, model
from glm5_jax.config import ModelConfig
from glm5_jax.data.tokenizer import Tokenizer, load_tokenizer
from glm5_jax.envs.catalogue import make_environments
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.losses.policy import PolicyConfig
from glm5_jax.modules.model import abstract_params
from glm5_jax.rl import advantages, tasks
from glm5_jax.rl.batch import PolicyBatch, join, pack
from glm5_jax.rl.learner import STAGE, Learner, make_policy_step
from glm5_jax.rl.rollout import Settings, groups, play
from glm5_jax.train import loop, result
from glm5_jax.train.handover import Handover
from glm5_jax.train.prepare import build_model_config, fit_to_tokenizer
from glm5_jax.train.state import TrainState
from glm5_jax.train.workdir import write_atomically

ENVIRONMENT = 'math'
GROUPS, GROUP_SIZE = 8, 8
LENGTH = 112  # Of an episode in bytes, and of a row.
ADAM = optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1.5e-4, b1=0.9, b2=0.99))
EPS = dict(eps_low=0.2, eps_high=0.28)


def vtrace(batch: PolicyBatch, logprobs: jax.Array) -> jax.Array:
  """V-trace's advantages where the value of every state is the group's mean reward.

  Without discount the value drops out: what is left is a reward of r - mean at the end of an episode and
  values of zero.
  """
  later = jnp.pad(batch.mask[:, 1:], ((0, 0), (0, 1)))
  same = jnp.pad(batch.segment_ids[:, 1:], ((0, 0), (0, 1))) == batch.segment_ids
  rewards = jnp.where(batch.mask & ~(later & same), batch.advantages, 0.0)
  log_ratio = logprobs - batch.rollout
  return advantages.vtrace(
    rewards, jnp.zeros_like(rewards), log_ratio, batch.mask, batch.segment_ids
  ).advantages


def _learner(objective: str, **changes: Any) -> Learner:
  policy = PolicyConfig(objective, **EPS, rho_max=1.0)
  return Learner(policy, per='token', micro_rows=16, **changes)


METHODS = {
  'no correction': _learner('on_policy'),
  'importance sampling': _learner('importance'),
  'PPO clip': _learner('ppo', old='rollout'),
  'double-sided mask': _learner('double_sided'),
  'IcePop': _learner('icepop'),
  'V-trace': _learner('truncated', advantages=vtrace),
}


def small_config(environments: tuple[str, ...], seed: int, steps: int) -> ConfigDict:
  """Supervised training of the small model from scratch, on bytes, by demonstrations alone."""
  c = base()
  c.seed = c.data.seed = seed
  c.model = model(
    'nano', vocab_size=292, hidden_size=96, num_hidden_layers=3, intermediate_size=256,
    moe_intermediate_size=64, n_routed_experts=4, q_lora_rank=64, kv_lora_rank=48,
    qk_nope_head_dim=32, qk_rope_head_dim=16, v_head_dim=48, sparse_attention=False,
    num_nextn_predict_layers=0, max_position_embeddings=1024,
  )  # fmt: skip
  c.data.tokenizer.kind = 'byte'
  c.data.packing, c.data.long_documents = 'best_fit', 'skip'
  c.data.seq_len, c.data.batch_size = 256, 8
  c.demonstrations.environments = environments
  c.demonstrations.count = 4000
  c.demonstrations.tasks = 1
  c.optim.name, c.optim.peak_lr, c.optim.end_lr = 'muon_split', 5e-3, 2e-4
  c.optim.warmup_steps = 20
  c.train.steps, c.train.mtp_steps = steps, 0
  c.eval.every = c.checkpoint.every = steps
  c.eval.sample_tokens = 0
  return c


def start(config: ConfigDict, folder: pathlib.Path) -> None:
  """Trains what `config` says into `folder`, unless it is there."""
  if not result.is_finished(folder, config.train.steps):
    loop.train(config, str(folder), command='python -m benchmarks.off_policy')


def load(config: ConfigDict, folder: pathlib.Path) -> tuple[ModelConfig, Any, Tokenizer]:
  """The model in `folder`."""
  tokenizer = load_tokenizer(folder / 'tokenizer.json')
  built = fit_to_tokenizer(build_model_config(config.model.to_dict()), tokenizer)
  _, params = Handover(str(folder), built).params(abstract_params(built))
  return built, params, tokenizer


ENGINE = EngineConfig(
  page_size=16, pages=64 * 7 + 1, max_length=LENGTH, max_sequences=64, max_step_tokens=1088,
  prefill_buckets=(64, 80), batch_buckets=(16, 64), page_buckets=(7,),
)  # fmt: skip


@dataclasses.dataclass
class Lab:
  """A starting point, and what all runs from it share."""

  built: ModelConfig
  params: Any
  tokenizer: Tokenizer
  seed: int
  engine: Engine = dataclasses.field(init=False)
  version: int = 0

  def __post_init__(self):
    self.engine = Engine(self.params, self.built, self.tokenizer, ENGINE)
    self.engine.warm_up()
    self.env = make_environments([ENVIRONMENT])
    self.settings = Settings(max_tokens=LENGTH, max_turn_tokens=40, max_turns=1, seed=self.seed)

  def play(self, params: Any, jobs: list) -> list:
    """Episodes of the policy `params`."""
    self.version += 1
    self.engine.update_weights(params, self.version)
    return play(self.engine, self.tokenizer, jobs, self.settings)


def run(lab: Lab, learner: Learner, lag: int, updates: int) -> dict[str, Any]:
  """One curve: rewards of the episodes as they were played, and the last policy's on held-out tasks."""
  step_policy = _policy_step(lab.built, learner)
  state = TrainState.create(jax.tree.map(jnp.copy, lab.params), ADAM, 0, STAGE)
  state = jax.device_put(state, jax.devices()[0])  # Or the second update would compile again.
  policies = collections.deque([lab.params], maxlen=lag + 1)
  rewards, masked, ratios = [], [], []
  seconds, cores = 0.0, time.process_time()
  for step in range(updates):
    jobs = tasks.jobs_of_step(lab.env, step, GROUPS, GROUP_SIZE, lab.seed)
    played = lab.play(policies[0], jobs)
    rewards.append(float(np.mean([t.reward for t in played])))
    outcome = np.array([[t.reward for t in group] for group in groups(played).values()])
    values = np.asarray(advantages.group_mean(jnp.asarray(outcome))).ravel()
    clock = time.monotonic()
    rows = pack(played, values.tolist(), LENGTH, learner.micro_rows, lab.tokenizer.eot_id)
    filled = len(rows.tokens) // learner.micro_rows
    state, found = step_policy(state, join([rows], GROUPS * GROUP_SIZE), jnp.int32(filled))
    found = jax.device_get(found)
    seconds += time.monotonic() - clock
    masked.append(float(found['masked']))
    ratios.append(float(found['ratio']))
    policies.append(jax.tree.map(jnp.copy, state.params))
  held_out = tasks.held_out_jobs(lab.env, 128, lab.seed)
  final = float(np.mean([t.reward for t in lab.play(state.params, held_out)]))
  return {
    'rewards': rewards, 'final': final, 'masked': masked, 'ratio': ratios,
    'update_seconds': seconds / updates, 'core_seconds': time.process_time() - cores,
  }  # fmt: skip


@functools.cache
def _policy_step(built: ModelConfig, learner: Learner) -> Any:
  """Compiled once for all lags and seeds."""
  return make_policy_step(built, learner, ADAM)


def draw(found: dict[str, Any], lags: list[int], path: pathlib.Path) -> None:
  """Reward over updates, a panel a lag, a line a method: the mean of the seeds and their range."""
  figure, axes = pyplot.subplots(
    1, len(lags), figsize=(4.6 * len(lags), 4), sharey=True, layout='constrained', squeeze=False
  )
  for axis, lag in zip(axes[0], lags, strict=True):
    for name in METHODS:
      curves = [r['rewards'] for r in found.values() if (r['method'], r['lag']) == (name, lag)]
      if not curves:
        continue
      smooth = [np.convolve(c, np.ones(5) / 5, mode='valid') for c in curves]
      steps = np.arange(len(smooth[0])) + 5
      (line,) = axis.plot(steps, np.mean(smooth, axis=0), label=name, linewidth=1.4)
      axis.fill_between(
        steps, np.min(smooth, axis=0), np.max(smooth, axis=0), color=line.get_color(), alpha=0.12
      )
    axis.set(title=f'episodes {lag} updates old', xlabel='update', ylim=(0, 1.02))
    axis.grid(alpha=0.25)
  axes[0][0].set_ylabel('reward of the episodes (mean of 5 updates)')
  axes[0][0].legend(frameon=False, fontsize=8)
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def table(found: dict[str, Any], lags: list[int]) -> str:
  """Reward of the last policy on held-out tasks, mean and range over the seeds."""
  lines = [
    '| correction | ' + ' | '.join(f'lag {lag}' for lag in lags) + ' | seconds an update |',
    '|---' * (len(lags) + 2) + '|',
  ]
  for name in METHODS:
    cells = []
    for lag in lags:
      finals = [r['final'] for r in found.values() if (r['method'], r['lag']) == (name, lag)]
      cells.append(
        f'{np.mean(finals):.2f} ({min(finals):.2f}..{max(finals):.2f})' if finals else '-'
      )
    seconds = [r['update_seconds'] for r in found.values() if r['method'] == name]
    lines.append(f'| {name} | {" | ".join(cells)} | {np.median(seconds):.2f} |')
  return '\n'.join(lines)


def main() -> None:
  """Runs what is missing, draws, and prints the table and one line of JSON."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--updates', type=int, default=48)
  parser.add_argument('--lags', default='0,8,24')
  parser.add_argument('--methods', default=','.join(METHODS))
  parser.add_argument('--start_steps', type=int, default=500)
  parser.add_argument('--out', default='runs/off_policy')
  args = parser.parse_args()
  lags = [int(lag) for lag in args.lags.split(',')]
  methods = {name: METHODS[name] for name in args.methods.split(',')}
  out = pathlib.Path(args.out).absolute()
  out.mkdir(parents=True, exist_ok=True)
  file = out / 'off_policy.json'
  found: dict[str, Any] = json.loads(file.read_text()) if file.exists() else {}
  for seed in range(args.seeds):
    config = small_config((ENVIRONMENT,), seed, args.start_steps)
    folder = out / f'start_{seed}'
    start(config, folder)
    lab = None
    for lag in lags:
      for name, learner in methods.items():
        key = f'{name}/{lag}/{seed}/{args.updates}'
        if key in found:
          continue
        lab = lab or Lab(*load(config, folder), seed)
        found[key] = {
          'method': name,
          'lag': lag,
          'seed': seed,
          **run(lab, learner, lag, args.updates),
        }
        write_atomically(file, json.dumps(found) + '\n')
        r = found[key]
        print(
          f'seed {seed}, lag {lag}, {name}: {r["rewards"][0]:.2f} -> {r["final"]:.2f}, masked'
          f' {np.mean(r["masked"]):.1%}; {r["core_seconds"]:.0f} core-seconds', flush=True,
        )  # fmt: skip
  found = {key: r for key, r in found.items() if len(r['rewards']) == args.updates}
  draw(found, lags, out / 'off_policy.png')
  print(table(found, lags))
  shown = ('final', 'update_seconds', 'core_seconds')
  print(json.dumps({key: {k: r[k] for k in shown} for key, r in found.items()}))


if __name__ == '__main__':
  main()
