"""Pure step factories: loss, gradient, update, router balance. One jitted function a run."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
import optax

from glm5_jax.config import ModelConfig
from glm5_jax.losses import language_model
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import Output, forward
from glm5_jax.ops import router
from glm5_jax.optim.schedules import Schedule
from glm5_jax.train.state import TrainState

# tokens, targets, weights, segment_ids, positions, and prefix of infilling; each [B, T]
Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
  """What is minimised.

  loss = CE + mtp_weight * mean_k CE_k + balance_loss_weight * mean over MoE layers
         + indexer_loss_weight * sum over indexers of KL
  """

  mtp_steps: int = 3
  # Share of the batch's rows on which the MTP steps are trained; 1 in the paper. Three steps with a
  # full head each cost more than the rest of a nano model.
  mtp_fraction: float = 1.0
  mtp_weight: float = 0.3  # Section 3.3 of GLM-4.5's report: 0.3, later 0.1.
  balance_loss_weight: float = 1e-4
  # The paper is silent. The KL trains the indexers alone, but shares the global-norm clip with the rest.
  indexer_loss_weight: float = 0.01
  z_loss: float = 0.0
  router_bias_rate: float = 1e-3
  grad_accum: int = 1
  loss_chunk: int = 1024

  def mtp_rows(self, batch: Batch) -> int:
    """How many rows of a (micro-)batch the MTP steps see."""
    return max(1, round(batch['tokens'].shape[0] * self.mtp_fraction))

  @classmethod
  def from_config(cls, section: Mapping[str, Any]) -> 'Objective':
    """Takes its fields from a run config's `train` section and leaves the others to the loop."""
    return cls(**{f.name: section[f.name] for f in dataclasses.fields(cls) if f.name in section})


def _layer_aux(out: Output, name: str) -> jax.Array | None:
  """[layers, ...] of one auxiliary result in layer order, MTP steps last; None if there is none."""
  blocks = [aux for key, stack in out.aux.items() if key != 'mtp' for aux in stack.values()]
  parts = [aux[name] for aux in [*blocks, out.aux.get('mtp', {})] if name in aux]
  return jnp.concatenate(parts) if parts else None


def loss_and_metrics(
  params: Any, batch: Batch, totals: jax.Array, config: ModelConfig, objective: Objective
) -> tuple[jax.Array, tuple[Metrics, Any]]:
  """The scalar objective of one micro-batch, its metrics, and the router loads by stack.

  Args:
    params: model parameters.
    batch: [B, T] arrays.
    totals: [1 + mtp_steps] token weights by which the loss sums are divided: those of the whole
      batch, so that micro-batches add up to it.
    config: the model.
    objective: weights of the terms.
  """
  out = forward(
    params, batch['tokens'], config=config, positions=batch['positions'],
    segment_ids=batch['segment_ids'], prefix=batch.get('prefix'), mtp_steps=objective.mtp_steps,
    logits=False, mtp_rows=objective.mtp_rows(batch),
    options=Options(objective.indexer_loss_weight > 0),
  )  # fmt: skip
  head = params['lm_head']
  share = 1.0 / objective.grad_accum

  def ce(hidden, targets, weights):
    return language_model.cross_entropy(
      hidden, head, targets, weights, chunk=objective.loss_chunk, z_loss=objective.z_loss
    )

  main = ce(out.hidden, batch['targets'], batch['weights'])
  loss = main.loss / totals[0]
  metrics = {'ce': main.nll / totals[0], 'accuracy': main.correct / totals[0]}
  if out.mtp_hidden is not None:
    with jax.named_scope('mtp_loss'):
      losses = [
        ce(hidden, *_mtp_targets(batch, k, objective)).loss / totals[k]
        for k, hidden in enumerate(out.mtp_hidden, 1)
      ]
    metrics['mtp_ce'] = jnp.stack(losses)
    loss += objective.mtp_weight * jnp.mean(metrics['mtp_ce'])
  kl = _layer_aux(out, 'kl')
  if kl is not None:
    metrics['indexer_kl'] = jnp.mean(kl) * share
    loss += objective.indexer_loss_weight * jnp.sum(kl) * share
  balance = _layer_aux(out, 'balance_loss')
  if balance is not None:
    metrics['balance_loss'] = jnp.mean(balance) * share
    loss += objective.balance_loss_weight * metrics['balance_loss']
  metrics['loss'] = loss
  loads = _router_loads(out)
  return loss, (metrics, jax.tree.map(lambda a: a * share, loads))


def _mtp_targets(batch: Batch, step: int, objective: Objective):
  rows = slice(objective.mtp_rows(batch))
  arrays = (batch['targets'][rows], batch['weights'][rows], batch['segment_ids'][rows])
  return language_model.mtp_targets(*arrays, step)


def _token_totals(batch: Batch, objective: Objective) -> jax.Array:
  """[1 + mtp_steps] summed target weights of the main loss and of every MTP step."""
  steps = range(1, objective.mtp_steps + 1)
  weights = [batch['weights'], *(_mtp_targets(batch, k, objective)[1] for k in steps)]
  return jnp.stack([jnp.sum(w) for w in weights])


def _router_loads(out: Output) -> dict[str, dict[str, jax.Array]]:
  """stack -> block -> [repeats, E]; the MTP layer's is averaged over the steps that share it."""
  loads: dict[str, dict[str, jax.Array]] = {}
  for name, stack in out.aux.items():
    if name == 'mtp':
      loads['mtp'] = {'block': stack['load']}
    else:
      found = {block: aux['load'] for block, aux in stack.items() if 'load' in aux}
      if found:
        loads[name] = found
  return loads


