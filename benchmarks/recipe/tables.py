"""The tables of docs/recipe_evidence.md, in Markdown, from the parts' results."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np


def _table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
  lines = [head, ['---'] * len(head), *body]
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def _groups(result: Mapping[str, Any]) -> dict[str, list[Mapping[str, Any]]]:
  out: dict[str, list[Mapping[str, Any]]] = {}
  for run in result['runs']:
    out.setdefault(run['variant'], []).append(run)
  return out


def _spread(values: Sequence[float], digits: int) -> str:
  """Mean, and the least and the largest where there are several."""
  if len(values) == 1:
    return f'{values[0]:.{digits}f}'
  low, high = min(values), max(values)
  return f'{np.mean(values):.{digits}f} ({low:.{digits}f} to {high:.{digits}f})'


def attention(result: Mapping[str, Any]) -> str:
  """The variants and optimizers."""
  body = []
  for name, runs in _groups(result).items():
    body.append([
      name, f'{result["parameters"][name]:,}', f'{runs[0]["tokens"]:,}',
      _spread([run['loss'] for run in runs], 3), _spread([run['logit_max'][-1] for run in runs], 2),
      _spread([max(run['logit_max']) for run in runs], 2), f'{len(runs)}',
    ])  # fmt: skip
  head = ('model, optimizer', 'parameters', 'tokens', 'held-out loss',
          'largest logit at the end', 'over training', 'seeds')  # fmt: skip
  return _table(head, body)


def rates(result: Mapping[str, Any]) -> str:
  """The same by learning rate, for the MLA model."""
  body = [
    [run['variant'], f'{run["rate"]:g}', f'{run["loss"]:.3f}', f'{run["logit_max"][-1]:.2f}',
     f'{max(run["logit_max"]):.2f}']
    for run in sorted(result['runs'], key=lambda run: (run['variant'], run['rate']))
  ]  # fmt: skip
  head = ('optimizer', 'peak rate', 'held-out loss', 'largest logit at the end', 'over training')
  return _table(head, body)


def sparse(result: Mapping[str, Any]) -> str:
  """The loss of every mode, the needles of either kind, the recall of every layer."""
  modes = result['modes']
  tables = [
    _table(('attention', 'loss'), [(n, f'{mode["loss"]:.3f}') for n, mode in modes.items()])
  ]
  for kind, first in next(iter(modes.values()))['needles'].items():
    body = []
    for name, mode in modes.items():
      n = mode['needles'][kind]
      gains = [f'{g:.2f} ± {e:.2f}' for g, e in zip(n['gain'], n['gain_error'], strict=True)]
      exact = ' '.join(f'{100 * share:.0f}' for share in n['exact'])
      body.append([name, *gains, f'{exact} ({100 * n["without_exact"]:.0f} without)'])
    head = [f'gain, {kind}', *(f'{d} back' for d in first['distances']), 'exact, %']
    tables.append(_table(head, body))
  layers = range(len(result['recall']['window']))
  body = [
    [name, *(f'{x:.3f}' for x in values), f'{np.mean(values):.3f}']
    for name, values in result['recall'].items()
  ]
  tables.append(_table(['recall', *(f'layer {i}' for i in layers), 'mean'], body))
  return '\n\n'.join(tables)


def mtp(result: Mapping[str, Any]) -> str:
  """Accept lengths, the acceptance of each draft, and the MTP losses."""
  body = []
  for name, runs in _groups(result).items():
    per_draft, losses = (
      np.mean([run[k] for run in runs], axis=0) for k in ('accepted', 'mtp_loss')
    )
    body.append([
      name, _spread([run['accept_length'] for run in runs], 3),
      ' '.join(f'{x:.3f}' for x in per_draft),
      _spread([run['accept_length_continuing'] for run in runs], 3),
      ' '.join(f'{x:.3f}' for x in losses), _spread([run['loss'] for run in runs], 3),
      f'{len(runs)}',
    ])  # fmt: skip
  head = ('MTP steps', 'accept length on text', 'drafts 1 to 4, if those before are',
          'accept length, own continuations', 'MTP losses 1 to 4', 'held-out loss',
          'seeds')  # fmt: skip
  return _table(head, body)


def balance(result: Mapping[str, Any]) -> str:
  """The load at the end of training."""
  keys = ('max_violation_end', 'max_violation_of_mean', 'smallest_share_end', 'entropy_end', 'loss')
  body = [
    [name, *(_spread([run[k] for run in runs], 3) for k in keys), f'{len(runs)}']
    for name, runs in _groups(result).items()
  ]
  head = ('balancing', 'MaxVio of a batch', 'MaxVio of the mean load', 'least used expert / mean',
          'entropy', 'held-out loss', 'seeds')  # fmt: skip
  return _table(head, body)


TABLES: dict[str, Callable[[Mapping[str, Any]], str]] = {
  'attention': attention, 'rates': rates, 'sparse': sparse, 'mtp': mtp, 'balance': balance
}  # fmt: skip
