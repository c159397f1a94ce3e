"""The report's figures. Each function draws one and returns nothing; `save_all` writes the files."""

import os
import pathlib
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import matplotlib
import numpy as np

matplotlib.use('Agg')
from matplotlib import colors, pyplot

_STYLE: Any = {
  'figure.figsize': (9, 4.5), 'figure.dpi': 120, 'font.size': 10, 'axes.grid': True,
  'grid.alpha': 0.25, 'axes.spines.top': False, 'axes.spines.right': False,
  'axes.titlesize': 11, 'axes.titleweight': 'bold', 'legend.frameon': False,
}  # fmt: skip
_MAIN, _HELD_OUT, _MTP = '#1f5fa8', '#d1495b', ('#66a182', '#9fc5a8', '#c9dfc9')

Rows = Sequence[dict[str, Any]]


class Selection(NamedTuple):
  """What one layer's indexer selected on one held-out row.

  Attributes:
    layer: Its number.
    heads: How many attention heads share the selection.
    topk: `index_topk`.
    visible: [T, T] bool, by query and key.
    selected: [T, T] bool.
    probs: [T, T] attention probability, the mean over the heads.
  """

  layer: int
  heads: int
  topk: int
  visible: np.ndarray
  selected: np.ndarray
  probs: np.ndarray


def save_all(folder: pathlib.Path, rows: Rows, selection: Selection | None) -> dict[str, str]:
  """Draws what the rows of metrics.jsonl allow.

  Returns:
    File name -> caption, in the order of the report.
  """
  folder.mkdir(exist_ok=True)
  train = [r for r in rows if 'loss' in r]
  held_out = [r for r in rows if 'eval/loss' in r]
  captions = {}

  def add(name, caption, draw, *args):
    save(folder / name, draw, *args)
    captions[name] = caption

  if any('ce' in r for r in train):
    add('loss.png', 'Loss per token in training and on held-out files', draw_loss, train, held_out)
  if train:
    add('optimizer.png', 'Learning rate and gradient norm', draw_optimizer, train)
  if any('load' in r for r in train):
    add('expert_load.png', 'Load of every expert over time', draw_load, train)
  if any('indexer_kl' in r for r in train) and any('eval/indexer_recall' in r for r in held_out):
    caption = 'Attention mass over all keys that the selected ones hold, and the KL that trains the indexers'
    add('indexer_recall.png', caption, draw_indexers, train, held_out)
  if selection is not None:
    caption = f'What layer {selection.layer} attends to'
    add('selection.png', caption, draw_selection, selection)
  return captions


def save(path: pathlib.Path, draw: Callable[..., Any], *args: Any) -> None:
  """Writes the figure that `draw(*args)` returns, in the reports' style; a reader never sees a part."""
  with pyplot.rc_context(_STYLE):
    figure = draw(*args)
    partial = path.with_name(f'.{path.name}')
    figure.savefig(partial, format='png', bbox_inches='tight')
    pyplot.close(figure)
  os.replace(partial, path)


def _series(rows: Rows, key: str) -> tuple[np.ndarray, np.ndarray]:
  pairs = [(r['step'], r[key]) for r in rows if r.get(key) is not None]
  return np.array([p[0] for p in pairs], float), np.array([p[1] for p in pairs], float)


def smooth(values: np.ndarray, window: int) -> np.ndarray:
  """Mean over the last `window` values, fewer at the start."""
  sums = np.cumsum(np.concatenate([[0.0], values]))
  ends = np.arange(1, len(values) + 1)
  starts = np.maximum(0, ends - window)
  return (sums[ends] - sums[starts]) / (ends - starts)


