"""Pure step factories: loss, gradient, update, router balance. One jitted function a run."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import optax
from jax.sharding import Mesh, PartitionSpec

from glm5_jax.compile import overlap_options
from glm5_jax.config import ModelConfig
from glm5_jax.kernels import Implementation, attention
from glm5_jax.losses import language_model
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import Output, forward
from glm5_jax.ops import collectives, router
from glm5_jax.optim.schedules import Schedule
from glm5_jax.sharding import AXES, BATCH, param_specs
from glm5_jax.train.stages import EVERYTHING, Stage, merge
from glm5_jax.train.state import TrainState

# tokens, targets, weights, segment_ids, positions, and prefix of infilling; each [B, T]. Training batches
# may have two int32 scalars besides, see train/batches.py: micro_batches and topk.
Batch = Mapping[str, jax.Array]
Metrics = dict[str, jax.Array]


@dataclasses.dataclass(frozen=True)
class Objective:
  """What is minimised.

  loss = CE + mtp_weight * mean_k CE_k + balance_loss_weight * mean over MoE layers
         + indexer_loss_weight * sum over indexers of KL

  The first line trains the main model, the second the indexers; a stage that trains one of them only
  has only its line, and does not compute what the other needs. `late_` values replace their
  namesakes from step `switch_step` on (0: never).
  """

  stage: Stage = EVERYTHING
  mtp_steps: int = 3
  # Share of the batch's rows on which the MTP steps are trained; 1 in the paper. Three steps with a
  # full head each cost more than the rest of a nano model.
  mtp_fraction: float = 1.0
  mtp_weight: float = 0.3
  balance_loss_weight: float = 1e-4
  # The paper is silent. The KL trains the indexers alone, but shares the global-norm clip with the rest.
  indexer_loss_weight: float = 0.01
  z_loss: float = 0.0
  router_bias_rate: float = 1e-3
  # GLM-4.5 (arXiv 2508.06471, section 2.4): MTP weight 0.3, bias rate 0.001; after 15T tokens 0.1 and 0.
  switch_step: int = 0
  late_mtp_weight: float = 0.1
  late_router_bias_rate: float = 0.0
  grad_accum: int = 1
  loss_chunk: int = 1024
  kernels: Implementation = 'reference'  # Of sparse attention, see glm5_jax/kernels.py.

  def mtp_rows(self, rows: int) -> int:
    """How many of a (micro-)batch's rows the MTP steps see."""
    return max(1, round(rows * self.mtp_fraction))

  def at(self, name: str, step: jax.Array) -> float | jax.Array:
    """`mtp_weight` or `router_bias_rate` at a step (0 is the first); traced if it ever changes."""
    first, late = getattr(self, name), getattr(self, f'late_{name}')
    return jnp.where(step < self.switch_step, first, late) if self.switch_step else first

  @property
  def indexer_loss(self) -> bool:
    """Whether the KL is computed."""
    return self.stage.indexers and self.indexer_loss_weight > 0

  @classmethod
  def from_config(cls, section: Mapping[str, Any], stage: Stage = EVERYTHING) -> 'Objective':
    """Takes its fields from a run config's `train` section and leaves the others to the loop."""
    found = {f.name: section[f.name] for f in dataclasses.fields(cls) if f.name in section}
    return cls(stage=stage, **found)


class Numbers(NamedTuple):
  """What the losses of one micro-batch need to know of the whole batch and of the step.

  totals: [1 + mtp_steps] token weights of the whole batch, by which loss sums are divided, so that
  micro-batches add up to it. share: of this micro-batch, where means are taken. topk: see
  `model.forward`.
  """

  totals: jax.Array
  share: float | jax.Array = 1.0
  mtp_weight: float | jax.Array = 0.3
  topk: jax.Array | None = None


def layer_aux(out: Output, name: str) -> jax.Array | None:
  """[layers, ...] of one auxiliary result in layer order, MTP steps last; None if there is none."""
  blocks = [aux for key, stack in out.aux.items() if key != 'mtp' for aux in stack.values()]
  parts = [aux[name] for aux in [*blocks, out.aux.get('mtp', {})] if name in aux]
  return jnp.concatenate(parts) if parts else None


