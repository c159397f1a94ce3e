"""Kernels that `bench --peer` reads through the same schedule.

A plain matmul, JAX's splash attention, and the grouped matmuls of JAX's megablox and of XLA.
"""

from collections.abc import Callable
from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
from jax.experimental.pallas.ops.tpu.megablox.gmm import gmm, tgmm
from jax.experimental.pallas.ops.tpu.splash_attention import (
  splash_attention_kernel as splash_kernel,
)
from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_mask as splash_mask


class Matmul(NamedTuple):
  """Blocks of a bfloat16 matmul with float32 accumulation; one grid step is the unit."""

  name: str
  m: int
  k: int
  n: int

  @property
  def queries(self) -> int:
    return self.m

  @property
  def flops(self) -> float:
    return 2.0 * self.m * self.k * self.n

  @property
  def bytes(self) -> float:
    return 2.0 * (self.m * self.k + self.k * self.n)


class Splash(NamedTuple):
  """JAX's splash attention, causal, blocks of 1,024 x 1,024 computed by 512 keys.

  Backward is the kernel that makes all three gradients at once, without the forward pass.
  """

  name: str
  dim: int
  backward: bool = False
  block: int = 1024
  keys: int = 4096

  @property
  def queries(self) -> int:
    return self.block

  @property
  def flops(self) -> float:
    return (10.0 if self.backward else 4.0) * self.block * self.block * self.dim

  @property
  def bytes(self) -> float:
    return 4.0 * self.block * self.dim


class Grouped(NamedTuple):
  """One kind of grouped matmul of an expert layer's rows; `bodies` tiles m x k x n are the unit.

  'gmm' and 'tgmm' are megablox's: rows times weights, and the weights' gradient. The former has a
  second body for the last tile of k, and the schedule's path goes through both. 'ragged_dot' is
  `jax.lax.ragged_dot`, a kernel of XLA's, of whose tiles only the product is seen.
  """

  name: str
  kind: str = 'gmm'
  m: int = 512
  k: int = 1024
  n: int = 1024
  bodies: int = 1
  rows: int = 8192
  inputs: int = 6144
  outputs: int = 2048
  groups: int = 8

  @property
  def queries(self) -> int:
    return self.bodies * self.m

  @property
  def flops(self) -> float:
    return 2.0 * self.bodies * self.m * self.k * self.n

  @property
  def bytes(self) -> float:
    return 2.0 * self.bodies * (self.m * self.k + self.k * self.n)


MATMULS = (
  Matmul('512x1024x1024', 512, 1024, 1024),
  Matmul('1024x2048x1024', 1024, 2048, 1024),
)
SPLASH = (
  Splash('dim-128', 128),
  Splash('dim-256', 256),
  Splash('dim-256-backward', 256, backward=True),
)
GROUPED = (
  Grouped('gmm-512x1024x1024', bodies=2),
  Grouped('tgmm-512x1024x1024', 'tgmm'),
)
RAGGED = (Grouped('8192x6144x2048', 'ragged_dot'),)
# m, k, n whose FLOPs are those of one iteration of the kernel that XLA makes of it.
RAGGED_TILES = {'v5p': (128, 768, 1024), 'v6e': (512, 1536, 1024), 'tpu7x': (512, 1536, 1024)}


def matmul(shape: Matmul):
  """(function, abstract arguments) of a matmul of 2 x 2 x 2 such blocks."""

  def kernel(a, b, out, total):
    @pl.when(pl.program_id(2) == 0)
    def _():
      total[...] = jnp.zeros_like(total)

    total[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)

    @pl.when(pl.program_id(2) == pl.num_programs(2) - 1)
    def _():
      out[...] = total[...].astype(out.dtype)

  def call(a, b):
    return pl.pallas_call(
      kernel,
      grid=(2, 2, 2),
      in_specs=[
        pl.BlockSpec((shape.m, shape.k), lambda i, j, l: (i, l)),
        pl.BlockSpec((shape.k, shape.n), lambda i, j, l: (l, j)),
      ],
      out_specs=pl.BlockSpec((shape.m, shape.n), lambda i, j, l: (i, j)),
      out_shape=jax.ShapeDtypeStruct((2 * shape.m, 2 * shape.n), jnp.bfloat16),
      scratch_shapes=[pltpu.VMEM((shape.m, shape.n), jnp.float32)],
      compiler_params=pltpu.CompilerParams(vmem_limit_bytes=60 * 2**20),
      name='matmul',
    )(a, b)

  a = jax.ShapeDtypeStruct((2 * shape.m, 2 * shape.k), jnp.bfloat16)
  return call, (a, jax.ShapeDtypeStruct((2 * shape.k, 2 * shape.n), jnp.bfloat16))


def splash(shape: Splash) -> tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]:
  """(function, abstract arguments) of two heads; backward, of all gradients of their sum."""
  mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((shape.keys, shape.keys))] * 2)
  kernel = splash_kernel.make_splash_mha(
    mask,
    block_sizes=splash_kernel.BlockSizes(
      block_q=shape.block,
      block_kv=shape.block,
      block_kv_compute=512,
      block_q_dkv=shape.block,
      block_kv_dkv=shape.block,
      block_kv_dkv_compute=512,
      use_fused_bwd_kernel=True,
    ),
    head_shards=1,
    q_seq_shards=1,
  )
  x = jax.ShapeDtypeStruct((2, shape.keys, shape.dim), jnp.bfloat16)
  if not shape.backward:
    return kernel, (x, x, x)

  def total(q, k, v):
    return jnp.sum(kernel(q, k, v).astype(jnp.float32))

  return jax.grad(total, (0, 1, 2)), (x, x, x)


def grouped(shape: Grouped) -> tuple[Callable[..., jax.Array], tuple[jax.ShapeDtypeStruct, ...]]:
  """(function, abstract arguments) of one grouped matmul."""
  s, tiles = shape, (shape.m, shape.k, shape.n)

  def struct(*dims, dtype=jnp.bfloat16):
    return jax.ShapeDtypeStruct(dims, dtype)

  counts = struct(s.groups, dtype=jnp.int32)
  if s.kind == 'tgmm':
    arguments = struct(s.inputs, s.rows), struct(s.rows, s.outputs), counts
    return lambda x, g, counts: tgmm(x, g, counts, jnp.bfloat16, tiles), arguments
  arguments = struct(s.rows, s.inputs), struct(s.groups, s.inputs, s.outputs), counts
  if s.kind == 'ragged_dot':
    return jax.lax.ragged_dot, arguments
  return lambda x, w, counts: gmm(x, w, counts, jnp.bfloat16, tiles), arguments
