"""Attention of blank infilling: all of Part A sees all of it, Part B what came before; nothing leaks.

The rows are samples of data/infilling.py, packed, and longer than index_topk.
"""

import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.data import infilling
from glm5_jax.data.config import InfillingConfig
from glm5_jax.modules import model
from glm5_jax.modules.block import Options
from glm5_jax.train import step
from glm5_jax.train.flops import count_pairs, infilling_positions
from tests import oracle, tiny

TIME = 48
# Equal but for the order of additions: an expert's tokens sit elsewhere in its blocks.
ROUNDING = 3e-6
IDS = infilling.Tokens(250, 250, 251, 252, 253, 254, 255)
# Texts of one row each; two samples with padding between, and one.
TEXTS = ((17, 11), (34,))


def make_batch() -> tuple[dict[str, np.ndarray], list[list[tuple[int, int, int]]]]:
  """A packed batch, and (start, end of Part A, end) of its segments."""
  rng, words = random.Random(4), np.random.default_rng(1)
  recipe = InfillingConfig(span_prob=1.0, mask_ratio=0.3)
  batch = {
    name: np.zeros((2, TIME), np.int32)
    for name in ('tokens', 'targets', 'segment_ids', 'positions', 'prefix')
  }
  batch['weights'] = np.zeros((2, TIME), np.float32)
  places = []
  for row, lengths in enumerate(TEXTS):
    at, segments = 0, []
    for number, length in enumerate(lengths, 1):
      text = [250, *words.integers(0, 250, length).tolist(), 250]
      (sample,) = infilling.construct([text], recipe, IDS, rng)
      here = row, slice(at, at + len(sample))
      batch['tokens'][here], batch['targets'][here] = sample.tokens, sample.targets
      batch['weights'][here] = sample.loss_mask
      batch['positions'][here] = sample.one_row_positions()
      batch['segment_ids'][here], batch['prefix'][here] = number, at + sample.sep
      segments.append((at, at + sample.sep, at + len(sample)))
      at += len(sample) + 1
    places.append(segments)
  return batch, places


BATCH, PLACES = make_batch()


def forward(params, config, batch, options, prefix):
  return model.forward(
    params, batch['tokens'], config=config, positions=batch['positions'],
    segment_ids=batch['segment_ids'], prefix=prefix, options=options,
  )  # fmt: skip


_forward = tiny.fast_jit(forward, static_argnums=(1, 3))
ARRAYS = ('tokens', 'positions', 'segment_ids')


def run(golden, form=None, **changes):
  batch = {**BATCH, **changes}
  options = Options(capture=True, form=form)
  prefix = batch['prefix']
  return _forward(golden.params, golden.config, {k: batch[k] for k in ARRAYS}, options, prefix)


@pytest.fixture(scope='module')
def base(plain):
  assert plain.config.sparse_attention and plain.config.n_routed_experts
  return run(plain)


def changed(at) -> np.ndarray:
  tokens = BATCH['tokens'].copy()
  tokens[at] = (tokens[at] + 7) % 250
  return tokens


def test_the_batch_is_a_hard_one(plain):
  """Part A and the whole segment exceed index_topk somewhere, and several spans are hidden."""
  lengths = [(a - start, end - start) for row in PLACES for start, a, end in row]
  assert max(lengths)[0] > plain.config.index_topk < max(lengths)[1]
  assert all(end - a >= 4 for row in PLACES for _, a, end in row)
  assert (BATCH['tokens'] == IDS.sop).sum() > 4 and (BATCH['segment_ids'] == 0).sum() > 4


def test_oracle(plain, base):
  """Logits, selections and routing equal the reference of tests/oracle.py, in float64 numpy."""
  want = oracle.forward(
    plain.tensors, plain.raw, BATCH['tokens'], segments=BATCH['segment_ids'],
    positions=BATCH['positions'], prefix=BATCH['prefix'],
  )  # fmt: skip
  used = BATCH['segment_ids'] > 0
  tiny.close('infilling logits', base.logits, want['logits'], 1e-5, where=used[..., None])
  later = 0
  for ours, theirs in zip(tiny.layers(plain.config, base.aux), want['layers'], strict=True):
    np.testing.assert_array_equal(ours['selected'][used], theirs['selected'][used])
    later += np.triu(ours['selected'][0], 1).sum()
    if 'router_experts' in ours:
      np.testing.assert_array_equal(
        np.sort(ours['router_experts'], -1)[used.ravel()],
        np.sort(theirs['experts'].reshape(2 * TIME, -1), -1)[used.ravel()],
      )
  assert later > 50  # Keys after the query are selected, in Part A.


FORMS = pytest.mark.parametrize('form', ['expanded', 'absorbed'])


