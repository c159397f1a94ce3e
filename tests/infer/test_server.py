"""The server as OpenAI's own client sees it; the endpoints that it does not know, by hand."""

import asyncio
import base64
import hashlib
import json
import re

import numpy as np
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from glm5_jax.data import chat
from glm5_jax.data.chat_parse import STOP_TOKENS, parse
from glm5_jax.infer.request import Request
from glm5_jax.rl.rewards import Judge
from tests import tiny
from tests.infer import serving
from tests.infer.serving import NAME, TOKENIZER, TOOL

HELLO = [{'role': 'user', 'content': 'hello'}]
CALL = (
  '<tool_call>add<arg_key>a</arg_key><arg_value>17</arg_value><arg_key>note</arg_key>'
  '<arg_value>zwölf 🦀</arg_value></tool_call>'
)


@pytest.fixture(scope='module')
def live():
  with serving.running(serving.tiny_engine(), new_tokens=200) as live:
    yield live
    live.check_healthy()


@pytest.fixture(scope='module')
def reference():
  """The same engine, without a server."""
  return serving.tiny_engine()


@pytest.fixture
def client(live):
  with openai.OpenAI(base_url=f'{live.url}/v1', api_key='none', max_retries=0) as client:
    yield client


def ask(client, **changes):
  return client.chat.completions.create(model=NAME, messages=HELLO, **changes)


def request_of(**settings) -> Request:
  """What a chat of HELLO asks of the engine."""
  segments = chat.render(HELLO, generation_prompt=True)
  ids = chat.encode(segments, TOKENIZER).ids.tolist()
  return Request(ids, stop_ids=[TOKENIZER.special_ids[n] for n in STOP_TOKENS], **settings)


def reasoning(output) -> str:
  return parse(output.ids, TOKENIZER).reasoning


# --- Chat ---


def test_chat_is_what_the_engine_writes(client, reference):
  answer = ask(client, max_tokens=24, seed=5, extra_body={'top_k': 100})
  request = request_of(max_tokens=24, seed=5, top_k=100)
  [[want]] = reference.run([request])
  [choice] = answer.choices
  assert choice.message.reasoning_content == reasoning(want) and choice.message.content == ''
  assert choice.finish_reason == 'length' == want.finish_reason
  assert answer.model == NAME and answer.object == 'chat.completion'
  assert answer.usage.prompt_tokens == len(request.prompt_ids)
  assert answer.usage.completion_tokens == 24
  assert answer.usage.total_tokens == 24 + len(request.prompt_ids)


def test_reasoning_and_answer(live, client):
  seed = live.engine.script(101, 'Let me see: 🦀</think>\n\nIt is 中.  <|user|>')
  message = ask(client, seed=seed).choices[0].message
  assert (message.reasoning_content, message.content) == ('Let me see: 🦀', 'It is 中.')
  assert message.tool_calls is None
  seed = live.engine.script(102, ' At once.<|user|>')
  switches = {'chat_template_kwargs': {'enable_thinking': False}}
  choice = ask(client, seed=seed, extra_body=switches).choices[0]
  assert choice.message.content == 'At once.' and choice.finish_reason == 'stop'
  assert not hasattr(choice.message, 'reasoning_content')


def streamed(chunks) -> tuple[dict, dict, list]:
  """(joined delta, usage, finish reasons) of a stream with one choice."""
  whole, usage, reasons, calls = {'content': '', 'reasoning_content': ''}, None, [], []
  for chunk in chunks:
    usage = chunk.usage or usage
    for choice in chunk.choices:
      delta = choice.delta
      whole['content'] += delta.content or ''
      whole['reasoning_content'] += getattr(delta, 'reasoning_content', None) or ''
      calls += delta.tool_calls or []
      reasons.append(choice.finish_reason)
  return {**whole, 'calls': calls}, usage, reasons


