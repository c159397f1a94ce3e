"""What clients send: JSON objects read field by field, and the errors that tell them what is wrong.

Every field that a request may have is named here or in `server_chat`. An unknown one is an error
that names the nearest known one, for a misspelt limit that is ignored is worse than a refusal.
"""

import difflib
import json
import math
import secrets
from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

from glm5_jax.infer.request import MAX_TOP_LOGPROBS, Request

# Fields of OpenAI's that change nothing about the text.
_WITHOUT_EFFECT = (
  'user', 'metadata', 'store', 'service_tier', 'safety_identifier', 'prompt_cache_key',
  'prompt_cache_retention',
)  # fmt: skip
MAX_STOPS = 16


class ApiError(Exception):
  """An answer other than 200, in OpenAI's form.

  Attributes:
    status: of HTTP.
    headers: further ones of the answer.
  """

  def __init__(
    self,
    status: int,
    message: str,
    *,
    param: str | None = None,
    code: str | None = None,
    headers: Mapping[str, str] | None = None,
  ):
    super().__init__(message)
    self.status = status
    self.headers = dict(headers or {})
    self._param, self._code = param, code

  def body(self) -> dict[str, Any]:
    """The JSON object to answer with."""
    kinds = {401: 'authentication_error', 429: 'rate_limit_error', 504: 'timeout_error'}
    kind = kinds.get(self.status, 'server_error' if self.status >= 500 else 'invalid_request_error')
    error = {'message': str(self), 'type': kind, 'param': self._param, 'code': self._code}
    return {'error': error}


def load_json(body: bytes) -> Any:
  """The value of a JSON text in UTF-8.

  Raises:
    ApiError: it is none, or has numbers that JSON does not know.
  """

  def refuse(name: str) -> Any:
    raise ValueError(f'{name} is not a JSON number')

  try:
    return json.loads(body.decode('utf-8'), parse_constant=refuse)
  except UnicodeDecodeError as e:
    raise ApiError(400, f'the body is not UTF-8: {e.reason} at byte {e.start}') from None
  except ValueError as e:
    raise ApiError(400, f'the body is not JSON: {e}') from None
  except RecursionError:
    raise ApiError(400, 'the body is nested too deeply') from None


class Fields:
  """The fields of a JSON object, read by type; null counts as absent.

  Raises:
    ApiError: from the constructor, if it is no object; from each method, if the field does not fit.
  """

  def __init__(self, body: Any, where: str = ''):
    if not isinstance(body, dict):
      raise ApiError(400, f'{where or "the body"} must be a JSON object, not {shown(body)}')
    self._body, self._where = body, where
    self._known: set[str] = set()

  def take(self, name: str, default: Any = None) -> Any:
    """The field as it is."""
    self._known.add(name)
    value = self._body.get(name)
    return default if value is None else value

  def error(self, name: str, problem: str) -> ApiError:
    """For a field that does not fit: '<name> <problem>'."""
    name = f'{self._where}.{name}' if self._where else name
    return ApiError(400, f'{name} {problem}', param=name)

  def number(self, name: str, default: Any, low: float, high: float) -> Any:
    """A finite number within low..high."""
    value = self.take(name)
    if value is None:
      return default
    if isinstance(value, bool) or not isinstance(value, int | float):
      raise self.error(name, f'must be a number, not {shown(value)}')
    if not low <= value <= high:
      raise self.error(name, f'must be within {low:g}..{high:g}, not {shown(value)}')
    return float(value)

  def integer(self, name: str, default: Any, low: int, high: int) -> Any:
    """An integer within low..high."""
    value = self.take(name)
    if value is None:
      return default
    if isinstance(value, float) and value.is_integer():
      value = int(value)
    if isinstance(value, bool) or not isinstance(value, int):
      raise self.error(name, f'must be an integer, not {shown(value)}')
    if not low <= value <= high:
      raise self.error(name, f'must be within {low}..{high}, not {shown(value)}')
    return value

  def flag(self, name: str, default: Any = False) -> Any:
    """true or false."""
    return self._typed(name, bool, 'true or false', default)

  def text(self, name: str, default: Any = None) -> Any:
    """A string."""
    return self._typed(name, str, 'a string', default)

  def _typed(self, name: str, kind: type, expected: str, default: Any) -> Any:
    value = self.take(name)
    if value is not None and not isinstance(value, kind):
      raise self.error(name, f'must be {expected}, not {shown(value)}')
    return default if value is None else value

  def ids(self, name: str) -> list[int]:
    """Token ids; the engine knows which ones there are."""
    value = self.take(name, [])
    if not is_ids(value):
      raise self.error(name, f'must be a list of token ids, not {shown(value)}')
    return value

  def refuse(self, name: str, allowed: Sequence[Any], instead: str) -> None:
    """Raises if the field has a value that would be ignored."""
    value = self.take(name)
    if value is not None and value not in allowed:
      raise self.error(name, f'is not supported; {instead}')

  def done(self) -> None:
    """Raises for a field that nobody asked for."""
    unknown = sorted(set(self._body) - self._known - set(_WITHOUT_EFFECT))
    if unknown:
      near = difflib.get_close_matches(unknown[0], sorted(self._known), n=1)
      hint = f'; did you mean {near[0]}?' if near else ''
      raise self.error(shown(unknown[0]), f'is not a field that this server knows{hint}')


