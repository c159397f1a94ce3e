"""The golden models, loaded once."""

from typing import NamedTuple

import pytest

from glm5_jax.config import ModelConfig
from tests import tiny


class Golden(NamedTuple):
  """A model and what the reference implementation computed with it."""

  config: ModelConfig
  params: dict
  tensors: dict  # By checkpoint name.
  raw: dict  # config.json
  reference: dict

  @property
  def ids(self):
    return self.reference['input_ids'].astype('int32')


@pytest.fixture(scope='session')
def plain(tmp_path_factory) -> Golden:
  """Every layer has its own indexer, as in GLM-5."""
  loaded = tiny.load_golden_model(tmp_path_factory.mktemp('plain'))
  return Golden(*loaded, tiny.golden('tiny_golden'))


@pytest.fixture(scope='session')
def index_share(tmp_path_factory) -> Golden:
  """Layers 2 and 3 reuse the selection of layer 1 (GLM-5.2's IndexShare)."""
  types = ['full', 'full', 'shared', 'shared']
  loaded = tiny.load_golden_model(tmp_path_factory.mktemp('shared'), indexer_types=types)
  return Golden(*loaded, tiny.golden('tiny_golden_shared'))


@pytest.fixture(scope='session')
def with_mtp(tmp_path_factory) -> Golden:
  """The plain model and an MTP layer."""
  loaded = tiny.load_golden_model(tmp_path_factory.mktemp('mtp'), num_nextn_predict_layers=1)
  return Golden(*loaded, tiny.golden('tiny_mtp'))
