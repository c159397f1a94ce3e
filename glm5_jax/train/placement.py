"""Where a run's arrays lie: on one device, or on the mesh that the config asks for."""

import contextlib
import math
from collections.abc import Callable, Mapping
from typing import Any

import jax
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from glm5_jax import sharding
from glm5_jax.compile import jit_once
from glm5_jax.config import ModelConfig
from glm5_jax.modules.model import abstract_params
from glm5_jax.ops.collectives import TOKEN_AXES
from glm5_jax.train.batches import Plan
from glm5_jax.train.step import Batch, Objective

# Parameters up to this size are put together on one device for the report's samples.
_TOGETHER_BYTES = 1 << 31


def mesh_of(section: Mapping[str, int], devices: Any = None) -> Mesh | None:
  """The mesh of a config's `mesh` section (axis -> size); None where one device is all.

  Raises:
    ValueError: see `sharding.make_mesh`.
  """
  if all(size == 1 for size in section.values()) and jax.process_count() == 1:
    return None
  return sharding.make_mesh(section, devices)


def check(mesh: Mesh, model: ModelConfig, objective: Objective, plan: Plan) -> None:
  """Whether a run's sizes can be divided as the mesh wants.

  Raises:
    ValueError: they cannot.
  """
  sharding.param_shardings(abstract_params(model), mesh)
  rows, axes = 1, sharding.BATCH_AXES
  for axis in axes:
    rows *= mesh.shape[axis]
  if plan.micro_rows % rows:
    raise ValueError(
      f'the {plan.micro_rows} rows of a micro-batch (data.batch_size / train.grad_accum) do not'
      f' divide by the {rows} devices along {", ".join(axes)} of the mesh'
    )
  context, tensor = mesh.shape['context'], mesh.shape['tensor']
  chunks = 2 * context if context > 1 else 1  # `sharding.chunks_of_row`
  parts = math.lcm(chunks, context * tensor)
  if plan.seq_len % parts or plan.seq_len // chunks < objective.mtp_steps:
    raise ValueError(
      f'data.seq_len={plan.seq_len} does not divide by {parts} ({context} devices along context, with'
      f' two chunks each if there are several, and {tensor} along tensor), or leaves a chunk fewer'
      f' tokens than train.mtp_steps={objective.mtp_steps}'
    )
  if objective.kernels != 'reference' and objective.indexer_loss and mesh.shape['tensor'] > 1:
    raise ValueError(
      "train.kernels='pallas' computes the indexer's loss on one device's heads: with a mesh.tensor"
      " above 1 use 'reference'"
    )


class Placement:
  """How a run places its arrays on `mesh`; without a mesh everything is as jax does by itself."""

  def __init__(self, mesh: Mesh | None, micro_batches: int = 1):
    self.mesh = mesh
    self._micro_batches = micro_batches

  def context(self) -> contextlib.AbstractContextManager:
    """Within it, what works on placed arrays is traced and run."""
    return jax.set_mesh(self.mesh) if self.mesh else contextlib.nullcontext()

  def abstract(self, tree: Any) -> Any:
    """A state or its parameters as `jax.ShapeDtypeStruct`s that say where they lie."""
    if self.mesh is None:
      return tree
    return jax.tree.map(
      lambda x, s: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s), tree, self._shardings(tree)
    )

  def make(self, function: Callable[..., Any], *args: Any) -> Any:
    """`function(*args)`, a state or parameters, made where it lies: no device holds all of it."""
    if self.mesh is None:
      return jit_once(function)(*args)
    where = self._shardings(jax.eval_shape(function, *args))
    return jit_once(function, out_shardings=where)(*args)

  def rows_read(self, plan: Plan) -> list[int]:
    """Which rows of a batch of the data pipeline this process reads, for `batch`."""
    rows = plan.rows_per_read
    if self.mesh is None:
      return list(range(rows))
    return sharding.local_rows(self.mesh, rows, rows // plan.micro_rows).tolist()

  def batch(self, batch: Batch) -> dict[str, jax.Array]:
    """A batch for the training step, from the rows that this process has read."""
    if self.mesh is None:
      return jax.device_put(dict(batch))
    return sharding.place_batch(batch, self.mesh, self._micro_batches, whole=False)

  def eval_step(self, step: Callable[..., Any]) -> Callable[..., Any]:
    """The evaluation step for batches from the host, which every process has whole."""
    mesh = self.mesh
    if mesh is None:
      return step

    def on_mesh(params: Any, batch: Batch) -> Any:
      with jax.set_mesh(mesh):
        return step(params, sharding.place_batch(batch, mesh))

    return on_mesh

  def rows(self, plan: Plan) -> int:
    """Of a micro-batch on a device."""
    shape = {} if self.mesh is None else self.mesh.shape
    count = plan.micro_rows
    for axis in TOKEN_AXES[:-1]:
      count //= shape.get(axis, 1)
    return count

  def together(self, params: Any) -> Any:
    """The parameters on one device of process 0; None elsewhere, and where one cannot hold them."""
    if self.mesh is None:
      return params
    if sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(params)) > _TOGETHER_BYTES:
      return None
    if jax.process_count() > 1:
      everywhere = NamedSharding(self.mesh, PartitionSpec())
      params = jit_once(lambda x: x, out_shardings=everywhere)(params)
    return jax.device_put(jax.device_get(params)) if jax.process_index() == 0 else None

  def _shardings(self, tree: Any) -> Any:
    assert self.mesh is not None
    return sharding.shardings(sharding.state_specs(tree, self.mesh), self.mesh)
