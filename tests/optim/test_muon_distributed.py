"""Muon over 8 devices: equal to one device, every matrix on one of them, and only shards are sent."""

import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax import config as configs
from glm5_jax import sharding
from glm5_jax.convert.hf_map import flatten
from glm5_jax.modules.model import abstract_params
from glm5_jax.optim import muon, muon_split
from glm5_jax.optim.rules import MUON_SPLIT_RULES, parse_layout, rule_of
from tests import tiny
from tests.optim import hlo
from tests.simulated import run_on_devices

MESHES = (
  {'fsdp': 8},
  {'fsdp': 4, 'tensor': 2},
  {'data': 2, 'fsdp': 2, 'expert': 2},
  {'fsdp': 2, 'expert': 2, 'tensor': 2},
)


def _even():
  """Eight layers: the matrices of every shape divide by 8 devices."""
  return configs.nano(
    hidden_size=64, vocab_size=64, num_hidden_layers=8, first_k_dense_replace=0,
    num_nextn_predict_layers=0,
  )  # fmt: skip


def _uneven():
  """A dense layer, two MoE layers and the MTP layer; no count divides by 8 but the experts'."""
  return configs.nano(hidden_size=64, vocab_size=64, n_routed_experts=8)


def _draw(config, seed):
  rng = np.random.default_rng(seed)
  return jax.tree.map(lambda s: rng.standard_normal(s.shape, np.float32), abstract_params(config))


def _matrices(config):
  """Path -> (shape, layout) of Muon's parameters."""
  out = {}
  for path, leaf in flatten(abstract_params(config)).items():
    rule = rule_of(path, MUON_SPLIT_RULES)
    if '->' in rule:
      out[path] = leaf.shape, parse_layout(rule, len(leaf.shape))
  return out


def _compiled(config, mesh, **options):
  """The compiled update of one step, and its arguments."""
  tx = muon_split(0.1, **options)
  params, gradients = (sharding.shard_params(_draw(config, seed), mesh) for seed in (0, 1))
  state = tiny.fast_jit(tx.init)(params)
  return tiny.fast_jit(tx.update).lower(gradients, state, params).compile(), (
    gradients,
    state,
    params,
  )


def _equals_one_device(config, meshes, **options):
  tx = muon_split(0.1, **options)
  params, gradients = _draw(config, 0), _draw(config, 1)
  state = tx.init(params)
  want, state = tiny.fast_jit(tx.update)(gradients, state, params)
  for shape in meshes:
    mesh = sharding.make_mesh(shape)
    with jax.set_mesh(mesh):
      update, arguments = _compiled(config, mesh, **options)
      got, new = update(*arguments)
    placed = flatten(arguments[2])
    worst = 0.0
    for path, reference in flatten(want).items():
      update = flatten(got)[path]
      assert update.sharding.is_equivalent_to(placed[path].sharding, update.ndim), path
      worst = max(worst, np.abs(np.asarray(update) - np.asarray(reference)).max())
    for a, b in zip(jax.tree.leaves(new), jax.tree.leaves(state), strict=True):
      np.testing.assert_allclose(a, b, atol=1e-6)
    print(f'[max] {shape}: {worst:.1e}')
    assert worst < 1e-6, shape


def _even_equals_one_device():
  _equals_one_device(_even(), MESHES)


def _uneven_equals_one_device():
  """Also replicated everywhere, in several calls of Newton-Schulz, and eagerly."""
  _equals_one_device(_uneven(), ({'fsdp': 4, 'tensor': 2}, {'data': 8}), ns_chunk=3 * 128 * 64)
  tree = {'attn': {'w_uk': np.random.default_rng(0).standard_normal((1, 8, 2, 6), np.float32)}}
  tx = muon_split(0.1)
  want, _ = tx.update(tree, tx.init(tree), tree)
  mesh = sharding.make_mesh({'fsdp': 4, 'tensor': 2})
  with jax.set_mesh(mesh):
    placed = sharding.shard_params(tree, mesh)
    got, _ = tx.update(placed, tx.init(placed), placed)
  np.testing.assert_allclose(got['attn']['w_uk'], want['attn']['w_uk'], atol=1e-6)


