"""What each stage of the recipe trains, by which losses and with which attention.

Models are small enough to look at every parameter; rows are longer than index_topk.
"""

import dataclasses
import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

from glm5_jax.losses import indexer_kl
from glm5_jax.modules import model
from glm5_jax.modules.block import Options
from glm5_jax.optim.build import build
from glm5_jax.train import loop, stages
from glm5_jax.train.checkpoint import CheckpointError
from glm5_jax.train.stages import Stage
from glm5_jax.train.state import TrainState
from glm5_jax.train.step import Numbers, Objective, loss_and_metrics, make_train_step
from tests import oracle, tiny

CONFIG = tiny.config()
ROWS, TIME = 2, 24
OPTIM = {
  'name': 'muon_split', 'schedule': 'linear', 'peak_lr': 5e-3, 'end_lr': 2e-4, 'warmup_steps': 0,
  'b1': 0.9, 'b2': 0.95, 'eps': 1e-8, 'weight_decay': 0.1, 'clip_norm': 1.0, 'momentum': 0.95,
  'nesterov': True, 'ns_dtype': 'float32', 'ns_chunk': 1 << 18,
}  # fmt: skip


def batch_of(seed: int = 0):
  """Two packed documents in each row and some padding."""
  tokens = tiny.tokens(CONFIG, ROWS, TIME + 1, seed)
  segments = np.array([[1] * 14 + [2] * 10, [1] * 20 + [0] * 4], np.int32)
  positions = np.array([[*range(14), *range(10)], [*range(20), 0, 0, 0, 0]], np.int32)
  return {
    'tokens': tokens[:, :-1], 'targets': tokens[:, 1:], 'segment_ids': segments,
    'weights': (segments > 0).astype(np.float32), 'positions': positions,
  }  # fmt: skip


def named(params) -> dict[str, np.ndarray]:
  leaves = jax.tree_util.tree_leaves_with_path(params)
  return {jax.tree_util.keystr(p, simple=True, separator='/'): np.asarray(x) for p, x in leaves}


def of_indexer(name: str) -> bool:
  return '/indexer/' in name


@functools.cache
def _compiled(stage_name: str, sparse: bool | None, extra: tuple[str, ...], objective: Objective):
  """The state before a stage's first step, and its compiled step for batches with `extra` scalars."""
  config = CONFIG if sparse is None else CONFIG.replace(sparse_attention=sparse)
  config, stage = stages.resolve(stage_name, config, sparse)
  objective = dataclasses.replace(objective, stage=stage)
  tx, schedule = build(OPTIM, steps=20)
  state = TrainState.create(tiny.random_params(CONFIG), tx, 0, stage)
  batch = batch_of() | {name: np.int32(0) for name in extra}
  step = make_train_step(config, objective, tx, schedule).lower(state, batch)
  return state, step.compile(compiler_options=tiny.FAST_COMPILE)


def run_steps(stage_name: str, batches, *, sparse=None, start=0, **objective):
  """Parameters before and after real steps of a stage, by name, the metrics, the optimizer's state."""
  extra = tuple(batches[0].keys() - batch_of().keys())
  state, step = _compiled(stage_name, sparse, extra, Objective(mtp_steps=2, **objective))
  before, metrics = named(state.params), []
  state = jax.tree.map(jnp.copy, state).replace(step=jnp.int32(start))  # A step eats its state.
  for batch in batches:
    state, measured = step(state, batch)
    metrics.append(jax.device_get(measured))
  return before, named(state.params), metrics, state.opt_state


# --- What changes over real steps ---


