"""On-policy cross-stage distillation (section 3.5, eq. 2) and its dense-KL variants.

Eq. 2 is the reasoning-RL loss with another advantage: A = sg[log pi_teacher / pi_theta], token by
token, on the student's own samples, so `advantages` here plus `policy.icepop` is all of it. Several
teachers: each prompt belongs to one of them, whose log-probabilities are used.
The variants compare distributions instead of the sampled token's probability alone: over the whole
vocabulary, or over the teacher's top k with the rest lumped into one outcome.
"""

import jax
import jax.numpy as jnp


def advantages(teacher: jax.Array, student: jax.Array) -> jax.Array:
  """sg[log pi_teacher - log pi_theta] of the sampled tokens, [B, T] each."""
  return jax.lax.stop_gradient(teacher - student)


def full_kl(student_logits: jax.Array, teacher_logits: jax.Array) -> jax.Array:
  """KL(student || teacher) per token: [..., V] logits -> [...] nats. Gradient to the student only."""
  student = jax.nn.log_softmax(student_logits.astype(jnp.float32), axis=-1)
  teacher = jax.nn.log_softmax(teacher_logits.astype(jnp.float32), axis=-1)
  return _kl(student, jax.lax.stop_gradient(teacher))


def top_k_kl(
  student_logits: jax.Array, teacher_ids: jax.Array, teacher_logprobs: jax.Array
) -> jax.Array:
  """KL(student || teacher) per token over the teacher's k most likely ids and "anything else".

  A lower bound of `full_kl` (merging outcomes never increases a KL), equal to it at k = V.

  Args:
    student_logits: [..., V].
    teacher_ids: [..., k] int32, distinct.
    teacher_logprobs: [..., k] log-probabilities over the whole vocabulary.
  """
  student = jax.nn.log_softmax(student_logits.astype(jnp.float32), axis=-1)
  student = jnp.take_along_axis(student, teacher_ids, axis=-1)
  teacher = jax.lax.stop_gradient(teacher_logprobs.astype(jnp.float32))
  return _kl(_with_rest(student), _with_rest(teacher))


def _with_rest(logp: jax.Array) -> jax.Array:
  """Appends log(1 - sum of the probabilities), floored where the k ids are (nearly) everything."""
  rest = 1.0 - jnp.sum(jnp.exp(logp), axis=-1, keepdims=True)
  return jnp.concatenate([logp, jnp.log(jnp.maximum(rest, 1e-7))], axis=-1)


def _kl(a: jax.Array, b: jax.Array) -> jax.Array:
  return jnp.sum(jnp.exp(a) * (a - b), axis=-1)
