"""What clients get: choices, chunks, log-probabilities and usage in OpenAI's form.

Log-probabilities are those of softmax(logits), before temperature, filters and penalties, one entry
for every generated token: those of reasoning, tool calls and the token that ended the turn as well.
"""

import json
import time
import uuid
from collections.abc import Sequence
from typing import Any, Protocol

from glm5_jax.data.tokenizer import Tokenizer
from glm5_jax.infer.request import Event, Output
from glm5_jax.infer.server_chat import END_OF_CALL, ChatReader, joined, message_of
from glm5_jax.infer.server_requests import finite


def dumps(value: Any) -> bytes:
  """JSON in UTF-8. Half a surrogate pair, which only a client can have sent, stays escaped."""
  text = json.dumps(value, ensure_ascii=False, allow_nan=False, separators=(',', ':'))
  return text.encode('utf-8', 'backslashreplace')


class Choice(Protocol):
  """One answer under way: events in, a stream's chunks or the whole out."""

  def first(self) -> dict[str, Any] | None:
    """The choice of a chunk that comes before all tokens."""
    ...

  def add(self, event: Event) -> dict[str, Any] | None:
    """The choice of the next chunk; None if nothing is certain yet."""
    ...

  def whole(self) -> dict[str, Any]:
    """The choice of an answer that is not streamed."""
    ...


class ChatChoice:
  """An assistant's message."""

  def __init__(self, index: int, reader: ChatReader, tokenizer: Tokenizer, logprobs: bool):
    self._index, self._reader, self._tokenizer = index, reader, tokenizer
    self._logprobs = logprobs
    self._end_of_call = tokenizer.special_ids.get(END_OF_CALL)
    self._deltas: list[dict[str, Any]] = []
    self._entries: list[dict[str, Any]] = []
    self._told = 0  # Entries that went out with a chunk.
    self._finish_reason: str | None = None

  def first(self) -> dict[str, Any] | None:
    return self._choice({'role': 'assistant', 'content': ''})

  def add(self, event: Event) -> dict[str, Any] | None:
    if self._logprobs:
      self._entries.append(_entry(event, self._tokenizer))
    output = event.output
    ended_by_id = output is not None and output.stop == event.token
    delta: dict[str, Any] = {}
    if not ended_by_id or event.token == self._end_of_call:
      delta = self._reader.add(event.token)
      self._deltas.append(delta)
    if output is not None:
      last = self._reader.finish()
      self._deltas.append(last)
      delta = joined(delta, last)
      if self._reader.errors:
        delta['tool_call_errors'] = self._reader.errors
      called = self._reader.calls and output.finish_reason == 'stop'
      self._finish_reason = 'tool_calls' if called else output.finish_reason
    return self._choice(delta) if delta or output is not None else None

  def whole(self) -> dict[str, Any]:
    return {
      'index': self._index,
      'message': message_of(self._deltas, self._reader.errors),
      'logprobs': {'content': self._entries} if self._logprobs else None,
      'finish_reason': self._finish_reason,
    }

  def _choice(self, delta: dict[str, Any]) -> dict[str, Any]:
    new = self._entries[self._told :]
    self._told += len(new)
    return {
      'index': self._index,
      'delta': delta,
      'logprobs': {'content': new} if new else None,
      'finish_reason': self._finish_reason,
    }


class TextChoice:
  """A plain continuation."""

  def __init__(self, index: int, tokenizer: Tokenizer, logprobs: bool):
    self._index, self._tokenizer, self._logprobs = index, tokenizer, logprobs
    self._text = ''
    self._events: list[tuple[Event, int]] = []  # Each with where in the text it begins.
    self._told = 0
    self._finish_reason: str | None = None

  def first(self) -> dict[str, Any] | None:
    return None

  def add(self, event: Event) -> dict[str, Any] | None:
    if self._logprobs:
      self._events.append((event, len(self._text)))
    self._text += event.text
    if event.output is not None:
      self._finish_reason = event.output.finish_reason
    elif not event.text:
      return None
    new = self._events[self._told :]
    self._told += len(new)
    return self._choice(event.text, new)

  def whole(self) -> dict[str, Any]:
    return self._choice(self._text, self._events)

  def _choice(self, text: str, events: Sequence[tuple[Event, int]]) -> dict[str, Any]:
    entries = [_entry(event, self._tokenizer) for event, _ in events]
    logprobs = {
      'tokens': [e['token'] for e in entries],
      'token_logprobs': [e['logprob'] for e in entries],
      'top_logprobs': [{t['token']: t['logprob'] for t in e['top_logprobs']} for e in entries],
      'text_offset': [offset for _, offset in events],
    }
    return {
      'index': self._index,
      'text': text,
      'logprobs': logprobs if self._logprobs else None,
      'finish_reason': self._finish_reason,
    }


