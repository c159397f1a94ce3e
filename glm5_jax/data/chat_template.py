"""A user's own chat_template.jinja, for models whose conversations are not GLM's.

Templates come with checkpoints from strangers: they run in Jinja's immutable sandbox, which reaches no
attribute that leads out of it, and see the conversation and nothing else.
"""

import json
from collections.abc import Mapping, Sequence
from typing import Any

import jinja2
import jinja2.sandbox
import numpy as np

from glm5_jax.data.chat import ChatError, Encoded, Message
from glm5_jax.data.tokenizer import Tokenizer

# A template is small and its output as long as the conversation; a loop that runs away is a mistake.
_MAX_TEMPLATE = 1 << 20


class Template:
  """A compiled template.

  Args:
    source: its text.
    variables: what it reads besides messages, tools and add_generation_prompt.

  Raises:
    ChatError: it is no template.
  """

  def __init__(self, source: str, variables: Mapping[str, Any] | None = None):
    if len(source) > _MAX_TEMPLATE:
      raise ChatError(f'the chat template has {len(source)} characters; at most {_MAX_TEMPLATE}')
    environment = jinja2.sandbox.ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
    environment.filters['tojson'] = _to_json
    environment.globals['raise_exception'] = _raise
    self._variables = dict(variables or {})
    try:
      self._template = environment.from_string(source)
    except jinja2.TemplateError as e:
      raise ChatError(f'the chat template is broken: {e}') from None

  def render(
    self,
    messages: Sequence[Message],
    tools: Sequence[Mapping[str, Any]] | None = None,
    *,
    generation_prompt: bool = False,
  ) -> str:
    """The conversation as text.

    Raises:
      ChatError: the template refuses the conversation, or fails.
    """
    try:
      return self._template.render(
        messages=messages, tools=tools, add_generation_prompt=generation_prompt, **self._variables
      )
    except (jinja2.TemplateError, TypeError, ValueError, ArithmeticError, LookupError) as e:
      raise ChatError(f'the chat template failed: {e}') from None

  def encode(
    self,
    messages: Sequence[Message],
    tokenizer: Tokenizer,
    tools: Sequence[Mapping[str, Any]] | None = None,
  ) -> Encoded:
    """Tokens of a conversation, each with its author, found by rendering every prefix of it.

    What an assistant's message adds to its generation prompt is sampled. Names of special tokens in the
    text become these tokens, wherever they come from: a template has no way to say otherwise.

    Raises:
      ChatError: a message changes the text before it, so that nobody's tokens can be told apart.
    """
    done, pieces = '', []
    for i, message in enumerate(messages):
      assistant = message['role'] == 'assistant'
      if assistant:
        prompt = self.render(messages[:i], tools, generation_prompt=True)
        pieces.append((_added(done, prompt, i), False, i))
        done = prompt
      text = self.render(messages[: i + 1], tools)
      pieces.append((_added(done, text, i), assistant, i))
      done = text
    runs = tokenizer.encode_batch([text for text, _, _ in pieces], allow_special=True)
    count = [len(run) for run in runs]
    return Encoded(
      np.concatenate([np.zeros(0, np.int32), *runs]),
      np.repeat(np.array([s for _, s, _ in pieces], bool), count),
      np.repeat(np.array([i for _, _, i in pieces], np.int32), count),
    )


def _added(before: str, after: str, i: int) -> str:
  if not after.startswith(before):
    raise ChatError(
      f'message {i} changes how the chat template renders the messages before it; train on it with'
      ' whatever switch of the template keeps all turns as they were (GLM: clear_thinking=false)'
    )
  return after[len(before) :]


def _to_json(value: Any, **options: Any) -> str:
  return json.dumps(value, ensure_ascii=False, **options)


def _raise(message: str) -> None:
  raise jinja2.TemplateError(message)
