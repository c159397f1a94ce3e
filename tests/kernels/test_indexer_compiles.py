"""The indexer's kernel compiles for real chips, within their VMEM, with memory linear in T."""

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from pallas_kernels import cases, schedule

pytestmark = pytest.mark.tpu


def compile_for(chip_name: str, shape: str):
  chip = schedule.CHIPS[chip_name]
  topology = topologies.get_topology_desc(platform='tpu', topology_name=chip.topology)
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ('chip',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  fn, arguments = cases.build(f'indexer_topk/{shape}', chip)
  arguments = [jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding) for a in arguments]
  return jax.jit(fn).trace(*arguments).lower(lowering_platforms=('tpu',)).compile(), arguments


@pytest.mark.parametrize('chip', schedule.CHIPS)
@pytest.mark.parametrize('shape', ['train-4k', 'train-32k', 'train-200k'])
def test_compiles(chip, shape):
  """At GLM-5's shapes; temporary memory stays near the inputs' size, far from [T, S]."""
  program, arguments = compile_for(chip, shape)
  memory = program.memory_analysis()
  inputs = sum(a.size * a.dtype.itemsize for a in arguments)
  assert memory.temp_size_in_bytes < 2 * inputs + memory.output_size_in_bytes