def loss_and_metrics(
  params: Any, batch: Batch, numbers: Numbers, config: ModelConfig, objective: Objective
) -> tuple[jax.Array, tuple[Metrics, Any]]:
  """The scalar objective of one micro-batch, its metrics, and the router loads by stack.

  Args:
    params: model parameters.
    batch: [B, T] arrays.
    numbers: see `Numbers`.
    config: the model.
    objective: weights of the terms.
  """
  out = forward(
    params, batch['tokens'], config=config, positions=batch['positions'],
    segment_ids=batch['segment_ids'], prefix=batch.get('prefix'), mtp_steps=objective.mtp_steps,
    logits=False, mtp_rows=objective.mtp_rows(len(batch['tokens'])), topk=numbers.topk,
    options=Options(objective.indexer_loss, attend=attention(objective.kernels)),
  )  # fmt: skip
  loss: Any = 0.0
  metrics: Metrics = {}
  if objective.stage.main:
    loss, metrics = _language_loss(params['lm_head'], out, batch, numbers, config, objective)
  kl = layer_aux(out, 'kl')
  if kl is not None:
    metrics['indexer_kl'] = jnp.mean(kl) * numbers.share
    loss += objective.indexer_loss_weight * jnp.sum(kl) * numbers.share
  metrics['loss'] = loss
  dropped = layer_aux(out, 'dropped')
  if dropped is not None:
    metrics['dropped'] = jnp.sum(dropped)
  loads = _router_loads(out)
  return loss, (metrics, jax.tree.map(lambda a: a * numbers.share, loads))


def _cross_entropies(
  head: jax.Array,
  out: Output,
  batch: Batch,
  config: ModelConfig,
  objective: Objective,
  factors: Sequence[Any],
  z_loss: float = 0.0,
) -> tuple[jax.Array, list[language_model.Sums]]:
  """Of the main model and every MTP step, over the tokens of the whole batch, and their total.

  Devices along `tensor` divide the tokens they share.
  """
  groups = [(out.hidden, batch['targets'], batch['weights'])]
  if out.mtp_hidden is not None:
    groups += [(h, *_mtp_targets(batch, k, objective)) for k, h in enumerate(out.mtp_hidden, 1)]

  def whole(head):
    return collectives.gather_weight('lm_head', head, config.dtype, ('fsdp', 'tensor'))

  tokens = []
  for group, factor in zip(groups, factors, strict=True):
    hidden, targets, weights = (collectives.own_part(a, 'tensor') for a in group)
    tokens.append(language_model.Tokens(hidden, targets, weights, factor))
  losses = language_model.total_loss(
    tokens, head, chunk=objective.loss_chunk, z_loss=z_loss, whole=whole
  )
  return collectives.psum(losses, *AXES)


def _language_loss(
  head: jax.Array,
  out: Output,
  batch: Batch,
  numbers: Numbers,
  config: ModelConfig,
  objective: Objective,
) -> tuple[jax.Array, Metrics]:
  """What trains the main model: next token, MTP steps, balance of the experts."""
  steps = 0 if out.mtp_hidden is None else len(out.mtp_hidden)
  factors = [1 / numbers.totals[0]]
  factors += [numbers.mtp_weight / steps / numbers.totals[k] for k in range(1, steps + 1)]
  loss, (main, *mtp) = _cross_entropies(
    head, out, batch, config, objective, factors, objective.z_loss
  )
  metrics = {'ce': main.nll / numbers.totals[0], 'accuracy': main.correct / numbers.totals[0]}
  if mtp:
    metrics['mtp_ce'] = jnp.stack([sums.loss for sums in mtp]) / numbers.totals[1 : steps + 1]
  balance = layer_aux(out, 'balance_loss')
  if balance is not None:
    metrics['balance_loss'] = jnp.mean(balance) * numbers.share
    loss += objective.balance_loss_weight * metrics['balance_loss']
  return loss, metrics


