"""The engine against plain generation and the training forward pass, whatever runs beside a request."""

import numpy as np
import pytest

from glm5_jax.infer import generate
from glm5_jax.infer import request as requests
from glm5_jax.infer.programs import programs
from glm5_jax.infer.request import Request
from tests import tiny
from tests.infer.conftest import MAX_LENGTH, SIZES, log_softmax, no_leaks


def crowd(model, count: int, seed: int = 0, **changes) -> list[Request]:
  """Random requests of all kinds, together far more than the pool holds."""
  rng = np.random.default_rng(seed)
  made = []
  for i in range(count):
    prompt = model.prompt(int(rng.integers(1, 30)), seed=1000 * seed + i)
    made.append(
      Request(
        prompt,
        max_tokens=int(rng.integers(1, MAX_LENGTH - len(prompt) + 1)),
        temperature=float(rng.choice([0.0, 0.7, 1.0])),
        top_p=float(rng.choice([1.0, 0.9])),
        repetition_penalty=float(rng.choice([1.0, 1.0, 1.3])),
        seed=int(rng.integers(1 << 40)),
        samples=int(rng.choice([1, 1, 3])),
        **changes,
      )
    )
  return made


def test_greedy_equals_generate(model, engine, monkeypatch):
  """Prompts below and above index_topk and the prefill chunk; more of them than run at a time."""
  prompts = [model.prompt(n, seed=n) for n in (5, 13, 27, 1, 18, 30)]
  static = ('config', 'max_new_tokens')
  fast = tiny.fast_jit(generate._generate.__wrapped__, static_argnames=static)
  monkeypatch.setattr(generate, '_generate', fast)
  want = generate.generate(
    model.params, prompts, config=model.config, max_new_tokens=12, temperature=0
  )
  outputs = engine.run(Request(p, max_tokens=12, temperature=0) for p in prompts)
  assert [o.ids for [o] in outputs] == want
  assert {o.finish_reason for [o] in outputs} == {'length'}
  assert all(o.logprobs == [0.0] * 12 for [o] in outputs)


def test_logprobs_are_the_trainers(model, engine):
  """Of the tokens that were drawn, through chunked prefill, preemption, shared prefixes and samples."""
  made = crowd(model, 12, seed=3)
  for request, outputs in zip(made, engine.run(made), strict=True):
    for output in outputs:
      want = model.raw_logprobs(request.prompt_ids, output.ids)
      np.testing.assert_allclose(output.raw_logprobs, want, atol=1e-5)
  assert engine.stats()['preemptions'] > 0


def test_logprobs_are_of_the_distribution_sampled_from(model, engine):
  request = Request(model.prompt(11), max_tokens=20, temperature=0.7, top_k=4, seed=5)
  [[output]] = engine.run([request])
  logits = model.logits([*request.prompt_ids, *output.ids])[len(request.prompt_ids) - 1 : -1]
  for row, token, logprob in zip(logits / 0.7, output.ids, output.logprobs, strict=True):
    best = np.argsort(-row)[:4]
    assert token in best
    want = log_softmax(row[best])[list(best).index(token)]
    assert abs(logprob - want) < 2e-5


def test_same_tokens_in_any_company(model, engine):
  """A request alone, and among others that preempt it and share its pages."""
  one = Request(model.prompt(17, seed=9), max_tokens=20, temperature=1.0, seed=77, samples=3)
  alone = model.engine(max_sequences=4).run([one])[0]
  assert len({tuple(o.ids) for o in alone}) == 3, 'samples must differ'
  for seed in range(3):
    others = crowd(model, 6, seed=seed + 10)
    at = [0, 3, 6][seed]
    outputs = engine.run([*others[:at], one, *others[at:]])[at]
    assert [o.ids for o in outputs] == [o.ids for o in alone]
  again = model.engine(prefix_cache=False).run([one])[0]
  assert [o.ids for o in again] == [o.ids for o in alone]


def test_nothing_compiles_after_warm_up(model, lowerings):
  programs.cache_clear()  # Or the programs that other tests made would hide what warm_up forgets.
  engine = model.engine()
  start = lowerings.count
  engine.warm_up()
  before = lowerings.count
  assert before - start >= 6 + 2 * 2 + 1, 'shapes of forward, of sample, and copy_page'
  made = crowd(model, 10, seed=5)
  engine.run(made)
  engine.update_weights(model.other_params, 1, 'recompute')
  engine.run(made[:3])
  stats = engine.stats()
  assert lowerings.count == before
  assert stats['preemptions'] and stats['saved_tokens'], 'the run must have had everything'
  no_leaks(engine)


