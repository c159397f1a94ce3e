"""The training step on a mesh: loss, gradients and every choice are those of one device."""

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from glm5_jax import sharding
from glm5_jax.ops import collectives
from glm5_jax.train.step import Objective
from tests import tiny
from tests.sharding import meshes
from tests.simulated import run_on_devices

# Weights under which every term of the loss shows in the gradients.
OBJECTIVE = Objective(mtp_steps=2, indexer_loss_weight=1.0, balance_loss_weight=0.1)


def _check(shapes, config, objective=OBJECTIVE, rows=meshes.ROWS):
  params, batch = tiny.random_params(config), meshes.batch(config, rows)
  reference = meshes.run_step(config, objective, params, batch)
  for shape in shapes:
    meshes.check_step(shape, config, objective, reference, params, batch)


def _rows_and_parameters():
  _check(({'fsdp': 8}, {'data': 8}), meshes.config())


def _tensor():
  _check(({'tensor': 8}, {'data': 2, 'fsdp': 2, 'tensor': 2}), meshes.config())


def _context():
  _check(({'context': 8}, {'fsdp': 2, 'context': 4}), meshes.config())


def _experts():
  _check(({'expert': 8}, {'fsdp': 2, 'expert': 4}), meshes.config())


def _dense_attention_in_micro_batches():
  """Rematerialised, too."""
  config = meshes.config(num_hidden_layers=2, remat='block', sparse_attention=False)
  objective = Objective(mtp_steps=0, grad_accum=2, indexer_loss_weight=1.0)
  _check(({'fsdp': 2, 'expert': 2, 'context': 2},), config, objective, rows=16)


def _grouped_queries():
  config = meshes.config(num_hidden_layers=2, attention='gqa')
  _check(({'data': 2, 'context': 2, 'tensor': 2},), config, Objective(mtp_steps=1))


def _shared_selections():
  """Also by MTP steps; and few keys of many, which are gathered."""
  config = meshes.config(
    index_topk=3, indexer_types=('full', 'full', 'shared'), index_share_for_mtp_iteration=True,
    expert_matmul='ragged_dot',
  )  # fmt: skip
  _check(({'expert': 2, 'context': 2, 'tensor': 2},), config)


def _choices():
  config = meshes.config()
  params, batch = tiny.random_params(config), meshes.batch(config)
  want = meshes.decisions(config, params, batch)
  assert want['moe keys'].sum(-1).max() == config.index_topk < meshes.TIME
  for shape in ({'fsdp': 4, 'expert': 2}, {'data': 2, 'context': 2, 'tensor': 2}):
    got = meshes.decisions(config, params, batch, shape)
    assert got.keys() == want.keys() == {'dense keys', 'moe keys', 'moe experts'}
    for name in want:
      np.testing.assert_array_equal(got[name], want[name], err_msg=f'{name} on {shape}')


def _any_mesh():
  config = meshes.config(num_hidden_layers=2, num_nextn_predict_layers=0)
  objective = Objective(mtp_steps=0, indexer_loss_weight=1.0, balance_loss_weight=0.1)
  params, batch = tiny.random_params(config), meshes.batch(config)
  reference = meshes.run_step(config, objective, params, batch)
  axes = st.lists(st.sampled_from(sharding.AXES), min_size=3, max_size=3)

  @hypothesis.given(axes)
  @hypothesis.settings(max_examples=3, deadline=None, database=None, derandomize=True)
  def equals_one_device(axes):  # Three factors of 2, each given to some axis.
    shape = {axis: 2 ** axes.count(axis) for axis in axes}
    meshes.check_step(shape, config, objective, reference, params, batch)

  equals_one_device()


def _a_row_on_four_devices():
  """Parts are balanced; collectives see the row in its order; shifts cross devices both ways."""
  mesh = sharding.make_mesh({'fsdp': 2, 'context': 4})
  row = np.arange(1, 2 * 48 + 1, dtype=np.float32).reshape(2, 48)
  order = sharding.row_order(4, 48)
  assert sorted(order) == list(range(48))
  visible = (order + 1).reshape(4, -1).sum(axis=1)  # Of the causal keys of every device.
  assert (visible == visible[0]).all()

  def on_device(x):
    whole = collectives.gather_sequence(x)
    shifted = [collectives.shift_sequence(x[..., None], by)[..., 0] for by in (1, 3, 6)]
    slots = jnp.broadcast_to(collectives.own_slots(x.shape[1]), x.shape)
    return whole, collectives.own_tokens(whole), slots, shifted

  with jax.set_mesh(mesh):
    specs = (P('fsdp'), sharding.BATCH, sharding.BATCH, sharding.BATCH)
    run = jax.jit(collectives.on_mesh(on_device, mesh, (sharding.BATCH,), specs))
    placed = sharding.place_batch({'x': row}, mesh)['x']
    whole, own, slots, shifted = jax.device_get(run(placed))
  np.testing.assert_array_equal(placed, row[:, order])
  np.testing.assert_array_equal(whole, row)
  np.testing.assert_array_equal(own, row[:, order])
  np.testing.assert_array_equal(slots, np.broadcast_to(order, row.shape))
  for by, found in zip((1, 3, 6), shifted, strict=True):
    want = np.pad(row[:, by:], ((0, 0), (0, by)))
    np.testing.assert_array_equal(found, want[:, order])


def test_a_row_on_four_devices():
  print(run_on_devices(_a_row_on_four_devices))


def test_rows_and_parameters():
  print(run_on_devices(_rows_and_parameters))


def test_tensor():
  print(run_on_devices(_tensor))


def test_context():
  print(run_on_devices(_context))


def test_experts():
  print(run_on_devices(_experts))


def test_dense_attention_in_micro_batches():
  print(run_on_devices(_dense_attention_in_micro_batches))


def test_grouped_queries():
  print(run_on_devices(_grouped_queries))


def test_shared_selections():
  print(run_on_devices(_shared_selections))


def test_choices():
  print(run_on_devices(_choices))


def test_any_mesh():
  print(run_on_devices(_any_mesh))
