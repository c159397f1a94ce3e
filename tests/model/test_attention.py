"""Sparse attention's two forms and its query chunks are one function: values and gradients."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.ops import chunks, indexer, mla, sparse_attention, topk
from glm5_jax.shapes import Keys
from tests import oracle, tiny

CONFIG = tiny.config(index_topk=6)
BATCH, TIME = 2, 21
# Two documents and padding; one document after left padding.
SEGMENTS = np.array([[1] * 9 + [2] * 10 + [0] * 2, [0] * 3 + [1] * 18], 'i4')
CHUNK_OF_4 = 4 * BATCH * TIME * CONFIG.num_attention_heads


def inputs(seed=0):
  """Projections of random hidden states, everything that gradients flow into; and the keys."""
  c, rng = CONFIG, np.random.default_rng(seed)

  def draw(*shape):
    return jnp.asarray(rng.standard_normal((*shape,)), jnp.float32)

  heads, nope, rope = c.num_attention_heads, c.qk_nope_head_dim, c.qk_rope_head_dim
  q = mla.Queries(
    draw(BATCH, TIME, heads, nope), draw(BATCH, TIME, heads, rope), draw(BATCH, TIME, c.q_lora_rank)
  )
  latents = mla.Latents(draw(BATCH, TIME, c.kv_lora_rank), draw(BATCH, TIME, rope))
  index = sparse_attention.Index(
    indexer.Queries(
      draw(BATCH, TIME, c.index_n_heads, c.index_head_dim), draw(BATCH, TIME, c.index_n_heads)
    ),
    draw(BATCH, TIME, c.index_head_dim),
  )
  p = {
    'w_uk': 0.3 * draw(c.kv_lora_rank, heads, nope),
    'w_uv': 0.3 * draw(c.kv_lora_rank, heads, c.v_head_dim),
  }
  slots = np.broadcast_to(np.arange(TIME, dtype='i4'), (BATCH, TIME))
  return (p, q, latents, index), Keys(slots, SEGMENTS, SEGMENTS)


@tiny.fast_jit(static_argnames=('config', 'form', 'request'))
def run(arrays, keys, config, form, request):
  """Outputs, and gradients of a random projection of attention output and indexer loss."""
  weigh_out, weigh_kl = (jax.random.normal(jax.random.key(s), (BATCH, TIME)) for s in (1, 2))

  def loss(arrays):
    p, q, latents, index = arrays
    out, aux = sparse_attention.attend(p, q, latents, keys, index, None, config, request, form)
    flat = out.reshape(BATCH, TIME, -1)
    total = jnp.sum(jnp.sin(jnp.arange(flat.shape[-1])) * flat * weigh_out[..., None])
    return total + jnp.sum(aux['kl'] * weigh_kl), (out, aux)

  (_, result), gradients = jax.value_and_grad(loss, has_aux=True)(arrays)
  return result, gradients


def attend(form, chunk=None, sparse=True):
  arrays, keys = inputs()
  config = CONFIG.replace(sparse_attention=sparse)
  if chunk:
    config = config.replace(attention_chunk_elements=chunk)
  request = sparse_attention.Request(kl=True, selection=True, recall=form == 'expanded')
  return run(arrays, keys, config, form, request)


@pytest.fixture(scope='module')
def reference():
  return {sparse: attend('expanded', sparse=sparse) for sparse in (True, False)}


@pytest.mark.parametrize(
  'form, chunk, sparse',
  [
    ('absorbed', None, True),  # Gathers the selected rows.
    ('absorbed', CHUNK_OF_4, True),
    ('expanded', CHUNK_OF_4, True),
    ('absorbed', CHUNK_OF_4, False),
  ],
)
def test_forms_and_chunks_agree(reference, form, chunk, sparse):
  (out, aux), gradients = attend(form, chunk, sparse)
  (want, want_aux), want_gradients = reference[sparse]
  tiny.close('attention output', out, want, 5e-6)
  assert aux.keys() == want_aux.keys() - ({'recall'} if form == 'absorbed' else set())
  for name in aux.keys() - {'selection'}:
    tiny.close(name, aux[name], want_aux[name], 5e-6)
  valid = SEGMENTS > 0
  np.testing.assert_array_equal(aux['selection'][valid], want_aux['selection'][valid])
  for path, value in jax.tree_util.tree_leaves_with_path(gradients):
    expected = dict(jax.tree_util.tree_leaves_with_path(want_gradients))[path]
    if '.latent' in jax.tree_util.keystr(path):
      continue  # The query latent feeds the indexer only, before this function.
    tiny.close_relative(f'gradient of {jax.tree_util.keystr(path)}', value, expected, 2e-5)


@pytest.mark.parametrize('sparse', [True, False])
def test_the_reference_is_plain_attention(reference, sparse):
  """Against a softmax over explicitly masked scores, in float64."""
  (p, q, latents, index), keys = inputs()
  p, q, latents, index = jax.tree.map(lambda a: np.asarray(a, 'f8'), (p, q, latents, index))
  k = np.einsum('bsl,lnh->bsnh', latents.c, p['w_uk'])
  logits = np.einsum('btnh,bsnh->bnts', q.nope, k)
  logits += np.einsum('btnh,bsh->bnts', q.rope, latents.k_rope)
  visible = (SEGMENTS[:, :, None] == SEGMENTS[:, None]) & (SEGMENTS[:, None] > 0)
  visible &= np.tri(TIME, dtype=bool)
  np.testing.assert_array_equal(keys.visible(), visible)
  scores = np.einsum('btis,bti->bts', np.maximum(
    np.einsum('btij,bsj->btis', index.queries.q, index.keys), 0), index.queries.w)  # fmt: skip
  selected = oracle.top_k_mask(scores, visible, CONFIG.index_topk)
  mask = selected if sparse else visible
  probs = oracle.softmax(logits * CONFIG.attention_scale, mask[:, None])
  want = np.einsum('bnts,bsl,lnh->btnh', probs, latents.c, p['w_uv'])
  (out, aux), _ = reference[sparse]
  tiny.close('attention output', out, want, 5e-6)
  dense = oracle.softmax(logits * CONFIG.attention_scale, visible[:, None]).mean(1)
  # With dense attention: what the indexer would select, and what of the mass that would hold.
  tiny.close('recall', aux['recall'], (dense * selected).sum(-1), 2e-6)
  # The selection, as IndexShare hands it on: ascending, -1 where fewer keys are visible.
  for row in np.ndindex(BATCH, TIME):
    found = np.flatnonzero(selected[row]).tolist()
    assert aux['selection'][row].tolist() == found + [-1] * (CONFIG.index_topk - len(found))
  assert not out[SEGMENTS == 0].any()  # A query that sees nothing yields nothing, not NaN.


def test_no_gradient_reaches_the_indexer_through_the_selection(reference):
  """Attention's own loss leaves index queries and keys alone (top-k is not differentiable)."""
  (p, q, latents, index), keys = inputs()

  def loss(index):
    out, _ = sparse_attention.attend(p, q, latents, keys, index, None, CONFIG, form='expanded')
    return jnp.sum(out**2)

  for gradient in jax.tree.leaves(tiny.fast_jit(jax.grad(loss))(index)):
    assert not np.asarray(gradient).any()


