"""Chat: an OpenAI body to a prompt in GLM's format, and generated tokens to an assistant's message.

`tool_choice` is what a server without constrained decoding can truly do:
  'auto'      the model decides
  'none'      tools are not shown, and the turn ends where a call would begin
  'required'  the answer is begun for the model with `<tool_call>`, without a thought before it
  a function  it is begun with `<tool_call>` and the name, and ends after that one call
What the model then writes may still be no well-formed call; the message has
`tool_call_errors` then.
"""

import json
import uuid
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from glm5_jax.data import chat, chat_parse
from glm5_jax.data.report import DataError
from glm5_jax.data.tokenizer import Tokenizer
from glm5_jax.infer.request import MAX_TOP_LOGPROBS, Request
from glm5_jax.infer.server_requests import (
  ApiError,
  Fields,
  Sizes,
  fit,
  max_tokens,
  sampling,
  shown,
)
from glm5_jax.infer.text import TextStream

CALL, END_OF_CALL, END_OF_THOUGHT = '<tool_call>', '</tool_call>', '</think>'


class ChatJob(NamedTuple):
  """A chat request, ready for the engine.

  Attributes:
    request: its prompt ends with what the answer was begun with.
    begun: the ids of that beginning, which belong to the answer.
    thinking: whether the answer begins with reasoning.
    tools: on offer.
    logprobs: whether to report them.
  """

  request: Request
  begun: tuple[int, ...]
  thinking: bool
  tools: list[dict[str, Any]]
  logprobs: bool

  def reader(self, tokenizer: Tokenizer) -> 'ChatReader':
    """For one sample's tokens."""
    reader = ChatReader(tokenizer, self.tools, self.thinking, self.request.stop_strings)
    for token in self.begun:
      reader.add(token)
    return reader


def chat_job(fields: Fields, tokenizer: Tokenizer, form: chat.ChatFormat, sizes: Sizes) -> ChatJob:
  """Reads a body of /v1/chat/completions but for `model` and streaming.

  Args:
    fields: of the body.
    tokenizer: of the model.
    form: the template's switches where the body does not set them.
    sizes: see `Sizes`.

  Raises:
    ApiError: a field is wrong, or the prompt leaves no room.
  """
  settings = sampling(fields, sizes)
  messages = [_message(i, m) for i, m in enumerate(_list(fields, 'messages', least=1))]
  tools = [_tool(i, t) for i, t in enumerate(_list(fields, 'tools'))]
  mode, forced = _tool_choice(fields, tools)
  parallel = fields.flag('parallel_tool_calls', True)
  form = _form(fields, form, thinking=mode not in ('required', 'function'))
  limit, new_name = max_tokens(fields), max_tokens(fields, 'max_completion_tokens')
  top = fields.integer('top_logprobs', None, 0, MAX_TOP_LOGPROBS)
  logprobs = fields.flag('logprobs')
  if top is not None and not logprobs:
    raise fields.error('top_logprobs', 'needs logprobs=true')
  _refuse_the_rest(fields)
  fields.done()

  if mode == 'none':
    tools = []
  ends = [*chat_parse.STOP_TOKENS]
  if mode == 'none':
    ends.append(CALL)
  if mode == 'function' or not parallel:
    ends.append(END_OF_CALL)
  try:
    segments = chat.render(messages, tools, form=form, generation_prompt=True)
    prompt = chat.encode(segments, tokenizer).ids.tolist()
    begun: list[int] = []
    if forced is not None:
      begun = [tokenizer.special(CALL, 'a tool call'), *tokenizer.encode(forced).tolist()]
    end_ids = [tokenizer.special(name, 'the chat format') for name in ends]
  except DataError as e:
    raise ApiError(400, str(e)) from None
  except RecursionError:
    raise ApiError(400, 'the arguments of a tool call are nested too deeply') from None
  settings['stop_ids'] = (*settings['stop_ids'], *end_ids)
  prompt += begun
  request = Request(
    prompt,
    max_tokens=fit(limit if new_name is None else new_name, prompt, sizes),
    top_logprobs=top or 0,
    **settings,
  )
  return ChatJob(request, tuple(begun), form.enable_thinking, tools, logprobs)


def _list(fields: Fields, name: str, least: int = 0) -> list[Any]:
  value = fields.take(name, [])
  if not isinstance(value, list) or len(value) < least:
    raise fields.error(name, f'must be a list{" of at least one" if least else ""}')
  return value


