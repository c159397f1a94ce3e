"""Parameter declaration shared by the modules.

A module declares whole parameters and computes with what `weight` returns. In the program of one
device of a mesh (ops/collectives.py) that is the device's shard, whole again along `fsdp`.
"""

from typing import Any

import flax.linen as nn
import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig
from glm5_jax.ops import chunks, collectives
from glm5_jax.sharding import FSDP_AXES

# The name of what a layer is given, for the policy of config.offload_inputs.
LAYER_INPUT = 'layer_input'


def weight(
  module: nn.Module, name: str, init: Any, shape: tuple[int, ...], dtype: Any, sent: Any = None,
  wide: bool = False,
) -> jax.Array:  # fmt: skip
  """Declares one parameter of `dtype`; between devices it travels as `sent`, or as it is.

  `wide` as in `collectives.gather_weight`.
  """
  path = '/'.join((*module.path, name))
  shard = module.param(name, init, collectives.shard_shape(path, shape), jnp.dtype(dtype))
  return collectives.gather_weight(path, shard, sent, wide=wide)


def declare(
  module: nn.Module, config: ModelConfig, wide: bool = False, **shapes: tuple[int, ...]
) -> dict[str, jax.Array]:
  """Declares matrices ~ N(0, initializer_range), the initialisation of the reference model.

  They travel as config.dtype, in which all of them are used; `wide` as in `collectives.gather_weight`.
  """
  normal = nn.initializers.normal(config.initializer_range)
  return {
    name: weight(module, name, normal, shape, config.param_dtype, config.dtype, wide)
    for name, shape in shapes.items()
  }


def ones(module: nn.Module, config: ModelConfig, name: str, dim: int) -> jax.Array:
  """A norm scale."""
  return module.param(name, nn.initializers.ones, (dim,), jnp.dtype(config.param_dtype))


def rematerialised(module: type[nn.Module], config: ModelConfig) -> type[nn.Module]:
  """The module as config.remat asks: what its backward pass recomputes."""
  if config.remat != 'none':
    policy = jax.checkpoint_policies.save_and_offload_only_these_names(
      names_which_can_be_saved=[
        chunks.SELECTION, chunks.STATISTICS,
        *[chunks.ATTENTION] * (config.remat == 'block_but_attention'),
      ],
      names_which_can_be_offloaded=[LAYER_INPUT] * config.offload_inputs,
      offload_src='device', offload_dst='pinned_host',
    )  # fmt: skip
    return nn.remat(module, prevent_cse=False, policy=policy)
  if collectives.present(*FSDP_AXES):
    return nn.remat(module, prevent_cse=False, policy=collectives.remat_policy())
  return module
