"""The engine's thread, and how coroutines talk to it.

The engine is not thread-safe, so one thread calls it. What others want of it reaches that thread as
functions in a queue, which it runs between two steps; the tokens of a step go to the event loops of
those who wait for them.
"""

import asyncio
import concurrent.futures
import dataclasses
import logging
import queue
import threading
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from typing import Any, Self, TypeVar

from glm5_jax.infer.engine import Engine
from glm5_jax.infer.request import Event, Request

_T = TypeVar('_T')
_Call = tuple[concurrent.futures.Future, Callable[[Engine], Any]]

_log = logging.getLogger(__name__)


class EngineStoppedError(RuntimeError):
  """The engine's thread has ended: it was closed, or a step failed."""


class EngineThread:
  """Runs an engine; the engine is nobody else's from `start` to `close`.

  Attributes:
    stats: `Engine.stats()` after the last step.
    failure: what ended the thread, if it was not `close`.
  """

  def __init__(self, engine: Engine):
    self._engine = engine
    self._calls: queue.SimpleQueue[_Call | None] = queue.SimpleQueue()
    self._ended = threading.Event()
    self._open: dict[int, _Open] = {}  # By request id. The engine's thread only.
    self._thread = threading.Thread(target=self._run, name='engine', daemon=True)
    self.stats: Mapping[str, int | float] = engine.stats()
    self.failure: str | None = None

  def start(self) -> None:
    """Begins to serve."""
    self._thread.start()

  def close(self) -> None:
    """Ends the thread after its present step; requests under way fail."""
    self._calls.put(None)
    if self._thread.is_alive():
      self._thread.join()

  def call(self, function: Callable[[Engine], _T]) -> concurrent.futures.Future[_T]:
    """Runs `function` in the engine's thread between two steps."""
    future: concurrent.futures.Future[_T] = concurrent.futures.Future()
    self._calls.put((future, function))
    if self._ended.is_set():
      self._refuse_calls()
    return future

  async def generate(self, requests: Sequence[Request]) -> 'TokenStream':
    """Begins all of the requests, or none.

    Raises:
      RequestError: one can never be served.
      EngineFullError, WeightsError: see `Engine.add`.
      EngineStoppedError: there is no engine any more.
    """
    stream = TokenStream(self, sum(r.samples for r in requests))
    try:
      await asyncio.wrap_future(self.call(lambda engine: self._begin(engine, requests, stream)))
    except BaseException:
      stream.close()  # Also if the one who waits was cancelled after the engine had begun.
      raise
    return stream

  # --- In the engine's thread ---

  def _begin(self, engine: Engine, requests: Sequence[Request], stream: 'TokenStream') -> None:
    for number, request in enumerate(requests):
      self._open[engine.add(request)] = _Open(stream, number, request.samples)

  def _cancel(self, engine: Engine, stream: 'TokenStream') -> None:
    for request_id in [i for i, o in self._open.items() if o.stream is stream]:
      del self._open[request_id]
      engine.cancel(request_id)

  def _run(self) -> None:
    try:
      while True:
        while self._engine.idle or not self._calls.empty():
          call = self._calls.get()
          if call is None:
            return
          _execute(call, self._engine)
          self.stats = self._engine.stats()
        events = self._engine.step()
        self.stats = self._engine.stats()
        self._publish(events)
    except Exception as e:
      # The step took the cache's arrays with it, so nothing can go on.
      self.failure = f'{type(e).__name__}: {e}'
      _log.exception('the engine failed; restart the server')
    finally:
      self._ended.set()
      self._refuse_calls()
      for stream in {o.stream for o in self._open.values()}:
        stream.post([EngineStoppedError(self._why())])
      self._open.clear()

  def _publish(self, events: Sequence[Event]) -> None:
    batches: dict[TokenStream, list[tuple[int, Event]]] = {}
    for event in events:
      known = self._open.get(event.request_id)
      if known is None:
        continue
      batches.setdefault(known.stream, []).append((known.number, event))
      known.samples -= event.finished
      if not known.samples:
        del self._open[event.request_id]
    for stream, batch in batches.items():
      if not stream.post(batch):
        self._cancel(self._engine, stream)

  def _refuse_calls(self) -> None:
    while True:
      try:
        call = self._calls.get_nowait()
      except queue.Empty:
        return
      if call is not None and call[0].set_running_or_notify_cancel():
        call[0].set_exception(EngineStoppedError(self._why()))

  def _why(self) -> str:
    return f'the engine failed ({self.failure})' if self.failure else 'the server is shutting down'


@dataclasses.dataclass
class _Open:
  """A request under way: whose it is, its number there, how many samples are not finished."""

  stream: 'TokenStream'
  number: int
  samples: int


def _execute(call: _Call, engine: Engine) -> None:
  future, function = call
  if future.set_running_or_notify_cancel():
    try:
      future.set_result(function(engine))
    except BaseException as e:
      future.set_exception(e)


class TokenStream(AsyncIterator[tuple[int, Event]]):
  """The tokens of some requests as they come, each with the number of its request.

  Leaving its `async with` block ends what has not finished, and frees its pages.
  """

  def __init__(self, thread: EngineThread, samples: int):
    self._thread = thread
    self._loop = asyncio.get_running_loop()
    self._events: asyncio.Queue[tuple[int, Event] | Exception] = asyncio.Queue()
    self._samples = samples

  async def __aenter__(self) -> Self:
    return self

  async def __aexit__(self, *_: object) -> None:
    self.close()

  async def __anext__(self) -> tuple[int, Event]:
    if not self._samples:
      raise StopAsyncIteration
    item = await self._events.get()
    if isinstance(item, Exception):
      raise item
    self._samples -= item[1].finished
    return item

  def close(self) -> None:
    """Ends what has not finished. May be called again."""
    if self._samples:
      self._samples = 0
      self._thread.call(lambda engine: self._thread._cancel(engine, self))

  def post(self, items: Sequence[tuple[int, Event] | Exception]) -> bool:
    """Hands items over from another thread; False if the consumer's event loop is closed."""
    try:
      self._loop.call_soon_threadsafe(self._put, items)
    except RuntimeError:
      return False
    return True

  def _put(self, items: Sequence[tuple[int, Event] | Exception]) -> None:
    for item in items:
      self._events.put_nowait(item)