@FORMS
def test_no_future_leaks(plain, form):
  """Another token j of Part B: nothing of Part A moves, nor of B before j, nor any other segment, in
  logits, selections and routing; what follows in B does.
  """
  base = run(plain, form)
  tried = 0
  for row, segments in enumerate(PLACES):
    for _, sep, end in segments:
      for j in (sep, (sep + end) // 2, end - 1):
        after = run(plain, form, tokens=changed((row, j)))
        same = np.ones((2, TIME), bool)
        same[row, j:end] = False
        tiny.close(f'before {j}', after.logits, base.logits, ROUNDING, where=same[..., None])
        moved = np.abs(np.asarray(after.logits - base.logits)).max(-1)
        assert (moved[row, j:end] > 1e-3).all()
        for a, b in zip(
          tiny.layers(plain.config, after.aux), tiny.layers(plain.config, base.aux), strict=True
        ):
          np.testing.assert_array_equal(a['selected'][same], b['selected'][same])
          if 'router_experts' in a:
            np.testing.assert_array_equal(
              a['router_experts'][same.ravel()], b['router_experts'][same.ravel()]
            )
        tried += 1
  assert tried == 9


@FORMS
def test_part_a_is_bidirectional(plain, form):
  """Its last token moves the logits of its first, and those of all of Part B, and of nothing else."""
  base = run(plain, form)
  for row, segments in enumerate(PLACES):
    for start, sep, end in segments:
      after = run(plain, form, tokens=changed((row, sep - 2)))
      moved = np.abs(np.asarray(after.logits - base.logits)).max(-1)
      assert moved[row, start : sep - 2].max() > 1e-3
      # Directly or through others: with top-k not all of them need to see it.
      assert (moved[row, start:end] > 1e-4).mean() > 0.9
      rest = np.ones((2, TIME), bool)
      rest[row, start:end] = False
      tiny.close('others', after.logits, base.logits, ROUNDING, where=rest[..., None])


def test_packed_samples_equal_separate_ones(plain, base):
  for row, segments in enumerate(PLACES):
    for start, sep, end in segments:
      alone = {name: np.zeros((2, TIME), np.int32) for name in (*ARRAYS, 'prefix')}
      for name in ARRAYS:
        alone[name][row, : end - start] = BATCH[name][row, start:end]
      alone['prefix'][row, : end - start] = sep - start
      single = run(plain, **alone)
      tiny.close(
        f'sample of {end - start} slots', base.logits[row, start:end],
        single.logits[row, : end - start], 1e-5,
      )  # fmt: skip


def test_no_prefix_is_causal(plain, base):
  """None, 0, and a prefix that ends at the token itself or before: bit for bit the same."""
  slots = np.broadcast_to(np.arange(TIME, dtype=np.int32), (2, TIME))
  causal = run(plain, prefix=np.zeros((2, TIME), np.int32))
  for prefix in (None, slots, slots + 1):
    np.testing.assert_array_equal(run(plain, prefix=prefix).logits, causal.logits)
  assert np.abs(np.asarray(causal.logits - base.logits)).max() > 0.1


def test_no_prefix_costs_nothing(plain):
  """Without a prefix the program is that of a model that knows of none."""
  arrays = {k: jax.ShapeDtypeStruct((2, TIME), 'i4') for k in ARRAYS}

  def without(params, batch):
    return model.forward(
      params, batch['tokens'], config=plain.config, positions=batch['positions'],
      segment_ids=batch['segment_ids'],
    )  # fmt: skip

  def with_none(params, batch):
    return forward(params, plain.config, batch, Options(), None)

  def with_prefix(params, batch):
    return forward(params, plain.config, batch, Options(), batch['tokens'])

  without.__name__ = with_none.__name__ = with_prefix.__name__ = 'f'
  texts = [jax.jit(f).lower(plain.params, arrays).as_text() for f in (without, with_none)]
  assert texts[0] == texts[1]
  larger = jax.jit(with_prefix).lower(plain.params, arrays).as_text()
  # Two operations on [B, T], and no more: attention is the same program.
  assert 0 < larger.count('\n') - texts[0].count('\n') <= 4


def test_decoding_part_b_from_a_cache(plain, base):
  """Part A in one call with its prefix, then Part B token by token, give the logits of the whole."""
  ((_, sep, end),) = PLACES[1]
  cache = model.init_cache(plain.config, 1, TIME)

  @tiny.fast_jit
  def append(tokens, positions, prefix, cache):
    return model.forward(
      plain.params, tokens, config=plain.config, positions=positions, prefix=prefix, cache=cache
    )

  def slots(a, b):
    return (BATCH[name][1:, a:b] for name in ('tokens', 'positions', 'prefix'))

  out = append(*slots(0, sep), cache)
  tiny.close('Part A', out.logits, base.logits[1:, :sep], 1e-5)
  logits = []
  for t in range(sep, end):
    out = append(*slots(t, t + 1), out.cache)
    logits.append(out.logits[0, 0])
  tiny.close('Part B', np.stack(logits), base.logits[1, sep:end], 1e-5)


@pytest.mark.parametrize('attention', ['gqa', 'mla'])
def test_variants(attention):
  """GQA, and MLA in small query chunks: chunks change nothing, and Part B does not leak."""
  config = tiny.config(vocab_size=256, attention=attention, num_nextn_predict_layers=0)
  params = tiny.random_params(config)
  chunked = config.replace(
    attention_chunk_elements=5 * 2 * TIME * config.num_attention_heads
  )  # fmt: skip
  batch = {k: BATCH[k] for k in ARRAYS}
  whole = _forward(params, config, batch, Options(), BATCH['prefix'])
  parts = _forward(params, chunked, batch, Options(), BATCH['prefix'])
  used = (BATCH['segment_ids'] > 0)[..., None]
  tiny.close('chunks', parts.logits, whole.logits, 2e-5, where=used)
  ((_, sep, end),) = PLACES[1]
  for at, untouched in ((sep + 2, sep + 2), (sep - 2, 0)):
    after = _forward(
      params, config, batch | {'tokens': changed((1, at))}, Options(), BATCH['prefix']
    )
    moved = np.abs(np.asarray(after.logits - whole.logits)).max(-1)[1]
    assert moved[:untouched].max(initial=0) < ROUNDING
    # Directly or through others: with top-k not all of them need to see it.
    assert moved[at] > 1e-3 and (moved[untouched:end] > 1e-4).mean() > 0.9


@pytest.mark.parametrize('prefix', [True, False])
def test_memory_is_bounded_by_the_chunk(prefix):
  """At 4096 tokens a prefix adds nothing of [T, S]: compiled with gradients, as without."""
  time, chunk = 4096, 1 << 20
  config = tiny.config(
    num_hidden_layers=1, num_attention_heads=8, index_topk=64, attention_chunk_elements=chunk,
    num_nextn_predict_layers=0,
  )  # fmt: skip

  def total(params, tokens, prefix):
    out = model.forward(params, tokens, config=config, prefix=prefix, logits=False)
    return jnp.sum(out.hidden**2)

  tokens = jax.ShapeDtypeStruct((1, time), 'i4')
  f = tiny.fast_jit(jax.grad(total))
  compiled = f.lower(model.abstract_params(config), tokens, tokens if prefix else None).compile()
  used = compiled.memory_analysis().temp_size_in_bytes
  print(f'[memory] prefix {prefix}: {used / 2**20:.1f} MB')
  # The selection is kept, one byte a pair; a float for each, or a byte for each head, is not.
  assert used < 9 * 4 * chunk + time * 512 * 4 + time * time < 8 * time * time


def test_mtp_is_refused(with_mtp):
  with pytest.raises(ValueError, match='MTP steps predict tokens in order'):
    tokens, prefix = jnp.asarray(BATCH['tokens']), jnp.asarray(BATCH['prefix'])
    model.forward(with_mtp.params, tokens, config=with_mtp.config, prefix=prefix, mtp_steps=1)


def test_loss_counts_the_hidden_tokens(plain, base):
  """The training objective is the mean cross-entropy of Part B's targets under the prefix."""
  objective = step.Objective(
    mtp_steps=0, balance_loss_weight=0.0, indexer_loss_weight=0.0, loss_chunk=32
  )
  totals = step.Numbers(np.array([BATCH['weights'].sum()], np.float32))
  loss = tiny.fast_jit(step.loss_and_metrics, static_argnums=(3, 4))
  value, (metrics, _) = loss(plain.params, BATCH, totals, plain.config, objective)
  hidden = BATCH['weights'] > 0
  want = oracle.cross_entropy(
    np.asarray(base.logits, np.float64)[hidden][None], BATCH['targets'][hidden][None]
  )
  print(f'[loss] {float(value):.6f}, by hand {want:.6f}')
  assert float(value) == pytest.approx(want, abs=2e-6)
  assert float(metrics['ce']) == pytest.approx(want, abs=2e-6)
  causal = {k: v for k, v in BATCH.items() if k != 'prefix'}
  assert abs(float(loss(plain.params, causal, totals, plain.config, objective)[0]) - want) > 1e-3
  sums = step.make_eval_step(plain.config, objective)(
    plain.params, jax.tree.map(jnp.asarray, BATCH)
  )
  assert float(sums['nll'] / sums['tokens']) == pytest.approx(want, abs=2e-6)


def test_pairs_of_a_batch():
  """The keys that each token sees, for the FLOP count: by the definition, pair by pair."""
  segments, prefix = BATCH['segment_ids'], BATCH['prefix']
  s = np.arange(TIME)
  seen = (s <= s[:, None]) | (s < prefix[:, :, None])
  seen &= (segments[:, :, None] == segments[:, None]) & (segments[:, None] > 0)
  positions = infilling_positions(segments, prefix)
  pairs = count_pairs(positions, segments, 9)
  assert pairs == (seen.sum(), np.minimum(seen.sum(-1), 9).sum())
  # Without a prefix they count from 0 in each segment.
  causal = infilling_positions(segments, np.zeros_like(prefix))
  for row, places in enumerate(PLACES):
    for start, _, end in places:
      assert np.array_equal(causal[row, start:end], np.arange(end - start))