def test_stream(live, client):
  """The same as without, in whole characters, with usage at the end."""
  seed = live.engine.script(103, 'Hm, 🦀</think>naïve 中文 🦀🦀<|user|>')
  whole = ask(client, seed=seed)
  chunks = list(ask(client, seed=seed, stream=True, stream_options={'include_usage': True}))
  message, usage, reasons = streamed(chunks)
  assert message['content'] == whole.choices[0].message.content == 'naïve 中文 🦀🦀'
  assert message['reasoning_content'] == 'Hm, 🦀'
  pieces = [c.choices[0].delta.content for c in chunks if c.choices and c.choices[0].delta.content]
  assert len(pieces) > 5 and not any('\N{REPLACEMENT CHARACTER}' in p for p in pieces)
  assert chunks[0].choices[0].delta.role == 'assistant'
  assert [r for r in reasons if r] == ['stop'] and reasons[-1] == 'stop'
  assert not chunks[-1].choices and usage.completion_tokens == whole.usage.completion_tokens
  assert len({c.id for c in chunks}) == 1 and chunks[0].object == 'chat.completion.chunk'


def test_usage_in_every_chunk(client):
  options = {'continuous_usage_stats': True}
  chunks = list(ask(client, max_tokens=8, seed=1, stream=True, stream_options=options))
  counts = [c.usage.completion_tokens for c in chunks]
  assert counts == sorted(counts) and counts[-1] == 8


def test_async_client(live):
  seeds = [live.engine.script(200 + i, f'hm</think>{i} 🦀<|user|>') for i in range(6)]

  async def run():
    async with openai.AsyncOpenAI(base_url=f'{live.url}/v1', api_key='none') as client:

      async def one(i, seed):
        if i % 2:
          return (await ask(client, seed=seed)).choices[0].message.content
        text = ''
        async for chunk in await ask(client, seed=seed, stream=True):
          text += chunk.choices[0].delta.content or ''
        return text

      return await asyncio.gather(*(one(i, s) for i, s in enumerate(seeds)))

  assert asyncio.run(run()) == [f'{i} 🦀' for i in range(6)]


def test_several_answers(client, reference):
  answer = ask(client, max_tokens=10, seed=8, n=3)
  [want] = reference.run([request_of(max_tokens=10, seed=8, samples=3)])
  assert [c.index for c in answer.choices] == [0, 1, 2]
  assert [c.message.reasoning_content for c in answer.choices] == [reasoning(o) for o in want]
  assert answer.usage.completion_tokens == sum(len(o.ids) for o in want)
  texts = ['', '', '']
  for chunk in ask(client, max_tokens=10, seed=8, n=3, stream=True):
    for choice in chunk.choices:
      texts[choice.index] += getattr(choice.delta, 'reasoning_content', None) or ''
  assert texts == [reasoning(o) for o in want]


def test_seeds(client):
  def text(**changes):
    return ask(client, max_tokens=12, **changes).choices[0].message.reasoning_content

  assert text(seed=3) == text(seed=3) != text(seed=4)
  assert text() != text(), 'without a seed every answer is another'
  assert text(temperature=0, seed=1) == text(temperature=0, seed=2)


@pytest.mark.parametrize('stream', [False, True])
def test_logprobs(client, reference, stream):
  """One entry for every token, those of softmax(logits), whatever was drawn from."""
  settings = {'max_tokens': 9, 'seed': 2, 'temperature': 0.5, 'logprobs': True, 'top_logprobs': 4}
  answer = ask(client, stream=stream, **settings)
  if stream:
    parts = [c.choices[0].logprobs for c in answer]
    entries = [e for p in parts if p for e in p.content]
  else:
    entries = answer.choices[0].logprobs.content
  [[want]] = reference.run([request_of(max_tokens=9, seed=2, temperature=0.5)])
  assert [e.token_id for e in entries] == want.ids
  np.testing.assert_allclose([e.logprob for e in entries], want.raw_logprobs, atol=1e-5)
  for entry in entries:
    assert len(entry.top_logprobs) == 4
    logprobs = [t.logprob for t in entry.top_logprobs]
    assert logprobs == sorted(logprobs, reverse=True) and entry.logprob <= logprobs[0] + 1e-6
    if '\N{REPLACEMENT CHARACTER}' in entry.token:
      assert entry.bytes is None, 'a part of a character'
    else:
      assert bytes(entry.bytes).decode() == entry.token


