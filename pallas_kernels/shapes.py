"""The shapes that tests, benchmarks and tuning share. Letters are those of the ops' docstrings.

GLM-5 (arXiv 2602.15763, Table 10): 64 heads over latent rows of 512 + 64, an indexer of 32 heads of
128, top 2,048, sequences up to 202,752.
"""

from typing import Literal, NamedTuple, TypeVar

Regime = Literal['test', 'train', 'prefill', 'decode']


class Indexer(NamedTuple):
  """A call of `indexer_topk`."""

  name: str
  regime: Regime
  time: int  # T
  keys: int  # S
  heads: int = 32  # I
  dim: int = 128  # J
  topk: int = 2048  # K
  batch: int = 1
  dtype: str = 'bfloat16'
  block_q: int | None = None


class Decode(NamedTuple):
  """A call of `indexer_topk_paged` or `sparse_mla_paged`: new tokens over pages of a cache."""

  name: str
  regime: Regime
  batch: int  # B, sequences.
  time: int  # T, new tokens of each.
  keys: int  # S, tokens of each.
  page_size: int = 64
  index_heads: int = 32  # I
  index_dim: int = 128  # J
  heads: int = 64  # N
  latent_dim: int = 512  # L
  rope_dim: int = 64  # R
  topk: int = 2048  # K
  dtype: str = 'bfloat16'


# Training and prefill work on chunks of queries; T = 4,096 queries are enough to compile.
_INDEXER = (
  Indexer('train-4k', 'train', 4096, 4096),
  Indexer('train-32k', 'train', 4096, 32768),
  Indexer('train-128k', 'train', 4096, 131072),
  Indexer('train-200k', 'train', 4096, 202752),
  Indexer('prefill-32k', 'prefill', 2048, 32768),
  Indexer('decode-128k', 'decode', 8, 131072, batch=4),
  # The block is what decides how the kernel lays out its scores, so tests fix it.
  Indexer('test-odd', 'test', 7, 37, heads=3, dim=5, topk=6, dtype='float32', block_q=128),
  Indexer('test-one-query', 'test', 1, 301, heads=4, dim=16, topk=400),
  Indexer('test-blocks', 'test', 130, 2500, heads=2, dim=16, topk=130, batch=2, block_q=128),
  Indexer('test-four-groups', 'test', 40, 17000, heads=3, dim=16, topk=40, block_q=32),
  Indexer('test-long', 'test', 5, 21000, heads=2, dim=16, topk=260, block_q=128),
  # The compaction takes two parts at a time; the last of three is alone.
  Indexer('test-three-parts', 'test', 4, 9000, heads=2, dim=16, topk=140, block_q=128),
)

_DECODE = (
  Decode('decode-4k', 'decode', 16, 1, 4096),
  Decode('decode-8k', 'decode', 64, 1, 8192),
  Decode('decode-128k', 'decode', 64, 1, 131072),
  Decode('drafts-4k', 'decode', 16, 4, 4096),
  Decode('drafts-8k', 'decode', 16, 4, 8192),
  Decode('drafts-128k', 'decode', 16, 4, 131072),
)

# Add an op: its NamedTuple (name and regime first) above, its shapes here.
ALL: tuple[Indexer | Decode, ...] = _INDEXER + _DECODE

_Shape = TypeVar('_Shape', Indexer, Decode)


def select(kind: type[_Shape], *regimes: Regime) -> list[_Shape]:
  """The shapes of one op, of some regimes; of all but 'test' if none is named."""
  wanted = regimes or ('train', 'prefill', 'decode')
  return [shape for shape in ALL if isinstance(shape, kind) and shape.regime in wanted]
