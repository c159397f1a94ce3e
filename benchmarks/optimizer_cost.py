"""What the optimizers cost: time of a training step on this machine, and FLOPs at 744B.

  python -m benchmarks.optimizer_cost [--sizes=nano,small] [--repeats=5] [--batch=8] [--time=256]

For every size and optimizer: seconds to compile the optimizer's update alone, its time, the time of
the whole training step with it, and the share of the former in the latter. The step is that of
configs/nano_pretrain.py. Then the FLOPs of Newton-Schulz in one step of the 744B model, and those
that the busiest device of a pod spends on it: where there are fewer matrices of a shape than devices,
some wait. The last line of the output is JSON.
"""

import argparse
import json
import math
import statistics
import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, AxisType

from glm5_jax import config as configs
from glm5_jax import sharding
from glm5_jax.compile import jit_once
from glm5_jax.modules.model import abstract_params, init_params
from glm5_jax.optim import muon
from glm5_jax.optim.build import build
from glm5_jax.optim.rules import TABLES, Rules, path_name, rule_of
from glm5_jax.train import flops
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import Objective, make_train_step

OPTIM = {
  'schedule': 'cosine', 'peak_lr': 1e-3, 'end_lr': 1e-4, 'warmup_steps': 10, 'b1': 0.9, 'b2': 0.95,
  'eps': 1e-8, 'weight_decay': 0.1, 'clip_norm': 1.0, 'momentum': 0.95, 'nesterov': True,
  'ns_dtype': 'float32', 'ns_chunk': muon.CHUNK,
}  # fmt: skip

POD = {'fsdp': 32, 'expert': 8, 'tensor': 2}


def flop_share(
  config: configs.ModelConfig, rules: Rules, *, tokens: int, length: int = 4096, mtp_steps: int = 3
) -> float:
  """Newton-Schulz's share of the FLOPs of a step of pre-training (dense attention, full MTP).

  Args:
    config: the model.
    rules: a table of optim/rules.py.
    tokens: of a step; GLM-4.5 grew from 16M to 64M.
    length: of its sequences.
    mtp_steps: on every token.
  """
  visible = tokens // length * (length * (length + 1) // 2)
  pairs = flops.Pairs(visible, visible)
  model = flops.train_flops(config.replace(sparse_attention=False), tokens, pairs, mtp_steps)
  optimizer = muon.newton_schulz_flops(abstract_params(config), rules)
  return optimizer / (optimizer + model)


def _batch(config: configs.ModelConfig, rows: int, length: int) -> dict[str, jax.Array]:
  tokens = np.random.default_rng(0).integers(0, config.vocab_size, (rows, length + 1), np.int32)
  positions = np.broadcast_to(np.arange(length, dtype=np.int32), (rows, length))
  return {
    'tokens': jnp.asarray(tokens[:, :-1]), 'targets': jnp.asarray(tokens[:, 1:]),
    'weights': jnp.ones((rows, length)), 'segment_ids': jnp.ones((rows, length), jnp.int32),
    'positions': jnp.asarray(positions),
  }  # fmt: skip


def measure(size: str, optimizer: str, rows: int, length: int, repeats: int) -> dict[str, Any]:
  """Medians of `repeats` updates alone and `repeats` training steps, after one of either."""
  config = configs.from_size(size)
  tx, schedule = build(OPTIM | {'name': optimizer}, steps=1000)
  params = jit_once(lambda key: init_params(config, key))(jax.random.key(0))

  def seconds(run) -> float:
    times = []
    for _ in range(repeats + 1):
      start = time.perf_counter()
      jax.block_until_ready(run())
      times.append(time.perf_counter() - start)
    return statistics.median(times[1:])

  gradients = jax.tree.map(lambda p: p + 0.01, params)
  state = tx.init(params)
  start = time.perf_counter()
  update = jax.jit(tx.update).lower(gradients, state, params).compile()
  compiling = time.perf_counter() - start
  alone = seconds(lambda: update(gradients, state, params))

  step = make_train_step(config, Objective(mtp_fraction=0.125), tx, schedule)
  batch, train_state = _batch(config, rows, length), TrainState.create(params, tx, 0)

  def train():
    nonlocal train_state
    train_state, metrics = step(train_state, batch)
    return metrics

  whole = seconds(train)
  return {
    'size': size, 'optimizer': optimizer, 'compile_s': compiling, 'update_ms': 1e3 * alone,
    'step_ms': 1e3 * whole, 'share': alone / whole,
  }  # fmt: skip


