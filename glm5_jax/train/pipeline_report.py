"""The report of a pipeline: one table with a row for each stage, one figure across all of them."""

import os
import pathlib
import shlex
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np

from glm5_jax.train import metrics, result
from glm5_jax.train.plots import smooth
from glm5_jax.train.workdir import write_atomically

matplotlib.use('Agg')
from matplotlib import pyplot

_HEAD = (
  'stage', 'attention', 'row length', 'steps', 'tokens', 'trained', 'bits per byte, dense attention',
  'sparse attention', 'indexer recall', 'minutes',
)  # fmt: skip
_NOTES = """\
Bits per byte are of the held-out files, in rows of the stage's length, with either attention. Recall is
the share of the attention mass over all keys that the selected keys hold, the mean over the indexers.
Minutes are of the process that ended the stage, from reading the data to its report."""


class StageRun(NamedTuple):
  """One stage of a pipeline: its name, its folder, its config as plain dicts, and what that means.

  `parts` is what the stage's loop makes of the config, `finished` its `Loop.is_finished`.
  """

  name: str
  folder: pathlib.Path
  config: dict[str, Any]
  parts: Any
  finished: Callable[[pathlib.Path, int], bool]

  def is_finished(self) -> bool:
    return self.finished(self.folder, self.config['train']['steps'])

  @property
  def trains(self) -> str:
    """What trains, in words."""
    objective = getattr(self.parts, 'objective', None)
    return objective.stage.trains if objective else self.parts.trains

  @property
  def row_length(self) -> int:
    """Tokens of a row."""
    return self.config.get('rl', {}).get('seq_len') or self.config['data']['seq_len']


def write(path: pathlib.Path, runs: Sequence[StageRun], command: str) -> pathlib.Path:
  """Writes `path`/report.md and plots/stages.png from what the stages' folders hold so far.

  Returns:
    The report's path.
  """
  curves = [(run.name, metrics.read(run.folder / 'metrics.jsonl')) for run in runs]
  done = sum(run.is_finished() for run in runs)
  sections = [f'# {" -> ".join(run.name for run in runs)}: {done} of {len(runs)} stages']
  lines = [_HEAD, ('---',) * len(_HEAD)]
  lines += [_row(run, rows) for run, (_, rows) in zip(runs, curves, strict=True)]
  sections += ['\n'.join(f'| {" | ".join(line)} |' for line in lines), _NOTES]
  sections += _tasks(runs)
  if any(rows for _, rows in curves):
    _draw(path / 'plots', curves)
    sections.append('## Curves across the stages\n\n![curves](plots/stages.png)')
  command = command or f'python -m experiments.run --workdir={shlex.quote(str(path))}'
  sections.append(f'## Reproduce\n\n```\n{command}\n```')
  file = path / 'report.md'
  write_atomically(file, '\n\n'.join(sections) + '\n')
  return file


def _row(run: StageRun, rows: list[dict[str, Any]]) -> tuple[str, ...]:
  """The table's cells; a dash is what is not known (yet)."""
  model = run.parts.model
  train = [r for r in rows if 'loss' in r]
  found = result.read(run.folder) or {}
  evaluations = found.get('evaluations', {})
  bits = [evaluations.get(kind, {}).get('bits_per_byte') for kind in ('dense', 'sparse')]
  recall = [evaluations[kind]['recall'] for kind in ('sparse', 'dense') if kind in evaluations]
  recall = [np.mean(r) for r in recall if r]
  steps, tokens = run.config['train']['steps'], '-'
  if train:
    tokens = f'{sum(r["tokens"] for r in train) * train[-1]["step"] / len(train):,.0f}'
  return (
    f'[{run.folder.name}]({run.folder.name}/report.md)' if train else run.folder.name,
    'sparse' if model.sparse_attention and model.attention == 'mla' else 'dense',
    f'{run.row_length:,}',
    f'{steps:,}' if run.is_finished() else f'{train[-1]["step"] if train else 0:,} of {steps:,}',
    tokens,
    run.trains,
    *('-' if b is None else f'{b:.3f}' for b in bits),
    f'{recall[0]:.1%}' if recall else '-',
    f'{found["minutes"]:.1f}' if 'minutes' in found else '-',
  )


def _tasks(runs: Sequence[StageRun]) -> list[str]:
  """Accuracy on held-out tasks of each domain before and after every stage that is measured on them."""
  measured = {run.name: (result.read(run.folder) or {}).get('tasks', {}) for run in runs}
  scores = {name: found['accuracy'] for name, found in measured.items() if 'accuracy' in found}
  if not scores:
    return []
  columns = [(name, when, of[when]) for name, of in scores.items() for when in ('before', 'after')
             if when in of]  # fmt: skip
  domains = sorted({domain for _, _, values in columns for domain in values})
  lines = [
    ['domain', *(f'{when} {name}' for name, when, _ in columns)],
    ['---'] * (len(columns) + 1),
    *(
      [domain, *(f'{100 * v[domain]:.1f} %' if domain in v else '-' for _, _, v in columns)]
      for domain in domains
    ),
  ]
  mean = [f'{100 * np.mean(list(values.values())):.1f} %' for _, _, values in columns]
  lines.append(['mean', *mean])
  table = '\n'.join(f'| {" | ".join(line)} |' for line in lines)
  return ['## Accuracy on held-out tasks, greedy', table]


def _draw(folder: pathlib.Path, curves: Sequence[tuple[str, list[dict[str, Any]]]]) -> None:
  """Loss, learning rate, indexer KL and recall over the steps of all stages, one after another."""
  panels: Sequence[tuple[str, str, Sequence[tuple[str, str]]]] = (
    ('loss (nats per token)', 'linear', (('ce', '-'), ('eval/loss', 'o-'))),
    ('learning rate', 'log', (('lr', '-'),)),
    ('indexer KL (nats)', 'log', (('indexer_kl', '-'),)),
    ('indexer recall', 'linear', (('eval/indexer_recall', 'o-'),)),
    ('reward', 'linear', (('reward', '-'),)),
  )
  # A pipeline without RL has no rewards, one without pre-training no loss.
  known = {key for _, rows in curves for row in rows for key in row}
  panels = tuple(p for p in panels if any(key in known for key, _ in p[2]))
  figure, grid = pyplot.subplots(
    len(panels),
    1,
    sharex=True,
    figsize=(9, 2.75 * len(panels)),
    layout='constrained',
    squeeze=False,
  )
  axes = grid[:, 0]
  start = 0
  for i, (name, rows) in enumerate(curves):
    if not rows:
      continue
    for axis, (label, scale, series) in zip(axes, panels, strict=True):
      axis.set(ylabel=label)
      axis.grid(alpha=0.25)
      axis.axvline(start, color='#888888', linewidth=0.8)
      for key, style in series:
        points = [(start + r['step'], r[key]) for r in rows if r.get(key) is not None]
        if points:
          step, value = np.array(points).T
          if style == '-':
            value = smooth(value, max(1, len(value) // 50))
          axis.plot(step, value, style, color=f'C{i}', markersize=4, linewidth=1.5)
          axis.set_yscale(scale)
    axes[0].text(start, 1.02, f' {name}', transform=axes[0].get_xaxis_transform(), fontsize=9)
    start += rows[-1]['step']
  axes[0].plot([], [], 'o-', color='#888888', label='held-out files')
  axes[0].legend(frameon=False)
  axes[-1].set(xlabel='step, stage after stage')
  folder.mkdir(exist_ok=True)
  partial = folder / '.stages.png'
  figure.savefig(partial, format='png')
  pyplot.close(figure)
  os.replace(partial, folder / 'stages.png')
