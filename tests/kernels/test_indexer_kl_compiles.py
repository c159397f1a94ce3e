"""The indexer's KL with GLM-5's shapes through the TPU compiler, value and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.indexer_kl import Visible, indexer_kl

pytestmark = pytest.mark.tpu

TOPOLOGIES = {'v5p': 'v5p:2x2x1', 'v6e': 'v6e:2x2', 'tpu7x': 'tpu7x:2x2x1'}
HEADS, WIDTH, INDEX_HEADS, INDEX_DIM, TOPK, TIME = 64, 576, 32, 128, 2048, 512


def compile_for(chip: str, stage: str, keys: int):
  """The loss and its gradients for the index side."""
  from jax.experimental import topologies

  topology = topologies.get_topology_desc(platform='tpu', topology_name=TOPOLOGIES[chip])
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ('d',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

  def struct(*shape, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct((1, *shape), dtype, sharding=sharding)

  def integers(*shape):
    return struct(*shape, dtype=jnp.int32)

  def loss(index_q, index_weights, index_k, q, latents, lse, selection):
    kl = indexer_kl(
      q, latents, lse, index_q, index_weights, index_k, selection, 1 / 16, implementation='tpu',
      chip=chip,
    )  # fmt: skip
    return jnp.mean(kl)

  selection = integers(TIME, TOPK)
  if stage == 'dense':
    selection = Visible(integers(TIME), integers(TIME), integers(keys))
  arguments = (
    struct(TIME, INDEX_HEADS, INDEX_DIM), struct(TIME, INDEX_HEADS, dtype=jnp.float32),
    struct(keys, INDEX_DIM), struct(TIME, HEADS, WIDTH), struct(keys, WIDTH),
    struct(TIME, HEADS, dtype=jnp.float32), selection,
  )  # fmt: skip
  traced = jax.jit(jax.value_and_grad(loss, (0, 1, 2))).trace(*arguments)
  return traced.lower(lowering_platforms=('tpu',)).compile()


@pytest.mark.parametrize(('stage', 'keys'), [('dense', 32_768), ('sparse', 202_752)])
@pytest.mark.parametrize('chip', TOPOLOGIES)
def test_value_and_gradients_compile(chip, stage, keys):
  """Memory stays far below target and scores of all pairs, [N + I, T, S] float32."""
  program = compile_for(chip, stage, keys)
  assert program.as_text().count('custom-call') >= 2
  # Packed keys of both passes, and gradients of two cores, gathered each in front of a key.
  rows = 2 * keys * (768 * 2 + 128 * 4 + (768 * 2 if stage == 'sparse' else 0))
  queries = TIME * (HEADS * 640 + INDEX_HEADS * 128) * 2 * 4
  # Masks of all keys, or rows and masks of the selections, 32 bits for 16 queries, a few times over.
  lists = TIME * (keys if stage == 'dense' else 16 * TOPK)
  assert program.memory_analysis().temp_size_in_bytes < 2 * (rows + queries + lists) + 2**27
