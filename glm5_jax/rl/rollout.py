"""Episodes: a model acts in environments through the engine, token in, token out.

What the engine generated is what the trainer sees: ids, the log-probabilities they were sampled with and
the weights that computed them are recorded, and a conversation continues from these very ids. Nothing is
rendered or tokenised twice (section 4.1.2).
"""

import collections
import concurrent.futures
import dataclasses
import hashlib
import json
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

from glm5_jax.data import chat
from glm5_jax.data.chat_parse import parse
from glm5_jax.data.tokenizer import Tokenizer
from glm5_jax.envs.protocol import Environment, EnvironmentFailureError, Message, Task
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.request import EngineFullError, Output, Request, RequestError
from glm5_jax.train.workdir import write_atomically

_PRESERVED = chat.ChatFormat(clear_thinking=False)
_STOPS = ('<|endoftext|>', '<|user|>', '<|observation|>')


@dataclasses.dataclass(frozen=True)
class Job:
  """One episode to play: member `sample` of the group of task `index` of `env`."""

  env: Environment
  task: Task
  index: int
  sample: int = 0


@dataclasses.dataclass
class Trajectory:
  """An episode and everything that learning from it needs. JSON-able by `dataclasses.asdict`.

  Attributes:
    env: name of the environment.
    index, sample: see `Job`.
    ids: all tokens, prompt and tool results included.
    sampled: of each, whether the model wrote it.
    logprobs: of each, as it was sampled; 0.0 where it was not.
    token_versions: of each, the weights that computed it; -1 where it was not sampled.
    messages: the same as messages.
    reward: the judge's verdict; 0.0 if there is a failure.
    failure: why the environment failed, or None.
    end: 'done' (the model ended it), 'length' or 'turns' (it was cut off).
    turns: how often the model spoke.
    malformed: how many of these turns do not parse: a thought or a call that is not closed, a call that
      is none, an end that is none (cut off; a call without `<|observation|>` after it, or that without
      a call).
  """

  env: str
  index: int
  sample: int
  ids: list[int] = dataclasses.field(default_factory=list)
  sampled: list[bool] = dataclasses.field(default_factory=list)
  logprobs: list[float] = dataclasses.field(default_factory=list)
  token_versions: list[int] = dataclasses.field(default_factory=list)
  messages: list[Message] = dataclasses.field(default_factory=list)
  reward: float = 0.0
  failure: str | None = None
  end: str = ''
  turns: int = 0
  malformed: int = 0

  @property
  def versions(self) -> list[int]:
    """The weights that computed it, ascending (see filters.py)."""
    return sorted({v for v in self.token_versions if v >= 0})

  @property
  def response_tokens(self) -> int:
    return sum(self.sampled)

  def _add(self, ids: Iterable[int], output: Output | None = None) -> None:
    ids = [int(i) for i in ids]
    self.ids += ids
    self.sampled += [output is not None] * len(ids)
    self.logprobs += output.logprobs if output else [0.0] * len(ids)
    self.token_versions += output.versions if output else [-1] * len(ids)


@dataclasses.dataclass(frozen=True)
class Settings:
  """How episodes are played.

  Attributes:
    max_tokens: of an episode, everything included.
    max_turn_tokens: that the model may write in one turn.
    max_turns: how often it may speak.
    temperature: of sampling; 0 takes the most probable token.
    seed: with the job, it determines every draw.
    form: the chat format; with clear_thinking the ids could not be continued, so it preserves.
    workers: tools and judges at work at once.
  """

  max_tokens: int = 512
  max_turn_tokens: int = 128
  max_turns: int = 4
  temperature: float = 1.0
  seed: int = 0
  form: chat.ChatFormat = _PRESERVED
  workers: int = 8

  def __post_init__(self):
    for name in ('max_tokens', 'max_turn_tokens', 'max_turns', 'workers'):
      if getattr(self, name) < 1:
        raise ValueError(f'{name}={getattr(self, name)} must be at least 1')
    if not self.temperature >= 0:
      raise ValueError(f'temperature={self.temperature} must be at least 0')
    if self.form.clear_thinking:
      raise ValueError('episodes need clear_thinking=False: dropped reasoning changes past tokens')