def _work_and_traffic():
  config = _even()
  matrices = _matrices(config)
  total = muon.newton_schulz_flops(abstract_params(config), MUON_SPLIT_RULES)
  largest = max(math.prod(shape) for shape, _ in matrices.values())
  for shape in MESHES:
    mesh = sharding.make_mesh(shape)
    with jax.set_mesh(mesh):
      compiled, (_, _, params) = _compiled(config, mesh)
    instructions = hlo.read(compiled.as_text())
    flops = sum(i.flops * i.times for i in instructions)
    sent = {
      name: sum(i.elements * i.times for i in instructions if i.opcode == name)
      for name in ('all-to-all', 'all-gather', 'all-reduce', 'reduce-scatter', 'collective-permute')
    }
    local = sum(flatten(params)[path].addressable_shards[0].data.size for path in matrices)
    memory = compiled.memory_analysis()
    print(
      f'[work] {shape}: {flops / (total / 8):.3f} of an eighth of the FLOPs; elements received, of'
      f' {local} in local shards: {sent}; temporary memory'
      f' {memory.temp_size_in_bytes / (4 * local):.2f} times the local shards of the gradients'
    )
    assert abs(flops / (total / 8) - 1) < 0.1
    # Twice through the all-to-all, at most; what replicas gather is no more than they keep anyway.
    assert 0 < sent['all-to-all'] <= 2 * local and sent['all-gather'] <= local
    assert not sent['all-reduce'] + sent['reduce-scatter'] + sent['collective-permute']
    for i in instructions:  # Nothing is as large as the stacked experts' w_up, gathered or not.
      assert all(math.prod(s) < largest for s in i.shapes), i
    # Rows or columns of every matrix are sharded over fsdp: an all-gather along it would be of whole
    # matrices. There is none.
    fsdp = np.indices(mesh.devices.shape)[sharding.AXES.index('fsdp')].ravel()
    gathers = [i for i in instructions if i.opcode == 'all-gather']
    assert all(len(set(fsdp[g])) == 1 for i in gathers for g in i.replica_groups)
    exchanges = [i for i in instructions if i.opcode == 'all-to-all']
    assert all(len(set(fsdp[g])) == mesh.shape['fsdp'] for i in exchanges for g in i.replica_groups)
    assert memory.temp_size_in_bytes < 3.5 * 4 * local
    assert mesh.shape['fsdp'] == 8 or gathers
  # A mesh on which nothing is sharded: work is still divided, and the updates have to be gathered.
  mesh = sharding.make_mesh({'data': 8})
  with jax.set_mesh(mesh):
    instructions = hlo.read(_compiled(config, mesh)[0].as_text())
  assert abs(sum(i.flops * i.times for i in instructions) / (total / 8) - 1) < 0.1
  assert not [i for i in instructions if i.opcode == 'all-to-all']


