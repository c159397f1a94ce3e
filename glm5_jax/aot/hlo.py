"""What a compiled program does in one run on a device: its HLO text, read with loops multiplied in.

XLA's own cost analysis counts the body of a loop once, and a model is a loop over its layers.
"""

import math
import re
from collections.abc import Iterator
from typing import NamedTuple

_HEAD = re.compile(r'^(ENTRY )?%?([\w.\-]+) \(.*\) -> .* \{$')
_INSTRUCTION = re.compile(r'^\s+(ROOT )?%?([\w.\-]+) = (.*?) ([a-z][a-z0-9\-]*)\((.*)$')
_ARRAY = re.compile(r'\b(pred|[a-z]+[0-9][a-z0-9]*)\[([\d,<=]*)\](?:\{([^}]*)\})?')
_CALLED = re.compile(
  r'(calls|to_apply|body|condition)=%?([\w.\-]+)|branch_computations=\{([^}]*)\}'
)
_BITS = re.compile(r'\d+')
COLLECTIVES = (
  'all-gather', 'all-reduce', 'reduce-scatter', 'all-to-all', 'ragged-all-to-all',
  'collective-permute', 'collective-broadcast',
)  # fmt: skip
# Neither compute nor move anything.
_FREE = frozenset({
  'parameter', 'constant', 'tuple', 'get-tuple-element', 'bitcast', 'while', 'conditional', 'call',
  'after-all', 'opt-barrier', 'partition-id', 'replica-id', 'reshape', 'iota', 'add-dependency',
})  # fmt: skip
_GROUPED = ('ragged-dot', 'tgmm', 'gmm')  # XLA's grouped matmul; JAX's, last for activations.
# Names of the fusions with which XLA's asynchronous collectives start and end.
FUSED_START, FUSED_DONE = 'async-collective-start', 'async-collective-done'
# Change a part of their first operand; which operand is the part.
_UPDATES = {'dynamic-update-slice': 1, 'scatter': 2}
_SLICES = ('dynamic-slice', 'slice', 'gather')


class Array(NamedTuple):
  """One array of an instruction's result."""

  dtype: str
  shape: tuple[int, ...]
  in_hbm: bool  # And not in a core's own memory or the host's.

  @property
  def bytes(self) -> float:
    bits = 8 if self.dtype == 'pred' else int(_BITS.findall(self.dtype)[0])
    return math.prod(self.shape) * bits / 8


class Instruction(NamedTuple):
  """One line of a computation."""

  name: str
  opcode: str
  result: tuple[Array, ...]  # Several where it is a tuple.
  operands: tuple[str, ...]
  text: str  # From the operands on.
  is_root: bool


Computation = dict[str, Instruction]


class Run(NamedTuple):
  """An instruction, how often it runs, and where it stands."""

  instruction: Instruction
  computation: Computation
  times: int
  fused: bool


class Collective(NamedTuple):
  """All runs of one kind of collective, in bytes of one device.

  sent: what a device has to send on a ring, all-reduce counted as reduce-scatter and all-gather; of
    a ragged all-to-all what an even load sends.
  """

  calls: int
  payload: float  # The larger of operands and results; of a ragged all-to-all the smaller.
  sent: float
  started: int = 0  # Of the calls, those that start something which ends later.


class Work(NamedTuple):
  """What one run of the program does on one device."""

  flops: float
  bytes: float  # Read from and written to HBM.
  collectives: dict[str, Collective]
  kernels: dict[str, float]  # FLOPs of custom calls by name; part of `flops`.
  unknown_loops: int  # Loops whose number of iterations depends on data: counted once.


def measure(text: str, filled: float = 1.0) -> Work:
  """Reads the text of a compiled program, `jax.stages.Compiled.as_text()`.

  Counted are products of matrices, in FLOPs of two a multiply-add; those of custom calls by their
  own estimate, or of XLA's grouped matmul by its shapes. Bytes are those of every operand and
  result of what is not fused, of slices and in-place updates only the part they touch: an estimate,
  as what stays in caches is not known. Of custom calls they are their own estimate, where there is one.

  Args:
    text: the program.
    filled: share of the rows of grouped matmuls that belong to a group; their kernels compute no
      others.
  """
  computations, entry = parse(text)
  flops, traffic = 0.0, 0.0
  kernels: dict[str, float] = {}
  collectives: dict[str, Collective] = {}
  runs, unknown = walk(computations, entry)
  starts, later = _asynchronous(computations)
  for instruction, computation, times, fused in runs:
    opcode = instruction.opcode.removesuffix('-start')
    work = times * flops_of(instruction, computation, filled)
    flops += work
    if opcode == 'custom-call' and 'tpu_custom_call' in instruction.text:
      name = re.sub(r'[.\d]+$', '', instruction.name)
      kernels[name] = kernels.get(name, 0.0) + work
    elif opcode in COLLECTIVES and id(computation) not in later:
      found = _added(collectives.get(opcode), instruction, computation, times)
      if opcode != instruction.opcode or id(computation) in starts:
        found = found._replace(started=found.started + times)
      collectives[opcode] = found
    if not fused:
      traffic += times * _traffic(instruction, computation, computations)
  return Work(flops, traffic, collectives, kernels, unknown)


