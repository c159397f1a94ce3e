"""What clients do wrong, and what they do too much of: the server answers, and leaks nothing."""

import contextlib
import dataclasses
import http.client
import json
import pathlib
import signal
import socket
import subprocess
import sys
import threading
import time

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from glm5_jax.infer.server import ServerConfig
from glm5_jax.infer.server_gate import local_names
from tests.infer import serving
from tests.infer.serving import NAME

KEY = 'correct horse'
CHAT = '/v1/chat/completions'
# These never end by themselves, see serving.Scripted.
HELD = {'max_tokens': 1500, 'ignore_eos': True, 'seed': serving.ENDLESS_SEED}
LONG = {'prompt_ids': [1, 2, 3], **HELD}
ENDLESS = {'prompt': [1, 2, 3], 'stream': True, **HELD}
ROOT = pathlib.Path(__file__).resolve().parents[2]


@pytest.fixture(scope='module')
def live():
  with serving.running(serving.tiny_engine(), body_bytes=1 << 16, sequences=6) as live:
    yield live
    live.check_healthy()


def error_of(answer, status: int) -> str:
  """The message of an answer that must be an error in OpenAI's form."""
  got, headers, body = answer
  assert got == status, body
  assert headers['content-type'] == 'application/json'
  assert set(body) == {'error'} and set(body['error']) == {'message', 'type', 'param', 'code'}
  assert body['error']['message']
  return body['error']['message']


# --- Bodies ---


@pytest.mark.parametrize(
  'body, status, message',
  [
    (b'', 400, 'not JSON'),
    (b'{"prompt": "a"', 400, 'not JSON'),
    (b'[]', 400, 'must be a JSON object, not a list'),
    (b'{"prompt": "\xff"}', 400, 'not UTF-8'),
    ('{"prompt": "a"}'.encode('utf-16'), 400, 'not UTF-8'),
    (b'{"prompt": "a", "temperature": NaN}', 400, 'NaN is not a JSON number'),
    (b'{"prompt": "a", "temperature": -Infinity}', 400, '-Infinity is not a JSON number'),
    (b'{"prompt": "a", "temperature": 1e999}', 400, 'temperature must be within'),
    (b'{"prompt": "a", "seed": ' + b'9' * 5000 + b'}', 400, 'not JSON'),
    (b'[' * 60_000, 400, 'nested too deeply'),
    (b'{"prompt": "' + b'a' * 10_000_000 + b'"}', 413, 'more than the 65536 bytes'),
    (b'{"prompt": "' + b'a' * 60_000 + b'"}', 400, 'the prompt has 60001 tokens; at most 1535'),
    ({'prompt': 3}, 400, 'prompt must be a text'),
    ({'prompt': []}, 400, 'prompt must be a text'),
    ({'prompt': [[]]}, 400, 'non-empty lists'),
    ({'prompt': [['a']]}, 400, 'prompt must hold texts'),
    ({'prompt': ['a'] * 7}, 400, 'has 7 entries; at most 6'),
    ({'prompt': ['a'] * 4, 'n': 2}, 400, '8 answers at once; at most 6'),
    ({'prompt': [292]}, 400, 'ids outside 0..291'),
    ({'prompt': [-1]}, 400, 'ids outside 0..291'),
    ({'prompt': [10**30]}, 400, 'ids outside 0..291'),
    ({'prompt': 'a', 'stop_token_ids': [10**30], 'max_tokens': 1}, 200, ''),
    ({'prompt': 'a', 'max_tokens': 10**18}, 400, 'max_tokens=1000000000000000000 is too large'),
    ({'prompt': 'a', 'temperature': -0.5}, 400, 'temperature must be within 0..100'),
    ({'prompt': 'a', 'top_p': 0}, 400, 'top_p must be above 0'),
    ({'prompt': 'a', 'model': 'gpt'}, 404, 'there is no model "gpt" here'),
    ({'prompt': 'a', 'model': 3}, 400, 'model must be a string'),
    ({'prompt': 'a', 'echo': True}, 400, 'echo is not supported'),
    ({'prompt': 'a', 'promt': 'b'}, 400, 'did you mean prompt'),
    ({'prompt': 'a', 'stream_options': {'usage': True}}, 400, 'stream_options.'),
    ({'prompt': 'a', '\ud800': 1}, 400, 'is not a field'),
  ],
)
@pytest.mark.parametrize('stream', [False, True])
def test_wrong_completions(live, body, status, message, stream):
  if stream and isinstance(body, bytes):
    return
  body = {**body, 'stream': stream} if isinstance(body, dict) else body
  answer = live.post('/v1/completions', body)
  if status == 200:
    assert answer[0] == 200
  else:
    assert message in error_of(answer, status)


