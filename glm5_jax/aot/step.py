"""The step of a run config, training or RL, compiled for absent TPUs, and what it will need there."""

import dataclasses
import functools
import math
import time
from collections.abc import Callable, Mapping, Sequence
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
from glm5_jax.rl.batch import PolicyBatch
from glm5_jax.rl.learner import STAGE as POLICY_STAGE
from glm5_jax.rl.learner import make_policy_step
from glm5_jax.rl.prepare import prepare_rl
from glm5_jax.train import flops
from glm5_jax.train.placement import Placement, mesh_of
from glm5_jax.train.prepare import ConfigError, Parts, prepare, prepare_mesh
from glm5_jax.train.stages import Stage
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


class Job(NamedTuple):
  """A step to compile, and what it is for.

  Attributes:
    lower: Lowers it, without a single array.
    mesh, model: Where, and of what.
    tokens: Of a step, of all chips.
    model_flops, zero3_bytes: See the functions of these names.
  """

  lower: Callable[[], jax.stages.Lowered]
  mesh: Mesh
  model: ModelConfig
  tokens: int
  model_flops: float
  zero3_bytes: float


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
  job = (policy_job if 'rl' in config else training_job)(config, topology.devices)
  mesh = job.mesh
  clock = time.process_time()
  lowered = job.lower()
  found = program.planned(lowered) if plan else program.compiled(lowered)
  seconds = time.process_time() - clock

  filled = filled_rows(job.model, mesh.shape['expert'])
  work = hlo.measure(found.text, filled)
  per_chip = len(topology.devices) // topology.chips if mesh.size > 1 else 1
  chip = topology.device
  hidden = overlap.hidden(found.text, chip.flops / chip.ici_bandwidth, filled)
  sent = sum(c.sent for c in work.collectives.values())
  return Needs(
    chips=max(1, mesh.size // per_chip), mesh=dict(mesh.shape),
    argument_bytes=found.argument_bytes * per_chip,
    temporary_bytes=found.temporary_bytes * per_chip, peak_bytes=found.peak_bytes * per_chip,
    fits=found.peak_bytes <= chip.hbm_bytes, compile_seconds=seconds, work=work, flops=work.flops * per_chip,
    model_flops=job.model_flops, tokens=job.tokens, zero3_bytes=job.zero3_bytes,
    roofline=roofline(chip, work.flops, work.bytes, sent, sum(hidden.values())), hidden=hidden,
  )  # fmt: skip


def training_job(config: Mapping[str, Any], devices: Sequence[jax.Device]) -> Job:
  """The training step of a run config.

  Raises:
    ConfigError: see `compile_step`.
  """
  parts = prepare(config)
  mesh = prepare_mesh(config, parts, devices) or sharding.make_mesh({}, devices[:1])
  infilling = config['data'].get('objective') == 'infilling'
  return Job(
    functools.partial(lower, parts, mesh, infilling), mesh, parts.model,
    parts.plan.rows * parts.plan.seq_len, model_flops(parts), zero3_bytes(parts),
  )  # fmt: skip


def model_flops(parts: Parts) -> float:
  """Of a training step on full rows of one document each."""
  plan, objective = parts.plan, parts.objective
  mtp = objective.mtp_steps, objective.mtp_fraction
  return _model_flops(parts.model, plan.rows, plan.seq_len, plan.topk, mtp, objective.stage)


def _model_flops(
  model: ModelConfig,
  rows: int,
  seq_len: int,
  topk: int | None,
  mtp: tuple[int, float],
  stage: Stage,
) -> float:
  positions = np.broadcast_to(np.arange(seq_len), (1, seq_len))
  pairs = flops.count_pairs(positions, None, topk)
  steps, share = mtp
  return rows * flops.train_flops(model, seq_len, pairs, steps, share, stage)


def zero3_bytes(parts: Parts) -> float:
  """What a device would send in a step if all of them divided nothing but the batch and the state.

  In each micro-batch every parameter is gathered twice, forward and backward, and the gradient of
  every trained one is scattered once, all in the type of the computation.
  """
  return _zero3_bytes(parts.model, parts.objective.stage, parts.plan.micro_batches)


def _zero3_bytes(model: ModelConfig, stage: Stage, micro_batches: int) -> float:
  params = abstract_params(model)

  def count(tree: Any) -> int:
    return sum(x.size for x in jax.tree.leaves(tree))

  numbers = 2 * count(params) + count(stage.split(params)[0])
  return float(numbers * jnp.dtype(model.dtype).itemsize * micro_batches)


def lower(parts: Parts, mesh: Mesh, infilling: bool = False) -> jax.stages.Lowered:
  """The training step for `mesh`, without a single array."""
  place = Placement(mesh, parts.plan.micro_batches)
  tx, schedule = parts.optimizer
  names = ('tokens', 'targets', 'weights', 'segment_ids', 'positions', *['prefix'] * infilling)
  batch = {
    name: _rows(mesh, parts.plan.rows, parts.plan.seq_len, 'f4' if name == 'weights' else 'i4')
    for name in names
  }
  state = _state(place, parts.model, tx, parts.objective.stage)
  with place.context():
    step: Any = make_train_step(parts.model, parts.objective, tx, schedule, mesh)
    return step.trace(state, batch).lower(lowering_platforms=('tpu',))


def policy_job(config: Mapping[str, Any], devices: Sequence[jax.Device]) -> Job:
  """The update of an RL config on rows that are full: rl.groups of rl.group_size episodes, a row each.

  Raises:
    ConfigError: see `compile_step`.
  """
  parts, rl = prepare_rl(config, one_device=False), config['rl']
  try:
    mesh = mesh_of(config['mesh'], devices) or sharding.make_mesh({}, devices[:1])
    sharding.param_shardings(abstract_params(parts.model), mesh)
  except ValueError as e:
    raise ConfigError(str(e)) from None
  rows, seq_len, at_once = rl['groups'] * rl['group_size'], rl['seq_len'], rl['micro_rows']
  dealt, chunks = (math.prod(mesh.shape[a] for a in sharding.BATCH_AXES), 2 * mesh.shape['context'])
  if rows % at_once or at_once % dealt or seq_len % chunks:
    raise ConfigError(
      f'{rows} episodes in micro-batches of rl.micro_rows={at_once} do not divide by {dealt} devices, or'
      f' rl.seq_len={seq_len} not by {chunks} chunks'
    )

  def lower() -> jax.stages.Lowered:
    types = {'mask': '?', 'rollout': 'f4', 'advantages': 'f4', 'teacher': 'f4'}
    names = [n for n in PolicyBatch._fields if n != 'teacher' or parts.advantage is None]
    batch = PolicyBatch(**{n: _rows(mesh, rows, seq_len, types.get(n, 'i4')) for n in names})
    place = Placement(mesh)
    state = _state(place, parts.model, parts.tx, POLICY_STAGE)
    with place.context():
      step: Any = make_policy_step(parts.model, parts.learner, parts.tx, mesh)
      return step.trace(state, batch).lower(lowering_platforms=('tpu',))

  topk = parts.model.index_topk if parts.model.sparse_attention else None
  work = _model_flops(parts.model, rows, seq_len, topk, (0, 1.0), POLICY_STAGE)
  sent = _zero3_bytes(parts.model, POLICY_STAGE, rows // at_once)
  return Job(lower, mesh, parts.model, rows * seq_len, work, sent)


def _rows(mesh: Mesh, rows: int, seq_len: int, dtype: str) -> jax.ShapeDtypeStruct:
  where = NamedSharding(mesh, sharding.BATCH)
  return jax.ShapeDtypeStruct((rows, seq_len), dtype, sharding=where)


def _state(place: Placement, model: ModelConfig, tx: Any, stage: Stage) -> Any:
  def state() -> TrainState:
    return TrainState.create(init_params(model, jax.random.key(0)), tx, 0, stage)

  return place.abstract(jax.eval_shape(state))


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
