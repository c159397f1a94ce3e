"""The engine against itself: sparse attention, drafts, and the prefix cache, each on and off."""

import functools
import inspect
import random
import time
from collections.abc import Sequence
from typing import Any, NamedTuple

import jax
import numpy as np

from benchmarks.serving import runs
from glm5_jax.infer.cache import init_pool, pages_for
from glm5_jax.infer.engine import Engine
from glm5_jax.infer.programs import EngineConfig, by_layer, programs
from glm5_jax.infer.request import Request

PAGE = 64


def _decoder(model: runs.Model, context: int, batch: int, steps: int, compiler_options=()):
  """A function that decodes `steps` tokens a row after `context` others, and returns its seconds.

  The rows of the others are random: a step costs the same, and filling 32K of them takes minutes.
  """
  config, pages = model.config, pages_for(context + 1, PAGE)
  pool = init_pool(config, 1 + batch * pages, PAGE)
  keys = jax.random.split(jax.random.key(1))
  state = [jax.random.normal(k, a.shape, a.dtype) for k, a in zip(keys, pool[:2], strict=True)]
  forward = programs(config, 0, compiler_options).forward
  params = by_layer(model.params, config)
  token, count = np.ones((batch, 1), np.int32), np.ones(batch, np.int32)
  table = 1 + np.arange(batch * pages, dtype=np.int32).reshape(batch, pages)
  length = np.full(batch, context, np.int32)

  def decode() -> float:
    start = time.perf_counter()
    for _ in range(steps):
      logits, _, *state[:] = forward(params, *state, None, token, count, table, length)
      logits.block_until_ready()
    return time.perf_counter() - start

  return decode


def attention(
  model: runs.Model, contexts: Sequence[int], batch: int, steps: int, repeats: int,
  compiler_options: tuple[tuple[str, Any], ...] = (),
) -> dict[str, Any]:  # fmt: skip
  """Decode speed with and without sparse attention, by context length."""
  rows = []
  for context in contexts:
    sides = {
      kind: _decoder(
        model._replace(config=model.config.replace(sparse_attention=kind == 'sparse')),
        context, batch, steps, compiler_options,
      )
      for kind in ('sparse', 'dense')
    }  # fmt: skip
    found = runs.turns(sides, repeats)
    speed = {kind: batch * steps / runs.median(found[kind]) for kind in found}
    rows.append({'context': context, 'ratio': speed['sparse'] / speed['dense'], **speed})
  return {'batch': batch, 'steps': steps, 'index_topk': model.config.index_topk, 'rows': rows}


def attention_table(result: dict[str, Any]) -> str:
  """The result of `attention` for people."""
  head = ('context', 'sparse, tokens/s', 'dense, tokens/s', 'sparse / dense')
  body = [(r['context'], r['sparse'], r['dense'], r['ratio']) for r in result['rows']]
  return runs.markdown(head, body)


def texts(model: runs.Model, count: int, length: int) -> list[list[int]]:
  """Prompts: source code of Python's own library for a trained model, else random ids."""
  if model.tokenizer is None:
    return runs.random_prompts(model.config, count, length)
  source = model.tokenizer.encode(inspect.getsource(random)).tolist()
  step = (len(source) - length) // count
  if step < 1:
    raise ValueError(f'{count} prompts of {length} tokens are more than the text has')
  return [source[i * step : i * step + length] for i in range(count)]


def drafting(
  model: runs.Model, drafts: Sequence[int], batch: int, prompt: int, new: int, repeats: int,
  temperature: float, **sizes: Any,
) -> dict[str, Any]:  # fmt: skip
  """Speed and accept length by the number of drafted tokens; 0 drafts nothing."""
  prompts = texts(model, batch, prompt)
  requests = [
    Request(p, max_tokens=new, temperature=temperature, seed=i, ignore_eos=True)
    for i, p in enumerate(prompts)
  ]
  length = prompt + new
  sides, engines = {}, {}
  for steps in (0, *(d for d in drafts if d)):
    made = runs.engine(model, EngineConfig(
      page_size=PAGE, pages=1 + batch * pages_for(length, PAGE), max_length=length,
      max_sequences=batch, max_step_tokens=batch * (prompt + 1 + steps), prefix_cache=False,
      draft_steps=steps, batch_buckets=(batch,), prefill_buckets=(prompt,),
      page_buckets=(pages_for(length, PAGE),), **sizes,
    ))  # fmt: skip
    engines[steps] = made
    sides[steps] = functools.partial(runs.timed, made, requests)
  found = runs.turns(sides, repeats)
  plain = runs.median(f.seconds for f in found[0])
  rows = []
  for steps, times in found.items():
    seconds = runs.median(f.seconds for f in times)
    same = sum(a == b for a, b in zip(times[0].ids, found[0][0].ids, strict=True))
    rows.append({
      'drafts': steps, 'tokens_per_second': batch * new / seconds, 'speed_up': plain / seconds,
      'accept_length': engines[steps].stats()['accept_length'], 'same': same,
    })  # fmt: skip
  return {'batch': batch, 'prompt': prompt, 'new': new, 'temperature': temperature, 'rows': rows}


