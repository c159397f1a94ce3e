"""Which sequence runs when, and on which pages: host-side state only, no arrays of the device.

First come, first served. A sequence is admitted when the pages for all its known tokens are there; while
it decodes it takes one page at a time. When none is left, cached prefixes go first, then the sequence
that came last gives its pages back and will be computed anew: the first one always proceeds, so all do.
"""

import bisect
import collections
import dataclasses

import numpy as np

from glm5_jax.infer import sampling
from glm5_jax.infer.cache import PageAllocator, pages_for
from glm5_jax.infer.prefix import PrefixCache
from glm5_jax.infer.request import Output, Request
from glm5_jax.infer.text import TextStream


@dataclasses.dataclass(eq=False)
class Sequence:
  """One continuation on its way. `tokens` are those of the prompt, then the generated ones."""

  request_id: int
  sample: int
  request: Request
  tokens: list[int]
  stop_ids: frozenset[int]
  max_length: int
  stream: TextStream | None
  unborn: range = range(0)  # Further samples, which wait for this one's prefill.
  computed: int = 0  # Tokens whose rows are in the cache.
  pages: list[int] = dataclasses.field(default_factory=list)
  version: int | None = None  # Of the weights that computed all its rows; None if several did.
  carry: np.ndarray | None = None  # [D] hidden state of the last computed token, to draft from.
  seen: np.ndarray | None = None  # [V] uint8, see sampling.penalised.
  logprobs: list[float] = dataclasses.field(default_factory=list)
  raw_logprobs: list[float] = dataclasses.field(default_factory=list)
  versions: list[int] = dataclasses.field(default_factory=list)
  cached_tokens: int | None = None
  preemptions: int = 0

  @property
  def order(self) -> tuple[int, int]:
    return self.request_id, self.sample

  @property
  def prompt_tokens(self) -> int:
    return len(self.request.prompt_ids)

  @property
  def pending(self) -> int:
    """Tokens to compute before the next one can be drawn."""
    return len(self.tokens) - self.computed

  def settings(self) -> tuple:
    return self.request.settings(self.sample, len(self.tokens))

  def append(self, token: int, logprob: float, raw_logprob: float, version: int) -> None:
    self.tokens.append(token)
    self.logprobs.append(logprob)
    self.raw_logprobs.append(raw_logprob)
    self.versions.append(version)
    if self.seen is not None:
      self.seen[token] |= sampling.IN_CONTEXT | sampling.GENERATED

  def output(self, finish_reason: str, stop: int | str | None = None) -> Output:
    return Output(
      self.request_id, self.sample, self.tokens[self.prompt_tokens :], self.logprobs,
      self.raw_logprobs, self.versions, self.stream.text if self.stream else '', finish_reason,
      stop, self.prompt_tokens, self.cached_tokens or 0, self.preemptions,
    )  # fmt: skip


