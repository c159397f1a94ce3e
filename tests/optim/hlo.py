"""What a compiled program computes and sends, per device, from its HLO text, loops multiplied in."""

import math
import re
from typing import NamedTuple

import numpy as np

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$')
_INSTRUCTION = re.compile(r'^\s+(?:ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z\-]*)\((.*)$')
_SHAPE = re.compile(r'\b[a-z]+\d+\[([\d,]*)\]')
_CALLS = re.compile(r'(?:calls|to_apply|body|condition)=%?([\w.\-]+)')


class Instruction(NamedTuple):
  """One line of a computation, and how often a step runs it."""

  opcode: str
  shapes: tuple[tuple[int, ...], ...]  # Of the result; several where it is a tuple.
  flops: int  # Of one run; only dots have any.
  times: int
  text: str

  @property
  def elements(self) -> int:
    return sum(math.prod(s) for s in self.shapes)

  @property
  def replica_groups(self) -> list[list[int]]:
    """Of a collective: which devices take part together.

    Written out, or as a transposed range, or by names of the mesh's axes (newer compilers).
    """
    if listed := re.search(r'replica_groups=\{(\{.*?\})\}', self.text):
      return [_integers(group) for group in re.findall(r'\{(.*?)\}', listed[1])]
    if named := re.search(r'replica_groups=mesh\[(.*?)\] \{(.*?)\}', self.text):
      mesh = {axis: int(size) for axis, size in re.findall(r"'(\w+)'=(\d+)", named[1])}
      inner = [axis for axis in mesh if f"'{axis}'" in named[2]]
      order = [list(mesh).index(axis) for axis in [a for a in mesh if a not in inner] + inner]
      devices = np.arange(math.prod(mesh.values())).reshape(tuple(mesh.values())).transpose(order)
      return devices.reshape(-1, math.prod(mesh[axis] for axis in inner)).tolist()
    found = re.search(r'replica_groups=\[([\d,]+)\]<=\[([\d,]+)\](?:T\(([\d,]+)\))?', self.text)
    assert found is not None, self.text
    devices = np.arange(math.prod(_integers(found[2]))).reshape(_integers(found[2]))
    devices = devices.transpose(_integers(found[3])) if found[3] else devices
    return devices.reshape(_integers(found[1])).tolist()


def read(text: str) -> list[Instruction]:
  """All instructions that the entry computation reaches.

  Raises:
    ValueError: a loop has no known trip count.
  """
  computations: dict[str, list[re.Match]] = {}
  entry = current = ''
  for line in text.splitlines():
    if head := _HEAD.match(line):
      current = head[2]
      computations[current] = []
      entry = current if head[1] else entry
    elif found := _INSTRUCTION.match(line):
      computations[current].append(found)
  out: list[Instruction] = []
  _walk(entry, 1, computations, out)
  return out


def _walk(name: str, times: int, computations, out: list[Instruction]) -> None:
  shapes = {m[1]: _shapes(m[2]) for m in computations[name]}
  for _, result, opcode, rest in (m.groups() for m in computations[name]):
    flops = 0
    if opcode == 'dot':
      left = shapes[re.findall(r'%([\w.\-]+)', rest)[0]][0]
      axes = re.search(r'lhs_contracting_dims=\{([\d,]+)\}', rest)
      assert axes is not None
      contracted = math.prod(left[i] for i in _integers(axes[1]))
      flops = 2 * math.prod(_shapes(result)[0]) * contracted
    out.append(Instruction(opcode, _shapes(result), flops, times, rest))
    repeats = 1
    if opcode == 'while':
      count = re.search(r'"known_trip_count":\{"n":"(\d+)"', rest)
      if not count:
        raise ValueError(f'a loop in {name} has no known trip count: {rest}')
      repeats = int(count[1])
    for called in _CALLS.findall(rest):
      _walk(called, times * repeats, computations, out)


def _shapes(text: str) -> tuple[tuple[int, ...], ...]:
  return tuple(tuple(_integers(dims)) for dims in _SHAPE.findall(text))


def _integers(text: str) -> list[int]:
  return [int(n) for n in text.split(',') if n]
