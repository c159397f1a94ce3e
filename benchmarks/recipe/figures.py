"""The figures of docs/recipe_evidence.md. Each function draws one from a part's result."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from matplotlib import pyplot

from glm5_jax.train.plots import smooth

_COLORS = ('#1f5fa8', '#d1495b', '#66a182', '#edae49', '#6b4c9a', '#8d8d8d', '#2e4057', '#b07d62')


def _by_variant(runs: Sequence[Mapping[str, Any]]) -> dict[str, list[Mapping[str, Any]]]:
  out: dict[str, list[Mapping[str, Any]]] = {}
  for run in runs:
    out.setdefault(run['variant'], []).append(run)
  return out


def _band(axis, steps, curves, color, label):
  """The mean of the seeds, and all of their range."""
  curves = np.array(curves)
  axis.plot(steps, curves.mean(axis=0), color=color, linewidth=1.8, label=label)
  axis.fill_between(steps, curves.min(axis=0), curves.max(axis=0), color=color, alpha=0.18)


def draw_logits(result: Mapping[str, Any]):
  """The largest logit over training."""
  figure, axis = pyplot.subplots(figsize=(9, 4.2))
  for (name, found), color in zip(_by_variant(result['runs']).items(), _COLORS, strict=False):
    _band(axis, found[0]['steps'], [run['logit_max'] for run in found], color, name)
  axis.set(xlabel='step', ylabel='largest attention logit', ylim=(0, None))
  axis.set_title('Largest attention logit on held-out rows; mean and range of the seeds')
  axis.legend()
  return figure


def draw_rates(result: Mapping[str, Any]):
  """Left the largest logit, right the held-out loss, by learning rate."""
  figure, axes = pyplot.subplots(1, 2, figsize=(10, 3.8), layout='constrained')
  labels = ('largest attention logit at the end', 'held-out loss (nats per token)')
  for axis, label in zip(axes, labels, strict=True):
    for (name, found), color in zip(_by_variant(result['runs']).items(), _COLORS[1:], strict=False):
      runs = sorted(found, key=lambda run: run['rate'])
      values = [run['loss'] if 'loss' in label else run['logit_max'][-1] for run in runs]
      legend = f'{name}: ' + ', '.join(f'{run["rate"]:g}' for run in runs)
      axis.plot(range(len(runs)), values, 'o-', color=color, label=legend)
    axis.set_xticks(range(3), ['half', 'as in the comparison', 'twice'])
    axis.set(xlabel='peak learning rate', ylabel=label)
  axes[0].legend()
  return figure


def draw_table1(result: Mapping[str, Any]):
  """Held-out loss of every seed, and the mean."""
  figure, axis = pyplot.subplots(figsize=(8, 3.2))
  found = _by_variant(result['runs'])
  for i, (runs, color) in enumerate(zip(found.values(), _COLORS, strict=False)):
    losses = [run['loss'] for run in runs]
    axis.plot(losses, [i] * len(losses), 'o', color=color)
    axis.plot(np.mean(losses), i, '|', color=color, markersize=22)
  axis.set_yticks(range(len(found)), list(found))
  axis.invert_yaxis()
  axis.set(xlabel='held-out loss (nats per token); dots: seeds, bar: mean')
  axis.set_title('Attention variants at equal parameters and tokens')
  return figure


def draw_sparse(result: Mapping[str, Any]):
  """What needles are worth by distance, for some ways to run the model."""
  figure, axes = pyplot.subplots(
    1, 2, figsize=(8.5, 4.4), dpi=90, layout='constrained', sharey=True
  )
  names = [n for n in result['modes'] if not n.startswith(('window in', 'adapted'))]
  for axis, kind in zip(axes, ('secret', 'quote'), strict=True):
    for name, color in zip(names, _COLORS, strict=False):
      n = result['modes'][name]['needles'][kind]
      axis.plot(range(len(n['gain'])), n['gain'], 'o-', color=color, label=name, markersize=4)
    axis.set_xticks(range(len(n['distances'])), n['distances'])
    axis.set(xlabel=f'distance (tokens); index_topk is {result["index_topk"]}')
    axis.set_title(f'Needles: {kind}')
  axes[0].set_ylabel('gain (nats per token of the answer)')
  figure.legend(*axes[0].get_legend_handles_labels(), loc='outside lower center', ncols=2)
  return figure


def draw_recall(result: Mapping[str, Any]):
  """The attention mass on the selected keys, by layer."""
  names = {
    'window': 'last index_topk keys', '2_midtrain': 'indexers untrained',
    '3_dsa_warmup': 'warmed up', '4_dsa_sparse': 'adapted',
  }  # fmt: skip
  there = [key for key in names if key in result['recall']]
  figure, axis = pyplot.subplots(figsize=(8, 3.6))
  width = 0.8 / len(there)
  for i, (key, color) in enumerate(zip(there, _COLORS, strict=False)):
    values = result['recall'][key]
    axis.bar(np.arange(len(values)) + i * width, values, width, color=color, label=names[key])
  layers = len(result['recall']['window'])
  axis.set_xticks(np.arange(layers) + 0.4 - width / 2, [f'layer {i}' for i in range(layers)])
  axis.set(ylabel='share of the attention mass', ylim=(0, 1))
  axis.set_title(f'Attention mass on {result["index_topk"]} of up to {result["seq_len"]} keys')
  axis.legend(ncols=2)
  return figure


def draw_mtp(result: Mapping[str, Any]):
  """The acceptance of each draft given those before, and the MTP loss by depth."""
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 4), layout='constrained')
  depth = range(1, result['drafts'] + 1)
  for (name, found), color in zip(_by_variant(result['runs']).items(), _COLORS, strict=False):
    length = np.mean([run['accept_length'] for run in found])
    label = f'{name}: accept length {length:.2f}'
    _band(left, depth, [run['accepted'] for run in found], color, label)
    _band(right, depth, [run['mtp_loss'] for run in found], color, name)
  left.set(xlabel='draft', ylabel='accepted, if those before are', xticks=list(depth))
  left.set_title('Drafts on held-out text')
  left.legend()
  right.set(xlabel='MTP step', ylabel='held-out loss (nats per token)', xticks=list(depth))
  right.set_title('Loss of the token so many after the next')
  return figure


def draw_balance(result: Mapping[str, Any]):
  """MaxVio over training."""
  figure, axis = pyplot.subplots(figsize=(7.5, 3.4), dpi=100)
  for (name, found), color in zip(_by_variant(result['runs']).items(), _COLORS, strict=False):
    curves = [smooth(np.array(run['max_violation']), 10) for run in found]
    _band(axis, found[0]['steps'], curves, color, name)
  axis.set(xlabel='step', ylabel='MaxVio: busiest expert / mean - 1', ylim=(0, None))
  axis.set_title('Load of the busiest expert, mean of the layers; mean and range of the seeds')
  axis.legend()
  return figure


FIGURES = {
  'attention': {'logits': draw_logits, 'table1': draw_table1},
  'rates': {'rates': draw_rates},
  'sparse': {'needles': draw_sparse, 'recall': draw_recall},
  'mtp': {'mtp': draw_mtp},
  'balance': {'balance': draw_balance},
}