def play(
  engine: Engine, tokenizer: Tokenizer, jobs: Sequence[Job], settings: Settings
) -> list[Trajectory]:
  """Plays all jobs to their end; trajectories in their order.

  Raises:
    RequestError: a prompt does not fit the engine.
  """
  players = [_Player(job, tokenizer, settings) for job in jobs]
  ready = collections.deque(players)
  playing: dict[int, _Player] = {}
  with concurrent.futures.ThreadPoolExecutor(settings.workers) as pool:
    judging = []
    while ready or playing:
      while ready:
        request = ready[0].request()
        if request is None:
          judging.append(pool.submit(ready.popleft().judge))
          continue
        try:
          playing[engine.add(request)] = ready[0]
        except EngineFullError:
          break
        ready.popleft()
      for event in engine.step():
        if event.output is not None:
          player = playing.pop(event.output.request_id)
          player.receive(event.output)
          ready.append(player)
    for verdict in judging:
      verdict.result()
  return [p.trajectory for p in players]


def check_prompt(job: Job, tokenizer: Tokenizer, settings: Settings) -> None:
  """Raises RequestError if the job's prompt leaves no room for an answer."""
  _Player(job, tokenizer, settings)


class _Player:
  """One episode under way."""

  def __init__(self, job: Job, tokenizer: Tokenizer, settings: Settings):
    self._job, self._tokenizer, self._settings = job, tokenizer, settings
    self._tools = list(job.env.tools)
    self._stop_ids = [tokenizer.special(name, 'the chat format') for name in _STOPS]
    messages = list(job.task.prompt)
    self.trajectory = Trajectory(job.env.name, job.index, job.sample, messages=messages)
    prompt = chat.render(messages, self._tools, form=settings.form, generation_prompt=True)
    ids = chat.encode(prompt, tokenizer).ids
    if len(ids) >= settings.max_tokens:
      raise RequestError(
        f'a prompt of {job.env.name!r} has {len(ids)} tokens, its tools included; max_tokens='
        f'{settings.max_tokens} of an episode leaves no room for an answer'
      )
    self.trajectory._add(ids)

  def request(self) -> Request | None:
    """The model's next turn; None if the episode is over."""
    t, s = self.trajectory, self._settings
    if t.end:
      return None
    room = min(s.max_turn_tokens, s.max_tokens - len(t.ids))
    if t.turns == s.max_turns or room < 1:
      t.end = 'turns' if room >= 1 else 'length'
      return None
    draw = f'{s.seed}/{t.env}/{t.index}/{t.sample}/{t.turns}'
    seed = int.from_bytes(hashlib.blake2b(draw.encode(), digest_size=8).digest(), 'big')
    return Request(
      tuple(t.ids), max_tokens=room, temperature=s.temperature, seed=seed, stop_ids=self._stop_ids
    )

  def receive(self, output: Output) -> None:
    """Takes the model's turn, and the environment's after it."""
    t, form = self.trajectory, self._settings.form
    t._add(output.ids, output)
    t.turns += 1
    reply = parse(output.ids, self._tokenizer, thinking=form.enable_thinking, tools=self._tools)
    t.messages.append(reply.message())
    asks = bool(output.ids) and output.ids[-1] == self._tokenizer.special_ids['<|observation|>']
    parses = reply.closed and not reply.failures and bool(reply.calls) == asks
    t.malformed += not (parses and output.finish_reason == 'stop')
    if output.finish_reason == 'error':
      t.end, t.failure = 'done', "the model's logits were not finite"
    elif output.finish_reason != 'stop':
      t.end = 'length'
    elif not asks:
      t.end = 'done'
    else:
      try:
        results = self._job.env.respond(self._job.task, reply)
      except EnvironmentFailureError as e:
        t.end, t.failure = 'done', str(e)
        return
      if not results:
        t.end = 'done'
        return
      ids = chat.encode(chat.continuation(results, form=form), self._tokenizer).ids
      if len(t.ids) + len(ids) >= self._settings.max_tokens:
        t.end = 'length'
        return
      t.messages += results
      t._add(ids)

  def judge(self) -> None:
    """The reward, or why there is none."""
    t = self.trajectory
    if t.failure is None:
      try:
        t.reward = float(self._job.env.reward(self._job.task, t.messages))
      except EnvironmentFailureError as e:
        t.failure = str(e)


def groups(trajectories: Sequence[Trajectory]) -> dict[tuple[str, int], list[Trajectory]]:
  """Trajectories by task, in order."""
  out: dict[tuple[str, int], list[Any]] = {}
  for t in trajectories:
    out.setdefault((t.env, t.index), []).append(t)
  return out


def save_episodes(folder: pathlib.Path, name: str, trajectories: Sequence[Trajectory]) -> None:
  """Writes `folder`/rollouts/NAME.jsonl, a trajectory a line."""
  (folder / 'rollouts').mkdir(exist_ok=True)
  lines = [json.dumps(dataclasses.asdict(t), ensure_ascii=False) + '\n' for t in trajectories]
  write_atomically(folder / 'rollouts' / f'{name}.jsonl', ''.join(lines))
