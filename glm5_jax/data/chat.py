"""GLM's conversation format (section 3.1): messages to tokens, each of which knows who wrote it.

A turn begins with a role token and ends where the next one begins; there is no separator. The model
itself writes its reasoning, its answer, its calls, and the token that ends its turn: `<|user|>` after
an answer, `<|observation|>` after calls. Everything else is put there by the template.

The three modes of thinking are two switches and a rule:
  interleaved   always: since the last user message, all reasoning stays in the context, between calls too
  preserved     clear_thinking=False: all reasoning of all turns stays. A conversation then only grows:
                its tokens never change when a turn is appended
  turn-level    enable_thinking=False for a turn: the model answers at once

`generation` says whose template: '5' (GLM-4.7 and GLM-5 render the same), '5.1', '5.2'.
"""

import dataclasses
import json
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import numpy as np

from glm5_jax.data.report import DataError
from glm5_jax.data.tokenizer import SPECIAL_TOKENS, Tokenizer

Message = Mapping[str, Any]
ROLES = ('system', 'user', 'assistant', 'tool')
GENERATIONS = ('5', '5.1', '5.2')

_TOOLS_BEFORE = (
  '\n# Tools\n\nYou may call one or more functions to assist with the user query.\n\nYou are provided'
  ' with function signatures within <tools></tools> XML tags:\n<tools>\n'
)
_TOOLS_AFTER = (
  '</tools>\n\nFor each function call, output the function name and arguments within the following'
  ' XML format:\n<tool_call>{function-name}<arg_key>{arg-key-1}</arg_key><arg_value>{arg-value-1}'
  '</arg_value><arg_key>{arg-key-2}</arg_key><arg_value>{arg-value-2}</arg_value>...</tool_call>'
)


class ChatError(DataError):
  """A conversation is not well formed. Says which message, and what was expected."""


@dataclasses.dataclass(frozen=True)
class ChatFormat:
  """How conversations are rendered.

  Attributes:
    generation: whose template, one of GENERATIONS.
    enable_thinking: whether the turn to come thinks.
    clear_thinking: drop the reasoning of turns before the last user message.
    reasoning_effort: 'high', or anything else for 'max'; only '5.2' says it to the model.
  """

  generation: str = '5'
  enable_thinking: bool = True
  clear_thinking: bool = True
  reasoning_effort: str = 'max'

  def __post_init__(self):
    if self.generation not in GENERATIONS:
      raise ChatError(f'unknown chat format {self.generation!r}; known are {GENERATIONS}')


class Segment(NamedTuple):
  """A piece of a rendered conversation.

  Attributes:
    text: a special token if `special`, else plain text: a name of a special token in it stays text.
    sampled: whether the model wrote it.
    message: index of the message it belongs to; -1 for the prefix.
    special: see text.
  """

  text: str
  sampled: bool
  message: int
  special: bool


class Encoded(NamedTuple):
  """Tokens of a conversation, [n] each."""

  ids: np.ndarray  # int32
  sampled: np.ndarray  # bool: the model wrote it; what a loss counts
  message: np.ndarray  # int32: index of its message, -1 for the prefix


def render(
  messages: Sequence[Message],
  tools: Sequence[Mapping[str, Any]] | None = None,
  *,
  form: ChatFormat = ChatFormat(),
  generation_prompt: bool = False,
  close: bool = False,
) -> list[Segment]:
  """A conversation in pieces; ''.join of their texts is what GLM's own template gives.

  Args:
    messages: in the OpenAI form: role, content (a string or a list of text parts), and for assistants
      reasoning_content and tool_calls.
    tools: function definitions in the OpenAI form.
    form: the template's switches.
    generation_prompt: whether to open the assistant's next turn.
    close: whether to end a last assistant turn with the token that the model should write there, as
      training needs.

  Raises:
    ChatError: a message is malformed.
  """
  for i, message in enumerate(messages):
    _check(i, message)
  last_user = max((i for i, m in enumerate(messages) if m['role'] == 'user'), default=-1)
  out = _Pieces()
  out.template(-1, '[gMASK]<sop>')
  if form.generation == '5.2' and form.enable_thinking:
    effort = 'High' if form.reasoning_effort == 'high' else 'Max'
    out.template(-1, f'<|system|>Reasoning Effort: {effort}')
  if tools:
    out.template(-1, '<|system|>' + _TOOLS_BEFORE)
    for tool in _shown(tools, form):
      out.plain(-1, json.dumps(tool, ensure_ascii=False) + '\n')
    out.template(-1, _TOOLS_AFTER)
  for i, message in enumerate(messages):
    before = messages[i - 1]['role'] if i else ''
    _render_message(out, i, message, before, i > last_user, form)
  if generation_prompt:
    _open_turn(out, len(messages), form)
  elif close and messages and messages[-1]['role'] == 'assistant':
    end = '<|observation|>' if messages[-1].get('tool_calls') else '<|user|>'
    out.role(len(messages), end, 'assistant')
  return out.segments