def _mtp_targets(batch: Batch, step: int, objective: Objective):
  rows = slice(objective.mtp_rows(len(batch['tokens'])))
  targets, weights, segments = (
    collectives.gather_sequence(batch[name][rows]) for name in ('targets', 'weights', 'segment_ids')
  )
  targets, weights = language_model.mtp_targets(targets, weights, segments, step)
  return collectives.own_tokens(targets), collectives.own_tokens(weights)


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


def _balance(params: Any, loads: Any, rate: float | jax.Array) -> Any:
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
  mesh: Mesh | None = None,
) -> Callable[[TrainState, Batch], tuple[TrainState, Metrics]]:
  """The jitted training step; it consumes (donates) the state it is given.

  With a mesh, state and batch lie on it as sharding.py says (`state_specs`, `place_batch`), and the
  step is traced within `jax.set_mesh`. Of each micro-batch every device has some rows; an
  mtp_fraction is of those, and at least one row.

  A step whose loss or gradient is not finite leaves parameters and optimizer as they were and counts
  in `state.skipped`. The optimizer sees only what `objective.stage` trains, and its state is of that
  only (`TrainState.create`). Metrics: loss, ce, mtp_ce [steps], accuracy, indexer_kl, balance_loss
  (those that the stage has), grad_norm, lr, tokens, skipped (of this step, 0 or 1), load [MoE layers, E] and router_entropy
  (mean over layers, 1 when even); with experts on several devices also dropped, the token-expert
  pairs of all layers that found no room (config.expert_capacity): then config.expert_overflow 'error'
  leaves everything as it was, too.
  """

  count = objective.grad_accum

  def gradients(trained, frozen, batch, filled, topk, mtp_weight):
    """Gradients, metrics and loads of a batch, and how many tokens count; on a mesh, per device."""
    micros = jax.tree.map(lambda a: a.reshape(count, -1, *a.shape[1:]), batch)
    totals = jnp.sum(jax.vmap(lambda micro: _token_totals(micro, objective))(micros), axis=0)
    totals = collectives.psum(totals, *collectives.TOKEN_AXES)
    numbers = Numbers(jnp.maximum(totals, 1.0), 1.0 / filled, mtp_weight, topk)

    def micro_step(micro):
      def loss(trained):
        params = merge(trained, frozen)
        loss, aux = loss_and_metrics(params, micro, numbers, config, objective)
        return collectives.share(loss), aux

      (_, (metrics, loads)), grads = jax.value_and_grad(loss, has_aux=True)(trained)
      # Without a barrier XLA adds up whole gradients of embedding and head, and scatters the sum.
      return jax.lax.optimization_barrier(grads), metrics, loads

    if count == 1:
      grads, metrics, loads = micro_step(batch)
    else:
      shapes = jax.eval_shape(micro_step, jax.tree.map(lambda a: a[0], micros))
      start = jax.tree.map(lambda s: jnp.zeros(s.shape, s.dtype), shapes)

      def accumulate(i, total):
        return jax.tree.map(jnp.add, total, micro_step(jax.tree.map(lambda a: a[i], micros)))

      grads, metrics, loads = jax.lax.fori_loop(0, filled, accumulate, start)
    return collectives.reduce_gradients(grads), metrics, loads, totals[0]

  def train_step(state: TrainState, batch: Batch) -> tuple[TrainState, Metrics]:
    batch = dict(batch)
    topk = batch.pop('topk', None)
    filled = batch.pop('micro_batches', count)  # The others are empty: not computed.
    trained, frozen = objective.stage.split(state.params)
    mtp_weight = objective.at('mtp_weight', state.step)
    specs, everywhere = param_specs(trained, mesh), PartitionSpec()
    on_devices = collectives.on_mesh(
      gradients, mesh,
      (specs, param_specs(frozen, mesh), BATCH, everywhere, everywhere, everywhere),
      (specs, everywhere, everywhere, everywhere),
    )  # fmt: skip
    grads, metrics, loads, tokens = on_devices(trained, frozen, batch, filled, topk, mtp_weight)

    with jax.named_scope('optimizer'):
      grad_norm = optax.global_norm(grads)
      finite = jnp.isfinite(metrics['loss']) & jnp.isfinite(grad_norm)
      if 'dropped' in metrics and config.expert_overflow == 'error':
        finite &= metrics['dropped'] == 0
      updates, opt_state = tx.update(grads, state.opt_state, trained)
      params = merge(optax.apply_updates(trained, updates), frozen)
      if objective.stage.main and (objective.router_bias_rate or objective.switch_step):
        params = _balance(params, loads, objective.at('router_bias_rate', state.step))
      keep = lambda new, old: jnp.where(finite, new, old)  # noqa: E731
      params = jax.tree.map(keep, params, state.params)
      opt_state = jax.tree.map(keep, opt_state, state.opt_state)

    bad = 1 - finite.astype(jnp.int32)
    metrics |= {
      'grad_norm': grad_norm, 'lr': schedule(state.step - state.skipped), 'skipped': bad,
      'tokens': tokens,
    }  # fmt: skip
    if loads:
      load = jnp.concatenate([layer for stack in loads.values() for layer in stack.values()])
      metrics['load'] = load
      metrics['router_entropy'] = jnp.mean(entropy(load))
    state = dataclasses.replace(
      state, step=state.step + 1, skipped=state.skipped + bad, params=params, opt_state=opt_state
    )
    return state, metrics

  options = overlap_options(collectives.platform())
  return jax.jit(train_step, donate_argnums=0, compiler_options=options)


