"""Part `mtp`: accept length with 4 speculative steps, by how many MTP steps were trained.

Section 2.1, Table 2: GLM-5 trains three steps that share one layer and reaches 2.76 tokens a step,
DeepSeek-V3.2 one, reused for all drafts, and reaches 2.55. Both are greedy here, and a step counts
as in infer/speculative.py: the accepted drafts and the model's own next token.
"""

import functools
import pathlib
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.recipe import runs
from glm5_jax.config import ModelConfig
from glm5_jax.infer import cache, sampling, speculative
from glm5_jax.ops.pages import PagedCache
from glm5_jax.train.evaluate import evaluate
from glm5_jax.train.step import Objective, make_eval_step

RATE = 1e-2
DRAFTS = 4
ROWS, LENGTH, EVERY = 32, 224, 3  # Held-out rows, their length, and which positions draft.
START, ROUNDS = 128, 16  # Of continuations: what is given, and how many steps follow.
PAGE = 16
VARIANTS = {
  f'{steps} trained': runs.Variant(
    f'mtp{steps}', 'muon_split', RATE, runs.MLA | {'num_nextn_predict_layers': 1},
    # Half of the rows: on all of them three steps with a head each would cost twice the rest.
    {'mtp_steps': steps, 'mtp_fraction': 0.5},
  )
  for steps in (1, 3)
}  # fmt: skip


def _greedy(rows: int) -> sampling.Settings:
  return sampling.stack([(0.0, 0, 1.0, 0.0, 1.0, 0.0, 0, 0, 0)] * rows, rows)


def _filled(params: Any, config: ModelConfig, tokens: jax.Array, capacity: int):
  """Hidden states [B, T, D] of `tokens` [B, T], and the cache that holds them."""
  rows, time = tokens.shape
  width = cache.pages_for(capacity, PAGE)
  pool = cache.init_pool(config, 1 + rows * width, PAGE, mtp_layers=1)
  table = 1 + jnp.arange(rows * width, dtype=jnp.int32).reshape(rows, width)
  paged = PagedCache(pool.latent, pool.index_k, table, jnp.zeros(rows, jnp.int32))
  carry = jnp.zeros((rows, config.hidden_size))
  hidden, paged = speculative.extend(
    params, config, carry, tokens, paged, jnp.ones((rows, time), bool)
  )
  return hidden, paged


@functools.partial(jax.jit, static_argnames=('config', 'drafts'))
def accepted_on_text(
  params: Any, tokens: jax.Array, at: jax.Array, config: ModelConfig, drafts: int
) -> jax.Array:
  """[len(at), B] int32: tokens that one speculative step gives after `tokens[:, :at[i] + 1]`.

  Args:
    params, config: a model with one MTP layer.
    tokens: [B, T] a text.
    at: positions of the last token known, 1..T - 1.
    drafts: 1..7.
  """
  rows, time = tokens.shape
  hidden, paged = _filled(params, config, tokens, time + drafts + 1)

  def one(t):
    verified, _ = speculative.decode(
      params, config, drafts, hidden[:, t - 1], tokens[:, t], jnp.full(rows, drafts + 1, jnp.int32),
      paged._replace(length=jnp.full(rows, t, jnp.int32)), _greedy(rows), None,
    )  # fmt: skip
    return verified.kept

  return jax.lax.map(one, at)


@functools.partial(jax.jit, static_argnames=('config', 'drafts', 'rounds'))
def accepted_in_continuations(
  params: Any, tokens: jax.Array, config: ModelConfig, drafts: int, rounds: int
) -> jax.Array:
  """[rounds, B] int32: tokens of each step of greedy continuations of `tokens` [B, T]."""
  rows, time = tokens.shape
  hidden, paged = _filled(params, config, tokens, time + rounds * (drafts + 1))

  def step(state, _):
    carry, token, paged = state
    verified, after = speculative.decode(
      params, config, drafts, carry, token, jnp.full(rows, drafts + 1, jnp.int32), paged,
      _greedy(rows), None,
    )  # fmt: skip
    kept = verified.kept
    last = jnp.take_along_axis(verified.drawn.token, (kept - 1)[:, None], axis=1)[:, 0]
    after = after._replace(length=paged.length + kept)
    return (verified.carry, last, after), kept

  first = paged._replace(length=jnp.full(rows, time - 1, jnp.int32))
  start = (hidden[:, -2], tokens[:, -1], first)
  return jax.lax.scan(step, start, length=rounds)[1]


def by_draft(kept: np.ndarray, drafts: int) -> list[float]:
  """The share of the steps that accept draft 1, 2, ... of those that accept the ones before."""
  return [
    float(np.mean(kept[kept > i] > i + 1)) if np.any(kept > i) else 0.0 for i in range(drafts)
  ]


def measure(workdir: pathlib.Path, seeds: Sequence[int]) -> Iterator[dict[str, Any]]:
  """The result, as it grows: after every run."""
  result: dict[str, Any] = {'drafts': DRAFTS, 'runs': []}
  for seed in seeds:
    for name, variant in VARIANTS.items():
      folder = runs.trained(workdir, variant, seed)
      measured = runs.remembered(folder, functools.partial(_measure_one, folder, variant))
      result['runs'].append({'variant': name, 'seed': seed, **measured})
      yield result


def _measure_one(folder: pathlib.Path, variant: runs.Variant) -> dict[str, Any]:
  config = runs.model_of(variant)
  params = runs.newest_params(folder, config)
  corpus, held_out = runs.held_out()
  tokens = runs.held_out_rows(corpus, LENGTH, ROWS)
  at = np.arange(LENGTH // 8, LENGTH, EVERY, dtype=np.int32)
  on_text = np.asarray(accepted_on_text(params, tokens, at, config, DRAFTS))
  continued = np.asarray(
    accepted_in_continuations(params, tokens[:, :START], config, DRAFTS, ROUNDS)
  )
  eval_step = make_eval_step(config, Objective(mtp_steps=DRAFTS), recall=False)
  sample = held_out.batches[:16]
  return {
    'loss': runs.loss(folder),
    'accept_length': float(on_text.mean()), 'positions': int(on_text.size),
    'accepted': by_draft(on_text, DRAFTS),
    'accept_length_continuing': float(continued.mean()), 'steps_continuing': int(continued.size),
    'mtp_loss': list(evaluate(eval_step, params, held_out, sample).mtp_loss),
  }  # fmt: skip
