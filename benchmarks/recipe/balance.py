"""Part `balance`: the load of the experts over time, with loss-free balancing and without.

Section 2.1 with GLM-4.5's numbers (arXiv 2508.06471, section 2.4): the correction bias of every
expert moves by 0.001 a step towards an even load (arXiv 2408.15664), and a sequence-wise balance
loss of weight 1e-4 is added. MaxVio is the second paper's measure: the load of the busiest expert
over the mean, less 1.
"""

import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from benchmarks.recipe import runs

RATE = 1e-2
OFF = {'router_bias_rate': 0.0}
VARIANTS = {
  'bias and loss': runs.Variant('mla', 'muon_split', RATE),
  'neither': runs.Variant(
    'unbalanced', 'muon_split', RATE, train=OFF | {'balance_loss_weight': 0.0}
  ),
}  # fmt: skip
LAST = 50  # Steps over which the end is averaged.


def max_violation(load: np.ndarray) -> np.ndarray:
  """[...]: max over experts of load / mean - 1, mean over layers, of `load` [..., layers, E]."""
  return np.mean(np.max(load, axis=-1) / np.mean(load, axis=-1) - 1, axis=-1)


def measure(workdir: pathlib.Path, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
  """The result, as it grows: after every run."""
  result: dict[str, Any] = {'runs': []}
  for seed in seeds:
    for name, variant in VARIANTS.items():
      folder = runs.trained(workdir, variant, seed)
      rows = [row for row in runs.rows(folder) if 'load' in row]
      load = np.array([row['load'] for row in rows])  # [steps, layers, E]
      violation = max_violation(load)
      late = load[-LAST:]
      result['runs'].append({
        'variant': name, 'seed': seed, 'loss': runs.loss(folder),
        'steps': [row['step'] for row in rows], 'max_violation': violation.tolist(),
        'max_violation_end': float(violation[-LAST:].mean()),
        # Of the load summed over those steps: what does not average out.
        'max_violation_of_mean': float(max_violation(late.mean(axis=0))),
        'smallest_share_end': float((late.mean(axis=0) * load.shape[-1]).min()),
        'entropy_end': float(np.mean([row['router_entropy'] for row in rows[-LAST:]])),
      })  # fmt: skip
      yield result
