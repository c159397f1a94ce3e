"""Alternatives to each token, and the engine in its thread: events, cancellation, failure."""

import asyncio

import numpy as np
import pytest

from glm5_jax.infer import sampling
from glm5_jax.infer.request import EngineFullError, Request, RequestError
from glm5_jax.infer.server_engine import EngineStoppedError, EngineThread
from tests.infer.conftest import log_softmax, no_leaks
from tests.infer.test_speculative import drafting

# --- top_logprobs ---


def events_of(engine, request) -> list:
  engine.add(request)
  events = []
  while not engine.idle:
    events += engine.step()
  return events


def check_alternatives(model, request, events) -> None:
  ids = [e.token for e in events]
  logits = model.logits([*request.prompt_ids, *ids])[len(request.prompt_ids) - 1 : -1]
  for row, event in zip(log_softmax(logits), events, strict=True):
    got = np.array([i for i, _ in event.top_logprobs])
    assert len(got) == request.top_logprobs
    # Two tokens whose float32 logits nearly agree may change places.
    np.testing.assert_allclose(np.sort(row)[::-1][: len(got)], row[got], atol=1e-5)
    np.testing.assert_allclose([p for _, p in event.top_logprobs], row[got], atol=1e-5)
    if event.token in got:
      assert abs(dict(event.top_logprobs)[event.token] - event.raw_logprob) < 1e-6


def test_alternatives_are_the_models_most_probable(model, engine):
  """Beside a request that wants none; penalties and temperature change nothing about them."""
  plain = Request(model.prompt(13), max_tokens=8, seed=1)
  engine.add(plain)
  request = Request(
    model.prompt(17), max_tokens=10, temperature=0.7, repetition_penalty=1.3, seed=3, top_logprobs=5
  )
  events = events_of(engine, request)
  own = [e for e in events if e.request_id == 2]
  check_alternatives(model, request, own)
  assert all(e.top_logprobs == () for e in events if e.request_id == 1)


def test_alternatives_change_no_token(model, engine):
  [[without]] = engine.run([Request(model.prompt(9), max_tokens=15, seed=5)])
  [[with_them]] = engine.run([Request(model.prompt(9), max_tokens=15, seed=5, top_logprobs=20)])
  assert with_them.ids == without.ids and with_them.logprobs == without.logprobs


def test_alternatives_with_drafts(model):
  """Who asks for them decodes without drafts, beside others with drafts, to the same tokens."""
  engine = drafting(model)
  other = Request(model.prompt(12, seed=4), max_tokens=20, seed=4)
  request = Request(model.prompt(11), max_tokens=16, seed=2, top_logprobs=3)
  engine.add(other)
  events = events_of(engine, request)
  own = [e for e in events if e.request_id == 2]
  check_alternatives(model, request, own)
  [[want], [beside]] = model.engine().run([request, other])
  assert [e.token for e in own] == want.ids
  assert [e.token for e in events if e.request_id == 1] == beside.ids
  no_leaks(engine)


def test_ties_go_to_the_lower_id():
  logits = np.zeros((2, 30), np.float32)
  logits[1, 7] = 1
  ids, logprobs = sampling.top_logprobs(logits, 3)
  assert ids.tolist() == [[0, 1, 2], [7, 0, 1]]
  np.testing.assert_allclose(logprobs[0], np.log(1 / 30), rtol=1e-6)
  assert sampling.top_logprobs(logits, 99)[0].shape == (2, 30)


@pytest.mark.parametrize('count', [-1, 21])
def test_too_many_alternatives(engine, count):
  with pytest.raises(RequestError, match=r'top_logprobs must be within 0\.\.20'):
    engine.add(Request([1], top_logprobs=count))


# --- The thread ---


@pytest.fixture
def thread(model):
  """An engine in its thread; all pages must have come back."""
  thread = EngineThread(model.engine(max_waiting=6))
  thread.start()
  yield thread
  thread.call(no_leaks).result()
  thread.close()