def test_warmup_changes_the_indexers_and_nothing_else():
  before, after, metrics, opt_state = run_steps(
    'dsa_warmup', [batch_of(i) for i in range(3)], switch_step=2
  )
  assert all(m['skipped'] == 0 and m['grad_norm'] > 0 for m in metrics)
  indexers = {name for name in before if of_indexer(name)}
  # Five parameters in each of the dense layer, the MoE layer and the MTP layer.
  assert len(indexers) == 15 and {n.split('/')[0] for n in indexers} == {'dense', 'moe', 'mtp'}
  for name, value in after.items():
    changed = (value != before[name]).any()
    assert changed == (name in indexers), f'{name}: changed is {changed}'
  # The learning rate falls as it should, and the optimizer has nothing of the main model.
  np.testing.assert_allclose(
    [m['lr'] for m in metrics], 5e-3 - (5e-3 - 2e-4) * np.arange(3) / 20, rtol=1e-6
  )
  held = sum(x.size for x in jax.tree.leaves(opt_state))
  trained = sum(before[n].size for n in indexers)
  assert trained <= held <= 2 * trained + 20 < sum(x.size for x in before.values())
  assert 'ce' not in metrics[0], 'the language-model loss is not even computed'


@pytest.mark.parametrize('stage', ['pretrain', 'midtrain'])
def test_dense_stages_leave_the_indexers_alone(stage):
  """Neither a gradient nor weight decay touches them, so that the warm-up finds them as drawn."""
  before, after, metrics, _ = run_steps(stage, [batch_of(0), batch_of(1)], sparse=False)
  for name, value in after.items():
    assert (value != before[name]).any() != of_indexer(name), name
  assert 'indexer_kl' not in metrics[0]


def test_the_sparse_stage_changes_everything():
  before, after, metrics, _ = run_steps('dsa_sparse', [batch_of(0), batch_of(1)])
  assert [n for n in after if not (after[n] != before[n]).any()] == []
  assert {'ce', 'mtp_ce', 'indexer_kl', 'balance_loss'} <= metrics[0].keys()


# --- Which loss reaches which parameter ---


@functools.partial(tiny.fast_jit, static_argnames=('config', 'stage', 'weight'))
def _gradient(params, batch, config, stage, weight):
  objective = Objective(stage, mtp_steps=2, indexer_loss_weight=weight, z_loss=1e-3)
  numbers = Numbers(jnp.full(3, 40.0))
  return jax.grad(lambda p: loss_and_metrics(p, batch, numbers, config, objective)[0])(params)


def gradients(stage: Stage, weight: float, sparse: bool = True):
  config = CONFIG.replace(sparse_attention=sparse)
  return named(_gradient(tiny.random_params(CONFIG), batch_of(), config, stage, weight))


@pytest.mark.parametrize('sparse', [False, True])
def test_the_kl_reaches_indexers_only(sparse):
  for name, gradient in gradients(Stage(main=False, indexers=True), 1.0, sparse).items():
    assert np.isfinite(gradient).all()
    assert gradient.any() == of_indexer(name), (
      f'the KL {"misses" if of_indexer(name) else "reaches"} {name}'
    )


def test_the_language_losses_never_reach_an_indexer():
  for name, gradient in gradients(Stage(main=True, indexers=False), 1.0).items():
    if name.endswith('router/bias'):
      assert not gradient.any(), 'the correction bias selects only'
    else:
      assert gradient.any() != of_indexer(name), name


def test_together_each_loss_has_its_own_parameters():
  """The joint gradient is one loss's on the indexers and the other's elsewhere, whatever the weight."""
  language = gradients(Stage(main=True, indexers=False), 1.0)
  kl = gradients(Stage(main=False, indexers=True), 1.0)
  for weight in (1.0, 0.01):
    for name, gradient in gradients(Stage(), weight).items():
      want = weight * kl[name] if of_indexer(name) else language[name]
      scale = max(float(np.max(np.abs(want))), 1e-6)
      assert float(np.max(np.abs(gradient - want))) <= 1e-5 * scale, name


# --- Against the float64 oracle ---


def _oracle_kl(params, batch, dense: bool) -> list[float]:
  """KL of each layer, the mean over the valid queries, in float64."""
  raw = CONFIG.to_hf() | tiny.IMPLIED
  out = oracle.forward(
    tiny.checkpoint_names(params, CONFIG), raw, batch['tokens'], segments=batch['segment_ids'],
    positions=batch['positions'], dense=dense,
  )  # fmt: skip
  valid = batch['segment_ids'] > 0
  return [float((layer['kl'] * valid).sum() / valid.sum()) for layer in out['layers']]