def _padding():
  """Few matrices: of each kind a device is as busy as if their number were rounded up to 8."""
  config, mesh = _uneven(), sharding.make_mesh({'fsdp': 4, 'tensor': 2})
  kinds = (  # (count, rows, columns), of equal shape and sharding; attention is in 4 layers
    (3, 64, 384),  # dense MLP
    (3 * 8 * 3 + 3 * 3 + 4, 64, 128),  # experts, shared expert, w_o
    (1, 64, 128),  # w_proj: the same shape, but `tensor` does not split it
    (4, 64, 96), (4, 64, 80), (4 * 2, 64, 96), (4 * 2, 48, 64), (4 * 2, 64, 64),  # w_d*, w_u*
    (4, 64, 96), (4, 32, 64), (4, 2, 64), (3, 8, 64),  # indexer, router
  )  # fmt: skip

  def cost(kind, rounded):
    count, m, n = kind
    return (-(-count // 8) * 8 if rounded else count) * 10 * m * m * (2 * n + m) / 8

  with jax.set_mesh(mesh):
    compiled, _ = _compiled(config, mesh)
  flops = sum(i.flops * i.times for i in hlo.read(compiled.as_text()))
  even = sum(cost(kind, False) for kind in kinds)
  assert even == muon.newton_schulz_flops(abstract_params(config), MUON_SPLIT_RULES) / 8
  print(f'[padding] {flops / even:.3f} of an eighth')
  assert flops == sum(cost(kind, True) for kind in kinds)


def _chunks_bound_the_memory():
  config, mesh = _even(), sharding.make_mesh({'fsdp': 8})
  with jax.set_mesh(mesh):
    all_at_once, in_chunks = (
      _compiled(config, mesh, ns_chunk=c)[0].memory_analysis().temp_size_in_bytes
      for c in (1 << 30, 8 * 64 * 128)
    )
  local = sum(4 * math.prod(shape) / 8 for shape, _ in _matrices(config).values())
  print(
    f'[memory] temporary, in local shards of the gradients: {all_at_once / local:.2f}, in chunks'
    f' {in_chunks / local:.2f}'
  )
  assert in_chunks < 1.4 * local and in_chunks < 0.7 * all_at_once


def _bfloat16_halves_what_is_sent():
  config, mesh = _uneven(), sharding.make_mesh({'fsdp': 4, 'tensor': 2})
  tx = muon_split(0.1, ns_dtype='bfloat16')
  params, gradients = _draw(config, 0), _draw(config, 1)
  want, _ = tiny.fast_jit(tx.update)(gradients, tx.init(params), params)
  with jax.set_mesh(mesh):
    update, arguments = _compiled(config, mesh, ns_dtype='bfloat16')
    got, _ = update(*arguments)
    text = jax.jit(tx.update).lower(*arguments).as_text()  # Before compilation, see below.
  differences = [
    np.linalg.norm(np.asarray(a) - np.asarray(b)) / np.linalg.norm(b)
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True)
    if np.any(b)
  ]
  print(f'[bfloat16] relative difference to one device: {max(differences):.1e}')
  # Rounding differs with the order of sums, by no more than bfloat16 itself does.
  assert max(differences) < 0.03
  # Before compilation: XLA:CPU sends bfloat16 as float32.
  sent = re.findall(r'"?stablehlo.(?:all_to_all|all_gather)"?.*-> tensor<[\dx]*x(\w+)>', text)
  assert len(sent) > 10 and set(sent) == {'bf16'}


@pytest.mark.parametrize(
  'body',
  [_even_equals_one_device, _uneven_equals_one_device, _work_and_traffic, _padding,
   _chunks_bound_the_memory, _bfloat16_halves_what_is_sent],
)  # fmt: skip
def test_eight_devices(body):
  print(run_on_devices(body))


def test_a_mesh_of_one_device():
  """Its shardings name axes too, of size 1: so is a step compiled for one chip."""
  config = _uneven()
  mesh = sharding.make_mesh({}, jax.devices()[:1])
  params, gradients = _draw(config, 0), _draw(config, 1)
  tx = muon_split(0.1)
  want, _ = tiny.fast_jit(tx.update)(gradients, tx.init(params), params)
  with jax.set_mesh(mesh):
    update, arguments = _compiled(config, mesh)
    got, _ = update(*arguments)
  for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(want), strict=True):
    np.testing.assert_allclose(a, b, atol=1e-6)


def test_hlo_reader():
  """Against FLOPs known by hand: a product in a loop of 3 in a loop of 5, and one outside."""

  @jax.jit
  def f(x):
    inner = lambda x: jax.lax.fori_loop(0, 3, lambda _, x: x @ x / 8, x)  # noqa: E731
    return jax.lax.fori_loop(0, 5, lambda _, x: inner(x), x) @ jnp.ones((8, 4))

  instructions = hlo.read(f.lower(jnp.ones((8, 8))).compile().as_text())
  assert sum(i.flops * i.times for i in instructions) == 15 * 2 * 8**3 + 2 * 8 * 8 * 4
