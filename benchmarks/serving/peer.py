"""The engine and transformers' generate: same weights, same prompts, greedy, taking turns.

Each side has a process of its own, so that its peak memory is its own. Greedy tokens of two correct
implementations differ where two logits lie closer than float32 rounding, and everything after them
with them; for each answer that differs, our side says how close the two tokens' logits were there. A
choice of keys or experts that is as close changes later logits by any amount: how close the closest one
before was is said as well.
"""

import multiprocessing
import pathlib
import resource
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from typing import Any, NamedTuple

import numpy as np

from benchmarks.hf_cpu import CONFIG, OURS, THEIRS

# Libraries are imported by the process that uses them: the memory of one side must not hold the
# other's, and a child's peak starts at its parent's.

NEAR = 1e-3  # Logits, whose spread is about 1: two tokens closer than this may change places.


class Task(NamedTuple):
  """What every side continues."""

  batch: int
  prompt: int
  new: int

  def prompts(self) -> list[list[int]]:
    rng = np.random.default_rng(self.batch)
    return rng.integers(0, CONFIG.vocab_size, (self.batch, self.prompt)).tolist()


Side = Callable[[Task], list[list[int]]]


def prepare(directory: pathlib.Path) -> None:
  """Writes the checkpoint that all sides read."""
  from benchmarks.serving import runs
  from glm5_jax.convert import save_hf

  model = runs.random_model(CONFIG)
  save_hf(directory / 'checkpoint', model.config, model.params)


def ours(directory: pathlib.Path, tasks: Sequence[Task], **sizes: Any) -> Side:
  """The engine, compiled for these tasks."""
  from benchmarks.serving import runs
  from glm5_jax.convert import load_hf
  from glm5_jax.infer.cache import pages_for
  from glm5_jax.infer.programs import EngineConfig
  from glm5_jax.infer.request import Request

  config, params = load_hf(directory / 'checkpoint')
  length = max(t.prompt + t.new for t in tasks)
  batch = max(t.batch for t in tasks)
  made = runs.engine(runs.Model(config, params), EngineConfig(
    pages=1 + batch * pages_for(length, 64), max_length=length, max_sequences=batch,
    # All prompts in the first step, as the peer does it: nobody waits for the first token here.
    max_step_tokens=batch * (1 + max(t.prompt for t in tasks)), prefix_cache=False,
    batch_buckets=tuple(sorted({t.batch for t in tasks})),
    prefill_buckets=tuple(sorted({t.prompt for t in tasks})),
    page_buckets=(pages_for(length, 64),), **sizes,
  ))  # fmt: skip

  def generate(task: Task) -> list[list[int]]:
    return runs.timed(
      made,
      [Request(p, max_tokens=task.new, temperature=0, ignore_eos=True) for p in task.prompts()],
    ).ids

  return generate


def theirs(directory: pathlib.Path, **implementation: str) -> Side:
  """transformers' generate."""
  import torch
  import transformers

  transformers.logging.set_verbosity_error()
  transformers.logging.disable_progress_bar()
  model = transformers.GlmMoeDsaForCausalLM.from_pretrained(
    directory / 'checkpoint', dtype=torch.float32, **implementation
  ).eval()
  model.generation_config.eos_token_id = None  # Every answer has its full length.

  def generate(task: Task) -> list[list[int]]:
    prompts = torch.as_tensor(task.prompts())
    with torch.inference_mode():
      found = model.generate(
        prompts, attention_mask=torch.ones_like(prompts), do_sample=False,
        max_new_tokens=task.new,
      )  # fmt: skip
    return found[:, task.prompt :].tolist()

  return generate


