"""Compiling for once: programs that run a single time should not be optimised for minutes."""

from collections.abc import Callable
from typing import Any

import jax


def jit_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
  """`jax.jit` (which takes the `options`) for a function that is called once or a few times and is not a hot spot.

  XLA:CPU spends most of a small program's compile time in LLVM; without its optimisation a model's
  initialisation compiles in a third of the time. Other backends compile as usual. The results may
  differ from an optimised program's in the last bit, and are as reproducible.
  """
  if jax.default_backend() == 'cpu':
    options['compiler_options'] = {'xla_backend_optimization_level': 0}
  return jax.jit(function, **options)
