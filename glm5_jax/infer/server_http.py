"""HTTP around the routes: bodies with limits, streams that end with their client, patience."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.types import Receive, Scope, Send
from uvicorn.protocols.http.h11_impl import H11Protocol

from glm5_jax.infer.server_answers import dumps
from glm5_jax.infer.server_requests import ApiError

_T = TypeVar('_T')
# So much of a body that is too long is read all the same, so that its sender comes to our answer.
_DRAIN_BYTES = 64 << 20

_log = logging.getLogger(__name__)


class JsonResponse(Response):
  """A JSON value."""

  media_type = 'application/json'

  def render(self, content: Any) -> bytes:
    return dumps(content)


def error_response(error: ApiError) -> Response:
  """The answer that an error is."""
  return JsonResponse(error.body(), error.status, error.headers)


async def read_body(request: Request, limit: int, seconds: float) -> bytes:
  """The body of a JSON request.

  Raises:
    ApiError: it is of another type, has more than `limit` bytes, or took longer than `seconds`.
    ClientDisconnect: the client is gone.
  """
  kind = request.headers.get('content-type', '').partition(';')[0].strip().lower()
  if kind != 'application/json':
    # A web page of another origin can send any other type without asking.
    raise ApiError(415, f'Content-Type must be application/json, not {kind!r}')
  chunks: list[bytes] = []
  size = 0
  try:
    async with asyncio.timeout(seconds):
      async for chunk in request.stream():
        size += len(chunk)
        if size <= limit:
          chunks.append(chunk)
        elif size > limit + _DRAIN_BYTES:
          break
  except TimeoutError:
    raise ApiError(
      408, f'the body did not arrive within {seconds:g} s', headers={'Connection': 'close'}
    ) from None
  if size > limit:
    raise ApiError(413, f'the body has more than the {limit} bytes that this server takes')
  return b''.join(chunks)


async def _disconnected(receive: Receive) -> None:
  while (await receive())['type'] != 'http.disconnect':
    pass


async def while_connected(receive: Receive, work: Coroutine[Any, Any, _T]) -> _T:
  """The result of `work`, which is cancelled when the client goes.

  Raises:
    ClientDisconnect: it went.
  """
  task = asyncio.ensure_future(work)
  gone = asyncio.ensure_future(_disconnected(receive))
  try:
    await asyncio.wait({task, gone}, return_when=asyncio.FIRST_COMPLETED)
    if not task.done():
      raise ClientDisconnect
    return task.result()
  finally:
    for each in (task, gone):
      each.cancel()
    await asyncio.gather(task, gone, return_exceptions=True)


class EventStream(Response):
  """Server-sent events; an error on the way is the last one, in OpenAI's form.

  Args:
    chunks: JSON values; closed when the client goes or the time is over.
    deadline: of the event loop's clock.
  """

  media_type = 'text/event-stream'

  def __init__(self, chunks: AsyncGenerator[Any, None], deadline: float):
    super().__init__(headers={'Cache-Control': 'no-store', 'X-Accel-Buffering': 'no'})
    del self.headers['content-length']
    self._chunks, self._deadline = chunks, deadline

  async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
    async with contextlib.aclosing(self._chunks):
      with contextlib.suppress(ClientDisconnect):
        await while_connected(receive, self._send_all(send))

  async def _send_all(self, send: Send) -> None:
    async def event(data: bytes) -> None:
      body = b'data: ' + data + b'\n\n'
      await send({'type': 'http.response.body', 'body': body, 'more_body': True})

    await send({
      'type': 'http.response.start', 'status': self.status_code, 'headers': self.raw_headers
    })  # fmt: skip
    try:
      async with asyncio.timeout_at(self._deadline):
        async for chunk in self._chunks:
          await event(dumps(chunk))
      last = b'[DONE]'
    except TimeoutError:
      last = dumps(late().body())
    except ApiError as e:
      last = dumps(e.body())
    except Exception:
      _log.exception('a stream failed')
      last = dumps(failure().body())
    # Now, for a client that reads no more may let the last words wait.
    await self._chunks.aclose()
    await event(last)
    await send({'type': 'http.response.body', 'body': b'', 'more_body': False})


def late() -> ApiError:
  """For a request that takes longer than the server allows."""
  return ApiError(
    504, 'the answer took longer than this server allows; ask for fewer tokens (max_tokens)'
  )


def failure() -> ApiError:
  """For what should not have happened; the log says what it was."""
  return ApiError(500, 'the server failed; see its log')


def patient_protocol(
  header_seconds: float, stall_seconds: float, connections: int
) -> type[H11Protocol]:
  """uvicorn's HTTP/1.1 without endless patience.

  Args:
    header_seconds: after which a connection must have sent a request's headers.
    stall_seconds: after which a client must have taken something of what waits for it.
    connections: at a time; further ones are closed at once.
  """

  class Protocol(H11Protocol):
    """Closes connections that send half a request, or do not read their answer."""

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
      super().connection_made(transport)
      self._headers = _Timer(self.loop, header_seconds, transport.abort)
      self._reading = _Timer(self.loop, stall_seconds, transport.abort)
      if len(self.connections) > connections:
        transport.abort()
      else:
        self._headers.start()

    def data_received(self, data: bytes) -> None:
      super().data_received(data)
      if self.cycle is not None and not self.cycle.response_complete:
        self._headers.stop()
      else:
        self._headers.start()

    def pause_writing(self) -> None:
      super().pause_writing()
      self._reading.start()

    def resume_writing(self) -> None:
      super().resume_writing()
      self._reading.stop()

    def connection_lost(self, exc: Exception | None) -> None:
      self._headers.stop()
      self._reading.stop()
      super().connection_lost(exc)

  return Protocol


class _Timer:
  """Does something in a while, unless it is stopped before."""

  def __init__(self, loop: asyncio.AbstractEventLoop, seconds: float, action: Callable[[], None]):
    self._loop, self._seconds, self._action = loop, seconds, action
    self._handle: asyncio.TimerHandle | None = None

  def start(self) -> None:
    """Does nothing if it runs already."""
    if self._handle is None:
      self._handle = self._loop.call_later(self._seconds, self._action)

  def stop(self) -> None:
    if self._handle is not None:
      self._handle.cancel()
      self._handle = None