def collect(thread, requests) -> list:
  async def run():
    async with await thread.generate(requests) as stream:
      return [pair async for pair in stream]

  return asyncio.run(run())


def test_events_are_those_of_the_engine(model, thread):
  made = [
    Request(model.prompt(11), max_tokens=9, seed=1, samples=2),
    Request(model.prompt(5), max_tokens=6, seed=2),
  ]
  got = collect(thread, made)
  outputs = {(i, e.sample): e.output for i, e in got if e.finished}
  for i, wanted in enumerate(model.engine().run(made)):
    for want in wanted:
      output = outputs.pop((i, want.sample))
      assert (output.ids, output.text) == (want.ids, want.text)
      assert [e.token for j, e in got if (j, e.sample) == (i, want.sample)] == want.ids
  assert not outputs


def test_many_consumers_at_once(model, thread):
  made = [Request(model.prompt(7, seed=i), max_tokens=5 + i, seed=i) for i in range(6)]

  async def one(request):
    async with await thread.generate([request]) as stream:
      return [e.token async for _, e in stream]

  async def run():
    return await asyncio.gather(*map(one, made))

  assert asyncio.run(run()) == [o.ids for [o] in model.engine().run(made)]


def test_leaving_the_block_frees_the_pages(model, thread):
  async def run():
    async with await thread.generate([Request(model.prompt(9), max_tokens=30)]) as stream:
      await anext(stream)
    return await asyncio.wrap_future(thread.call(lambda engine: dict(engine.stats())))

  stats = asyncio.run(run())
  assert stats['cancelled'] == 1 and stats['running'] == 0
  assert stats['pages_used'] == stats['pages_cached']


def test_all_or_nothing(model, thread):
  """A request that cannot be served takes those before it along, which had begun."""
  good = Request(model.prompt(4), max_tokens=3)
  with pytest.raises(RequestError, match='ids outside'):
    collect(thread, [good, Request([999], max_tokens=3)])
  with pytest.raises(EngineFullError):
    collect(thread, [good] * 99)
  assert thread.call(lambda engine: engine.idle).result()
  assert len(collect(thread, [good])) == 3


def test_cancelled_while_it_begins(model, thread):
  """The consumer is gone before the engine has told it that its request was taken."""

  async def run():
    task = asyncio.ensure_future(thread.generate([Request(model.prompt(9), max_tokens=30)]))
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait([task])

  asyncio.run(run())
  assert thread.call(lambda engine: engine.idle).result()


def test_a_closed_event_loop(model, thread):
  """Nobody will ever read these tokens: the request is cancelled."""

  async def begin():
    return await thread.generate([Request(model.prompt(5), max_tokens=40, ignore_eos=True)])

  loop = asyncio.new_event_loop()
  stream = loop.run_until_complete(begin())
  loop.close()
  for _ in range(100):
    if thread.call(lambda engine: engine.idle).result():
      break
  assert thread.call(lambda engine: engine.idle).result() and stream is not None


def test_a_failing_step(model):
  """Those who wait are told, those who come later as well; nobody hangs."""
  engine = model.engine()
  thread = EngineThread(engine)

  def broken():
    raise FloatingPointError('no memory')

  engine.step = broken
  thread.start()
  for _ in range(2):
    with pytest.raises(EngineStoppedError, match='FloatingPointError: no memory'):
      collect(thread, [Request([1, 2], max_tokens=3)])
  assert thread.failure == 'FloatingPointError: no memory'
  thread.close()


def test_closing_tells_those_who_wait(model):
  thread = EngineThread(model.engine())
  thread.start()

  async def run():
    async with await thread.generate([Request(model.prompt(5), max_tokens=40)]) as stream:
      await anext(stream)
      thread.close()
      async for _ in stream:
        pass

  with pytest.raises(EngineStoppedError, match='shutting down'):
    asyncio.run(run())
