"""Experts on several devices: rows reach their experts and return; what has no room is counted."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import PartitionSpec as P

from glm5_jax import sharding
from glm5_jax.ops import collectives, dispatch, expert_parallel
from glm5_jax.ops.router import Routing
from glm5_jax.train.step import Objective
from tests import tiny
from tests.sharding import meshes
from tests.simulated import run_on_devices

D, F = 12, 10


def _layer(tokens: int, experts: int, chosen: int, seed: int = 0, favourite: int | None = None):
  """x, choices, weights of the router and of the experts; on request everyone's first choice."""
  rng = np.random.default_rng(seed)
  x = rng.standard_normal((tokens, D), np.float32)
  choice = np.stack([rng.permutation(experts)[:chosen] for _ in range(tokens)]).astype(np.int32)
  if favourite is not None:
    others = np.stack([rng.permutation(experts - 1)[: chosen - 1] for _ in range(tokens)])
    others += others >= favourite
    choice = np.concatenate([np.full((tokens, 1), favourite), others], 1).astype(np.int32)
  weights = rng.random((tokens, chosen), np.float32)
  shapes = (experts, D, F), (experts, D, F), (experts, F, D)
  return x, choice, weights, tuple(rng.standard_normal(s).astype(np.float32) for s in shapes)


def _definition(x, choice, weights, matrices):
  """Every token through each of its experts, one by one, in float64."""
  w_gate, w_up, w_down = (w.astype(np.float64) for w in matrices)
  out = np.zeros_like(x, np.float64)
  for t, row in enumerate(x.astype(np.float64)):
    for e, weight in zip(choice[t], weights[t], strict=True):
      gate = row @ w_gate[e]
      out[t] += weight * ((gate / (1 + np.exp(-gate)) * (row @ w_up[e])) @ w_down[e])
  return out


def _routing(choice, weights):
  return Routing(choice, weights, jnp.zeros((1, 1)), jnp.zeros((1, 1)))