def flops_of(instruction: Instruction, computation: Computation, filled: float = 1.0) -> float:
  """Of one run of an instruction, without what it calls; `filled` as in `measure`."""
  if instruction.opcode in ('dot', 'convolution'):
    return _matmul_flops(instruction, computation)
  if instruction.opcode == 'custom-call' and 'tpu_custom_call' in instruction.text:
    share = filled if instruction.name.startswith(_GROUPED) else 1.0
    return share * _kernel_flops(instruction, computation)
  return 0.0


def _asynchronous(computations: dict[str, Computation]) -> tuple[set[int], set[int]]:
  """The computations (their `id`) in which collectives start, and those in which they go on or end.

  XLA gives a collective to the fusions that run meanwhile: each of them has a copy of it.
  """
  starts, later = set(), set()
  for computation in computations.values():
    for instruction in computation.values():
      called = {id(computations[name]) for name in called_by(instruction)}
      if instruction.opcode == 'async-start' or instruction.name.startswith(FUSED_START):
        starts |= called
      elif instruction.name.startswith(FUSED_DONE):
        later |= called
  later |= {id(c) for name, c in computations.items() if name.startswith('async_collective_fusion')}
  return starts, later


def parse(text: str) -> tuple[dict[str, Computation], str]:
  """All computations by name, and the name of the one that runs."""
  computations: dict[str, Computation] = {}
  entry = current = name = ''
  for line in text.splitlines():
    if head := _HEAD.match(line):
      current, name = head[2], ''
      computations[current] = {}
      entry = current if head[1] else entry
    elif line == '}':
      name = ''
    elif current and (found := _INSTRUCTION.match(line)):
      root, name, result, opcode, rest = found.groups()
      operands = re.findall(r'%([\w.\-]+)', rest[: _closing(rest)])
      arrays = tuple(_array(*m) for m in _ARRAY.findall(result))
      computations[current][name] = Instruction(
        name, opcode, arrays, tuple(operands), rest, bool(root)
      )
    elif name:  # A kernel's attributes may hold line breaks.
      before = computations[current][name]
      computations[current][name] = before._replace(text=before.text + line)
  return computations, entry


def _closing(text: str) -> int:
  """The position of the bracket that closes the one before `text`."""
  depth = 1
  for i, character in enumerate(text):
    depth += (character == '(') - (character == ')')
    if not depth:
      return i
  return len(text)


def _array(dtype: str, dims: str, layout: str) -> Array:
  shape = tuple(int(n.strip('<=')) for n in dims.split(',') if n)
  return Array(dtype, shape, not re.search(r'S\([1-9]\)', layout))


def walk(computations: dict[str, Computation], entry: str) -> tuple[list[Run], int]:
  """Everything that runs, and how many loops have an unknown number of iterations."""
  out: list[Run] = []
  unknown = 0
  pending: list[tuple[str, int, bool]] = [(entry, 1, False)]
  while pending:
    name, times, fused = pending.pop()
    computation = computations[name]
    for instruction in computation.values():
      out.append(Run(instruction, computation, times, fused))
      repeats: int | None = 1
      if instruction.opcode == 'while':
        repeats = trip_count(instruction, computation, computations)
        unknown += repeats is None
      inside = fused or instruction.opcode == 'fusion'
      runs = times * (1 if repeats is None else repeats)
      pending.extend((called, runs, inside) for called in called_by(instruction))
  return out, unknown


def called_by(instruction: Instruction) -> Iterator[str]:
  """The computations that an instruction runs."""
  if instruction.opcode in (*COLLECTIVES, 'reduce', 'scatter', 'sort', 'reduce-window', 'map'):
    return  # What they apply is a scalar's matter.
  for kind, name, branches in _CALLED.findall(instruction.text):
    if branches:
      yield from re.findall(r'%?([\w.\-]+)', branches)
    elif kind != 'condition':
      yield name


