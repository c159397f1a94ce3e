"""Runs in MaxText's environment: its own ahead-of-time compile, ended before machine code.

  python benchmarks/maxtext_aot/peer.py --out=FOLDER KEY=VALUE ...

The keys are those of MaxText's `train_compile`, which does everything up to the compiler. Into
FOLDER go program.txt (the optimised HLO) and program.json (bytes of a chip, seconds of CPU time).
"""

import importlib.machinery
import importlib.metadata
import importlib.util
import json
import os
import pathlib
import sys
import time
from typing import Any
from unittest import mock

# Only MaxText's input pipelines use these; a compile reads no data.
_INPUT = ('tensorflow', 'tensorflow_datasets', 'tensorflow_text', 'seqio')


def stand_in(names: tuple[str, ...] = _INPUT) -> list[str]:
  """Puts empty modules where there are none of these names, and returns those."""
  missing = [name for name in names if importlib.util.find_spec(name) is None]
  for name in missing:
    spec = importlib.machinery.ModuleSpec(name, None)
    sys.modules[name] = mock.MagicMock(__spec__=spec, __version__='0')
  return missing


def main(argv: list[str]) -> None:
  """Ends the process: status 0, or 1 and the compiler's message after `error: ` on a line."""
  out = pathlib.Path(argv[1].removeprefix('--out='))
  stand_in()
  import jax
  from maxtext.trainers.pre_train import train_compile

  from glm5_jax.aot import program

  lower_and_compile = train_compile.jit_and_compile
  begun: list[float] = []

  def timed(*args: Any, **kwargs: Any) -> Any:
    begun.append(time.process_time())
    return lower_and_compile(*args, **kwargs)

  def plan(lowered: jax.stages.Lowered, compiler_options: Any = None) -> None:
    if compiler_options:
      raise ValueError(f'compile_xla_flags are not passed on: {compiler_options}')
    instead.stop()
    found = program.planned(lowered)
    seconds = time.process_time() - begun[-1]
    (out / 'program.txt').write_text(found.text)
    fields = found._asdict() | {
      'text': 'program.txt',
      'compile_cpu_seconds': seconds,
      'versions': {name: importlib.metadata.version(name) for name in ('jax', 'libtpu', 'flax')},
    }
    (out / 'program.json').write_text(json.dumps(fields) + '\n')
    sys.stdout.flush()
    os._exit(0)

  instead = mock.patch.object(jax.stages.Lowered, 'compile', plan)
  instead.start()
  try:
    with mock.patch.object(train_compile, 'jit_and_compile', timed):
      train_compile.main(['train_compile', *argv[2:]])
  except Exception as e:
    print(f'error: {type(e).__name__}: {e}', file=sys.stderr, flush=True)
    os._exit(1)


if __name__ == '__main__':
  main(sys.argv)
