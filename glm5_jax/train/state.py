"""The training state: everything a checkpoint must hold to continue bit for bit."""

from typing import Any

import flax.struct
import jax
import jax.numpy as jnp
import optax

from glm5_jax.train.stages import EVERYTHING, Stage


@flax.struct.dataclass
class TrainState:
  """A pytree; `step` counts batches consumed, `skipped` those whose update was dropped."""

  step: jax.Array  # int32
  skipped: jax.Array  # int32
  params: Any
  opt_state: Any
  rng: jax.Array  # Raw uint32 key data, so that it serialises like any array.

  @classmethod
  def create(
    cls, params: Any, tx: optax.GradientTransformation, seed: int, stage: Stage = EVERYTHING
  ) -> 'TrainState':
    """The state before the first step of a run that trains what `stage` says."""
    return cls(
      step=jnp.zeros((), jnp.int32), skipped=jnp.zeros((), jnp.int32), params=params,
      opt_state=tx.init(stage.split(params)[0]), rng=jax.random.key_data(jax.random.key(seed)),
    )  # fmt: skip
