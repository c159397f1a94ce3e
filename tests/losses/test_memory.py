"""[B, T, V] never exists, neither forward nor backward: read from the compiled program."""

import jax
import jax.numpy as jnp

from glm5_jax.losses.language_model import cross_entropy
from glm5_jax.losses.token_logprobs import token_logprobs

TIME, VOCAB, DIM, CHUNK = 32_768, 154_880, 64, 1024  # GLM-5's vocabulary and mid-training length.


def _temporary_bytes(loss) -> int:
  shapes = (
    jax.ShapeDtypeStruct((1, TIME, DIM), jnp.float32),
    jax.ShapeDtypeStruct((DIM, VOCAB), jnp.float32),
    jax.ShapeDtypeStruct((1, TIME), jnp.int32),
  )
  compiled = jax.jit(jax.value_and_grad(loss, argnums=(0, 1))).lower(*shapes).compile()
  return compiled.memory_analysis().temp_size_in_bytes


def test_cross_entropy_at_glm5_size():
  def loss(hidden, head, targets):
    return cross_entropy(hidden, head, targets, jnp.ones((1, TIME)), chunk=CHUNK).loss

  found = _temporary_bytes(loss)
  # Two [chunk, V] arrays at most (0.67 GB when written), where all logits are 20.3 GB.
  assert found < 2 * 4 * CHUNK * VOCAB


def test_token_logprobs_at_glm5_size():
  def loss(hidden, head, targets):
    return jnp.sum(token_logprobs(hidden, head, targets, chunk=CHUNK).logprob)

  found = _temporary_bytes(loss)
  assert found < 3 * 4 * CHUNK * VOCAB  # 1.27 GB when written.