def _entry(event: Event, tokenizer: Tokenizer) -> dict[str, Any]:
  top = [_token(token, logprob, tokenizer) for token, logprob in event.top_logprobs]
  return {**_token(event.token, event.raw_logprob, tokenizer), 'top_logprobs': top}


def _token(token: int, logprob: float, tokenizer: Tokenizer) -> dict[str, Any]:
  text = tokenizer.decode([token])
  # A part of a character has no text, and the tokenizer does not tell its bytes.
  whole = '\N{REPLACEMENT CHARACTER}' not in text
  return {
    'token': text,
    'token_id': token,
    'logprob': finite(logprob),
    'bytes': list(text.encode()) if whole else None,
  }


class Usage:
  """Tokens of a call so far.

  Args:
    prompt_tokens: of its prompts together.
  """

  def __init__(self, prompt_tokens: int):
    self._prompt_tokens = prompt_tokens
    self._completion_tokens = 0
    self._cached: dict[int, int] = {}

  def add(self, number: int, event: Event) -> None:
    self._completion_tokens += 1
    if event.output is not None and event.output.sample == 0:
      self._cached[number] = event.output.cached_tokens

  def json(self) -> dict[str, Any]:
    return {
      'prompt_tokens': self._prompt_tokens,
      'completion_tokens': self._completion_tokens,
      'total_tokens': self._prompt_tokens + self._completion_tokens,
      'prompt_tokens_details': {'cached_tokens': sum(self._cached.values())},
    }


class Envelope:
  """What is around the choices of a call.

  Args:
    kind: 'chat.completion' or 'text_completion'.
    model: its name.
    fingerprint: of the weights.
  """

  def __init__(self, kind: str, model: str, fingerprint: str):
    prefix = 'chatcmpl' if kind == 'chat.completion' else 'cmpl'
    self._chat = kind == 'chat.completion'
    self._fields = {
      'id': f'{prefix}-{uuid.uuid4().hex}',
      'object': kind,
      'created': int(time.time()),
      'model': model,
      'system_fingerprint': fingerprint,
    }

  def whole(self, choices: Sequence[dict[str, Any]], usage: Usage) -> dict[str, Any]:
    return {**self._fields, 'choices': list(choices), 'usage': usage.json()}

  def chunk(self, choices: Sequence[dict[str, Any]], usage: Usage | None = None) -> dict[str, Any]:
    """A part of a stream; the one that tells the usage may have no choices."""
    kind = 'chat.completion.chunk' if self._chat else 'text_completion'
    out = {**self._fields, 'object': kind, 'choices': list(choices)}
    return out if usage is None else {**out, 'usage': usage.json()}


def token_output(output: Output, top: Sequence[Sequence[tuple[int, float]]]) -> dict[str, Any]:
  """One sample of /generate; `top` has the alternatives of each token, if they were asked for."""
  out = {
    'ids': output.ids,
    'logprobs': [finite(p) for p in output.logprobs],
    'raw_logprobs': [finite(p) for p in output.raw_logprobs],
    'versions': output.versions,
    'text': output.text,
    'finish_reason': output.finish_reason,
    'stop': output.stop,
    'prompt_tokens': output.prompt_tokens,
    'cached_tokens': output.cached_tokens,
    'preemptions': output.preemptions,
  }
  if top:
    out['top_logprobs'] = [[{'id': i, 'logprob': finite(p)} for i, p in row] for row in top]
  return out
