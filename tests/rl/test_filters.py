"""Which responses and groups are learnt from: borders, order, reasons, counts."""

import dataclasses
import itertools

import hypothesis
import pytest
from hypothesis import strategies as st

from glm5_jax.rl import filters


@dataclasses.dataclass(frozen=True)
class Response:
  name: str = ''
  reward: float = 0.0
  versions: tuple[int, ...] = (0,)
  failure: str | None = None


def _group(*failures, **kwargs):
  """One response for each failure, named a, b, c, ..., with rewards 0, 1, 0, 1, ..."""
  return [
    Response(chr(ord('a') + i), float(i % 2), failure=failure, **kwargs)
    for i, failure in enumerate(failures)
  ]


def _names(verdict):
  return ''.join(r.name for r in verdict.group)


@pytest.mark.parametrize(
  'versions, current, max_lag, stale',
  [
    ((5,), 7, 2, False),  # Exactly tau.
    ((4,), 7, 2, True),
    ((4, 5, 6, 7), 7, 2, True),  # The oldest counts, however new the rest.
    ((5, 6, 7), 7, 2, False),
    ((7,), 7, 0, False),
    ((6, 7), 7, 0, True),
  ],
)
def test_staleness(versions, current, max_lag, stale):
  """w' - w_0 > tau."""
  assert filters.is_stale(Response(versions=versions), current, max_lag) is stale


def test_repair_needs_more_than_half():
  dead, fine = 'out of memory', None
  half = filters.repair(_group(fine, dead, fine, dead), 4)
  assert half.group == []
  assert half.reason == '2 of 4 responses are valid (2 out of memory)'
  above = filters.repair(_group(fine, dead, fine, fine), 4)
  assert above.reason == '' and _names(above) == 'acda'


@pytest.mark.parametrize(
  'failures, names', [('....', 'abcd'), ('x...', 'bcdb'), ('...x.', 'abcea'), ('x.x..', 'bdebd')]
)
def test_repair_repeats_the_valid_in_order(failures, names):
  group = _group(*(None if f == '.' else 'broke' for f in failures))
  assert _names(filters.repair(group, len(group))) == names


def test_odd_groups():
  """More than half of 5 is 3, not 2."""
  fine = _group(None, None, None)
  assert _names(filters.repair(fine, 5)) == 'abcab'
  verdict = filters.repair(fine[:2], 5)
  assert verdict.reason == '2 of 5 responses are valid (too few came)'


def test_all_reasons_are_counted():
  group = _group('timeout', 'image gone', 'timeout', None)
  assert filters.repair(group, 4).reason == '1 of 4 responses are valid (2 timeout, 1 image gone)'


@hypothesis.settings(max_examples=200, deadline=None, derandomize=True)
@hypothesis.given(st.lists(st.booleans(), min_size=1, max_size=20))
def test_repair_of_any_group(valid):
  group = _group(*(None if v else 'broke' for v in valid))
  verdict = filters.repair(group, len(group))
  if sum(valid) <= len(group) / 2:
    assert verdict.group == [] and verdict.reason
    return
  assert len(verdict.group) == len(group) and not verdict.reason
  own = [r for r in group if r.failure is None]
  assert verdict.group[: len(own)] == own
  counts = [verdict.group.count(r) for r in own]
  assert max(counts) - min(counts) <= 1 and set(verdict.group) == set(own)


@pytest.mark.parametrize(
  'rewards, signal', [((1, 1, 1), False), ((0,), False), ((0, 0, 1), True), ((0.1, 0.1), False)]
)
def test_signal(rewards, signal):
  assert filters.has_signal([Response(reward=float(r)) for r in rewards]) is signal


def test_equal_rewards_go_unless_wanted():
  group = [Response(reward=1.0)] * 4
  assert filters.Filter(4)(group, 0) == filters.Verdict([], 'all rewards are equal')
  assert filters.Filter(4, drop_equal=False)(group, 0).group == group


def test_rewards_are_compared_after_the_repair():
  """The only different reward is that of a response whose environment broke."""
  group = [Response(reward=1.0)] * 3 + [Response(reward=0.0, failure='broke')]
  assert filters.Filter(4)(group, 0).reason == 'all rewards are equal'


def test_stale_and_broken_together():
  group = [
    Response('a', 0.0, (9, 10)),
    Response('b', 1.0, (7, 10)),  # Three behind.
    Response('c', 1.0, (8,)),
    Response('d', 1.0, (10,)),
    Response('e', 1.0, (10,), 'broke'),
  ]
  assert _names(filters.Filter(5, max_lag=2)(group, 10)) == 'acdac'
  verdict = filters.Filter(5, max_lag=1)(group, 10)
  assert verdict.reason == '2 of 5 responses are valid (2 stale, 1 broke)'
  assert _names(filters.Filter(5)(group, 10)) == 'abcda'  # No bound: b is fine.


def test_an_environment_that_broke_before_the_first_token():
  """Such a response has no weight version at all."""
  group = [*_group(None, None, None), Response(versions=(), failure='no container')]
  assert _names(filters.Filter(4, max_lag=2)(group, 1)) == 'abca'
  reason = filters.Filter(4, max_lag=2)([*group[2:], *group[3:], *group[3:]], 1).reason
  assert reason == '1 of 4 responses are valid (3 no container)'


def test_dynamic_sampling_takes_no_more_than_it_needs():
  good, flat = _group(None, None), [Response(reward=1.0)] * 2
  stream = iter([flat, good, flat, flat, good, good])
  verdicts = list(filters.dynamic_sampling(stream, lambda g: filters.Filter(2)(g, 0), 2))
  assert [bool(v.group) for v in verdicts] == [False, True, False, False, True]
  assert list(stream) == [good], 'a group was taken and lost'


def test_dynamic_sampling_is_lazy():
  """Verdicts come as groups do, from a source without an end."""
  good = _group(None, None)
  verdicts = filters.dynamic_sampling(itertools.repeat(good), lambda g: filters.Verdict(list(g)), 3)
  assert [v.group for v in verdicts] == [good] * 3


def test_dynamic_sampling_says_when_prompts_run_out():
  flat = [Response(reward=1.0)] * 2
  stream = [flat, _group(None, None), flat]
  verdicts = filters.dynamic_sampling(stream, lambda g: filters.Filter(2)(g, 0), 2)
  seen = []
  with pytest.raises(RuntimeError, match='only 1 of 3 groups .* 2 are needed: sample more prompts'):
    seen.extend(verdicts)
  with pytest.raises(RuntimeError, match='only 0 of 0'):
    list(filters.dynamic_sampling([], lambda g: filters.Verdict(g), 1))