def test_logprobs_without_alternatives(client):
  entries = ask(client, max_tokens=3, seed=2, logprobs=True).choices[0].logprobs.content
  assert len(entries) == 3 and entries[0].top_logprobs == []


@pytest.mark.parametrize('stream', [False, True])
def test_stop_strings(live, client, stream):
  seed = live.engine.script(104, 'no end here</think>one STOP two<|user|>')
  answer = ask(client, seed=seed, stop=['STOP', 'never'], stream=stream)
  if stream:
    message, _, reasons = streamed(answer)
    assert (message['content'], reasons[-1]) == ('one', 'stop')
  else:
    assert answer.choices[0].message.content == 'one'
    assert answer.choices[0].finish_reason == 'stop'
    assert answer.usage.completion_tokens < 30


def test_cached_tokens(live, client):
  """The second turn finds the first one's pages."""
  seed = live.engine.script(105, 'ok</think>first answer, long enough for pages<|user|>')
  first = ask(client, seed=seed)
  messages = [*HELLO, first.choices[0].message.model_dump(exclude_none=True)]
  messages.append({'role': 'user', 'content': 'and now'})
  answer = client.chat.completions.create(
    model=NAME, messages=messages, max_tokens=2,
    extra_body={'chat_template_kwargs': {'clear_thinking': False}},
  )  # fmt: skip
  cached = answer.usage.prompt_tokens_details.cached_tokens
  assert cached >= 32 and cached % 16 == 0 and cached < answer.usage.prompt_tokens


# --- Tools ---


def test_tool_calls(live, client):
  seed = live.engine.script(106, f'add them</think>Adding.{CALL}{CALL}<|observation|>')
  choice = ask(client, seed=seed, tools=[TOOL]).choices[0]
  assert choice.finish_reason == 'tool_calls' and choice.message.content == 'Adding.'
  for call in choice.message.tool_calls:
    assert call.function.name == 'add'
    assert json.loads(call.function.arguments) == {'a': 17, 'note': 'zwölf 🦀'}
  assert len({c.id for c in choice.message.tool_calls}) == 2

  message, _, reasons = streamed(ask(client, seed=seed, tools=[TOOL], stream=True))
  assert reasons[-1] == 'tool_calls' and message['content'] == 'Adding.'
  assert [c.index for c in message['calls']] == [0, 1]
  assert json.loads(message['calls'][1].function.arguments)['a'] == 17


def test_the_clients_own_stream_helper(live, client):
  """It adds the deltas up by its own rules."""
  seed = live.engine.script(107, f'hm</think>Adding.{CALL}<|observation|>')
  with client.chat.completions.stream(
    model=NAME, messages=HELLO, tools=[TOOL], seed=seed
  ) as stream:
    for _ in stream:
      pass
    completion = stream.get_final_completion()
  [choice] = completion.choices
  assert choice.message.content == 'Adding.' and choice.finish_reason == 'tool_calls'
  assert json.loads(choice.message.tool_calls[0].function.arguments)['note'] == 'zwölf 🦀'


def test_a_round_of_tools(live, client):
  """The message goes back as the client has it, with the tool's result; the tokens are the same."""
  seed = live.engine.script(108, f'hm</think>{CALL}<|observation|>')
  message = ask(client, seed=seed, tools=[TOOL]).choices[0].message
  assert message.content is None
  messages = [
    *HELLO,
    message.model_dump(exclude_none=True),
    {'role': 'tool', 'tool_call_id': message.tool_calls[0].id, 'content': '29'},
  ]
  seed = live.engine.script(109, 'so</think>29<|user|>')
  answer = client.chat.completions.create(model=NAME, messages=messages, tools=[TOOL], seed=seed)
  assert answer.choices[0].message.content == '29'
  # New are seven tokens and what does not fill a page.
  new = answer.usage.prompt_tokens - answer.usage.prompt_tokens_details.cached_tokens
  assert new <= 7 + 16


def test_malformed_calls_are_said(live, client):
  seed = live.engine.script(110, '</think>x<tool_call>mul</tool_call><tool_call>add<|observation|>')
  choice = ask(client, seed=seed, tools=[TOOL]).choices[0]
  assert choice.message.tool_calls is None and choice.finish_reason == 'stop'
  errors = choice.message.tool_call_errors
  assert "unknown function 'mul'" in errors[0] and 'not closed' in errors[1]
  last = list(ask(client, seed=seed, tools=[TOOL], stream=True))[-1]
  assert last.choices[0].delta.tool_call_errors == errors


