"""A lost skill, and what distillation gives back (arXiv 2602.15763, section 3.5).

  python -m benchmarks.distill_recovery [--seeds=3] [--out=runs/distill_recovery]
  python -m benchmarks.distill_recovery --init_from=RUN --environments=math,science,code,tool

RL goes on with the first domain alone until another one has lost `--drop` of its accuracy (or for
`--most` updates). Then the model of that stage is the student: distilled from itself as it was after that
stage in the first domain, and from the model before it in all others. Every stage is a run of the real loop
(rl/loop.py) in OUT/SEED, which resumes and has a report of its own.

Without --init_from a model of 0.3M parameters is trained from scratch on demonstrations of two domains and
by RL on both, once for each seed. Prints a table of held-out greedy accuracy, and one line of JSON; writes
OUT/distill_recovery.json.
"""

import argparse
import json
import pathlib
from typing import Any

import numpy as np
from ml_collections import ConfigDict

from benchmarks.off_policy import small_config
from configs.rl_base import rl_base
from glm5_jax.rl import loop as rl_loop
from glm5_jax.train import loop, metrics, result
from glm5_jax.train.workdir import write_atomically

# Updates between two looks at the accuracy while the first domain is trained alone.
_ROUND = 10
_COLUMNS = ('start', 'one domain only', 'distilled')


def rl_config(args: argparse.Namespace, seed: int, before: pathlib.Path, small: bool) -> ConfigDict:
  """What all stages have in common; the small model's episodes are short and without tools."""
  c = rl_base()
  c.seed = seed
  c.init_from = str(before)
  c.rl.environments = c.rl.eval_environments = args.environments
  c.rl.eval_tasks = args.eval_tasks
  c.eval.every = c.checkpoint.every = _ROUND
  if small:
    c.model = small_config(args.environments, seed, args.start_steps).model
    c.data.tokenizer.kind = 'byte'
    c.rl.seq_len = c.rl.episode.max_tokens = 144
    c.rl.episode.max_turn_tokens = 48
    c.rl.episode.max_turns = 1
    c.rl.groups, c.rl.group_size, c.rl.micro_rows = 8, 8, 16
    c.rl.engine.pages, c.rl.engine.max_sequences = 64 * 9 + 1, 64
    c.rl.engine.prefill_buckets, c.rl.engine.batch_buckets = (64, 96), (16, 64)
    c.rl.engine.page_buckets, c.rl.engine.max_step_tokens = (9,), 1088
    c.optim.peak_lr = c.optim.end_lr = 5e-4
  return c


def start(args: argparse.Namespace, seed: int, folder: pathlib.Path) -> pathlib.Path:
  """The run to begin with: given, or the small model after SFT and RL on all domains."""
  if args.init_from:
    return pathlib.Path(args.init_from)
  sft = small_config(args.environments, seed, args.start_steps)
  if not result.is_finished(folder / '1_sft', sft.train.steps):
    loop.train(sft, str(folder / '1_sft'))
  c = rl_config(args, seed, folder / '1_sft', small=True)
  c.train.steps = args.updates
  _train(c, folder / '2_start')
  return folder / '2_start'


def lose(args: argparse.Namespace, config: ConfigDict, folder: pathlib.Path) -> None:
  """RL on the first domain until the mean of the others has fallen by `--drop`."""
  config.rl.environments = args.environments[:1]
  for steps in range(_ROUND, args.most + 1, _ROUND):
    config.train.steps = steps
    _train(config, folder)
    accuracy = (result.read(folder) or {})['tasks']['accuracy']
    lost = np.mean([accuracy['before'][e] - accuracy['after'][e] for e in args.environments[1:]])
    if lost >= args.drop:
      break


def recover(config: ConfigDict, before: pathlib.Path, args: argparse.Namespace) -> ConfigDict:
  """The distillation of the run `config.init_from`, with `before` as the teacher of what it lost."""
  c = config.copy_and_resolve_references()
  c.stage, c.rl.advantage = 'distill', 'teacher'
  first, *others = args.environments
  c.rl.teachers = ConfigDict({first: str(c.init_from)} | dict.fromkeys(others, str(before)))
  c.rl.groups, c.rl.group_size = c.rl.groups * c.rl.group_size, 1
  c.train.steps = args.updates
  return c


def _train(config: ConfigDict, folder: pathlib.Path) -> None:
  if not result.is_finished(folder, config.train.steps, 'tasks'):
    rl_loop.train(config, str(folder), command='python -m benchmarks.distill_recovery')


def one_seed(args: argparse.Namespace, seed: int, folder: pathlib.Path) -> dict[str, Any]:
  """Accuracy by domain after each stage, and how many updates each took."""
  before = start(args, seed, folder).absolute()
  config = rl_config(args, seed, before, small=not args.init_from)
  lose(args, config, folder / '3_one_domain')
  config = rl_config(args, seed, folder / '3_one_domain', small=not args.init_from)
  _train(recover(config, before, args), folder / '4_distilled')
  lost, back = ((result.read(folder / n) or {}) for n in ('3_one_domain', '4_distilled'))
  rows = metrics.read(folder / '4_distilled' / 'metrics.jsonl')
  return {
    'accuracy': {
      'start': lost['tasks']['accuracy']['before'],
      'one domain only': lost['tasks']['accuracy']['after'],
      'distilled': back['tasks']['accuracy']['after'],
    },
    'updates': [lost['step'], back['step']],
    'reverse_kl': [r['reverse_kl'] for r in rows if 'reverse_kl' in r],
  }


def table(found: list[dict[str, Any]]) -> str:
  """Mean over the seeds, with their range."""
  lines = ['| held-out accuracy, greedy | ' + ' | '.join(_COLUMNS) + ' |', '|---' * 4 + '|']
  for domain in found[0]['accuracy']['start']:
    cells = []
    for column in _COLUMNS:
      values = [100 * f['accuracy'][column][domain] for f in found]
      cells.append(f'{np.mean(values):.0f} % ({min(values):.0f}..{max(values):.0f})')
    lines.append(f'| {domain} | {" | ".join(cells)} |')
  return '\n'.join(lines)


def main() -> None:
  """Runs what is missing of every seed; prints the table and one line of JSON."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--environments', default='math,science', help='the first is trained alone')
  parser.add_argument('--init_from', default='', help="a run's folder; '' trains a small model")
  parser.add_argument('--drop', type=float, default=0.2, help='of accuracy, that counts as lost')
  parser.add_argument('--most', type=int, default=120, help='updates on one domain')
  parser.add_argument('--updates', type=int, default=60, help='of the first RL and of distillation')
  parser.add_argument('--start_steps', type=int, default=900, help='of supervised training')
  parser.add_argument('--eval_tasks', type=int, default=100, help='held-out ones of each domain')
  parser.add_argument('--out', default='runs/distill_recovery')
  args = parser.parse_args()
  args.environments = tuple(args.environments.split(','))
  if len(args.environments) < 2:
    parser.error('--environments needs two domains at least: one to train, one to lose')
  out = pathlib.Path(args.out).absolute()
  found = []
  for seed in range(args.seeds):
    folder = out / f'seed_{seed}'
    folder.mkdir(parents=True, exist_ok=True)
    found.append(one_seed(args, seed, folder))
    write_atomically(out / 'distill_recovery.json', json.dumps(found) + '\n')
    print(table(found), flush=True)
  print(json.dumps([f['accuracy'] for f in found]))


if __name__ == '__main__':
  main()
