"""From a parameter path to its update rule: one ordered table, first match wins."""

import re
from collections.abc import Mapping
from typing import Any

import jax
import optax

from glm5_jax.optim.schedules import Schedule, make_schedule

# The router's correction bias is moved by the balancing rule (ops/router.py), not by a gradient.
ADAMW_RULES = (
  (r'.*/router/bias', 'frozen'),
  (r'(.*/)?(\w+_norm|norm|k_norm_scale|k_norm_bias)', 'adamw_no_decay'),
  (r'.*', 'adamw'),
)


def label_params(params: Any, rules=ADAMW_RULES) -> Any:
  """The tree of rule names: each path 'a/b/c' gets that of the first pattern matching all of it.

  Raises:
    ValueError: if a path matches no rule.
  """

  def label(path, _):
    name = '/'.join(k.key for k in path)
    for pattern, rule in rules:
      if re.fullmatch(pattern, name):
        return rule
    raise ValueError(f'no optimizer rule matches parameter {name!r}')

  return jax.tree_util.tree_map_with_path(label, params)


def build(optim: Mapping[str, Any], steps: int) -> tuple[optax.GradientTransformation, Schedule]:
  """The gradient transformation and learning-rate schedule that a config's `optim` section asks for.

  Reads name ('adamw'), peak_lr, end_lr, warmup_steps, schedule, b1, b2, eps, weight_decay and
  clip_norm (global norm; 0 for none). Decay skips norms and biases.
  """
  if optim['name'] != 'adamw':
    raise ValueError(f'unknown optimizer {optim["name"]!r}, known are ["adamw"]')
  schedule = make_schedule(
    optim['schedule'], peak_lr=optim['peak_lr'], end_lr=optim['end_lr'],
    warmup_steps=optim['warmup_steps'], steps=steps,
  )  # fmt: skip

  def adamw(weight_decay):
    return optax.adamw(
      schedule, b1=optim['b1'], b2=optim['b2'], eps=optim['eps'], weight_decay=weight_decay
    )

  transforms = {
    'adamw': adamw(optim['weight_decay']),
    'adamw_no_decay': adamw(0.0),
    'frozen': optax.set_to_zero(),
  }
  tx = optax.partition(transforms, label_params)
  if optim['clip_norm']:
    tx = optax.chain(optax.clip_by_global_norm(optim['clip_norm']), tx)
  return tx, schedule
