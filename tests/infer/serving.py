"""A really running server of a tiny model: uvicorn in a thread, real sockets on loopback."""

import contextlib
import dataclasses
import http.client
import json
import threading
import time
from collections.abc import Iterator
from typing import Any

from glm5_jax.data.tokenizer import ByteTokenizer
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.infer.server import Server, ServerConfig, listen, uvicorn_server
from tests import tiny

TOKENIZER = ByteTokenizer()
MAX_LENGTH = 1536
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


class Scripted(Engine):
  """The engine, but for requests whose seed has a script: those draw its tokens."""

  def __init__(self, *args, **kwargs):
    super().__init__(*args, **kwargs)
    self.scripts: dict[int, list[int]] = {}

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

  @property
  def url(self) -> str:
    return f'http://127.0.0.1:{self.port}'

  def call(
    self, method: str, path: str, body: Any = None, headers: dict[str, str] | None = None
  ) -> tuple[int, dict[str, str], Any]:
    """(status, headers with lower-case names, the JSON or the text of the answer)."""
    connection = http.client.HTTPConnection('127.0.0.1', self.port, timeout=300)
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

  def wait_until(self, condition, seconds: float = 20.0) -> dict[str, Any]:
    """Waits for `condition(stats)`."""
    end = time.monotonic() + seconds
    while time.monotonic() < end:
      stats = self.stats()
      if condition(stats):
        return stats
      time.sleep(0.02)
    raise AssertionError(f'after {seconds} s: {self.stats()}')

  def check_healthy(self) -> None:
    """It answers, nothing runs, and every page has come back."""
    stats = self.wait_until(lambda s: s['running'] == s['waiting'] == 0)
    assert stats['status'] == 'ok' and stats['pages_used'] == stats['pages_cached']
    assert self.server.under_way == 0

    def clear(engine):
      engine.clear_prefix_cache()
      allocator = engine._scheduler.allocator
      assert allocator.used == 0 and not allocator._references.any()

    self.server.thread.call(clear).result()
    answer = self.post('/generate', {'prompt_ids': [1, 2, 3], 'max_tokens': 2})
    assert answer[0] == 200 and len(answer[2]['outputs'][0]['ids']) == 2


@contextlib.contextmanager
def running(engine: Scripted, **changes) -> Iterator[Live]:
  """Serves the engine until the block ends."""
  config = ServerConfig(NAME, **{'hosts': ('127.0.0.1', 'localhost'), **changes})
  server = Server(engine, TOKENIZER, config)
  http_server = uvicorn_server(server, config)
  sock = listen('127.0.0.1', 0)
  port = sock.getsockname()[1]
  thread = threading.Thread(target=http_server.run, kwargs={'sockets': [sock]}, daemon=True)
  thread.start()
  while not http_server.started:
    assert thread.is_alive(), 'the server did not start'
    time.sleep(0.01)
  try:
    yield Live(engine, server, port)
  finally:
    http_server.should_exit = True
    thread.join(120)
    assert not thread.is_alive(), 'the server did not end'
