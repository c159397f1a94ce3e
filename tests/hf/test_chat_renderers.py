"""Conversations against the `renderers` package, an independent implementation of GLM's formats.

Its renderers of GLM-5 and GLM-5.1 turn messages into ids, of each of which they know the author; its
parser turns ids back into a message. On random conversations, not only on the published ones that
tests/data/test_chat.py has.
"""

from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.data import chat
from glm5_jax.data.chat import ChatFormat
from glm5_jax.data.chat_parse import parse
from glm5_jax.data.tokenizer import ByteTokenizer, Tokenizer, train_bpe

pytestmark = pytest.mark.hf

PROPERTY = settings(deadline=None, max_examples=150)
TOOLS = [
  {
    'type': 'function',
    'function': {
      'name': name,
      'description': 'ein Werkzeug ⟦1⟧',
      'parameters': {
        'type': 'object',
        'properties': {'text': {'type': 'string'}, 'n': {'type': 'integer'}, 'x': {}},
      },
      'strict': True,
    },
  }
  for name in ('get', 'put_all')
]
TOKENIZERS = {
  'bytes': ByteTokenizer(),
  'bpe': train_bpe(['get the text of n, put_all of it: true, null, [1, 2]\n' * 20], 320),
}
RENDERERS = {'5': 'GLM5Renderer', '5.1': 'GLM51Renderer'}


class Adapter:
  """What `renderers` asks of a tokenizer, over ours.

  It gives the template's words and a person's to one `encode`. The template names special tokens where it
  describes the tools, and means them; in a conversation these names are text.
  """

  unk_token_id = None

  def __init__(self, tokenizer: Tokenizer):
    self._tokenizer = tokenizer

  def encode(self, text: str, **_: Any) -> list[int]:
    template = text.startswith('\n# Tools\n')
    return self._tokenizer.encode(text, allow_special=template).tolist()

  def decode(self, ids: Any, **_: Any) -> str:
    return self._tokenizer.decode([ids] if isinstance(ids, int) else list(ids))

  def convert_tokens_to_ids(self, token: str) -> int | None:
    return self._tokenizer.special_ids.get(token)


# Text as models write it, with what a tokenizer or a parser might stumble over.
TEXT = st.text(st.sampled_from(list('ab1 \n<>|/"\\{}é漢😀')), max_size=12) | st.sampled_from(
  ['', ' padded ', '<tool_call>', '<|user|>', 'a</arg_value>b', 'null', '3', '[1, 2]']
)
VALUES = st.one_of(
  st.none(), st.booleans(), st.integers(-9, 99), TEXT, st.lists(st.integers(0, 9), max_size=3),
  st.dictionaries(st.sampled_from('ab'), st.integers(0, 9), max_size=2),
)  # fmt: skip


@st.composite
def calls(draw) -> dict[str, Any]:
  arguments: dict[str, Any] = {}
  if draw(st.booleans()):
    arguments['text'] = draw(TEXT)
  if draw(st.booleans()):
    arguments['n'] = draw(st.integers(-9, 99))
  if draw(st.booleans()):
    # A string without a schema that says so comes back as whatever JSON it is.
    arguments['x'] = draw(VALUES.filter(lambda v: not isinstance(v, str)))
  function = {'name': draw(st.sampled_from(['get', 'put_all'])), 'arguments': arguments}
  return {'type': 'function', 'function': function}


@st.composite
def conversations(draw) -> list[dict[str, Any]]:
  messages: list[dict[str, Any]] = []
  if draw(st.booleans()):
    messages.append({'role': 'system', 'content': draw(TEXT)})
  for _ in range(draw(st.integers(1, 3))):
    messages.append({'role': 'user', 'content': draw(TEXT)})
    for _ in range(draw(st.integers(0, 2))):
      assistant: dict[str, Any] = {'role': 'assistant', 'content': draw(TEXT)}
      if draw(st.booleans()):
        # Of white space alone, theirs renders an empty thought and ours none.
        assistant['reasoning_content'] = draw(TEXT.filter(lambda t: not t or t.strip()))
      messages.append(assistant)
      if draw(st.booleans()):
        assistant['tool_calls'] = draw(st.lists(calls(), min_size=1, max_size=2))
        results = [{'role': 'tool', 'content': draw(TEXT)} for _ in assistant['tool_calls']]
        messages += results
      else:
        break
  return messages


