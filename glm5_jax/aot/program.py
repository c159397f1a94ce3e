"""A program as the compiler leaves it: its text and its memory, with or without machine code."""

import concurrent.futures
import pathlib
import re
import shutil
import tempfile
import threading
import time
from typing import Any, NamedTuple

import jax

# XLA's names of what it writes about a program, in the order in which it writes them.
_TEXT = '*.after_optimizations.txt'
_MEMORY = '*.after_optimizations-buffer-assignment.txt'
_LAST = '*.after_optimizations_after_buffer_assignment.txt'
_ALLOCATION = re.compile(r'^allocation \d+: size (\d+), (.*)$', re.MULTILINE)


class Program(NamedTuple):
  """What one device runs.

  Attributes:
    text: Optimised HLO.
    argument_bytes, temporary_bytes, peak_bytes: What it is given; what it uses besides; and the most
      that there is at once, as the compiler reports it or the sum of the two and of fresh results.
  """

  text: str
  argument_bytes: int
  temporary_bytes: int
  peak_bytes: int


def compiled(lowered: jax.stages.Lowered) -> Program:
  """All of the compilation.

  Raises:
    jax.errors.JaxRuntimeError: the compiler refuses, for instance for lack of memory.
  """
  executable = lowered.compile()
  memory: Any = executable.memory_analysis()
  arguments, temporary = memory.argument_size_in_bytes, memory.temp_size_in_bytes
  fresh = memory.output_size_in_bytes - memory.alias_size_in_bytes
  peak = max(arguments + temporary + fresh, getattr(memory, 'peak_memory_in_bytes', 0))
  return Program(executable.as_text() or '', arguments, temporary, peak)


def planned(lowered: jax.stages.Lowered) -> Program:
  """The compilation up to machine code, which takes most of the time and decides nothing else.

  XLA writes what it has decided to files, and then goes on with the code in a thread that cannot be
  stopped: the process should end soon, by `os._exit`.

  Raises:
    jax.errors.JaxRuntimeError: as for `compiled`, but for what only machine code has no room for.
  """
  folder = pathlib.Path(tempfile.mkdtemp(prefix='xla_plan_'))
  options: dict[str, str | bool] = {'xla_dump_to': str(folder), 'xla_dump_hlo_as_text': True}
  ended: concurrent.futures.Future[None] = concurrent.futures.Future()

  def compile_all() -> None:
    try:
      lowered.compile(compiler_options=options)
      ended.set_result(None)
    except BaseException as e:
      ended.set_exception(e)

  threading.Thread(target=compile_all, daemon=True).start()
  # Where the last file has begun, those before are complete.
  while not any(folder.glob(_LAST)):
    if ended.done():
      ended.result()
      break
    time.sleep(0.2)
  (text,), (memory,) = ([path.read_text() for path in folder.glob(p)] for p in (_TEXT, _MEMORY))
  shutil.rmtree(folder, ignore_errors=True)
  return Program(text, *memory_of(memory))


def memory_of(assignment: str) -> tuple[int, int, int]:
  """argument, temporary and peak bytes of the main memory, from XLA's list of allocations."""
  arguments = temporary = fresh = 0
  for size, kind in _ALLOCATION.findall(assignment):
    if re.search(r'\bcolor [1-9]', kind):
      continue  # A core's own memory.
    if re.search(r'\bparameter \d', kind):
      arguments += int(size)
    elif 'maybe-live-out' in kind:
      fresh += int(size)
    else:
      temporary += int(size)
  return arguments, temporary, arguments + temporary + fresh