def entropy(load: jax.Array) -> jax.Array:
  """Entropy of loads [..., E] over that of an even load; 1 is even, 0 is one expert for all."""
  nats = -jnp.sum(load * jnp.log(jnp.maximum(load, 1e-9)), axis=-1)
  return nats / jnp.log(load.shape[-1])


def make_eval_step(
  config: ModelConfig,
  objective: Objective,
  recall: bool | None = None,
  mesh: Mesh | None = None,
) -> Callable[[Any, Batch], dict[str, jax.Array]]:
  """The jitted evaluation of one batch: sums, to be added over batches.

  Returns nll (nats), correct, tokens, mtp_nll and mtp_tokens [steps] (of the rows that
  `objective.mtp_fraction` names), valid (positions), and on request recall: per indexer layer the
  share of the dense attention mass that its selection holds (or would hold, where the attention is
  dense), times `valid` (add, then divide). By default, it is there if the stage trains the
  indexers. `mesh` is as in `make_train_step`.
  """
  recall = objective.stage.indexers if recall is None else recall
  recall = recall and config.attention == 'mla'

  def sums_of(params: Any, batch: Batch) -> dict[str, jax.Array]:
    out = forward(
      params, batch['tokens'], config=config, positions=batch['positions'],
      segment_ids=batch['segment_ids'], prefix=batch.get('prefix'),
      mtp_steps=objective.mtp_steps, mtp_rows=objective.mtp_rows(len(batch['tokens'])),
      options=Options(recall=recall, form='expanded'), logits=False,
    )  # fmt: skip

    factors = [1.0] * (1 + objective.mtp_steps)
    _, (main, *mtp) = _cross_entropies(params['lm_head'], out, batch, config, objective, factors)
    valid = jnp.sum(batch['segment_ids'] > 0, dtype=jnp.float32)
    valid = collectives.psum(valid, *collectives.TOKEN_AXES)
    sums = {'nll': main.nll, 'correct': main.correct, 'tokens': main.weight, 'valid': valid}
    if mtp:
      sums['mtp_nll'] = jnp.stack([m.nll for m in mtp])
      sums['mtp_tokens'] = jnp.stack([m.weight for m in mtp])
    per_layer = layer_aux(out, 'recall')
    if per_layer is not None:
      sums['recall'] = per_layer * valid
    return sums

  def eval_step(params: Any, batch: Batch) -> dict[str, jax.Array]:
    specs = (param_specs(params, mesh), BATCH)
    return collectives.on_mesh(sums_of, mesh, specs, PartitionSpec())(params, batch)

  return jax.jit(eval_step)
