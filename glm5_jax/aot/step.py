"""The training step of a run config, compiled for absent TPUs, and what it will need there."""

import dataclasses
import math
import time
from collections.abc import Mapping
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding

from glm5_jax import sharding
from glm5_jax.aot import hlo, overlap, program
from glm5_jax.aot.chips import CHIPS, Chip, Roofline, roofline
from glm5_jax.config import ModelConfig
from glm5_jax.modules.model import abstract_params, init_params
from glm5_jax.train import flops
from glm5_jax.train.placement import Placement
from glm5_jax.train.prepare import ConfigError, Parts, prepare, prepare_mesh
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import make_train_step


class Topology(NamedTuple):
  """Chips that may be compiled for: 'v5p:8x8x16' and the like."""

  name: str
  chips: int
  chip: Chip
  devices: list[jax.Device]  # What jax calls so: a chip may be two.

  @property
  def device(self) -> Chip:
    """The figures of one device: its share of a chip."""
    share = len(self.devices) // self.chips
    return Chip(*(value / share for value in dataclasses.astuple(self.chip)))


class Needs(NamedTuple):
  """What the compiled step needs; of one chip, where it does not say otherwise.

  Attributes:
    chips: That the mesh uses.
    mesh: Axis -> devices.
    argument_bytes, temporary_bytes, peak_bytes: The state and batch that a step is given; what it
      uses besides; and the most that there is at once, what the compiler reports or the sum of the two.
    fits: Whether the peak is within the chip's memory.
    compile_seconds: Of CPU time, of all cores together; lowering included.
    work: Of one device in one step, at an even load of the experts.
    flops: Of a chip in one step.
    model_flops: Of all chips, by the mathematics (train/flops.py).
    tokens: Of all chips in one step.
    zero3_bytes: What a chip would send in a step of ideal ZeRO-3, see `zero3_bytes`.
    roofline: By the chip's published figures.
    hidden: Of what a device sends by each kind of collective, bytes for which there are FLOPs meanwhile.
  """

  chips: int
  mesh: Mapping[str, int]
  argument_bytes: float
  temporary_bytes: float
  peak_bytes: float
  fits: bool
  compile_seconds: float
  work: hlo.Work
  flops: float
  model_flops: float
  tokens: int
  zero3_bytes: float
  roofline: Roofline
  hidden: Mapping[str, float]

  @property
  def flops_ratio(self) -> float:
    """What runs for each FLOP that the mathematics needs."""
    return self.flops * self.chips / self.model_flops

  def mfu(self, chip: Chip, seconds: float) -> float:
    """Model FLOPs of a step of that length as a share of the chips' peak."""
    return self.model_flops / (self.chips * chip.flops * seconds)


def find_topology(name: str) -> Topology:
  """The topology of that name.

  Raises:
    ConfigError: there is none, or no compiler for it.
  """
  kind, _, shape = name.partition(':')
  sizes = shape.split('x')
  if kind not in CHIPS or not all(n.isdigit() for n in sizes):
    raise ConfigError(
      f'--topology={name} must be a chip ({", ".join(CHIPS)}) and its shape, such as v5p:2x2x1'
    )
  try:
    found = topologies.get_topology_desc(platform='tpu', topology_name=name)
  except Exception as e:
    reason = str(e).strip().splitlines()
    raise ConfigError(
      f'no compiler for --topology={name}: {reason[-1] if reason else e}. It is in jax[tpu] (pip'
      " install 'jax[tpu]', no TPU needed); v6e shapes have two numbers, the others three"
    ) from None
  return Topology(name, math.prod(map(int, sizes)), CHIPS[kind], list(found.devices))


