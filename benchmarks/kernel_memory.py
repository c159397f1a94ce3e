"""HBM that the sparse attention ops take beside arguments and results, by the length of a sequence.

  python -m benchmarks.kernel_memory --topology=v5p:2x2x1 [--op=NAME] [--plot=FILE.png]

One sequence of T tokens at GLM-5's shapes on one device: `sparse_mla` with its gradients,
`indexer_topk`, and `indexer_kl` (sparse stage) with its gradients, whole as the model calls them.
The TPU compiler plans the memory; no machine code is made, and no TPU is needed.
"""

import argparse
import functools
import multiprocessing
import os
from collections.abc import Callable, Mapping, Sequence
from multiprocessing.connection import Connection
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental import topologies

from glm5_jax.aot import program
from pallas_kernels import indexer_kl, indexer_topk, sparse_mla
from pallas_kernels.schedule import CHIPS

LENGTHS = (4096, 16_384, 65_536, 202_752)
HEADS, LATENT, WIDTH, INDEX_HEADS, INDEX_DIM, TOPK = 64, 512, 576, 32, 128, 2048

Struct = jax.ShapeDtypeStruct
Case = tuple[Callable[..., Any], tuple[Struct, ...]]


def _struct(*dims: int, dtype=jnp.bfloat16) -> Struct:
  return jax.ShapeDtypeStruct((1, *dims), dtype)


def _sparse_mla(time: int, chip: str) -> Case:
  def loss(q, latents, indices):
    out, lse = sparse_mla(q, latents, indices, 1 / 16, LATENT, implementation='tpu', chip=chip)
    return jnp.sum(out.astype(jnp.float32)) + jnp.sum(lse)

  arguments = (
    _struct(time, HEADS, WIDTH),
    _struct(time, WIDTH),
    _struct(time, TOPK, dtype=jnp.int32),
  )
  return jax.grad(loss, (0, 1)), arguments


def _indexer_topk(time: int, chip: str) -> Case:
  del chip
  integers = _struct(time, dtype=jnp.int32)
  arguments = (
    _struct(time, INDEX_HEADS, INDEX_DIM),
    _struct(time, INDEX_HEADS, dtype=jnp.float32),
    _struct(time, INDEX_DIM),
    *[integers] * 3,
  )
  return functools.partial(indexer_topk, topk=TOPK, implementation='tpu'), arguments


def _indexer_kl(time: int, chip: str) -> Case:
  def loss(index_q, index_weights, index_k, q, latents, lse, indices):
    return jnp.sum(
      indexer_kl(
        q, latents, lse, index_q, index_weights, index_k, indices, 1 / 16, implementation='tpu',
        chip=chip,
      )
    )  # fmt: skip

  arguments = (
    _struct(time, INDEX_HEADS, INDEX_DIM),
    _struct(time, INDEX_HEADS, dtype=jnp.float32),
    _struct(time, INDEX_DIM),
    _struct(time, HEADS, WIDTH),
    _struct(time, WIDTH),
    _struct(time, HEADS, dtype=jnp.float32),
    _struct(time, TOPK, dtype=jnp.int32),
  )
  return jax.grad(loss, (0, 1, 2)), arguments


OPS: dict[str, Callable[[int, str], Case]] = {
  'sparse_mla': _sparse_mla,
  'indexer_topk': _indexer_topk,
  'indexer_kl': _indexer_kl,
}


def _plan(connection: Connection, op: str, time: int, chip: str) -> None:
  """Sends the temporary bytes, and ends the process: the compiler would go on in a thread."""
  topology = topologies.get_topology_desc(platform='tpu', topology_name=CHIPS[chip].topology)
  mesh = jax.sharding.Mesh(np.array(topology.devices[:1]), ('device',))
  sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
  function, arguments = OPS[op](time, chip)
  arguments = jax.tree.map(
    lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding), arguments
  )
  lowered = jax.jit(function).trace(*arguments).lower(lowering_platforms=('tpu',))
  connection.send(program.planned(lowered).temporary_bytes)
  connection.close()
  os._exit(0)


def temporary_bytes(op: str, time: int, chip: str) -> int:
  """Of one op at one length, compiled in a process of its own.

  Args:
    op: a key of `OPS`.
    time: T, queries and keys of the one sequence.
    chip: a key of `pallas_kernels.schedule.CHIPS`.

  Raises:
    EOFError: the compiler refused; it has said why.
  """
  context = multiprocessing.get_context('spawn')
  receiver, sender = context.Pipe(duplex=False)
  process = context.Process(target=_plan, args=(sender, op, time, chip))
  process.start()
  sender.close()
  try:
    return receiver.recv()
  finally:
    process.join()


def table(found: Mapping[str, Mapping[int, int]]) -> str:
  """Markdown: MiB of each op and length, then KiB a token between the two longest."""
  lengths = sorted({time for sizes in found.values() for time in sizes})
  head = ['MiB', *(f'T = {time:,}' for time in lengths), 'KiB a token at the end']
  lines = [head, ['---'] * len(head)]
  for op, sizes in found.items():
    before, last = lengths[-2:]
    slope = (sizes[last] - sizes[before]) / (last - before) / 2**10
    lines.append([op, *(f'{sizes[time] / 2**20:,.0f}' for time in lengths), f'{slope:.1f}'])
  return '\n'.join('| ' + ' | '.join(line) + ' |' for line in lines)


def plot(found: Mapping[str, Mapping[int, int]], title: str, path: str) -> None:
  """Draws the table, both axes linear."""
  from matplotlib import pyplot

  figure, axes = pyplot.subplots(figsize=(5, 3.2), layout='constrained')
  for op, sizes in found.items():
    axes.plot(
      [time / 1000 for time in sizes], [size / 2**30 for size in sizes.values()], 'o-', label=op
    )
  axes.set(xlabel='tokens of a sequence, thousands', ylabel='temporary HBM, GiB', title=title)
  axes.set_xlim(left=0)
  axes.set_ylim(bottom=0)
  axes.legend()
  figure.savefig(path, dpi=120)


def main(argv: Sequence[str] | None = None) -> None:
  """Compiles every op at every length, one after the other."""
  parser = argparse.ArgumentParser(description=__doc__.split('\n\n')[0])
  parser.add_argument('--topology', default='v5p:2x2x1', help='of ' + ', '.join(CHIPS))
  parser.add_argument('--op', choices=OPS, help='only this one')
  parser.add_argument('--plot', metavar='PNG', help='where to draw the curves')
  options = parser.parse_args(argv)
  chip = options.topology.split(':')[0]
  if chip not in CHIPS:
    parser.error(f'--topology={options.topology}: choose one of ' + ', '.join(CHIPS))
  # No TPU is touched, so that compilers may work side by side.
  os.environ |= {
    'JAX_PLATFORMS': 'cpu', 'TPU_SKIP_MDS_QUERY': '1', 'ALLOW_MULTIPLE_LIBTPU_LOAD': '1'
  }  # fmt: skip
  found: dict[str, dict[int, int]] = {}
  for op in [options.op] if options.op else OPS:
    found[op] = {}
    for time in LENGTHS:
      found[op][time] = temporary_bytes(op, time, chip)
      print(f'{chip} {op} {time}: {found[op][time]} bytes', flush=True)
  print(table(found))
  if options.plot:
    plot(found, chip, options.plot)


if __name__ == '__main__':
  main()
