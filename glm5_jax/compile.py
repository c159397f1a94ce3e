"""Compiling for once: programs that run a single time should not be optimised for minutes."""

from collections.abc import Callable
from typing import Any

import jax

# For TPUs: gathers of weights and exchanges of tokens run beside computation. XLA's defaults wait for
# each. Reductions still wait.
_OVERLAP = (
  'xla_enable_async_all_gather', 'xla_tpu_enable_async_collective_fusion',
  'xla_tpu_enable_async_collective_fusion_fuse_all_gather',
  'xla_tpu_enable_async_collective_fusion_multiple_steps', 'xla_tpu_overlap_compute_collective_tc',
  'xla_tpu_enable_async_all_to_all', 'xla_tpu_enable_async_ragged_all_to_all',
)  # fmt: skip


def overlap_options(platform: str) -> dict[str, bool] | None:
  """`compiler_options` of a step whose devices send each other much."""
  return dict.fromkeys(_OVERLAP, True) if platform == 'tpu' else None


def jit_once(function: Callable[..., Any], **options: Any) -> Callable[..., Any]:
  """`jax.jit` (which takes the `options`) for a function that is called once or a few times and is not a hot spot.

  XLA:CPU spends most of a small program's compile time in LLVM; without its optimisation a model's
  initialisation compiles in a third of the time. Other backends compile as usual. The results may
  differ from an optimised program's in the last bit, and are as reproducible.
  """
  if jax.default_backend() == 'cpu':
    options['compiler_options'] = {'xla_backend_optimization_level': 0}
  return jax.jit(function, **options)
