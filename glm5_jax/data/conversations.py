"""Conversations as training samples (section 3.1): tokens, and which of them are learnt.

A record is a JSON object with `messages` and perhaps `tools`, in OpenAI's form. An assistant's message
with `weight` 0 is context only: a mistake in a trajectory stays where it was, and is not learnt.
"""

import itertools
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import numpy as np

from glm5_jax.data import chat
from glm5_jax.data.config import SourceConfig
from glm5_jax.data.tokenizer import Tokenizer


class Sample(NamedTuple):
  """A rendered conversation, and of each message whether it is learnt."""

  segments: list[chat.Segment]
  learnt: list[bool]

  def encode(self, tokenizer: Tokenizer) -> tuple[np.ndarray, np.ndarray]:
    """Ids [n], and of each whether it is learnt: sampled, in a message that is.

    Raises:
      DataError: The tokenizer lacks a token of the chat format.
    """
    encoded = chat.encode(self.segments, tokenizer)
    return encoded.ids, encoded.sampled & np.array([*self.learnt, False])[encoded.message]

  @property
  def num_bytes(self) -> int:
    """Of the text that is learnt, in UTF-8; special tokens count as their names."""
    return sum(len(s.text.encode()) for s in self.segments if s.sampled and self.learnt[s.message])


def samples(record: str, source: SourceConfig) -> list[Sample]:
  """The samples of one record, at least one.

  With preserved thinking that is one sample with all turns. Otherwise there is one for each user
  message, in which the turns that answer it are learnt: later, their reasoning will be gone.

  Raises:
    ChatError: It is malformed, or there is nothing to learn.
  """
  fields = json.loads(record)
  messages, tools = fields.get('messages'), fields.get('tools')
  if not isinstance(messages, list) or not (tools is None or isinstance(tools, list)):
    raise chat.ChatError(f'`messages`, and `tools` if there, must be lists; keys: {sorted(fields)}')
  form = chat.ChatFormat(source.chat_format, clear_thinking=source.clear_thinking)
  whole = chat.render(messages, tools, form=form, close=True)
  learnt = [m['role'] == 'assistant' and _weight(i, m) for i, m in enumerate(messages)]
  if not any(learnt):
    raise chat.ChatError('no assistant message with a positive weight')
  if not source.clear_thinking:
    return [Sample(whole, learnt)]
  out = []
  for begin, end in _turns(messages):
    now = [begin <= i and is_learnt for i, is_learnt in enumerate(learnt[:end])]
    if any(now):
      out.append(Sample(chat.render(messages[:end], tools, form=form, close=True), now))
  return out


def _turns(messages: list[dict[str, Any]]) -> Iterator[tuple[int, int]]:
  """[begin, end) of each user message and what follows it, and of what comes before the first."""
  users = [i for i, m in enumerate(messages) if m['role'] == 'user']
  borders = sorted({0, *users, len(messages)})
  return itertools.pairwise(borders)


def _weight(i: int, message: dict[str, Any]) -> bool:
  weight = message.get('weight', 1)
  if isinstance(weight, bool) or weight not in (0, 1):
    raise chat.ChatError(f'message {i}: weight must be 0 or 1, not {weight!r}')
  return weight == 1
