"""The policy's update: log-probabilities of the sampled tokens, objective, gradient. One jitted function.

The objective is one of losses/policy.py; the reduction, per token or per sequence, is over the whole
batch. With one update a batch the policy before the update is the policy itself, so pi_old is not
recomputed: its log-probabilities are those of the same forward pass, held constant.
"""

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from glm5_jax.compile import overlap_options
from glm5_jax.config import ModelConfig
from glm5_jax.kernels import Implementation, attention
from glm5_jax.losses import distillation
from glm5_jax.losses.policy import Experience, PolicyConfig, policy_loss, token_weights
from glm5_jax.losses.token_logprobs import TokenLogprobs, token_logprobs
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import forward
from glm5_jax.ops import collectives
from glm5_jax.rl.batch import PolicyBatch
from glm5_jax.sharding import BATCH, BATCH_AXES, param_specs
from glm5_jax.train.stages import Stage, merge
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import layer_aux

Metrics = dict[str, jax.Array]
# Section 3.2: the indexer is frozen during RL, so that trainer and engine keep selecting the same keys.
STAGE = Stage(main=True, indexers=False)
# Metrics that are maxima over the micro-batches; all others are sums.
_MAXIMA = ('logprob_gap_max',)


def of_episodes(batch: PolicyBatch, logprobs: jax.Array) -> jax.Array:
  """The advantages [B, T] that the rewards gave (eq. 1)."""
  del logprobs
  return batch.advantages


def of_teacher(batch: PolicyBatch, logprobs: jax.Array) -> jax.Array:
  """Those of distillation (eq. 2): how much likelier each token is for the teacher."""
  return distillation.advantages(batch.teacher, logprobs)


@dataclasses.dataclass(frozen=True)
class Learner:
  """How a batch becomes an update.

  Attributes:
    policy: the objective.
    per: whether every 'sequence' counts the same (eq. 1) or every 'token' (eq. 3).
    temperature: that the tokens were sampled with.
    micro_rows: rows that are computed at a time.
    loss_chunk: tokens whose logits exist at a time.
    advantages: of a micro-batch, from it and the policy's log-probabilities [B, T], held constant.
    old: what pi_old is: the 'policy' before this update, or the one of the 'rollout', whose
      log-probabilities were recorded (the same, on policy).
    kernels: what computes attention.
  """

  policy: PolicyConfig = dataclasses.field(default_factory=PolicyConfig)
  per: str = 'sequence'
  temperature: float = 1.0
  micro_rows: int = 8
  loss_chunk: int = 1024
  advantages: Callable[[PolicyBatch, jax.Array], jax.Array] = of_episodes
  old: Literal['policy', 'rollout'] = 'policy'
  kernels: Implementation = 'reference'


def _logprobs(
  params: Any, batch: PolicyBatch, config: ModelConfig, learner: Learner
) -> tuple[TokenLogprobs, jax.Array]:
  """Of the targets of whole rows, at the temperature of sampling; and pairs that experts dropped."""
  out = forward(
    params, batch.tokens, config=config, positions=batch.positions, segment_ids=batch.segment_ids,
    logits=False, options=Options(attend=attention(learner.kernels)),
  )  # fmt: skip
  head = collectives.gather_weight('lm_head', params['lm_head'], entries=('fsdp', 'tensor'))
  found = token_logprobs(
    out.hidden, head, batch.targets, temperature=learner.temperature, chunk=learner.loss_chunk
  )
  dropped = layer_aux(out, 'dropped')
  count = jnp.int32(0) if dropped is None else jnp.sum(dropped)
  return jax.tree.map(collectives.gather_sequence, found), count


def _micros(tree: Any, rows: int) -> Any:
  return jax.tree.map(lambda a: a.reshape(-1, rows, *a.shape[1:]), tree)


def make_scorer(
  config: ModelConfig, learner: Learner
) -> Callable[[Any, PolicyBatch, jax.Array, jax.Array], jax.Array]:
  """The jitted log-probabilities of a batch's targets under frozen parameters, float32 [rows, T].

  Takes the parameters, the batch, and which micro-batches to compute, [first, last); 0 elsewhere.
  """

  def score(params: Any, batch: PolicyBatch, first: jax.Array, last: jax.Array) -> jax.Array:
    micros = _micros(batch, learner.micro_rows)

    def one(i, found):
      micro = jax.tree.map(lambda a: a[i], micros)
      return found.at[i].set(_logprobs(params, micro, config, learner)[0].logprob)

    found = jax.lax.fori_loop(first, last, one, jnp.zeros(micros.tokens.shape, jnp.float32))
    return found.reshape(batch.tokens.shape)

  return jax.jit(score)


