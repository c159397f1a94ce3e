"""Each filter and penalty against float64 numpy; what is drawn against the distribution it is drawn from."""

import numpy as np
import pytest
import scipy.stats

from glm5_jax.infer import sampling
from tests import tiny

OFF = {
  'temperature': 1.0, 'top_k': 0, 'top_p': 1.0, 'min_p': 0.0, 'repetition': 1.0, 'presence': 0.0,
  'seed': 0, 'sample': 0, 'position': 0,
}  # fmt: skip
ROWS, VOCAB = 16, 40

log_distribution = tiny.fast_jit(sampling.log_distribution)
sample = tiny.fast_jit(sampling.sample)


def settings(rows: int, **changes) -> sampling.Settings:
  """Equal settings but where a change is a list of one value a row."""

  def row(i):
    return tuple(
      changes.get(k, v)[i] if isinstance(changes.get(k), list) else changes.get(k, v)
      for k, v in OFF.items()
    )

  return sampling.stack([row(i) for i in range(rows)], rows)


def oracle(logits, seen, s) -> np.ndarray:
  """[V] probabilities of one row, literally: sort, cut, renormalise, one filter after the other."""
  logits = logits.astype(np.float64).copy()
  for token in range(len(logits)):
    if seen[token] & sampling.IN_CONTEXT:
      logits[token] *= 1 / s['repetition'] if logits[token] > 0 else s['repetition']
    if seen[token] & sampling.GENERATED:
      logits[token] -= s['presence']
  if s['temperature'] == 0:
    return np.eye(len(logits))[np.argmax(logits)]
  p = np.exp((logits - logits.max()) / s['temperature'])
  p /= p.sum()
  order = np.lexsort((np.arange(len(p)), -p))
  if s['top_k']:
    p[order[s['top_k'] :]] = 0
    p /= p.sum()
  if s['top_p'] < 1:
    total = 0.0
    for token in order:
      if total >= s['top_p']:
        p[token] = 0
      total += p[token]
    p /= p.sum()
  p[p < s['min_p'] * p.max()] = 0
  return p / p.sum()


CASES = {
  'plain': {},
  'cold': {'temperature': 0.3},
  'hot': {'temperature': 2.5},
  'greedy': {'temperature': 0.0},
  'greedy ignores filters': {'temperature': 0.0, 'top_k': 3, 'top_p': 0.5},
  'top-k': {'top_k': 5},
  'top-1': {'top_k': 1},
  'top-k beyond the vocabulary': {'top_k': 1000},
  'top-p': {'top_p': 0.7},
  'tiny top-p': {'top_p': 1e-6},
  'min-p': {'min_p': 0.2},
  'all filters': {'temperature': 1.4, 'top_k': 12, 'top_p': 0.8, 'min_p': 0.05},
  'repetition': {'repetition': 1.7},
  'presence': {'presence': 1.5},
  'negative presence': {'presence': -0.5},
  'everything': {
    'temperature': 0.8, 'top_k': 20, 'top_p': 0.9, 'min_p': 0.02, 'repetition': 1.2, 'presence': 0.4
  },
}  # fmt: skip


def random_logits(seed: int, rows: int = ROWS) -> tuple[np.ndarray, np.ndarray]:
  rng = np.random.default_rng(seed)
  logits = (2 * rng.standard_normal((rows, VOCAB))).astype(np.float32)
  seen = rng.choice([0, 1, 3], (rows, VOCAB), p=[0.6, 0.2, 0.2]).astype(np.uint8)
  return logits, seen


@pytest.mark.parametrize('name', CASES)
def test_distribution(name):
  logits, seen = random_logits(len(name))
  got = np.exp(log_distribution(logits, settings(ROWS, **CASES[name]), seen))
  want = [oracle(x, s, OFF | CASES[name]) for x, s in zip(logits, seen, strict=True)]
  np.testing.assert_array_equal(got > 0, np.array(want) > 0)
  tiny.close(name, got, want, 2e-6)


def test_rows_keep_their_own_settings():
  """Every case in one batch; without penalties, the same with and without `seen`."""
  names = list(CASES)
  logits, seen = random_logits(3, len(names))
  columns = {k: [(OFF | CASES[n])[k] for n in names] for k in OFF}
  got = np.exp(log_distribution(logits, settings(len(names), **columns), seen))
  want = [oracle(x, s, OFF | CASES[n]) for x, s, n in zip(logits, seen, names, strict=True)]
  tiny.close('mixed rows', got, want, 2e-6)
  columns |= {'repetition': 1.0, 'presence': 0.0}
  rows = settings(len(names), **columns)
  np.testing.assert_array_equal(
    log_distribution(logits, rows, None), log_distribution(logits, rows, seen)
  )


def test_ties_go_to_the_lower_id():
  logits = np.zeros((1, VOCAB), np.float32)
  for changes in ({'top_k': 7}, {'top_p': 7 / VOCAB - 1e-3}):
    got = np.exp(log_distribution(logits, settings(1, **changes), None))[0]
    np.testing.assert_allclose(got, np.where(np.arange(VOCAB) < 7, 1 / 7, 0), rtol=1e-6)


@pytest.mark.parametrize('name', ['plain', 'all filters'])
def test_draws_follow_the_distribution(name):
  """Chi-square over the positions of one request, and the same over seeds."""
  draws = 8000
  logits = np.random.default_rng(0).standard_normal(VOCAB).astype(np.float32)
  many = np.broadcast_to(logits, (draws, VOCAB))
  want = oracle(logits, np.zeros(VOCAB, np.uint8), OFF | CASES[name])
  for varied in ('position', 'seed'):
    rows = settings(draws, **CASES[name] | {varied: list(range(draws))})
    drawn = sample(many, rows)
    count = np.bincount(drawn.token, minlength=VOCAB)
    possible = want > 0
    assert not count[~possible].any()
    p_value = scipy.stats.chisquare(count[possible], draws * want[possible]).pvalue
    print(f'chi-square, {name}, by {varied}: p = {p_value:.3f}')
    assert p_value > 1e-3
    tiny.close('log-prob', drawn.logprob, np.log(want[drawn.token]), 1e-5)
    raw = oracle(logits, np.zeros(VOCAB, np.uint8), OFF)
    tiny.close('raw log-prob', drawn.raw_logprob, np.log(raw[drawn.token]), 1e-5)


def test_noise_depends_on_seed_sample_and_position_only():
  logits, _ = random_logits(5)
  same = np.broadcast_to(logits[0], logits.shape)
  base = settings(ROWS, seed=12, position=7)
  first = np.asarray(sample(same, base).token)
  assert len(set(first.tolist())) == 1
  mixed = logits.copy()
  mixed[9] = logits[0]
  assert sample(mixed, base).token[9] == first[0]
  for varied in ('seed', 'sample', 'position'):
    rows = settings(ROWS, **{'seed': 12, 'position': 7} | {varied: list(range(ROWS))})
    assert len(set(np.asarray(sample(same, rows).token).tolist())) > 4, varied


def test_all_64_bits_of_the_seed_count():
  keys = np.asarray(settings(3, seed=[1, 1 + (1 << 32), (1 << 64) - 1]).seed)
  np.testing.assert_array_equal(keys, [[0, 1], [1, 1], [0xFFFFFFFF] * 2])
