"""The stages of the recipe: what each one trains, by which losses, and with which attention.

  stage        attention            trains                               by
  pretrain,    as the model's       the main model;                      language-model losses;
  midtrain,    sparse_attention     if sparse, the indexers too          KL over the selected keys
  sft
  dsa_warmup   dense                the indexers, nothing else           KL over all visible keys
  dsa_sparse   sparse               the main model and the indexers      both, KL over the selected keys

GLM-5 (section 2.1.1) pre-trains and mid-trains with dense attention, then converts the model by the
last two. Whatever a stage does not train stays as it is bit for bit: it has no gradient, no state in
the optimizer and no weight decay. The indexers see detached inputs and have a loss of their own, so
what trains them and what trains the rest never meet (tests/train/test_stages.py, parameter by
parameter).
"""

import dataclasses
from typing import Any

import jax

from glm5_jax.config import ModelConfig

STAGES = ('pretrain', 'midtrain', 'dsa_warmup', 'dsa_sparse', 'sft')
# The attention of a stage where the config does not choose it.
_SPARSE = {'dsa_warmup': False, 'dsa_sparse': True}


@dataclasses.dataclass(frozen=True)
class Stage:
  """Which parameters train; each part has its own losses, so this says which losses there are.

  Attributes:
    main: Everything but the indexers: by cross-entropy, MTP and balance losses.
    indexers: By the KL from the attention distribution (losses/indexer_kl.py).
  """

  main: bool = True
  indexers: bool = True

  @property
  def trains(self) -> str:
    """In words, for reports."""
    if not self.main:
      return 'the indexers only'
    return 'everything' if self.indexers else 'everything but indexers'

  def split(self, params: Any) -> tuple[Any, Any]:
    """The trained and the frozen parameters, as trees with None in the place of the others."""

    def where(trained: bool):
      return jax.tree_util.tree_map_with_path(
        lambda path, x: x if self._trains(path) == trained else None, params
      )

    return where(True), where(False)

  def _trains(self, path: tuple[Any, ...]) -> bool:
    return self.indexers if any(key.key == 'indexer' for key in path) else self.main


EVERYTHING = Stage()


def merge(a: Any, b: Any) -> Any:
  """The inverse of `Stage.split`: leaves of `a`, and of `b` where `a` has None."""
  return jax.tree.map(lambda x, y: y if x is None else x, a, b, is_leaf=lambda x: x is None)


def resolve(name: str, model: ModelConfig, asked: bool | None) -> tuple[ModelConfig, Stage]:
  """The model with the stage's attention, and what the stage trains.

  Args:
    name: one of STAGES.
    model: as the config describes it.
    asked: the config's own model.sparse_attention; None if it leaves that to the stage.

  Raises:
    ValueError: an unknown stage, or one that contradicts the model.
  """
  if name not in STAGES:
    raise ValueError(f'unknown stage {name!r}, known are {list(STAGES)}')
  sparse = _SPARSE.get(name, model.sparse_attention)
  if asked is not None and asked != sparse:
    attention = 'sparse' if sparse else 'dense'
    raise ValueError(
      f'stage {name!r} has {attention} attention: leave out model.sparse_attention={asked}'
    )
  if model.attention == 'gqa':
    if name in _SPARSE:
      raise ValueError(f"stage {name!r} needs model.attention='mla': 'gqa' has no indexers")
    return model, Stage(main=True, indexers=False)
  model = model.replace(sparse_attention=sparse)
  return model, Stage(main=name != 'dsa_warmup', indexers=sparse or name == 'dsa_warmup')
