"""Gradients of the language-model loss against torch autograd (goldens), parameter by parameter."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.modules import model
from glm5_jax.modules.block import Options
from tests import oracle, tiny

# 7 queries at a time: 48 is no multiple.
CHUNK_OF_7 = 7 * 2 * 48 * 4


@tiny.fast_jit(static_argnames=('config', 'options'))
def loss_and_gradients(params, ids, config, options=Options()):
  """As transformers computes it with labels = ids: mean over the T - 1 predictions of each row."""

  def loss(params):
    logits = model.forward(params, ids, config=config, options=options).logits
    log_probs = jax.nn.log_softmax(logits[:, :-1])
    return -jnp.mean(jnp.take_along_axis(log_probs, ids[:, 1:, None], axis=-1)), logits

  (value, logits), gradients = jax.value_and_grad(loss, has_aux=True)(params)
  return value, logits, gradients


def check(found, want: dict[str, np.ndarray], label: str):
  """Every gradient of the reference to 1e-4 of its largest entry; the rest must be exactly zero."""
  worst, worst_name = 0.0, ''
  for name, value in want.items():
    assert np.isfinite(found[name]).all(), f'{name} is not finite'
    error = np.max(np.abs(found[name] - value)) / np.max(np.abs(value))
    worst, worst_name = max((worst, worst_name), (float(error), name))
  print(f'[max] {label}, relative, {len(want)} tensors: {worst:.2e} in {worst_name}')
  assert worst < 1e-4, f'{worst_name}: off by {worst:.2e} of its largest entry'


def must_be_zero(found) -> list[str]:
  """What the loss must not reach: the indexer (detached, selection only), the correction bias."""
  names = [k for k in found if '.indexer.' in k or 'e_score_correction_bias' in k]
  for name in names:
    assert not found[name].any(), f'{name} has a gradient'
  return names


@pytest.fixture(scope='module')
def plain_run(plain):
  return loss_and_gradients(plain.params, jnp.asarray(plain.ids), plain.config)


def test_all_gradients(plain, plain_run):
  value, _, gradients = plain_run
  tiny.close('loss', value, plain.reference['loss'], 2e-6)
  found = tiny.fused(tiny.checkpoint_names(gradients, plain.config))
  want = {k.removeprefix('grad/'): v for k, v in plain.reference.items() if k.startswith('grad/')}
  check(found, want, 'gradients')
  # Nothing is left out: a parameter has a reference gradient, or must have none.
  assert found.keys() == want.keys() | set(must_be_zero(found))
  assert len(must_be_zero(found)) == 4 * 5 + 3


@pytest.mark.parametrize(
  ('remat', 'offload'), [('block', False), ('block', True), ('block_but_attention', True)]
)
def test_index_share_absorbed_chunked_rematerialised(index_share, remat, offload):
  """The other way through the code gives the same: latents attended to directly, 7 queries at a
  time, everything recomputed in the backward pass; and IndexShare's own gradients.
  """
  config = index_share.config.replace(
    attention_chunk_elements=CHUNK_OF_7, remat=remat, offload_inputs=offload
  )
  value, logits, gradients = loss_and_gradients(
    index_share.params, jnp.asarray(index_share.ids), config, Options(form='absorbed')
  )
  reference = index_share.reference
  tiny.close('IndexShare logits, absorbed and chunked', logits, reference['logits'], 1e-5)
  tiny.close('IndexShare loss, absorbed and chunked', value, reference['loss'], 2e-6)
  found = tiny.fused(tiny.checkpoint_names(gradients, config))
  want = {k.removeprefix('grad/'): v for k, v in reference.items() if k.startswith('grad/')}
  check(found, want, 'IndexShare gradients, absorbed and chunked')
  assert len(must_be_zero(found)) == 2 * 5 + 3


def test_directional_derivative(plain, plain_run):
  """The gradient also predicts how the oracle's float64 loss moves, in a direction that no single
  tensor dominates; it does not depend on torch.
  """
  rng = np.random.default_rng(5)
  gradients = tiny.checkpoint_names(plain_run[2], plain.config)
  step = {
    k: rng.standard_normal(v.shape) * np.std(v)
    for k, v in plain.tensors.items() if '.indexer.' not in k and 'correction_bias' not in k
  }  # fmt: skip
  epsilon = 1e-5

  def loss(sign):
    moved = {k: v + sign * epsilon * step.get(k, 0.0) for k, v in plain.tensors.items()}
    out = oracle.forward(moved, plain.raw, plain.ids)
    return oracle.cross_entropy(out['logits'][:, :-1], plain.ids[:, 1:])

  slope = (loss(+1) - loss(-1)) / (2 * epsilon)
  predicted = sum(float(np.vdot(gradients[k].astype(np.float64), d)) for k, d in step.items())
  assert abs(slope) > 0.1
  tiny.close_relative('directional derivative', predicted, slope, 1e-4)


def test_attention_that_is_kept_is_computed_once_less():
  """By the compiler's count: p v at least. Its q k^T may be one with that of the chunk's own backward pass."""

  def flops(remat):
    config = tiny.config(remat=remat, sparse_attention=False, num_hidden_layers=1)
    tokens = jax.ShapeDtypeStruct((1, 1024), 'i4')

    def total(params, tokens):
      return jnp.sum(model.forward(params, tokens, config=config, logits=False).hidden ** 2)

    lowered = tiny.fast_jit(jax.grad(total)).lower(model.abstract_params(config), tokens)
    return lowered.compile().cost_analysis()['flops']

  c = tiny.config()
  saved = flops('block') - flops('block_but_attention')
  assert saved >= 2 * 1024**2 * c.num_attention_heads * c.v_head_dim