@pytest.mark.parametrize('budget', [1, 5, 40, 10**9])
def test_chunks_cover_every_query_once(budget):
  """Any chunk size, also one that does not divide the length; chunks really are that small."""
  x = jnp.arange(2 * 17 * 3.0).reshape(2, 17, 3)
  seen = []

  def one(inputs):
    a, nothing = inputs
    assert nothing is None
    seen.append(a.shape[1])
    return a * 2, {'sum': a.sum(-1)}

  doubled, rest = chunks.over_queries(one, (x, None), 17, 5, budget)
  np.testing.assert_array_equal(doubled, 2 * x)
  np.testing.assert_array_equal(rest['sum'], x.sum(-1))
  assert set(seen) == {min(17, max(1, budget // 5))}


def test_the_form_follows_the_shapes():
  c = tiny.config(index_topk=8)
  assert sparse_attention.choose_form(c, 48, 48) == 'expanded'  # Training, prefill.
  assert sparse_attention.choose_form(c, 1, 48) == 'absorbed'  # Decoding.
  assert sparse_attention.choose_form(c, 64, 64) == 'absorbed'  # S of many times k: gather.
  dense = c.replace(sparse_attention=False)
  assert sparse_attention.choose_form(dense, 4096, 4096) == 'expanded'


def test_round_trip_of_the_shared_selection(reference):
  """A layer that is given another's selection attends exactly to that."""
  (p, q, latents, _), keys = inputs()
  (want, aux), _ = reference[True]

  @tiny.fast_jit
  def shared(p, q, latents, keys, selection):
    return sparse_attention.attend(p, q, latents, keys, None, selection, CONFIG, form='expanded')[0]

  out = shared(p, q, latents, keys, aux['selection'])
  tiny.close('attention output', out, want, 5e-6)
  mask = topk.indices_to_mask(aux['selection'], TIME)
  np.testing.assert_array_equal(topk.mask_to_indices(mask, CONFIG.index_topk), aux['selection'])