def draw_loss(train: Rows, held_out: Rows):
  """Next-token loss (raw and smoothed), MTP losses, held-out points."""
  figure, axis = pyplot.subplots()
  step, loss = _series(train, 'ce')
  window = max(1, len(step) // 50)
  axis.plot(step, loss, color=_MAIN, alpha=0.25, linewidth=0.8)
  axis.plot(step, smooth(loss, window), color=_MAIN, linewidth=1.8, label='next token, training')
  for k, color in enumerate(_MTP, 1):
    step, loss = _series(train, f'mtp_loss_{k}')
    if len(step):
      label = f'MTP step {k} (token t + {k + 1}), training'
      axis.plot(step, smooth(loss, window), color=color, linewidth=1.3, label=label)
  step, loss = _series(held_out, 'eval/loss')
  if len(step):
    axis.plot(step, loss, 'o-', color=_HELD_OUT, markersize=4, label='next token, held-out files')
    place = (step[-1], loss[-1])
    axis.annotate(
      f'{loss[-1]:.3f}', place, textcoords='offset points', xytext=(4, -12), color=_HELD_OUT
    )
  axis.set(xlabel='step', ylabel='cross-entropy (nats per token)', title='Loss')
  axis.legend()
  return figure


def draw_optimizer(train: Rows):
  """Learning rate above, gradient norm before clipping below."""
  figure, (upper, lower) = pyplot.subplots(2, 1, sharex=True)
  upper.plot(*_series(train, 'lr'), color=_MAIN)
  upper.set(ylabel='learning rate', title='Learning rate and gradient norm')
  upper.ticklabel_format(axis='y', style='sci', scilimits=(-2, 3))
  lower.plot(*_series(train, 'grad_norm'), color=_HELD_OUT, linewidth=0.9)
  lower.set(xlabel='step', ylabel='gradient norm\n(before clipping)', yscale='log')
  return figure


def draw_load(train: Rows):
  """Layer and expert by time; 1 is an even share."""
  rows = [r for r in train if 'load' in r]
  loads = np.array([r['load'] for r in rows])  # [times, layers, experts]
  times, layers, experts = loads.shape
  relative = loads.transpose(1, 2, 0).reshape(layers * experts, times) * experts
  figure, axis = pyplot.subplots(figsize=(9, min(10, 2 + 0.13 * layers * experts)))
  axis.grid(False)
  first, last = rows[0]['step'], rows[-1]['step']
  image = axis.imshow(
    relative, aspect='auto', interpolation='nearest', cmap='RdBu_r',
    norm=colors.TwoSlopeNorm(1.0, 0.0, max(2.0, float(np.quantile(relative, 0.999)))),
    extent=(first, max(last, first + 1), layers * experts, 0),
  )  # fmt: skip
  for layer in range(1, layers):
    axis.axhline(layer * experts, color='black', linewidth=0.8)
  axis.set_yticks([(i + 0.5) * experts for i in range(layers)], [f'{i}' for i in range(layers)])
  axis.set(xlabel='step', ylabel='MoE layer (its experts top to bottom;\nMTP steps last)')
  axis.set_title('Expert load')
  figure.colorbar(image, ax=axis, label='tokens, relative to an even share')
  return figure


def draw_indexers(train: Rows, held_out: Rows):
  """Above the recall, one line per indexer, the mean in bold; below the KL."""
  figure, (axis, below) = pyplot.subplots(2, 1, sharex=True, figsize=(9, 6))
  layers = 0
  while any(f'eval/indexer_recall_{layers}' in r for r in held_out):
    layers += 1
  shades = pyplot.get_cmap('viridis')(np.linspace(0.1, 0.9, max(1, layers)))
  for i in range(layers):
    line = _series(held_out, f'eval/indexer_recall_{i}')
    axis.plot(*line, color=shades[i], linewidth=1, label=f'indexer {i}')
  axis.plot(*_series(held_out, 'eval/indexer_recall'), color='black', linewidth=2.2, label='mean')
  axis.set(ylabel='share of the dense\nattention mass', title='Indexers')
  axis.set_ylim(top=1.0)
  axis.legend(ncols=2 if layers > 6 else 1)
  step, kl = _series(train, 'indexer_kl')
  below.plot(step, kl, color=_MAIN, linewidth=0.9)
  below.set(xlabel='step', ylabel='KL (nats per query),\nmean of the indexers', yscale='log')
  return figure


def draw_selection(s: Selection):
  """Left the selection of every query, right the attention of a few."""
  time = len(s.visible)
  figure, (left, right) = pyplot.subplots(
    1, 2, figsize=(11, 5), width_ratios=(1, 1.15), layout='constrained'
  )
  left.grid(False)
  picture = np.where(s.selected, 2, np.where(s.visible, 1, 0))
  left.imshow(picture, cmap=colors.ListedColormap(['white', '#e4e8ee', _MAIN]), vmin=0, vmax=2,
              interpolation='nearest')  # fmt: skip
  left.set(xlabel='key', ylabel='query')
  left.set_title(f'Layer {s.layer}: the {s.topk} selected keys (blue)\nof the visible ones (grey)')
  enough = np.flatnonzero(s.visible.sum(axis=1) > s.topk)
  queries = enough[np.linspace(0, len(enough) - 1, min(6, len(enough))).astype(int)]
  if not len(queries):
    queries = np.arange(time)[-1:]
  for i, query in enumerate(queries):
    visible = np.flatnonzero(s.visible[query])
    chosen = np.flatnonzero(s.selected[query])
    top = max(float(s.probs[query, chosen].max(initial=0.0)), 1e-6)
    base = len(queries) - 1 - i
    right.hlines(base, visible[0], visible[-1], color='#c9ced6', linewidth=1)
    heights = base + 0.85 * np.sqrt(s.probs[query, chosen] / top)
    right.vlines(chosen, base, heights, color=_MAIN, linewidth=1)
    right.plot(query, base, marker='v', color=_HELD_OUT, markersize=5)
  right.set_yticks(range(len(queries)), [f'query {q}' for q in queries[::-1]])
  right.set(xlabel='key', xlim=(-2, time + 2))
  right.set_title(
    f'Attention to the selected keys, mean of the {s.heads}\nheads that share them (root scale)'
  )
  return figure
