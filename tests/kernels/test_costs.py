"""What the kernels tell the compiler of their costs, without which a step's FLOPs lack them."""

import functools

import jax
import jax.numpy as jnp

from pallas_kernels.indexer.api import indexer_topk
from pallas_kernels.indexer_kl import indexer_kl
from pallas_kernels.sparse_mla import sparse_mla
from pallas_kernels.tuning import best_blocks

T, N, L, R, I, J, K = 4096, 16, 128, 128, 16, 128, 256


def _shape(*dims, dtype='bfloat16'):
  return jax.ShapeDtypeStruct(dims, dtype)


def _estimates(f, *arguments) -> list[tuple[int, int]]:
  """FLOPs and bytes of every kernel of `f`, in the program's order; those of a loop count once.

  Without the kernel that makes lists of rows, which takes no FLOPs.
  """
  found = list(_of_jaxpr(jax.make_jaxpr(f)(*arguments).jaxpr))
  return [(flops, moved) for flops, moved in found if flops]


def _of_jaxpr(jaxpr):
  for equation in jaxpr.eqns:
    if (cost := equation.params.get('cost_estimate')) is not None:
      yield cost.flops, cost.bytes_accessed
    elif equation.primitive.name != 'pallas_call':
      for value in jax.tree.leaves(
        list(equation.params.values()), is_leaf=lambda x: hasattr(x, 'eqns')
      ):
        inner = getattr(value, 'jaxpr', value)
        if hasattr(inner, 'eqns'):
          yield from _of_jaxpr(inner)


def test_attention_gathers_what_a_query_selects():
  """Of more keys than the masked-dense regime takes: as many, however long the row."""
  for size in (T, 16384):
    call = functools.partial(
      sparse_mla, scale=1.0, latent_dim=L, implementation='tpu', regime='gather', chip='v5p'
    )
    q, latents = _shape(1, T, N, L + R), _shape(1, size, L + R)
    selected = _shape(1, T, K, dtype='int32')
    ((flops, moved),) = _estimates(call, q, latents, selected)
    assert flops == 2 * T * N * K * (L + R + L)
    # A block of 4 queries fetches K rows; its own arrays come and go once.
    rows = T // 4 * K * 2 * (L + R)
    once = T * N * (2 * (L + R) + 2 * L + 4)
    assert rows + once < moved < 1.1 * (rows + once)

    def loss(q, latents, selected, call=call):
      return jnp.sum(call(q, latents, selected)[0].astype(jnp.float32))

    both = _estimates(jax.grad(loss, (0, 1)), q, latents, selected)
    assert [f for f, _ in both] == [flops, 2 * T * N * K * (3 * (L + R) + 2 * L)]


def test_dense_attention_sees_half_of_the_keys():
  call = functools.partial(
    sparse_mla, scale=1.0, latent_dim=L, implementation='tpu', regime='dense', chip='v5p'
  )
  arguments = _shape(1, T, N, L + R), _shape(1, T, L + R), _shape(1, T, K, dtype='int32')
  ((flops, _),) = _estimates(call, *arguments)
  half = 2 * T * N * T / 2 * (L + R + L)
  assert half < flops <= half * (1 + 1024 / T)  # In chunks of 1,024 keys.


def test_the_indexer_scores_half_of_the_keys():
  arguments = (
    _shape(1, T, I, J), _shape(1, T, I, dtype='float32'), _shape(1, T, J),
    *(_shape(1, T, dtype='int32') for _ in range(3)),
  )  # fmt: skip
  call = functools.partial(indexer_topk, topk=K, implementation='tpu')
  ((flops, moved),) = _estimates(functools.partial(call, block_q=128), *arguments)
  half = 2 * T * I * J * T / 2
  assert half < flops <= half * (1 + 1024 / T)
  # Every block of 128 queries reads the keys that it sees.
  assert moved > T / 128 * T / 2 * 2 * J


def test_the_indexers_loss_computes_scores_and_target_again():
  call = functools.partial(indexer_kl, scale=1.0, implementation='tpu', regime='gather', chip='v5p')
  arguments = (
    _shape(1, T, N, L + R), _shape(1, 16384, L + R), _shape(1, T, N, dtype='float32'),
    _shape(1, T, I, J), _shape(1, T, I, dtype='float32'), _shape(1, 16384, J),
    _shape(1, T, K, dtype='int32'),
  )  # fmt: skip

  def loss(index_q, arguments):
    arguments = (*arguments[:3], index_q, *arguments[4:])
    return jnp.sum(call(*arguments))

  both = _estimates(jax.grad(loss), arguments[3], arguments)
  for (flops, _), products, direction in zip(both, (1, 3), ('forward', 'backward'), strict=True):
    queries, _, chunk, _ = best_blocks('v5p', 'indexer_kl', 'gather', direction)
    read = -(-queries * K // chunk) * chunk / queries  # A block's list is whole chunks.
    assert flops == 2 * T * read * (N * (L + R) + products * I * J)