@pytest.mark.parametrize('name', ['dsa_warmup', 'dsa_sparse'])
def test_the_kl_of_a_stage_is_the_oracles(name):
  """Head-averaged attention against the index distribution: dense attention everywhere and all keys in
  the warm-up, sparse attention and the selected keys in the sparse stage."""
  config, stage = stages.resolve(name, CONFIG, None)
  objective = Objective(stage, mtp_steps=0, indexer_loss_weight=1.0)
  params, batch = tiny.random_params(CONFIG), batch_of()
  numbers = Numbers(jnp.full(1, 40.0))

  @tiny.fast_jit
  def kl(params):
    return loss_and_metrics(params, batch, numbers, config, objective)[1][0]['indexer_kl']

  dense, sparse = (np.mean(_oracle_kl(params, batch, d)) for d in (True, False))
  assert abs(dense - sparse) > 0.01, 'the two losses must be told apart'
  tiny.close(f'KL of {name}', kl(params), dense if name == 'dsa_warmup' else sparse, 2e-6)


def test_the_warmups_gradient_is_the_oracles():
  """Along the gradient itself, the float64 loss rises as fast as the gradient says."""
  params, batch = tiny.random_params(CONFIG), batch_of()
  found = _gradient(params, batch, CONFIG.replace(sparse_attention=False), Stage(False, True), 1.0)
  # Of the decoder's layers only: the oracle's MTP layer is not part of this loss.
  found = {k: v for k, v in found.items() if k != 'mtp'}
  params = {k: v for k, v in params.items() if k != 'mtp'}
  norm = float(optax.tree.norm(found))
  eps = 1e-4 / norm

  def moved(sign):
    wide = jax.tree.map(lambda p, g: np.float64(p) + sign * eps * np.float64(g), params, found)
    return sum(_oracle_kl(wide, batch, dense=True))

  slope = (moved(1) - moved(-1)) / (2 * eps)
  tiny.close('slope along the gradient, relative', slope / norm**2, 1.0, 2e-4)


def test_warmup_attention_is_truly_dense():
  """Bit for bit what a model without any indexer computes: all logits, and all keys have weight."""
  params, ids = tiny.random_params(CONFIG), tiny.tokens(CONFIG, 1, TIME)
  config, _ = stages.resolve('dsa_warmup', CONFIG.replace(index_topk=2), None)
  out = tiny.forward(params, ids, config, options=Options(indexer_loss=True, capture=True))
  for layer in tiny.layers(config, out.aux):
    assert (layer['selected'] == np.tri(TIME, dtype=bool)).all()
    seen = layer['probs'].mean(axis=2)  # Over the heads.
    assert ((seen > 0) == np.tri(TIME, dtype=bool)).all()
  other = jax.tree_util.tree_map_with_path(
    lambda path, x: x * 0 if any(k.key == 'indexer' for k in path) else x, params
  )
  without = tiny.forward(other, ids, config, options=Options(indexer_loss=True, capture=True))
  np.testing.assert_array_equal(out.logits, without.logits)
  sparse = tiny.forward(params, ids, config.replace(sparse_attention=True))
  assert float(jnp.max(jnp.abs(out.logits - sparse.logits))) > 0.1


# --- Gradual sparsity ---


@functools.partial(tiny.fast_jit, static_argnames='config')
def _at_k(params, ids, config, k):
  return model.forward(params, ids, config=config, topk=k, options=Options(True, capture=True))