def _message(i: int, message: Any) -> dict[str, Any]:
  """A message in the form that `chat.render` takes; OpenAI's newer names of roles are mapped."""
  fields = Fields(message, f'messages[{i}]')
  role = fields.text('role', '')
  role = {'developer': 'system'}.get(role, role)
  if role not in chat.ROLES:
    raise fields.error('role', f'must be one of {", ".join(chat.ROLES)}, not {shown(role)}')
  content = fields.take('content', '')
  parts = content if isinstance(content, list) else [{'type': 'text', 'text': content}]
  for part in parts:
    if not isinstance(part, dict) or part.get('type') != 'text':
      raise fields.error('content', 'must be text: this model reads no images, audio or files')
    if not isinstance(part.get('text'), str):
      raise fields.error('content', f'must be text, not {shown(part.get("text"))}')
  out: dict[str, Any] = {'role': role, 'content': ''.join(part['text'] for part in parts)}
  reasoning = fields.text('reasoning_content')
  if reasoning is not None:
    out['reasoning_content'] = reasoning
  calls = _list(fields, 'tool_calls')
  if calls:
    out['tool_calls'] = [_call(f'messages[{i}].tool_calls[{j}]', c) for j, c in enumerate(calls)]
  return out


def _call(where: str, call: Any) -> dict[str, Any]:
  function = Fields(Fields(call, where).take('function'), f'{where}.function')
  arguments = function.take('arguments', {})
  if not isinstance(arguments, str | dict):
    raise function.error('arguments', f'must be a JSON text or an object, not {shown(arguments)}')
  return {'function': {'name': function.text('name', ''), 'arguments': arguments}}


def _tool(i: int, tool: Any) -> dict[str, Any]:
  """The tool, checked as far as rendering and parsing read it."""
  fields = Fields(tool, f'tools[{i}]')
  if fields.take('type') != 'function':
    raise fields.error('type', "must be 'function'")
  function = Fields(fields.take('function'), f'tools[{i}].function')
  if not function.text('name', '').strip():
    raise function.error('name', 'must not be empty')
  parameters = Fields(function.take('parameters', {}), f'tools[{i}].function.parameters')
  properties = parameters.take('properties', {})
  if not isinstance(properties, dict) or any(
    not isinstance(p, dict) for p in properties.values() if p is not None
  ):
    raise parameters.error('properties', 'must map names to objects')
  return tool


def _tool_choice(fields: Fields, tools: Sequence[Mapping[str, Any]]) -> tuple[str, str | None]:
  """('auto' | 'none' | 'required' | 'function', the text that begins a forced call or None)."""
  choice = fields.take('tool_choice', 'auto')
  names = [t['function']['name'] for t in tools]
  if choice in ('auto', 'none'):
    return choice, None
  if not names:
    raise fields.error('tool_choice', 'needs tools to choose from')
  if choice == 'required':
    return 'required', names[0] if len(names) == 1 else ''
  if isinstance(choice, dict) and isinstance(choice.get('function'), dict):
    name = choice['function'].get('name')
    if name in names:
      return 'function', name
    raise fields.error('tool_choice', f'names {shown(name)}; there are {shown(", ".join(names))}')
  raise fields.error(
    'tool_choice',
    "must be 'auto', 'none', 'required' or {'type': 'function', 'function': {'name': ...}}",
  )


def _form(fields: Fields, form: chat.ChatFormat, *, thinking: bool) -> chat.ChatFormat:
  """The template's switches: `chat_template_kwargs`, and OpenAI's own `reasoning_effort`."""
  effort = fields.text('reasoning_effort')
  switches = Fields(fields.take('chat_template_kwargs', {}), 'chat_template_kwargs')
  asked = switches.flag('enable_thinking', form.enable_thinking and effort != 'none')
  form = chat.ChatFormat(
    form.generation,
    enable_thinking=asked and thinking,
    clear_thinking=switches.flag('clear_thinking', form.clear_thinking),
    reasoning_effort=switches.text('reasoning_effort', effort or form.reasoning_effort),
  )
  switches.done()
  return form


def _refuse_the_rest(fields: Fields) -> None:
  fields.refuse('response_format', ({'type': 'text'},), "only {'type': 'text'} is")
  fields.refuse('functions', (), 'use tools')
  fields.refuse('function_call', (), 'use tool_choice')
  fields.refuse('modalities', (['text'],), 'this model writes text')
  for name in ('audio', 'prediction', 'web_search_options', 'verbosity'):
    fields.refuse(name, (), 'leave it out')