def test_forced_calls(live, client):
  choice = {'type': 'function', 'function': {'name': 'add'}}
  seed = live.engine.script(111, CALL.removeprefix('<tool_call>add') + 'more')
  for tool_choice in (choice, 'required'):
    answer = ask(client, seed=seed, tools=[TOOL], tool_choice=tool_choice, max_tokens=90)
    [call] = answer.choices[0].message.tool_calls
    assert json.loads(call.function.arguments)['a'] == 17
  assert ask(client, seed=seed, tools=[TOOL], tool_choice=choice).choices[0].finish_reason == (
    'tool_calls'
  )


def test_no_call_where_none_is_wanted(live, client):
  seed = live.engine.script(112, f'</think>Well.{CALL}<|observation|>')
  choice = ask(client, seed=seed, tools=[TOOL], tool_choice='none').choices[0]
  assert choice.message.tool_calls is None and choice.message.content == 'Well.'
  assert choice.finish_reason == 'stop'


def test_one_call_at_most(live, client):
  seed = live.engine.script(113, f'</think>{CALL}{CALL}<|observation|>')
  choice = ask(client, seed=seed, tools=[TOOL], parallel_tool_calls=False).choices[0]
  assert len(choice.message.tool_calls) == 1 and choice.finish_reason == 'tool_calls'


# --- Completions ---


def test_completions(client, reference):
  """Texts, token ids, and lists of them; a text begins as documents do in training."""
  ids = TOKENIZER.encode('Once').tolist()
  as_text = client.completions.create(model=NAME, prompt='Once', seed=1, max_tokens=7)
  as_ids = client.completions.create(
    model=NAME, prompt=[TOKENIZER.eot_id, *ids], seed=1, max_tokens=7
  )
  [[want]] = reference.run([Request([TOKENIZER.eot_id, *ids], max_tokens=7, seed=1)])
  assert as_text.choices[0].text == as_ids.choices[0].text == want.text
  many = client.completions.create(model=NAME, prompt=['Once', 'Twice'], n=2, seed=1, max_tokens=7)
  assert [c.index for c in many.choices] == [0, 1, 2, 3]
  assert many.choices[0].text == want.text and many.usage.completion_tokens == 28
  assert len(client.completions.create(model=NAME, prompt='x', seed=1).choices[0].text) > 0


def test_completion_stream_and_logprobs(client, reference):
  settings = {'model': NAME, 'prompt': 'Once', 'seed': 4, 'max_tokens': 12, 'logprobs': 2}
  whole = client.completions.create(**settings).choices[0]
  chunks = [c.choices[0] for c in client.completions.create(stream=True, **settings)]
  assert ''.join(c.text for c in chunks) == whole.text
  tokens = [t for c in chunks for t in c.logprobs.tokens]
  assert tokens == whole.logprobs.tokens and len(tokens) == 12
  assert chunks[-1].finish_reason == whole.finish_reason == 'length'
  ids = [TOKENIZER.eot_id, *TOKENIZER.encode('Once').tolist()]
  [[want]] = reference.run([Request(ids, max_tokens=12, seed=4)])
  np.testing.assert_allclose(whole.logprobs.token_logprobs, want.raw_logprobs, atol=1e-5)
  assert all(len(top) <= 2 for top in whole.logprobs.top_logprobs)
  assert whole.logprobs.text_offset[0] == 0


# --- The others ---


def test_models(client):
  [model] = client.models.list()
  assert model.id == NAME and client.models.retrieve(NAME).id == NAME
  with pytest.raises(openai.NotFoundError, match='no model "other" here'):
    client.models.retrieve('other')
  with pytest.raises(openai.NotFoundError) as caught:
    client.chat.completions.create(model='other', messages=HELLO)
  assert caught.value.code == 'model_not_found' and caught.value.param == 'model'