def at_scale() -> dict[str, Any]:
  """FLOPs of Newton-Schulz at 744B, their share of a step, and what the busiest device has of them."""
  config = configs.glm5()
  out: dict[str, Any] = {}
  for name in ('muon', 'muon_split'):
    total = muon.newton_schulz_flops(abstract_params(config), TABLES[name])
    shares = {m: flop_share(config, TABLES[name], tokens=m * 1_000_000) for m in (16, 64)}
    busiest = busiest_device(config, TABLES[name], POD)
    out[name] = {
      'flops': total, 'share_by_million_tokens': shares,
      'busiest_over_even': busiest / (total / math.prod(POD.values())),
    }  # fmt: skip
  return out


def busiest_device(config: configs.ModelConfig, rules: Rules, mesh: dict[str, int]) -> int:
  """FLOPs of Newton-Schulz on the device that has most of them, padding included.

  Counted in the traced program, which is the same for all devices; nothing is compiled.
  """
  sizes = tuple(mesh.get(axis, 1) for axis in sharding.AXES)
  kinds = (AxisType.Explicit,) * len(sizes)
  abstract_mesh: Any = AbstractMesh(sizes, sharding.AXES, axis_types=kinds)
  params = sharding.abstract_params(abstract_params(config), abstract_mesh)
  leaves = {path_name(path): x for path, x in jax.tree_util.tree_leaves_with_path(params)}
  matrices = {path: x for path, x in leaves.items() if '->' in rule_of(path, rules)}
  tx = muon.scale_by_muon(rules)
  with jax.sharding.use_abstract_mesh(abstract_mesh):
    state = jax.eval_shape(tx.init, matrices)
    return _dot_flops(jax.make_jaxpr(tx.update)(matrices, state).jaxpr)


def _dot_flops(jaxpr: Any) -> int:
  total = 0
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'dot_general':
      (contracted, _), _ = equation.params['dimension_numbers']
      left = equation.invars[0].aval.shape
      total += 2 * equation.outvars[0].aval.size * math.prod(left[i] for i in contracted)
    inner = [getattr(p, 'jaxpr', p) for p in equation.params.values()]
    repeats = equation.params.get('length', 1)  # Of a scan, which a fori_loop is too.
    total += repeats * sum(_dot_flops(p) for p in inner if hasattr(p, 'eqns'))
  return total


def main() -> None:
  """Measures, and prints tables and one line of JSON."""
  parser = argparse.ArgumentParser(description=(__doc__ or '').partition('\n')[0])
  parser.add_argument('--sizes', default='nano')
  parser.add_argument('--repeats', type=int, default=5)
  parser.add_argument('--batch', type=int, default=8)
  parser.add_argument('--time', type=int, default=256)
  args = parser.parse_args()

  print('| size | optimizer | compile, s | update, ms | step, ms | share of the step |')
  print('|---|---|---|---|---|---|')
  measured = []
  for size in filter(None, args.sizes.split(',')):
    for name in ('adamw', 'muon', 'muon_split'):
      m = measure(size, name, args.batch, args.time, args.repeats)
      measured.append(m)
      print(
        f'| {size} | {name} | {m["compile_s"]:.1f} | {m["update_ms"]:.1f} | {m["step_ms"]:.0f} |'
        f' {m["share"]:.1%} |', flush=True,
      )  # fmt: skip
  large = at_scale()
  devices = math.prod(POD.values())
  print(
    '\n| 744B | FLOPs of Newton-Schulz | share, 16M tokens | share, 64M tokens |'
    f' busiest of {devices} devices, over 1/{devices} |\n|---|---|---|---|---|'
  )
  for name, row in large.items():
    shares = ' | '.join(f'{s:.2%}' for s in row['share_by_million_tokens'].values())
    print(f'| {name} | {row["flops"]:.3g} | {shares} | {row["busiest_over_even"]:.2f} |')
  print(json.dumps({'measured': measured, 'glm5': large}))


if __name__ == '__main__':
  main()
