"""The optimizer that a config asks for: a table of rules (optim/rules.py) and the numbers."""

from collections.abc import Mapping
from typing import Any

import jax
import optax

from glm5_jax.optim import muon
from glm5_jax.optim.rules import MUON_SPLIT_RULES, TABLES, Rules, label_params
from glm5_jax.optim.schedules import Schedule, make_schedule

NS_DTYPES = ('float32', 'bfloat16')


def by_rules(
  rules: Rules,
  learning_rate: float | Schedule,
  *,
  b1: float = 0.9,
  b2: float = 0.95,
  eps: float = 1e-8,
  weight_decay: float = 0.1,
  **muon_options: Any,
) -> optax.GradientTransformation:
  """Every parameter by the rule of its path: Muon, AdamW or nothing, with one learning rate.

  Args:
    rules: a table of optim/rules.py.
    learning_rate: a number or a schedule. Muon's updates are as large as AdamW's (root mean square
      0.2), so both take the same (arXiv 2502.16982); the paper gives one.
    b1, b2, eps: of AdamW, on which the paper is silent.
    weight_decay: decoupled, times the learning rate; of all but norms and biases. 0.1 in the paper.
    **muon_options: of `muon.scale_by_muon`.

  Raises:
    ValueError: from init, if a parameter has no rule or several.
  """

  def adamw(weight_decay):
    return optax.adamw(learning_rate, b1=b1, b2=b2, eps=eps, weight_decay=weight_decay)

  transforms = {
    'adamw': adamw(weight_decay),
    'adamw_no_decay': adamw(0.0),
    'frozen': optax.set_to_zero(),
    'muon': optax.chain(
      muon.scale_by_muon(rules, **muon_options),
      optax.add_decayed_weights(weight_decay),
      optax.scale_by_learning_rate(learning_rate),
    ),
  }

  def labels(params):
    return jax.tree.map(lambda rule: 'muon' if '->' in rule else rule, label_params(params, rules))

  used = {'muon' if '->' in rule else rule for rule in rules.values()}
  return optax.partition({k: v for k, v in transforms.items() if k in used}, labels)


def muon_split(learning_rate: float | Schedule, **options: Any) -> optax.GradientTransformation:
  """GLM-5's optimizer: Muon with W_UQ, W_UK and W_UV split by head (section 2.1), AdamW for the rest.

  Takes the options of `by_rules` and `muon.scale_by_muon`, with the paper's defaults.
  """
  return by_rules(MUON_SPLIT_RULES, learning_rate, **options)


def build(optim: Mapping[str, Any], steps: int) -> tuple[optax.GradientTransformation, Schedule]:
  """The gradient transformation and learning-rate schedule that a config's `optim` section asks for.

  Reads name (a key of `rules.TABLES`), peak_lr, end_lr, warmup_steps, schedule, b1, b2, eps,
  weight_decay and clip_norm (global norm; 0 for none); for Muon also momentum, nesterov, ns_dtype and
  ns_chunk.

  Raises:
    ValueError: for an unknown name, schedule or ns_dtype, or an impossible warm-up.
  """
  name = optim['name']
  if name not in TABLES:
    raise ValueError(f'unknown optimizer {name!r}, known are {sorted(TABLES)}')
  options = {key: optim[key] for key in ('b1', 'b2', 'eps', 'weight_decay')}
  if name != 'adamw':
    options |= {key: optim[key] for key in ('momentum', 'nesterov', 'ns_dtype', 'ns_chunk')}
    if options['ns_dtype'] not in NS_DTYPES:
      raise ValueError(
        f'optim.ns_dtype must be one of {list(NS_DTYPES)}, found {options["ns_dtype"]!r}'
      )
  schedule = make_schedule(
    optim['schedule'], peak_lr=optim['peak_lr'], end_lr=optim['end_lr'],
    warmup_steps=optim['warmup_steps'], steps=steps,
  )  # fmt: skip
  tx = by_rules(TABLES[name], schedule, **options)
  if optim['clip_norm']:
    tx = optax.chain(optax.clip_by_global_norm(optim['clip_norm']), tx)
  return tx, schedule