def trip_count(
  loop: Instruction, computation: Computation, computations: dict[str, Computation]
) -> int | None:
  """Iterations of a `while`, where it counts from one constant to another in steps of 1."""
  if known := re.search(r'"known_trip_count":\{"n":"(\d+)"', loop.text):
    return int(known[1])
  condition = next(name for kind, name, _ in _CALLED.findall(loop.text) if kind == 'condition')
  compare, inside, arguments = _comparison(computations[condition], computations)
  if compare is None or 'direction=LT' not in compare.text:
    return None
  sides = [_resolve(inside, name, arguments, computations[condition]) for name in compare.operands]
  if len(sides) != 2 or sides[0] is None or sides[1] is None:
    return None
  initial = computation.get(loop.operands[0])

  def value(side: Instruction) -> int | None:
    if side.opcode == 'constant':
      return _constant(side)
    if side.opcode == 'get-tuple-element' and initial and initial.opcode == 'tuple':
      index = re.search(r'index=(\d+)', side.text)
      assert index is not None
      source = _resolve(computation, initial.operands[int(index[1])], {}, computation)
      return _constant(source) if source and source.opcode == 'constant' else None
    return None

  start, limit = value(sides[0]), value(sides[1])
  return None if start is None or limit is None else max(limit - start, 0)


def _comparison(condition: Computation, computations: dict[str, Computation]):
  """The comparison that a loop's condition ends with, its computation, and that one's arguments."""
  root = next((i for i in condition.values() if i.is_root), None)
  if root is not None and root.opcode == 'fusion':
    inside = computations[next(called_by(root))]
    inner = next((i for i in inside.values() if i.is_root and i.opcode == 'compare'), None)
    return inner, inside, dict(enumerate(root.operands))
  return (root if root and root.opcode == 'compare' else None), condition, {}


def _resolve(
  inside: Computation, name: str, arguments: dict[int, str], outside: Computation
) -> Instruction | None:
  """What a name stands for behind copies, and behind a fusion's parameters."""
  here = inside
  found = here.get(name)
  while found is not None:
    if found.opcode == 'parameter' and arguments:
      name, here, arguments = arguments[int(found.text.split(')')[0])], outside, {}
      found = here.get(name)
    elif found.opcode in ('copy', 'bitcast', 'convert', 'copy-done', 'copy-start', 'reshape'):
      found = here.get(found.operands[0])
    else:
      return found
  return None


def _constant(instruction: Instruction) -> int | None:
  text = instruction.text.split(')')[0]
  return int(text) if re.fullmatch(r'-?\d+', text) else None


def _shape(name: str, computation: Computation) -> tuple[int, ...]:
  return computation[name].result[0].shape


def _matmul_flops(instruction: Instruction, computation: Computation) -> float:
  """Two times the multiply-adds; of a convolution, those that do not fall on padding."""
  left, right = (_shape(name, computation) for name in instruction.operands[:2])
  out = instruction.result[0].shape
  if instruction.opcode == 'dot':
    axes = re.search(r'lhs_contracting_dims=\{([\d,]*)\}', instruction.text)
    contracted = [left[int(i)] for i in axes[1].split(',') if i] if axes else []
    return 2.0 * math.prod(out) * math.prod(contracted)
  labels = re.search(r'dim_labels=(\w+)_(\w+)->(\w+)', instruction.text)
  assert labels is not None, instruction.text
  lhs, rhs, result = labels.groups()
  window = re.search(r'window=\{([^}]*)\}', instruction.text)
  taps = 1
  for axis in sorted(c for c in rhs if c.isdigit()):
    setting = _window(window[1] if window else '', int(axis))
    taps *= _taps(left[lhs.index(axis)], out[result.index(axis)], *setting)
  groups = re.search(r'batch_group_count=(\d+)', instruction.text)
  kept = out[result.index('b')] * out[result.index('f')] * right[rhs.index('i')]
  return 2.0 * kept * taps / (int(groups[1]) if groups else 1)


def _window(text: str, axis: int) -> tuple[int, int, int, int, int]:
  """size, stride, low padding, dilation of the input and of the window, along one axis."""
  fields = dict(part.split('=') for part in text.split())

  def at(name: str, default: str) -> str:
    return fields[name].split('x')[axis] if name in fields else default

  low = int(at('pad', '0_0').split('_')[0])
  return (
    int(at('size', '1')), int(at('stride', '1')), low, int(at('lhs_dilate', '1')),
    int(at('rhs_dilate', '1')),
  )  # fmt: skip


