"""Load over HTTP: concurrent clients that stream, what they wait for, and that nothing is lost."""

import contextlib
import http.client
import itertools
import json
import multiprocessing
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from benchmarks.serving import runs
from glm5_jax.data.tokenizer import ByteTokenizer
from glm5_jax.infer.programs import EngineConfig
from glm5_jax.infer.server import ServerConfig, listen, serve

LOOPBACK = '127.0.0.1'


class Letters(ByteTokenizer):
  """Every token is a character of its own, so that a stream has an event for every token."""

  def _decode_known(self, ids: list[int]) -> str:
    return ''.join(chr(0x4E00 + i) for i in ids)


class Ask(NamedTuple):
  """One request and what a whole answer to it has."""

  prompt: list[int]
  new: int
  seed: int

  def body(self) -> bytes:
    """For /v1/completions."""
    return json.dumps({
      'prompt': self.prompt, 'max_tokens': self.new, 'seed': self.seed, 'ignore_eos': True,
      'stream': True, 'stream_options': {'include_usage': True},
    }).encode()  # fmt: skip


class Answer(NamedTuple):
  """When its tokens came, in seconds after the request was sent; what was wrong, or ''."""

  times: list[float]
  wrong: str


def asks(vocab: int, count: int, prompt: tuple[int, int], new: tuple[int, int]) -> list[Ask]:
  """Requests with lengths drawn evenly from these bounds, always the same ones."""
  rng = np.random.default_rng(count)
  return [
    Ask(rng.integers(0, vocab, rng.integers(*prompt, endpoint=True)).tolist(),
        int(rng.integers(*new, endpoint=True)), seed)
    for seed in range(count)
  ]  # fmt: skip


def ask(port: int, made: Ask, timeout: float) -> Answer:
  """Sends one request and reads its stream to the end."""
  times: list[float] = []
  usage: dict[str, Any] = {}
  reason, done, tokens = None, False, 0
  start = time.perf_counter()
  try:
    with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=timeout)) as link:
      link.request('POST', '/v1/completions', made.body(), {'Content-Type': 'application/json'})
      answer = link.getresponse()
      if answer.status != 200:
        return Answer(times, f'status {answer.status}: {answer.read().decode()}')
      for line in answer:
        if line == b'data: [DONE]\n':
          done = True
        elif line.startswith(b'data: '):
          chunk = json.loads(line[6:])
          if 'error' in chunk:
            return Answer(times, str(chunk['error']))
          usage = chunk.get('usage') or usage
          for choice in chunk['choices']:
            now = time.perf_counter() - start
            times += [now] * len(choice['text'])
            tokens += len(choice['text'])
            reason = choice['finish_reason'] or reason
  except (OSError, http.client.HTTPException, ValueError) as e:
    return Answer(times, f'{type(e).__name__}: {e}')
  want = {'prompt_tokens': len(made.prompt), 'completion_tokens': made.new}
  got = {name: usage.get(name) for name in want}
  if (got, tokens, reason, done) != (want, made.new, 'length', True):
    return Answer(times, f'{got}, {tokens} tokens, finish_reason {reason}, complete {done}')
  return Answer(times, '')


def drive(
  port: int, made: Sequence[Ask], clients: int, timeout: float
) -> tuple[list[Answer], float]:
  """All requests by so many clients, each of which sends its next one when it has its answer."""
  answers: list[Answer | None] = [None] * len(made)
  queue = iter(range(len(made)))
  lock = threading.Lock()

  def client() -> None:
    while True:
      with lock:
        number = next(queue, None)
      if number is None:
        return
      answers[number] = ask(port, made[number], timeout)

  threads = [threading.Thread(target=client) for _ in range(clients)]
  start = time.perf_counter()
  for thread in threads:
    thread.start()
  for thread in threads:
    thread.join()
  seconds = time.perf_counter() - start
  return [a or Answer([], 'never answered') for a in answers], seconds


