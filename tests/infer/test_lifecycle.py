"""Memory, prefixes, cancellation and new weights while requests run; and a few hundred at random."""

import jax
import numpy as np
import pytest

from glm5_jax.infer.engine import weights_checksum
from glm5_jax.infer.request import Request, WeightsError
from tests.infer.conftest import MAX_LENGTH, no_leaks

PAGE = 4


def finish(engine) -> list:
  outputs = []
  while not engine.idle:
    outputs += [e.output for e in engine.step() if e.finished]
  return sorted(outputs, key=lambda o: (o.request_id, o.sample))


def tokens_of(model, request, **changes) -> list[int]:
  return model.engine(**changes).run([request])[0][0].ids


# --- Prefix cache ---


def test_next_turn_costs_only_its_new_tokens(model, engine):
  prompt = model.prompt(10)
  for turn in range(3):
    before = engine.stats()
    request = Request(prompt, max_tokens=6, seed=turn)
    [[output]] = engine.run([request])
    after = engine.stats()
    # What the last turn computed, in whole pages: all its tokens but the one drawn last.
    known = 0 if turn == 0 else (len(prompt) - 2 - 1) // PAGE * PAGE
    assert output.cached_tokens == after['saved_tokens'] - before['saved_tokens'] == known
    assert after['prefill_tokens'] - before['prefill_tokens'] == len(prompt) - known
    assert output.ids == tokens_of(model, request, prefix_cache=False)
    want = model.raw_logprobs(prompt, output.ids)
    np.testing.assert_allclose(output.raw_logprobs, want, atol=1e-5)
    prompt = prompt + output.ids + [turn + 1, turn + 2]


def test_requests_at_the_same_time_share_a_prompt(model, engine):
  """The second finds the prompt of the first, which still runs; they part on pages of their own."""
  prompt = model.prompt(21)
  first, second = (Request([*prompt, i], max_tokens=20, seed=i) for i in (1, 2))
  engine.add(first)
  for _ in range(3):
    engine.step()
  engine.add(second)
  one, two = finish(engine)
  assert (one.cached_tokens, two.cached_tokens) == (0, 20)
  assert one.ids == tokens_of(model, first) and two.ids == tokens_of(model, second)


def test_old_prefixes_make_room(model, engine):
  """Prompts pass through until the pool is full of prefixes; the least recently used go."""
  prompts = [model.prompt(24, seed=i) for i in range(8)]
  for prompt in prompts:
    engine.run([Request(prompt, max_tokens=2)])
  assert engine._scheduler.prefix.evicted_pages > 0
  [[again]] = engine.run([Request(prompts[-1], max_tokens=2)])
  [[gone]] = engine.run([Request(prompts[0], max_tokens=2)])
  assert (again.cached_tokens, gone.cached_tokens) == (20, 0)


# --- Cancellation and preemption ---


def test_cancel_frees_pages_at_once(model):
  engine = model.engine(prefix_cache=False)
  ids = [engine.add(Request(model.prompt(20, seed=i), max_tokens=20)) for i in range(6)]
  for _ in range(9):
    engine.step()
  used = engine.stats()['pages_used']
  running = [s.request_id for s in engine._scheduler.decoding]
  [output] = engine.cancel(running[0])
  assert output.finish_reason == 'cancelled' and len(output.ids) == len(output.logprobs) > 0
  assert engine.stats()['pages_used'] <= used - 5
  waiting = engine._scheduler.waiting[-1].request_id
  [output] = engine.cancel(waiting)
  assert not output.ids
  assert engine.cancel(waiting) == engine.cancel(12345) == []
  rest = finish(engine)
  assert {o.request_id for o in rest} == set(ids) - {running[0], waiting}
  assert engine.stats()['pages_used'] == 0 and engine.stats()['cancelled'] == 2


def test_cancel_ends_all_samples(model, engine):
  """Running, waiting for a place, and not begun: each is returned once."""
  for steps in (0, 1, 2, 5):
    request_id = engine.add(Request(model.prompt(14, seed=steps), max_tokens=30, samples=6))
    done = [e.output for _ in range(steps) for e in engine.step() if e.finished]
    outputs = engine.cancel(request_id)
    assert [o.sample for o in outputs] == list(range(6)) and not done
    assert engine.idle