def _balance(params: Any, loads: Any, rate: float) -> Any:
  """Moves every router's correction bias (ops/router.py) by the loads of the whole batch."""
  params = dict(params)
  for name, stack in loads.items():
    params[name] = dict(params[name])
    for block, load in stack.items():
      layer = dict(params[name][block])
      moe = dict(layer['moe'])
      bias = moe['router']['bias']
      if name == 'mtp':  # Step k runs on layer k mod n.
        load = jnp.mean(load.reshape(-1, *bias.shape), axis=0)
      moe['router'] = moe['router'] | {'bias': router.updated_bias(bias, load, rate)}
      layer['moe'] = moe
      params[name][block] = layer
  return params


def make_train_step(
  config: ModelConfig,
  objective: Objective,
  tx: optax.GradientTransformation,
  schedule: Schedule,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The jitted training step; it consumes (donates) the state it is given.

  A step whose loss or gradient is not finite leaves parameters and optimizer as they were and counts
  in `state.skipped`. Metrics: loss, ce, mtp_ce [steps], accuracy, indexer_kl, balance_loss,
  grad_norm, lr, tokens, skipped (of this step, 0 or 1), load [MoE layers, E] and router_entropy
  (mean over layers, 1 when even).
  """

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    count = objective.grad_accum
    micros = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), dict(batch))
    totals = jnp.sum(jax.vmap(lambda micro: _token_totals(micro, objective))(micros), axis=0)
    totals = jnp.maximum(totals, 1.0)
    gradient = jax.value_and_grad(loss_and_metrics, has_aux=True)

    def micro_step(micro):
      (_, (metrics, loads)), grads = gradient(state.params, micro, totals, config, objective)
      return grads, metrics, loads

    if count == 1:
      grads, metrics, loads = micro_step(batch)
    else:
      shapes = jax.eval_shape(micro_step, jax.tree.map(lambda a: a[0], micros))
      start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

      def accumulate(total, micro):
        return jax.tree.map(jnp.add, total, micro_step(micro)), None

      (grads, metrics, loads), _ = jax.lax.scan(accumulate, start, micros)

    with jax.named_scope('optimizer'):
      grad_norm = optax.global_norm(grads)
      finite = jnp.isfinite(metrics['loss']) & jnp.isfinite(grad_norm)
      updates, opt_state = tx.update(grads, state.opt_state, state.params)
      params = optax.apply_updates(state.params, updates)
      if objective.router_bias_rate:
        params = _balance(params, loads, objective.router_bias_rate)
      keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
      params = jax.tree.map(keep, params, state.params)
      opt_state = jax.tree.map(keep, opt_state, state.opt_state)

    bad = 1 - finite.astype(jnp.int32)
    metrics |= {
      'grad_norm': grad_norm, 'lr': schedule(state.step - state.skipped), 'skipped': bad,
      'tokens': totals[0],
    }  # fmt: skip
    if loads:
      load = jnp.concatenate([layer for stack in loads.values() for layer in stack.values()])
      metrics['load'] = load
      metrics['router_entropy'] = jnp.mean(entropy(load))
    state = dataclasses.replace(
      state, step=state.step + 1, skipped=state.skipped + bad, params=params, opt_state=opt_state
    )
    return state, metrics

  return jax.jit(train_step, donate_argnums=0)


def entropy(load: jax.Array) -> jax.Array:
  """Entropy of loads [..., E] over that of an even load; 1 is even, 0 is one expert for all."""
  nats = -jnp.sum(load * jnp.log(jnp.maximum(load, 1e-9)), axis=-1)
  return nats / jnp.log(load.shape[-1])


def make_eval_step(
  config: ModelConfig, objective: Objective
) -> Callable[[Any, Batch], dict[str, jax.Array]]:
  """The jitted evaluation of one batch: sums, to be added over batches.

  Returns nll (nats), correct, tokens, mtp_nll and mtp_tokens [steps] (of the rows that
  `objective.mtp_fraction` names), valid (positions), and recall: per indexer layer the share of the
  dense attention mass that its selection holds, times `valid` (add, then divide).
  """
  recall = config.sparse_attention and config.attention == 'mla'

  def eval_step(params: Any, batch: Batch) -> dict[str, jax.Array]:
    out = forward(
      params, batch['tokens'], config=config, positions=batch['positions'],
      segment_ids=batch['segment_ids'], prefix=batch.get('prefix'),
      mtp_steps=objective.mtp_steps, mtp_rows=objective.mtp_rows(batch),
      options=Options(recall=recall, form='expanded'), logits=False,
    )  # fmt: skip

    def ce(hidden, targets, weights):
      return language_model.cross_entropy(
        hidden, params['lm_head'], targets, weights, chunk=objective.loss_chunk
      )

    main = ce(out.hidden, batch['targets'], batch['weights'])
    valid = jnp.sum(batch['segment_ids'] > 0, dtype=jnp.float32)
    sums = {'nll': main.nll, 'correct': main.correct, 'tokens': main.weight, 'valid': valid}
    if out.mtp_hidden is not None:
      mtp = [ce(h, *_mtp_targets(batch, k, objective)) for k, h in enumerate(out.mtp_hidden, 1)]
      sums['mtp_nll'] = jnp.stack([m.nll for m in mtp])
      sums['mtp_tokens'] = jnp.stack([m.weight for m in mtp])
    per_layer = _layer_aux(out, 'recall')
    if per_layer is not None:
      sums['recall'] = per_layer * valid
    return sums

  return jax.jit(eval_step)