def summary(answers: Sequence[Answer], seconds: float, clients: int) -> dict[str, Any]:
  """What the clients of one level saw; times in seconds."""
  whole = [a for a in answers if not a.wrong]
  first = [a.times[0] for a in whole]
  between = [b - a for answer in whole for a, b in itertools.pairwise(answer.times)]
  out: dict[str, Any] = {
    'clients': clients, 'requests': len(answers), 'lost': len(answers) - len(whole),
    'wrong': sorted({a.wrong for a in answers if a.wrong})[:5],
    'tokens_per_second': sum(len(a.times) for a in whole) / seconds,
  }  # fmt: skip
  for name, values in (('first', first), ('between', between)):
    for q in (50, 95):
      out[f'{name}_p{q}'] = float(np.percentile(values, q)) if values else None
  return out


def _state(port: int) -> dict[str, Any]:
  with contextlib.closing(http.client.HTTPConnection(LOOPBACK, port, timeout=300)) as link:
    link.request('GET', '/health')
    return json.loads(link.getresponse().read())


def settled(port: int, seconds: float = 60.0) -> dict[str, Any]:
  """The server's state once nothing runs; the last one seen if that does not come."""
  end = time.monotonic() + seconds
  while True:
    state = _state(port)
    if not (state['running'] or state['waiting']) or time.monotonic() > end:
      return state
    time.sleep(0.05)


def levels(
  port: int, vocab: int, sizes: Sequence[tuple[int, int]], prompt: tuple[int, int],
  new: tuple[int, int], timeout: float,
) -> dict[str, Any]:  # fmt: skip
  """Runs (clients, requests) one after another against a server; then what is left there."""
  drive(port, asks(vocab, 2, prompt, new), 1, timeout)
  rows = []
  for clients, requests in sizes:
    answers, seconds = drive(port, asks(vocab, requests, prompt, new), clients, timeout)
    rows.append(summary(answers, seconds, clients))
  state = settled(port)
  names = ('running', 'waiting', 'pages', 'pages_used', 'pages_cached', 'preemptions', 'requests')
  return {'prompt': prompt, 'new': new, 'rows': rows, 'end': {n: state[n] for n in names}}


def table(result: dict[str, Any]) -> str:
  """The result for people; times in milliseconds."""
  head = ('clients', 'requests', 'lost', 'tokens/s', 'first token p50, ms', 'p95',
          'between tokens p50, ms', 'p95')  # fmt: skip
  names = ('first_p50', 'first_p95', 'between_p50', 'between_p95')
  body = [
    (r['clients'], r['requests'], r['lost'], r['tokens_per_second'],
     *('' if r[n] is None else 1e3 * r[n] for n in names))
    for r in result['rows']
  ]  # fmt: skip
  return runs.markdown(head, body)


def wrong(result: dict[str, Any]) -> str:
  """What was lost; empty if nothing."""
  lost = sum(r['lost'] for r in result['rows'])
  end = result['end']
  if lost:
    return f'{lost} requests had no whole answer: {[w for r in result["rows"] for w in r["wrong"]]}'
  if end['running'] or end['waiting'] or end['pages_used'] != end['pages_cached']:
    return f'the server still holds something: {end}'
  return ''


def _server(connection: Connection, sizes: EngineConfig, requests: int) -> None:
  """A process with a server; sends its port when it is ready."""
  tokenizer = Letters()
  model = runs.random_model(vocab_size=tokenizer.vocab_size)
  made = runs.engine(model._replace(tokenizer=tokenizer), sizes)
  sock = listen(LOOPBACK, 0)
  sock.listen(256)
  connection.send(sock.getsockname()[1])
  serve(made, tokenizer, ServerConfig('bench', hosts=(LOOPBACK,), sequences=requests), sock)


@contextlib.contextmanager
def server(sizes: EngineConfig, requests: int) -> Iterator[tuple[int, int]]:
  """(port, vocabulary) of a server in a process of its own; ends it by SIGTERM."""
  context = multiprocessing.get_context('spawn')
  ours, theirs = context.Pipe()
  process = context.Process(target=_server, args=(theirs, sizes, requests))
  process.start()
  theirs.close()
  try:
    try:
      port = ours.recv()
    except EOFError:
      sys.exit('serving: the server died; its own message is above')
    yield port, Letters().vocab_size
  finally:
    process.terminate()
    process.join()
  if process.exitcode:
    sys.exit(f'serving: the server ended with exit status {process.exitcode}, not 0')
