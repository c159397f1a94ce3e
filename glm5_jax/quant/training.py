"""Quantisation-aware training, as a wrapper of the optimizer.

The parameters of the model are at all times INT4's values w^, so forward pass, evaluation, checkpoint and
whatever starts from it see what inference will see, bit for bit. The weights w that these are rounded
from live in the optimizer's state. A gradient with respect to w^ moves w: that is the straight-through
estimator, which takes the rounding's derivative for one.
"""

from typing import Any, NamedTuple

import jax
import optax

from glm5_jax.optim.rules import path_name
from glm5_jax.quant.int4 import Int4, rounded


class State(NamedTuple):
  """`masters`: the weights before rounding, None where nothing is rounded; `inner`: the optimizer's."""

  masters: Any
  inner: optax.OptState


def quantised(tx: optax.GradientTransformation, int4: Int4) -> optax.GradientTransformation:
  """`tx`, which moves the weights before rounding, their decay included.

  From the first update on the covered parameters are w^, exactly so if that one moves no weight by more
  than half a step of its scale, as any warm-up of the learning rate from 0 makes sure. What they were
  before the first update is what the weights begin from; a run that starts from parameters that are w^
  already goes on from these: rounding them again is no change.

  Args:
    tx: any transformation that is used with `optax.apply_updates`.
    int4: what is rounded.

  Raises:
    ValueError: from init, if the parameters cannot be rounded so (`Int4.check`).
  """

  def init(params: Any) -> State:
    int4.check(params)
    masters = jax.tree_util.tree_map_with_path(
      lambda path, x: x if int4.covers(path_name(path)) else None, params
    )
    return State(masters, tx.init(params))

  def update(grads: Any, state: State, params: Any = None) -> tuple[Any, State]:
    weights = _where(state.masters, state.masters, params)
    updates, inner = tx.update(grads, state.inner, weights)
    moved = optax.apply_updates(weights, updates)

    def step(path, new, old):
      name = path_name(path)
      return rounded(new, int4.axes(name, new.shape), int4.group) - old

    # From one value of INT4 to another, of 11 bits each, the difference is exact, and so is adding it.
    # From any weight to its own rounding the sum is, since it rounds to even.
    with jax.named_scope('int4'):
      steps = jax.tree_util.tree_map_with_path(
        lambda path, m, new, old: None if m is None else step(path, new, old),
        state.masters, moved, params, is_leaf=_is_none,
      )  # fmt: skip
    masters = _where(state.masters, moved, state.masters)
    return _where(state.masters, steps, updates), State(masters, inner)

  return optax.GradientTransformation(init, update)


def _is_none(x: Any) -> bool:
  return x is None


def _where(masters: Any, yes: Any, no: Any) -> Any:
  """Leaves of `yes` where there is a master, of `no` elsewhere."""
  return jax.tree.map(lambda m, a, b: b if m is None else a, masters, yes, no, is_leaf=_is_none)
