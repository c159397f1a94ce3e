"""Sparse MLA with GLM-5's rows and heads through the TPU compiler, forward and gradients, for
every chip."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.sparse_mla import sparse_mla

pytestmark = pytest.mark.tpu

TOPOLOGIES = {'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2', 'tpu7x': 'tpu7x:2x2x1'}
HEADS, LATENT, ROPE, TOPK = 64, 512, 64, 2048


@functools.cache
def _sharding(chip: str) -> jax.sharding.Sharding:
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(platform='tpu', topology_name=TOPOLOGIES[chip])
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ('d',))
  return jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())


def _compile(chip: str, time: int, keys: int, span: int):
  def struct(shape, dtype):
    return jax.ShapeDtypeStruct(shape, dtype, sharding=_sharding(chip))

  def loss(q, latents, indices):
    out, lse = sparse_mla(
      q, latents, indices, 1 / 16, LATENT, implementation='tpu', chip=chip, span=span
    )
    return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

  arguments = (
    struct((1, time, HEADS, LATENT + ROPE), jnp.bfloat16),
    struct((1, keys, LATENT + ROPE), jnp.bfloat16),
    struct((1, time, TOPK), jnp.int32),
  )
  traced = jax.jit(jax.grad(loss, (0, 1))).trace(*arguments)
  return traced.lower(lowering_platforms=('tpu',)).compile()


# Masked-dense at 4K; gathered at the released model's longest context.
@pytest.mark.parametrize('keys', [4096, 202_752])
@pytest.mark.parametrize('chip', TOPOLOGIES)
def test_forward_and_gradients_compile(chip, keys):
  compiled = _compile(chip, 512, keys, 512)
  assert compiled.as_text().count('custom-call') >= 2


def test_memory_beyond_arguments_does_not_grow_with_the_queries():
  """Only q's gradient and the saved output grow; lists and padded copies are those of one span."""
  few, many = (_compile('v6e', time, 202_752, 512).memory_analysis() for time in (1024, 4096))
  growth = (many.temp_size_in_bytes - few.temp_size_in_bytes) / 3072
  out_and_lse = HEADS * (LATENT * 2 + 4)
  q_rows = HEADS * 640 * 2  # As stored in tiles of 128 lanes.
  assert growth < 2 * (out_and_lse + q_rows)
