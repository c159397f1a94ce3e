"""The forward pass against Hugging Face transformers (float32 goldens), tensor by tensor."""

import numpy as np
import pytest

from glm5_jax.modules.block import Options
from tests import oracle, tiny

LAYERS = range(4)
# In the left-padded golden of the plain model, layer 2 scores keys of this query exactly 0.0 at the
# boundary of the selection (ReLU), so which key is in is the implementation's choice. Tokens after
# it in that row may see the consequence.
TIED = (1, 38)


@pytest.fixture(scope='module')
def run(plain):
  """The plain model, compiled as users do."""
  return tiny.forward(
    plain.params, plain.ids, plain.config, options=Options(capture=True), fast=False
  )


@pytest.fixture(scope='module')
def layers(plain, run):
  return tiny.layers(plain.config, run.aux)


@pytest.fixture(scope='module')
def shared_run(index_share):
  return tiny.forward(
    index_share.params, index_share.ids, index_share.config, options=Options(capture=True)
  )


def hidden_states(config, run) -> list[np.ndarray]:
  """As transformers returns them: the embedding, each layer's output, the last one normalised."""
  outputs = [a['block_out'] for a in tiny.layers(config, run.aux)[:-1]]
  return [run.aux['embedded'], *outputs, run.hidden]


def test_oracle_agrees_with_the_goldens(plain):
  """The oracle is the reference of other tests, so it must reproduce the reference itself."""
  out = oracle.forward(plain.tensors, plain.raw, plain.ids)
  tiny.close('oracle logits', out['logits'], plain.reference['logits'], 1e-5)
  for i in LAYERS:
    assert (out['layers'][i]['selected'] == plain.reference[f'layer{i}.selected']).all()


def test_names_agree_with_the_checkpoint(plain):
  """load_hf, and the independent map of tests/tiny.py, give back the file bit by bit."""
  names = tiny.checkpoint_names(plain.params, plain.config)
  assert names.keys() == plain.tensors.keys()
  for name, want in plain.tensors.items():
    np.testing.assert_array_equal(names[name], want, err_msg=name)


def test_logits(plain, run):
  tiny.close('logits', run.logits, plain.reference['logits'], 1e-5)


def test_loss(plain, run):
  loss = oracle.cross_entropy(np.asarray(run.logits, np.float64)[:, :-1], plain.ids[:, 1:])
  tiny.close('loss', loss, plain.reference['loss'], 2e-6)


def test_hidden_states(plain, run):
  for i, hidden in enumerate(hidden_states(plain.config, run)):
    tiny.close(f'hidden state {i}', hidden, plain.reference[f'hidden{i}'], 1e-5)


@pytest.mark.parametrize('i', LAYERS)
def test_attention(plain, layers, i):
  want = {k: plain.reference[f'layer{i}.{k}'] for k in ('attn_in', 'attn_out', 'mlp_out')}
  tiny.close('attention input', layers[i]['attn_in'], want['attn_in'], 1e-5)
  tiny.close('attention output', layers[i]['attn_out'], want['attn_out'], 1e-5)
  probs = np.moveaxis(plain.reference[f'layer{i}.attn_probs'], 1, 2)
  tiny.close('attention probabilities', layers[i]['probs'], probs, 2e-6)


@pytest.mark.parametrize('i', LAYERS)
def test_index_scores_and_selection(plain, layers, i):
  want = plain.reference[f'layer{i}.index_scores']
  seen = np.isfinite(want)
  assert (seen == np.tri(48, dtype=bool)).all()
  tiny.close('index scores', layers[i]['index_scores'], np.where(seen, want, 0), 1e-5, where=seen)
  np.testing.assert_array_equal(layers[i]['selected'], plain.reference[f'layer{i}.selected'])
  assert layers[i]['selected'].sum(-1).max() == plain.config.index_topk  # DSA is active.