class Scheduler:
  """Queues and pages. Every sequence is in exactly one of `waiting`, `prefilling`, `decoding`.

  Attributes:
    waiting: without pages, in the order of arrival.
    prefilling: with pages for all their tokens, of which some are to be computed.
    decoding: one token to compute each.
    preemptions: how often a sequence lost its pages.
    saved_tokens: tokens that sequences began with and nobody computed for them.
  """

  def __init__(self, pages: int, page_size: int, max_sequences: int, prefix_cache: bool):
    self.allocator = PageAllocator(pages)
    self.prefix = PrefixCache(self.allocator, page_size) if prefix_cache else None
    self._page_size = page_size
    self._max_sequences = max_sequences
    self.waiting: collections.deque[Sequence] = collections.deque()
    self.prefilling: list[Sequence] = []
    self.decoding: list[Sequence] = []
    self.preemptions = 0
    self.saved_tokens = 0

  @property
  def running(self) -> int:
    return len(self.prefilling) + len(self.decoding)

  @property
  def begun(self) -> bool:
    """Whether any sequence runs, or has tokens and waits to run on."""
    return self.running > 0 or any(s.versions for s in self.waiting)

  @property
  def idle(self) -> bool:
    return not (self.waiting or self.prefilling or self.decoding)

  def wait(self, sequence: Sequence) -> None:
    """Queues a sequence without pages at its place in the order of arrival."""
    if not self.waiting or self.waiting[-1].order < sequence.order:
      self.waiting.append(sequence)
    else:
      self.waiting.insert(bisect.bisect(self.waiting, sequence.order, key=_order), sequence)

  def admit(self, version: int, begun_only: bool = False) -> bool:
    """Starts the first waiting sequence, or the first that has tokens, if there is room for it."""
    sequence = next((s for s in self.waiting if s.versions or not begun_only), None)
    if sequence is None or self.running >= self._max_sequences:
      return False
    shared = self.prefix.match(version, sequence.tokens) if self.prefix else []
    # One token more, so that it can go on decoding at once.
    missing = pages_for(len(sequence.tokens) + 1, self._page_size) - len(shared)
    # Those that decode will need a page soon; without the reserve they would preempt it right away.
    own = self._allocate(missing, reserve=len(self.decoding))
    if own is None:
      self._release(shared)
      return False
    self.waiting.remove(sequence)
    self.saved_tokens += len(shared) * self._page_size
    sequence.pages = shared + own
    sequence.computed = len(shared) * self._page_size
    sequence.version = version
    if sequence.cached_tokens is None:
      sequence.cached_tokens = sequence.computed
    self.prefilling.append(sequence)
    return True

  def prefilled(self, sequence: Sequence) -> None:
    """Moves a sequence whose tokens are all computed on to decoding, and makes its prompt known."""
    self.prefilling.remove(sequence)
    self.decoding.append(sequence)
    self._remember(sequence)

  def fork(self, parent: Sequence, child: Sequence) -> tuple[int, int] | None:
    """Starts `child` on the computed tokens of `parent`; full pages are shared.

    Returns:
      (source, target) of the one page to be copied on the device (both 0 if there is none), or None if
      there is no place or memory.
    """
    if self.running >= self._max_sequences:
      return None
    full = parent.computed // self._page_size
    own = self._allocate(pages_for(len(parent.tokens) + 1, self._page_size) - full)
    if own is None:
      return None
    shared = parent.pages[:full]
    for page in shared:
      self.allocator.retain(page)
    child.pages = shared + own
    child.computed, child.version = parent.computed, parent.version
    child.cached_tokens, child.carry = parent.computed, parent.carry
    self.saved_tokens += parent.computed
    self.decoding.append(child)
    partial = parent.computed % self._page_size
    return (parent.pages[full], own[0]) if partial else (0, 0)

  def make_room(self, ahead: int = 1) -> None:
    """Sees to it that every decoding sequence has pages for `ahead` more tokens.

    Preempts the latest sequences where there are not enough pages.
    """
    for sequence in sorted(self.decoding, key=_order):
      while sequence.pages:
        wanted = min(sequence.computed + ahead, sequence.max_length)
        missing = pages_for(wanted, self._page_size) - len(sequence.pages)
        own = self._allocate(missing) if missing > 0 else []
        if own is not None:
          sequence.pages += own
          break
        self.preempt(max([*self.prefilling, *self.decoding], key=_order))

  def preempt(self, sequence: Sequence) -> None:
    """Takes a sequence's pages; it waits and is computed anew, to the same tokens."""
    self.finish(sequence)
    sequence.preemptions += 1
    self.preemptions += 1
    sequence.computed, sequence.carry = 0, None
    self.wait(sequence)

  def finish(self, sequence: Sequence) -> None:
    """Takes a sequence out of its queue and frees its pages at once."""
    for queue in (self.waiting, self.prefilling, self.decoding):
      if sequence in queue:
        queue.remove(sequence)
    self._remember(sequence)
    self._release(sequence.pages)
    sequence.pages = []

  def sequences(self) -> list[Sequence]:
    return [*self.waiting, *self.prefilling, *self.decoding]

  def _remember(self, sequence: Sequence) -> None:
    if self.prefix is not None and sequence.version is not None and sequence.pages:
      self.prefix.insert(sequence.version, sequence.tokens[: sequence.computed], sequence.pages)

  def _allocate(self, count: int, reserve: int = 0) -> list[int] | None:
    """`count` pages if as many as `reserve` remain; cached prefixes are given up for them."""
    missing = count + reserve - self.allocator.free
    if missing > 0 and self.prefix is not None:
      missing -= self.prefix.evict(missing)
    return self.allocator.allocate(count) if missing <= 0 else None

  def _release(self, pages: list[int]) -> None:
    for page in pages:
      self.allocator.release(page)


def _order(sequence: Sequence) -> tuple[int, int]:
  return sequence.order
