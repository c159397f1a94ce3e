"""The engine's programs by the kernels, compiled for a TPU: the pool stays where it is."""

import functools

import jax
import numpy as np
import pytest
from jax.experimental import topologies
from jax.experimental.layout import Format, Layout

from glm5_jax import sharding
from glm5_jax.config import glm5
from glm5_jax.infer import cache, programs, sampling
from glm5_jax.modules.model import abstract_params

pytestmark = pytest.mark.tpu

ROWS, PAGES_OF_A_ROW, DRAFTS = 2, 130, 1


@pytest.fixture(scope='module', params=[1, 4])
def lowered(request):
  """name -> a function that lowers the program, of a model with GLM-5's attention and little else.

  On one device, or with a quarter of the heads on each of four.
  """
  config = glm5(
    dtype='bfloat16', param_dtype='bfloat16', num_hidden_layers=2, first_k_dense_replace=1,
    hidden_size=256, intermediate_size=256, moe_intermediate_size=128, n_routed_experts=8,
    vocab_size=512, q_lora_rank=128, num_nextn_predict_layers=1,
  )  # fmt: skip
  topology = topologies.get_topology_desc(platform='tpu', topology_name='v5p:2x2x1')
  devices, several = topology.devices[: request.param], request.param > 1
  if several:
    mesh = sharding.make_mesh({'tensor': len(devices)}, devices)
  else:
    mesh = jax.sharding.Mesh(np.array(devices), ('chip',))
  everywhere = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def struct(*shape, dtype='int32', where=everywhere):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=where)

  def like(a, where=everywhere):
    return struct(*a.shape, dtype=a.dtype, where=where)

  init = functools.partial(cache.init_pool, config, 4001, 64, DRAFTS, kernels='pallas')
  # Rows of the pool in one piece, as on a device: the compiler may not choose.
  pool = [
    like(a, Format(Layout(tuple(range(a.ndim))), everywhere)) for a in jax.eval_shape(init)[:2]
  ]
  params = jax.tree.map(like, abstract_params(config))
  if several:
    params = sharding.abstract_params(params, mesh)
  with pytest.MonkeyPatch.context() as patch:
    patch.setattr(programs, '_unrolls', lambda: False)  # As on a TPU: the layers are a loop.
    one = programs.programs(config, DRAFTS, (), 'pallas', mesh if several else None)
  rows = struct(ROWS)
  tables = struct(ROWS, PAGES_OF_A_ROW), rows
  settings = sampling.stack([(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0, 0, 0)] * ROWS, ROWS)
  settings = jax.tree.map(like, settings)

  def state(batch):
    return struct(batch, config.hidden_size, dtype='bfloat16')

  made = {
    'decode': (one.forward, params, *pool, None, struct(ROWS, 1), rows, *tables),
    'prefill': (
      one.forward, params, *pool, state(1), struct(1, 64), struct(1), struct(1, PAGES_OF_A_ROW),
      struct(1),
    ),
    'draft': (
      one.speculate, params, *pool, state(ROWS), rows, rows, *tables, settings, None
    ),
    'copy a page': (one.copy_page, *pool, struct(), struct()),
  }  # fmt: skip

  def lower(name):
    program, *arguments = made[name]
    with jax.set_mesh(mesh):
      return program.trace(*arguments).lower(lowering_platforms=('tpu',)), pool

  return lower


@pytest.mark.parametrize('name', ['decode', 'prefill', 'draft', 'copy a page'])
def test_the_pool_is_not_copied(name, lowered):
  program, (latent, _) = lowered(name)
  pool = latent.size * latent.dtype.itemsize
  assert program.compile().memory_analysis().temp_size_in_bytes < pool / 10