@pytest.mark.parametrize(
  'body, message',
  [
    ({}, 'prompt_ids must be a list of at least one'),
    ({'prompt_ids': 'abc'}, 'prompt_ids must be a list of token ids'),
    ({'prompt_ids': [1.5]}, 'prompt_ids must be a list of token ids'),
    ({'prompt_ids': [True]}, 'prompt_ids must be a list of token ids'),
    ({'prompt_ids': [292]}, 'ids outside'),
    ({'prompt_ids': [1] * 2000}, 'the prompt has 2000 tokens'),
    ({'prompt_ids': [1], 'prompt': 'a'}, 'did you mean prompt_ids'),
    ({'prompt_ids': [1], 'top_logprobs': 21}, 'top_logprobs must be within 0..20'),
  ],
)
def test_wrong_token_requests(live, body, message):
  assert message in error_of(live.post('/generate', body), 400)


def test_wrong_paths_methods_and_types(live):
  assert 'no such endpoint' in error_of(live.call('GET', '/v2/chat'), 404)
  assert 'GET is not what' in error_of(live.call('GET', CHAT), 405)
  answer = live.post('/generate', {'prompt_ids': [1]}, **{'Content-Type': 'text/plain'})
  assert 'must be application/json' in error_of(answer, 415)
  answer = live.post('/generate', {'prompt_ids': [1]}, Host='evil.example')
  assert 'answers to 127.0.0.1, localhost only' in error_of(answer, 403)
  assert live.call('GET', '/health', headers={'Host': 'LOCALHOST:1'})[0] == 200


def raw(live, data: bytes) -> bytes:
  """Everything that comes back for bytes on a socket, until the server closes it."""
  with socket.create_connection(('127.0.0.1', live.port), timeout=serving.PATIENCE) as s:
    answer = b''
    with contextlib.suppress(ConnectionError):
      s.sendall(data)
      while piece := s.recv(65536):
        answer += piece
    return answer


def test_no_http_at_all(live):
  assert b' 400 ' in raw(live, b'\x16\x03\x01\x02\x00hello\r\n\r\n')
  huge = b'GET / HTTP/1.1\r\nHost: localhost\r\nX: ' + b'x' * 200_000
  raw(live, huge)  # What comes back may be lost: the connection is closed on unread bytes.
  assert live.stats()['status'] == 'ok'


HEADER_SECONDS, BODY_SECONDS = 2.0, 0.5


@pytest.mark.parametrize(
  'data, answer',
  [
    (b'', b''),
    (b'POST /generate HTTP/1.1\r\nHost: local', b''),
    # A second request that never comes to its end, after one that did.
    (b'GET /health HTTP/1.1\r\nHost: localhost\r\n\r\nGET /he', b' 200 '),
  ],
)
def test_slow_headers(data, answer):
  """Who sends no more loses the connection after the time for headers."""
  with serving.running(serving.tiny_engine(), header_seconds=HEADER_SECONDS) as live:
    started = time.monotonic()
    got = raw(live, data)
    assert answer in got if answer else not got
    assert time.monotonic() - started > 0.9 * HEADER_SECONDS


