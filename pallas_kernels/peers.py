"""Kernels that `bench --peer` reads through the same schedule: a plain matmul, splash attention."""

from typing import NamedTuple

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.pallas import tpu as pltpu
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
  """JAX's splash attention, forward, causal, blocks of 1,024 x 1,024 computed by 512 keys."""

  name: str
  dim: int
  block: int = 1024
  keys: int = 4096

  @property
  def queries(self) -> int:
    return self.block

  @property
  def flops(self) -> float:
    return 4.0 * self.block * self.block * self.dim

  @property
  def bytes(self) -> float:
    return 4.0 * self.block * self.dim


MATMULS = (
  Matmul('512x1024x1024', 512, 1024, 1024),
  Matmul('1024x2048x1024', 1024, 2048, 1024),
)
SPLASH = (Splash('dim-128', 128), Splash('dim-256', 256))


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


def splash(shape: Splash):
  """(function, abstract arguments) of the forward pass of two heads."""
  mask = splash_mask.MultiHeadMask([splash_mask.CausalMask((shape.keys, shape.keys))] * 2)
  kernel = splash_kernel.make_splash_mha(
    mask,
    block_sizes=splash_kernel.BlockSizes(
      block_q=shape.block, block_kv=shape.block, block_kv_compute=512
    ),
    head_shards=1,
    q_seq_shards=1,
  )
  x = jax.ShapeDtypeStruct((2, shape.keys, shape.dim), jnp.bfloat16)
  return kernel, (x, x, x)
