"""How cost grows: with the model, with chips, and with the length of a row.

  python -m benchmarks.scaling [--only=REGEX] [--out=runs/scaling] [--images=docs/images] [--list]

Every case of cases.py is one `python -m experiments.aot_compile --plan` in a process of its own. Its
output is kept in OUT/NAME.log and its result, or why there is none, as JSON in OUT/NAME.json. A case
that has a result is not compiled again; one that failed is tried anew. Then the tables of all results
are printed and written to OUT/tables.md, and the figures to IMAGES. With `--only` nothing is drawn.
"""

import argparse
import json
import pathlib
import re
import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import jax

from benchmarks.aot_table import file_name, reason
from benchmarks.scaling import cases, figures, tables


def result_of(name: str, case: cases.Case, folder: pathlib.Path) -> dict[str, Any]:
  """The JSON of a case, compiled if there is none yet; {'error': why} if there is none now."""
  path = folder / f'{file_name(name)}.json'
  if path.exists():
    found = json.loads(path.read_text())
    if 'error' not in found and found['command'] == case.command()[1:]:
      return found
  print(f'compiling {name}', file=sys.stderr, flush=True)
  done = subprocess.run(case.command(), capture_output=True, text=True, check=False)
  path.with_suffix('.log').write_text(done.stdout + done.stderr)
  if done.returncode == 0:
    found = json.loads(done.stdout.strip().splitlines()[-1])
  else:
    found = {'error': reason(done.stderr) or f'exit status {done.returncode}'}
  found = {'name': name, 'command': case.command()[1:]} | found
  path.write_text(json.dumps(found) + '\n')
  return found


def main(argv: Sequence[str] | None = None) -> int:
  """Returns the exit status."""
  parser = argparse.ArgumentParser(
    description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
  )
  parser.add_argument('--only', default='', help='cases whose name matches this expression')
  parser.add_argument('--out', type=pathlib.Path, default=pathlib.Path('runs/scaling'))
  parser.add_argument('--images', type=pathlib.Path, default=pathlib.Path('docs/images'))
  parser.add_argument('--list', action='store_true', help='print the commands and compile nothing')
  args = parser.parse_args(argv)
  every = cases.models() | cases.layers()
  chosen = {name: case for name, case in every.items() if re.search(args.only, name)}
  if not chosen:
    print(f'error: --only={args.only} matches none of {list(every)}', file=sys.stderr)
    return 2
  if args.list:
    for name, case in chosen.items():
      print(f'{name}: python {" ".join(case.command()[1:])}')
    return 0
  jax.config.update('jax_platforms', 'cpu')  # The children compile; nothing runs here.
  args.out.mkdir(parents=True, exist_ok=True)
  results = {name: result_of(name, case, args.out) for name, case in chosen.items()}
  text = tables.everything(results)
  print(text)
  if not args.only:
    (args.out / 'tables.md').write_text(text + '\n')
    args.images.mkdir(parents=True, exist_ok=True)
    figures.save_all(args.images, results)
  return 0


if __name__ == '__main__':
  sys.exit(main())
