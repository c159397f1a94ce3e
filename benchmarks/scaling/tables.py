"""What the compiled programs cost for every token that a chip takes, and where one limit passes another."""

import math
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.scaling import cases
from glm5_jax import config as models
from glm5_jax.aot.chips import CHIPS, Chip, roofline
from glm5_jax.modules.model import abstract_params
from glm5_jax.train import flops, stages

Results = Mapping[str, Mapping[str, Any]]
_CHIP = CHIPS['v5p']
# Keys or queries of a block of splash attention (pallas_kernels/dense_mla.py), and up to how many
# keys it has one backward kernel.
_SPLASH_BLOCK, _SPLASH_ONE_BACKWARD = 1024, 8192


class Cost(NamedTuple):
  """Of one chip; work is for each token of the batch that it takes.

  Attributes:
    chips: How many there are.
    state, peak: Bytes, held throughout and at most.
    flops, model_flops: What runs, and what the mathematics needs.
    hbm, sent: Bytes of HBM, and bytes sent to other chips.
    tokens: That a chip takes in a step.
  """

  chips: int
  state: float
  peak: float
  flops: float
  model_flops: float
  hbm: float
  sent: float
  tokens: float

  @property
  def seconds(self):
    """`chips.Roofline` of a token at the chip's published peaks."""
    return roofline(_CHIP, self.flops, self.hbm, self.sent)


def cost(result: Mapping[str, Any]) -> Cost:
  """Of the JSON of a compile."""
  tokens = result['tokens'] / result['chips']
  sent = sum(c['sent_bytes'] for c in result['collectives_per_chip'].values())
  return Cost(
    result['chips'], result['argument_bytes_per_chip'], result['peak_bytes_per_chip'],
    result['flops_per_chip'] / tokens, result['model_flops'] / result['tokens'],
    result['bytes_accessed_per_chip'] / tokens, sent / tokens, tokens,
  )  # fmt: skip


def costs(results: Results) -> dict[str, Cost]:
  """Of all that compiled."""
  return {name: cost(result) for name, result in results.items() if 'error' not in result}


def shares(long: float, short: float, tokens: tuple[int, int]) -> tuple[float, float]:
  """What a micro-batch costs whatever its size, and what a token does: g and d of d + g / n.

  Args:
    long, short: cost of a token where a chip takes `tokens[0]` and `tokens[1]` of a micro-batch.
    tokens: two different n.
  """
  per_micro_batch = (short - long) / (1 / tokens[1] - 1 / tokens[0])
  return per_micro_batch, long - per_micro_batch / tokens[0]


def network_limit(long: Cost, short: Cost, tokens: tuple[int, int], chip: Chip = _CHIP) -> float:
  """Tokens of a chip in a micro-batch at which sending takes as long as computing: weights and their
  gradients go once a micro-batch. Infinite if what every token sends takes longer alone.

  Args:
    long, short: the same model on the same chips with the same tokens of a step.
    tokens: of a chip in a micro-batch of each of the two.
    chip: whose peaks count.
  """
  per_micro_batch, per_token = shares(long.sent, short.sent, tokens)
  hidden = long.flops / chip.flops * chip.ici_bandwidth - per_token
  return per_micro_batch / hidden if hidden > 0 else math.inf


def crossover(lengths: Sequence[float], left: Sequence[float], right: Sequence[float]) -> float:
  """The first length at which `left` is no more than `right`, between points on straight lines in
  logarithms; infinite if there is none.
  """
  ratio = np.log(np.array(left) / np.array(right))
  for i, now in enumerate(ratio):
    if now <= 0:
      if i == 0:
        return float(lengths[0])
      share = ratio[i - 1] / (ratio[i - 1] - now)
      a, b = np.log(lengths[i - 1]), np.log(lengths[i])
      return float(np.exp(a + share * (b - a)))
  return math.inf


def formula(kind: str, length: int) -> float:
  """Model FLOPs of a token of the layer's case (train/flops.py), compiled or not."""
  sparse = kind != 'dense'
  config = models.glm5(
    num_hidden_layers=1, first_k_dense_replace=1, intermediate_size=256, vocab_size=256,
    sparse_attention=sparse,
  )  # fmt: skip
  pairs = flops.count_pairs(np.arange(length)[None], None, config.index_topk if sparse else None)
  return flops.train_flops(config, length, pairs, stage=stages.Stage(indexers=sparse)) / length


def splash_bytes(length: int) -> float:
  """What splash attention reads again, in bytes of HBM for a token of GLM-5's layer.

  The compiled program names keys and values once. Forward, and for the gradient of the queries, every
  block of queries reads those of all keys that it sees, half of the row on average; for that of the
  keys, blocks of keys read queries and the output's gradient likewise, which are as many bytes.
  """
  config = models.glm5()
  row = config.num_attention_heads * (config.qk_head_dim + config.v_head_dim) * 2
  passes = 2 if length <= _SPLASH_ONE_BACKWARD else 3
  return passes * row * length / 2 / _SPLASH_BLOCK


