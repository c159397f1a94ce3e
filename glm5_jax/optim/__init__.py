"""Optimizers: Optax transforms chosen by one table of parameter paths."""
