"""What goes into the engine and what comes out: requests, events, outputs and errors."""

import dataclasses
import math
from collections.abc import Sequence

_MAX_SEED = 1 << 64
MAX_TOP_LOGPROBS = 20


class RequestError(ValueError):
  """A request that can never be served as it is. Says what was wrong and what was expected."""


class EngineFullError(RuntimeError):
  """Too many requests wait already; try again later."""


class WeightsError(RuntimeError):
  """The engine's weights are not those it should have, so it takes no requests."""


@dataclasses.dataclass(frozen=True)
class Request:
  """One prompt to continue.

  Attributes:
    prompt_ids: token ids, at least one.
    max_tokens: how many to generate at most; None as many as fit.
    temperature: of sampling; 0 takes the most probable token.
    top_k: only the k most probable tokens; 0 is off.
    top_p: only the most probable ones that together reach this probability; 1 is off.
    min_p: only those at least this share as probable as the most probable one; 0 is off.
    repetition_penalty: logits of tokens seen so far are divided by it (multiplied where negative).
    presence_penalty: subtracted from the logits of tokens generated so far.
    seed: 0..2^64 - 1; same request, seed and weights give the same tokens.
    samples: how many continuations; they share one prefill.
    stop_ids: ids that end generation, besides those of the model's config; they are part of the output.
    stop_strings: texts that end generation; the output's text is cut before them, its ids are not.
    ignore_eos: go on after the config's ids; those of the request still count.
    top_logprobs: how many of the most probable tokens each event names; 0..MAX_TOP_LOGPROBS. Such a
      request decodes without drafts.
  """

  prompt_ids: Sequence[int]
  max_tokens: int | None = None
  temperature: float = 1.0
  top_k: int = 0
  top_p: float = 1.0
  min_p: float = 0.0
  repetition_penalty: float = 1.0
  presence_penalty: float = 0.0
  seed: int = 0
  samples: int = 1
  stop_ids: Sequence[int] = ()
  stop_strings: Sequence[str] = ()
  ignore_eos: bool = False
  top_logprobs: int = 0

  @property
  def has_penalty(self) -> bool:
    return self.repetition_penalty != 1 or self.presence_penalty != 0

  def settings(self, sample: int, position: int) -> tuple:
    """A row for `sampling.stack`."""
    return (
      self.temperature, self.top_k, self.top_p, self.min_p, self.repetition_penalty,
      self.presence_penalty, self.seed, sample, position,
    )  # fmt: skip


def check(request: Request, vocab_size: int, max_length: int, has_tokenizer: bool) -> None:
  """Raises RequestError for what the engine cannot do.

  Args:
    request: to be checked.
    vocab_size: V; prompt ids must lie below.
    max_length: tokens that a sequence may have, prompt and new ones together.
    has_tokenizer: whether stop strings can be found.
  """
  r = request
  length = len(r.prompt_ids)
  if not length:
    raise RequestError('the prompt is empty; generation needs at least one token')
  if min(r.prompt_ids) < 0 or max(r.prompt_ids) >= vocab_size:
    raise RequestError(f'the prompt has ids outside 0..{vocab_size - 1}')
  if length >= max_length:
    raise RequestError(
      f'the prompt has {length} tokens; at most {max_length - 1} leave room for one new token'
    )
  if r.max_tokens is not None and r.max_tokens < 1:
    raise RequestError(f'max_tokens must be at least 1, not {r.max_tokens}')
  if r.max_tokens is not None and length + r.max_tokens > max_length:
    raise RequestError(
      f'a prompt of {length} tokens and max_tokens={r.max_tokens} exceed the maximum length of'
      f' {max_length}; ask for at most {max_length - length}'
    )
  bounds = (
    ('temperature', r.temperature, r.temperature >= 0, 'at least 0'),
    ('top_k', r.top_k, 0 <= r.top_k < 1 << 31, 'at least 0 (0 is off)'),
    ('top_p', r.top_p, 0 < r.top_p <= 1, 'above 0 and at most 1'),
    ('min_p', r.min_p, 0 <= r.min_p < 1, 'at least 0 and below 1'),
    ('repetition_penalty', r.repetition_penalty, r.repetition_penalty > 0, 'above 0'),
    ('presence_penalty', r.presence_penalty, True, 'a number'),
    ('seed', r.seed, 0 <= r.seed < _MAX_SEED, 'within 0..2^64 - 1'),
    ('samples', r.samples, r.samples >= 1, 'at least 1'),
    (
      'top_logprobs', r.top_logprobs, 0 <= r.top_logprobs <= MAX_TOP_LOGPROBS,
      f'within 0..{MAX_TOP_LOGPROBS}',
    ),
  )  # fmt: skip
  for name, value, fits, expected in bounds:
    if not fits or not math.isfinite(value):
      raise RequestError(f'{name} must be {expected}, not {value}')
  if r.stop_strings and not has_tokenizer:
    raise RequestError('stop strings need an engine with a tokenizer; use stop_ids')
  if any(not s for s in r.stop_strings):
    raise RequestError('a stop string is empty; it would end every text before it begins')


@dataclasses.dataclass(frozen=True)
class Output:
  """A finished continuation; the lists have one entry for each generated token.

  Attributes:
    request_id: what `Engine.add` returned.
    sample: 0..samples - 1.
    ids: generated tokens, the one that ended generation included.
    logprobs: nats, of the distribution each was sampled from (filters and temperature applied).
    raw_logprobs: nats, of softmax(logits), as a trainer at temperature 1 computes them.
    versions: of the weights that computed each.
    text: of the ids, cut before a stop string; empty without a tokenizer.
    finish_reason: 'stop' (an id or string), 'length', 'cancelled', or 'error' (the model's logits
      were not finite).
    stop: the id or string that ended it, if one did.
    prompt_tokens: of the request.
    cached_tokens: of these, how many the prefix cache or another sample's prefill supplied.
    preemptions: how often it lost its pages and was computed anew.
  """

  request_id: int
  sample: int
  ids: list[int]
  logprobs: list[float]
  raw_logprobs: list[float]
  versions: list[int]
  text: str
  finish_reason: str
  stop: int | str | None
  prompt_tokens: int
  cached_tokens: int
  preemptions: int


@dataclasses.dataclass(frozen=True)
class Event:
  """One generated token, in order within its sample; `output` comes with the last one."""

  request_id: int
  sample: int
  token: int
  logprob: float
  raw_logprob: float
  version: int
  text: str  # What the token added to the text; may come later, while a character is incomplete.
  output: Output | None = None
  # (id, nats) of the request's top_logprobs most probable tokens by softmax(logits), best first.
  top_logprobs: tuple[tuple[int, float], ...] = ()

  @property
  def finished(self) -> bool:
    return self.output is not None
