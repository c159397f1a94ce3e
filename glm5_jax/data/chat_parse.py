"""Generated tokens back to a message: reasoning, answer, tool calls; what is malformed is called so."""

import dataclasses
import json
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from glm5_jax.data.tokenizer import END_OF_TEXT, Tokenizer

STOP_TOKENS = (END_OF_TEXT, '<|user|>', '<|observation|>')


@dataclasses.dataclass(frozen=True)
class ToolCall:
  """A well-formed call."""

  name: str
  arguments: dict[str, Any]


@dataclasses.dataclass(frozen=True)
class Reply:
  """What an assistant's turn says.

  Attributes:
    reasoning: without its tags; '' if there is none.
    content: the answer, stripped.
    calls: well-formed calls, in order.
    failures: what is malformed, in words for the model that wrote it.
    closed: whether the reasoning ended; False for a turn cut off in thought.
  """

  reasoning: str
  content: str
  calls: tuple[ToolCall, ...] = ()
  failures: tuple[str, ...] = ()
  closed: bool = True

  def message(self) -> dict[str, Any]:
    """As an OpenAI message, which `chat.render` renders to the same tokens if nothing failed."""
    out: dict[str, Any] = {'role': 'assistant', 'content': self.content}
    if self.reasoning:
      out['reasoning_content'] = self.reasoning
    if self.calls:
      out['tool_calls'] = [
        {'type': 'function', 'function': {'name': c.name, 'arguments': c.arguments}}
        for c in self.calls
      ]
    return out


def parse(
  ids: Iterable[int],
  tokenizer: Tokenizer,
  *,
  thinking: bool = True,
  tools: Sequence[Mapping[str, Any]] | None = None,
) -> Reply:
  """The reply that a model's tokens after a generation prompt mean.

  Only real special tokens count: `<tool_call>` spelled in ordinary tokens is text.

  Args:
    ids: generated ids, with or without the stop token.
    tokenizer: theirs.
    thinking: whether the prompt opened a thought: then everything up to `</think>` is reasoning.
    tools: the functions on offer in the OpenAI form; a call of any other is a failure, and values are
      read as their schema says. None allows any.
  """
  items = _without_stop(_items(ids, tokenizer))
  reasoning, closed = '', True
  if thinking:
    end = next((i for i, (name, _) in enumerate(items) if name == '</think>'), None)
    closed = end is not None
    reasoning = _text(items[:end])
    items = items[end + 1 :] if end is not None else []
  content, blocks, failures = _blocks(items)
  calls = []
  for block in blocks:
    call = _call(block, tools)
    if isinstance(call, ToolCall):
      calls.append(call)
    else:
      failures.append(call)
  return Reply(reasoning, content.strip(), tuple(calls), tuple(failures), closed)


# (name of the special token or None, text)
_Item = tuple[str | None, str]


def _items(ids: Iterable[int], tokenizer: Tokenizer) -> list[_Item]:
  names = {i: name for name, i in tokenizer.special_ids.items()}
  items: list[_Item] = []
  run: list[int] = []
  for token in map(int, ids):
    if token not in names:
      run.append(token)
      continue
    if run:
      items.append((None, tokenizer.decode(run)))
      run = []
    items.append((names[token], names[token]))
  return items + [(None, tokenizer.decode(run))] if run else items


def _without_stop(items: list[_Item]) -> list[_Item]:
  while items and items[-1][0] in STOP_TOKENS:
    items = items[:-1]
  return items


def _text(items: Sequence[_Item]) -> str:
  return ''.join(text for _, text in items)


def _blocks(items: Sequence[_Item]) -> tuple[str, list[Sequence[_Item]], list[str]]:
  """(content, what is inside each tool call, failures)."""
  content: list[_Item] = []
  blocks, failures = [], []
  start = None
  for i, item in enumerate(items):
    name = item[0]
    if name == '<tool_call>':
      if start is not None:
        failures.append('a <tool_call> begins inside another')
      start = i + 1
    elif name == '</tool_call>':
      if start is None:
        failures.append('a </tool_call> without its <tool_call>')
      else:
        blocks.append(items[start:i])
      start = None
    elif start is None:
      content.append(item)
  if start is not None:
    failures.append('a <tool_call> is not closed')
  return _text(content), blocks, failures


def _call(block: Sequence[_Item], tools: Sequence[Mapping[str, Any]] | None) -> ToolCall | str:
  """The call, or what is wrong with it."""
  first = next((i for i, (name, _) in enumerate(block) if name is not None), len(block))
  name = _text(block[:first]).strip()
  if not name:
    return 'a tool call has no function name'
  schema: Mapping[str, Any] = {}
  if tools is not None:
    known = {t.get('function', t).get('name'): t.get('function', t) for t in tools}
    if name not in known:
      return f'unknown function {name!r}; there are {", ".join(map(repr, known)) or "none"}'
    schema = (known[name].get('parameters') or {}).get('properties') or {}
  arguments: dict[str, Any] = {}
  rest = list(block[first:])
  while rest:
    if rest[0][0] is None and not rest[0][1].strip():
      rest.pop(0)
      continue
    key, rest = _between(rest, '<arg_key>', '</arg_key>')
    if key is None or not key.strip():
      return f'the arguments of {name!r} are not pairs of <arg_key> and <arg_value>'
    value, rest = _between(_skip_blank(rest), '<arg_value>', '</arg_value>')
    if value is None:
      return f'argument {key!r} of {name!r} has no <arg_value>'
    if key in arguments:
      return f'argument {key!r} of {name!r} is given twice'
    try:
      arguments[key] = _value(value, schema.get(key) or {})
    except RecursionError:
      return f'argument {key!r} of {name!r} is nested too deeply'
  return ToolCall(name, arguments)


def _skip_blank(items: list[_Item]) -> list[_Item]:
  return items[1:] if items and items[0][0] is None and not items[0][1].strip() else items


def _between(items: list[_Item], opening: str, closing: str) -> tuple[str | None, list[_Item]]:
  """(text between the two tokens at the start of `items`, what follows); None if they are not there."""
  if not items or items[0][0] != opening:
    return None, items
  text: list[str] = []
  for i, (name, part) in enumerate(items[1:], 1):
    if name == closing:
      return ''.join(text), items[i + 1 :]
    if name is not None:
      break
    text.append(part)
  return None, items


# What `json` reads and writes and JSON does not know.
_NO_JSON = ('NaN', 'Infinity', '-Infinity')


def _value(text: str, schema: Mapping[str, Any]) -> Any:
  """JSON where it is JSON and the schema does not ask for a string.

  Where the schema says nothing, what is not spelled as JSON would spell it stays text (`1E1`, `007`,
  `"a"`): as a number it would be written back with other tokens.
  """
  if schema.get('type') == 'string':
    return text
  try:
    value = json.loads(text)
  except ValueError:
    return text
  if schema.get('type') or isinstance(value, list | dict):
    return value
  spelled = not isinstance(value, str) and text not in _NO_JSON and json.dumps(value) == text
  return value if spelled else text
