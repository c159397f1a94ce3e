"""The model with its sparse attention computed by the Pallas kernels, interpreted: the same model."""

import collections

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu
from jax.interpreters import partial_eval as pe

from glm5_jax import kernels
from glm5_jax.modules import model
from glm5_jax.modules.block import Options
from glm5_jax.ops import sparse_attention
from glm5_jax.train.stages import Stage, merge
from tests import tiny

ATTEND = kernels.interpreted(pltpu.InterpretParams())
# Two documents and padding in one row, one and a half in the other; more keys than index_topk.
SEGMENTS = np.array([[1] * 4 + [2] * 11 + [0], [1] * 14 + [2] * 2], np.int32)


def test_goldens_pass_through_the_kernels(plain):
  run = tiny.forward(plain.params, plain.ids, plain.config, options=Options(attend=ATTEND))
  tiny.close('logits by kernels', run.logits, plain.reference['logits'], 1e-5)


def _loss_and_gradients(config, params, attend, indexer_loss=True):
  """A loss that every output has a part in: random weights on the logits, MTP's, and the indexers' KL."""
  ids = jnp.asarray(tiny.tokens(config, 2, SEGMENTS.shape[1]))
  key = jax.random.key(0)

  @tiny.fast_jit
  def run(params):
    def loss(params):
      out = model.forward(
        params, ids, config=config, segment_ids=jnp.asarray(SEGMENTS), mtp_steps=1,
        options=Options(indexer_loss=indexer_loss, attend=attend),
      )  # fmt: skip
      kl = sum(jnp.sum(block['kl']) for stack in out.aux.values() for block in _blocks(stack)) + 0.0
      parts = [out.logits, out.mtp_logits]
      heads = [jnp.mean(jax.random.normal(key, x.shape) * x) for x in parts]
      return sum(heads) + 0.1 * kl, kl

    return jax.value_and_grad(loss, has_aux=True)(params)

  (loss, kl), gradients = run(params)
  return float(loss), float(kl), tiny.checkpoint_names(gradients, config)


def _blocks(stack):
  blocks = [stack] if 'kl' in stack else stack.values()
  return [block for block in blocks if isinstance(block, dict) and 'kl' in block]


@pytest.mark.parametrize(
  'changes',
  [
    {'indexer_types': ('full', 'shared')},
    {'sparse_attention': False},
  ],
  ids=['sparse', 'dense'],
)
def test_loss_and_gradients_equal_the_references(changes):
  """Every parameter's gradient, the indexers' included: a full layer, one that shares its selection
  (IndexShare), and an MTP step, over packed documents. And with dense attention, as in the warm-up."""
  config = tiny.config(**changes)
  params = tiny.random_params(config)
  want = _loss_and_gradients(config, params, sparse_attention.attend)
  got = _loss_and_gradients(config, params, ATTEND)
  assert want[1] > 0.1  # The KL has something to say.
  tiny.close_relative('KL', got[1], want[1], 1e-5)
  _equal(got, want)


def _equal(got, want):
  tiny.close_relative('loss', got[0], want[0], 1e-5)
  for name, gradient in want[2].items():
    # Zero for experts that got no token, and for the router's bias.
    scale = max(float(np.max(np.abs(gradient))), 1e-6)
    tiny.close(name, got[2][name] / scale, gradient / scale, 1e-4)


@pytest.mark.parametrize('remat', ['none', 'block', 'block_but_attention'])
def test_dense_attention_a_head_at_a_time(remat, monkeypatch):
  """As with rows so long that not all heads' keys fit, whatever of a layer is computed again."""
  config = tiny.config(sparse_attention=False, remat=remat)
  params = tiny.random_params(config)
  want = _loss_and_gradients(config, params, sparse_attention.attend, indexer_loss=False)
  monkeypatch.setattr(kernels, 'EXPANDED_ELEMENTS', 1)
  # The interpreter with effects cannot be rematerialised; splash has none.
  got = _loss_and_gradients(config, params, kernels.interpreted(True), indexer_loss=False)
  _equal(got, want)


