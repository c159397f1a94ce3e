"""Meshes, and the one table that says how every parameter is sharded.

Axes of a mesh: `data` and `fsdp` split the batch, `fsdp` also the parameters; `expert` splits the
experts, `context` the sequence, `tensor` heads, feed-forward width and vocabulary. All axes always
exist; one of size 1 costs nothing.
"""

import math
import re
from collections.abc import Mapping, Sequence
from typing import Any

import jax
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

P = PartitionSpec
AXES = ('data', 'fsdp', 'expert', 'context', 'tensor')

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
    shape: axis name -> size; axes left out have size 1.
    devices: defaults to `jax.devices()`; the sizes must multiply to their number.

  Raises:
    ValueError: for an unknown axis, or sizes that do not fit the devices.
  """
  unknown = sorted(set(shape) - set(AXES))
  if unknown:
    raise ValueError(f'unknown mesh axes {unknown}; the axes are {list(AXES)}')
  devices = jax.devices() if devices is None else list(devices)
  sizes = tuple(shape.get(axis, 1) for axis in AXES)
  if min(sizes) < 1 or math.prod(sizes) != len(devices):
    raise ValueError(
      f'mesh {dict(zip(AXES, sizes, strict=True))} is for {math.prod(sizes)} devices;'
      f' there are {len(devices)}'
    )
  return jax.make_mesh(sizes, AXES, axis_types=(AxisType.Explicit,) * len(AXES), devices=devices)


def param_spec(path: str, ndim: int) -> PartitionSpec:
  """The spec of the parameter at `path` ('moe/block0/attn/w_uq') with `ndim` axes.

  Raises:
    ValueError: if no rule names the path, or the rule is for another number of axes.
  """
  for pattern, spec in _RULES:
    if re.fullmatch(rf'(.*/)?{pattern}', path):
      spec = spec if path in _UNSTACKED else P(None, *spec)
      if len(spec) != ndim:
        raise ValueError(f'parameter {path} has {ndim} axes, its sharding rule has {len(spec)}')
      return spec
  raise ValueError(f'no sharding rule matches the parameter {path}; add one to sharding.py')


def param_specs(tree: Mapping[str, Any]) -> dict[str, Any]:
  """A tree of arrays (or of `jax.ShapeDtypeStruct`) -> the tree of their PartitionSpecs."""
  return jax.tree_util.tree_map_with_path(
    lambda path, leaf: param_spec(_join(path), len(leaf.shape)), tree
  )


def param_shardings(tree: Mapping[str, Any], mesh: Mesh) -> dict[str, Any]:
  """A tree of arrays (or of `jax.ShapeDtypeStruct`) -> the tree of their NamedShardings.

  Raises:
    ValueError: as `param_spec`, or if a dimension does not divide by its mesh axis.
  """

  def sharding(path, leaf):
    name = _join(path)
    spec = param_spec(name, len(leaf.shape))
    for i, axis in enumerate(spec):
      if axis is not None and leaf.shape[i] % mesh.shape[axis]:
        raise ValueError(
          f'parameter {name} {list(leaf.shape)}: dimension {i} ({leaf.shape[i]}) does not divide by'
          f' the mesh axis {axis!r} of size {mesh.shape[axis]}'
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


def _join(path) -> str:
  return '/'.join(str(key.key) for key in path)
