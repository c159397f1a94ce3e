"""The policy's update on a mesh is that of one device: gradients, metrics, also of sequence-level ratios."""

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax import sharding
from glm5_jax.losses.policy import PolicyConfig
from glm5_jax.rl.batch import PolicyBatch
from glm5_jax.rl.learner import STAGE, Learner, make_policy_step
from glm5_jax.train.state import TrainState
from tests import tiny
from tests.sharding import meshes
from tests.simulated import run_on_devices


def _batch(config) -> PolicyBatch:
  rows = meshes.batch(config)
  rng = np.random.default_rng(3)
  shape = rows['tokens'].shape
  return PolicyBatch(
    rows['tokens'], rows['targets'], rows['segment_ids'], rows['positions'],
    mask=rows['weights'] > 0, rollout=rng.normal(-4, 0.3, shape).astype(np.float32),
    advantages=rng.standard_normal(shape, np.float32),
  )  # fmt: skip


def _update(config, learner, params, batch, shape=None):
  tx = meshes.keep_gradients()
  mesh = sharding.make_mesh(shape or {}, None if shape else jax.devices()[:1])
  with jax.set_mesh(mesh):
    state = TrainState.create(jax.tree.map(jnp.copy, params), tx, 0, STAGE)
    state = jax.device_put(state, sharding.shardings(sharding.state_specs(state, mesh), mesh))
    arrays = {k: v for k, v in batch._asdict().items() if v is not None}
    placed = PolicyBatch(
      **sharding.place_batch(arrays, mesh, len(batch.tokens) // learner.micro_rows)
    )
    step = make_policy_step(config, learner, tx, mesh)
    filled = jnp.int32(len(batch.tokens) // learner.micro_rows)
    compiled = step.lower(state, placed, filled).compile(compiler_options=tiny.FAST_COMPILE)
    state, metrics = compiled(state, placed, filled)
  gradients, metrics = jax.device_get((state.opt_state, metrics))
  return dict(enumerate(jax.tree.leaves(gradients))), metrics


def _equal_to_one_device():
  config = meshes.config(num_hidden_layers=2, num_nextn_predict_layers=0)
  params, batch = tiny.random_params(config), _batch(config)
  for objective, per, shape in (
    ('gspo', 'sequence', {'fsdp': 2, 'context': 2, 'tensor': 2}),
    ('double_sided', 'token', {'expert': 2, 'context': 4}),
  ):
    learner = Learner(PolicyConfig(objective), per, micro_rows=4)
    want, numbers = _update(config, learner, params, batch)
    got, found = _update(config, learner, params, batch, shape)
    assert numbers['grad_norm'] > 1e-3 and numbers['tokens'] == batch.mask.sum()
    off = {k: np.abs(found[k] - numbers[k]).max() / np.abs(numbers[k]).max().clip(1e-3)
           for k in numbers}  # fmt: skip
    gradients = max(np.abs(got[k] - g).max() / max(np.abs(g).max(), 1e-3) for k, g in want.items())
    print(f'[max] {objective} on {shape}: gradients {gradients:.1e}, metrics {off}')
    assert gradients < 1e-5 and max(off.values()) < 1e-5


def test_equal_to_one_device():
  print(run_on_devices(_equal_to_one_device))