def test_cancel_leaves_others_alone(model, engine):
  """Cancelled samples share pages with each other and with another request's prefix."""
  prompt = model.prompt(18)
  kept = Request([*prompt, 5], max_tokens=15, seed=4)
  victim = engine.add(Request(prompt, max_tokens=25, samples=3))
  engine.add(kept)
  for _ in range(6):
    engine.step()
  engine.cancel(victim)
  [output] = finish(engine)
  assert output.ids == tokens_of(model, kept)


@pytest.mark.parametrize('prefix_cache', [True, False])
def test_preemption_loses_nothing(model, prefix_cache):
  """Four sequences of 11 or 12 pages each in a pool of 24."""
  made = [
    Request(model.prompt(16, seed=i), max_tokens=30, seed=i, repetition_penalty=1.1, samples=1)
    for i in range(5)
  ]
  engine = model.engine(prefix_cache=prefix_cache)
  outputs = [o for [o] in engine.run(made)]
  assert engine.stats()['preemptions'] == sum(o.preemptions for o in outputs) > 0
  assert outputs[0].preemptions == 0, 'the first is never preempted'
  for request, output in zip(made, outputs, strict=True):
    assert len(output.ids) == len(output.logprobs) == 30
    assert output.ids == tokens_of(model, request)
  no_leaks(engine)


# --- New weights ---


def run_with_update(model, mode: str, steps: int = 8):
  engine = model.engine()
  made = [Request(model.prompt(12, seed=i), max_tokens=16, seed=i) for i in range(7)]
  for request in made:
    engine.add(request)
  outputs = [e.output for _ in range(steps) for e in engine.step() if e.finished]
  running = {s.request_id for s in engine._scheduler.decoding}
  checksum = weights_checksum(model.other_params)
  assert engine.update_weights(model.other_params, 5, mode, checksum) == checksum
  outputs += finish(engine)
  assert len(outputs) == 7, 'no request is dropped'
  assert engine.version == 5 and engine.checksum == checksum
  no_leaks(engine)
  return made, sorted(outputs, key=lambda o: o.request_id), running


def test_update_and_recompute(model):
  """Every token's log-prob is that of the weights whose version it records."""
  made, outputs, _ = run_with_update(model, 'recompute')
  for request, output in zip(made, outputs, strict=True):
    old = model.raw_logprobs(request.prompt_ids, output.ids)
    new = model.raw_logprobs(request.prompt_ids, output.ids, model.other_params)
    want = np.where(np.array(output.versions) == 5, new, old)
    np.testing.assert_allclose(output.raw_logprobs, want, atol=1e-5)
    assert output.versions == sorted(output.versions)
  assert any(set(o.versions) == {0, 5} for o in outputs)


def test_update_and_continue(model):
  """Running requests go on; those that begin later see nothing of the old weights' rows."""
  made, outputs, running = run_with_update(model, 'continue')
  for request, output in zip(made, outputs, strict=True):
    if output.request_id in running:
      assert set(output.versions) == {0, 5}
      count = output.versions.count(0)
      old = model.raw_logprobs(request.prompt_ids, output.ids)
      np.testing.assert_allclose(output.raw_logprobs[:count], old[:count], atol=1e-5)
    elif output.versions[0] == 5:
      new = model.raw_logprobs(request.prompt_ids, output.ids, model.other_params)
      np.testing.assert_allclose(output.raw_logprobs, new, atol=1e-5)
  assert any(set(o.versions) == {5} for o in outputs)


def test_update_and_drain(model):
  """No sequence sees two versions; those that wait begin with the new one."""
  made, outputs, running = run_with_update(model, 'drain')
  for request, output in zip(made, outputs, strict=True):
    [version] = set(output.versions)
    assert version == (0 if output.request_id <= max(running) else 5)
    params = model.params if version == 0 else model.other_params
    want = model.raw_logprobs(request.prompt_ids, output.ids, params)
    np.testing.assert_allclose(output.raw_logprobs, want, atol=1e-5)


def test_prefixes_are_of_their_weights(model, engine):
  """The same prompt before and after an update, and a request that ran through it."""
  request = Request(model.prompt(20), max_tokens=12, seed=2)
  engine.add(request)
  for _ in range(6):
    engine.step()
  engine.update_weights(model.other_params, 1)
  finish(engine)
  [[output]] = engine.run([request])
  assert output.cached_tokens == 0
  want = model.raw_logprobs(request.prompt_ids, output.ids, model.other_params)
  np.testing.assert_allclose(output.raw_logprobs, want, atol=1e-5)


