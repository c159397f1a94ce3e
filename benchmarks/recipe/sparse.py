"""Part `sparse`: from dense to sparse attention, on the stages of configs/nano_pipeline.py.

Sections 2.1.1 and 2.1.2, Tables 3 to 6. Held-out loss, needles and the indexer's recall of
attention mass, before the warm-up, after it, and after sparse adaptation; beside them the dense
model of mid-training with sliding windows in some layers, without training, as in Table 4.
"""

import functools
import json
import pathlib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np

from benchmarks.recipe import needle, runs, window
from glm5_jax import data
from glm5_jax.config import ModelConfig
from glm5_jax.losses import language_model
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import forward
from glm5_jax.train.prepare import prepare
from glm5_jax.train.step import Objective, make_eval_step

DENSE, WARM, SPARSE = '2_midtrain', '3_dsa_warmup', '4_dsa_sparse'
DISTANCES = (48, 96, 384, 768)
NEEDLES = 24  # Of each kind.
LOSS_BATCHES = 16
RECALL_BATCHES = 8


class Mode(NamedTuple):
  """A way to run the model of a stage.

  `windowed` are the layers whose queries see the last index_topk keys only; None asks for sparse
  attention, by the indexers.
  """

  name: str
  stage: str
  windowed: tuple[int, ...] | None

  def hidden(self, params: Any, batch: Mapping[str, Any], model: ModelConfig) -> jax.Array:
    if self.windowed:
      return window.hidden_states(params, batch, model, self.windowed, model.index_topk)
    model = model.replace(sparse_attention=self.windowed is None)
    out = forward(
      params, batch['tokens'], config=model, positions=batch['positions'],
      segment_ids=batch['segment_ids'], logits=False, options=Options(form='expanded'),
    )  # fmt: skip
    return out.hidden


MODES = (
  Mode('dense', DENSE, ()),
  Mode('window in layer 1 of 0, 1, 2', DENSE, (1,)),
  Mode('windows in layers 0 and 2', DENSE, (0, 2)),
  Mode('windows in all layers', DENSE, (0, 1, 2)),
  Mode('sparse, indexers untrained', DENSE, None),
  Mode('sparse, indexers warmed up', WARM, None),
  Mode('sparse, adapted', SPARSE, None),
  Mode('adapted, with dense attention', SPARSE, ()),
)


class Stage(NamedTuple):
  """A stage's model at its end."""

  model: ModelConfig
  params: Any


def load(folder: pathlib.Path) -> Stage:
  """The stage in `folder`."""
  settings = json.loads((folder / 'config.json').read_text(encoding='utf-8'))
  model = prepare(settings).model
  return Stage(model, runs.newest_params(folder, model))


@functools.partial(jax.jit, static_argnames=('mode', 'model'))
def _loss(params: Any, batch: Mapping[str, Any], mode: Mode, model: ModelConfig):
  hidden = mode.hidden(params, batch, model)
  sums = language_model.cross_entropy(hidden, params['lm_head'], batch['targets'], batch['weights'])
  return sums.nll, sums.weight


@functools.partial(jax.jit, static_argnames=('mode', 'model'))
def _answers(params: Any, rows: needle.Rows, mode: Mode, model: ModelConfig):
  tokens = rows.tokens
  positions = jnp.broadcast_to(jnp.arange(tokens.shape[1]), tokens.shape)
  batch = {'tokens': tokens, 'positions': positions, 'segment_ids': jnp.ones_like(tokens)}
  hidden = mode.hidden(params, batch, model)
  return needle.answers(params['lm_head'], hidden, rows.targets, rows.asked)


@functools.partial(jax.jit, static_argnames='model')
def window_recall(params: Any, batch: Mapping[str, Any], model: ModelConfig):
  """The dense attention mass on the last index_topk keys, the mean over the heads as for indexers.

  Returns:
    [layers] its sums over the valid queries, and the number of these.
  """
  tokens = jnp.asarray(batch['tokens'])
  time = tokens.shape[1]
  out = forward(
    params, tokens, config=model.replace(sparse_attention=False), positions=batch['positions'],
    segment_ids=batch['segment_ids'], logits=False, options=Options(capture=True, form='expanded'),
  )  # fmt: skip
  slots = jnp.arange(time)
  age = slots[:, None] - slots
  near = (age >= 0) & (age < model.index_topk)
  valid = batch['segment_ids'] > 0
  sums = []
  for stack in model.stacks:
    blocks = [out.aux[stack.name][f'block{j}']['probs'] for j in range(len(stack.blocks))]
    probs = jnp.stack(blocks, axis=1).mean(axis=-2)  # [repeats, blocks, B, T, S]
    mass = jnp.sum(jnp.where(near, probs, 0.0), axis=-1)
    sums.append(jnp.sum(jnp.where(valid, mass, 0.0), axis=(-1, -2)).reshape(-1))
  return jnp.concatenate(sums), jnp.sum(valid)