def test_the_counter_of_compilations_counts(model, lowerings):
  """A geometry that nobody compiled is noticed."""
  engine = model.engine(prefill_buckets=(7,))
  before = lowerings.count
  engine.run([Request(model.prompt(5), max_tokens=1)])
  assert lowerings.count > before


def test_samples_share_one_prefill(model, engine):
  request = Request(model.prompt(23), max_tokens=6, samples=7, seed=1)
  [outputs] = engine.run([request])
  assert [o.sample for o in outputs] == list(range(7))
  stats = engine.stats()
  # Four run at a time; the later ones find the full pages of the prompt and compute its last tokens.
  assert 23 <= stats['prefill_tokens'] <= 23 + 3 * 3
  assert stats['saved_tokens'] >= 3 * 23 + 3 * 20
  assert outputs[0].cached_tokens == 0 and outputs[1].cached_tokens == 23
  singles = model.engine(prefix_cache=False).run([request])[0]
  assert [o.ids for o in singles] == [o.ids for o in outputs]


def test_stop_ids(model, engine):
  prompt = model.prompt(9)
  [[free]] = engine.run([Request(prompt, max_tokens=20, seed=3)])
  stop = free.ids[7]
  first = free.ids.index(stop)
  [[output]] = engine.run([Request(prompt, max_tokens=20, seed=3, stop_ids=[stop])])
  assert output.ids == free.ids[: first + 1]
  assert (output.finish_reason, output.stop) == ('stop', stop)
  assert len(output.text) == first, 'the text is without the id that ended it'


def test_the_configs_stop_ids(model):
  prompt = model.prompt(9)
  [[free]] = model.engine().run([Request(prompt, max_tokens=20, seed=3)])
  stop = free.ids[4]
  ending = model.engine()
  ending.config = model.config.replace(eos_token_id=(stop,))
  request = Request(prompt, max_tokens=20, seed=3)
  [[output]] = ending.run([request])
  assert output.ids == free.ids[: free.ids.index(stop) + 1] and output.stop == stop
  [[output]] = ending.run([Request(prompt, max_tokens=20, seed=3, ignore_eos=True)])
  assert output.ids == free.ids


def test_stop_strings(model, engine):
  prompt = model.prompt(9)
  events = []
  engine.add(Request(prompt, max_tokens=20, seed=3))
  while not engine.idle:
    events += engine.step()
  text = ''.join(e.text for e in events)
  assert text == events[-1].output.text == ''.join(chr(65 + e.token) for e in events)
  stop = text[6:9]
  engine.add(Request(prompt, max_tokens=20, seed=3, stop_strings=['nowhere', stop]))
  events = []
  while not engine.idle:
    events += engine.step()
  output = events[-1].output
  assert output.text == ''.join(e.text for e in events) == text[: text.index(stop)]
  assert (output.finish_reason, output.stop) == ('stop', stop)
  assert len(output.ids) == text.index(stop) + 3


def test_events_are_the_outputs(model, engine):
  made = crowd(model, 5, seed=8)
  ids = [engine.add(r) for r in made]
  tokens, outputs = {}, {}
  while not engine.idle:
    for event in engine.step():
      key = event.request_id, event.sample
      assert key not in outputs
      tokens.setdefault(key, []).append((event.token, event.logprob, event.version))
      if event.finished:
        outputs[key] = event.output
  assert sorted(outputs) == [
    (i, s) for i, r in zip(ids, made, strict=True) for s in range(r.samples)
  ]
  for key, output in outputs.items():
    assert tokens[key] == list(zip(output.ids, output.logprobs, output.versions, strict=True))
    assert output.preemptions >= 0 and output.prompt_tokens == len(made[key[0] - ids[0]].prompt_ids)


def test_first_come_first_served(model, engine):
  """Equal requests finish in the order of their arrival, preempted or not."""
  for i in range(9):
    engine.add(Request(model.prompt(20, seed=i), max_tokens=15, ignore_eos=True))
  finished = []
  while not engine.idle:
    finished += [e.request_id for e in engine.step() if e.finished]
  assert finished == sorted(finished)


