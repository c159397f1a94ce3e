"""What the devices of a mesh send each other in a step, and what each keeps.

A step runs as one program per device (`on_mesh`, i.e. `jax.shard_map`): arrays are this device's
shards, and whatever crosses devices is a call of this module. Outside of such a program, or where
the axes have size 1, all of them are the identity and leave no trace in the compiled program.

Every device computes the loss of the whole batch. The gradient of a sum over devices is what the
transposed collectives give, so each device differentiates its share of the loss (`share`): whatever
is computed in several places then counts once. What is left of a parameter's gradient to add is
over the axes that the parameter is not sharded on (`reduce_gradients`).
"""

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name
from jax.sharding import Mesh

from glm5_jax.sharding import AXES, BATCH_AXES, FSDP_AXES, chunks_of_row, layer_spec

TOKEN_AXES = (*BATCH_AXES, 'context')  # Devices along these hold different tokens.
_GATHERED = 'gathered_weight'


def on_mesh(f: Callable[..., Any], mesh: Mesh | None, in_specs: Any, out_specs: Any) -> Any:
  """`f` as the program of each device of `mesh`; `f` itself without a mesh."""
  if mesh is None:
    return f
  # Not checked: masks, loops and kernels would all have to say over which axes they vary.
  return jax.shard_map(f, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


def present(*axes: str) -> tuple[str, ...]:
  """Those of `axes` along which the running program has more than one device."""
  mesh = jax.sharding.get_abstract_mesh()
  return tuple(a for a in axes if a in mesh.manual_axes and mesh.shape[a] > 1)


def size(*axes: str) -> int:
  """The number of devices along `axes`."""
  mesh = jax.sharding.get_abstract_mesh()
  return math.prod(mesh.shape[a] for a in present(*axes))


def platform() -> str:
  """Of the mesh, which may be one that a program is only compiled for, or of this machine."""
  device = jax.sharding.get_abstract_mesh().abstract_device
  return device.platform if device else jax.default_backend()


def psum(x: Any, *axes: str) -> Any:
  """The sum over the devices along `axes`."""
  names = present(*axes)
  return jax.lax.psum(x, names) if names else x


def pmax(x: Any, *axes: str) -> Any:
  """The maximum over the devices along `axes`."""
  names = present(*axes)
  return jax.lax.pmax(x, names) if names else x


def pmean(x: Any, *axes: str) -> Any:
  """The mean over the devices along `axes`."""
  names = present(*axes)
  return jax.lax.pmean(x, names) if names else x


def share(loss: jax.Array) -> jax.Array:
  """What each device differentiates of a loss that all devices have computed."""
  devices = size(*AXES)
  return loss / devices if devices > 1 else loss


def token_mean(x: jax.Array, mask: jax.Array) -> jax.Array:
  """Mean of `x` [B, T] over the tokens of the whole batch where `mask`; 0 if there are none."""
  mask = mask.astype(jnp.float32)
  total, count = psum((jnp.sum(x * mask), jnp.sum(mask)), *TOKEN_AXES)
  return total / jnp.maximum(count, 1.0)


# --- Parameters ---


def shard_shape(path: str, shape: tuple[int, ...]) -> tuple[int, ...]:
  """What a device holds of one layer's parameter of `shape` at `path`."""
  if not present(*AXES):
    return shape
  spec = layer_spec(path)
  return tuple(n // size(*_axes(axis)) for n, axis in zip(shape, spec, strict=True))


def _axes(entry: str | None) -> tuple[str, ...]:
  """The mesh axes that an entry of the table stands for."""
  return FSDP_AXES if entry == 'fsdp' else (entry,) if entry else ()


def gather_weight(
  path: str,
  shard: jax.Array,
  dtype: Any = None,
  entries: tuple[str, ...] = ('fsdp',),
  wide: bool = False,
) -> jax.Array:
  """A layer's parameter, whole where the table has one of `entries`; its shard is sent as `dtype`.

  The gradient is summed and scattered the same way, in the parameter's own type. The gathered
  parameter is not kept for the backward pass but gathered again (modules/params.py). It has the type
  that it was sent in, or if `wide` its own (the values are the same), so that whoever uses it can give
  its gradient in that.
  """
  found = [present(*_axes(entry)) if entry in entries else () for entry in layer_spec(path)]
  split = tuple((dim, names) for dim, names in enumerate(found) if names)
  if not split:
    return shard
  sent = jnp.dtype(dtype or shard.dtype)
  whole = _gather(shard, split, sent, shard.dtype, shard.dtype if wide else sent)
  return checkpoint_name(whole, _GATHERED)


@functools.partial(jax.custom_vjp, nondiff_argnums=(1, 2, 3, 4))
def _gather(shard: jax.Array, split: Any, sent: Any, kept: Any, given: Any) -> jax.Array:
  whole = shard.astype(sent)
  for dim, names in split:
    whole = jax.lax.all_gather(whole, names, axis=dim, tiled=True)
  return whole.astype(given)


def _gather_fwd(shard, split, sent, kept, given):
  return _gather(shard, split, sent, kept, given), None


def _gather_bwd(split, sent, kept, given, _, g):
  g = g.astype(kept)  # A sum over hundreds of devices should not be rounded at each.
  for dim, names in split:
    g = jax.lax.psum_scatter(g, names, scatter_dimension=dim, tiled=True)
  return (g,)


_gather.defvjp(_gather_fwd, _gather_bwd)


def remat_policy() -> Any:
  """For `jax.checkpoint` where activations are kept: all but gathered parameters."""
  return jax.checkpoint_policies.save_anything_except_these_names(_GATHERED)


def reduce_gradients(grads: Any) -> Any:
  """The gradients of a tree of parameters, added over the devices that hold the same shards."""
  if not present(*AXES):
    return grads

  def reduce(path, g):
    spec = layer_spec('/'.join(str(key.key) for key in path))
    split = {axis for entry in spec for axis in _axes(entry)}
    return psum(g, *(axis for axis in AXES if axis not in split))

  return jax.tree_util.tree_map_with_path(reduce, grads)


# --- The sequence ---
# A device along `context` has two chunks of a row, see `sharding.chunks_of_row`.


def own_chunks() -> tuple[Any, ...]:
  """The numbers of this device's chunks of a row."""
  here = jax.lax.axis_index('context') if present('context') else 0
  return chunks_of_row(here, size('context'))


def own_slots(length: int) -> jax.Array:
  """[T] int32, where this device's tokens are in their row, if each device has `length`."""
  chunks = own_chunks()
  chunk = length // len(chunks)
  return jnp.concatenate([number * chunk + jnp.arange(chunk) for number in chunks])


def own_tokens(row: jax.Array) -> jax.Array:
  """This device's tokens, axis 1, of a `row` that all devices along `context` have whole."""
  if not present('context'):
    return row
  chunk = row.shape[1] // (2 * size('context'))
  parts = [jax.lax.dynamic_slice_in_dim(row, n * chunk, chunk, axis=1) for n in own_chunks()]
  return jnp.concatenate(parts, axis=1)


def gather_sequence(x: jax.Array) -> jax.Array:
  """All of a row's tokens in order, axis 1, from those that each device along `context` holds."""
  if not present('context'):
    return x
  batch, length, *rest = x.shape
  chunks = jax.lax.all_gather(x, 'context', axis=1).reshape(batch, -1, 2, length // 2, *rest)
  row = jnp.concatenate([chunks[:, :, 0], chunks[:, ::-1, 1]], axis=1)
  return row.reshape(batch, -1, *rest)


def shift_sequence(x: jax.Array, by: int) -> jax.Array:
  """x[:, t + by] at token t of a row, zeros past its end; `by` is at most the length of a chunk."""
  if not present('context'):
    return jnp.pad(x[:, by:], [(0, 0), (0, by)] + [(0, 0)] * (x.ndim - 2))
  first, second = jnp.split(x, 2, axis=1)
  last = size('context') - 1
  # Chunk c + 1 follows chunk c: on the next device for first ones, on the one before for second ones.
  # In the middle of the row both are on the last device, and nothing follows the end of the row.
  after_first = jax.lax.ppermute(first[:, :by], 'context', [(i + 1, i) for i in range(last)])
  after_first = jnp.where(jax.lax.axis_index('context') == last, second[:, :by], after_first)
  after_second = jax.lax.ppermute(second[:, :by], 'context', [(i, i + 1) for i in range(last)])
  return jnp.concatenate([first[:, by:], after_first, second[:, by:], after_second], axis=1)


def all_parts(x: jax.Array, axis_name: str) -> jax.Array:
  """The last axis of `x` whole, of which every device along `axis_name` has a part."""
  if not present(axis_name):
    return x
  return jax.lax.all_gather(x, axis_name, axis=x.ndim - 1, tiled=True)


def own_part(x: jax.Array, axis_name: str) -> jax.Array:
  """This device's part of axis 1 of `x`, which all devices along `axis_name` have."""
  if not present(axis_name):
    return x
  length = x.shape[1] // size(axis_name)
  start = jax.lax.axis_index(axis_name) * length
  return jax.lax.dynamic_slice_in_dim(x, start, length, axis=1)