def _kernels_of(jaxpr, found):
  """Counts the names of the kernels that are called."""
  for equation in jaxpr.eqns:
    if equation.primitive.name == 'pallas_call':
      found[equation.params['name']] += 1
    for value in equation.params.values():
      for inner in value if isinstance(value, (tuple, list)) else [value]:
        inner = getattr(inner, 'jaxpr', inner)
        if hasattr(inner, 'eqns'):
          _kernels_of(inner, found)
  return found


@pytest.mark.parametrize('groups', [False, True], ids=['all heads', 'a head at a time'])
def test_the_warm_up_passes_over_all_keys_once_for_each_thing(groups, monkeypatch):
  """Layers are computed again, but neither attention (nothing of it is trained) nor the KL."""
  config = tiny.config(sparse_attention=False, remat='block')
  if groups:
    monkeypatch.setattr(kernels, 'EXPANDED_ELEMENTS', 1)
  trained, frozen = Stage(main=False).split(tiny.random_params(config))
  ids = jnp.asarray(tiny.tokens(config, 1, 16))

  def loss(trained):
    options = Options(indexer_loss=True, attend=kernels.attend)
    params = merge(trained, frozen)
    out = model.forward(params, ids, config=config, options=options, logits=False)
    return sum(jnp.sum(block['kl']) for stack in out.aux.values() for block in _blocks(stack))

  jaxpr = jax.make_jaxpr(jax.value_and_grad(loss))(trained).jaxpr
  jaxpr, _ = pe.dce_jaxpr(jaxpr, [True] * len(jaxpr.outvars))
  stacks = 2  # Of dense layers and of MoE layers, each one scan.
  assert _kernels_of(jaxpr, collections.Counter()) == {
    'splash_mha_fwd_segmented_residuals': stacks, 'indexer_kl_forward': stacks,
    'indexer_kl_backward': stacks,
  }  # fmt: skip


def test_bfloat16_is_as_far_from_float32_as_the_references_is():
  """Rounding differs, its size does not: within 1.5 times the reference's own distance."""
  exact = tiny.config()
  params = tiny.random_params(exact)
  config = exact.replace(dtype='bfloat16')
  ids = tiny.tokens(exact, 2, SEGMENTS.shape[1])

  def logits(config, attend):
    run = tiny.forward(params, ids, config, segments=SEGMENTS, options=Options(attend=attend))
    return np.asarray(run.logits)[SEGMENTS > 0]

  want = logits(exact, sparse_attention.attend)
  error = {
    name: float(np.sqrt(np.mean((logits(config, attend) - want) ** 2)))
    for name, attend in (('reference', sparse_attention.attend), ('kernels', ATTEND))
  }
  print(f'[bf16] root mean square error of the logits: {error}')
  assert error['kernels'] < 1.5 * error['reference']


@pytest.mark.parametrize(
  ('changes', 'options', 'named'),
  [
    (
      {'sparse_attention': False, 'indexer_types': ('full', 'shared')},
      {},
      'dense attention with IndexShare',
    ),
    ({}, {'recall': True}, 'recall'),
    ({}, {'capture': True}, 'captured scores'),
    ({}, {'form': 'absorbed'}, 'a form'),
  ],
)
def test_what_kernels_do_not_do_is_said(changes, options, named):
  config = tiny.config(**changes)
  with pytest.raises(ValueError, match=f"do not do {named}: use kernels='reference'"):
    tiny.forward(
      tiny.random_params(config), tiny.tokens(config, 1, 12), config,
      options=Options(attend=ATTEND, **options),
    )  # fmt: skip


def test_dense_kernels_are_causal():
  config = tiny.config(sparse_attention=False)
  ids = jnp.asarray(tiny.tokens(config, 1, 12))
  with pytest.raises(ValueError, match="infilling needs kernels='reference'"):
    model.forward(
      tiny.random_params(config), ids, config=config, prefix=jnp.full_like(ids, 4),
      options=Options(attend=ATTEND),
    )  # fmt: skip


def test_unknown_implementation():
  with pytest.raises(ValueError, match="'reference' or 'pallas', got 'cuda'"):
    kernels.attention('cuda')