def drafting_table(result: dict[str, Any]) -> str:
  """The result of `drafting` for people."""
  head = ('drafted tokens', 'tokens/s', 'speed-up', 'tokens a step', 'answers as without')
  body = [
    (r['drafts'], r['tokens_per_second'], r['speed_up'], r['accept_length'],
     f'{r["same"]} of {result["batch"]}')
    for r in result['rows']
  ]  # fmt: skip
  return runs.markdown(head, body)


class Turn(NamedTuple):
  """All conversations' turns of one number."""

  prefill_tokens: int
  first_seconds: float  # Until each has its first token.
  seconds: float


def converse(
  engine: Engine, vocab: int, talks: int, turns: int, said: int, new: int
) -> tuple[list[Turn], list[list[int]]]:
  """Conversations side by side: what each turn took, and all they consist of at the end."""
  rng = np.random.default_rng(0)
  histories: list[list[int]] = [[] for _ in range(talks)]
  found = []
  for _ in range(turns):
    before = engine.stats()['prefill_tokens']
    start = time.perf_counter()
    asked = {}
    for history in histories:
      history += rng.integers(0, vocab, said).tolist()
      asked[engine.add(Request(history, max_tokens=new, temperature=0, ignore_eos=True))] = history
    waiting, first = set(asked), 0.0
    while not engine.idle:
      events = engine.step()
      waiting -= {e.request_id for e in events}
      first = first or (0.0 if waiting else time.perf_counter() - start)
      for event in events:
        asked[event.request_id].append(event.token)
    prefilled = int(engine.stats()['prefill_tokens'] - before)
    found.append(Turn(prefilled, first, time.perf_counter() - start))
  engine.clear_prefix_cache()
  return found, histories


def prefix(
  model: runs.Model, talks: int, turns: int, said: int, new: int, repeats: int, **sizes: Any
) -> dict[str, Any]:
  """Prefill of conversations with and without the prefix cache, turn by turn."""
  length = turns * (said + new)
  sides = {}
  for kept in (True, False):
    made = runs.engine(model, EngineConfig(
      page_size=PAGE, pages=1 + talks * pages_for(length + 1, PAGE), max_length=length,
      max_sequences=talks, batch_buckets=(talks,), prefix_cache=kept, **sizes,
    ))  # fmt: skip
    sides[kept] = functools.partial(
      converse, made, model.config.vocab_size, talks, turns, said, new
    )
  found = runs.turns(sides, repeats)
  with_cache, without = ([turns for turns, _ in found[kept]] for kept in (True, False))
  if found[True][0][1] != found[False][0][1]:
    raise AssertionError('the prefix cache changed an answer')
  rows = []
  for i in range(turns):
    row: dict[str, Any] = {'turn': i + 1}
    for name, side in (('kept', with_cache), ('anew', without)):
      row[f'{name}_tokens'] = side[0][i].prefill_tokens
      row[f'{name}_first'] = runs.median(turns[i].first_seconds for turns in side)
      row[f'{name}_seconds'] = runs.median(turns[i].seconds for turns in side)
    rows.append(row)
  return {'conversations': talks, 'said': said, 'new': new, 'rows': rows}


def prefix_table(result: dict[str, Any]) -> str:
  """The result of `prefix` for people."""
  names = [f'{side}_{what}' for what in ('tokens', 'first', 'seconds') for side in ('kept', 'anew')]
  head = (
    'turn', 'prefill tokens, cache on', 'off', 'seconds to the first tokens, on', 'off',
    'seconds of the turn, on', 'off',
  )  # fmt: skip
  body = [(r['turn'], *(r[n] for n in names)) for r in result['rows']]
  total = [sum(r[n] for r in result['rows']) for n in names]
  return runs.markdown(head, [*body, ('all', *total)])