def logit_gap(
  directory: pathlib.Path, tokens: Sequence[int], a: int, b: int
) -> tuple[float, float]:
  """|logit a - logit b| after `tokens`, and the closest choice of a key or an expert on the way there.

  By the training forward pass.
  """
  import jax

  from glm5_jax.convert import load_hf
  from glm5_jax.modules.block import Options
  from glm5_jax.modules.model import forward

  config, params = load_hf(directory / 'checkpoint')
  run = jax.jit(
    lambda tokens: forward(params, tokens, config=config, options=Options(capture=True))
  )
  # Padded behind, so that one program serves all; nothing sees what comes after it.
  size = len(tokens)
  padded = np.zeros((1, -(-size // 256) * 256), np.int32)
  padded[0, :size] = tokens
  out = run(padded)
  margins = [np.inf]
  stacks = [stack for stack in out.aux.values() if isinstance(stack, dict)]
  for block in (block for stack in stacks for block in stack.values()):
    visible = np.tril(np.ones((size, size), bool))
    scores = np.where(visible, np.asarray(block['index_scores'])[:, 0, :size, :size], -np.inf)
    margins.append(_margin(scores[:, config.index_topk :], config.index_topk))
    if 'router_logits' in block:
      logits = np.asarray(block['router_logits'], np.float64)[:, :size]
      margins.append(_margin(1 / (1 + np.exp(-logits)), config.num_experts_per_tok))
  logits = np.asarray(out.logits[0, size - 1])
  return abs(float(logits[a]) - float(logits[b])), min(margins)


def _margin(scores: np.ndarray, chosen: int) -> float:
  """The least distance, over all rows, of the last of `chosen` best scores from the next."""
  if not scores.size:
    return np.inf
  best = -np.sort(-scores, axis=-1)
  return float(np.min(best[..., chosen - 1] - best[..., chosen]))


def first_difference(a: Sequence[int], b: Sequence[int]) -> int | None:
  """Where two equally long answers part."""
  return next((i for i, (x, y) in enumerate(zip(a, b, strict=True)) if x != y), None)


def _peak_mib() -> float:
  unit = 1 if sys.platform == 'darwin' else 1024
  return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * unit / 2**20


def _serve(connection: Connection, name: str, directory: pathlib.Path, tasks) -> None:
  """The process of one side: does the tasks it is sent until it is sent None."""
  side = ours(directory, tasks) if name == OURS else theirs(directory, **THEIRS[name])
  connection.send(_peak_mib())
  while (task := connection.recv()) is not None:
    start = time.perf_counter()
    ids = side(task)
    connection.send((ids, time.perf_counter() - start, _peak_mib()))


class _Process:
  """A side, seen from outside."""

  def __init__(self, context, name: str, directory: pathlib.Path, tasks: Sequence[Task]):
    self.name = name
    self.connection, other = context.Pipe()
    process = context.Process(target=_serve, args=(other, name, directory, tasks), daemon=True)
    process.start()
    other.close()
    self.loaded_mib = self.receive()
    self.seconds: dict[Task, list[float]] = {task: [] for task in tasks}
    self.peak_mib: dict[Task, float] = {}
    self.ids: dict[Task, list[list[int]]] = {}

  def receive(self):
    try:
      return self.connection.recv()
    except EOFError:
      sys.exit(f'serving: the process of {self.name!r} died; its own message is above')

  def run(self, task: Task, warm_up: bool = False) -> None:
    self.connection.send(task)
    self.ids[task], seconds, self.peak_mib[task] = self.receive()
    if not warm_up:
      self.seconds[task].append(seconds)


def measure(batches: Sequence[int], prompt: int, new: int, repeats: int) -> dict[str, Any]:
  """Both sides at each batch size, ascending: memory is the peak so far."""
  tasks = [Task(batch, prompt, new) for batch in sorted(batches)]
  context = multiprocessing.get_context('spawn')
  with tempfile.TemporaryDirectory() as scratch:
    directory = pathlib.Path(scratch)
    writing = context.Process(target=prepare, args=(directory,))
    writing.start()
    writing.join()
    if writing.exitcode:
      sys.exit('serving: cannot write the checkpoint; the message is above')
    sides = [_Process(context, name, directory, tasks) for name in (OURS, *THEIRS)]
    for task in tasks:
      for side in sides:
        side.run(task, warm_up=True)
      for _ in range(repeats):
        for side in sides:
          side.run(task)
    for side in sides:
      side.connection.send(None)
    agreement = {
      side.name: [_agreement(directory, task, sides[0].ids[task], side.ids[task]) for task in tasks]
      for side in sides[1:]
    }
  rows = []
  for i, task in enumerate(tasks):
    ours_seconds = statistics.median(sides[0].seconds[task])
    for side in sides:
      seconds = statistics.median(side.seconds[task])
      row = {
        'batch': task.batch, 'side': side.name, 'seconds': seconds,
        'tokens_per_second': task.batch * new / seconds, 'ours_over_theirs': seconds / ours_seconds,
        'peak_mib': round(side.peak_mib[task]), 'loaded_mib': round(side.loaded_mib),
      }  # fmt: skip
      rows.append(row | (agreement[side.name][i] if side.name in agreement else {}))
  return {'prompt': prompt, 'new': new, 'repeats': repeats, 'rows': rows}


def _agreement(directory: pathlib.Path, task: Task, ours, theirs) -> dict[str, Any]:
  """Equal answers, equal tokens before the first difference, and how close the logits were there."""
  parted = [first_difference(a, b) for a, b in zip(ours, theirs, strict=True)]
  gaps = [
    logit_gap(directory, [*task.prompts()[row], *ours[row][:at]], ours[row][at], theirs[row][at])
    for row, at in enumerate(parted)
    if at is not None
  ]
  return {
    'same_answers': parted.count(None),
    'same_tokens': sum(task.new if at is None else at for at in parted),
    'largest_gap': max((gap for gap, _ in gaps), default=0.0),
    'closest_choice': [margin for _, margin in gaps],
  }


def table(result: dict[str, Any]) -> str:
  """The result for people."""
  from benchmarks.serving import runs

  head = ('batch', '', 'seconds', 'tokens/s', 'ours is faster by', 'peak memory, MiB',
          'tokens equal to ours until an answer parts', 'logits of the tokens there differ by',
          'closest choice before')  # fmt: skip
  body = []
  for r in result['rows']:
    all_tokens = r['batch'] * result['new']
    mine = 'same_tokens' not in r
    body.append((
      r['batch'], r['side'], r['seconds'], r['tokens_per_second'],
      '' if mine else f'{r["ours_over_theirs"]:.2f}x', r['peak_mib'],
      '' if mine else f'{r["same_tokens"]} of {all_tokens} ({r["same_answers"]} answers whole)',
      '' if mine else f'{r["largest_gap"]:.0e}',
      '' if mine or not r['closest_choice'] else f'{max(r["closest_choice"]):.0e}',
    ))  # fmt: skip
  return runs.markdown(head, body)


def wrong(result: dict[str, Any]) -> str:
  """What the sides disagree on beyond rounding; empty if nothing."""
  worst = max(r.get('largest_gap', 0.0) for r in result['rows'])
  return f'the answers part where logits differ by {worst:.1e}' if worst > NEAR else ''
