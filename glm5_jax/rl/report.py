"""report.md of an RL run: accuracy and reward by domain, health of the policy, sample episodes.

And what stands in a supervised run's report beside its loss: what its model does on tasks.
"""

import json
import pathlib
from collections.abc import Mapping, Sequence
from typing import Any

from matplotlib import pyplot

from glm5_jax.train import machine, metrics, plots
from glm5_jax.train.workdir import write_atomically

_HEALTH = {
  'entropy': 'entropy of the policy (nats per token)',
  'kl_behaviour': 'KL(rollout || policy), k3 estimate',
  'masked': 'share of tokens that the objective masks',
  'logprob_gap_max': 'largest |log-probability of trainer - of engine|',
  'response_tokens': 'tokens the model wrote per episode',
  'grad_norm': 'gradient norm',
  'malformed': 'share of turns that do not parse',
  'reverse_kl': 'KL(policy || teacher), nats per token',
}


def write(folder: pathlib.Path, config: Mapping[str, Any], command: str, stopped: str) -> str:
  """Writes report.md and its figures; returns the path."""
  rows = metrics.read(folder / 'metrics.jsonl')
  train = [r for r in rows if 'reward' in r]
  held_out = [r for r in rows if 'eval/accuracy' in r]
  (folder / 'plots').mkdir(exist_ok=True)
  figures = {
    'accuracy.png': (
      'Greedy accuracy on held-out tasks, and sampled reward in training',
      _accuracy,
    ),
    'health.png': ('Health of the policy', _health),
  }
  for name, (_, draw) in figures.items():
    plots.save(folder / 'plots' / name, draw, train, held_out)
  first, last = held_out[0] if held_out else {}, held_out[-1] if held_out else {}
  taught = f', taught by {dict(config["rl"]["teachers"])}' if config['stage'] == 'distill' else ''
  lines = [
    f'# {config["stage"]}: {config["rl"]["policy"]["objective"]}', '',
    f'`{command}`', '',
    f'On {machine.describe()["processor"]}, {machine.describe()["cores"]} cores. Started from `{config["init_from"]}`{taught}.'
    + (f' Stopped early: {stopped}.' if stopped else ''), '',
    *_accuracy_table(first, last),
  ]  # fmt: skip
  if train:
    seconds = sum(r['seconds'] for r in train)
    written = sum(r['tokens_per_second'] * r['seconds'] for r in train)
    lines += [
      '', f'{train[-1]["step"]} updates in {seconds / 60:.1f} minutes'
      f' ({sum(r["generation_seconds"] for r in train) / seconds:.0%} of them playing);'
      f' {written / seconds:,.0f} generated tokens/s over all.',
    ]  # fmt: skip
  for name, (caption, _) in figures.items():
    lines += ['', f'![{caption}](plots/{name})', '', f'*{caption}.*']
  lines += ['', '## Episodes of the last step', *_episodes(folder)]
  write_atomically(folder / 'report.md', '\n'.join(lines) + '\n')
  return str(folder / 'report.md')


def _accuracy_table(first: Mapping[str, Any], last: Mapping[str, Any]) -> list[str]:
  """Of each environment before and after, with its teacher's if there is one."""
  taught = any(k.startswith('eval/teacher/') for k in first)
  head = ['held-out accuracy, greedy', 'before', 'after', *(['teacher'] if taught else [])]
  lines = [head, ['---'] * len(head)]
  for key in (k for k in last if k.startswith('eval/accuracy')):
    name = key.removeprefix('eval/accuracy').strip('/')
    cells = [first.get(key), last[key]]
    if taught:
      cells.append(first.get(f'eval/teacher/{name}'))
    lines.append([name or 'mean', *('-' if c is None else f'{100 * c:.1f} %' for c in cells)])
  return [f'| {" | ".join(line)} |' for line in lines]


def add_tasks(
  folder: pathlib.Path,
  losses: Mapping[str, tuple[int, float]],
  scores: Mapping[str, Mapping[str, Mapping[str, float]]],
) -> None:
  """Adds to a supervised run's report.md what its model does, by category.

  Args:
    folder: of the run, with rollouts/.
    losses: category -> held-out conversations, loss in nats per learnt token.
    scores: see train/result.py.
  """

  def share(score: str, when: str, name: str) -> str:
    value = scores.get(score, {}).get(when, {}).get(name)
    return '-' if value is None else f'{100 * value:.1f} %'

  lines = [
    '', '## By category', '',
    'Loss is per token that the model has to write, on held-out conversations, the careless ones among'
    ' them. The rest is greedy play of held-out tasks; a turn parses if its thought and its calls are'
    ' well-formed and it ends where a turn may end.', '',
    '| category | conversations | loss, nats | turns that parse, before | after | tasks solved, before'
    ' | after |', '|' + '---|' * 7,
  ]  # fmt: skip
  for name in [*losses, *(n for n in scores['valid']['after'] if n not in losses)]:
    count, loss = losses.get(name, (0, None))
    cells = [name, f'{count:,}', '-' if loss is None else f'{loss:.4f}']
    cells += [share(score, when, name) for score in ('valid', 'accuracy')
              for when in ('before', 'after')]  # fmt: skip
    lines.append(f'| {" | ".join(cells)} |')
  lines += ['', '### One episode of each', *_episodes(folder)]
  file = folder / 'report.md'
  write_atomically(file, file.read_text(encoding='utf-8') + '\n'.join(lines) + '\n')


def _accuracy(train: Sequence[Mapping], held_out: Sequence[Mapping]):
  figure, (left, right) = pyplot.subplots(1, 2, sharey=True)
  for axis, rows, prefix in ((left, held_out, 'eval/accuracy/'), (right, train, 'reward/')):
    for key in sorted({k for r in rows for k in r if k.startswith(prefix)}):
      points = [(r['step'], r[key]) for r in rows if key in r]
      style = 'o-' if axis is left else '-'
      axis.plot(*zip(*points, strict=True), style, markersize=3, label=key.removeprefix(prefix))
    axis.set(xlabel='update', ylim=(-0.02, 1.02))
    axis.legend()
  left.set(title='Held-out tasks, greedy', ylabel='share solved')
  right.set(title='Training tasks, sampled')
  return figure


def _health(train: Sequence[Mapping], held_out: Sequence[Mapping]):
  del held_out
  shown = {key: title for key, title in _HEALTH.items() if any(key in r for r in train)}
  columns = -(-max(1, len(shown)) // 2)
  figure, axes = pyplot.subplots(
    2, columns, sharex=True, figsize=(3.7 * columns, 5), layout='constrained', squeeze=False
  )
  for axis, (key, title) in zip(axes.flat, shown.items(), strict=False):
    points = [(r['step'], r[key]) for r in train if r.get(key) is not None]
    if points:
      axis.plot(*zip(*points, strict=True), linewidth=1)
    axis.set_title(title, fontsize=8)
  return figure


def _episodes(folder: pathlib.Path) -> list[str]:
  """The first episode of each environment."""
  files = sorted((folder / 'rollouts').glob('*.jsonl'))
  lines, seen = [], set()
  for line in files[-1].read_text(encoding='utf-8').splitlines() if files else ():
    episode = json.loads(line)
    if episode['env'] in seen:
      continue
    seen.add(episode['env'])
    lines += ['', f'**{episode["env"]}**, reward {episode["reward"]:g}', '', '```']
    lines += [json.dumps(m, ensure_ascii=False) for m in episode['messages']]
    lines.append('```')
  return lines
