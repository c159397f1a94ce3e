"""Which responses are learnt from. A group is the responses to one prompt.

Section 4.1.2: a response begun more than tau weight versions ago is dropped; one that failed because
its environment broke is excluded, and its group repaired by repeating valid responses, or dropped.
A group whose rewards are all equal has no gradient: it is dropped too, and more prompts are sampled in
its place ("dynamic sampling", arXiv 2503.14476, section 3.2).
"""

import itertools
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import NamedTuple, Protocol, TypeVar


class Response(Protocol):
  """What the filters read of a response."""

  @property
  def reward(self) -> float:
    """The outcome."""
    ...

  @property
  def versions(self) -> Sequence[int]:
    """The weight versions that generated it, ascending; none if it has no token."""
    ...

  @property
  def failure(self) -> str | None:
    """Why its environment failed, or None."""
    ...


R = TypeVar('R', bound=Response)


class Verdict(NamedTuple):
  """A group after a filter: the responses to learn from, or why there are none."""

  group: list
  reason: str = ''  # Empty if the group is kept.


def is_stale(response: Response, current: int, max_lag: int) -> bool:
  """Section 4.1.2: w' - w_0 > tau, with w' the trainer's version and w_0 the response's oldest.

  A response without a token, whose environment never started, has no version and is not stale.
  """
  return current - min(response.versions, default=current) > max_lag


def repair(
  group: Sequence[R], size: int, why: Callable[[R], str | None] = lambda r: r.failure
) -> Verdict:
  """Section 4.1.2: without the invalid; if more than half are left, filled up by repeating these.

  Args:
    group: the responses, invalid ones among them.
    size: G, how many there should be.
    why: why a response is invalid, or None.
  """
  reasons = [why(r) for r in group]
  valid = [r for r, reason in zip(group, reasons, strict=True) if reason is None]
  if 2 * len(valid) <= size:
    counts = Counter(reason for reason in reasons if reason is not None)
    listed = ', '.join(f'{count} {reason}' for reason, count in counts.most_common())
    return Verdict([], f'{len(valid)} of {size} responses are valid ({listed or "too few came"})')
  return Verdict(list(itertools.islice(itertools.cycle(valid), max(size, len(valid)))))


def has_signal(group: Sequence[Response], tolerance: float = 1e-9) -> bool:
  """Whether rewards differ, so that some advantage is not zero."""
  rewards = [r.reward for r in group]
  return max(rewards) - min(rewards) > tolerance


class Filter(NamedTuple):
  """All filters in their order, for groups of `size`.

  Attributes:
    size: G.
    max_lag: tau, weight versions; None keeps responses of any age.
    drop_equal: whether groups without signal go.
  """

  size: int
  max_lag: int | None = None
  drop_equal: bool = True

  def __call__(self, group: Sequence[R], current: int) -> Verdict:
    """The group to learn from at weight version `current`, or why it is dropped."""

    def why(response: R) -> str | None:
      if self.max_lag is not None and is_stale(response, current, self.max_lag):
        return 'stale'
      return response.failure

    verdict = repair(group, self.size, why)
    if not verdict.reason and self.drop_equal and not has_signal(verdict.group):
      return Verdict([], 'all rewards are equal')
    return verdict


def dynamic_sampling(
  groups: Iterable[Sequence[R]], keep: Callable[[Sequence[R]], Verdict], count: int
) -> Iterator[Verdict]:
  """Takes groups until `count` were kept; yields every verdict, so that nothing vanishes uncounted.

  Raises:
    RuntimeError: `groups` ends first.
  """
  kept = seen = 0
  for group in groups:
    verdict = keep(group)
    seen += 1
    kept += not verdict.reason
    yield verdict
    if kept == count:
      return
  raise RuntimeError(
    f'only {kept} of {seen} groups passed the filters and {count} are needed: sample more prompts,'
    ' or prompts that are neither too easy nor too hard for the policy'
  )
