"""How much of the network's work the compiled schedule hides: what it puts between start and end.

Instructions of a compiled computation stand in the order in which they run. A collective that starts
at one and ends at a later one can be under way during those between.
"""

from collections.abc import Iterator
from typing import Any

from glm5_jax.aot import hlo

Computations = dict[str, hlo.Computation]


def hidden(text: str, balance: float, filled: float = 1.0) -> dict[str, float]:
  """Bytes sent, by kind of collective, for which there are FLOPs between start and end.

  A FLOP hides the bytes of one collective, the one that started first. Memory traffic hides nothing
  here, so this is from below.

  Args:
    text: of the compiled program.
    balance: FLOPs that a device computes while it sends a byte.
    filled: see `hlo.measure`.
  """
  computations, entry = hlo.parse(text)
  flops: dict[str, float] = {}

  def total(name: str) -> float:  # FLOPs of a computation and all it calls.
    if name not in flops:
      computation = computations[name]
      flops[name] = sum(work(i, computation) for i in computation.values())
    return flops[name]

  def work(instruction: hlo.Instruction, computation: hlo.Computation) -> float:
    times = _repeats(instruction, computation, computations)
    inside = sum(total(name) for name in hlo.called_by(instruction))
    return hlo.flops_of(instruction, computation, filled) + times * inside

  found: dict[str, float] = {}
  pending = [(entry, 1)]
  while pending:
    name, times = pending.pop()
    computation = computations[name]
    under_way: dict[str, list[Any]] = {}  # Instruction -> kind, bytes that are not hidden yet
    for instruction in computation.values():
      if started := _started(instruction, computation, computations):
        under_way[instruction.name] = list(started)
      elif ended := _ended(instruction):
        under_way.pop(ended, None)
      else:
        free = work(instruction, computation) / balance
        for collective in under_way.values():
          kind, left = collective
          covered = min(free, left)
          found[kind] = found.get(kind, 0.0) + times * covered
          collective[1], free = left - covered, free - covered
      if instruction.opcode in ('while', 'conditional', 'call'):
        runs = times * _repeats(instruction, computation, computations)
        pending.extend((called, runs) for called in hlo.called_by(instruction))
  return found


def _repeats(
  instruction: hlo.Instruction, computation: hlo.Computation, computations: Computations
) -> int:
  if instruction.opcode != 'while':
    return 1
  return hlo.trip_count(instruction, computation, computations) or 1


def _started(
  instruction: hlo.Instruction, computation: hlo.Computation, computations: Computations
) -> tuple[str, float] | None:
  """Kind and bytes of the collective that an instruction starts, if it does."""
  kind = instruction.opcode.removesuffix('-start')
  if kind != instruction.opcode and kind in hlo.COLLECTIVES:
    return kind, hlo.sent_bytes(instruction, computation)
  if instruction.opcode == 'async-start' or instruction.name.startswith(hlo.FUSED_START):
    for found, where in _inside(instruction, computations):
      if found.opcode in hlo.COLLECTIVES:
        return found.opcode, hlo.sent_bytes(found, where)
  return None


def _ended(instruction: hlo.Instruction) -> str | None:
  """The name of the instruction that started what this one waits for."""
  if instruction.name.startswith(hlo.FUSED_DONE):
    return instruction.name.replace(hlo.FUSED_DONE, hlo.FUSED_START)
  if instruction.opcode.endswith('-done') and instruction.operands:
    return instruction.operands[0]
  return None


def _inside(
  instruction: hlo.Instruction, computations: Computations
) -> Iterator[tuple[hlo.Instruction, hlo.Computation]]:
  for name in hlo.called_by(instruction):
    for found in computations[name].values():
      yield found, computations[name]
      yield from _inside(found, computations)
