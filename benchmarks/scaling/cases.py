"""What is compiled: training steps of five model sizes on 1 to 4,096 chips, and one layer of GLM-5.

Every case is one `python -m experiments.aot_compile --plan`; nothing is run.
"""

import math
import sys
from collections.abc import Mapping
from typing import Any, NamedTuple

ROW = 4096  # Tokens of a row in the models' cases, and of a chip in a micro-batch.
MICRO_BATCHES = 16
STEP_TOKENS = 1 << 20  # Of a step in the layer's cases, whatever the length of a row.
# Experts and rows share this axis, as in the 744B configs; fewer chips are all on it.
EXPERT_DEVICES = 8

# What is a power of two of chips here, by shape.
SHAPES = {
  1: '2x2x1', 4: '2x2x1', 16: '2x2x4', 64: '4x4x4', 256: '4x8x8', 512: '8x8x8', 1024: '8x8x16',
  2048: '8x16x16', 4096: '16x16x16',
}  # fmt: skip


class Model(NamedTuple):
  """A size: how it differs from GLM-5, and the largest `mesh.fsdp` that divides its matrices."""

  fields: Mapping[str, Any]
  chips: tuple[int, ...]
  fsdp: int


def _fields(**changes: float | str) -> tuple[str, ...]:
  return tuple(f'model.{name}={value}' for name, value in changes.items())


# 1B has GLM-5's proportions and head dimensions. 30B is GLM-4.7-Flash as its config.json has it
# (https://huggingface.co/zai-org/GLM-4.7-Flash), with GLM-5's indexers, which pre-training leaves
# alone.
MODELS = {
  'nano': Model(dict(size='nano'), (1, 4, 64), 32),
  '30M': Model(dict(size='small'), (1, 4, 64), 64),
  '1B': Model(
    dict(
      hidden_size=1024, num_hidden_layers=16, first_k_dense_replace=1, intermediate_size=4096,
      moe_intermediate_size=512, n_routed_experts=32, num_experts_per_tok=4, vocab_size=32768,
      num_attention_heads=8, num_key_value_heads=8, q_lora_rank=512, kv_lora_rank=256,
      index_n_heads=8,
    ),
    (1, 4, 64, 512), 256,
  ),
  '30B': Model(
    dict(
      hidden_size=2048, num_hidden_layers=47, first_k_dense_replace=1, intermediate_size=10240,
      moe_intermediate_size=1536, n_routed_experts=64, num_experts_per_tok=4, q_lora_rank=768,
      num_attention_heads=20, num_key_value_heads=20, routed_scaling_factor=1.8,
    ),
    (16, 64, 256, 1024, 4096), 256,
  ),
  '744B': Model({}, (256, 1024, 2048, 4096), 512),
}  # fmt: skip


class Case(NamedTuple):
  """One compile: a config, the chips, and what is changed in the config."""

  config: str
  topology: str
  changes: tuple[str, ...]

  def command(self) -> list[str]:
    changes = [f'--config.{change}' for change in self.changes]
    config = f'--config=configs/glm5_744b_{self.config}'
    return [sys.executable, '-m', 'experiments.aot_compile', config, *changes,
            f'--topology={self.topology}', '--plan']  # fmt: skip


def model_case(
  model: str, chips: int, micro_batches: int = MICRO_BATCHES, context: int = 1
) -> Case:
  """A step of pre-training; in a micro-batch a chip has a row of 4,096, or 1 / `context` of one.

  Args:
    model: one of MODELS.
    chips: one of SHAPES.
    micro_batches: of a step.
    context: chips that share a row.
  """
  expert = min(EXPERT_DEVICES, chips)
  fsdp = min(MODELS[model].fsdp, chips // expert // context)
  data = chips // (expert * fsdp * context)
  rows = chips // context
  mesh = (f'mesh.{axis}={n}' for axis, n in
          (('data', data), ('fsdp', fsdp), ('expert', expert), ('context', context)))  # fmt: skip
  changes = (
    *_fields(**MODELS[model].fields), *mesh, f'data.batch_size={rows * micro_batches}',
    f'train.grad_accum={micro_batches}', 'train.batch_warmup_rows=0', 'train.batch_warmup_steps=0',
  )  # fmt: skip
  return Case('pretrain.py', f'v5p:{SHAPES[chips]}', changes)


def models() -> dict[str, Case]:
  """Weak scaling of every size, then 744B at a fixed batch and with a quarter of a row a chip."""
  cases = {
    f'{name}, {chips} chips': model_case(name, chips)
    for name, model in MODELS.items()
    for chips in model.chips
  }
  rows = 16384  # 64 Mi tokens.
  cases['744B, 4096 chips, 64 Mi tokens'] = model_case('744B', 4096, rows // 4096)
  cases['744B, 1024 chips, rows over 4'] = model_case('744B', 1024, rows // 256, context=4)
  return cases


ATTENTION = ('dense', 'sparse', 'sparse, no kernels')
# Length of a row -> chips, more than one where they would not hold it: they divide the queries.
LENGTHS = {4096 << i: (1 if i < 6 else 4 if i == 6 else 16) for i in range(9)}
# The longest that compiles in minutes. Splash attention describes its mask on the host, in a time that
# grows with the square of the row; what has no kernels is a loop over chunks with all their keys.
LONGEST = {'dense': 131072, 'sparse': 1 << 20, 'sparse, no kernels': 32768}


def layer_case(kind: str, length: int) -> Case:
  """One layer of GLM-5 with next to no feed-forward or vocabulary: its attention, in training.

  A step has 1 Mi tokens, so that what is done once a step weighs the same at every length.
  """
  rows, chips = STEP_TOKENS // length, LENGTHS[length]
  changes = (
    *_fields(num_hidden_layers=1, first_k_dense_replace=1, num_nextn_predict_layers=0,
             intermediate_size=256, vocab_size=256, max_position_embeddings=STEP_TOKENS),
    'model.remat=block_but_attention', 'train.mtp_steps=0', 'optim.name=adamw', f'mesh.context={chips}',
    'mesh.fsdp=1', 'mesh.expert=1', f'data.seq_len={length}', f'data.batch_size={rows}',
    f'train.grad_accum={rows}', *(['train.kernels=reference'] if kind.endswith('no kernels') else []),
  )  # fmt: skip
  config = 'midtrain.py:128k' if kind == 'dense' else 'dsa_sparse.py'
  return Case(config, f'v5p:{SHAPES[chips]}', changes)


def layers() -> dict[str, Case]:
  """Dense and sparse attention by length, as far as they compile quickly."""
  return {
    f'{kind}, {length >> 10}K': layer_case(kind, length)
    for kind in ATTENTION
    for length in LENGTHS
    if length <= LONGEST[kind]
  }


def shape_chips(topology: str) -> int:
  """Chips of 'v5p:AxBxC'."""
  return math.prod(map(int, topology.partition(':')[2].split('x')))
