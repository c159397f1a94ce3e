"""The inference engine: continuous batching over the paged latent cache.

A step decodes one token of every running sequence, then spends what is left of its token budget on
prefill, in chunks. The core is synchronous: `add` requests, `step` until their events say finished.

  engine = Engine(params, config, tokenizer)
  engine.warm_up()
  [[output]] = engine.run([Request(prompt_ids, max_tokens=64, temperature=1.0, seed=7)])
  output.ids, output.logprobs, output.versions
"""

import collections
import dataclasses
import hashlib
import math
from collections.abc import Iterable, Mapping
from collections.abc import Sequence as SequenceOf
from typing import Any, Literal

import jax
import numpy as np
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

from glm5_jax import sharding
from glm5_jax.config import ModelConfig
from glm5_jax.digest import describe, kind, named_leaves
from glm5_jax.infer import sampling, speculative
from glm5_jax.infer.cache import init_pool, pages_for
from glm5_jax.infer.programs import EngineConfig, bucket, by_layer, make_mesh, programs
from glm5_jax.infer.request import (
  EngineFullError,
  Event,
  Output,
  Request,
  WeightsError,
  check,
)
from glm5_jax.infer.scheduler import Scheduler, Sequence
from glm5_jax.infer.text import TextStream, Tokenizer

UpdateMode = Literal['continue', 'recompute', 'drain']


def weights_checksum(params: Any) -> str:
  """16 hex digits that change with any name, shape, type or bit of the weights."""
  lines = [f'{name} {what}' for name, what in sorted(describe(params).items())]
  return hashlib.sha256('\n'.join(lines).encode()).hexdigest()[:16]


def _kinds(params: Any) -> dict[str, str]:
  return {name: kind(leaf) for name, leaf in named_leaves(params).items()}


