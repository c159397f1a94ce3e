"""The training step on a mesh of simulated devices beside the same step on one device."""

import functools
from collections.abc import Mapping
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec as P

from glm5_jax import sharding
from glm5_jax.config import ModelConfig
from glm5_jax.convert.hf_map import flatten
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import forward
from glm5_jax.ops import collectives
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import Objective, make_train_step
from tests import tiny

ROWS, TIME = 8, 32


def config(**changes) -> ModelConfig:
  """A dense layer, two MoE layers and the MTP layer; all that an axis may split divides by 8."""
  base = ModelConfig(
    vocab_size=48, hidden_size=32, num_hidden_layers=3, first_k_dense_replace=1,
    intermediate_size=40, moe_intermediate_size=24, n_routed_experts=8, num_experts_per_tok=3,
    num_attention_heads=8, num_key_value_heads=8, q_lora_rank=16, kv_lora_rank=24,
    qk_nope_head_dim=6, qk_rope_head_dim=4, v_head_dim=10, index_n_heads=3, index_head_dim=12,
    index_topk=7, rope_theta=1e4, max_position_embeddings=64, eos_token_id=(), pad_token_id=None,
  )  # fmt: skip
  return base.replace(**changes)


def batch(config: ModelConfig, rows: int = ROWS, seed: int = 0) -> dict[str, np.ndarray]:
  """Rows of several documents each, which end anywhere, and padding after them."""
  rng = np.random.default_rng(seed)
  segments, positions = np.zeros((2, rows, TIME), np.int32)
  for row in range(rows):
    ends = np.sort(rng.choice(np.arange(2, TIME + 1), 3, replace=False))
    for number, (start, end) in enumerate(zip([0, *ends], ends, strict=False), 1):
      segments[row, start:end] = number
      positions[row, start:end] = np.arange(end - start)
  tokens = rng.integers(0, config.vocab_size, (2, rows, TIME), np.int32)
  weights = ((segments > 0) & (rng.random((rows, TIME)) < 0.9)).astype(np.float32)
  return {
    'tokens': tokens[0], 'targets': tokens[1], 'weights': weights, 'segment_ids': segments,
    'positions': positions,
  }  # fmt: skip


def keep_gradients() -> optax.GradientTransformation:
  """Changes nothing; its state is the last gradients."""
  zeros = functools.partial(jax.tree.map, jnp.zeros_like)
  return optax.GradientTransformation(zeros, lambda g, state, params=None: (zeros(g), g))


def run_step(config, objective, params, batch, shape=None, tx=None, steps=1):
  """The state after `steps` steps on `batch` and the last metrics, both on the host.

  `shape` is that of the mesh; None is one device.
  """
  tx = tx or keep_gradients()
  mesh = sharding.make_mesh(shape) if shape else None
  params = jax.tree.map(jnp.copy, params)  # The step consumes its state.
  state = TrainState.create(params, tx, 0, objective.stage)
  if mesh is None:
    return _repeat(make_train_step(config, objective, tx, optax.constant_schedule(1.0)), state,
                   batch, steps)  # fmt: skip
  state = jax.device_put(state, sharding.shardings(sharding.state_specs(state, mesh), mesh))
  with jax.set_mesh(mesh):
    step = make_train_step(config, objective, tx, optax.constant_schedule(1.0), mesh)
    return _repeat(step, state, sharding.place_batch(batch, mesh, objective.grad_accum), steps)


def _repeat(step, state, batch, steps):
  compiled = step.lower(state, batch).compile(compiler_options=tiny.FAST_COMPILE)
  for _ in range(steps):
    state, metrics = compiled(state, batch)
  return jax.device_get((state, metrics))


def worst(got: Any, want: Any) -> float:
  """The largest difference of two trees, relative to each array's largest value (at least 1e-3)."""
  got, want = flatten(got), flatten(want)
  assert got.keys() == want.keys()
  return max(np.abs(got[k] - want[k]).max() / max(np.abs(want[k]).max(), 1e-3) for k in want)


def check_step(
  shape: Mapping[str, int],
  config: ModelConfig,
  objective: Objective,
  reference: tuple[Any, Any],
  params: Any,
  batch: Any,
  bound: float = 1e-5,
) -> None:
  """Loss, metrics and gradients on a mesh equal the single device's."""
  state, metrics = run_step(config, objective, params, batch, shape)
  want_state, want = reference
  assert metrics.keys() - {'dropped'} == want.keys()
  off = {k: float(np.abs(metrics[k] - want[k]).max() / np.abs(want[k]).max().clip(1e-3))
         for k in want}  # fmt: skip
  gradients = worst(state.opt_state, want_state.opt_state)
  bias = worst(state.params, want_state.params)
  print(f'[max] {dict(shape)}: gradients {gradients:.1e}, parameters {bias:.1e}, metrics {off}')
  assert max(off.values()) < bound and gradients < bound and bias < bound, shape


def decisions(config: ModelConfig, params: Any, batch: Any, shape=None) -> dict[str, np.ndarray]:
  """Which keys every query selects and which experts every token, of all layers."""

  def look(params, batch):
    rows, time = batch['tokens'].shape
    out = forward(
      params, batch['tokens'], config=config, positions=batch['positions'],
      segment_ids=batch['segment_ids'], logits=False,
      options=Options(capture=True, form='expanded'),
    )  # fmt: skip
    found = {}
    for stack in config.stacks:
      aux = out.aux[stack.name]['block0']
      found[f'{stack.name} keys'] = aux['selected']
      if 'router_experts' in aux:
        found[f'{stack.name} experts'] = aux['router_experts'].reshape(-1, rows, time, 3)
    return found

  if shape is None:
    return jax.device_get(tiny.fast_jit(look)(params, batch))
  mesh = sharding.make_mesh(shape)
  with jax.set_mesh(mesh):
    specs = (sharding.param_specs(params, mesh), sharding.BATCH)
    on_devices = collectives.on_mesh(look, mesh, specs, P(None, *sharding.BATCH))
    arguments = sharding.shard_params(params, mesh), sharding.place_batch(batch, mesh)
    found = jax.device_get(tiny.fast_jit(on_devices)(*arguments))
  places = np.argsort(sharding.row_order(mesh.shape['context'], TIME))
  return {name: a[:, :, places] for name, a in found.items()}
