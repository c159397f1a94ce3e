"""The OpenAI-compatible server: routes, limits, and its life from the first request to the last.

  serve(engine, tokenizer, ServerConfig(name='glm5-nano'), listen('127.0.0.1', 8000))

Requests become `infer.request.Request`s and go to the engine's thread; everything else is asyncio.
docs/serving.md describes the endpoints.
"""

import asyncio
import contextlib
import dataclasses
import math
import signal
import socket
import threading
import time
from collections.abc import AsyncGenerator, Iterator, Sequence
from typing import Any, NamedTuple

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from starlette.types import ASGIApp

from glm5_jax.data.chat import ChatFormat
from glm5_jax.data.tokenizer import Tokenizer
from glm5_jax.infer import request as requests
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.server_answers import (
  ChatChoice,
  Choice,
  Envelope,
  TextChoice,
  Usage,
  token_output,
)
from glm5_jax.infer.server_chat import chat_job
from glm5_jax.infer.server_engine import EngineStoppedError, EngineThread, TokenStream
from glm5_jax.infer.server_gate import HANDLERS, Gate
from glm5_jax.infer.server_http import (
  EventStream,
  JsonResponse,
  late,
  patient_protocol,
  read_body,
  while_connected,
)
from glm5_jax.infer.server_metrics import Metrics
from glm5_jax.infer.server_page import Page
from glm5_jax.infer.server_requests import (
  ApiError,
  Fields,
  Sizes,
  StreamOptions,
  completion_requests,
  load_json,
  shown,
  stream_options,
  token_request,
)


