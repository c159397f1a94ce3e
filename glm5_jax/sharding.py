"""Meshes, and the one table that says how every parameter is sharded.

Axes of a mesh: `data`, `fsdp` and `expert` split the batch, `context` splits the sequence, `tensor`
heads, feed-forward width and vocabulary. `fsdp` and `context` together also split the parameters,
and `expert` the experts. All axes always exist; one of size 1 costs nothing. What the devices send
each other in a step is in ops/collectives.py.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental import mesh_utils
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
AXES = ('data', 'fsdp', 'expert', 'context', 'tensor')
# Devices along these hold different rows. Experts are no reason to compute attention twice, so the
# devices that divide the experts divide the rows as well.
BATCH_AXES = ('data', 'fsdp', 'expert')
# Long rows are few, so the devices that divide them have to divide the parameters too: 'fsdp' in
# the table below stands for both.
FSDP_AXES = ('fsdp', 'context')
BATCH = P(BATCH_AXES, 'context')  # B T, of everything a step reads.

# Path (a full match after any number of parents) -> spec of the array without its stacking axis.
# The dimensions are those of the shape glossary. Norms and biases are small: replicated.
_RULES: tuple[tuple[str, PartitionSpec], ...] = (
  ('embed', P('tensor', 'fsdp')),  # V D
  ('lm_head', P('fsdp', 'tensor')),  # D V
  (r'\w*norm(_scale|_bias)?', P(None)),
  ('attn/w_d(q|kv)', P('fsdp', None)),  # D Q, D L+R
  ('attn/w_u(q|k|v)', P('fsdp', 'tensor', None)),  # Q N H, L N H
  ('attn/w_[qkv]', P('fsdp', 'tensor', None)),  # GQA: D N H, D M H
  ('attn/w_o', P('tensor', None, 'fsdp')),  # N H D
  ('indexer/w_q', P('fsdp', None, None)),  # Q I J; all heads vote on one selection: not split
  ('indexer/w_[kw]', P('fsdp', None)),  # D J, D I
  ('router/w', P('fsdp', None)),  # D E
  ('router/bias', P(None)),  # E
  ('experts/w_(gate|up)', P('expert', 'fsdp', 'tensor')),  # E D F
  ('experts/w_down', P('expert', 'tensor', 'fsdp')),  # E F D
  ('(mlp|shared)/w_(gate|up)', P('fsdp', 'tensor')),  # D F
  ('(mlp|shared)/w_down', P('tensor', 'fsdp')),  # F D
  ('mtp/w_proj', P('fsdp', None)),  # 2D D
)
_UNSTACKED = ('embed', 'final_norm', 'lm_head')


def make_mesh(shape: Mapping[str, int], devices: Sequence[jax.Device] | None = None) -> Mesh:
  """A mesh with all of AXES and Explicit axis types.

  Args:
    shape: axis name -> size; axes left out have size 1, and one may be -1: what the others leave.
    devices: defaults to `jax.devices()`; the sizes must multiply to their number.

  Raises:
    ValueError: for an unknown axis, or sizes that do not fit the devices.
  """
  unknown = sorted(set(shape) - set(AXES))
  if unknown:
    raise ValueError(f'unknown mesh axes {unknown}; the axes are {list(AXES)}')
  devices = jax.devices() if devices is None else list(devices)
  sizes = tuple(shape.get(axis, 1) for axis in AXES)
  if sizes.count(-1) == 1:
    sizes = tuple(len(devices) // -math.prod(sizes) if n == -1 else n for n in sizes)
  if min(sizes) < 1 or math.prod(sizes) != len(devices):
    raise ValueError(
      f'mesh {dict(zip(AXES, sizes, strict=True))} is for {math.prod(sizes)} devices;'
      f' there are {len(devices)}'
    )
  # Not jax.make_mesh: it refuses sizes that cut an axis of a TPU slice in two.
  grid = mesh_utils.create_device_mesh(sizes, devices, allow_split_physical_axes=True)
  return Mesh(grid, AXES, axis_types=(AxisType.Explicit,) * len(AXES))


def layer_spec(path: str) -> PartitionSpec:
  """The spec of the parameter at `path` ('moe/block0/attn/w_uq') within one layer, not stacked.

  Raises:
    ValueError: if no rule names the path.
  """
  for pattern, spec in _RULES:
    if re.fullmatch(rf'(.*/)?{pattern}', path):
      return spec
  raise ValueError(f'no sharding rule matches the parameter {path}; add one to sharding.py')


def param_spec(path: str, ndim: int) -> PartitionSpec:
  """The spec of the parameter at `path`, with `ndim` axes, of which the first counts layers.

  Raises:
    ValueError: if no rule names the path, or the rule is for another number of axes.
  """
  spec = layer_spec(path)
  spec = spec if path in _UNSTACKED else P(None, *spec)
  if len(spec) != ndim:
    raise ValueError(f'parameter {path} has {ndim} axes, its sharding rule has {len(spec)}')
  return spec


def param_specs(tree: Mapping[str, Any], mesh: Mesh | None = None) -> dict[str, Any]:
  """A tree of arrays (or `jax.ShapeDtypeStruct`s) -> the tree of their PartitionSpecs on `mesh`."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: _on(mesh, param_spec(_join(path), len(leaf.shape))), tree
  )


def _on(mesh: Mesh | None, spec: PartitionSpec) -> PartitionSpec:
  """A spec of the table on a mesh."""
  if mesh is None or mesh.shape['context'] == 1:
    return spec
  return P(*(FSDP_AXES if axis == 'fsdp' else axis for axis in spec))