def compile_step(config: Mapping[str, Any], topology: Topology, plan: bool = False) -> Needs:
  """Compiles the step of a run config, for full batches; on the first device alone without a mesh.

  Args:
    config: of the run.
    topology: the chips.
    plan: without machine code, which nothing here reads; see `program.planned`.

  Raises:
    ConfigError: the config is impossible, or does not go with the topology.
    jax.errors.JaxRuntimeError: the compiler refuses, for instance for lack of memory.
  """
  parts = prepare(config)
  mesh = prepare_mesh(config, parts, topology.devices) or sharding.make_mesh(
    {}, topology.devices[:1]
  )
  clock = time.process_time()
  lowered = lower(parts, mesh, infilling=config['data'].get('objective') == 'infilling')
  found = program.planned(lowered) if plan else program.compiled(lowered)
  seconds = time.process_time() - clock

  filled = filled_rows(parts.model, mesh.shape['expert'])
  work = hlo.measure(found.text, filled)
  per_chip = len(topology.devices) // topology.chips if mesh.size > 1 else 1
  chip = topology.device
  hidden = overlap.hidden(found.text, chip.flops / chip.ici_bandwidth, filled)
  sent = sum(c.sent for c in work.collectives.values())
  tokens = parts.plan.rows * parts.plan.seq_len
  return Needs(
    chips=max(1, mesh.size // per_chip), mesh=dict(mesh.shape),
    argument_bytes=found.argument_bytes * per_chip,
    temporary_bytes=found.temporary_bytes * per_chip, peak_bytes=found.peak_bytes * per_chip,
    fits=found.peak_bytes <= chip.hbm_bytes, compile_seconds=seconds, work=work, flops=work.flops * per_chip,
    model_flops=model_flops(parts), tokens=tokens, zero3_bytes=zero3_bytes(parts),
    roofline=roofline(chip, work.flops, work.bytes, sent, sum(hidden.values())), hidden=hidden,
  )  # fmt: skip


def lower(parts: Parts, mesh: Mesh, infilling: bool = False) -> jax.stages.Lowered:
  """The training step for `mesh`, without a single array."""
  place = Placement(mesh, parts.plan.micro_batches)
  tx, schedule = parts.optimizer

  def state() -> TrainState:
    params = init_params(parts.model, jax.random.key(0))
    return TrainState.create(params, tx, 0, parts.objective.stage)

  names = ('tokens', 'targets', 'weights', 'segment_ids', 'positions', *['prefix'] * infilling)
  where = NamedSharding(mesh, sharding.BATCH)
  shape = parts.plan.rows, parts.plan.seq_len
  batch = {
    name: jax.ShapeDtypeStruct(shape, 'float32' if name == 'weights' else 'int32', sharding=where)
    for name in names
  }
  abstract = place.abstract(jax.eval_shape(state))
  with place.context():
    step: Any = make_train_step(parts.model, parts.objective, tx, schedule, mesh)
    return step.trace(abstract, batch).lower(lowering_platforms=('tpu',))


def zero3_bytes(parts: Parts) -> float:
  """What a device would send in a step if all of them divided nothing but the batch and the state.

  In each micro-batch every parameter is gathered twice, forward and backward, and the gradient of
  every trained one is scattered once, all in the type of the computation.
  """
  params = abstract_params(parts.model)

  def count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))

  numbers = 2 * count(params) + count(parts.objective.stage.split(params)[0])
  return float(numbers * jnp.dtype(parts.model.dtype).itemsize * parts.plan.micro_batches)


def filled_rows(model: ModelConfig, devices: int) -> float:
  """Share of the rows of an expert layer's buffer that an even load of the experts fills.

  Args:
    model: its `expert_capacity` says how large the buffer is.
    devices: that divide the experts; on one all rows are filled.
  """
  if devices == 1:
    return 1.0
  chosen = model.num_experts_per_tok
  largest = devices * min(chosen, model.n_routed_experts // devices) / chosen
  return 1.0 / min(largest, model.expert_capacity or largest)


def model_flops(parts: Parts) -> float:
  """Of a step on full rows of one document each."""
  plan, model = parts.plan, parts.model
  positions = np.broadcast_to(np.arange(plan.seq_len), (1, plan.seq_len))
  topk = plan.topk
  pairs = flops.count_pairs(positions, None, topk)
  row = flops.train_flops(
    model, plan.seq_len, pairs, parts.objective.mtp_steps, parts.objective.mtp_fraction,
    parts.objective.stage,
  )  # fmt: skip
  return row * plan.rows