def test_wrong_weights_take_no_traffic(model, engine):
  running = Request(model.prompt(9), max_tokens=10)
  engine.add(running)
  engine.step()
  damaged = jax.tree.map(lambda a: a, model.other_params)
  damaged['embed'] = damaged['embed'].at[3, 3].add(1e-6)
  sent = weights_checksum(model.other_params)
  with pytest.raises(WeightsError, match=f'version 1 are not sound: checksum .* {sent} sent'):
    engine.update_weights(damaged, 1, checksum=sent)
  with pytest.raises(WeightsError, match='push them again'):
    engine.add(running)
  [output] = finish(engine)
  assert set(output.versions) == {0}, 'what runs is finished on the old weights'
  engine.update_weights(model.other_params, 1, checksum=sent)
  [[output]] = engine.run([running])
  assert set(output.versions) == {1}


def test_another_models_weights(model, engine):
  wrong = dict(model.params)
  wrong['embed'] = wrong['embed'][:-1]
  with pytest.raises(WeightsError, match=r'embed is float32\[59,40\], expected float32\[60,40\]'):
    engine.update_weights(wrong, 1)
  engine.update_weights(model.params, 2)
  with pytest.raises(ValueError, match='version 2 already'):
    engine.update_weights(model.params, 2)
  with pytest.raises(ValueError, match="mode must be 'continue', 'recompute' or 'drain'"):
    engine.update_weights(model.params, 3, 'now')


def test_the_engine_owns_its_weights(model):
  """A trainer's step gives its buffers away."""
  params = jax.tree.map(lambda a: a + 0, model.params)
  engine = model.engine()
  engine.update_weights(params, 1)
  for leaf in jax.tree.leaves(params):
    leaf.delete()
  engine.run([Request([1, 2, 3], max_tokens=3)])


# --- Everything at once ---


def test_soak(model):
  """300 random requests with cancellations and updates: all accounted for, no page lost."""
  engine = model.engine(max_waiting=1000)
  rng = np.random.default_rng(0)
  stems = [model.prompt(20, seed=i) for i in range(3)]
  live: dict[int, int] = {}
  finished, cancelled, added = 0, 0, 0
  for turn in range(3000):
    if added < 300 and rng.random() < 0.4:
      stem = stems[rng.integers(3)][: rng.integers(0, 21)]
      prompt = stem + model.prompt(int(rng.integers(1, 20)), seed=turn)
      samples = int(rng.choice([1, 1, 1, 4]))
      request = Request(
        prompt, max_tokens=int(rng.integers(1, min(20, MAX_LENGTH - len(prompt)))),
        temperature=float(rng.choice([0, 1])), seed=turn, samples=samples,
        stop_ids=rng.integers(0, 60, 2).tolist(), presence_penalty=float(rng.choice([0, 0.5])),
      )  # fmt: skip
      live[engine.add(request)] = samples
      added += 1
    if live and rng.random() < 0.05:
      request_id = int(rng.choice(list(live)))
      outputs = engine.cancel(request_id)
      assert len(outputs) == live.pop(request_id)
      cancelled += len(outputs)
    if rng.random() < 0.01:
      params = (model.params, model.other_params)[turn % 2]
      engine.update_weights(params, turn + 1, ('continue', 'recompute', 'drain')[turn % 3])
    for event in engine.step():
      assert event.request_id in live
      if event.finished:
        finished += 1
        live[event.request_id] -= 1
        if not live[event.request_id]:
          del live[event.request_id]
    allocator = engine._scheduler.allocator
    assert allocator.used + allocator.free == allocator.pages - 1
    if added == 300 and engine.idle:
      break
  assert added == 300 and not live and engine.idle
  stats = engine.stats()
  print(f'soak: {turn} steps, {stats}')
  assert (stats['finished'], stats['cancelled']) == (finished, cancelled)
  assert cancelled > 20 and stats['preemptions'] > 0 and stats['saved_tokens'] > 0
  assert stats['pages_used'] == stats['pages_cached']
  no_leaks(engine)
