"""Sums over batches become means, and bits per byte count every byte once."""

import math

import jax.numpy as jnp
import numpy as np
import pytest

from glm5_jax.data import EvalSet
from glm5_jax.train.evaluate import evaluate


def _eval_step(params, batch):
  """A model that is uniform over 256 tokens and right on every fourth."""
  tokens = jnp.sum(batch['weights'])
  return {
    'nll': tokens * math.log(256), 'correct': tokens / 4, 'tokens': tokens, 'valid': tokens + 1,
    'mtp_nll': tokens * jnp.array([1.0, 2.0]), 'mtp_tokens': tokens * jnp.array([1.0, 0.5]),
    'recall': (tokens + 1) * jnp.array([0.25, 0.75]),
  }  # fmt: skip


def _held_out():
  batches = [{'weights': np.ones((2, n), np.float32)} for n in (3, 5, 7)]
  return EvalSet(batches, num_bytes=90, num_targets=30, num_documents=1)


def test_all_of_it():
  result = evaluate(_eval_step, None, _held_out())
  assert result.tokens == 30
  assert result.loss == pytest.approx(math.log(256))
  assert result.bits_per_byte == pytest.approx(8 * 30 / 90)
  assert result.accuracy == 0.25
  assert result.mtp_loss == (1.0, 4.0)
  assert result.recall == pytest.approx((0.25, 0.75))
  row = result.row()
  assert row['eval/indexer_recall'] == pytest.approx(0.5)
  assert row['eval/mtp_loss_2'] == 4.0


def test_a_part_counts_its_share_of_the_bytes():
  held_out = _held_out()
  part = evaluate(_eval_step, None, held_out, held_out.batches[:1])
  assert part.tokens == 6
  assert part.bits_per_byte == pytest.approx(8 * 30 / 90)


def test_a_model_without_mtp_and_indexer():
  def bare(params, batch):
    sums = _eval_step(params, batch)
    return {k: sums[k] for k in ('nll', 'correct', 'tokens', 'valid')}

  result = evaluate(bare, None, _held_out())
  assert result.mtp_loss == () and result.recall == ()
  assert set(result.row()) == {'eval/loss', 'eval/accuracy', 'eval/bits_per_byte'}