def test_plans_send_every_row_once():
  """What device i sends to j is what j expects, fills j's buffer without gaps, and returns."""

  @hypothesis.given(st.integers(0, 2**32 - 1), st.sampled_from([1, 2, 4]), st.integers(1, 200))
  @hypothesis.settings(max_examples=30, deadline=None, database=None)
  def check(seed, devices, capacity):
    rng = np.random.default_rng(seed)
    local = int(rng.integers(1, 4))
    counts = rng.integers(0, 12, (devices, devices * local)).astype(np.int32)
    plans = [expert_parallel.make_plan(jnp.array(counts), jnp.array(i), capacity)
             for i in range(devices)]  # fmt: skip
    for j, plan in enumerate(plans):
      arrived = []
      for i, sender in enumerate(plans):
        size = int(sender.there.size[j])
        assert size == int(plan.there.expected[i]) == int(plan.back.size[i])
        assert size == int(sender.back.expected[j])
        assert int(plan.back.target[i]) == int(sender.there.start[j])
        start = int(sender.there.target[j])
        assert int(plan.back.start[i]) == start
        # The rows sent are sorted by expert: their experts are known on both sides.
        experts = np.repeat(np.arange(devices * local), counts[i])
        first = int(sender.there.start[j])
        rows = experts[first : first + size]
        assert (rows // local == j).all() and start + size <= capacity
        arrived += [(start + n, e % local) for n, e in enumerate(rows)]
      arrived.sort()
      assert [slot for slot, _ in arrived] == list(range(len(arrived)))
      total = int(counts[:, j * local : (j + 1) * local].sum())
      assert len(arrived) == min(total, capacity)
      expert = np.full(capacity, local)
      expert[: len(arrived)] = [e for _, e in arrived]
      np.testing.assert_array_equal(plan.expert, expert)
    sent = sum(int(plan.there.size.sum()) for plan in plans)
    assert sum(int(plan.dropped) for plan in plans) == counts.sum() - sent

  check()


@pytest.mark.parametrize('tokens', [1, 9, 70])
def test_grouped_matmul_equals_the_definition(tokens):
  x, choice, weights, matrices = _layer(tokens, 6, 2)
  want = _definition(x, choice, weights, matrices)
  cotangent = np.random.default_rng(1).standard_normal(x.shape, np.float32)

  def ffn(matmul, x, weights, matrices):
    return dispatch.expert_ffn(x, _routing(choice, weights), *matrices, matmul)

  def gradients(matmul):
    loss = lambda *a: jnp.sum(ffn(matmul, *a) * cotangent)  # noqa: E731
    return tiny.fast_jit(jax.grad(loss, (0, 1, 2)))(x, weights, matrices)

  tiny.close_relative('ragged_dot', ffn('ragged_dot', x, weights, matrices), want, 1e-6)
  for name, a, b in zip('x weights matrices'.split(), gradients('ragged_dot'), gradients('blocks'),
                        strict=True):  # fmt: skip
    for got, other in zip(jax.tree.leaves(a), jax.tree.leaves(b), strict=True):
      tiny.close_relative(f'gradient of {name}', got, other, 1e-5)


@pytest.mark.parametrize('matmul', ['blocks', 'ragged_dot'])
def test_rows_of_nobody_have_no_part_in_anything(matmul):
  """Whatever is in them, and in what comes back for them."""
  x, choice, weights, matrices = _layer(40, 5, 1)
  real = np.arange(40) % 3 > 0
  cotangent = np.where(real[:, None], np.random.default_rng(1).standard_normal(x.shape), np.nan)

  def gradients(rows, choice, nobody):
    def outputs(x, weights, matrices):
      return dispatch.pair_outputs(x, choice, weights, *matrices, matmul, nobody=nobody)

    out, pull = jax.vjp(outputs, rows(x), rows(weights).astype('f4'), matrices)
    return out, *pull(rows(cotangent).astype('f4'))

  alone = gradients(lambda a: a[real], choice[real], False)
  tiny.close_relative(matmul, alone[0], _definition(x, choice, weights, matrices)[real], 1e-6)
  choice[~real] = 5
  x[~real] = weights[~real] = np.nan
  beside = gradients(lambda a: a, choice, True)
  for name, got, want in zip(('outputs', 'x', 'weights', 'matrices'), beside, alone, strict=True):
    got = got if name == 'matrices' else got[real]
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
      tiny.close_relative(name, a, b, 1e-6)


def _on_devices(config, mesh):
  """(x, choice, weights, matrices) -> [T, D], dropped."""

  def ffn(x, choice, weights, *matrices):
    return expert_parallel.expert_ffn(x, _routing(choice, weights), *matrices, config)

  rows, experts = P(('fsdp', 'expert')), P('expert')
  specs = (rows, rows, rows, experts, experts, experts)
  on_devices = collectives.on_mesh(ffn, mesh, specs, (rows, P()))

  def run(x, choice, weights, matrices):
    return on_devices(*map(jax.reshard, (x, choice, weights, *matrices), specs))

  return tiny.fast_jit(run)


def _any_load():
  """Also where all tokens want one device; of a bounded buffer, what does not fit is left out."""
  mesh = sharding.make_mesh({'fsdp': 2, 'expert': 4})
  config = meshes.config(num_experts_per_tok=2)
  bounded = config.replace(expert_capacity=1.5)
  with jax.set_mesh(mesh):
    exact, limited = (_on_devices(c, mesh) for c in (config, bounded))
    for favourite in (None, 0, 7):
      layer = _layer(8 * 9, 8, 2, seed=1, favourite=favourite)
      want = _definition(*layer)
      got, dropped = exact(*layer)
      tiny.close_relative(f'everyone wants {favourite}', got, want, 1e-6)
      assert int(dropped) == 0
      got, dropped = limited(*layer)
      if favourite is None:
        assert int(dropped) == 0
        tiny.close_relative('a buffer that suffices', got, want, 1e-6)
      else:
        # Of each half of the tokens, those that chose a given device.
        owner = np.asarray(layer[1]).reshape(2, -1) // 2
        load = np.array([[(half == d).sum() for d in range(4)] for half in owner])
        lost = np.maximum(load - 32, 0).sum()  # 1.5 times 18 pairs, in units of 8 rows.
        assert int(dropped) == lost > 0
        different = np.abs(np.asarray(got) - want).max(axis=1) > 1e-4
        assert 0 < different.sum() <= lost
  print('[dropped]', int(dropped))


def _overflow():
  """An overflow leaves the state as it was, or is counted and goes on."""
  config = meshes.config(num_hidden_layers=2, num_nextn_predict_layers=0, num_experts_per_tok=2)
  objective = Objective(mtp_steps=0)
  params, batch = tiny.random_params(config), meshes.batch(config)
  bias = np.zeros_like(params['moe']['block0']['moe']['router']['bias'])
  bias[:, :2] = 10  # Every token chooses the first device's experts.
  params['moe']['block0']['moe']['router']['bias'] = jnp.asarray(bias)
  run = functools.partial(meshes.run_step, objective=objective, params=params, batch=batch,
                          shape={'data': 2, 'expert': 4})  # fmt: skip
  for overflow, skipped in (('error', 1), ('drop', 0)):
    state, metrics = run(config.replace(expert_capacity=2.0, expert_overflow=overflow))
    # All pairs of a row of devices go to one, which has room for twice an even load, a half of
    # them.
    assert int(metrics['dropped']) == 2 * meshes.ROWS * meshes.TIME // 2
    assert int(metrics['skipped']) == skipped == int(state.skipped)
    moved = np.any(state.params['moe']['block0']['moe']['router']['bias'] != bias)
    assert moved != bool(skipped)
  assert int(run(config)[1]['dropped']) == 0


def test_any_load():
  print(run_on_devices(_any_load))


def test_overflow():
  print(run_on_devices(_overflow))