def test_a_step_keeps_its_budget(model, engine):
  for i in range(6):
    engine.add(Request(model.prompt(25, seed=i), max_tokens=8))
  while not engine.idle:
    before = engine.stats()
    decoding = len(engine._scheduler.decoding)
    engine.step()
    prefilled = engine.stats()['prefill_tokens'] - before['prefill_tokens']
    assert prefilled + decoding <= SIZES.max_step_tokens


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'prompt_ids': []}, 'prompt is empty'),
    ({'prompt_ids': [1, 60]}, r'ids outside 0\.\.59'),
    ({'prompt_ids': [-1]}, r'ids outside 0\.\.59'),
    ({'prompt_ids': [1] * 48}, 'has 48 tokens; at most 47 leave room'),
    ({'max_tokens': 46}, 'maximum length of 48; ask for at most 45'),
    ({'max_tokens': 0}, 'max_tokens must be at least 1'),
    ({'temperature': -0.1}, 'temperature must be at least 0'),
    ({'temperature': float('nan')}, 'temperature must be'),
    ({'top_k': -1}, 'top_k must be'),
    ({'top_p': 0.0}, 'top_p must be above 0'),
    ({'min_p': 1.0}, 'min_p must be'),
    ({'repetition_penalty': 0.0}, 'repetition_penalty must be above 0'),
    ({'presence_penalty': float('inf')}, 'presence_penalty must be a number'),
    ({'seed': -1}, 'seed must be'),
    ({'samples': 0}, 'samples must be at least 1'),
    ({'stop_strings': ['']}, 'stop string is empty'),
  ],
)  # fmt: skip
def test_bad_requests(engine, changes, message):
  with pytest.raises(requests.RequestError, match=message):
    engine.add(Request(**{'prompt_ids': [1, 2, 3]} | changes))
  with pytest.raises(requests.RequestError, match=message):
    engine.run([Request([1]), Request(**{'prompt_ids': [1, 2, 3]} | changes)])
  assert engine.idle


def test_too_many_wait(model):
  engine = model.engine(max_waiting=2)
  for _ in range(2):
    engine.add(Request([1], max_tokens=2))
  with pytest.raises(requests.EngineFullError, match='2 requests wait already'):
    engine.add(Request([1], max_tokens=2))
  assert len(engine.run(Request([1], max_tokens=1) for _ in range(5))) == 5
  engine.add(Request([1], max_tokens=2))
  no_leaks(engine)


@pytest.mark.parametrize(
  'changes, message',
  [
    ({'max_step_tokens': 4}, r'must exceed max_sequences \* \(1 \+ draft_steps\) = 4'),
    ({'max_length': 1000}, r'max_length=1000 must be within 2\.\.96'),
    ({'batch_buckets': (2,)}, r'batch_buckets=\(2,\) must reach 4'),
    ({'page_buckets': (4,)}, r'page_buckets=\(4,\) must reach 12'),
    ({'prefill_buckets': (64,)}, 'exceed the longest sequence'),
    ({'pages': 1}, 'pages at least 2'),
  ],
)
def test_bad_sizes(model, changes, message):
  with pytest.raises(ValueError, match=message):
    model.engine(**changes)


def test_gqa_has_no_latent_cache(model):
  with pytest.raises(ValueError, match='run GQA models with `generate`'):
    SIZES.resolve(model.config.replace(attention='gqa'))


def test_default_sizes():
  sizes = type(SIZES)().resolve(tiny.config(max_position_embeddings=4096))
  assert sizes.max_length == 4096
  assert sizes.batch_buckets == (1, 4, 16)
  assert sizes.prefill_buckets == (32, 128, 512)
  assert sizes.page_buckets == (4, 16, 64)


def test_logits_that_are_not_finite(model):
  broken = tiny.random_params(model.config)
  broken['lm_head'] = broken['lm_head'].at[0, 0].set(np.nan)
  engine = model.engine()
  engine.update_weights(broken, 1)
  [[output]] = engine.run([Request([1, 2], max_tokens=5)])
  assert output.finish_reason == 'error' and len(output.ids) == 1
  no_leaks(engine)