def _taps(length: int, outputs: int, size: int, stride: int, low: int, spread: int, step: int):
  """Pairs of an output and a window position that meet an element, of `length` along an axis."""
  total = 0
  for tap in range(size):
    first = tap * step - low  # The position in the dilated input of output 0, then every `stride`.
    last = (length - 1) * spread
    if spread == 1 or spread == stride:
      if spread > 1 and first % spread:
        continue
      start = max(0, -(first // stride))
      total += max(0, min(outputs - 1, (last - first) // stride) - start + 1)
    else:
      where = range(first, first + outputs * stride, stride)
      total += sum(1 for p in where if 0 <= p <= last and p % spread == 0)
  return total


def _kernel_flops(instruction: Instruction, computation: Computation) -> float:
  """A kernel's own estimate; of XLA's grouped matmul all rows of its buffer."""
  if (own := _estimate(instruction, 'flops')) is not None:
    return own
  if instruction.name.startswith('ragged-dot') and 'metadata' not in instruction.name:
    shapes = [computation[name].result[0].shape for name in instruction.operands]
    rows = next((s for s in shapes if len(s) == 2), None)
    if rows and len(instruction.result[0].shape) == 2:
      return 2.0 * math.prod(rows) * instruction.result[0].shape[1]
  if found := re.match(r'splash_mha_(fwd|dq|dkv)', instruction.name):
    return _splash_flops(found[1], instruction, computation)
  return 0.0


def _estimate(instruction: Instruction, of: str) -> float | None:
  """A number of a kernel's own estimate. XLA's is of its grouped matmul's FLOPs alone."""
  if of != 'flops' and instruction.name.startswith(_GROUPED):
    return None
  found = re.search(rf'"cost_estimate":\{{[^}}]*"{of}":"(\d+)"', instruction.text)
  return float(found[1]) if found else None


def _splash_flops(phase: str, instruction: Instruction, computation: Computation) -> float:
  """Of the causal half of all pairs, and half the blocks on the diagonal; devices' parts on average.

  q k^T and p v forward; for dq also do v^T and ds k, for dk and dv do v^T, p^T do and ds^T q. One kernel for
  all three has dq's parts of every block of keys as a result.
  """
  operands = [computation[name].result[0].shape for name in instruction.operands]
  q, k, v = operands[2:5]
  blocks = operands[0][-1]
  wide, narrow = {'fwd': (1, 1), 'dq': (2, 1), 'dkv': (2, 2)}[phase]
  if phase == 'dkv' and any(len(r.shape) > len(q) for r in instruction.result):
    wide += 1
  pairs = math.prod(q[:-1]) * k[-2] / 2 * (1 + 1 / blocks)
  return 2.0 * pairs * (wide * q[-1] + narrow * v[-1])


def group_size(text: str) -> int:
  """How many devices take part together in a collective, of its attributes; 1 if none are named."""
  if listed := re.search(r'replica_groups=\{\{([\d,]*)\}', text):
    return len(listed[1].split(','))
  if counted := re.search(r'replica_groups=\[\d+,(\d+)\]', text):
    return int(counted[1])
  named = re.search(r'replica_groups=mesh\[([^\]]*)\] ?\{([^}]*)\}', text)
  if named:
    sizes = dict(re.findall(r"'([^']+)'=(\d+)", named[1]))
    return math.prod(int(sizes[axis]) for axis in re.findall(r"'([^']+)'", named[2]))
  return 1


def sent_bytes(instruction: Instruction, computation: Computation) -> float:
  """What a device sends in one run of a collective, see `Collective`."""
  return _added(None, instruction, computation, 1).sent


def _added(
  before: Collective | None, instruction: Instruction, computation: Computation, times: int
) -> Collective:
  opcode = instruction.opcode.removesuffix('-start')
  inputs = [computation[name].result for name in instruction.operands if name in computation]
  result = instruction.result
  if opcode == 'ragged-all-to-all':
    inputs = inputs[:1]
  elif instruction.opcode.endswith('-start'):  # Operands, results and perhaps semaphores.
    result = result[len(inputs) : 2 * len(inputs)] or result
  sides = sum(a.bytes for r in inputs for a in r), sum(a.bytes for a in result)
  # Of the two buffers of a ragged exchange, one has room for more than an even load.
  payload = min(sides) if opcode == 'ragged-all-to-all' else max(sides)
  n = group_size(instruction.text)
  share = 1.0 if opcode.startswith('collective') else (n - 1) / n
  sent = payload * share * (2 if opcode == 'all-reduce' else 1)
  old = before or Collective(0, 0.0, 0.0)
  return old._replace(
    calls=old.calls + times, payload=old.payload + times * payload, sent=old.sent + times * sent
  )


def _hbm(arrays: tuple[Array, ...]) -> float:
  return sum(a.bytes for a in arrays if a.in_hbm)


def _traffic(
  instruction: Instruction, computation: Computation, computations: dict[str, Computation]
) -> float:
  """Bytes of HBM that one run of an instruction reads and writes."""
  opcode = instruction.opcode
  if opcode in _FREE or opcode.endswith('-done') or opcode.startswith('async'):
    return 0.0
  if opcode == 'custom-call' and '"AllocateBuffer"' in instruction.text:
    return 0.0
  operands = [computation[name] for name in instruction.operands if name in computation]
  if opcode in _SLICES:
    return 2 * _hbm(instruction.result)
  if opcode in _UPDATES:
    return 2 * _hbm(operands[_UPDATES[opcode]].result)
  if opcode.endswith('-start'):
    return 2 * _hbm(operands[0].result) if operands else 0.0
  if opcode == 'custom-call' and (own := _estimate(instruction, 'bytes_accessed')) is not None:
    return own
  if opcode != 'fusion':
    return _hbm(instruction.result) + sum(_hbm(o.result) for o in operands)
  inside = computations[next(called_by(instruction))]
  written, read = _hbm(instruction.result), 0.0
  # What a collective under way has as buffers, the fusions beside it hand on.
  passed = set()
  if instruction.name.startswith(FUSED_DONE) or 'calls=%async_collective' in instruction.text:
    passed = {int(n) for n in re.findall(r'\}: \((\d+), \{', instruction.text)}
  for parameter in inside.values():
    if parameter.opcode != 'parameter':
      continue
    number = int(parameter.text.split(')')[0])
    operand = operands[number]
    if number in passed:
      written -= _hbm(operand.result)
      continue
    touched, updated = _touched(parameter, inside, computations)
    whole = _hbm(operand.result)
    if touched is None or not whole:
      read += whole
    else:
      read += min(whole, touched)
      written -= (whole - min(whole, touched)) if updated else 0.0
  return read + max(written, 0.0)


def _touched(
  parameter: Instruction, inside: Computation, computations: dict[str, Computation]
) -> tuple[float | None, bool]:
  """Bytes of a fusion's parameter that are used, if only slices; whether it is updated in place."""
  users = [i for i in inside.values() if parameter.name in i.operands]
  while len(users) == 1 and _renames(users[0], computations):
    parameter = users[0]
    users = [i for i in inside.values() if parameter.name in i.operands]
  if users and all(
    u.opcode == 'fusion' or (u.opcode in _SLICES and u.operands[0] == parameter.name) for u in users
  ):
    used = [_sliced_by(user, parameter, computations) for user in users]
    return (None if None in used else sum(u for u in used if u is not None)), False
  in_place = [u.opcode in _UPDATES and u.operands[0] == parameter.name for u in users]
  if users and all(in_place):
    return sum(inside[u.operands[_UPDATES[u.opcode]]].result[0].bytes for u in users), True
  return None, False


def _renames(user: Instruction, computations: dict[str, Computation]) -> bool:
  """Whether it has its operand's elements and no others, be it in other tiles (within a fusion, no copy)."""
  if user.opcode == 'fusion':
    inside = computations[next(called_by(user))].values()
    return all(i.opcode == 'parameter' or _renames(i, computations) for i in inside)
  return user.opcode in ('bitcast', 'copy', 'convert', 'reshape')


def _sliced_by(
  user: Instruction, operand: Instruction, computations: dict[str, Computation]
) -> float | None:
  """Bytes that a slice, or a fusion within a fusion, uses of its operand; None if all."""
  if user.opcode != 'fusion':
    return sum(a.bytes for a in user.result)
  inside = computations[next(called_by(user))]
  places = [i for i, name in enumerate(user.operands) if name == operand.name]
  parameters = [i for i in inside.values() if i.opcode == 'parameter']
  used = [
    _touched(p, inside, computations)[0] for p in parameters if int(p.text.split(')')[0]) in places
  ]
  return None if None in used else sum(u for u in used if u is not None)