def continuation(results: Sequence[Message], *, form: ChatFormat = ChatFormat()) -> list[Segment]:
  """What follows an assistant's turn that ended in `<|observation|>`, up to its next words.

  So a conversation continues from the very tokens that were generated, which are never rendered again.

  Args:
    results: `tool` messages.
    form: as in `render`.
  """
  out = _Pieces()
  for i, message in enumerate(results):
    _check(i, message)
    _render_message(out, i, message, 'tool', True, form)
  _open_turn(out, len(results), form)
  return out.segments


def _open_turn(out: '_Pieces', i: int, form: ChatFormat) -> None:
  closed = '<think></think>' if form.generation == '5.2' else '</think>'
  out.template(i, '<|assistant|>' + ('<think>' if form.enable_thinking else closed))


def _render_message(
  out: '_Pieces', i: int, message: Message, before: str, after_user: bool, form: ChatFormat
) -> None:
  role, text = message['role'], visible_text(message.get('content'))
  if role == 'assistant':
    out.role(i, '<|assistant|>', before)
    _render_assistant(out, i, message, after_user, form)
  elif role == 'tool':
    if before != 'tool':
      out.role(i, '<|observation|>', before)
    out.template(i, '<tool_response>')
    out.plain(i, text)
    out.template(i, '</tool_response>')
  else:
    out.role(i, f'<|{role}|>', before)
    out.plain(i, text)


def _render_assistant(
  out: '_Pieces', i: int, message: Message, after_user: bool, form: ChatFormat
) -> None:
  reasoning, content = split_reasoning(message)
  if form.generation != '5.2':
    reasoning = reasoning.strip()
  keep = after_user or not form.clear_thinking
  if reasoning and keep:
    out.template(i, '<think>')
    out.sampled(i, reasoning)
    out.token(i, '</think>', sampled=True)
  elif form.generation == '5.2' or (
    form.generation == '5.1' and after_user and form.enable_thinking
  ):
    # An opened thought that is closed at once: the model's own act, if it was free to think.
    out.template(i, '<think>')
    out.token(i, '</think>', sampled=keep and form.enable_thinking)
  else:
    out.template(i, '</think>')
  out.sampled(i, content.strip())
  for call in message.get('tool_calls') or ():
    function = call.get('function', call)
    out.token(i, '<tool_call>', sampled=True)
    out.sampled(i, function['name'])
    for key, value in _arguments(i, function).items():
      out.token(i, '<arg_key>', sampled=True)
      out.sampled(i, key)
      out.token(i, '</arg_key>', sampled=True)
      out.token(i, '<arg_value>', sampled=True)
      out.sampled(i, value if isinstance(value, str) else json.dumps(value, ensure_ascii=False))
      out.token(i, '</arg_value>', sampled=True)
    out.token(i, '</tool_call>', sampled=True)


class _Pieces:
  """Collects segments; adjacent plain texts of one author become one, for they are tokenised as one."""

  def __init__(self):
    self.segments: list[Segment] = []

  def token(self, message: int, name: str, *, sampled: bool) -> None:
    self.segments.append(Segment(name, sampled, message, True))

  def role(self, message: int, name: str, before: str) -> None:
    """A role token. The one that ends an assistant's turn is the model's own, and part of that turn."""
    sampled = before == 'assistant' and name in ('<|user|>', '<|observation|>')
    self.token(message - sampled, name, sampled=sampled)

  def plain(self, message: int, text: str, sampled: bool = False) -> None:
    """Text of a user, a tool or the model: never a special token."""
    last = self.segments[-1] if self.segments else None
    if last and not last.special and (last.sampled, last.message) == (sampled, message):
      self.segments[-1] = last._replace(text=last.text + text)
    elif text:
      self.segments.append(Segment(text, sampled, message, False))

  def sampled(self, message: int, text: str) -> None:
    self.plain(message, text, sampled=True)

  def template(self, message: int, text: str) -> None:
    """Text of the template, in which the names of special tokens are these tokens."""
    for piece, special in split_special(text):
      if special:
        self.token(message, piece, sampled=False)
      else:
        self.plain(message, piece)


