"""Engine and trainer that select different keys: what the policy's update sees of it.

  python -m benchmarks.topk_mismatch --run=DIR [--groups=32] [--out=runs/topk_mismatch]

Section 3.2 of arXiv 2602.15763: a top-k that is not deterministic ruined RL within a few steps, so
trainer and engine here share one (glm5_jax/ops/topk.py). This puts another one into the engine, on
purpose, plays episodes of an RL or SFT run in DIR with it, and computes the same tokens' probabilities
as the trainer does. Weights, tokens and draws are the same in every row but for what the selection
changes. Prints a table and one line of JSON; writes OUT/topk_mismatch.png.
"""

import argparse
import contextlib
import functools
import json
import pathlib
from collections.abc import Callable, Iterator
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot

from configs.rl_base import rl_base
from glm5_jax.data.tokenizer import load_tokenizer
from glm5_jax.infer import programs
from glm5_jax.infer.engine import Engine
from glm5_jax.losses.policy import Experience, PolicyConfig, policy_loss, token_weights
from glm5_jax.modules.model import abstract_params
from glm5_jax.ops import topk
from glm5_jax.rl import tasks
from glm5_jax.rl.batch import PolicyBatch, pack
from glm5_jax.rl.learner import Learner, make_scorer
from glm5_jax.rl.prepare import Play, prepare_play
from glm5_jax.rl.rollout import play
from glm5_jax.train.handover import Handover
from glm5_jax.train.prepare import build_model_config, fit_to_tokenizer, plain

Select = Callable[[jax.Array, jax.Array, Any], jax.Array]
_SELECT = topk.select_mask