def is_ids(value: Any) -> bool:
  """Whether it is a list of integers."""
  return isinstance(value, list) and all(type(i) is int for i in value)


def shown(value: Any) -> str:
  """A value for an error message, short."""
  # Python refuses to print thousands of digits.
  if isinstance(value, int) and abs(value) >= 1 << 64:
    return 'an integer of more than 64 bits'
  if isinstance(value, dict | list):
    return 'an object' if isinstance(value, dict) else 'a list'
  text = json.dumps(value)
  return text if len(text) <= 80 else text[:77] + '...'


class Sizes(NamedTuple):
  """What a request may ask for.

  Attributes:
    vocab_size: V; token ids lie below.
    max_length: tokens of prompt and answer together.
    new_tokens: of one answer at most; also the default.
    sequences: answers that are generated at a time.
  """

  vocab_size: int
  max_length: int
  new_tokens: int
  sequences: int


def sampling(fields: Fields, sizes: Sizes) -> dict[str, Any]:
  """Arguments of `Request` that all text endpoints take under the same names."""
  temperature = fields.number('temperature', 1.0, 0, 100)
  if 0 < temperature < 1e-3:
    raise fields.error('temperature', 'must be 0 (the most probable token) or at least 0.001')
  fields.refuse('frequency_penalty', (0,), 'use presence_penalty or repetition_penalty')
  fields.refuse('logit_bias', ({},), 'leave it out')
  seed = fields.integer('seed', None, -(1 << 63), (1 << 64) - 1)
  return {
    'temperature': temperature,
    'top_p': fields.number('top_p', 1.0, 0, 1),
    'top_k': max(0, fields.integer('top_k', 0, -1, (1 << 31) - 1)),  # -1 is off elsewhere.
    'min_p': fields.number('min_p', 0.0, 0, 1),
    'repetition_penalty': fields.number('repetition_penalty', 1.0, 0.01, 100),
    'presence_penalty': fields.number('presence_penalty', 0.0, -100, 100),
    'seed': secrets.randbits(63) if seed is None else seed % (1 << 64),
    'samples': fields.integer('n', 1, 1, sizes.sequences),
    'stop_ids': tuple(fields.ids('stop_token_ids')),
    'stop_strings': stops(fields),
    'ignore_eos': fields.flag('ignore_eos'),
  }


def stops(fields: Fields) -> tuple[str, ...]:
  """`stop`: a string or a list of them."""
  value = fields.take('stop', [])
  value = [value] if isinstance(value, str) else value
  if not isinstance(value, list) or not all(isinstance(s, str) and s for s in value):
    raise fields.error('stop', 'must be a string or a list of strings, none empty')
  if len(value) > MAX_STOPS:
    raise fields.error('stop', f'has {len(value)} strings; at most {MAX_STOPS}')
  return tuple(value)


