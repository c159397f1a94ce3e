"""Parameter declaration shared by the modules."""

import flax.linen as nn
import jax
import jax.numpy as jnp

from glm5_jax.config import ModelConfig


def declare(
  module: nn.Module, config: ModelConfig, **shapes: tuple[int, ...]
) -> dict[str, jax.Array]:
  """Declares matrices ~ N(0, initializer_range), the initialisation of the reference model."""
  normal = nn.initializers.normal(config.initializer_range)
  dtype = jnp.dtype(config.param_dtype)
  return {name: module.param(name, normal, shape, dtype) for name, shape in shapes.items()}


def ones(module: nn.Module, config: ModelConfig, name: str, dim: int) -> jax.Array:
  """A norm scale."""
  return module.param(name, nn.initializers.ones, (dim,), jnp.dtype(config.param_dtype))