def split_special(text: str) -> list[tuple[str, bool]]:
  """The text in pieces, and of each whether it is a special token."""
  pieces, start, i = [], 0, 0
  while i < len(text):
    name = next((t for t in SPECIAL_TOKENS if text.startswith(t, i)), None)
    if name is None:
      i += 1
      continue
    if start < i:
      pieces.append((text[start:i], False))
    pieces.append((name, True))
    i += len(name)
    start = i
  if start < len(text):
    pieces.append((text[start:], False))
  return pieces


def encode(segments: Sequence[Segment], tokenizer: Tokenizer) -> Encoded:
  """Tokens of rendered segments, each with its author.

  Raises:
    DataError: the tokenizer lacks one of GLM's special tokens.
  """
  plain = iter(tokenizer.encode_batch([s.text for s in segments if not s.special]))
  ids, sampled, message = [], [], []
  for s in segments:
    new = (
      np.array([tokenizer.special(s.text, 'the chat format')], np.int32)
      if s.special
      else next(plain)
    )
    ids.append(new)
    sampled.append(np.full(len(new), s.sampled))
    message.append(np.full(len(new), s.message, np.int32))
  empty = np.zeros(0, np.int32)
  return Encoded(
    np.concatenate([empty, *ids]),
    np.concatenate([empty.astype(bool), *sampled]),
    np.concatenate([empty, *message]),
  )


def text_of(segments: Sequence[Segment]) -> str:
  """The rendered conversation as one string."""
  return ''.join(s.text for s in segments)


def visible_text(content: Any) -> str:
  """Text of a message's content: a string, or the text parts of a list; anything else is printed."""
  if isinstance(content, str):
    return content
  if isinstance(content, list | tuple):
    parts = [p if isinstance(p, str) else p.get('text', '') for p in content
             if isinstance(p, str) or p.get('type') == 'text']  # fmt: skip
    return ''.join(parts)
  return str(content)


def split_reasoning(message: Message) -> tuple[str, str]:
  """(reasoning, answer) of an assistant's message, whose content may hold both."""
  content, reasoning = visible_text(message.get('content')), message.get('reasoning_content')
  if isinstance(reasoning, str):
    return reasoning, content
  if '</think>' not in content:
    return '', content
  before, after = content.split('</think>')[0], content.split('</think>')[-1]
  return before.split('<think>')[-1], after


def _arguments(i: int, function: Mapping[str, Any]) -> Mapping[str, Any]:
  arguments = function.get('arguments') or {}
  if isinstance(arguments, str):  # OpenAI's own form is a JSON text.
    try:
      arguments = json.loads(arguments)
    except ValueError as e:
      raise ChatError(f'message {i}: arguments of {function["name"]!r} are not JSON: {e}') from None
  if not isinstance(arguments, Mapping):
    raise ChatError(f'message {i}: arguments of {function["name"]!r} must be an object')
  return arguments


def _shown(tools: Sequence[Mapping[str, Any]], form: ChatFormat) -> list[Any]:
  """What the model sees of the tools."""
  if form.generation == '5':
    return list(tools)
  shown = []
  for tool in tools:
    function = dict(tool.get('function', tool))
    if not (
      form.generation == '5.2' and (function.get('defer_loading') or tool.get('defer_loading'))
    ):
      shown.append({k: v for k, v in function.items() if k not in ('defer_loading', 'strict')})
  return shown


def _check(i: int, message: Any) -> None:
  if not isinstance(message, Mapping) or message.get('role') not in ROLES:
    found = message.get('role') if isinstance(message, Mapping) else message
    raise ChatError(f'message {i}: role must be one of {", ".join(ROLES)}, not {found!r}')
  content = message.get('content')
  if isinstance(content, list | tuple):
    for part in content:
      if not isinstance(part, str | Mapping):
        raise ChatError(f'message {i}: a content part must be text or an object, not {part!r}')
  calls = message.get('tool_calls') or ()
  if calls and message['role'] != 'assistant':
    raise ChatError(f'message {i}: only an assistant has tool_calls, not a {message["role"]}')
  for call in calls:
    function = call.get('function', call) if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping) or not isinstance(function.get('name'), str):
      raise ChatError(f'message {i}: a tool call needs a function with a name, found {call!r}')