def test_gradual_sparsity_begins_dense_and_ends_at_index_topk():
  params, ids = tiny.random_params(CONFIG), tiny.tokens(CONFIG, ROWS, TIME)
  dense = tiny.forward(params, ids, CONFIG.replace(sparse_attention=False), options=Options(True))
  final = tiny.forward(params, ids, CONFIG, options=Options(True, capture=True))
  begins, ends = (_at_k(params, ids, CONFIG, np.int32(k)) for k in (TIME, CONFIG.index_topk))
  tiny.close('logits with k = S and dense', begins.logits, dense.logits, 1e-5)
  tiny.close('logits with k = index_topk', ends.logits, final.logits, 1e-5)
  for stack in ('dense', 'moe'):
    a, b, c = (o.aux[stack]['block0'] for o in (begins, dense, ends))
    tiny.close('KL over all keys', a['kl'], b['kl'], 1e-6)
    np.testing.assert_array_equal(c['selected'], final.aux[stack]['block0']['selected'])
  previous = None
  for k in (TIME, 15, 10, CONFIG.index_topk):
    first = np.asarray(_at_k(params, ids, CONFIG, np.int32(k)).aux['dense']['block0']['selected'])
    assert (first.sum(-1) == np.minimum(np.arange(TIME) + 1, k)).all(), 'exactly k keys'
    assert previous is None or (first <= previous).all(), 'a smaller k keeps a subset'
    previous = first


def test_a_step_uses_the_k_of_its_batch():
  """One compiled step: with k = S its loss is the dense model's, with k = index_topk the sparse one's."""
  ce = {
    k: run_steps('dsa_sparse', [batch_of() | {'topk': np.int32(k)}])[2][0]['ce']
    for k in (TIME, CONFIG.index_topk)
  }
  dense = run_steps('pretrain', [batch_of()], sparse=False)[2][0]['ce']
  sparse = run_steps('dsa_sparse', [batch_of()])[2][0]['ce']
  assert abs(dense - sparse) > 1e-4
  tiny.close('loss at k = S', ce[TIME], dense, 2e-6)
  tiny.close('loss at k = index_topk', ce[CONFIG.index_topk], sparse, 2e-6)


# --- The switch of MTP weight and bias rate ---


def test_the_switch_of_mtp_weight_and_router_bias():
  """At step `switch_step` (0 is the first) the late values hold, and not before."""
  constants = {'mtp_weight': 0.3, 'late_mtp_weight': 0.1, 'balance_loss_weight': 0.0, 'z_loss': 0.0}
  rates = {'router_bias_rate': 1e-2, 'late_router_bias_rate': 0.0}
  biases = []
  for start, weight, rate in ((4, 0.3, 1e-2), (5, 0.1, 0.0), (6, 0.1, 0.0)):
    before, after, (m,), _ = run_steps(
      'midtrain', [batch_of()], sparse=False, start=start, switch_step=5, **constants, **rates
    )
    tiny.close(f'step {start}', m['loss'], m['ce'] + weight * np.mean(m['mtp_ce']), 1e-5)
    for name in (n for n in before if n.endswith('router/bias')):
      moved = np.abs(after[name] - before[name])
      biases.append(name)
      if rate:
        assert moved.any(), name
        np.testing.assert_allclose(moved[moved > 0], rate, rtol=1e-4)
      else:
        np.testing.assert_array_equal(moved, 0.0)
  assert len(set(biases)) == 2  # The MoE layer's and the MTP layer's.


def test_without_a_switch_the_first_values_hold_for_ever():
  objective = Objective(switch_step=0)
  assert (objective.at('mtp_weight', 10**9), objective.at('router_bias_rate', 10**9)) == (0.3, 1e-3)


# --- IndexShare ---


def test_kl_to_each_layer_is_kl_to_their_mean():
  """IndexShare: one indexer serves n layers. Summing its KL to each layer's attention has n times the
  gradient of the KL to the mean attention of the layers, and the same minimum."""
  rng = np.random.default_rng(0)
  mask = np.tri(7, dtype=bool)[None]
  scores = rng.standard_normal((1, 7, 7))
  layers = np.stack([oracle.softmax(rng.standard_normal((1, 7, 7)), mask) for _ in range(4)])

  def gradient(*targets):
    def loss(scores):
      return sum(indexer_kl.kl_per_query(scores, jnp.float32(t), mask).sum() for t in targets)

    return jax.grad(loss)(jnp.float32(scores))

  mean = layers.mean(axis=0)
  tiny.close('gradient of 4 KLs', gradient(*layers), 4 * gradient(mean), 2e-6)
  # Independently: d KL(p || softmax(s)) / ds = softmax(s) - p.
  tiny.close('gradient, float64', gradient(mean), oracle.softmax(scores, mask) - mean, 1e-6)
  best = np.where(mask, np.log(np.where(mask, mean, 1.0)), 0.0)
  tiny.close('minimum', jax.grad(lambda s: sum(
    indexer_kl.kl_per_query(s, jnp.float32(t), mask).sum() for t in layers))(jnp.float32(best)),
    np.zeros_like(best), 2e-6)  # fmt: skip


