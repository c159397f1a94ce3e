"""What a finished run amounts to: held-out score, compressors, samples, a look into the indexer."""

import dataclasses
import pathlib
from collections.abc import Mapping
from typing import Any

import jax
import numpy as np

from glm5_jax import data
from glm5_jax.compile import jit_once
from glm5_jax.config import ModelConfig
from glm5_jax.infer.generate import generate
from glm5_jax.modules.block import Options
from glm5_jax.modules.model import forward
from glm5_jax.train import plots
from glm5_jax.train.evaluate import Evaluation, evaluate
from glm5_jax.train.placement import Placement
from glm5_jax.train.step import Objective, make_eval_step

# A captured forward pass holds [layers, heads, T, T]; beyond this many elements there is no map.
_CAPTURE_BUDGET = 1 << 27


@dataclasses.dataclass(frozen=True)
class Run:
  """What the report is about; `measured` adds what takes a pass over the held-out files.

  Attributes:
    path: The run's folder.
    config: The run config as plain dicts.
    command: What a person typed.
    model, corpus: As trained.
    step: The last step taken.
    stopped: Why before the end, or empty.
    compile_seconds: Of the training step.
    objective: What it was trained for.
    parameters: See `count_params`.
    evaluations: Over all held-out documents, by attention ('dense', 'sparse'): that of the stage, and on
      request (eval.both_attentions) the other as well.
    baselines: Bits per byte of general compressors on the same texts.
    samples: Title -> (prompt, continuation).
    selection: For the map.
  """

  path: pathlib.Path
  config: Mapping[str, Any]
  command: str
  model: ModelConfig
  corpus: data.Corpus
  step: int
  stopped: str
  compile_seconds: float
  objective: Objective
  parameters: tuple[int, int]
  evaluations: Mapping[str, Evaluation] = dataclasses.field(default_factory=dict)
  baselines: Mapping[str, float] = dataclasses.field(default_factory=dict)
  samples: Mapping[str, tuple[str, str]] = dataclasses.field(default_factory=dict)
  selection: plots.Selection | None = None

  @property
  def evaluation(self) -> Evaluation | None:
    """With the attention of the stage."""
    return self.evaluations.get(_attention(self.model))

  def measured(
    self, params: Any, evaluation: Evaluation, held_out: data.EvalSet, place: Placement
  ) -> 'Run':
    """With the final evaluation, the compressors on the same texts, samples, a selection map.

    The last two are made by one device: there are none of a model that is too large for it.
    """
    evaluations = {_attention(self.model): evaluation}
    if self.config['eval']['both_attentions'] and self.model.attention == 'mla':
      other = self.model.replace(sparse_attention=not self.model.sparse_attention)
      eval_step = make_eval_step(other, self.objective, recall=True, mesh=place.mesh)
      evaluations[_attention(other)] = evaluate(place.eval_step(eval_step), params, held_out)
    texts = data.held_out_texts(self.corpus)
    whole = place.together(params)
    return dataclasses.replace(
      self,
      evaluations=evaluations,
      baselines=data.compression_baselines(texts) if texts else {},
      samples={} if whole is None else _samples(whole, self),
      selection=None if whole is None else _selection(whole, self.model, held_out),
    )


def _attention(model: ModelConfig) -> str:
  return 'sparse' if model.sparse_attention and model.attention == 'mla' else 'dense'


def count_params(params: Any) -> tuple[int, int]:
  """Of the main model and of the MTP layer; the routers' correction biases are no parameters."""
  main = mtp = 0
  for path, leaf in jax.tree_util.tree_flatten_with_path(params)[0]:
    keys = [k.key for k in path]
    if keys[-2:] != ['router', 'bias']:
      if keys[0] == 'mtp':
        mtp += leaf.size
      else:
        main += leaf.size
  return main, mtp


def _samples(params: Any, run: Run) -> dict[str, tuple[str, str]]:
  """One cautious and one varied continuation of the configured or a held-out prompt."""
  count = run.config['eval']['sample_tokens']
  if not count:
    return {}
  tokenizer = run.corpus.tokenizer
  text, prompt = run.config['eval']['prompt'], []
  if text:
    prompt = [tokenizer.eot_id]  # Which precedes every document in training.
  else:
    text = _prompt([t.decode() for t in data.held_out_texts(run.corpus)])
  # Not beyond the positions that training has seen.
  room = max(1, run.corpus.config.seq_len - count - len(prompt))
  ids = tokenizer.encode(text)[-room:].tolist()
  prompt += ids
  out = {}
  for temperature in (0.0, 0.8):
    (new,) = generate(
      params, [prompt], config=run.model, max_new_tokens=count, temperature=temperature,
      seed=run.config['seed'],
    )  # fmt: skip
    name = 'Most probable tokens' if temperature == 0 else f'Sampled at temperature {temperature}'
    out[name] = (tokenizer.decode(ids), tokenizer.decode(new))
  return out


def _prompt(texts: list[str]) -> str:
  """A dozen lines of the longest held-out text, up to a function's head if it has one."""
  lines = max(texts, key=len).split('\n')
  heads = [i for i, line in enumerate(lines) if i > 10 and line.lstrip().startswith('def ')]
  end = heads[len(heads) // 2] + 1 if heads else min(12, len(lines))
  return '\n'.join(lines[max(0, end - 12) : end]) + '\n'


def _selection(params: Any, model: ModelConfig, held_out: data.EvalSet) -> plots.Selection | None:
  """The last layer that has an indexer, on the held-out row with the longest document."""
  rows = [(batch, i) for batch in held_out.batches[:8] for i in range(len(batch['tokens']))]
  batch, i = max(rows, key=lambda r: int(r[0]['positions'][r[1]].max()))
  row = {k: batch[k][i : i + 1] for k in ('tokens', 'positions', 'segment_ids')}
  time = row['tokens'].shape[1]
  layers = model.num_hidden_layers * model.num_attention_heads * time * time
  found = [
    (stack, j)
    for stack in model.stacks
    for j, block in enumerate(stack.blocks)
    if block.indexer == 'full'
  ]
  if not found or not model.sparse_attention or layers > _CAPTURE_BUDGET:
    return None
  stack, j = found[-1]

  def look(params, tokens, positions, segment_ids):
    out = forward(
      params, tokens, config=model, positions=positions, segment_ids=segment_ids, logits=False,
      options=Options(capture=True, form='expanded'),
    )  # fmt: skip
    aux = out.aux[stack.name][f'block{j}']
    # [repeats, B, T, S] and [repeats, B, T, N, S]
    return aux['selected'][-1, 0], aux['probs'][-1, 0].mean(axis=1)

  selected, probs = jax.device_get(jit_once(look)(params, **row))
  segment = row['segment_ids'][0]
  visible = np.tril((segment[:, None] == segment[None]) & (segment > 0))
  layer = stack.first_layer + (stack.repeats - 1) * len(stack.blocks) + j
  return plots.Selection(
    layer, model.num_attention_heads, model.index_topk, visible, selected & visible, probs
  )