def param_shardings(tree: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
  """A tree of arrays (or of `jax.ShapeDtypeStruct`) -> the tree of their NamedShardings.

  Raises:
    ValueError: as `param_spec`, or if a dimension does not divide by its mesh axis.
  """

  def sharding(path, leaf):
    name = _join(path)
    spec = _on(mesh, param_spec(name, len(leaf.shape)))
    for i, axes in enumerate(spec):
      size = math.prod(mesh.shape[a] for a in ((axes,) if isinstance(axes, str) else axes or ()))
      if leaf.shape[i] % size:
        raise ValueError(
          f'parameter {name} {list(leaf.shape)}: dimension {i} ({leaf.shape[i]}) does not divide by'
          f' the mesh axis {axes!r} of size {size}'
        )
    return NamedSharding(mesh, spec)

  return jax.tree_util.tree_map_with_path(sharding, tree)


def abstract_params(tree: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
  """The tree as `jax.ShapeDtypeStruct`s that carry their shardings; allocates nothing."""
  return jax.tree.map(
    lambda leaf, s: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=s),
    tree,
    param_shardings(tree, mesh),
  )


def shard_params(params: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
  """The parameters on the mesh's devices, laid out by the table."""
  return jax.device_put(params, param_shardings(params, mesh))


def state_specs(state: Any, mesh: Mesh) -> Any:
  """A training state -> the tree of its PartitionSpecs: what is made like a parameter lies like it.

  A parameter's path ends that of its optimizer state, and everything else is small: replicated.
  """

  def spec(path, leaf):
    names: list[str] = []
    for key in reversed(path):  # A state is nested tuples and dataclasses; parameters are dicts.
      if not isinstance(key, jax.tree_util.DictKey):
        break
      names.insert(0, str(key.key))
    return _on(mesh, param_spec('/'.join(names), len(leaf.shape))) if names else P()

  return jax.tree_util.tree_map_with_path(spec, state)


def shardings(specs: Any, mesh: Mesh) -> Any:
  """A tree of PartitionSpecs -> the tree of their NamedShardings."""
  return jax.tree.map(
    lambda spec: NamedSharding(mesh, spec), specs, is_leaf=lambda x: isinstance(x, P)
  )


def local_rows(mesh: Mesh, rows: int, micro_batches: int = 1) -> np.ndarray:
  """Which of a batch's rows lie on devices of this process, ascending.

  Processes whose devices differ along other axes only have the same rows.
  """
  where = NamedSharding(mesh, P(BATCH_AXES)).addressable_devices_indices_map((rows,))
  dealt = _dealt(mesh, rows, micro_batches)
  return np.unique(np.concatenate([dealt[index] for index in where.values()]))


def _dealt(mesh: Mesh, rows: int, micro_batches: int) -> np.ndarray:
  """The row of the batch at each place of the array on the mesh."""
  count = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
  # [micro-batch, device, row] -> [device, micro-batch, row]
  return np.arange(rows).reshape(micro_batches, count, -1).swapaxes(0, 1).ravel()


def chunks_of_row(device: Any, count: int) -> tuple[Any, ...]:
  """Which chunks of a row lie on a device of `count` along `context`, of 2 `count` equal ones.

  One from the beginning and one from the end: every device's tokens see as many keys as any other's.
  On one device the row is one chunk.
  """
  return (device, 2 * count - 1 - device) if count > 1 else (0,)


def row_order(count: int, length: int) -> np.ndarray:
  """[T] int, the token of a row at each place of an array whose `count` parts lie along `context`."""
  chunks = [chunk for device in range(count) for chunk in chunks_of_row(device, count)]
  return np.arange(length).reshape(len(chunks), -1)[chunks].ravel()


def place_batch(
  batch: Mapping[str, Any], mesh: Mesh, micro_batches: int = 1, whole: bool = True
) -> dict[str, jax.Array]:
  """A batch on the mesh: arrays [B, T] split by rows and over the sequence, scalars everywhere.

  Rows are dealt so that micro-batch i of a step, which takes the i-th part of the rows of every
  device, has the same rows as without a mesh; empty ones (segment 0) fill up a batch that does not
  divide. Tokens are dealt by `row_order`.

  Args:
    batch: the whole of it, or in each process its own part.
    mesh: where.
    micro_batches: of a step.
    whole: whether every process has the whole batch. Otherwise it has its `local_rows` of a batch
      that divides.
  """
  count = math.prod(mesh.shape[axis] for axis in BATCH_AXES)
  own = count if whole else len(local_rows(mesh, count))

  def place(x):
    x = np.asarray(x)
    if not x.ndim:
      return jax.make_array_from_callback((), NamedSharding(mesh, P()), lambda _: x)
    x = np.pad(x, [(0, -len(x) % (micro_batches * own))] + [(0, 0)] * (x.ndim - 1))
    rows = len(x) // own * count
    held = np.arange(rows) if whole else local_rows(mesh, rows, micro_batches)
    places = np.searchsorted(held, _dealt(mesh, rows, micro_batches))
    order = row_order(mesh.shape['context'], x.shape[1])

    def shard(index: Any) -> np.ndarray:
      return x[places[index[0]]][:, order[index[1]]]

    shape = len(places), *x.shape[1:]
    return jax.make_array_from_callback(shape, NamedSharding(mesh, BATCH), shard)

  return {name: place(x) for name, x in batch.items()}


def _join(path) -> str:
  return '/'.join(str(key.key) for key in path)