# --- What a person can get wrong ---


@pytest.mark.parametrize(
  'name, changes, asked, message',
  [
    ('pretraining', {}, None, r"unknown stage 'pretraining', known are \['pretrain'"),
    ('dsa_warmup', {}, True, 'dense attention: leave out model.sparse_attention=True'),
    ('dsa_sparse', {}, False, 'sparse attention: leave out model.sparse_attention=False'),
    ('dsa_warmup', {'attention': 'gqa'}, None, "needs model.attention='mla'"),
  ],
)
def test_stages_that_contradict_the_model(name, changes, asked, message):
  with pytest.raises(ValueError, match=message) as error:
    stages.resolve(name, CONFIG.replace(**changes), asked)
  assert '\n' not in str(error.value)


def test_what_the_stages_make_of_a_model():
  for name, asked, sparse, main, indexers in (
    ('pretrain', None, True, True, True),
    ('pretrain', False, False, True, False),
    ('midtrain', False, False, True, False),
    ('dsa_warmup', None, False, False, True),
    ('dsa_sparse', None, True, True, True),
  ):
    config = CONFIG if asked is None else CONFIG.replace(sparse_attention=asked)
    got, stage = stages.resolve(name, config, asked)
    assert (got.sparse_attention, stage) == (sparse, Stage(main, indexers)), name
    assert got.replace(sparse_attention=True) == CONFIG


@pytest.mark.parametrize(
  'key, value, message',
  [
    ('stage', 'pretraining', "unknown stage 'pretraining'"),
    ('stage', 'midtrain', "stage 'midtrain' continues a trained model: set --config.init_from"),
    ('train.indexer_loss_weight', 0.0, 'must be positive'),
    ('train.indexer_loss_weight', -1.0, 'train.indexer_loss_weight=-1.0 must be at least 0'),
    ('train.switch_step', -1, 'train.switch_step=-1 must be at least 0'),
    ('train.topk_anneal_steps', 99, 'below train.steps=40'),
    ('train.topk_anneal_steps', 5, 'this run has dense attention'),
    ('train.batch_warmup_steps', 5, 'go together'),
    ('train.mtp_fraction', 0.0, r'train.mtp_fraction=0.0 must be above 0 and at most 1'),
    ('train.mtp_fraction', 1.5, r'train.mtp_fraction=1.5 must be above 0 and at most 1'),
    ('train.mtp_steps', -1, 'train.mtp_steps=-1'),
    ('optim.peak_lr', 0.0, 'optim.peak_lr=0.0 must be positive'),
    ('init_from', '/no/such/run', 'init_from=/no/such/run does not exist'),
  ],
)
def test_bad_values_are_one_error_before_anything_is_written(
  tiny_config, tmp_path, key, value, message
):
  config = tiny_config
  config.stage, config.init_from = 'dsa_warmup', str(tmp_path)
  if value == 'midtrain':
    config.init_from = ''
  if value == 99:
    config.stage = 'dsa_sparse'
  config.update_from_flattened_dict({key: value})
  with pytest.raises((loop.ConfigError, CheckpointError), match=message) as error:
    loop.train(config, tmp_path / 'run')
  assert '\n' not in str(error.value) and not (tmp_path / 'run').exists()


def test_gradual_sparsity_needs_an_indexer_in_every_layer(tiny_config):
  tiny_config.model.indexer_types = ('full', 'shared')
  tiny_config.train.topk_anneal_steps = 5
  with pytest.raises(loop.ConfigError, match='needs every layer to have an indexer'):
    loop.prepare(tiny_config)
