"""The training runs behind the evidence: one tiny model, the project's own loop, a folder a run.

A run is named by what differs, so parts share runs, and the same command again trains only what is
missing. Its folder is an ordinary one (glm5_jax/train/workdir.py), with a report.
"""

import functools
import json
import pathlib
from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

import jax
import numpy as np
import orbax.checkpoint as ocp
from ml_collections import ConfigDict

from configs.base import base
from configs.base import model as base_model
from glm5_jax import data
from glm5_jax.config import ModelConfig
from glm5_jax.modules.model import abstract_params, init_params
from glm5_jax.train import loop, metrics, result
from glm5_jax.train.checkpoint import Checkpoints
from glm5_jax.train.handover import saved_tokenizer
from glm5_jax.train.prepare import prepare
from glm5_jax.train.workdir import write_atomically

STEPS = 200
# The attention of Table 1 with dims divided by 8, and heads by 16: MLA had 96 heads of 128 + 64 and
# values of 128, MLA-256 has 64 of 192 + 64 and 256. GQA has 8 query heads of 128 / 8, so that it
# has as many parameters as MLA; the dense layer's width makes up for what MLA-256 has more.
MLA = dict(
  num_attention_heads=6, num_key_value_heads=6, q_lora_rank=64, kv_lora_rank=32,
  qk_nope_head_dim=16, qk_rope_head_dim=8, v_head_dim=16,
)  # fmt: skip
MLA_256 = MLA | dict(
  num_attention_heads=4, num_key_value_heads=4, qk_nope_head_dim=24, v_head_dim=32,
  intermediate_size=352,
)  # fmt: skip
GQA = MLA | dict(
  attention='gqa', num_attention_heads=8, num_key_value_heads=2, qk_nope_head_dim=8
)  # fmt: skip


class Variant(NamedTuple):
  """What a run is.

  Attributes:
    name: Of the model and objective, without the optimizer.
    optimizer: muon_split | muon | adamw.
    rate: Peak learning rate.
    model: Fields of ModelConfig that differ from those of `config`.
    train: Keys of the run config's `train` section that differ.
  """

  name: str
  optimizer: str
  rate: float
  model: Mapping[str, Any] = MLA
  train: Mapping[str, Any] = {}

  def folder(self, workdir: pathlib.Path, seed: int) -> pathlib.Path:
    return workdir / 'runs' / f'{self.name}-{self.optimizer}-{self.rate:g}-seed{seed}'


