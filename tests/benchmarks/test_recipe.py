"""What the evidence for the recipe is measured with, against dense float64 and plain loops."""

import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from benchmarks.recipe import attention, balance, mtp, needle, runs, window
from benchmarks.recipe.logits import logit_maxima
from glm5_jax.data import ByteTokenizer
from glm5_jax.modules.block import Options
from tests import oracle, tiny
from tests.infer.test_speculative import foreseen

DENSE = dict(sparse_attention=False, num_hidden_layers=3)
TIME = 21


def batch_of(config, rows=2, time=TIME):
  """Two documents and padding in the first row, one document in the others."""
  segments = np.ones((rows, time), np.int32)
  segments[0, 8:] = 2
  segments[0, 18:] = 0
  positions = np.tile(np.arange(time, dtype=np.int32), (rows, 1))
  positions[0, 8:] -= 8
  tokens = tiny.tokens(config, rows, time)
  return {'tokens': tokens, 'positions': positions, 'segment_ids': segments}


def visible(segments):
  same = (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
  return same & np.tri(segments.shape[1], dtype=bool)


def by_layer(params, config):
  """Checkpoint tensors in float64, of the model and of each layer, and the config's fields."""
  tensors = tiny.checkpoint_names(params, config)
  tensors = {k: np.asarray(v, np.float64) for k, v in tensors.items()}
  prefixes = [f'model.layers.{i}.' for i in range(config.num_hidden_layers)]
  layers = [{k.removeprefix(p): v for k, v in tensors.items() if k.startswith(p)} for p in prefixes]
  return tensors, layers, config.to_hf() | tiny.IMPLIED


def jitted(f, *static):
  return tiny.fast_jit(f.__wrapped__, static_argnames=static)


# --- Attention logits ---


def test_logit_maxima_of_mla():
  config = tiny.config(**DENSE)
  params, batch = tiny.random_params(config), batch_of(config)
  got = jitted(logit_maxima, 'config')(params, batch, config)
  tensors, layers, raw = by_layer(params, config)
  sees, positions = visible(batch['segment_ids']), batch['positions']
  out = oracle.forward(
    tensors, raw, batch['tokens'], segments=batch['segment_ids'], positions=positions, dense=True
  )
  frequency, heads = oracle.rope_frequencies(raw), config.num_attention_heads
  nope, rank = config.qk_nope_head_dim, config.kv_lora_rank
  want = np.full((3, heads), -np.inf)
  for i, (w, layer) in enumerate(zip(layers, out['layers'], strict=True)):
    n = layer['attn_in']
    q = oracle.rms_norm(
      n @ w['self_attn.q_a_proj.weight'].T, w['self_attn.q_a_layernorm.weight'], 1e-6
    )
    q = (q @ w['self_attn.q_b_proj.weight'].T).reshape(*n.shape[:2], heads, -1)
    kv = n @ w['self_attn.kv_a_proj_with_mqa.weight'].T
    k_rope = oracle.rotate(kv[:, :, None, rank:], positions, frequency, 'interleaved')
    c = oracle.rms_norm(kv[..., :rank], w['self_attn.kv_a_layernorm.weight'], 1e-6)
    k = (c @ w['self_attn.kv_b_proj.weight'].T).reshape(*n.shape[:2], heads, -1)[..., :nope]
    q_rope = oracle.rotate(q[..., nope:], positions, frequency, 'interleaved')
    for b, t, s in np.argwhere(sees):
      for h in range(heads):
        logit = q[b, t, h, :nope] @ k[b, s, h] + q_rope[b, t, h] @ k_rope[b, s, 0]
        want[i, h] = max(want[i, h], logit / np.sqrt(config.qk_head_dim))
  tiny.close_relative('largest logits', got, want, 1e-5)


def test_logit_maxima_of_gqa():
  config = tiny.config(attention='gqa', **DENSE)
  params, batch = tiny.random_params(config), batch_of(config)
  got = jitted(logit_maxima, 'config')(params, batch, config)
  out = tiny.forward(
    params, batch['tokens'], config, segments=batch['segment_ids'], positions=batch['positions'],
    options=Options(capture=True),
  )  # fmt: skip
  sees, positions = visible(batch['segment_ids']), batch['positions']
  frequency = np.array([1e4 ** (-2 * i / 6) for i in range(3)])
  want = []
  for stack, repeat in (('dense', 0), ('moe', 0), ('moe', 1)):
    n = np.asarray(out.aux[stack]['block0']['attn_in'][repeat], np.float64)
    p = {k: np.asarray(v[repeat], np.float64) for k, v in params[stack]['block0']['attn'].items()}
    q, k = (
      oracle.rms_norm(np.einsum('btd,dhe->bthe', n, p[f'w_{x}']), p[f'{x}_norm'], 1e-5)
      for x in 'qk'
    )
    q, k = (
      np.concatenate(
        [x[..., :10], oracle.rotate(x[..., 10:], positions, frequency, 'interleaved')], -1
      )
      for x in (q, k)
    )
    # Four heads, two groups: heads 0 and 1 have the keys of group 0.
    logits = [np.einsum('bte,bse->bts', q[:, :, h], k[:, :, h // 2]) / 4 for h in range(4)]
    want.append([x[sees].max() for x in logits])
  tiny.close_relative('largest logits', got, want, 1e-5)


def test_logits_of_a_sparse_model_are_refused():
  config = tiny.config()
  with pytest.raises(ValueError, match='sparse_attention=False'):
    logit_maxima(None, {}, config)


# --- Windows ---


def test_window_positions():
  got = np.asarray(window.window_positions(7, 3))
  for t, row in enumerate(got):
    assert [s for s in row if s >= 0] == list(range(max(0, t - 2), t + 1))


def test_windows_in_some_layers():
  config = tiny.config(**DENSE)
  params, batch = tiny.random_params(config), batch_of(config)
  run = tiny.fast_jit(window.hidden_states, static_argnames=('config', 'windowed', 'window'))
  got = run(params, batch, config, windowed=(0, 2), window=4)
  tensors, layers, raw = by_layer(params, config)
  everything = visible(batch['segment_ids'])
  age = np.arange(TIME)[:, None] - np.arange(TIME)
  x = tensors['model.embed_tokens.weight'][batch['tokens']]
  for i, w in enumerate(layers):
    sees = everything & (age < 4) if i in (0, 2) else everything
    x, _ = oracle.block(w, raw, x, sees, batch['positions'], None, dense=True)
  want = oracle.rms_norm(x, tensors['model.norm.weight'], config.rms_norm_eps)
  valid = batch['segment_ids'][:, :, None] > 0
  tiny.close('hidden states', got, want, 1e-4, where=valid)


def test_no_window_is_the_dense_model():
  config = tiny.config(**DENSE)
  params, batch = tiny.random_params(config), batch_of(config)
  run = tiny.fast_jit(window.hidden_states, static_argnames=('config', 'windowed', 'window'))
  got = run(params, batch, config, windowed=(), window=4)
  want = tiny.forward(
    params, batch['tokens'], config, segments=batch['segment_ids'], positions=batch['positions']
  )
  tiny.close('hidden states', got, want.hidden, 1e-5)


# --- Needles ---

TEXT = b'\n'.join(b'def func_%d(a, b): return a + b' % i for i in range(9)) + b'\nx = 1\n'


def needles_of(kind):
  # A byte is a token, so lines are short enough only if they have at most 32 characters.
  tokenizer = ByteTokenizer()
  if kind == 'secret':
    return tokenizer, needle.secrets(tokenizer, 3, seed=0)
  return tokenizer, needle.quotes(tokenizer, [TEXT], 3, seed=0)


@pytest.mark.parametrize('kind', ['secret', 'quote'])
@pytest.mark.parametrize('distance', [40, 90])
def test_rows_hold_the_needle_where_they_say(kind, distance):
  tokenizer, needles = needles_of(kind)
  filler = np.random.default_rng(0).integers(97, 123, (3, 161)).astype(np.int32)
  rows = needle.rows(needles, filler, distance)
  without = needle.rows(needles, filler, None)
  assert rows.tokens.shape == (3, 160)
  for i, (question, answer, _) in enumerate(needles):
    row = [*rows.tokens[i], rows.targets[i, -1]]
    text, asked = tokenizer.decode(row), tokenizer.decode(question)
    line = tokenizer.decode([*question, *answer])
    assert text.count(line) == 2 and text.endswith(line)
    first = text.index(line) + len(asked)
    assert len(text) - len(answer) - first == distance
    assert list(rows.targets[i][rows.asked[i]]) == list(answer)
    alone = tokenizer.decode([*without.tokens[i], without.targets[i, -1]])
    assert alone.count(asked) == 1 and alone.endswith(line)
    differ = np.flatnonzero(rows.tokens[i] != without.tokens[i])
    assert differ.min() >= first - len(asked) and differ.max() <= first + len(answer)


def test_a_needle_that_does_not_fit():
  _, needles = needles_of('secret')
  filler = np.zeros((3, 161), np.int32)
  for distance in (5, 155):
    with pytest.raises(ValueError, match=f'does not fit {distance} tokens back'):
      needle.rows(needles, filler, distance)


def test_answers():
  rng = np.random.default_rng(0)
  hidden, head = rng.standard_normal((3, 30, 8)), rng.standard_normal((8, 5))
  logits = hidden @ head
  targets = logits[:, -needle.LONGEST :].argmax(-1)
  asked = np.arange(needle.LONGEST) >= np.array([[11], [3], [14]])
  targets[0, 2] = (targets[0, 2] + 1) % 5  # Not asked.
  targets[1, 7] = (targets[1, 7] + 1) % 5
  got = needle.answers(jnp.asarray(head), jnp.asarray(hidden), targets, asked)
  assert list(got['exact']) == [True, False, True]
  for i in range(3):
    at = [j for j in range(needle.LONGEST) if asked[i, j]]
    each = [oracle.cross_entropy(logits[i, j + 14], targets[i, j]) for j in at]
    tiny.close('nats per token', got['nll'][i], np.mean(each), 1e-5)


# --- Accept length ---


def greedy(params, config, ids, count):
  """The model's own next tokens, one whole forward pass each."""
  ids = list(ids)
  for _ in range(count):
    row = np.zeros((1, 40), np.int32)
    row[0, : len(ids)] = ids
    logits = tiny.forward(params, row, config).logits
    ids.append(int(np.argmax(logits[0, len(ids) - 1])))
  return ids[-count:]


@pytest.fixture(scope='module')
def model():
  config = tiny.config(first_k_dense_replace=0, num_hidden_layers=1, sparse_attention=False)
  return types.SimpleNamespace(config=config, params=tiny.random_params(config))


def test_right_drafts_are_all_accepted(model):
  params, tokens = foreseen(model), tiny.tokens(model.config, 2, 19)
  on_text = jitted(mtp.accepted_on_text, 'config', 'drafts')
  kept = on_text(params, tokens, np.array([3, 9, 18]), config=model.config, drafts=4)
  assert kept.shape == (3, 2) and np.all(np.asarray(kept) == 5)
  continued = jitted(mtp.accepted_in_continuations, 'config', 'drafts', 'rounds')
  kept = continued(params, tokens, config=model.config, drafts=4, rounds=3)
  assert kept.shape == (3, 2) and np.all(np.asarray(kept) == 5)


def test_a_draft_that_is_always_token_0(model):
  """Accepted is as much of it as the model, asked without drafts, says itself."""
  params = jax.tree.map(lambda a: a, model.params)
  params['mtp']['w_proj'] = jnp.zeros_like(params['mtp']['w_proj'])
  # So that token 0 is likely after some tokens, and not after others.
  params['lm_head'] = params['lm_head'].at[:, 0].set(2 * params['lm_head'][:, 35])
  tokens = tiny.tokens(model.config, 2, 24)
  at = np.arange(2, 24, 3)
  run = jitted(mtp.accepted_on_text, 'config', 'drafts')
  got = np.asarray(run(params, tokens, at, config=model.config, drafts=4))
  want = np.ones_like(got)
  for i, t in enumerate(at):
    for b in range(2):
      own = greedy(params, model.config, tokens[b, : t + 1], 4)
      while want[i, b] < 5 and own[want[i, b] - 1] == 0:
        want[i, b] += 1
  np.testing.assert_array_equal(got, want)
  assert len(set(want.ravel())) > 1, 'the test must see accepted and refused drafts'


def test_by_draft():
  kept = np.array([1, 1, 2, 3, 5, 5, 1, 4])
  assert mtp.by_draft(kept, 4) == [5 / 8, 4 / 5, 3 / 4, 2 / 3]
  assert mtp.by_draft(np.array([1, 1]), 2) == [0, 0]


# --- Runs ---


def test_max_violation():
  load = np.array([[[0.25, 0.25, 0.25, 0.25], [0.7, 0.1, 0.1, 0.1]]])
  np.testing.assert_allclose(balance.max_violation(load), [(0 + 1.8) / 2])


def test_what_was_measured_is_not_measured_again(tmp_path):
  asked = []
  for _ in range(2):
    found = runs.remembered(tmp_path, lambda: asked.append(1) or {'loss': 1.5})
    assert found == {'loss': 1.5}
  assert len(asked) == 1


def test_variants_are_as_large_as_each_other():
  variants = [runs.Variant(m[0], m[1], 1e-2, m[2]) for m in attention.MODELS.values()]
  variants += [*mtp.VARIANTS.values(), *balance.VARIANTS.values()]
  counts = [runs.parameters(model) for model in {runs.model_of(v) for v in variants}]
  assert max(counts) < 1.001 * min(counts)
