"""What a stage takes over from the run before it: the parameters and the tokenizer, nothing else.

The optimizer starts afresh (our choice; the paper does not say): a new stage has another learning
rate, often another length and other parameters to train, and Muon's momentum forgets within twenty
steps. The indexer may differ from the run before, or be new: what the checkpoint lacks of it keeps its
initial values.
"""

import dataclasses
import json
import pathlib
from collections.abc import Mapping
from typing import Any

from glm5_jax import data
from glm5_jax.config import ModelConfig
from glm5_jax.data import TokenizerConfig
from glm5_jax.train.checkpoint import CheckpointError, Checkpoints
from glm5_jax.train.prepare import build_model_config

# Fields of ModelConfig that a stage may change without making it another model.
_MAY_DIFFER = frozenset({
  'rope_theta', 'rope_scaling', 'max_position_embeddings', 'sparse_attention', 'index_topk',
  'index_n_heads', 'index_head_dim', 'indexer_rope', 'index_norm_eps', 'initializer_range',
  'index_share_for_mtp_iteration', 'eos_token_id', 'pad_token_id', 'dtype', 'remat', 'offload_inputs',
  'scan_unroll',   'expert_matmul', 'expert_capacity', 'expert_overflow', 'attention_chunk_elements',
})  # fmt: skip


class Handover:
  """The run in `folder` as the start of another one.

  Raises:
    CheckpointError: there is no such folder, no run or no checkpoint in it, or the run is of another
      model than `model` (lists the differences).
  """

  def __init__(self, folder: str, model: ModelConfig):
    self.folder = pathlib.Path(folder).expanduser().absolute()
    if not self.folder.is_dir():
      raise CheckpointError(f'init_from={folder} does not exist; name the folder of a run')
    try:
      self._config = json.loads((self.folder / 'config.json').read_text(encoding='utf-8'))
      before = build_model_config(self._config['model'])
    except (OSError, ValueError, KeyError, TypeError) as e:
      raise CheckpointError(f'init_from={folder} is not the folder of a run: {e}') from None
    self._checkpoints = Checkpoints(self.folder / 'checkpoints')
    if not self._checkpoints.steps():
      raise CheckpointError(f'init_from={folder} has no checkpoint yet; run that stage first')
    different = model_changes(before, model)
    if different:
      raise CheckpointError(f'init_from={folder} is another model: {"; ".join(different)}')

  def params(self, like: Any) -> tuple[int, Any]:
    """The step and the parameters of the newest usable checkpoint, None where it has no such indexer.

    Args:
      like: the parameter tree of the new run, of `jax.ShapeDtypeStruct`s or arrays.

    Raises:
      CheckpointError: no checkpoint is usable, or the parameters do not fit (lists the differences).
    """
    return self._checkpoints.restore_params(like, optional='.indexer.')

  def tokenizer(self, wanted: Mapping[str, Any] | None = None) -> TokenizerConfig:
    """The run's own tokenizer, so that ids mean the same.

    Args:
      wanted: the new run's `data.tokenizer`; None does not compare.

    Raises:
      CheckpointError: `wanted` is another tokenizer than the run's config asked for.
    """
    asked = self._config['data']['tokenizer']
    different = tokenizer_changes(asked, asked if wanted is None else wanted)
    if different:
      raise CheckpointError(
        f'init_from={self.folder} has another tokenizer, whose ids mean something else:'
        f' {"; ".join(different)}. Set data.tokenizer as that run has it.'
      )
    return saved_tokenizer(self.folder, asked)


def model_changes(before: ModelConfig, after: ModelConfig) -> list[str]:
  """What makes `after` another model than `before`, as text; empty if it can take its parameters."""
  return [
    f'{f.name} was {getattr(before, f.name)}, is {getattr(after, f.name)}'
    for f in dataclasses.fields(ModelConfig)
    if f.name not in _MAY_DIFFER and getattr(before, f.name) != getattr(after, f.name)
  ]


def tokenizer_changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> list[str]:
  """How two configs' `data.tokenizer` differ, as text."""
  return [
    f'data.tokenizer.{key} was {before.get(key)!r}, is {after.get(key)!r}'
    for key in sorted({*before, *after})
    if before.get(key) != after.get(key)
  ]


def saved_tokenizer(folder: pathlib.Path, wanted: Mapping[str, Any]) -> TokenizerConfig:
  """The tokenizer that a run left in its folder; `wanted` is what its config asked for."""
  return data.TokenizerConfig(
    'file', path=str(folder / 'tokenizer.json'), eot=wanted.get('eot', '')
  )