def config(variant: Variant, seed: int, steps: int = STEPS) -> ConfigDict:
  """The run config: 1.2M parameters, dense attention, rows of 256 tokens of the stdlib's source."""
  c = base()
  c.seed = c.data.seed = seed
  c.model = base_model(
    'nano', **dict(
      vocab_size=2048, num_hidden_layers=3, first_k_dense_replace=1, intermediate_size=384,
      moe_intermediate_size=64, n_routed_experts=8, num_experts_per_tok=2, index_n_heads=1,
      index_head_dim=8, sparse_attention=False, num_nextn_predict_layers=0,
    ) | dict(variant.model)
  )  # fmt: skip
  c.data.tokenizer.vocab_size = 2048
  c.data.validation_fraction = 0.01
  c.data.seq_len, c.data.batch_size = 256, 4
  c.optim.name, c.optim.peak_lr, c.optim.end_lr = variant.optimizer, variant.rate, variant.rate / 10
  c.optim.warmup_steps = steps // 10
  c.train.steps, c.train.mtp_steps = steps, 0
  c.train.update(variant.train)
  c.eval.every, c.eval.batches, c.eval.sample_tokens = max(1, steps // 4), 4, 0
  # All of them are kept, for what is measured over the course of training.
  c.checkpoint.every, c.checkpoint.keep_last, c.checkpoint.keep_best = max(1, steps // 10), 99, 0
  return c


def trained(workdir: pathlib.Path, variant: Variant, seed: int) -> pathlib.Path:
  """The folder of a finished run, trained now if it is not there yet.

  Raises:
    RuntimeError: training stopped before its end.
  """
  folder = variant.folder(workdir, seed)
  settings = config(variant, seed)
  if not result.is_finished(folder, settings.train.steps):
    # Runs that differ in seed only compile the same programs.
    jax.config.update('jax_compilation_cache_dir', str(workdir.absolute() / 'compiled'))
    loop.train(settings, str(folder), command=f'python -m benchmarks.recipe ({folder.name})')
  if not result.is_finished(folder, settings.train.steps):
    raise RuntimeError(f'{folder} was stopped; the same command continues it')
  return folder


def remembered(folder: pathlib.Path, measure: Callable[[], dict[str, Any]]) -> dict[str, Any]:
  """What `measure` found about the run in `folder`, which is asked once and kept there."""
  path = folder / 'measured.json'
  if not path.is_file():
    write_atomically(path, json.dumps(measure()) + '\n')
  return json.loads(path.read_text(encoding='utf-8'))


def rows(folder: pathlib.Path) -> list[dict[str, Any]]:
  """The rows of a run's metrics.jsonl."""
  return metrics.read(folder / 'metrics.jsonl')


def loss(folder: pathlib.Path) -> float:
  """Nats per token over all held-out files, of a finished run."""
  found = result.read(folder)
  assert found is not None
  return float(next(iter(found['evaluations'].values()))['loss'])


def model_of(variant: Variant) -> ModelConfig:
  """The model of a variant, with the attention of its stage."""
  return prepare(config(variant, 0)).model


def parameters(model: ModelConfig) -> int:
  """Of the main model, without indexers (dense training leaves them alone) and router biases."""
  leaves = jax.tree_util.tree_flatten_with_path(abstract_params(model))[0]
  paths = [(jax.tree_util.keystr(path), leaf.size) for path, leaf in leaves]
  skipped = ("['mtp']", "['indexer']", "['router']['bias']")
  return sum(size for path, size in paths if not any(s in path for s in skipped))


def saved_steps(folder: pathlib.Path) -> list[int]:
  """The steps of a run that have a checkpoint, ascending."""
  return Checkpoints(folder / 'checkpoints').steps()


def params_at(folder: pathlib.Path, model: ModelConfig, step: int, seed: int = 0) -> Any:
  """Parameters after `step` steps, which has a checkpoint; step 0 is the initial ones of `seed`."""
  if step == 0:
    return init_params(model, jax.random.key(seed))
  with ocp.StandardCheckpointer() as reader:
    path = (folder / 'checkpoints' / str(step) / 'params').absolute()
    like = jax.tree.map(
      lambda a: jax.ShapeDtypeStruct(
        a.shape, a.dtype, sharding=jax.sharding.SingleDeviceSharding(jax.devices()[0])
      ),
      abstract_params(model),
    )
    return reader.restore(path, like)


def newest_params(folder: pathlib.Path, model: ModelConfig) -> Any:
  """Parameters at the end of a run."""
  return params_at(folder, model, saved_steps(folder)[-1])


def corpus_of(folder: pathlib.Path, settings: Mapping[str, Any]) -> data.Corpus:
  """The corpus of the run in `folder`, with the tokenizer that it saved.

  Args:
    folder: of the run.
    settings: its config.
  """
  section = dict(settings['data'])
  section['tokenizer'] = saved_tokenizer(folder, section['tokenizer'])
  return data.load_corpus(data.DataConfig.from_mapping(section))


@functools.cache
def held_out() -> tuple[data.Corpus, data.EvalSet]:
  """The corpus and the held-out batches of `config`, which are the same for all of its runs."""
  corpus = data.load_corpus(prepare(config(Variant('any', 'adamw', 1.0), 0)).data)
  return corpus, data.make_eval_batches(corpus)


def held_out_rows(corpus: data.Corpus, length: int, count: int, seed: int = 0) -> np.ndarray:
  """[count, length] int32: stretches of held-out documents, each of one document.

  They do not overlap, and come from all over the documents.

  Raises:
    ValueError: the held-out documents have fewer such stretches.
  """
  pieces = []
  for text in data.held_out_texts(corpus):
    ids = corpus.tokenizer.encode(text.decode())
    pieces += [ids[i : i + length] for i in range(0, len(ids) - length + 1, length)]
  if len(pieces) < count:
    raise ValueError(
      f'the held-out documents have {len(pieces)} stretches of {length} tokens, not {count}: ask'
      ' for fewer, or hold out more (data.validation_fraction)'
    )
  order = np.random.default_rng(seed).permutation(len(pieces))[:count]
  return np.stack([pieces[i] for i in order])
