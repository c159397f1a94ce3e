"""Part `attention`: attention logits by optimizer, and Table 1 in miniature (section 2.1).

Part `rates`: how much of it depends on the learning rate. Nothing was tuned for this comparison;
the rates are those that the demo's config and the README name for this project's nano model.
"""

import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from benchmarks.recipe import runs
from benchmarks.recipe.logits import logit_maxima

# Of configs/nano_pretrain.py; `rates` tries half and twice of it for each optimizer.
RATES = {'muon': 1e-2, 'muon_split': 1e-2, 'adamw': 4e-3}
# Name in the tables -> name of the run, optimizer, model.
MODELS: dict[str, tuple[str, str, Mapping[str, Any]]] = {
  'GQA, Muon': ('gqa', 'muon', runs.GQA),
  'MLA, Muon': ('mla', 'muon', runs.MLA),
  'MLA, Muon Split': ('mla', 'muon_split', runs.MLA),
  'MLA-256, Muon Split': ('mla256', 'muon_split', runs.MLA_256),
  'MLA, AdamW': ('mla', 'adamw', runs.MLA),
}
LOGIT_BATCHES = 4  # Of held-out rows, on which the maximum is taken.


def measure(workdir: pathlib.Path, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
  """The result of part `attention`, as it grows: after every run."""
  result: dict[str, Any] = {'parameters': {}, 'runs': []}
  for seed in seeds:
    for name, (model_name, optimizer, model) in MODELS.items():
      variant = runs.Variant(model_name, optimizer, RATES[optimizer], model)
      result['parameters'][name] = runs.parameters(runs.model_of(variant))
      measured = _measured(workdir, variant, seed)
      result['runs'].append({'variant': name, 'seed': seed, **measured})
      yield result


def measure_rates(workdir: pathlib.Path, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
  """The result of part `rates`, as it grows; of the first seed alone."""
  result: dict[str, Any] = {'runs': []}
  for factor in (1, 2, 0.5):
    for optimizer, rate in RATES.items():
      variant = runs.Variant('mla', optimizer, factor * rate)
      measured = _measured(workdir, variant, seeds[0])
      result['runs'].append({'variant': optimizer, 'rate': factor * rate, **measured})
      yield result


def _measured(workdir: pathlib.Path, variant: runs.Variant, seed: int) -> dict[str, Any]:
  folder = runs.trained(workdir, variant, seed)
  return runs.remembered(folder, lambda: _measure_one(folder, variant, seed))


def _measure_one(folder: pathlib.Path, variant: runs.Variant, seed: int) -> dict[str, Any]:
  config = runs.model_of(variant)
  _, held_out = runs.held_out()
  keys = ('tokens', 'positions', 'segment_ids')
  sample = held_out.batches[:LOGIT_BATCHES]
  batch = {k: np.concatenate([b[k] for b in sample]) for k in keys}
  steps = [0, *runs.saved_steps(folder)]
  heads = []  # [steps, layers, N]
  for step in steps:
    params = runs.params_at(folder, config, step, seed)
    heads.append(jax.device_get(logit_maxima(params, batch, config)))
  train = [row for row in runs.rows(folder) if 'tokens' in row]
  return {
    'loss': runs.loss(folder), 'steps': steps, 'logit_max': [float(h.max()) for h in heads],
    'heads_end': heads[-1].tolist(), 'tokens': int(sum(row['tokens'] for row in train)),
    'skipped': train[-1]['skipped'],
  }  # fmt: skip