class Engine:
  """See the module. Not thread-safe: one thread calls its methods.

  Attributes:
    config: the model's, with `sparse_attention=False` to attend to every key.
    sizes: the engine's, resolved.
    version: of the weights.
    checksum: of the weights, as `weights_checksum` gives.
  """

  def __init__(
    self,
    params: Any,
    config: ModelConfig,
    tokenizer: Tokenizer | None = None,
    engine_config: EngineConfig = EngineConfig(),
    *,
    version: int = 0,
    keep: bool = False,
  ):
    """Compiles nothing yet.

    Args:
      params: as `init_params` makes them or `load_hf` loads them.
      config, tokenizer: the model's; without a tokenizer there are no texts and no stop strings.
      engine_config: sizes.
      version: of the weights.
      keep: whether the engine may keep `params` themselves, which nobody else then changes; otherwise
        it keeps a copy.

    Raises:
      ValueError: for sizes that do not fit together, the model or this machine.
    """
    self.config = config
    self.sizes = engine_config.resolve(config)
    self._tokenizer = tokenizer
    self._mesh = make_mesh(self.sizes.tensor)
    leaf = jax.tree.leaves(params)[0]
    self._device: Any = jax.devices()[0]
    if self._mesh is not None:
      self._device = NamedSharding(self._mesh, P())
    elif isinstance(leaf, jax.Array):
      self._device = next(iter(leaf.devices()))
    self._kinds = _kinds(params)
    self._params, self.checksum = self._receive(params, keep)
    self.version = version
    self._update: tuple[Any, int, str] | None = None  # Waits for the running ones to finish.
    self._refusal: str | None = None
    drafts = self.sizes.draft_steps
    pool = init_pool(
      self.config, self.sizes.pages, self.sizes.page_size, int(drafts > 0), self.sizes.kernels
    )
    self._latent, self._index_k = jax.device_put((pool.latent, pool.index_k), self._device)
    self._programs = programs(
      self.config, drafts, self.sizes.compiler_options, self.sizes.kernels, self._mesh
    )
    self._scheduler = Scheduler(
      self.sizes.pages, self.sizes.page_size, self.sizes.max_sequences, self.sizes.prefix_cache
    )
    self._next_id = 0
    self._counts: collections.Counter[str] = collections.Counter()

  def warm_up(self) -> None:
    """Compiles every program in every shape that can occur. Takes effect on no request."""
    sizes = self.sizes
    shapes = {(1, t) for t in sizes.prefill_buckets}
    if not sizes.draft_steps:
      shapes |= {(b, 1) for b in sizes.batch_buckets}
    for rows, time in sorted(shapes):
      for pages in sizes.page_buckets:
        if pages * sizes.page_size >= time:
          logits = self._forward([], rows, time, pages)
      for penalty in (False, True):
        self._sample(logits, [], penalty)
      self._programs.top_logprobs(logits)
    if sizes.draft_steps:
      for rows in sizes.batch_buckets:
        for pages in sizes.page_buckets:
          for penalty in (False, True):
            self._speculate([], rows, pages, penalty)
    self._copy_page(0, 0)

  def add(self, request: Request) -> int:
    """Queues a request and returns its id.

    Raises:
      RequestError: it can never be served.
      EngineFullError: too many wait.
      WeightsError: the weights are not those that the last update announced.
    """
    if self._refusal is not None:
      raise WeightsError(self._refusal)
    self._check(request)
    waiting = len(self._scheduler.waiting)
    if waiting >= self.sizes.max_waiting:
      raise EngineFullError(f'{waiting} requests wait already; try again later')
    self._next_id += 1
    self._scheduler.wait(self._sequence(self._next_id, request, 0, range(1, request.samples)))
    self._counts['requests'] += 1
    return self._next_id

  def cancel(self, request_id: int) -> list[Output]:
    """Ends a request and frees its pages at once; returns what its unfinished samples have so far."""
    outputs = []
    for sequence in self._scheduler.sequences():
      if sequence.request_id == request_id:
        self._scheduler.finish(sequence)
        outputs.append(self._finish_output(sequence, 'cancelled'))
        unborn = [self._sequence(request_id, sequence.request, i) for i in sequence.unborn]
        outputs += [self._finish_output(s, 'cancelled') for s in unborn]
    return sorted(outputs, key=lambda output: output.sample)

  def step(self) -> list[Event]:
    """One round of decoding and prefill; the events of all tokens it generated."""
    scheduler = self._scheduler
    if self._update is not None and not scheduler.begun:
      self._swap(*self._update)
    self._counts['steps'] += 1
    scheduler.make_room(ahead=1 + self.sizes.draft_steps)
    decoding = sorted(scheduler.decoding, key=lambda s: s.order)
    decode = self._decode_drafts if self.sizes.draft_steps else self._decode
    events = decode(decoding) if decoding else []
    spent = len(decoding) * (1 + self.sizes.draft_steps)
    return events + self._prefill(self.sizes.max_step_tokens - spent)

  @property
  def idle(self) -> bool:
    """Whether a step would do nothing."""
    return self._scheduler.idle and self._update is None

  def run(self, requests: Iterable[Request]) -> list[list[Output]]:
    """Runs requests to their end: for each the outputs of its samples. Others run along.

    Raises:
      RequestError: one of them can never be served; then none is begun.
    """
    left = collections.deque(requests)
    for request in left:
      self._check(request)
    ids: list[int] = []
    outputs: dict[int, list[Output]] = {}
    missing = 0
    while left or missing:
      while left and len(self._scheduler.waiting) < self.sizes.max_waiting:
        request = left.popleft()
        ids.append(self.add(request))
        outputs[ids[-1]] = []
        missing += request.samples
      for event in self.step():
        if event.output is not None and event.request_id in outputs:
          outputs[event.request_id].append(event.output)
          missing -= 1
    return [sorted(outputs[i], key=lambda output: output.sample) for i in ids]

  def update_weights(
    self, params: Any, version: int, mode: UpdateMode = 'continue', checksum: str | None = None
  ) -> str:
    """Takes new weights between two steps; no request is dropped.

    Args:
      params: a tree like the present one; copied, so the caller may go on training it.
      version: recorded with every token from now on; must be another than the present one.
      mode: for what runs already. 'continue': on the new weights, with cache rows of the old ones;
        'recompute': on the new weights, with all rows computed anew; 'drain': to its end on the old
        weights, while nothing new begins; then the new ones are taken.
      checksum: `weights_checksum` of the sender's copy.

    Returns:
      The checksum of the copy received.

    Raises:
      WeightsError: the tree is another, or was damaged on its way. The engine then finishes what runs
        on the old weights, and takes no request until a sound update comes.
      ValueError: for an unknown mode or the present version.
    """
    if mode not in ('continue', 'recompute', 'drain'):
      raise ValueError(f"mode must be 'continue', 'recompute' or 'drain', not {mode!r}")
    if version == self.version:
      raise ValueError(f'the engine has weights of version {version} already; give these another')
    try:
      self._check_tree(params)
      own, received = self._receive(params)
      if checksum is not None and received != checksum:
        raise WeightsError(f'checksum {received} received, {checksum} sent')
    except WeightsError as e:
      self._refusal = f'weights of version {version} are not sound: {e}; push them again'
      raise WeightsError(self._refusal) from None
    self._refusal = None
    if mode == 'drain' and self._scheduler.begun:
      self._update = (own, version, received)
      return received
    for sequence in [*self._scheduler.prefilling, *self._scheduler.decoding]:
      if mode == 'recompute':
        self._scheduler.preempt(sequence)
      sequence.version = None
    self._swap(own, version, received)
    return received

  def stats(self) -> Mapping[str, int | float]:
    """Counters since the start, and the present state."""
    scheduler = self._scheduler
    rounds = self._counts['draft_rounds']
    tokens = self.sizes.pages * self.sizes.page_size
    names = ('requests', 'steps', 'prefill_tokens', 'generated_tokens', 'finished', 'cancelled')
    return {name: self._counts[name] for name in names} | {
      'saved_tokens': scheduler.saved_tokens,
      'preemptions': scheduler.preemptions,
      # Tokens that a sequence gains in a step; without drafts it is 1.
      'accept_length': self._counts['draft_tokens'] / rounds if rounds else 1.0,
      'waiting': len(scheduler.waiting),
      'running': scheduler.running,
      'pages': self.sizes.pages - 1,
      'pages_used': scheduler.allocator.used,
      'pages_cached': len(scheduler.prefix) if scheduler.prefix else 0,
      'bytes_per_token': (self._latent.nbytes + self._index_k.nbytes) // tokens,
      'version': self.version,
    }

  def clear_prefix_cache(self) -> None:
    """Frees the pages that no request uses."""
    if self._scheduler.prefix is not None:
      self._scheduler.prefix.clear()

  # --- Weights ---

  def _receive(self, params: Any, keep: bool = False) -> tuple[Any, str]:
    """A copy in the programs' form, or if possible no copy to `keep`, and its checksum."""
    where = self._device
    if self._mesh is not None:
      where = sharding.param_shardings(params, self._mesh)
    own = jax.device_put(params, where, may_alias=keep)
    checksum = weights_checksum(own)
    return own if self._mesh else by_layer(own, self.config), checksum

  def _check_tree(self, params: Any) -> None:
    have, got = self._kinds, _kinds(params)
    for name in sorted(have | got):
      if have.get(name) != got.get(name):
        raise WeightsError(
          f'{name} is {got.get(name, "missing")}, expected {have.get(name, "nothing")}'
        )

  def _swap(self, params: Any, version: int, checksum: str) -> None:
    self._params, self.version, self.checksum = params, version, checksum
    self._update = None
    if self._scheduler.prefix is not None:
      self._scheduler.prefix.drop_other_versions(version)

  # --- Sequences ---

  def _check(self, request: Request) -> None:
    check(request, self.config.vocab_size, self.sizes.max_length, self._tokenizer is not None)

  def _sequence(
    self, request_id: int, request: Request, sample: int, unborn: range = range(0)
  ) -> Sequence:
    prompt = [int(token) for token in request.prompt_ids]
    new = request.max_tokens or self.sizes.max_length - len(prompt)
    stop_ids = {*request.stop_ids, *(() if request.ignore_eos else self.config.eos_token_id)}
    seen = None
    if request.has_penalty:
      seen = np.zeros(self.config.vocab_size, np.uint8)
      seen[prompt] = sampling.IN_CONTEXT
    stream = TextStream(self._tokenizer, request.stop_strings) if self._tokenizer else None
    return Sequence(
      request_id, sample, request, prompt, frozenset(stop_ids), len(prompt) + new, stream, unborn,
      seen=seen,
    )  # fmt: skip

  def _decode(self, sequences: list[Sequence]) -> list[Event]:
    rows = bucket(len(sequences), self.sizes.batch_buckets)
    logits = self._forward([(s, 1) for s in sequences], rows, 1)
    for sequence in sequences:
      sequence.computed += 1
    return self._draw(logits, sequences)

  def _decode_drafts(self, sequences: list[Sequence]) -> list[Event]:
    # Logits of accepted drafts stay on the device: who wants more of them than the draw goes alone.
    events = [e for s in sequences if s.request.top_logprobs for e in self._decode_alone(s)]
    sequences = [s for s in sequences if not s.request.top_logprobs]
    return events + (self._decode_drafted(sequences) if sequences else [])

  def _decode_alone(self, sequence: Sequence) -> list[Event]:
    """One token by the programs of prefill, the only ones without drafts in a drafting engine."""
    logits = self._forward([(sequence, 1)], 1, self.sizes.prefill_buckets[0])
    sequence.computed += 1
    return self._draw(logits, [sequence])

  def _decode_drafted(self, sequences: list[Sequence]) -> list[Event]:
    rows = bucket(len(sequences), self.sizes.batch_buckets)
    penalty = any(s.request.has_penalty for s in sequences)
    verified = jax.device_get(self._speculate(sequences, rows, None, penalty))
    self._counts['draft_rounds'] += len(sequences)
    events = []
    for row, sequence in enumerate(sequences):
      sequence.carry = verified.carry[row]
      for i in range(verified.kept[row]):
        sequence.computed += 1
        token, logprob, raw = (column[row, i] for column in verified.drawn)
        events.append(self._advance(sequence, int(token), float(logprob), float(raw)))
        self._counts['draft_tokens'] += 1
        if events[-1].finished:
          break
    return events

  def _prefill(self, budget: int) -> list[Event]:
    scheduler, buckets = self._scheduler, self.sizes.prefill_buckets
    events: list[Event] = []
    while budget > 0:
      if not scheduler.prefilling:
        if not scheduler.admit(self.version, begun_only=self._update is not None):
          break
      sequence = scheduler.prefilling[0]
      count = min(sequence.pending, budget, buckets[-1])
      logits = self._forward([(sequence, count)], 1, bucket(count, buckets))
      sequence.computed += count
      budget -= count
      self._counts['prefill_tokens'] += count
      if not sequence.pending:
        scheduler.prefilled(sequence)
        for one in (sequence, *self._fork(sequence)):
          events += self._draw(logits, [one])
    return events

  def _fork(self, parent: Sequence) -> list[Sequence]:
    """The further samples of a request whose prompt is computed; those without room wait."""
    children = []
    for i in parent.unborn:
      child = self._sequence(parent.request_id, parent.request, i)
      pages = self._scheduler.fork(parent, child)
      if pages is None:
        self._scheduler.wait(child)
        continue
      if pages != (0, 0):
        self._copy_page(*pages)
      children.append(child)
    parent.unborn = range(0)
    return children

  def _draw(self, logits: jax.Array, sequences: list[Sequence]) -> list[Event]:
    """Draws the next token of each sequence, whose logits are the first rows of `logits` [B, V]."""
    penalty = any(s.request.has_penalty for s in sequences)
    wanted = any(s.request.top_logprobs for s in sequences)
    top = self._programs.top_logprobs(logits) if wanted else ()
    drawn, top = jax.device_get((self._sample(logits, sequences, penalty), top))
    events = []
    for row, (s, t, p, raw) in enumerate(zip(sequences, *drawn, strict=False)):
      best = (column[row, : s.request.top_logprobs].tolist() for column in top)
      event = self._advance(s, int(t), float(p), float(raw))
      events.append(dataclasses.replace(event, top_logprobs=tuple(zip(*best, strict=True))))
    return events

  def _advance(self, sequence: Sequence, token: int, logprob: float, raw: float) -> Event:
    sequence.append(token, logprob, raw, self.version)
    self._counts['generated_tokens'] += 1
    reason: str | None = None
    stop: int | str | None = None
    text = ''
    if not math.isfinite(raw):
      reason = 'error'
    elif token in sequence.stop_ids:
      reason, stop = 'stop', token
    elif sequence.stream is not None:
      text = sequence.stream.add(token)
      if sequence.stream.stop is not None:
        reason, stop = 'stop', sequence.stream.stop
    if reason is None and len(sequence.tokens) >= sequence.max_length:
      reason = 'length'
    output = None
    if reason is not None:
      self._scheduler.finish(sequence)
      text += sequence.stream.finish() if sequence.stream else ''
      output = self._finish_output(sequence, reason, stop)
    event = Event(sequence.request_id, sequence.sample, token, logprob, raw, self.version, text)
    return dataclasses.replace(event, output=output)

  def _finish_output(
    self, sequence: Sequence, reason: str, stop: int | str | None = None
  ) -> Output:
    if sequence.stream is not None:
      sequence.stream.finish()
    self._counts['cancelled' if reason == 'cancelled' else 'finished'] += 1
    return sequence.output(reason, stop)

  # --- Device ---

  def _forward(
    self, work: SequenceOf[tuple[Sequence, int]], rows: int, time: int, pages: int | None = None
  ) -> jax.Array:
    """Runs the next `count` tokens of each (sequence, count), padded to [rows, time]."""
    if pages is None:
      longest = max(time, *(s.computed + count for s, count in work))
      pages = bucket(pages_for(longest, self.sizes.page_size), self.sizes.page_buckets)
    # Padding is of all kinds: experts would wait for one that all of it goes to.
    tokens = np.linspace(0, self.config.vocab_size - 1, rows * time).astype(np.int32)
    tokens = tokens.reshape(rows, time)
    table = np.zeros((rows, pages), np.int32)
    counts, lengths = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    carry = self._carry([s for s, _ in work], rows) if self.sizes.draft_steps else None
    for row, (sequence, count) in enumerate(work):
      tokens[row, :count] = sequence.tokens[sequence.computed : sequence.computed + count]
      own = sequence.pages[:pages]
      table[row, : len(own)] = own
      counts[row], lengths[row] = count, sequence.computed
    logits, hidden, self._latent, self._index_k = self._programs.forward(
      self._params, self._latent, self._index_k, carry, tokens, counts, table, lengths
    )
    if carry is not None and work:
      for (sequence, _), state in zip(work, np.asarray(hidden), strict=False):
        sequence.carry = state
    return logits

  def _speculate(
    self, sequences: list[Sequence], rows: int, pages: int | None, penalty: bool
  ) -> speculative.Verified:
    """Drafts and verifies for sequences with one token to compute, padded to `rows`."""
    steps = self.sizes.draft_steps
    # The last token of all is only drawn, never computed.
    limits = [min(steps + 1, s.max_length - len(s.tokens)) for s in sequences]
    if pages is None:
      longest = max(s.computed + n for s, n in zip(sequences, limits, strict=True))
      pages = bucket(pages_for(longest, self.sizes.page_size), self.sizes.page_buckets)
    token = np.linspace(0, self.config.vocab_size - 1, rows).astype(np.int32)
    limit, length = np.zeros(rows, np.int32), np.zeros(rows, np.int32)
    table = np.zeros((rows, pages), np.int32)
    for row, sequence in enumerate(sequences):
      own = sequence.pages[:pages]
      table[row, : len(own)] = own
      token[row], limit[row] = sequence.tokens[-1], limits[row]
      length[row] = sequence.computed
    settings, seen = self._settings(sequences, rows, penalty)
    verified, self._latent, self._index_k = self._programs.speculate(
      self._params, self._latent, self._index_k, self._carry(sequences, rows), token, limit, table,
      length, settings, seen,
    )  # fmt: skip
    return verified

  def _carry(self, sequences: list[Sequence], rows: int) -> np.ndarray:
    carry = np.zeros((rows, self.config.hidden_size), np.dtype(self.config.dtype))
    for row, sequence in enumerate(sequences):
      if sequence.carry is not None:
        carry[row] = sequence.carry
    return carry

  def _sample(
    self, logits: jax.Array, sequences: SequenceOf[Sequence], penalty: bool
  ) -> sampling.Drawn:
    return self._programs.sample(logits, *self._settings(sequences, logits.shape[0], penalty))

  def _settings(
    self, sequences: SequenceOf[Sequence], rows: int, penalty: bool
  ) -> tuple[sampling.Settings, np.ndarray | None]:
    settings = sampling.stack([s.settings() for s in sequences], rows)
    if not penalty:
      return settings, None
    seen = np.zeros((rows, self.config.vocab_size), np.uint8)
    for row, sequence in enumerate(sequences):
      if sequence.seen is not None:
        seen[row] = sequence.seen
    return settings, seen

  def _copy_page(self, source: int, target: int) -> None:
    self._latent, self._index_k = self._programs.copy_page(
      self._latent, self._index_k, np.int32(source), np.int32(target)
    )