def _theirs(tokenizer: Tokenizer, form: ChatFormat):
  from renderers import glm5

  renderer = getattr(glm5, RENDERERS[form.generation])
  config = renderer._config_cls(
    enable_thinking=form.enable_thinking, clear_thinking=form.clear_thinking
  )
  return renderer(Adapter(tokenizer), config)


FORMS = st.builds(
  ChatFormat, generation=st.sampled_from(list(RENDERERS)), enable_thinking=st.booleans(),
  clear_thinking=st.booleans(),
)  # fmt: skip
WHICH = pytest.mark.parametrize('name', sorted(TOKENIZERS))


@WHICH
@PROPERTY
@given(messages=conversations(), form=FORMS, tools=st.booleans(), prompt=st.booleans())
def test_the_same_tokens_by_the_same_authors(name, messages, form, tools, prompt):
  tokenizer, offered = TOKENIZERS[name], TOOLS if tools else None
  expected = _theirs(tokenizer, form).render(messages, tools=offered, add_generation_prompt=prompt)
  found = chat.encode(
    chat.render(messages, offered, form=form, generation_prompt=prompt), tokenizer
  )
  assert found.ids.tolist() == expected.token_ids
  assert found.sampled.tolist() == expected.sampled_mask
  # They count the generation prompt to no message, we to the one that it begins.
  ours = np.where(found.message == len(messages), -1, found.message)
  assert ours.tolist() == expected.message_indices


@st.composite
def turns(draw) -> dict[str, Any]:
  message: dict[str, Any] = {'role': 'assistant', 'content': draw(TEXT)}
  # Without a thought the template closes it, which is not the model's own act.
  message['reasoning_content'] = draw(TEXT.filter(str.strip))
  if draw(st.booleans()):
    message['tool_calls'] = draw(st.lists(calls(), min_size=1, max_size=3))
  return message


@WHICH
@PROPERTY
@given(message=turns(), form=FORMS, cut=st.none() | st.integers(0, 200), known=st.booleans())
def test_turns_mean_the_same(name, message, form, cut, known):
  """What the model wrote, whole or cut off anywhere, with all of the tools on offer or only one."""
  tokenizer, offered = TOKENIZERS[name], TOOLS if known else TOOLS[:1]
  encoded = chat.encode(
    chat.render([{'role': 'user', 'content': 'x'}, message], form=form, close=True), tokenizer
  )
  ids = encoded.ids[encoded.sampled].tolist()
  ids = ids if cut is None else ids[: cut % (len(ids) + 1)]
  if not form.enable_thinking:
    close = tokenizer.special_ids['</think>']
    ids = ids[ids.index(close) + 1 :] if close in ids else []
  expected = _theirs(tokenizer, form).parse_response(ids, tools=offered)
  found = parse(ids, tokenizer, thinking=form.enable_thinking, tools=offered)
  assert found.reasoning.strip() == (expected.reasoning_content or '').strip()
  assert found.closed == bool(expected.reasoning_complete)
  assert found.content == expected.content.strip()
  good = [c for c in expected.tool_calls if c.status == 'ok']
  # They strip strings; ours stay as they were written, so that they are rendered to the same tokens.
  ours = [(c.name, {k: _stripped(v) for k, v in c.arguments.items()}) for c in found.calls]
  assert ours == [(c.name, c.arguments) for c in good]
  assert len(found.failures) == len(expected.tool_calls) - len(good)


def _stripped(value: Any) -> Any:
  return value.strip() if isinstance(value, str) else value


def test_the_comparison_can_fail():
  """A mask that is off by one token, or a lost character, would be seen."""
  messages = [{'role': 'user', 'content': 'x'}, {'role': 'assistant', 'content': 'yes'}]
  tokenizer, form = TOKENIZERS['bytes'], ChatFormat()
  expected = _theirs(tokenizer, form).render(messages)
  changed = [messages[0], messages[1] | {'content': 'yet'}]
  found = chat.encode(chat.render(changed, form=form), tokenizer)
  assert found.ids.tolist() != expected.token_ids
  assert sum(expected.sampled_mask) == 3
