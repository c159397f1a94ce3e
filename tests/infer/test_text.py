"""Text of a growing list of tokens: pieces add up, stop strings end it."""

import hypothesis
import hypothesis.strategies as st
import pytest

from glm5_jax.data import tokenizer as tokenizers
from glm5_jax.infer.text import TextStream


class Bytes:
  """A tokenizer whose tokens are bytes."""

  def decode(self, ids) -> str:
    return bytes(ids).decode('utf-8', errors='replace')


def stream(data: bytes, stops=()) -> tuple[TextStream, list[str]]:
  s = TextStream(Bytes(), stops)
  pieces = []
  for byte in data:
    pieces.append(s.add(byte))
    if s.stop is not None:
      break
  return s, [*pieces, s.finish()]


@hypothesis.given(st.one_of(st.text(max_size=40).map(str.encode), st.binary(max_size=40)))
@hypothesis.settings(max_examples=200, deadline=None)
def test_pieces_add_up(data):
  s, pieces = stream(data)
  assert ''.join(pieces) == s.text == data.decode('utf-8', errors='replace')


def test_characters_come_whole():
  _, pieces = stream('aé中🦀'.encode())
  assert pieces == ['a', '', 'é', '', '', '中', '', '', '', '🦀', '']


@hypothesis.given(
  st.text('ab', max_size=30), st.lists(st.text('ab', min_size=1, max_size=4), max_size=3)
)
@hypothesis.settings(max_examples=300, deadline=None)
def test_stops_at_the_first_stop_string(text, stops):
  """One character at a time: the first that is complete, the earliest beginning of those."""
  want, stop = text, None
  for end in range(len(text) + 1):
    found = [(text[:end].find(s), s) for s in stops if s in text[:end]]
    if found:
      at, stop = min(found)
      want = text[:at]
      break
  s, pieces = stream(text.encode(), stops)
  assert (s.text, s.stop) == (want, stop)
  assert ''.join(pieces) == want


def test_with_our_tokenizer():
  """Special tokens, unknown ids and split characters, as the byte tokenizer decodes them."""
  t = tokenizers.ByteTokenizer()
  ids = [*t.encode('naïve 🦀'), t.special_ids['<think>'], 100_000, *t.encode('né')]
  s = TextStream(t)
  pieces = [s.add(int(i)) for i in ids]
  assert ''.join([*pieces, s.finish()]) == t.decode(ids)


def test_long_rubbish_is_given_out_at_last():
  s = TextStream(Bytes())
  assert sum(len(s.add(0xFF)) for _ in range(200)) >= 128


@pytest.mark.parametrize('stops', [(), ('xyz',)])
def test_finish_twice(stops):
  s = TextStream(Bytes(), stops)
  s.add(ord('x'))
  assert s.finish() == ('x' if stops else '') and s.finish() == '' and s.text == 'x'
