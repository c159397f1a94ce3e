"""How many keys neighbouring queries select together, in a trained model with sparse attention.

  python -m benchmarks.selection_overlap --run=DIR [--rows=16] [--out=runs/selection_overlap]

DIR is a run that ended with sparse attention, such as the last stage of configs/nano_pipeline.py. The gathered kernels
of `sparse_mla` and `indexer_kl` read the union of the selections of a block of neighbouring queries: what each further
query adds to it decides their speed, and which blocks are best (`pallas_kernels.tuning.NEW_ROWS` assumes it). Rows are
stretches of held-out documents as long as those that the run trained with. Prints two tables and one line of JSON;
writes OUT/selection_overlap.png.
"""

import argparse
import functools
import json
import pathlib
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib import pyplot

from benchmarks.recipe import runs, sparse
from benchmarks.serving.runs import markdown
from glm5_jax.config import ModelConfig
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import forward
from pallas_kernels import tuning, tuning_table

QUERIES = (2, 4, 8, 16)  # Of a block.


@functools.partial(jax.jit, static_argnames='config')
def selections(params: Any, tokens: jax.Array, config: ModelConfig) -> jax.Array:
  """[layers, B, T, T] bool, which keys the indexers select for each query of `tokens` [B, T]."""
  out = forward(
    params, tokens, config=config, logits=False, options=Options(capture=True, form='expanded')
  )
  layers = []
  for stack in config.stacks:
    blocks = [out.aux[stack.name][f'block{j}']['selected'] for j in range(len(stack.blocks))]
    both = jnp.stack(blocks, axis=1)  # [repeats, blocks, B, T, S]
    layers.append(both.reshape(-1, *both.shape[2:]))
  return jnp.concatenate(layers)