def make_policy_step(
  config: ModelConfig,
  learner: Learner,
  tx: optax.GradientTransformation,
  mesh: Mesh | None = None,
) -> Callable[[TrainState, PolicyBatch, jax.Array], tuple[TrainState, Metrics]]:
  """The jitted update; it consumes (donates) the state it is given.

  Takes rows in whole micro-batches and how many of these are in use (by default all); the rest is
  padding, which is not computed. An update that is not finite leaves the state as it was and counts in `state.skipped`. With a
  mesh, state and batch lie on it as in training (`train.step.make_train_step`); the rows of a micro-batch
  divide by its devices.

  Metrics: those of `policy_loss`, loss, entropy (nats, mean over the sampled tokens), grad_norm,
  tokens (sampled ones), skipped (0 or 1), dropped (token-expert pairs that found no room: then nothing
  changes if config.expert_overflow is 'error'), and with a teacher reverse_kl (nats per token, weighted like
  the loss: the estimate of KL(policy || teacher) from the policy's own samples).
  """

  def micro_loss(trained, frozen, batch: PolicyBatch, rows: PolicyBatch, weights):
    """Of a device's tokens, `batch`, and the whole `rows` that they are from."""
    found, dropped = _logprobs(merge(trained, frozen), batch, config, learner)
    now = jax.lax.stop_gradient(found.logprob)
    advantages = jax.lax.stop_gradient(learner.advantages(rows, now))
    old = now if learner.old == 'policy' else rows.rollout
    experience = Experience(rows.rollout, old, advantages, weights, rows.segment_ids)
    loss, metrics = policy_loss(found.logprob, experience, learner.policy)
    metrics |= {'loss': loss, 'entropy': jnp.sum(weights * found.entropy)}
    if rows.teacher is not None:
      metrics['reverse_kl'] = jnp.sum(weights * (now - rows.teacher))
    # Devices along `context` have computed the same, each from its tokens.
    loss = collectives.psum(loss, *BATCH_AXES)
    metrics = {
      k: (collectives.pmax if k in _MAXIMA else collectives.psum)(v, *BATCH_AXES)
      for k, v in metrics.items()
    }
    return collectives.share(loss), metrics | {'dropped': dropped}

  gradient = jax.value_and_grad(micro_loss, has_aux=True)
  micro_rows = learner.micro_rows
  if mesh is not None:
    micro_rows //= math.prod(mesh.shape[axis] for axis in BATCH_AXES)

  def gradients(trained, frozen, batch: PolicyBatch, filled):
    """Gradients, metrics and how many tokens count; on a mesh, per device."""
    filled = len(batch.tokens) // micro_rows if filled is None else filled
    rows = jax.tree.map(collectives.gather_sequence, batch)
    all_weights = token_weights(
      rows.mask, rows.segment_ids, per=learner.per, add=lambda n: collectives.psum(n, *BATCH_AXES)
    )
    micros = _micros((batch, rows, all_weights), micro_rows)

    def micro_step(i):
      (_, metrics), grads = gradient(trained, frozen, *jax.tree.map(lambda a: a[i], micros))
      return grads, metrics

    def accumulate(i, total):
      grads, metrics = micro_step(i)
      sums = {
        k: jnp.maximum(total[1][k], v) if k in _MAXIMA else total[1][k] + v
        for k, v in metrics.items()
      }
      return jax.tree.map(jnp.add, total[0], grads), sums

    shapes = jax.eval_shape(micro_step, jnp.int32(0))
    start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)
    grads, metrics = jax.lax.fori_loop(0, filled, accumulate, start)
    tokens = collectives.psum(jnp.sum(rows.mask), *BATCH_AXES)
    return collectives.reduce_gradients(grads), metrics, tokens

  def policy_step(state: TrainState, batch: PolicyBatch, filled: jax.Array | None = None):
    trained, frozen = STAGE.split(state.params)
    specs, everywhere = param_specs(trained, mesh), PartitionSpec()
    on_devices = collectives.on_mesh(
      gradients, mesh, (specs, param_specs(frozen, mesh), BATCH, everywhere),
      (specs, everywhere, everywhere),
    )  # fmt: skip
    grads, metrics, tokens = on_devices(trained, frozen, batch, filled)

    grad_norm = optax.global_norm(grads)
    finite = jnp.isfinite(metrics['loss']) & jnp.isfinite(grad_norm)
    if config.expert_overflow == 'error':
      finite &= metrics['dropped'] == 0
    updates, opt_state = tx.update(grads, state.opt_state, trained)
    params = merge(optax.apply_updates(trained, updates), frozen)
    keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
    bad = 1 - finite.astype(jnp.int32)
    metrics |= {'grad_norm': grad_norm, 'tokens': tokens, 'skipped': bad}
    state = dataclasses.replace(
      state, step=state.step + 1, skipped=state.skipped + bad,
      params=jax.tree.map(keep, params, state.params),
      opt_state=jax.tree.map(keep, opt_state, state.opt_state),
    )  # fmt: skip
    return state, metrics

  options = overlap_options(collectives.platform())
  return jax.jit(policy_step, donate_argnums=0, compiler_options=options)