def _mean_and_error(x: np.ndarray) -> tuple[float, float]:
  return float(np.mean(x)), float(np.std(x, ddof=1) / np.sqrt(len(x)))


def measure_needles(
  stage: Stage, mode: Mode, needles: Sequence[needle.Needle], filler: np.ndarray
) -> dict[str, Any]:
  """What the needles are worth at each of DISTANCES, and without: means over the needles."""

  def ask(distance: int | None) -> dict[str, np.ndarray]:
    rows = needle.rows(needles, filler, distance)
    parts: list[Any] = []
    for first in range(0, len(needles), 4):  # As many rows as in a training batch.
      part = needle.Rows(*(a[first : first + 4] for a in rows))
      parts.append(jax.device_get(_answers(stage.params, part, mode, stage.model)))
    return {key: np.concatenate([p[key] for p in parts]) for key in parts[0]}

  without = ask(None)
  out: dict[str, Any] = {
    'without_nll': float(without['nll'].mean()), 'without_exact': float(without['exact'].mean()),
    'distances': list(DISTANCES), 'gain': [], 'gain_error': [], 'exact': [],
  }  # fmt: skip
  for distance in DISTANCES:
    found = ask(distance)
    gain, error = _mean_and_error(without['nll'] - found['nll'])
    out['gain'].append(gain)
    out['gain_error'].append(error)
    out['exact'].append(float(found['exact'].mean()))
  return out


def _recall(stage: Stage, batches: Sequence[Mapping[str, Any]]) -> list[float]:
  """Per layer, of the attention that the stage trains with."""
  step = make_eval_step(stage.model, Objective(mtp_steps=0), recall=True)
  sums = [jax.device_get(step(stage.params, batch)) for batch in batches]
  total, valid = (sum(s[k] for s in sums) for k in ('recall', 'valid'))
  return (total / valid).tolist()


def _window_recall(stage: Stage, batches: Sequence[Mapping[str, Any]]) -> list[float]:
  sums = [jax.device_get(window_recall(stage.params, batch, stage.model)) for batch in batches]
  total, valid = (sum(s[i] for s in sums) for i in (0, 1))
  return (total / valid).tolist()


def measure(pipeline: pathlib.Path) -> Iterator[dict[str, Any]]:
  """The result, as it grows: after every mode that is measured.

  Args:
    pipeline: the folder of `python -m experiments.run --config=configs/nano_pipeline.py`. Modes of
      a stage that it does not have are left out, and the stage is named under 'missing'.
  """
  names = (DENSE, WARM, SPARSE)
  there = [n for n in names if (pipeline / n / 'result.json').is_file()]
  there = [
    n for n in there if json.loads((pipeline / n / 'result.json').read_text())['evaluations']
  ]
  stages = {name: load(pipeline / name) for name in there}
  settings = json.loads((pipeline / DENSE / 'config.json').read_text(encoding='utf-8'))
  corpus = runs.corpus_of(pipeline / DENSE, settings)
  batches = data.make_eval_batches(corpus).batches
  filler = runs.held_out_rows(corpus, settings['data']['seq_len'] + 1, NEEDLES)
  kinds = {
    'secret': needle.secrets(corpus.tokenizer, NEEDLES, seed=0),
    'quote': needle.quotes(corpus.tokenizer, data.held_out_texts(corpus), NEEDLES, seed=0),
  }
  result: dict[str, Any] = {
    'index_topk': stages[DENSE].model.index_topk, 'seq_len': settings['data']['seq_len'],
    'needles': NEEDLES, 'missing': [n for n in names if n not in there], 'modes': {}, 'recall': {},
  }  # fmt: skip
  for name, stage in stages.items():
    result['recall'][name] = _recall(stage, batches[:RECALL_BATCHES])
  result['recall']['window'] = _window_recall(stages[DENSE], batches[:RECALL_BATCHES])
  yield result
  for mode in (m for m in MODES if m.stage in stages):
    stage = stages[mode.stage]
    sums = [_loss(stage.params, b, mode, stage.model) for b in batches[:LOSS_BATCHES]]
    nll, weight = (float(sum(s[i] for s in sums)) for i in (0, 1))
    result['modes'][mode.name] = {
      'stage': mode.stage, 'loss': nll / weight, 'loss_tokens': round(weight),
      'needles': {k: measure_needles(stage, mode, v, filler) for k, v in kinds.items()},
    }  # fmt: skip
    yield result
