"""The kernels of decoding compile for real chips at GLM-5's shapes: 128K tokens, four drafts."""

import jax
import numpy as np
import pytest
from jax.experimental import topologies

from pallas_kernels import cases, schedule

pytestmark = pytest.mark.tpu


@pytest.mark.parametrize('chip_name', schedule.CHIPS)
@pytest.mark.parametrize('op', ['indexer_topk_paged', 'sparse_mla_paged'])
def test_compiles_without_copying_the_pool(op, chip_name):
  chip = schedule.CHIPS[chip_name]
  topology = topologies.get_topology_desc(platform='tpu', topology_name=chip.topology)
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ('chip',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  fn, arguments = cases.build(f'{op}/drafts-128k', chip)
  arguments = jax.tree.map(
    lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), arguments
  )
  program = jax.jit(fn).trace(*arguments).lower(lowering_platforms=('tpu',)).compile()
  pool = max(a.size * a.dtype.itemsize for a in jax.tree.leaves(arguments))
  assert program.memory_analysis().temp_size_in_bytes < pool / 4