def max_tokens(fields: Fields, name: str = 'max_tokens') -> int | None:
  """A limit on new tokens; how large it may be depends on the prompt, see `fit`."""
  return fields.integer(name, None, 1, 1 << 62)


def fit(limit: int | None, prompt: Sequence[int], sizes: Sizes) -> int:
  """How many tokens to generate after `prompt`.

  Raises:
    ApiError: there is no room, or not for as many as were asked for.
  """
  room = sizes.max_length - len(prompt)
  if room < 1:
    raise ApiError(
      400,
      f'the prompt has {len(prompt)} tokens; at most {sizes.max_length - 1} leave room for an'
      ' answer',
      code='context_length_exceeded',
    )
  most = min(room, sizes.new_tokens)
  if limit is not None and limit > most:
    raise ApiError(
      400,
      f'max_tokens={shown(limit)} is too large: a prompt of {len(prompt)} tokens leaves room for'
      f' {room}, and one answer may have {sizes.new_tokens}; ask for at most {most}',
      param='max_tokens',
      code='context_length_exceeded',
    )
  return most if limit is None else limit


class StreamOptions(NamedTuple):
  """Whether to stream, and where usage is told: in a last chunk, in every chunk."""

  stream: bool
  usage: bool
  every_usage: bool


def stream_options(fields: Fields) -> StreamOptions:
  """`stream` and `stream_options`."""
  stream = fields.flag('stream')
  options = Fields(fields.take('stream_options', {}), 'stream_options')
  usage = options.flag('include_usage')
  every = options.flag('continuous_usage_stats')
  options.flag('include_obfuscation')
  options.done()
  return StreamOptions(stream, usage or every, every)


def prompts(fields: Fields, tokenizer: Any, sizes: Sizes) -> list[list[int]]:
  """`prompt` of /v1/completions: a text, token ids, or a list of either; at least one."""
  value = fields.take('prompt')
  many = [value] if isinstance(value, str) or (is_ids(value) and value) else value
  if not isinstance(many, list) or not many:
    raise fields.error('prompt', 'must be a text, a list of token ids, or a list of these')
  if len(many) > sizes.sequences:
    raise fields.error('prompt', f'has {len(many)} entries; at most {sizes.sequences}')
  out = []
  for one in many:
    if isinstance(one, str):
      # Training has the same token before every document.
      out.append([tokenizer.eot_id, *tokenizer.encode(one).tolist()])
    elif is_ids(one) and one:
      out.append(one)
    else:
      raise fields.error('prompt', 'must hold texts or non-empty lists of token ids')
  return out


def completion_requests(
  fields: Fields, tokenizer: Any, sizes: Sizes
) -> tuple[list[Request], int | None]:
  """The requests of a body of /v1/completions, and its `logprobs`."""
  settings = sampling(fields, sizes)
  limit = max_tokens(fields)
  if limit is None:
    sizes = sizes._replace(new_tokens=min(16, sizes.new_tokens))  # OpenAI's default.
  logprobs = fields.integer('logprobs', None, 0, MAX_TOP_LOGPROBS)
  fields.refuse('echo', (False,), 'put the prompt before the answer yourself')
  fields.refuse('suffix', ('',), 'write the infilling format into the prompt as token ids')
  fields.refuse('best_of', (1, settings['samples']), 'ask for n answers and choose')
  made = [
    Request(prompt, max_tokens=fit(limit, prompt, sizes), top_logprobs=logprobs or 0, **settings)
    for prompt in prompts(fields, tokenizer, sizes)
  ]
  return made, logprobs


def token_request(fields: Fields, sizes: Sizes) -> Request:
  """The request of a body of /generate: token ids in, other fields as in /v1/completions."""
  settings = sampling(fields, sizes)
  prompt = fields.ids('prompt_ids')
  if not prompt:
    raise fields.error('prompt_ids', 'must be a list of at least one token id')
  limit = fit(max_tokens(fields), prompt, sizes)
  top = fields.integer('top_logprobs', 0, 0, MAX_TOP_LOGPROBS)
  fields.done()
  return Request(prompt, max_tokens=limit, top_logprobs=top, **settings)


def finite(value: float) -> float | None:
  """JSON has no number that is not finite."""
  return value if math.isfinite(value) else None
