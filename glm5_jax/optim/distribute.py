"""Functions of whole matrices, applied to sharded parameters: every matrix on exactly one device.

Section 2.4.1 of the paper: Muon without redundant communication. A device gathers only the shards of
the matrices that it owns. Under a mesh with Explicit axes,

  1. the batch axes that a parameter is sharded on (experts over `expert`, heads over `tensor`) stay;
  2. devices that hold the same shards (axes the parameter is not sharded on) divide the matrices;
  3. an all-to-all over the axes that rows and columns are sharded on turns a shard of every matrix
     into every shard of some matrices;
  4. the function runs on whole matrices, without communication;
  5. 3 and 2 are undone; devices that hold the same shards gather each other's share of the result,
     which is no larger than the parameter's local shard.

Matrices that agree in shape and sharding are one batch, whatever parameter they come from. A batch is
padded with zeros until it divides by the number of devices: 79 matrices on 512 devices keep each
device as long as 512 do.
"""

import math
from collections.abc import Callable, Sequence
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import AxisType

from glm5_jax.optim.rules import Layout

Axes = tuple[str, ...]


class Placement(NamedTuple):
  """The shape of whole matrices (rows <= cols), and the mesh axes over which they are split."""

  rows: int
  cols: int
  row_axes: Axes
  col_axes: Axes
  batch_axes: Axes


def map_matrices(
  function: Callable[[jax.Array], jax.Array],
  arrays: Sequence[jax.Array],
  layouts: Sequence[Layout],
  *,
  chunk: int,
) -> list[jax.Array]:
  """Applies `function` to every matrix in `arrays`; results have the arrays' shapes and shardings.

  Rows and columns come in any order that is the same for the result: `function` must commute with
  permutations of both, and with transposition.

  Args:
    function: [K, rows, cols] -> [K, rows, cols], rows <= cols, each of the K by itself.
    arrays: sharded over a mesh with Explicit axes, or not at all.
    layouts: of each array.
    chunk: elements for which `function` is called at once on a device, and at least one matrix. It
      bounds the memory, also that of the exchange.
  """
  if not arrays:
    return []
  mesh = jax.typeof(arrays[0]).sharding.mesh
  sizes = {
    name: mesh.shape[name]
    for name, kind in zip(mesh.axis_names, mesh.axis_types, strict=True)
    if kind == AxisType.Explicit and mesh.shape[name] > 1
  }
  specs = [jax.typeof(x).sharding.spec for x in arrays]
  orders: list[Layout] = []
  groups: dict[Placement, list[int]] = {}
  for i, (x, spec, layout) in enumerate(zip(arrays, specs, layouts, strict=True)):
    order, placement = _place(x.shape, spec, layout, sizes)
    orders.append(order)
    groups.setdefault(placement, []).append(i)

  def local(*shards: jax.Array) -> list[jax.Array]:
    out = list(shards)
    for placement, members in groups.items():
      batches = [_to_matrices(shards[i], orders[i]) for i in members]
      ends = [sum(len(b) for b in batches[: n + 1]) for n in range(len(batches))]
      mapped = _map_batch(function, jnp.concatenate(batches), placement, sizes, chunk)
      for i, part in zip(members, jnp.split(mapped, ends[:-1]), strict=True):
        out[i] = _from_matrices(part, orders[i], shards[i].shape)
    return out

  if AxisType.Explicit not in mesh.axis_types:
    return local(*arrays)
  return jax.shard_map(local, in_specs=tuple(specs), out_specs=specs, check_vma=False)(*arrays)


def _place(shape, spec, layout: Layout, sizes) -> tuple[Layout, Placement]:
  """The layout with rows and columns exchanged where there are more rows, and its placement."""
  _, rows, cols = layout.matrices(shape)
  if rows > cols:
    layout = Layout(layout.batch, layout.cols, layout.rows)
  spec = [*spec, *[None] * (len(shape) - len(spec))]

  def mesh_axes(dims) -> Axes:
    named = [(spec[d],) if isinstance(spec[d], str) else spec[d] or () for d in dims]
    return tuple(name for names in named for name in names if name in sizes)

  split = (mesh_axes(layout.rows), mesh_axes(layout.cols), mesh_axes(layout.batch))
  return layout, Placement(min(rows, cols), max(rows, cols), *split)


def _to_matrices(x: jax.Array, layout: Layout) -> jax.Array:
  """[count, rows, cols] of an array."""
  return x.transpose(layout.batch + layout.rows + layout.cols).reshape(layout.matrices(x.shape))


def _from_matrices(x: jax.Array, layout: Layout, shape: tuple[int, ...]) -> jax.Array:
  """The inverse of `_to_matrices`, to an array of `shape`."""
  order = layout.batch + layout.rows + layout.cols
  inverse = sorted(range(len(order)), key=order.__getitem__)
  return x.reshape([shape[i] for i in order]).transpose(inverse)


def _map_batch(function, x: jax.Array, placement: Placement, sizes, chunk: int) -> jax.Array:
  """[count, r, c] shards of matrices -> those of the results; runs on every device of the mesh."""
  moved = placement.row_axes + placement.col_axes
  copies = tuple(a for a in sizes if a not in moved + placement.batch_axes)
  row_shards = math.prod(sizes[a] for a in placement.row_axes)
  col_shards = math.prod(sizes[a] for a in placement.col_axes)
  replicas = math.prod(sizes[a] for a in copies)
  owners = row_shards * col_shards
  count, r, c = x.shape
  # On each device `calls` calls of `each` matrices.
  share = -(-count // (owners * replicas))
  calls = -(-share // max(1, chunk // (placement.rows * placement.cols)))
  each = -(-share // calls)
  x = jnp.pad(x, [(0, calls * replicas * owners * each - count), (0, 0), (0, 0)])

  def call(x: jax.Array) -> jax.Array:
    if copies:
      x = x.reshape(replicas, owners * each, r, c)
      x = jax.lax.dynamic_index_in_dim(x, jax.lax.axis_index(copies), keepdims=False)
    if moved:
      # Without the barrier XLA:CPU takes the parts before padding as operands, and then refuses an
      # all-to-all whose operands have different layouts.
      x = jax.lax.all_to_all(jax.lax.optimization_barrier(x), moved, 0, 0, tiled=True)
      x = x.reshape(row_shards, col_shards, each, r, c).transpose(2, 0, 3, 1, 4)
    x = function(x.reshape(each, placement.rows, placement.cols))
    if moved:
      x = x.reshape(each, row_shards, r, col_shards, c).transpose(1, 3, 0, 2, 4)
      x = jax.lax.all_to_all(x.reshape(owners * each, r, c), moved, 0, 0, tiled=True)
    if copies:
      x = jax.lax.all_gather(x, copies, tiled=True)
    return x

  if calls == 1:
    return call(x)[:count]

  def body(i: jax.Array, x: jax.Array) -> jax.Array:
    here = jax.lax.dynamic_index_in_dim(x, i, keepdims=False)
    return jax.lax.dynamic_update_index_in_dim(x, call(here), i, 0)

  # In place, where a jax.lax.map would have a second array for the results.
  x = jax.lax.fori_loop(0, calls, body, x.reshape(calls, -1, r, c))
  return x.reshape(-1, r, c)[:count]
