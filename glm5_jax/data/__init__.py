"""Text to batches: sources, tokenizers, packing and the resumable training iterator.

corpus = load_corpus(DataConfig.from_mapping({'seq_len': 512}))
batches = make_train_iterator(corpus)
held_out = make_eval_batches(corpus)
"""

from glm5_jax.data.config import DataConfig, InfillingConfig, SourceConfig, TokenizerConfig
from glm5_jax.data.corpus import Corpus, load_corpus
from glm5_jax.data.held_out import (
  EvalSet,
  compression_baselines,
  held_out_texts,
  make_eval_batches,
)
from glm5_jax.data.pipeline import TrainIterator, make_train_iterator
from glm5_jax.data.report import DataError, DataReport
from glm5_jax.data.tokenizer import ByteTokenizer, Tokenizer, load_tokenizer, train_bpe

__all__ = [
  'ByteTokenizer',
  'Corpus',
  'DataConfig',
  'DataError',
  'DataReport',
  'EvalSet',
  'InfillingConfig',
  'SourceConfig',
  'Tokenizer',
  'TokenizerConfig',
  'TrainIterator',
  'compression_baselines',
  'held_out_texts',
  'load_corpus',
  'load_tokenizer',
  'make_eval_batches',
  'make_train_iterator',
  'train_bpe',
]
