"""Speculative decoding: the MTP layer is that of training, and drafts change nothing but the speed."""

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats

from glm5_jax.infer import cache, sampling, speculative
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import programs
from glm5_jax.infer.request import Request
from glm5_jax.ops.pages import PagedCache
from tests import tiny
from tests.infer.conftest import Letters, Model, log_softmax, no_leaks
from tests.infer.test_engine import crowd

STEPS = 3
SMALLER = {'batch_buckets': (4,), 'page_buckets': (12,), 'max_step_tokens': 20}


def drafting(model: Model, params=None, **changes) -> Engine:
  return model.engine(params, **SMALLER | {'draft_steps': STEPS} | changes)


# --- The layer ---


@functools.partial(tiny.fast_jit, static_argnames='config')
def run_layer(params, hidden, tokens, paged, config):
  valid = jnp.ones(tokens.shape, bool)
  first = speculative.layer_numbers(config)
  return speculative.mtp_layer(params, config, hidden, tokens, paged, valid, first)[0]


def test_layer_is_that_of_training():
  """Step 1 from the model's hidden states, steps 2 and 3 from those after shared_head.norm."""
  config = tiny.config(first_k_dense_replace=0)
  params = tiny.random_params(config)
  ids = tiny.tokens(config, 2, 35)
  want = tiny.forward(params, ids, config, mtp_steps=3)
  pool = cache.init_pool(config, 19, 4, mtp_layers=1)
  table = np.arange(1, 19, dtype=np.int32).reshape(2, 9)
  # Slot 0 belongs to a first token, which no step of training has.
  paged = PagedCache(pool.latent, pool.index_k, table, np.ones(2, np.int32))
  hidden = np.asarray(want.hidden)
  for step in range(3):
    tokens = np.roll(ids, -1 - step, axis=1)[:, :32]
    got = run_layer(params, hidden[:, :32], tokens, paged, config)
    hidden = np.asarray(want.mtp_hidden[step])
    tiny.close(f'MTP hidden states, step {step + 1}', got, hidden[:, :32], 1e-5)


# --- The engine ---


def test_same_tokens_as_without_drafts(model):
  """Greedy and sampled, with filters and penalties; preempted, forked, and out of the prefix cache."""
  made = crowd(model, 12, seed=3)
  plain = model.engine(**SMALLER).run(made)
  engine = drafting(model)
  for request, outputs, want in zip(made, engine.run(made), plain, strict=True):
    assert [o.ids for o in outputs] == [o.ids for o in want]
    for a, b in zip(outputs, want, strict=True):
      np.testing.assert_allclose(a.raw_logprobs, b.raw_logprobs, atol=1e-5)
      np.testing.assert_allclose(a.logprobs, b.logprobs, atol=2e-5)
      assert len(a.ids) <= request.max_tokens and a.finish_reason == b.finish_reason
  stats = engine.stats()
  assert stats['preemptions'] and stats['saved_tokens'] and 1 < stats['accept_length'] < 2
  no_leaks(engine)


def test_stops_within_a_draft(model):
  """An id or a string may end the text at any of the tokens that were accepted together."""
  params = foreseen(model)
  [[free]] = drafting(model, params).run([Request(model.prompt(9), max_tokens=20, temperature=0)])
  text = ''.join(chr(ord('A') + i) for i in free.ids)
  engine = drafting(model, params)
  for end in range(2, 9):
    request = Request(model.prompt(9), max_tokens=20, temperature=0, stop_ids=[free.ids[end]])
    [[output]] = engine.run([request])
    assert output.ids == free.ids[: free.ids.index(free.ids[end]) + 1]
    stop = text[end - 2 : end + 1]
    request = Request(model.prompt(9), max_tokens=20, temperature=0, stop_strings=[stop])
    [[output]] = engine.run([request])
    assert output.text == text[: text.index(stop)]
  no_leaks(engine)


def foreseen(model: Model):
  """Weights of a model whose next token depends on the last one only, as its MTP layer knows."""
  params = jax.tree.map(lambda a: a, model.params)

  def without_blocks(path, leaf):
    name = path[-1].key
    if name in ('w_o', 'w_down'):
      return jnp.zeros_like(leaf)
    return (
      jnp.ones_like(leaf) if name in ('embed_norm', 'hidden_norm', 'final_norm', 'norm') else leaf
    )

  params = jax.tree_util.tree_map_with_path(without_blocks, params)
  size = model.config.hidden_size
  projection = np.concatenate([np.eye(size), np.zeros((size, size))]).astype(np.float32)
  params['mtp']['w_proj'] = jnp.asarray(projection)[None]
  return params