def test_errors_are_openais(client):
  with pytest.raises(openai.BadRequestError, match='temperature must be within') as caught:
    ask(client, temperature=-1)
  assert caught.value.param == 'temperature'
  assert caught.value.body['type'] == 'invalid_request_error'
  with pytest.raises(openai.BadRequestError) as caught:
    ask(client, max_tokens=10**9)
  assert caught.value.code == 'context_length_exceeded'


def test_generate(live, reference):
  """Token ids in; ids, both log-probabilities and the weights' versions out."""
  body = {
    'prompt_ids': [5, 6, 7], 'max_tokens': 6, 'n': 2, 'seed': 9, 'temperature': 0.5,
    'top_logprobs': 3,
  }  # fmt: skip
  status, _, answer = live.post('/generate', body)
  assert status == 200
  request = Request([5, 6, 7], max_tokens=6, samples=2, seed=9, temperature=0.5)
  for got, want in zip(answer['outputs'], reference.run([request])[0], strict=True):
    assert got['ids'] == want.ids and got['text'] == want.text
    np.testing.assert_allclose(got['logprobs'], want.logprobs, atol=2e-5)
    np.testing.assert_allclose(got['raw_logprobs'], want.raw_logprobs, atol=1e-5)
    assert got['versions'] == [0] * 6 and got['finish_reason'] == 'length'
    assert [len(row) for row in got['top_logprobs']] == [3] * 6
  assert 'top_logprobs' not in live.post('/generate', {'prompt_ids': [1], 'max_tokens': 1})[2]


def test_new_weights_show_in_versions(live):
  """The trainer's side of the engine goes through its thread."""

  def update(engine):
    engine.update_weights(tiny.random_params(engine.config), engine.version + 1)
    return engine.version

  version = live.server.thread.call(update).result()
  body = {'prompt_ids': [1, 2], 'max_tokens': 3, 'ignore_eos': True}
  [output] = live.post('/generate', body)[2]['outputs']
  assert output['versions'] == [version] * 3
  answer = live.post('/v1/completions', {'prompt': 'a', 'max_tokens': 1})[2]
  assert answer['system_fingerprint'] == f'weights-{version}'


def test_metrics(live):
  def values() -> dict[str, float]:
    text = live.call('GET', '/metrics')[2]
    return {
      f'{s.name}{sorted(s.labels.values())}': s.value
      for family in text_string_to_metric_families(text)
      for s in family.samples
    }

  before = values()
  live.post('/v1/completions', {'prompt': 'abc', 'max_tokens': 5, 'seed': 1})
  live.post('/v1/completions', {'prompt': 3})
  after = values()

  def gain(name):
    return after[name] - before.get(name, 0)

  assert gain('glm5_engine_generated_tokens_total[]') == 5
  assert gain("glm5_http_requests_total['/v1/completions', '200']") == 1
  assert gain("glm5_http_requests_total['/v1/completions', '400']") == 1
  assert gain('glm5_first_token_seconds_count[]') == 1
  assert after['glm5_engine_pages_used[]'] >= after['glm5_engine_pages_cached[]']
  assert after['glm5_engine_accept_length[]'] == 1


def test_the_page(live):
  """It may run what it holds and nothing else, and never parses a text as HTML."""
  status, headers, html = live.call('GET', '/')
  assert status == 200 and headers['content-type'] == 'text/html; charset=utf-8'
  policy = headers['content-security-policy']
  for tag in ('script', 'style'):
    [text] = re.findall(f'<{tag}>(.*?)</{tag}>', html, re.DOTALL)
    digest = base64.b64encode(hashlib.sha256(text.encode()).digest()).decode()
    assert f"{tag}-src 'sha256-{digest}';" in policy
  assert "default-src 'none'" in policy and 'unsafe' not in policy
  assert not re.search(r'innerHTML|outerHTML|insertAdjacentHTML|document\.write|eval\(', html)
  assert not re.search(r'(src|href)="(?!data:,)|\son\w+=|\sstyle=|https?://', html)


def test_a_judge_can_ask_it(live):
  """The client that rewards use; a random model gives no score, which is another matter."""
  judge = Judge(f'{live.url}/v1', NAME, 'brevity')
  with pytest.raises(Exception, match='no score on the last line'):
    judge(HELLO, 'hi')