class ChatReader:
  """Reads the tokens of an assistant's turn one by one; what each adds to the message is a delta.

  The deltas add up to what `chat_parse.parse` makes of the whole: only real special tokens separate
  the parts, characters come whole, the answer is stripped. A call is given out when it is complete.

  Attributes:
    calls: how many well-formed calls there were.
    errors: what is wrong with the others.
  """

  def __init__(
    self,
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]],
    thinking: bool,
    stops: Sequence[str] = (),
  ):
    self._tokenizer, self._tools, self._stops = tokenizer, tools, stops
    self._names = {i: name for name, i in tokenizer.special_ids.items()}
    self._thinking = thinking
    self._call: list[int] | None = None  # The tokens of a call that is not complete.
    self._stream = TextStream(tokenizer, stops)
    self._stopped = False  # By a stop string in an earlier run of ordinary tokens.
    self._blank: str | None = None  # White space held back; None before the answer's first letter.
    self.calls = 0
    self.errors: list[str] = []

  def add(self, token: int) -> dict[str, Any]:
    """What `token` adds for certain."""
    name = self._names.get(token)
    if self._has_stopped():
      return {}
    if self._call is not None:
      self._call.append(token)
      return self._end_call() if name == END_OF_CALL else {}
    if name is None:
      return self._text(self._stream.add(token))
    delta = self._text(self._end_run())
    if self._has_stopped():
      return delta
    if self._thinking and name == END_OF_THOUGHT:
      self._thinking = False
    elif self._thinking or name not in (CALL, END_OF_CALL):
      delta = joined(delta, self._text(name))
    else:
      self._call = [token]
      if name == END_OF_CALL:  # Which nothing opened.
        delta = joined(delta, self._end_call())
    return delta

  def finish(self) -> dict[str, Any]:
    """What was held back, once the turn has ended."""
    delta = self._text(self._end_run())
    if self._call is not None:
      delta = joined(delta, self._end_call())
    return delta

  def _end_run(self) -> str:
    """The rest of a run of ordinary tokens, which a special token or the end has closed."""
    piece = self._stream.finish()
    self._stopped = self._has_stopped()
    self._stream = TextStream(self._tokenizer, self._stops)
    return piece

  def _has_stopped(self) -> bool:
    return self._stopped or self._stream.stop is not None

  def _text(self, piece: str) -> dict[str, Any]:
    if self._thinking:
      return {'reasoning_content': piece} if piece else {}
    if self._blank is None:
      piece = piece.lstrip()
    visible = piece.rstrip()
    if not visible:
      self._blank = None if self._blank is None else self._blank + piece
      return {}
    content = (self._blank or '') + visible
    self._blank = piece[len(visible) :]
    return {'content': content}

  def _end_call(self) -> dict[str, Any]:
    tokens, self._call = self._call or [], None
    reply = chat_parse.parse(tokens, self._tokenizer, thinking=False, tools=self._tools)
    self.errors += reply.failures
    calls = []
    for call in reply.calls:
      try:
        arguments = json.dumps(call.arguments, ensure_ascii=False, allow_nan=False)
      except ValueError:
        self.errors.append(f'an argument of {call.name!r} is not a finite number')
        continue
      function = {'name': call.name, 'arguments': arguments}
      calls.append({
        'index': self.calls, 'id': f'call_{uuid.uuid4().hex}', 'type': 'function',
        'function': function,
      })  # fmt: skip
      self.calls += 1
    return {'tool_calls': calls} if calls else {}


def joined(first: dict[str, Any], second: dict[str, Any]) -> dict[str, Any]:
  """Both deltas as one."""
  return {k: first[k] + second[k] if k in first and k in second else (first | second)[k]
          for k in first | second}  # fmt: skip


def message_of(deltas: Sequence[Mapping[str, Any]], errors: Sequence[str]) -> dict[str, Any]:
  """The whole message that deltas add up to; `content` is null if there are calls and no text."""
  whole: dict[str, Any] = {}
  for delta in deltas:
    whole = joined(whole, dict(delta))
  calls = [{k: v for k, v in c.items() if k != 'index'} for c in whole.get('tool_calls', ())]
  out: dict[str, Any] = {
    'role': 'assistant', 'content': whole.get('content', None if calls else '')
  }  # fmt: skip
  if 'reasoning_content' in whole:
    out['reasoning_content'] = whole['reasoning_content']
  if calls:
    out['tool_calls'] = calls
  if errors:
    out['tool_call_errors'] = list(errors)
  return out
