"""Dense MLA attention with GLM-5's heads through the TPU compiler, forward and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.aot import hlo
from pallas_kernels import dense_mla

pytestmark = pytest.mark.tpu

TOPOLOGIES = {'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2', 'tpu7x': 'tpu7x:2x2x1'}
HEADS, DIM = 8, 256  # An eighth of the heads: they are a dimension of the grid.


# A row of pre-training; one device's part of 32 of the longest row.
@pytest.mark.parametrize(('time', 'keys'), [(4096, 4096), (6336, 202_752)])
@pytest.mark.parametrize('chip', TOPOLOGIES)
def test_forward_and_gradients_compile(chip, time, keys):
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(platform='tpu', topology_name=TOPOLOGIES[chip])
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ('d',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=sharding)

  def loss(q, k, v, q_segment, k_segment, part):
    out, _ = dense_mla(q, k, v, q_segment, k_segment, 1 / 16, part=part, implementation='tpu')
    return jnp.sum(out.astype(jnp.float32))

  row = struct(1, keys, HEADS, DIM)
  segments = struct(1, time, dtype=jnp.int32), struct(1, keys, dtype=jnp.int32)
  arguments = struct(1, time, HEADS, DIM), row, row, *segments, struct(dtype=jnp.int32)
  traced = jax.jit(jax.grad(loss, (0, 1, 2))).trace(*arguments)
  program = traced.lower(lowering_platforms=('tpu',)).compile()
  # No scores of all pairs; gradients of keys and values, transposed copies, and partial dq.
  rows = (8 * keys + 16 * time) * HEADS * DIM * 2
  assert program.memory_analysis().temp_size_in_bytes < 1.5 * rows + 2**27

  # Two products forward, five backward, or seven with the scores computed twice; half of all pairs.
  products = 7 if keys <= 8192 else 9
  wanted = products * 2 * HEADS * DIM * time * keys / 2
  assert 1 <= hlo.measure(program.as_text()).flops / wanted < 1.3
