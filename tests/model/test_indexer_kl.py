"""Both DSA training losses against torch (goldens): values, targets, scores and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.losses import indexer_kl
from glm5_jax.modules import model
from glm5_jax.modules.block import Options
from glm5_jax.ops import collectives
from tests import oracle, tiny


@tiny.fast_jit(static_argnames='config')
def run(params, ids, config):
  """The auxiliary outputs, and the gradients of the sum over layers of the indexer loss."""
  options = Options(indexer_loss=True, recall=config.sparse_attention, form='expanded')

  def loss(params):
    aux = model.forward(params, ids, config=config, options=options, logits=False).aux
    kl = [aux[s.name][f'block{j}']['kl'] for s in config.stacks for j in range(len(s.blocks))]
    return sum(jnp.sum(k) for k in kl), aux

  (_, aux), gradients = jax.value_and_grad(loss, has_aux=True)(params)
  return aux, gradients


@pytest.mark.parametrize('stage', ['dense', 'sparse'])
def test_loss_and_gradients(plain, stage):
  """In the dense stage the main attention is dense too, in every layer, as the paper has it: with a
  sparse one the losses of the later layers would differ by 0.05 and more.
  """
  reference = tiny.golden('tiny_kl')
  config = plain.config.replace(sparse_attention=stage == 'sparse')
  aux, gradients = run(plain.params, jnp.asarray(reference['input_ids'], jnp.int32), config)
  expected = oracle.forward(
    plain.tensors, plain.raw, reference['input_ids'], dense=stage == 'dense'
  )
  for i, layer in enumerate(tiny.layers(config, aux)):
    out = expected['layers'][i]
    tiny.close(f'{stage} KL of layer {i}', layer['kl'], reference[f'{stage}.loss{i}'], 1e-6)
    tiny.close(f'{stage} KL of layer {i}, oracle', layer['kl'], out['kl'].mean(), 1e-6)
    if stage == 'sparse':  # Recall: the share of dense attention's mass that the k best keys hold.
      mass = (out['dense_probs'].mean(1) * out['selected']).sum(-1).mean()
      tiny.close(f'recall of layer {i}', layer['recall'], mass, 1e-6)
      assert 0.5 < mass < 0.999

  found = tiny.checkpoint_names(gradients, config)
  prefix = f'{stage}.grad/'
  want = {k.removeprefix(prefix): v for k, v in reference.items() if k.startswith(prefix)}
  assert len(want) == 4 * 5
  worst = 0.0
  for name, gradient in found.items():
    assert np.isfinite(gradient).all(), name
    if name in want:
      error = float(np.max(np.abs(gradient - want[name])) / np.max(np.abs(want[name])))
      assert error < 1e-4, f'{name}: {error:.1e}'
      worst = max(worst, error)
    else:  # The loss trains the indexer only, in both stages.
      assert not gradient.any(), f'the indexer loss reaches {name}'
  print(f'[max] {stage} KL gradients, relative, 20 tensors: {worst:.2e}')


def test_closed_form_on_hand_made_rows():
  """A row that matches has loss 0; empty rows and single keys too; the gradient is q - p."""
  scores = jnp.array([[[0.0, 1.0, 2.0, 50.0], [3.0, -7.0, 0.0, 0.0], [1.0, 2.0, 3.0, 4.0]]])
  mask = jnp.array([[[True, True, True, False], [True, False, False, False], [False] * 4]])
  matching = oracle.softmax(np.asarray(scores), np.asarray(mask))
  per_query = jax.jit(indexer_kl.kl_per_query)
  np.testing.assert_allclose(per_query(scores, matching.astype('f4'), mask), 0, atol=1e-6)

  target = jnp.array([[[0.5, 0.5, 0.0, 0.0], [1.0, 0.0, 0.0, 0.0], [0.0] * 4]])
  kl = per_query(scores, target, mask)
  q = matching[0, 0]
  want = 0.5 * np.log(0.5 / q[0]) + 0.5 * np.log(0.5 / q[1])
  np.testing.assert_allclose(kl[0], [want, 0, 0], atol=1e-6)
  gradient = jax.jit(jax.grad(lambda s: indexer_kl.kl_per_query(s, target, mask).sum()))(scores)
  np.testing.assert_allclose(gradient[0, 0], (q - np.asarray(target[0, 0])) * mask[0, 0], atol=1e-6)
  np.testing.assert_array_equal(gradient[0, 1:], 0)


def test_mean_counts_valid_queries_only():
  kl = jnp.array([[1.0, 2.0, 100.0], [3.0, jnp.float32(1e9), 100.0]])
  valid = jnp.array([[True, True, False], [True, False, False]])
  assert float(collectives.token_mean(kl, valid)) == pytest.approx(2.0)
  assert float(collectives.token_mean(kl, jnp.zeros_like(valid))) == 0.0
