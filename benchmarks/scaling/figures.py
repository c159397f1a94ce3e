"""Figures of docs/scale.md, section 'How cost grows'."""

import pathlib
from typing import Any

import matplotlib

from benchmarks.scaling import cases, tables
from glm5_jax.train.plots import save

matplotlib.use('Agg')
from matplotlib import pyplot, ticker

_COLORS = {
  'nano': '#9fb7c9', '30M': '#66a182', '1B': '#e0a030', '30B': '#d1495b', '744B': '#1f5fa8',
  'dense': '#d1495b', 'sparse': '#1f5fa8', 'sparse, no kernels': '#66a182',
}  # fmt: skip
_SIZE = 10


def save_all(folder: pathlib.Path, results: tables.Results) -> None:
  """Writes scaling_models.png, scaling_chips.png and sparse_dense.png."""
  save(folder / 'scaling_models.png', draw_models, results)
  save(folder / 'scaling_chips.png', draw_chips, results)
  save(folder / 'sparse_dense.png', draw_layers, results)


def _logarithmic(axis: Any, x: str, y: str) -> None:
  axis.set_xscale('log')
  axis.set_yscale('log')
  axis.set_xlabel(x)
  axis.set_ylabel(y)
  axis.yaxis.set_minor_formatter(ticker.NullFormatter())


def draw_models(results: tables.Results):
  """FLOPs, HBM and network of a token by the number of parameters, on 64 chips (744B: 256)."""
  figure, (work, moved) = pyplot.subplots(1, 2, figsize=(_SIZE, 4), layout='constrained')
  known = tables.costs(results)
  found = {}
  for name in cases.MODELS:
    chips = 64 if 64 in cases.MODELS[name].chips else cases.MODELS[name].chips[0]
    if (c := known.get(f'{name}, {chips} chips')) is not None:
      found[name] = (tables.parameters(name), c)
  x = [n for n, _ in found.values()]
  values = [c for _, c in found.values()]
  work.plot(x, [c.flops for c in values], 'o-', color='#1f5fa8', label='compiled')
  work.plot(x, [c.model_flops for c in values], '--', color='#777777', label="the model's")
  moved.plot(x, [c.hbm for c in values], 'o-', color='#1f5fa8', label='read or written in HBM')
  moved.plot(x, [c.sent for c in values], 's-', color='#d1495b', label='sent to other chips')
  for axis, label in ((work, 'FLOPs of a token'), (moved, 'bytes of a token')):
    _logarithmic(axis, 'parameters', label)
    axis.legend(loc='lower right')
  for name, (n, c) in found.items():
    work.annotate(
      name, (n, c.flops), textcoords='offset points', xytext=(0, 8), ha='center', fontsize=9
    )
  return figure


def draw_chips(results: tables.Results):
  """Memory of a chip, and FLOPs, HBM and network of a token, by chips and model."""
  figure, axes = pyplot.subplots(2, 2, figsize=(_SIZE, 7), layout='constrained')
  known = tables.costs(results)
  for name, model in cases.MODELS.items():
    line = [c for n in model.chips if (c := known.get(f'{name}, {n} chips')) is not None]
    chips = [c.chips for c in line]
    style = {'color': _COLORS[name], 'marker': 'o', 'markersize': 4}
    axes[0, 0].plot(chips, [c.peak / 1e9 for c in line], label=name, **style)
    axes[0, 0].plot(chips, [c.state / 1e9 for c in line], linestyle=':', **style | {'marker': ''})
    axes[0, 1].plot(chips, [c.flops for c in line], **style)
    axes[1, 0].plot(chips, [c.hbm for c in line], **style)
    some = [c for c in line if c.sent]
    axes[1, 1].plot([c.chips for c in some], [c.sent for c in some], **style)
  for axis, label in (
    (axes[0, 0], 'GB of a chip: peak, and state (dotted)'), (axes[0, 1], 'FLOPs of a token'),
    (axes[1, 0], 'bytes of HBM of a token'), (axes[1, 1], 'bytes sent of a token'),
  ):  # fmt: skip
    _logarithmic(axis, 'chips', label)
    axis.set_xticks([1, 4, 16, 64, 256, 1024, 4096])
    axis.xaxis.set_major_formatter(ticker.FormatStrFormatter('%d'))
    axis.xaxis.set_minor_locator(ticker.NullLocator())
    axis.set_xlim(0.7, 6000)
  axes[0, 0].axhline(95, color='#777777', linewidth=0.8)
  axes[0, 0].annotate(
    '95 GB', (0.8, 95), textcoords='offset points', xytext=(0, 3), fontsize=8, color='#555555'
  )
  figure.legend(loc='outside upper center', ncols=len(cases.MODELS))
  return figure


def draw_layers(results: tables.Results):
  """FLOPs, bytes of HBM and roofline time of a token in one layer, by the length of its row."""
  figure, axes = pyplot.subplots(1, 3, figsize=(_SIZE + 3, 4.2), layout='constrained')
  found = tables.layers(results)
  for kind, line in found.items():
    if not line:
      continue
    lengths = sorted(line)
    style = {'color': _COLORS[kind], 'marker': 'o', 'markersize': 4, 'label': kind}
    for axis, measure in zip(
      axes,
      (lambda c: c.flops / 1e9, lambda c: c.hbm / 1e6, lambda c: 1e6 * c.seconds.overlapped),
      strict=True,
    ):
      axis.plot(lengths, [measure(line[n]) for n in lengths], **style)
  every = list(cases.LENGTHS)
  for kind in ('dense', 'sparse'):
    axes[0].plot(
      every, [tables.formula(kind, n) / 1e9 for n in every], '--', linewidth=1,
      color=_COLORS[kind], label=f'{kind}, by the formula',
    )  # fmt: skip
  for axis, label, name in (
    (axes[0], 'GFLOP of a token', 'FLOPs'), (axes[1], 'MB of HBM of a token', 'bytes of HBM'),
    (axes[2], 'microseconds of a token at the peaks of v5p', 'seconds'),
  ):  # fmt: skip
    _logarithmic(axis, 'tokens of a row', label)
    axis.set_xscale('log', base=2)
    axis.yaxis.set_major_locator(ticker.LogLocator(subs=(1, 2, 5)))
    axis.yaxis.set_major_formatter(ticker.FormatStrFormatter('%g'))
    axis.set_xticks(every[::2])
    axis.xaxis.set_major_formatter(ticker.FuncFormatter(lambda n, _: f'{int(n) >> 10}K'))
    where = tables.crossovers(results).get(name, float('inf'))
    if every[0] < where < every[-1]:
      axis.axvline(where, color='#777777', linewidth=0.8, linestyle=':')
      axis.annotate(
        f'{where / 1024:.0f}K', (where, 0.02), xycoords=('data', 'axes fraction'), fontsize=8,
        textcoords='offset points', xytext=(3, 0), color='#555555',
      )  # fmt: skip
  handles, labels = axes[0].get_legend_handles_labels()
  figure.legend(handles, labels, loc='outside upper center', ncols=len(labels))
  return figure
