"""A really running server of a tiny model: uvicorn in a thread, real sockets on loopback."""

import contextlib
import dataclasses
import http.client
import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from typing import Any

import uvicorn

from glm5_jax.data.tokenizer import ByteTokenizer
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.infer.server import Server, ServerConfig, listen, uvicorn_server
from tests import tiny

TOKENIZER = ByteTokenizer()
MAX_LENGTH = 1536
ENDLESS_SEED = 424242
SIZES = EngineConfig(
  page_size=16, pages=257, max_length=MAX_LENGTH, max_sequences=4, max_step_tokens=260,
  prefill_buckets=(256,), batch_buckets=(4,), page_buckets=(96,),
  compiler_options=tuple(tiny.FAST_COMPILE.items()),
)  # fmt: skip
TOOL = {
  'type': 'function',
  'function': {
    'name': 'add',
    'parameters': {
      'type': 'object',
      'properties': {'a': {'type': 'integer'}, 'note': {'type': 'string'}},
    },
  },
}
NAME = 'tiny'


PATIENCE = 300.0  # Seconds until a test gives up on what must come; no machine is that busy.


def eventually(condition: Callable[[], Any], what: object) -> Any:
  """The first true value of `condition()`, however long that takes; `what` is shown if it never comes."""
  end = time.monotonic() + PATIENCE
  while time.monotonic() < end:
    if value := condition():
      return value
    time.sleep(0.02)
  raise AssertionError(f'not within {PATIENCE:.0f} s: {what}')


class Scripted(Engine):
  """The engine, but for requests with certain seeds: some have a script of tokens, some never end.

  Attributes:
    scripts: tokens to be drawn, by seed.
    held: after how many tokens requests are halted, by seed, for as long as it is in here.
  """

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.scripts: dict[int, list[int]] = {}
    self.held = {ENDLESS_SEED: 8}

  def _decode(self, sequences):
    moving = [s for s in sequences if len(s.versions) < self.held.get(s.request.seed, MAX_LENGTH)]
    if not moving:
      time.sleep(0.005)  # Or it would keep a core busy.
    return super()._decode(moving) if moving else []

  def script(self, seed: int, text: str) -> int:
    """Names of special tokens in the text are these tokens. Returns the seed."""
    self.scripts[seed] = TOKENIZER.encode(text, allow_special=True).tolist()
    return seed

  def _advance(self, sequence, token, logprob, raw):
    script = self.scripts.get(sequence.request.seed)
    drawn = len(sequence.tokens) - sequence.prompt_tokens
    if script is not None and drawn < len(script):
      token = script[drawn]
    return super()._advance(sequence, token, logprob, raw)


def tiny_engine(**changes) -> Scripted:
  config = tiny.config(
    first_k_dense_replace=0, vocab_size=TOKENIZER.vocab_size, max_position_embeddings=2048,
    eos_token_id=(TOKENIZER.eot_id,),
  )  # fmt: skip
  # Small weights: the distribution is nearly uniform, so that seeds matter and ends are rare.
  params = tiny.random_params(config, std=0.05)
  return Scripted(params, config, TOKENIZER, dataclasses.replace(SIZES, **changes))


@dataclasses.dataclass
class Live:
  """A server that runs. `engine` belongs to its thread; `stats` and `scripts` may be used."""

  engine: Scripted
  server: Server
  port: int
  http: uvicorn.Server | None = None

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self.port}'

  def call(
    self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
  ) -> tuple[int, dict[str, str], Any]:
    """(status, headers with lower-case names, the JSON or the text of the answer)."""
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=PATIENCE)
    with contextlib.closing(connection):
      data = body if isinstance(body, bytes | None) else json.dumps(body).encode()
      headers = {'Content-Type': 'application/json', **(headers or {})}
      connection.request(method, path, data, headers)
      answer = connection.getresponse()
      text = answer.read().decode()
      found = {k.lower(): v for k, v in answer.getheaders()}
      is_json = found.get('content-type', '').startswith('application/json')
      return answer.status, found, json.loads(text) if is_json else text

  def post(self, path: str, body: Any, **headers: str) -> tuple[int, dict[str, str], Any]:
    return self.call('POST', path, body, headers)

  def stats(self) -> dict[str, Any]:
    return self.call('GET', '/health')[2]

  def wait_until(self, condition: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Waits for `condition(stats)`; returns these."""
    stats: dict[str, Any] = {}

    def true() -> bool:
      stats.update(self.stats())
      return condition(stats)

    eventually(true, stats)
    return stats

  def wait_for_quiet(self) -> dict[str, Any]:
    """Until nothing runs, and no request is on its way there but the one that asks."""

    def quiet(stats: dict[str, Any]) -> bool:
      tasks = len(self.http.server_state.tasks)
      return stats['running'] == stats['waiting'] == self.server.under_way == 0 and tasks <= 1

    return self.wait_until(quiet)

  def check_healthy(self) -> None:
    """It answers, nothing runs, and every page has come back."""
    stats = self.wait_for_quiet()
    assert stats['status'] == 'ok' and stats['pages_used'] == stats['pages_cached']

    def clear(engine):
      engine.clear_prefix_cache()
      allocator = engine._scheduler.allocator
      assert allocator.used == 0 and not allocator._references.any()

    self.server.thread.call(clear).result()
    answer = self.post('/generate', {'prompt_ids': [1, 2, 3], 'max_tokens': 2, 'ignore_eos': True})
    assert answer[0] == 200 and len(answer[2]['outputs'][0]['ids']) == 2


@contextlib.contextmanager
def running(engine: Scripted, send_buffer: int = 0, **changes) -> Iterator[Live]:
  """Serves the engine until the block ends; with time for everything, if `changes` do not say less.

  Of each answer the kernel keeps about `send_buffer` bytes that the client has not read; 0: as many as it
  likes.
  """
  times = ('header_seconds', 'body_seconds', 'request_seconds')
  usual = {'hosts': ('127.0.0.1', 'localhost')} | dict.fromkeys(times, PATIENCE)
  config = ServerConfig(NAME, **usual | changes)
  server = Server(engine, TOKENIZER, config)
  http_server = uvicorn_server(server, config)
  sock = listen('127.0.0.1', 0)
  if send_buffer:
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, send_buffer)
  port = sock.getsockname()[1]
  thread = threading.Thread(target=http_server.run, kwargs={'sockets': [sock]}, daemon=True)
  thread.start()
  eventually(lambda: http_server.started or not thread.is_alive(), 'the server starts')
  assert thread.is_alive(), 'the server did not start'
  try:
    yield Live(engine, server, port, http_server)
  finally:
    http_server.should_exit = True
    thread.join(PATIENCE)
    assert not thread.is_alive(), 'the server did not end'
