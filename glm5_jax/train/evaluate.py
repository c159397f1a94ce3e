"""Evaluation on held-out documents: loss, accuracy, bits per byte, and the indexer's recall."""

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from glm5_jax.data import EvalSet

EvalStep = Callable[[Any, Mapping[str, Any]], Mapping[str, jax.Array]]


class Evaluation(NamedTuple):
  """Means over the held-out tokens.

  Attributes:
    loss: Nats per token.
    accuracy: Share of tokens whose target has the highest logit.
    bits_per_byte: Of the text in UTF-8, the end of each document included.
    mtp_loss: Nats per token of each MTP step, for the 2nd, 3rd, ... token ahead.
    recall: Per indexer, in layer order, MTP steps last: the share of the attention mass over all
      visible keys that its selection holds.
    tokens: How many tokens this is about.
  """

  loss: float
  accuracy: float
  bits_per_byte: float
  mtp_loss: tuple[float, ...]
  recall: tuple[float, ...]
  tokens: int

  def row(self) -> dict[str, Any]:
    """What goes into metrics.jsonl."""
    row: dict[str, Any] = {
      'eval/loss': self.loss,
      'eval/accuracy': self.accuracy,
      'eval/bits_per_byte': self.bits_per_byte,
    }
    row |= {f'eval/mtp_loss_{k}': x for k, x in enumerate(self.mtp_loss, 1)}
    if self.recall:
      row['eval/indexer_recall'] = float(np.mean(self.recall))
      row |= {f'eval/indexer_recall_{i}': x for i, x in enumerate(self.recall)}
    return row


def evaluate(
  eval_step: EvalStep,
  params: Any,
  held_out: EvalSet,
  batches: Sequence[Mapping[str, Any]] | None = None,
) -> Evaluation:
  """Runs `eval_step` (train/step.py) over `batches`, by default all of `held_out`.

  Bits per byte of a part count the part's share of the bytes by its share of the tokens.
  """
  total: dict[str, Any] = {}
  for batch in held_out.batches if batches is None else batches:
    sums = eval_step(params, batch)
    total = jax.tree.map(lambda a, b: a + b, total, dict(sums)) if total else dict(sums)
  # Sums stay on the device until here: the host does not wait for each batch.
  total = jax.device_get(total)
  tokens = float(total['tokens'])
  num_bytes = held_out.num_bytes * tokens / held_out.num_targets
  mtp = total.get('mtp_nll', np.zeros(0)) / np.maximum(total.get('mtp_tokens', np.zeros(0)), 1)
  recall = total.get('recall', np.zeros(0)) / max(float(total['valid']), 1)
  return Evaluation(
    loss=float(total['nll']) / tokens,
    accuracy=float(total['correct']) / tokens,
    bits_per_byte=float(total['nll']) / math.log(2) / num_bytes,
    mtp_loss=tuple(mtp.tolist()),
    recall=tuple(recall.tolist()),
    tokens=round(tokens),
  )
