"""Learning-rate schedules by name."""

from collections.abc import Callable

import jax
import optax

Schedule = Callable[[jax.typing.ArrayLike], jax.Array]


def make_schedule(
  name: str, *, peak_lr: float, end_lr: float, warmup_steps: int, steps: int
) -> Schedule:
  """Linear warm-up from 0 to `peak_lr`, then `name` down to `end_lr` at `steps`.

  GLM-5 pre-trains with warm-up and cosine, and mid-trains with a linear decay (appendix A).

  Raises:
    ValueError: for an unknown name, or if the warm-up does not end before the run does.
  """
  if not 0 <= warmup_steps < steps:
    raise ValueError(f'warmup_steps={warmup_steps} must be at least 0 and below steps={steps}')
  decay_steps = steps - warmup_steps
  decays = {
    'cosine': lambda: optax.cosine_decay_schedule(peak_lr, decay_steps, end_lr / peak_lr),
    'linear': lambda: optax.linear_schedule(peak_lr, end_lr, decay_steps),
    'constant': lambda: optax.constant_schedule(peak_lr),
  }
  if name not in decays:
    raise ValueError(f'unknown schedule {name!r}, known are {sorted(decays)}')
  warmup = optax.linear_schedule(0.0, peak_lr, warmup_steps)
  return optax.join_schedules([warmup, decays[name]()], [warmup_steps])