@pytest.mark.parametrize('i', LAYERS)
def test_feed_forward(plain, layers, i):
  tiny.close(
    'feed-forward output', layers[i]['mlp_out'], plain.reference[f'layer{i}.mlp_out'], 1e-5
  )
  if i < plain.config.first_k_dense_replace:
    return
  want = {k: plain.reference[f'layer{i}.router_{k}'] for k in ('logits', 'idx', 'w')}
  tiny.close('router logits', layers[i]['router_logits'], want['logits'], 1e-5)
  # transformers does not sort a token's experts; compare them in the order of their numbers.
  ours, theirs = np.argsort(layers[i]['router_experts'], 1), np.argsort(want['idx'], 1)
  np.testing.assert_array_equal(
    np.take_along_axis(layers[i]['router_experts'], ours, 1),
    np.take_along_axis(want['idx'], theirs, 1),
  )
  # w_i = c s_i / sum(s) with s = sigmoid(logits): an error d of the logits moves a weight by c d / 2 at
  # most (|ds| <= s d, and s_i (sum - s_i) / sum^2 <= 1 / 4). Its own rounding comes on top.
  d = np.abs(layers[i]['router_logits'] - want['logits']).max()
  tiny.close(
    'router weights', np.take_along_axis(layers[i]['router_weights'], ours, 1),
    np.take_along_axis(want['w'], theirs, 1), plain.config.routed_scaling_factor * d / 2 + 1e-6,
  )  # fmt: skip


def test_left_padding(plain):
  """Rows padded on the left, with positions from the first token, equal transformers'."""
  mask, positions = (plain.reference[f'{k}_leftpad'] for k in ('attention_mask', 'position_ids'))
  run = tiny.forward(
    plain.params, plain.ids, plain.config, segments=mask, positions=positions,
    options=Options(capture=True), fast=False,
  )  # fmt: skip
  layers = tiny.layers(plain.config, run.aux)
  valid = mask > 0
  comparable = valid.copy()
  comparable[TIED[0], TIED[1] :] = False
  tiny.close(
    'left-padded logits', run.logits, plain.reference['logits_leftpad'], 1e-5,
    where=comparable[..., None],
  )  # fmt: skip
  # With our rule, lowest index first, the oracle agrees everywhere.
  want = oracle.forward(plain.tensors, plain.raw, plain.ids, segments=mask, positions=positions)
  assert want['layers'][2]['index_scores'][TIED].tolist().count(0.0) > 1
  for i in LAYERS:
    np.testing.assert_array_equal(layers[i]['selected'], want['layers'][i]['selected'])
  tiny.close('left-padded logits, all', run.logits, want['logits'], 1e-5, where=valid[..., None])
  assert np.isfinite(run.logits).all()


def test_index_share(index_share, shared_run):
  reference = index_share.reference
  tiny.close('IndexShare logits', shared_run.logits, reference['logits'], 1e-5)
  for i, hidden in list(enumerate(hidden_states(index_share.config, shared_run)))[1:]:
    tiny.close(f'IndexShare hidden state {i}', hidden, reference[f'hidden{i}'], 1e-5)
  layers = tiny.layers(index_share.config, shared_run.aux)
  for i in LAYERS:
    used = np.zeros((2, 48, 48), bool)
    np.put_along_axis(used, reference[f'layer{i}.topk_used'].astype(int), True, axis=-1)
    np.testing.assert_array_equal(layers[i]['selected'], used & np.tri(48, dtype=bool))
    assert ('index_scores' in layers[i]) == (index_share.raw['indexer_types'][i] == 'full')
  loss = oracle.cross_entropy(
    np.asarray(shared_run.logits, np.float64)[:, :-1], index_share.ids[:, 1:]
  )
  tiny.close('IndexShare loss', loss, reference['loss'], 2e-6)


def test_index_share_left_padding(index_share):
  mask, positions = (
    index_share.reference[f'{k}_leftpad'] for k in ('attention_mask', 'position_ids')
  )
  run = tiny.forward(
    index_share.params, index_share.ids, index_share.config, segments=mask, positions=positions,
    options=Options(capture=True),
  )  # fmt: skip
  tiny.close(
    'IndexShare left-padded logits', run.logits, index_share.reference['logits_leftpad'], 1e-5,
    where=(mask > 0)[..., None],
  )  # fmt: skip