@dataclasses.dataclass(frozen=True)
class ServerConfig:
  """What is served, and the limits.

  Attributes:
    name: of the model, for clients.
    form: the chat template's switches where a request does not set them.
    api_key: what clients must send as a bearer token; empty lets everyone in.
    hosts: names in the Host header that are answered; empty answers any.
    body_bytes: of a request.
    new_tokens: of an answer; 0 is as many as fit.
    sequences: answers under way at a time, those that wait for a place in the engine included.
    connections: at a time.
    header_seconds, body_seconds: until a request's headers, and its body, have arrived; a client
      that takes nothing of a waiting answer for body_seconds is cut off.
    request_seconds: from there to the end of the answer.
    drain_seconds: that requests under way have to finish, once the server is told to end.
  """

  name: str
  form: ChatFormat = dataclasses.field(default_factory=ChatFormat)
  api_key: str = dataclasses.field(default='', repr=False)
  hosts: tuple[str, ...] = ()
  body_bytes: int = 8 << 20
  new_tokens: int = 0
  sequences: int = 64
  connections: int = 256
  header_seconds: float = 10.0
  body_seconds: float = 30.0
  request_seconds: float = 600.0
  drain_seconds: int = 30

  def __post_init__(self):
    for name in ('sequences', 'connections', 'body_bytes'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1')
    for name in ('header_seconds', 'body_seconds', 'request_seconds', 'drain_seconds'):
      if not getattr(self, name) > 0:
        raise ValueError(f'{name}={getattr(self, name)} must be positive')
    if self.new_tokens < 0:
      raise ValueError(f'new_tokens={self.new_tokens} must be at least 0')


class _Job(NamedTuple):
  """A call, ready for the engine. The choices are in the order of requests, then samples."""

  requests: Sequence[requests.Request]
  choices: Sequence[Choice]
  envelope: Envelope
  options: StreamOptions


class Server:
  """See the module.

  Attributes:
    thread: the engine's.
    app: the ASGI application; its lifespan starts and ends the thread.
    under_way: answers that have a place, see `ServerConfig.sequences`.
  """

  def __init__(self, engine: Engine, tokenizer: Tokenizer, config: ServerConfig):
    self.thread = EngineThread(engine)
    self._tokenizer, self._config = tokenizer, config
    length = engine.sizes.max_length
    new = config.new_tokens or length
    self._sizes = Sizes(engine.config.vocab_size, length, new, config.sequences)
    self._created = int(time.time())
    self.under_way = 0
    self._metrics = Metrics(lambda: self.thread.stats)
    self._page = Page()
    routes = {
      '/': (self._home, 'GET'),
      '/health': (self._health, 'GET'),
      '/metrics': (self._show_metrics, 'GET'),
      '/v1/models': (self._models, 'GET'),
      '/v1/chat/completions': (self._chat, 'POST'),
      '/v1/completions': (self._completions, 'POST'),
      '/generate': (self._generate, 'POST'),
    }
    starlette = Starlette(
      routes=[
        *(Route(path, handler, methods=[method]) for path, (handler, method) in routes.items()),
        Route('/v1/models/{model:path}', self._model, methods=['GET']),
      ],
      exception_handlers=HANDLERS,
      lifespan=self._lifespan,
    )
    self.app: ASGIApp = Gate(
      starlette, hosts=config.hosts, api_key=config.api_key, metrics=self._metrics,
      paths=frozenset(routes),
    )  # fmt: skip

  @contextlib.asynccontextmanager
  async def _lifespan(self, _app: Starlette) -> AsyncGenerator[None, None]:
    self.thread.start()
    yield
    await asyncio.to_thread(self.thread.close)

  # --- Routes ---

  async def _home(self, _request: Request) -> Response:
    return self._page.response()

  async def _health(self, _request: Request) -> Response:
    failure = self.thread.failure
    body = {
      'status': 'failed' if failure else 'ok', 'failure': failure, 'model': self._config.name,
      'max_length': self._sizes.max_length, **self.thread.stats,
    }  # fmt: skip
    return JsonResponse(body, 503 if failure else 200)

  async def _show_metrics(self, _request: Request) -> Response:
    return Response(self._metrics.text(), media_type='text/plain; version=0.0.4')

  def _card(self) -> dict[str, Any]:
    return {
      'id': self._config.name, 'object': 'model', 'created': self._created, 'owned_by': 'glm5_jax',
      'max_model_len': self._sizes.max_length,
    }  # fmt: skip

  async def _models(self, _request: Request) -> Response:
    return JsonResponse({'object': 'list', 'data': [self._card()]})

  async def _model(self, request: Request) -> Response:
    self._check_model(request.path_params['model'])
    return JsonResponse(self._card())

  async def _chat(self, request: Request) -> Response:
    return await self._serve(request, self._chat_job)

  async def _completions(self, request: Request) -> Response:
    return await self._serve(request, self._completion_job)

  async def _generate(self, request: Request) -> Response:
    made = await self._read(request, lambda fields: token_request(fields, self._sizes))
    deadline = asyncio.get_running_loop().time() + self._config.request_seconds

    async def run() -> Response:
      tops: dict[int, list] = {}
      outputs = {}
      async for _, event in stream:
        if made.top_logprobs:
          tops.setdefault(event.sample, []).append(event.top_logprobs)
        if event.output is not None:
          outputs[event.sample] = token_output(event.output, tops.get(event.sample, ()))
      return JsonResponse({'outputs': [outputs[i] for i in sorted(outputs)]})

    with self._place([made]):
      async with await self._begin([made]) as stream:
        return await self._whole(request, run(), deadline)

  # --- From a body to the engine ---

  async def _read(self, request: Request, make: Any) -> Any:
    """What `make` makes of the body's fields, in a thread: tokenising can take a while."""
    body = await read_body(request, self._config.body_bytes, self._config.body_seconds)
    return await asyncio.to_thread(lambda: make(Fields(load_json(body))))

  def _check_model(self, name: str | None) -> None:
    if name is not None and name != self._config.name:
      raise ApiError(
        404,
        f'there is no model {shown(name)} here; this server has {self._config.name!r}',
        param='model',
        code='model_not_found',
      )

  def _envelope(self, kind: str) -> Envelope:
    return Envelope(kind, self._config.name, f'weights-{self.thread.stats["version"]}')

  def _chat_job(self, fields: Fields) -> _Job:
    self._check_model(fields.text('model'))
    options = stream_options(fields)
    job = chat_job(fields, self._tokenizer, self._config.form, self._sizes)
    choices = [
      ChatChoice(i, job.reader(self._tokenizer), self._tokenizer, job.logprobs)
      for i in range(job.request.samples)
    ]
    return _Job([job.request], choices, self._envelope('chat.completion'), options)

  def _completion_job(self, fields: Fields) -> _Job:
    self._check_model(fields.text('model'))
    options = stream_options(fields)
    made, logprobs = completion_requests(fields, self._tokenizer, self._sizes)
    fields.done()
    count = sum(r.samples for r in made)
    choices = [TextChoice(i, self._tokenizer, logprobs is not None) for i in range(count)]
    return _Job(made, choices, self._envelope('text_completion'), options)

  # --- From the engine to an answer ---

  async def _serve(self, request: Request, make: Any) -> Response:
    job: _Job = await self._read(request, make)
    deadline = asyncio.get_running_loop().time() + self._config.request_seconds
    if job.options.stream:
      chunks = self._chunks(job)
      await anext(chunks)  # Until the engine has begun, so that a refusal still has its status.
      return EventStream(chunks, deadline)
    with self._place(job.requests):
      async with await self._begin(job.requests) as stream:
        return await self._whole(request, self._answer(job, stream), deadline)

  @contextlib.contextmanager
  def _place(self, made: Sequence[requests.Request]) -> Iterator[None]:
    """A place for these requests among those under way.

    Raises:
      ApiError: there is none.
    """
    wanted = sum(r.samples for r in made)
    if wanted > self._config.sequences:
      raise ApiError(400, f'{wanted} answers at once; at most {self._config.sequences}', param='n')
    if self.under_way + wanted > self._config.sequences:
      raise _full(f'{self.under_way} answers are under way, of {self._config.sequences}')
    self.under_way += wanted
    try:
      yield
    finally:
      self.under_way -= wanted

  async def _begin(self, made: Sequence[requests.Request]) -> TokenStream:
    try:
      return await self.thread.generate(made)
    except requests.RequestError as e:
      raise ApiError(400, str(e)) from None
    except requests.EngineFullError as e:
      raise _full(str(e)) from None
    except (EngineStoppedError, requests.WeightsError) as e:
      raise ApiError(503, str(e)) from None

  async def _events(
    self, stream: TokenStream, job: _Job, usage: Usage
  ) -> AsyncGenerator[Any, None]:
    """The choices of chunks, as they come; all tokens are fed to their choices and to `usage`."""
    first = [0]
    for made in job.requests:
      first.append(first[-1] + made.samples)
    started = time.monotonic()
    began = False
    try:
      async for number, event in stream:
        if not began:
          began = True
          self._metrics.first_token.observe(time.monotonic() - started)
        usage.add(number, event)
        if event.output is not None and event.output.finish_reason == 'error':
          raise ApiError(
            500, "the model's output is not finite; its weights or sampling are broken"
          )
        said = job.choices[first[number] + event.sample].add(event)
        if said is not None:
          yield said
    except EngineStoppedError as e:
      raise ApiError(503, str(e)) from None

  async def _answer(self, job: _Job, stream: TokenStream) -> Response:
    usage = Usage(sum(len(r.prompt_ids) for r in job.requests))
    async for _ in self._events(stream, job, usage):
      pass
    return JsonResponse(job.envelope.whole([c.whole() for c in job.choices], usage))

  async def _chunks(self, job: _Job) -> AsyncGenerator[Any, None]:
    """Chunks of a stream, after a first None that says it has begun."""
    usage = Usage(sum(len(r.prompt_ids) for r in job.requests))
    every = usage if job.options.every_usage else None
    chunk = job.envelope.chunk
    with self._place(job.requests):
      async with await self._begin(job.requests) as stream:
        yield None
        for choice in job.choices:
          if (said := choice.first()) is not None:
            yield chunk([said], every)
        async for said in self._events(stream, job, usage):
          yield chunk([said], every)
        if job.options.usage:
          yield chunk([], usage)

  async def _whole(self, request: Request, work: Any, deadline: float) -> Response:
    """An answer in one piece: the result of `work`, unless the client goes or the time is over."""
    try:
      async with asyncio.timeout_at(deadline):
        return await while_connected(request.receive, work)
    except TimeoutError:
      raise late() from None
    except EngineStoppedError as e:
      raise ApiError(503, str(e)) from None


def _full(why: str) -> ApiError:
  return ApiError(429, f'the server is full: {why}; try again later', headers={'Retry-After': '1'})


def listen(host: str, port: int) -> socket.socket:
  """A bound socket; port 0 takes a free one.

  Raises:
    OSError: the address is taken or not this machine's.
  """
  family = socket.AF_INET6 if ':' in host else socket.AF_INET
  sock = socket.socket(family, socket.SOCK_STREAM)
  sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
  try:
    sock.bind((host, port))
  except OSError:
    sock.close()
    raise
  return sock


def uvicorn_server(server: Server, config: ServerConfig) -> uvicorn.Server:
  """The HTTP server for it; nothing of a client's that it believes but the request itself."""
  return uvicorn.Server(
    uvicorn.Config(
      server.app,
      loop='asyncio',
      http=patient_protocol(config.header_seconds, config.body_seconds, config.connections),
      ws='none',
      lifespan='on',
      proxy_headers=False,
      server_header=False,
      access_log=False,
      log_level='warning',
      timeout_keep_alive=math.ceil(config.header_seconds),
      timeout_graceful_shutdown=config.drain_seconds,
    )
  )


def serve(engine: Engine, tokenizer: Tokenizer, config: ServerConfig, sock: socket.socket) -> None:
  """Serves until SIGTERM or Ctrl-C, then lets requests under way finish.

  Args:
    engine: warmed up; the server's alone from here on.
    tokenizer: of its model, with GLM's special tokens for chat.
    config: see `ServerConfig`.
    sock: bound, as `listen` gives; closed at the end.
  """
  http = uvicorn_server(Server(engine, tokenizer, config), config)
  with _survive_signals():
    http.run(sockets=[sock])


@contextlib.contextmanager
def _survive_signals() -> Iterator[None]:
  """uvicorn drains on a signal and then raises it again, which would end the process by it."""
  if threading.current_thread() is not threading.main_thread():
    yield
    return
  numbers = (signal.SIGTERM, signal.SIGINT)
  before = {number: signal.signal(number, lambda *_: None) for number in numbers}
  try:
    yield
  finally:
    for number, handler in before.items():
      signal.signal(number, handler)