@pytest.mark.parametrize('temperature', [0.0, 1.0])
def test_right_drafts_are_all_accepted(model, temperature):
  engine = drafting(model, foreseen(model))
  request = Request(model.prompt(6), max_tokens=1 + 3 * (STEPS + 1), temperature=temperature)
  [[output]] = engine.run([request])
  assert len(output.ids) == 13
  stats = engine.stats()
  assert stats['accept_length'] == STEPS + 1
  assert stats['steps'] == 4, 'one for the prompt and the first token, three for four tokens each'
  no_leaks(engine)


def test_nothing_compiles_after_warm_up(model, lowerings):
  programs.cache_clear()
  engine = drafting(model)
  engine.warm_up()
  before = lowerings.count
  engine.run(crowd(model, 5, seed=5))
  assert lowerings.count == before


def test_distribution_of_two_tokens():
  """Chi-square of what two rounds draw against the forward pass of training, over all 25 pairs."""
  rows, vocab, draws_of = 3000, 5, 2
  config = tiny.config(first_k_dense_replace=0, num_hidden_layers=1, vocab_size=vocab)
  params = tiny.random_params(config, seed=4, std=0.3)
  prompt = tiny.tokens(config, 1, 13, seed=2)[0]
  pairs = np.array(list(itertools.product(range(vocab), repeat=2)), np.int32)
  ids = np.concatenate([np.tile(prompt, (len(pairs), 1)), pairs], axis=1)
  logits = np.asarray(tiny.forward(params, ids, config).logits, np.float64)[:, 12:14]
  logp = log_softmax(logits / 1.3)
  at = np.arange(len(pairs))
  want = np.exp(logp[at, 0, pairs[:, 0]] + logp[at, 1, pairs[:, 1]])
  tiny.close('sum of the joint distribution', want.sum(), 1.0, 1e-6)

  # All rows share the pages of the first twelve tokens, and have two of their own.
  pool = cache.init_pool(config, 4 + 2 * rows, 4, mtp_layers=1)
  table = np.concatenate(
    [np.tile(np.arange(1, 4), (rows, 1)), 4 + np.arange(2 * rows).reshape(rows, 2)], axis=1
  ).astype(np.int32)
  first = PagedCache(pool.latent, pool.index_k, table[:1], np.zeros(1, np.int32))
  carry = np.zeros((1, config.hidden_size), np.float32)
  fill = tiny.fast_jit(speculative.extend, static_argnames='config')
  hidden, paged = fill(
    params, config=config, carry=carry, tokens=prompt[None, :12], paged=first,
    valid=np.ones((1, 12), bool),
  )  # fmt: skip
  decode = tiny.fast_jit(speculative.decode, static_argnames=('config', 'steps'))
  carry = np.tile(np.asarray(hidden)[:, -1], (rows, 1))
  token, length = np.full(rows, prompt[12]), np.full(rows, 12, np.int32)
  texts: list[list[int]] = [[] for _ in range(rows)]
  kept = []
  for _ in range(draws_of):
    settings = sampling.stack(
      [(1.3, 0, 1.0, 0.0, 1.0, 0.0, 1000 + r, 0, 13 + len(texts[r])) for r in range(rows)], rows
    )
    verified, paged = decode(
      params, config=config, steps=2, carry=carry, token=token.astype(np.int32),
      limit=np.full(rows, 3, np.int32), settings=settings, seen=None,
      paged=paged._replace(table=table, length=length.astype(np.int32)),
    )  # fmt: skip
    kept.append(np.asarray(verified.kept))
    for r, tokens in enumerate(np.asarray(verified.drawn.token).tolist()):
      texts[r] += tokens[: kept[-1][r]]
    carry, length = verified.carry, length + kept[-1]
    token = np.array([t[-1] for t in texts])
  drawn = np.array([t[0] * vocab + t[1] for t in texts])
  count = np.bincount(drawn, minlength=vocab**2)
  p_value = scipy.stats.chisquare(count, rows * want / want.sum()).pvalue
  print(f'chi-square of pairs: p = {p_value:.3f}; tokens a round {np.mean(kept):.2f}')
  assert p_value > 1e-3
  assert 1.1 < np.mean(kept) < 2.9, 'some drafts must be right and some wrong'


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'draft_steps': 8, 'max_step_tokens': 99}, r'draft_steps=8 must be within 0\.\.7'),
    ({'max_step_tokens': 16}, r'\(1 \+ draft_steps\) = 16'),
  ],
)
def test_bad_sizes(model, changes, message):
  with pytest.raises(ValueError, match=message):
    drafting(model, **changes)


def test_no_mtp_layer(model):
  config = model.config.replace(num_nextn_predict_layers=0)
  with pytest.raises(ValueError, match='one MTP layer; this one has 0'):
    Engine(model.params, config, Letters(), drafting(model).sizes)