def last_of_ties(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
  """Among equal scores the highest index wins."""
  return _SELECT(scores[..., ::-1], visible[..., ::-1], k)[..., ::-1]


def rounded(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
  """Scores in bfloat16."""
  return _SELECT(scores.astype(jnp.bfloat16).astype(jnp.float32), visible, k)


def noisy(scores: jax.Array, visible: jax.Array, k: int, *, noise: float) -> jax.Array:
  """Scores off by a share of themselves, other ones at every call."""
  call = jax.lax.bitcast_convert_type(jnp.sum(scores, dtype=jnp.float32), jnp.int32)
  draws = jax.random.normal(jax.random.fold_in(jax.random.key(0), call), scores.shape)
  return _SELECT(scores * (1 + noise * draws), visible, k)


def fewer(scores: jax.Array, visible: jax.Array, k: int) -> jax.Array:
  """Half as many keys."""
  return _SELECT(scores, visible, k // 2)


SELECTIONS: dict[str, Select] = {
  'the same': _SELECT,
  'ties broken the other way': last_of_ties,
  'index scores in bfloat16': rounded,
  'index scores off by 1 %': functools.partial(noisy, noise=0.01),
  'index scores off by 10 %': functools.partial(noisy, noise=0.1),
  'half as many keys': fewer,
}


@contextlib.contextmanager
def selecting(select: Select) -> Iterator[None]:
  """What is compiled within selects in that way; nothing that was compiled before is used."""
  programs.programs.cache_clear()
  jax.clear_caches()
  with mock.patch.object(topk, 'select_mask', select):
    yield
  programs.programs.cache_clear()
  jax.clear_caches()


def seen_by_the_update(
  batch: PolicyBatch, logprobs: np.ndarray, objectives: dict[str, PolicyConfig]
) -> dict[str, float]:
  """The gaps of log-probability, and what share of the tokens each objective masks.

  Advantages alternate in sign from token to token, since what PPO's clip rejects depends on it.
  """
  weights = token_weights(jnp.asarray(batch.mask), jnp.asarray(batch.segment_ids), per='token')
  signs = np.where(np.arange(batch.mask.size).reshape(batch.mask.shape) % 2, 1.0, -1.0)
  experience = Experience(
    jnp.asarray(batch.rollout), jnp.asarray(logprobs), jnp.asarray(signs, jnp.float32), weights,
    jnp.asarray(batch.segment_ids),
  )  # fmt: skip
  found: dict[str, float] = {}
  for name, objective in objectives.items():
    _, metrics = policy_loss(jnp.asarray(logprobs), experience, objective)
    found[f'masked/{name}'] = float(metrics['masked'])
  gap = np.abs(logprobs - batch.rollout)[batch.mask]
  return found | {
    'gap': float(gap.mean()), 'gap_p99': float(np.quantile(gap, 0.99)), 'gap_max': float(gap.max()),
    'tokens': int(batch.mask.sum()),
  }  # fmt: skip


OBJECTIVES = {
  'double-sided': PolicyConfig('double_sided', eps_low=0.2, eps_high=0.28),
  'IcePop': PolicyConfig('icepop', eps_low=0.2, eps_high=0.28, beta=2.0),
}


def measure(run: pathlib.Path, groups: int, how: Play | None = None) -> dict[str, dict[str, float]]:
  """Every selection's row. Episodes are those of the RL configs unless `how` says otherwise."""
  built = build_model_config(json.loads((run / 'config.json').read_text())['model'])
  tokenizer = load_tokenizer(run / 'tokenizer.json')
  built = fit_to_tokenizer(built, tokenizer)
  _, params = Handover(str(run), built).params(abstract_params(built))
  config = rl_base()
  how = how or prepare_play(plain(config))
  learner = Learner(temperature=how.settings.temperature)
  jobs = tasks.jobs_of_step(how.environments, 0, groups, 4, how.seed)
  found = {}
  for name, select in SELECTIONS.items():
    with selecting(select):
      engine = Engine(params, built, tokenizer, how.engine)
      engine.warm_up()
      played = play(engine, tokenizer, jobs, how.settings)
    batch = pack(
      played, [0.0] * len(played), how.settings.max_tokens, learner.micro_rows, tokenizer.eot_id
    )
    score = make_scorer(built, learner)
    last = jnp.int32(len(batch.tokens) // learner.micro_rows)
    logprobs = np.asarray(score(params, batch, jnp.int32(0), last))
    found[name] = seen_by_the_update(batch, logprobs, OBJECTIVES)
    found[name]['reward'] = float(np.mean([t.reward for t in played]))
    print(f'{name}: {found[name]}', flush=True)
  return found


def table(found: dict[str, dict[str, float]]) -> str:
  """A row for each selection."""
  lines = [
    '| selection of the engine | mean gap, nats | 99th percentile | largest | masked, double-sided'
    ' | masked, IcePop | reward |',
    '|---|---|---|---|---|---|---|',
  ]
  for name, row in found.items():
    masked = ' | '.join(f'{row[f"masked/{o}"]:.2%}' for o in OBJECTIVES)
    gaps = ' | '.join(f'{row[key]:.1e}' for key in ('gap', 'gap_p99', 'gap_max'))
    lines.append(f'| {name} | {gaps} | {masked} | {row["reward"]:.2f} |')
  return '\n'.join(lines)


def draw(found: dict[str, dict[str, float]], path: pathlib.Path) -> None:
  """Gap and masked share, a bar for each selection."""
  figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.4), sharey=True, layout='constrained')
  at = np.arange(len(found))
  axes[0].barh(at, [row['gap'] for row in found.values()])
  axes[0].set(xscale='log', xlabel='mean |log-probability gap|, nats')
  axes[0].set_yticks(at, list(found))
  axes[0].invert_yaxis()
  for i, name in enumerate(OBJECTIVES):
    axes[1].barh(
      at + (i - 0.5) * 0.38, [100 * row[f'masked/{name}'] for row in found.values()], 0.36, label=name
    )  # fmt: skip
  axes[1].set(xlabel='tokens that the objective masks, %')
  axes[1].legend(frameon=False)
  for axis in axes:
    axis.grid(alpha=0.25, axis='x')
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def main() -> None:
  """Measures, draws, and prints the table and one line of JSON."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('--run', required=True, help='the folder of an SFT or RL run')
  parser.add_argument('--groups', type=int, default=32, help='tasks; four episodes of each')
  parser.add_argument('--out', default='runs/topk_mismatch')
  args = parser.parse_args()
  out = pathlib.Path(args.out).absolute()
  out.mkdir(parents=True, exist_ok=True)
  found = measure(pathlib.Path(args.run).absolute(), args.groups)
  draw(found, out / 'topk_mismatch.png')
  print(table(found))
  print(json.dumps(found))


if __name__ == '__main__':
  main()
