"""Needles: a line far back in a long row, and a question at the row's end that the line answers.

Two kinds. `secret`: an invented assignment, such as `SECRET_41 = 7316`, asked for by its left side.
`quote`: a line of the held-out files, asked for by its first half; closer to what a model of source
code meets. The row without the needle has its own text in the needle's place, so that all positions
are the same, and the gain is what the needle alone is worth.
"""

from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from glm5_jax.data import Tokenizer

LONGEST = 16  # Tokens of an answer.


class Needle(NamedTuple):
  """Token ids: the line is `question + answer + end`, the row ends in `question + answer`."""

  question: np.ndarray
  answer: np.ndarray
  end: np.ndarray


class Rows(NamedTuple):
  """Inputs and what to ask of them; each [B, ...] int32."""

  tokens: np.ndarray  # [B, T]: everything but the last token of the answer.
  targets: np.ndarray  # [B, LONGEST]: the next tokens of the last LONGEST positions.
  asked: np.ndarray  # [B, LONGEST] bool: which of them are the answer.


def secrets(tokenizer: Tokenizer, count: int, seed: int) -> list[Needle]:
  """Assignments of a random four-digit number to a name with a random two-digit one."""
  rng = np.random.default_rng(seed)
  out = []
  for _ in range(count):
    question = tokenizer.encode(f'\nSECRET_{rng.integers(10, 100)} = ')
    answer = tokenizer.encode(str(rng.integers(1000, 10000)))
    out.append(Needle(question, answer, tokenizer.encode('\n')))
  return out


def quotes(tokenizer: Tokenizer, texts: Sequence[bytes], count: int, seed: int) -> list[Needle]:
  """Lines of `texts` with 30 characters or more and 12 to 2 * LONGEST tokens, halved.

  Raises:
    ValueError: there are fewer such lines.
  """
  lines = sorted({line.strip() for text in texts for line in text.decode().split('\n')})
  lines = [line for line in lines if len(line) >= 30]
  order = np.random.default_rng(seed).permutation(len(lines))
  newline = tokenizer.encode('\n')
  out: list[Needle] = []
  for i in order:
    ids = tokenizer.encode(lines[i])
    if 12 <= len(ids) <= 2 * LONGEST:
      half = (len(ids) + 1) // 2
      out.append(Needle(np.concatenate([newline, ids[:half]]), ids[half:], newline))
      if len(out) == count:
        return out
  raise ValueError(f'the texts have {len(out)} lines that can be needles, not {count}')


def rows(needles: Sequence[Needle], filler: np.ndarray, distance: int | None) -> Rows:
  """A row for each needle.

  Args:
    needles: the B needles.
    filler: [B, T + 1] text around them.
    distance: slots from the answer's first token in the line to the same at the row's end; None
      leaves the needle out.

  Raises:
    ValueError: the needle does not fit at that distance.
  """
  tokens, targets, asked = [], [], []
  for needle, text in zip(needles, filler, strict=True):
    row = text.copy()
    end = np.concatenate([needle.question, needle.answer])
    row[-len(end) :] = end
    if distance is not None:
      line = np.concatenate([end, needle.end])
      start = len(row) - len(needle.answer) - distance - len(needle.question)
      if start < 0 or distance < len(line):
        raise ValueError(
          f'a needle of {len(line)} tokens does not fit {distance} tokens back in a row of'
          f' {len(row)}'
        )
      row[start : start + len(line)] = line
    tokens.append(row[:-1])
    targets.append(row[-LONGEST:])
    asked.append(np.arange(LONGEST) >= LONGEST - len(needle.answer))
  return Rows(np.stack(tokens), np.stack(targets), np.stack(asked))


def answers(
  head: jax.Array, hidden: jax.Array, targets: jax.typing.ArrayLike, asked: jax.typing.ArrayLike
) -> dict[str, Any]:
  """How well the answers are predicted, each from everything before it.

  Args:
    head: [D, V].
    hidden: [B, T, D] of `Rows.tokens`.
    targets, asked: of `Rows`.

  Returns:
    nll [B] nats per token of the answer; exact [B] bool: every token of it is the most probable
    one, which is to say that greedy decoding gives the answer.
  """
  targets, asked = jnp.asarray(targets), jnp.asarray(asked)
  last = hidden[:, -LONGEST:].astype(jnp.float32)
  logp = jax.nn.log_softmax(jnp.einsum('BTD,DV->BTV', last, head.astype(jnp.float32)))
  chosen = jnp.take_along_axis(logp, targets[:, :, None], axis=-1)[..., 0]
  nll = -jnp.sum(chosen * asked, axis=1) / jnp.sum(asked, axis=1)
  right = (jnp.argmax(logp, axis=-1) == targets) | ~asked
  return {'nll': nll, 'exact': jnp.all(right, axis=1)}