def layers(results: Results) -> dict[str, dict[int, Cost]]:
  """Kind of attention -> length of a row -> cost of the layer, with what splash reads again."""
  found: dict[str, dict[int, Cost]] = {kind: {} for kind in cases.ATTENTION}
  for kind in cases.ATTENTION:
    for length in cases.LENGTHS:
      result = results.get(f'{kind}, {length >> 10}K', {'error': 'not asked for'})
      if 'error' not in result:
        again = splash_bytes(length) if kind == 'dense' else 0.0
        plain = cost(result)
        found[kind][length] = plain._replace(hbm=plain.hbm + again)
  return found


def crossovers(results: Results) -> dict[str, float]:
  """Length from which sparse attention costs less than dense, by FLOPs, HBM and roofline seconds."""
  found = layers(results)
  both = sorted(found['dense'].keys() & found['sparse'].keys())
  if not both:
    return {}
  sides = [[found[kind][n] for n in both] for kind in ('sparse', 'dense')]
  measures = {
    'model FLOPs': None, 'FLOPs': lambda c: c.flops, 'bytes of HBM': lambda c: c.hbm,
    'seconds': lambda c: c.seconds.overlapped,
  }  # fmt: skip
  out = {}
  for name, measure in measures.items():
    if measure is None:
      every = list(cases.LENGTHS)
      values = [[formula(kind, n) for n in every] for kind in ('sparse', 'dense')]
      out[name] = crossover(every, *values)
    else:
      out[name] = crossover(both, *[[measure(c) for c in side] for side in sides])
  return out


def parameters(model: str) -> int:
  """Of one of cases.MODELS."""
  config = models.from_size(**({'size': 'glm5'} | dict(cases.MODELS[model].fields)))
  return sum(x.size for x in jax.tree.leaves(abstract_params(config)))


def model_table(results: Results) -> str:
  """Markdown: a line for every training step."""
  lines = [
    '| model | chips | state, GB | peak, GB | FLOPs | of the model\'s | HBM, kB | sent, kB |'
    ' compute, us | HBM, us | network, us |',
    '|---|---|---|---|---|---|---|---|---|---|---|',
  ]  # fmt: skip
  names = [name for name in cases.models() if name in results]
  for name in names:
    model, chips, *rest = name.split(', ')
    label = ', '.join([model, *rest])
    if 'error' in results[name]:
      lines.append(f'| {label} | {chips.split()[0]} | {results[name]["error"]} |' + ' |' * 8)
      continue
    c = cost(results[name])
    seconds = [f'{1e6 * s:.2f}' for s in (c.seconds.compute, c.seconds.memory, c.seconds.network)]
    cells = [label, f'{c.chips:,}', f'{c.state / 1e9:.2f}', f'{c.peak / 1e9:.1f}',
             f'{c.flops:.2e}', f'{c.flops / c.model_flops:.2f}', f'{c.hbm / 1e3:,.0f}',
             f'{c.sent / 1e3:,.0f}', *seconds]  # fmt: skip
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def layer_table(results: Results) -> str:
  """Markdown: a line for every length of a row."""
  found = layers(results)
  columns = [kind for kind in cases.ATTENTION if found[kind]]
  lines = [
    '| tokens of a row | '
    + ' | '.join(f'{kind}: GFLOP | of the formula | HBM, MB | us' for kind in columns)
    + ' |',
    '|---' * (1 + 4 * len(columns)) + '|',
  ]
  for length in cases.LENGTHS:
    cells = [f'{length:,}']
    for kind in columns:
      c = found[kind].get(length)
      model = formula(kind, length)
      if c is None:
        cells += [f'({model / 1e9:.2f})', '', '', '']
      else:
        cells += [f'{c.flops / 1e9:.2f}', f'{c.flops / model:.2f}', f'{c.hbm / 1e6:.2f}',
                  f'{1e6 * c.seconds.overlapped:.1f}']  # fmt: skip
    lines.append(f'| {" | ".join(cells)} |')
  return '\n'.join(lines)


def everything(results: Results) -> str:
  """All tables, and the points at which one cost passes another."""
  parts = []
  if any(name in results for name in cases.models()):
    parts.append(model_table(results))
  if any(name in results for name in cases.layers()):
    parts.append(layer_table(results))
  for name, length in crossovers(results).items():
    where = f'from {length:,.0f} tokens on' if length < math.inf else 'at no length compiled'
    parts.append(f'sparse below dense by {name}: {where}')
  known = costs(results)
  pair = [known.get(name) for name in ('744B, 1024 chips', '744B, 1024 chips, rows over 4')]
  if pair[0] and pair[1]:
    tokens = cases.ROW, cases.ROW // 4
    sent = shares(pair[0].sent, pair[1].sent, tokens)
    hbm = shares(pair[0].hbm, pair[1].hbm, tokens)
    parts.append(
      f'744B on 1,024 chips: a chip sends {sent[0]:.3e} bytes a micro-batch and {sent[1]:.3e} a token,'
      f' and moves {hbm[0]:.3e} and {hbm[1]:.3e} in HBM; below'
      f' {network_limit(pair[0], pair[1], tokens):,.0f} tokens of a chip in a micro-batch the network'
      ' is slower than the matrix units'
    )
  return '\n\n'.join(parts)
