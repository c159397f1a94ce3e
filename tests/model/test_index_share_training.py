"""IndexShare (GLM-5.2): an indexer learns from the attention of every layer that uses its selection."""

import jax
import numpy as np
import pytest

from glm5_jax.modules import model
from glm5_jax.modules.block import Options
from tests import oracle, tiny


@pytest.mark.parametrize('sparse', [False, True])
def test_an_indexer_learns_from_all_layers_that_share_it(sparse):
  """Every layer has a KL, of its own attention to the scores of the indexer it uses.

  The gradient of their sum is that of the KL to the mean attention, times the number of layers
  (tests/train/test_stages.py).
  """
  config = tiny.config(
    num_hidden_layers=4, indexer_types=('full', 'full', 'shared', 'shared'), sparse_attention=sparse
  )
  params, ids = tiny.random_params(config), tiny.tokens(config, 2, 24)

  def loss(params):
    options = Options(indexer_loss=True, capture=True)
    out = model.forward(params, ids, config=config, options=options, logits=False)
    blocks = [a for s in config.stacks for a in out.aux[s.name].values()]
    return sum(a['kl'].sum() for a in blocks), out.aux

  (_, aux), gradient = tiny.fast_jit(jax.value_and_grad(loss, has_aux=True))(params)
  layers = tiny.layers(config, aux)
  for i, owner in enumerate((0, 1, 1, 1)):
    mask = layers[owner]['selected']
    scores = oracle.softmax(layers[owner]['index_scores'], mask)
    attention = layers[i]['probs'].astype(np.float64).mean(2)
    ratio = np.log(np.where(attention > 0, attention, 1)) - np.log(np.where(scores > 0, scores, 1))
    expected = np.sum(attention * ratio, -1).mean()
    np.testing.assert_allclose(layers[i]['kl'], expected, rtol=1e-4, atol=1e-6)
    if sparse:
      np.testing.assert_array_equal(layers[i]['selected'], mask)
  for path, leaf in jax.tree_util.tree_leaves_with_path(gradient):
    name = jax.tree_util.keystr(path)
    assert bool(np.any(leaf)) == ('indexer' in name and 'mtp' not in name), name