def test_slow_body():
  data = (
    b'POST /generate HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    b'Content-Length: 100\r\n\r\n{"prom'
  )
  with serving.running(serving.tiny_engine(), body_seconds=BODY_SECONDS) as live:
    started = time.monotonic()
    assert b' 408 ' in raw(live, data)
    assert time.monotonic() - started > 0.9 * BODY_SECONDS


def test_dripping_headers():
  """One byte now and then does not keep a connection."""
  with serving.running(serving.tiny_engine(), header_seconds=HEADER_SECONDS) as live:
    with socket.create_connection(('127.0.0.1', live.port), timeout=serving.PATIENCE) as s:
      started = time.monotonic()
      s.sendall(b'GET /health HTTP/1.1\r\nHost: localhost\r\nX: ')

      def cut_off() -> bool:
        try:
          s.sendall(b'x')
        except OSError:
          return True
        return False

      serving.eventually(cut_off, 'the connection is closed')
      assert time.monotonic() - started > 0.9 * HEADER_SECONDS


def test_too_many_connections():
  with serving.running(serving.tiny_engine(), connections=3) as live:
    # The system hands connections over in the order in which they were made.
    idle = [socket.create_connection(('127.0.0.1', live.port)) for _ in range(3)]
    health = b'GET /health HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n\r\n'
    assert raw(live, health) == b''
    idle.pop().close()
    answer = serving.eventually(lambda: raw(live, health), 'a place is free again')
    assert b' 200 ' in answer
    for s in idle:
      s.close()


# --- Too much at once ---


@contextlib.contextmanager
def busy(live, count: int):
  """Streams that never end by themselves, each with its connection."""
  streams = []
  for _ in range(count):
    connection = http.client.HTTPConnection('127.0.0.1', live.port, timeout=serving.PATIENCE)
    connection.request(
      'POST', '/v1/completions', json.dumps(ENDLESS), {'Content-Type': 'application/json'}
    )
    answer = connection.getresponse()
    assert answer.status == 200 and answer.readline().startswith(b'data: ')
    streams.append(connection)
  try:
    yield
  finally:
    for connection in streams:
      connection.close()


@pytest.mark.parametrize('stream', [False, True])
def test_full(live, stream):
  body = {'prompt': 'a', 'max_tokens': 2, 'stream': stream}
  with busy(live, 3):
    assert live.post('/v1/completions', body)[0] == 200
    answer = live.post('/v1/completions', {**body, 'n': 4})
    assert '3 answers are under way, of 6' in error_of(answer, 429)
    assert int(answer[1]['retry-after']) >= 1
  live.wait_for_quiet()
  assert live.post('/v1/completions', {**body, 'n': 6})[0] == 200


def test_the_engines_queue_is_full():
  """Its own limit on those that wait."""
  with serving.running(serving.tiny_engine(max_waiting=1)) as live:
    with busy(live, 4):
      body = {'prompt': 'a', 'max_tokens': 2}
      waiting = threading.Thread(target=lambda: live.post('/v1/completions', body))
      waiting.start()
      live.wait_until(lambda s: s['waiting'] == 1)
      answer = live.post('/v1/completions', {'prompt': 'a'})
      assert 'requests wait already' in error_of(answer, 429)
      assert 'retry-after' in answer[1]
    waiting.join(serving.PATIENCE)
    live.check_healthy()


@pytest.mark.parametrize('stream', [False, True])
@pytest.mark.parametrize('path', ['/generate', '/v1/completions'])
def test_a_client_that_goes_is_cancelled(live, stream, path):
  if stream and path == '/generate':
    return
  before = live.stats()['cancelled']
  connection = http.client.HTTPConnection('127.0.0.1', live.port)
  body = LONG if path == '/generate' else ENDLESS | {'stream': stream}
  connection.request('POST', path, json.dumps(body), {'Content-Type': 'application/json'})
  live.wait_until(lambda s: s['running'] == 1)
  connection.close()
  stats = live.wait_until(lambda s: s['cancelled'] == before + 1)
  assert stats['running'] == 0 and stats['pages_used'] == stats['pages_cached']


def test_a_client_that_does_not_read():
  """Others go on; it is cut off once all buffers are full for too long, and its pages are free."""
  body = json.dumps({**ENDLESS, 'seed': 1, 'n': 4, 'logprobs': 20}).encode()
  head = 'POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
  engine = serving.tiny_engine()
  engine.held[1] = 400  # More than all buffers hold.
  times = {'body_seconds': 4 * BODY_SECONDS, 'request_seconds': 2 * serving.PATIENCE}
  with serving.running(engine, send_buffer=1 << 14, **times) as live:
    with socket.socket() as s:
      s.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
      s.connect(('127.0.0.1', live.port))
      s.sendall(head.encode() + f'Content-Length: {len(body)}\r\n\r\n'.encode() + body)
      # A slow poll may come when it is cut off already.
      live.wait_until(lambda s: s['running'] == 4 or s['cancelled'])
      assert live.post('/v1/completions', {'prompt': 'a', 'max_tokens': 2})[0] == 200
      live.wait_until(lambda s: s['cancelled'] == 4 and not s['running'])
    live.check_healthy()


def test_an_answer_that_takes_too_long():
  with serving.running(serving.tiny_engine(), request_seconds=0.2) as live:
    assert 'took longer' in error_of(live.post('/generate', LONG), 504)
    status, _, text = live.post('/v1/completions', ENDLESS)
    last = text.strip().rpartition('data: ')[2]
    assert status == 200 and json.loads(last)['error']['type'] == 'timeout_error'
    assert '[DONE]' not in text
    # On a busy machine two tokens may take longer than that, too.
    live.server._config = dataclasses.replace(live.server._config, request_seconds=serving.PATIENCE)
    live.check_healthy()


def test_an_engine_that_fails():
  """Those who wait are told, /health says it, and the process lives on to say so."""
  engine = serving.tiny_engine()
  with serving.running(engine) as live:

    def broken():
      raise MemoryError('no pages')

    engine.step = broken
    assert 'no pages' in error_of(live.post('/generate', LONG), 503)
    assert 'no pages' in error_of(live.post('/v1/completions', {'prompt': 'a'}), 503)
    body = {'prompt': 'a', 'stream': True}
    assert 'no pages' in error_of(live.post('/v1/completions', body), 503)
    status, _, health = live.call('GET', '/health')
    assert status == 503 and health['status'] == 'failed'


def test_a_model_that_breaks():
  """Logits that are not finite end an answer with an error, not with rubbish."""
  engine = serving.tiny_engine()
  advance = engine._advance
  engine._advance = lambda s, token, logprob, raw: advance(s, token, float('nan'), float('nan'))
  with serving.running(engine) as live:
    assert 'not finite' in error_of(live.post('/v1/completions', {'prompt': 'a'}), 500)
    text = live.post('/v1/completions', {'prompt': 'a', 'stream': True})[2]
    assert 'not finite' in json.loads(text.removeprefix('data: '))['error']['message']
    [output] = live.post('/generate', {'prompt_ids': [1]})[2]['outputs']
    assert output['finish_reason'] == 'error' and output['logprobs'] == [None]


# --- Keys and hosts ---


def test_api_key():
  with serving.running(serving.tiny_engine(), api_key=KEY) as live:
    body = {'prompt': 'a', 'max_tokens': 1}
    for sent in ('', KEY, f'Basic {KEY}', 'Bearer', 'Bearer wrong', f'Bearer {KEY}x', 'Bearer é'):
      headers = {'Authorization': sent.encode('latin-1')} if sent else {}
      answer = live.post('/v1/completions', body, **headers)
      assert 'Bearer KEY' in error_of(answer, 401) and answer[1]['www-authenticate'] == 'Bearer'
      assert error_of(live.call('GET', '/v1/models', headers=headers), 401)
    assert live.post('/v1/completions', body, Authorization=f'Bearer {KEY}')[0] == 200
    assert live.post('/v1/completions', body, Authorization=f'bearer  {KEY}')[0] == 200
    for path in ('/', '/health', '/metrics'):
      assert live.call('GET', path)[0] == 200


def test_the_key_is_not_shown():
  assert KEY not in repr(ServerConfig(NAME, api_key=KEY))


@pytest.mark.parametrize(
  'host, local',
  [('127.0.0.1', True), ('127.8.8.8', True), ('::1', True), ('localhost', True),
   ('0.0.0.0', False), ('::', False), ('192.0.2.1', False), ('example.org', False)],
)  # fmt: skip
def test_local_names(host, local):
  assert bool(local_names(host)) == local and (not local or host in local_names(host))


@pytest.mark.parametrize(
  'changes, message',
  [({'sequences': 0}, 'sequences=0'), ({'body_seconds': 0}, 'body_seconds=0'),
   ({'new_tokens': -1}, 'new_tokens=-1')],
)  # fmt: skip
def test_wrong_settings(changes, message):
  with pytest.raises(ValueError, match=message):
    ServerConfig(NAME, **changes)


# --- The end ---

_PROGRAM = """
import sys
import threading
from tests.infer import serving
from glm5_jax.infer.server import ServerConfig, listen, serve
engine = serving.tiny_engine()
engine.held[engine.script(1, 'hm</think>' + 'x' * 300 + '<|user|>')] = 8
threading.Thread(target=lambda: (sys.stdin.readline(), engine.held.clear()), daemon=True).start()
sock = listen('127.0.0.1', 0)
print(sock.getsockname()[1], flush=True)
serve(engine, serving.TOKENIZER, ServerConfig('tiny', drain_seconds=300), sock)
print('ended', flush=True)
"""


def answers(live) -> bool:
  """Whether anyone takes new requests there."""
  try:
    return live.call('GET', '/health')[0] == 200
  except OSError:
    return False


def program() -> tuple[subprocess.Popen, serving.Live]:
  """A server in a process of its own. What has seed 1 waits for a line on its standard input."""
  process = subprocess.Popen(
    [sys.executable, '-c', _PROGRAM], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True,
    cwd=ROOT,
  )  # fmt: skip
  live = serving.Live(None, None, int(process.stdout.readline()))
  serving.eventually(lambda: answers(live) or process.poll() is not None, 'the server starts')
  assert process.poll() is None, 'the server ended at once'
  return process, live


def test_drain():
  """Who is being answered gets the whole answer; new ones are turned away; exit status 0."""
  process, live = program()
  got = []
  body = {'messages': [{'role': 'user', 'content': 'a'}], 'seed': 1}
  asking = threading.Thread(target=lambda: got.append(live.post(CHAT, body)))
  asking.start()
  live.wait_until(lambda s: s['running'] == 1)
  process.send_signal(signal.SIGTERM)
  serving.eventually(lambda: not answers(live), 'new requests are turned away')
  assert asking.is_alive() and process.poll() is None
  rest, _ = process.communicate('go on\n', timeout=serving.PATIENCE)
  assert process.returncode == 0 and 'ended' in rest
  asking.join(serving.PATIENCE)
  assert got[0][0] == 200
  assert got[0][2]['choices'][0]['message']['content'] == 'x' * 300


def test_drain_has_an_end():
  """Who takes too long is told so, and the server ends all the same."""
  got = []
  with serving.running(serving.tiny_engine(), drain_seconds=1) as live:
    body = {**LONG, 'n': 4}
    asking = threading.Thread(target=lambda: got.append(live.post('/generate', body)))
    asking.start()
    live.wait_until(lambda s: s['running'] == 4)
  asking.join(serving.PATIENCE)
  assert 'shutting down' in error_of(got[0], 503)


# --- Anything ---

_SCALARS = st.one_of(
  st.none(), st.booleans(), st.integers(), st.integers(-3, 300), st.floats(), st.text(max_size=8),
  st.sampled_from([NAME, 'auto', 'none', 'required', 'user', 'assistant', 'text', 'function']),
)  # fmt: skip
_JSON = st.recursive(
  _SCALARS,
  lambda inner: st.one_of(
    st.lists(inner, max_size=3), st.dictionaries(st.text(max_size=6), inner, max_size=3)
  ),
  max_leaves=6,
)


def mostly(valid):
  """`valid`, and now and then anything."""
  return st.integers(0, 9).flatmap(lambda i: _JSON if i == 9 else valid)


_SAMPLING = {
  'max_tokens': mostly(st.integers(0, 6)),
  'temperature': mostly(st.floats(0, 2)),
  'top_p': mostly(st.floats(0, 1)),
  'top_k': mostly(st.integers(-1, 300)),
  'min_p': mostly(st.floats(0, 1)),
  'repetition_penalty': mostly(st.floats(0.01, 100)),
  'presence_penalty': mostly(st.floats(-100, 100)),
  'seed': mostly(st.integers(-(1 << 63), (1 << 64) - 1)),
  'n': mostly(st.integers(1, 3)),
  'stop': mostly(st.one_of(st.text(max_size=3), st.lists(st.text(max_size=2), max_size=3))),
  'ignore_eos': mostly(st.booleans()),
  'stop_token_ids': mostly(st.lists(st.integers(0, 300), max_size=3)),
}
_STREAM = {
  'model': mostly(st.just(NAME)),
  'stream': mostly(st.booleans()),
  'stream_options': mostly(st.fixed_dictionaries({}, optional={'include_usage': st.booleans()})),
}
_CALL = st.fixed_dictionaries({
  'function': st.fixed_dictionaries(
    {'name': st.text(max_size=3), 'arguments': mostly(st.just('{"a": 1}'))}
  )
})  # fmt: skip
_MESSAGE = st.fixed_dictionaries(
  {
    'role': mostly(st.sampled_from(['system', 'user', 'assistant', 'tool', 'developer'])),
    'content': mostly(st.text(max_size=9)),
  },
  optional={
    'reasoning_content': mostly(st.text(max_size=9)),
    'tool_calls': mostly(st.lists(_CALL, max_size=2)),
  },
)
_TOOL = st.fixed_dictionaries({
  'type': st.just('function'),
  'function': st.fixed_dictionaries(
    {'name': st.sampled_from(['f', 'g', 'f', 'g', ''])},
    optional={'parameters': mostly(st.just({'type': 'object', 'properties': {'a': {}}}))},
  ),
})  # fmt: skip
_PROMPT = st.one_of(
  st.text(max_size=9),
  st.lists(st.integers(-1, 300), max_size=5),
  st.lists(st.text(max_size=4), max_size=3),
)
_FIELDS = {
  CHAT: {
    **_SAMPLING,
    **_STREAM,
    'messages': mostly(st.lists(mostly(_MESSAGE), min_size=1, max_size=3)),
    'tools': mostly(st.lists(_TOOL, max_size=2)),
    'tool_choice': mostly(st.sampled_from(['auto', 'none', 'required'])),
    'logprobs': mostly(st.booleans()),
    'top_logprobs': mostly(st.integers(0, 20)),
    'chat_template_kwargs': mostly(
      st.fixed_dictionaries({}, optional={'enable_thinking': st.booleans()})
    ),
    'max_completion_tokens': mostly(st.integers(1, 4)),
    'parallel_tool_calls': mostly(st.booleans()),
  },
  '/v1/completions': {
    **_SAMPLING,
    **_STREAM,
    'prompt': mostly(_PROMPT),
    'logprobs': mostly(st.integers(0, 20)),
    'echo': st.booleans(),
  },
  '/generate': {
    **_SAMPLING,
    'prompt_ids': mostly(st.lists(st.integers(0, 292), max_size=5)),
    'top_logprobs': mostly(st.integers(0, 20)),
  },
}
# Most fields are absent, or hardly a body would be right.
_BODIES = st.one_of(
  *(
    st.tuples(
      st.just(path),
      st.lists(st.sampled_from(sorted(fields)), max_size=4, unique=True).flatmap(
        lambda names, fields=fields: st.fixed_dictionaries(
          {
            **{n: fields[n] for n in names},
            **{n: fields[n] for n in ('messages', 'prompt', 'prompt_ids') if n in fields},
          }
        )
      ),
    )
    for path, fields in _FIELDS.items()
  )
)


@given(_BODIES, st.booleans())
@settings(max_examples=100, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_body(live, made, cut):
  """An answer, or an error in OpenAI's form that is the client's fault; some clients go."""
  path, body = made
  if 'max_tokens' not in body:
    body = {**body, 'max_tokens': 3}
  if cut:
    data = json.dumps(body).encode()
    head = f'POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Type: application/json\r\n'
    with socket.create_connection(('127.0.0.1', live.port)) as s:
      s.sendall(head.encode() + f'Content-Length: {len(data)}\r\n\r\n'.encode() + data)
    return
  # While clients that were cut off before are not gone yet, it may be full.
  answer = serving.eventually(
    lambda: (a := live.post(path, body))[0] != 429 and a, 'there is a place for it'
  )
  counts[answer[0]] = counts.get(answer[0], 0) + 1
  if answer[0] == 200:
    if answer[1]['content-type'].startswith('text/event-stream'):
      assert answer[2].endswith('data: [DONE]\n\n') or '"error"' in answer[2]
  else:
    error_of(answer, answer[0])
    assert answer[0] in (400, 404), answer


counts: dict[int, int] = {}


def test_after_all_that(live):
  """Healthy, and every page has come back; the bodies before were not all wrong."""
  print(f'answers to any bodies, by status: {counts}')
  assert counts.get(200, 0) > 10 and counts.get(400, 0) > 10
  live.check_healthy()


@given(st.binary(max_size=200))
@settings(max_examples=40, deadline=None, suppress_health_check=list(HealthCheck))
def test_any_bytes(live, data):
  assert error_of(live.post(CHAT, data), 400)