def union_sizes(selected: np.ndarray, queries: int) -> np.ndarray:
  """[..., T / queries] int, keys that at least one query of a block selects, of [..., T, S] bool."""
  *lead, time, keys = selected.shape
  blocks = selected.reshape(*lead, time // queries, queries, keys)
  return blocks.any(axis=-2).sum(axis=-1)


def by_chance(visible: np.ndarray, selected: int, queries: int) -> np.ndarray:
  """The expected union of independent draws of `selected` of `visible` keys."""
  return visible * (1 - (1 - selected / visible) ** queries)


def new_rows(union: Any, queries: int) -> Any:
  """What each further query of a block adds to its union, both as a share of one selection."""
  return (union - 1) / (queries - 1)


def measure(run: pathlib.Path, rows: int) -> dict[str, Any]:
  """Unions over one selection, the mean over blocks of queries in the second half of each row.

  Raises:
    ValueError: the held-out documents have fewer rows, or their queries see too few keys.
  """
  stage = sparse.load(run)
  config = stage.model.replace(sparse_attention=True)
  settings = json.loads((run / 'config.json').read_text(encoding='utf-8'))
  time, topk = settings['data']['seq_len'], config.index_topk
  if time < 8 * topk:
    raise ValueError(f'{run}: rows of {time} tokens are too short for selections of {topk}')
  tokens = runs.held_out_rows(runs.corpus_of(run, settings), time, rows)
  # One row at a time: its scores and selections are [T, T] in every layer.
  found = [np.asarray(selections(stage.params, row[None], config)[:, 0]) for row in tokens]
  return {'run': run.name, 'rows': rows} | summary(np.stack(found, axis=1), topk)


def summary(selected: np.ndarray, topk: int) -> dict[str, Any]:
  """What `measure` gives, of `selected` [layers, rows, T, T] with `topk` keys a query."""
  time = selected.shape[-1]
  late = selected[:, :, time // 2 :]
  visible = np.arange(time // 2, time) + 1.0
  unions = {m: union_sizes(late, m) / topk for m in QUERIES}
  return {
    'seq_len': time, 'index_topk': topk,
    'layers': {m: u.mean(axis=(1, 2)).tolist() for m, u in unions.items()},
    # Eighths of the measured half.
    'by_position': {
      m: [float(part.mean()) for part in np.array_split(u, 8, axis=-1)] for m, u in unions.items()
    },
    'chance': {m: float(by_chance(visible, topk, m).mean()) / topk for m in QUERIES},
  }  # fmt: skip


def mean(result: dict[str, Any], queries: int) -> float:
  """Of all layers, the union of a block over one selection."""
  return float(np.mean(result['layers'][queries]))


def best(
  chip: str, op: str, direction: str, result: dict[str, Any]
) -> tuple[Any, float, Any, float]:
  """The chosen blocks, the best ones for what was measured, and each's cycles a query for that."""
  tried = tuning_table.CYCLES[chip, op, 'gather', direction]

  def cost(blocks: tuple[int, ...]) -> float:
    m = blocks[0]
    share = 0.0 if m == 1 else new_rows(mean(result, m), m)
    return tuning.cost(op, 'gather', blocks, tried[blocks], share)

  chosen = tuning.best_blocks(chip, op, 'gather', direction)
  cheapest = min((b for b in tried if b[0] == 1 or b[0] in QUERIES), key=cost)
  return chosen, cost(chosen), cheapest, cost(cheapest)


def tables(result: dict[str, Any]) -> str:
  """The unions, and what they would mean for the kernels."""
  layers = range(len(result['layers'][QUERIES[0]]))
  head = ['queries of a block', *(f'layer {i}' for i in layers), 'mean', 'new a further query',
          'assumed', 'by chance']  # fmt: skip
  unions = []
  for m in QUERIES:
    values = *result['layers'][m], mean(result, m)
    more = f'{new_rows(values[-1], m):.3f}'
    others = tuning.block_rows(m) / tuning.SELECTED, result['chance'][m]
    unions.append([m, *(f'{x:.2f}' for x in values), more, *(f'{x:.2f}' for x in others)])
  costs = []
  for chip, op, regime, direction in sorted(tuning_table.CYCLES):
    if regime == 'gather' and op in ('sparse_mla', 'indexer_kl'):
      chosen, ours, cheapest, least = best(chip, op, direction, result)
      cells = _blocks(chosen), f'{ours:,.0f}', _blocks(cheapest), f'{least:,.0f}'
      costs.append([op, direction, chip, *cells])
  titles = ('op', 'direction', 'chip', 'chosen blocks', 'cycles a query', 'best blocks',
            'cycles a query')  # fmt: skip
  return f'{markdown(head, unions)}\n\n{markdown(titles, costs)}'


def _blocks(blocks: Sequence[int]) -> str:
  return f'{blocks[0]} x {blocks[2]}'


def draw(result: dict[str, Any], path: pathlib.Path) -> None:
  """The union over one selection by the queries of a block, and by the keys that they see."""
  figure, (left, right) = pyplot.subplots(1, 2, figsize=(10, 3.8), layout='constrained')
  for i in range(len(result['layers'][QUERIES[0]])):
    left.plot(QUERIES, [result['layers'][m][i] for m in QUERIES], marker='o', label=f'layer {i}')
  assumed = [tuning.block_rows(m) / tuning.SELECTED for m in QUERIES]
  left.plot(QUERIES, assumed, color='black', linestyle='--', label='assumed')
  left.plot(QUERIES, [result['chance'][m] for m in QUERIES], color='gray', linestyle=':',
            label='by chance')  # fmt: skip
  left.set(xscale='log', xlabel='queries of a block', ylabel='union / one selection')
  left.set_xticks(QUERIES, [str(m) for m in QUERIES])
  left.minorticks_off()
  left.legend(frameon=False)
  half = result['seq_len'] / 2
  seen = (half + half * (np.arange(8) + 0.5) / 8) / result['index_topk']
  for m in QUERIES:
    right.plot(seen, result['by_position'][m], marker='o', label=f'{m} queries')
  top = 1.25 * max(result['by_position'][QUERIES[-1]])
  right.set(xlabel='keys seen / keys selected', ylabel='union / one selection', ylim=(1, top))
  right.legend(frameon=False, ncols=2)
  for axis in (left, right):
    axis.grid(alpha=0.25)
  figure.savefig(path, dpi=120)
  pyplot.close(figure)


def main() -> None:
  """Measures, draws, and prints the tables and one line of JSON."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('--run', required=True, help='the folder of a run with sparse attention')
  parser.add_argument('--rows', type=int, default=16, help='held-out stretches')
  parser.add_argument('--out', default='runs/selection_overlap')
  args = parser.parse_args()
  out = pathlib.Path(args.out).absolute()
  out.mkdir(parents=True, exist_ok=True)
  result = measure(pathlib.Path(args.run).absolute(), args.rows)
  draw(result, out / 'selection_overlap.png')
  print(tables(result))
  print(json.dumps(result))


if __name__ == '__main__':
  main()
