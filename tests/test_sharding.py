"""The sharding table covers every parameter of every model, and says what does not fit."""

import jax
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import config as configs
from glm5_jax import sharding
from glm5_jax.modules.model import abstract_params
from tests.simulated import run_on_devices


@pytest.mark.parametrize(
  'config',
  [configs.glm5(), configs.glm5_2(), configs.deepseek_v32(), configs.nano(),
   configs.nano(attention='gqa')],
  ids=['glm5', 'glm5_2', 'deepseek_v32', 'nano', 'gqa'],
)  # fmt: skip
def test_every_parameter_has_a_spec(config):
  params = abstract_params(config)
  specs = sharding.param_specs(params)
  flat = jax.tree_util.tree_leaves_with_path(specs, is_leaf=lambda s: isinstance(s, P))
  shapes = jax.tree.leaves(params)
  assert len(flat) == len(shapes)
  for (path, spec), leaf in zip(flat, shapes, strict=True):
    assert len(spec) == len(leaf.shape)
    name = '/'.join(k.key for k in path)
    assert name in ('embed', 'final_norm', 'lm_head') or spec[0] is None, name


def test_glm5_spreads_over_a_pod():
  """On 512 devices (fsdp 32, expert 8, tensor 2) each holds little more than 1/512: only the
  experts are split by all of them, attention (2 % of the model) not by the expert axis.
  """
  sizes = (1, 32, 8, 1, 2)
  mesh = AbstractMesh(sizes, sharding.AXES, axis_types=(AxisType.Explicit,) * 5)
  params = sharding.abstract_params(abstract_params(configs.glm5()), mesh)
  leaves = jax.tree.leaves(params)
  local = [jax.ShapeDtypeStruct(x.sharding.shard_shape(x.shape), x.dtype) for x in leaves]
  share = sum(x.size for x in local) / sum(x.size for x in leaves)
  assert 1 < share * 512 < 1.25


def test_specs_of_the_main_matrices():
  expected = {
    'embed': P('tensor', 'fsdp'),
    'moe/block0/attn/w_uk': P(None, 'fsdp', 'tensor', None),
    'moe1/block3/attn/w_o': P(None, 'tensor', None, 'fsdp'),
    'moe/block0/moe/experts/w_down': P(None, 'expert', 'tensor', 'fsdp'),
    'mtp/block/moe/shared/w_up': P(None, 'fsdp', 'tensor'),
    'mtp/w_proj': P(None, 'fsdp', None),
    'dense/block0/attn/indexer/k_norm_bias': P(None, None),
  }
  assert {path: sharding.param_spec(path, len(s)) for path, s in expected.items()} == expected


@pytest.mark.parametrize(
  'path, ndim, text',
  [
    ('moe/block0/attn/w_new', 3, 'no sharding rule matches the parameter moe/block0/attn/w_new'),
    ('moe/block0/attn/w_uq', 3, 'w_uq has 3 axes, its sharding rule has 4'),
    ('head', 2, 'no sharding rule matches the parameter head'),
  ],
)
def test_unknown_parameters(path, ndim, text):
  with pytest.raises(ValueError, match=text):
    sharding.param_spec(path, ndim)


def test_dimensions_that_do_not_divide():
  mesh = AbstractMesh((1, 5, 1, 1, 1), sharding.AXES, axis_types=(AxisType.Explicit,) * 5)
  tree = {'embed': jax.ShapeDtypeStruct((10, 12), 'float32')}
  with pytest.raises(
    ValueError, match=r'embed \[10, 12\]: dimension 1 \(12\) .* \'fsdp\' of size 5'
  ):
    sharding.param_shardings(tree, mesh)


def test_mesh_errors():
  with pytest.raises(ValueError, match=r"unknown mesh axes \['model'\]"):
    sharding.make_mesh({'model': 1})
  with pytest.raises(ValueError, match='is for 3 devices; there are 1'):
    sharding.make_mesh({'data': 3}, jax.devices()[:1])


def _placement():
  mesh = sharding.make_mesh({'fsdp': 2, 'tensor': 4})
  assert mesh.axis_names == sharding.AXES and set(mesh.axis_types) == {AxisType.Explicit}
  assert dict(mesh.shape) == {'data': 1, 'fsdp': 2, 'expert': 1, 'context': 1, 'tensor': 4}
  tree = {'embed': jax.numpy.arange(64.0).reshape(8, 8), 'final_norm': jax.numpy.ones(8)}
  placed = sharding.shard_params(tree, mesh)
  assert placed['embed'].sharding == NamedSharding(mesh, P('tensor', 'fsdp'))
  assert placed['embed'].addressable_shards[0].data.shape == (2, 4)
  assert placed['final_norm'].sharding.is_fully_replicated
  assert (placed['embed'] == tree['embed']).all()
  small = sharding.make_mesh({'data': 2}, jax.devices()[:2])
  assert small.size == 2


def test_placement():
  run_on_devices(_placement)
