"""What of the paper's recipe can be seen at the size of a toy: trains, measures, draws, tabulates.

  python -m benchmarks.recipe --part=attention|rates|mtp|balance --seeds=3 --workdir=DIR
  python -m benchmarks.recipe --part=sparse --pipeline=DIR --workdir=DIR

Every part writes WORKDIR/PART.json and WORKDIR/recipe_*.png and prints a Markdown table; after an
interruption the same command goes on. `sparse` trains nothing: it looks at the stages of
`python -m experiments.run --config=configs/nano_pipeline.py --workdir=DIR`.
docs/recipe_evidence.md has the results, what they show and what they do not.
"""

import argparse
import json
import pathlib
import sys
from collections.abc import Iterator, Mapping
from typing import Any

from benchmarks.recipe import attention, balance, figures, mtp, sparse, tables
from glm5_jax.train import plots
from glm5_jax.train.workdir import write_atomically


def _results(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
  if args.part == 'sparse':
    return sparse.measure(pathlib.Path(args.pipeline))
  part = {
    'attention': attention.measure, 'rates': attention.measure_rates, 'mtp': mtp.measure,
    'balance': balance.measure,
  }[args.part]  # fmt: skip
  return part(pathlib.Path(args.workdir), range(args.seeds))


def _show(part: str, result: Mapping[str, Any], workdir: pathlib.Path) -> None:
  for name, draw in figures.FIGURES[part].items():
    plots.save(workdir / f'recipe_{name}.png', draw, result)
  print(f'\n{tables.TABLES[part](result)}\n', flush=True)


def main() -> int:
  """Returns the exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--part', required=True, choices=sorted(tables.TABLES))
  parser.add_argument('--workdir', required=True)
  parser.add_argument('--seeds', type=int, default=3)
  parser.add_argument('--pipeline', default='', help="for 'sparse': a run of nano_pipeline.py")
  args = parser.parse_args()
  if args.part == 'sparse' and not (pathlib.Path(args.pipeline) / sparse.DENSE).is_dir():
    parser.error(
      f'--pipeline={args.pipeline} has no stage {sparse.DENSE}: make one by python -m'
      ' experiments.run --config=configs/nano_pipeline.py --workdir=DIR'
    )
  workdir = pathlib.Path(args.workdir)
  workdir.mkdir(parents=True, exist_ok=True)
  result: dict[str, Any] = {}
  for result in _results(args):
    write_atomically(workdir / f'{args.part}.json', json.dumps(result, indent=1) + '\n')
  _show(args.part, result, workdir)
  return 0


if __name__ == '__main__':
  sys.exit(main())
