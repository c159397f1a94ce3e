"""Optimizers: Optax transforms chosen by one table of parameter paths."""

from glm5_jax.optim.build import build, muon_split

__all__ = ['build', 'muon_split']
