"""Settings of the data pipeline: frozen dataclasses, built from any plain mapping."""

import dataclasses
import difflib
from collections.abc import Mapping
from typing import Any, Literal, TypeVar, get_args

from glm5_jax.data.report import DataError

SourceKind = Literal['stdlib', 'text', 'jsonl', 'parquet', 'array_record', 'chat']

# The standard library without tests, and without two applications that Linux distributions ship
# apart (idlelib, lib2to3) or files that describe one build (sysconfig): much the same on every
# machine of one Python version, 596 files and 10.5 MiB on 3.11.
STDLIB_EXCLUDE = (
  '*-packages', 'test', 'tests', 'idle_test', 'idlelib', 'lib2to3',
  '_sysconfigdata*', 'config-*', '__pycache__',
)  # fmt: skip
DEFAULT_PATTERNS = {
  'stdlib': ('**/*.py',),
  'text': ('**/*',),
  'jsonl': ('**/*.jsonl',),
  'parquet': ('**/*.parquet',),
  'array_record': ('**/*.array_record*',),
  'chat': ('**/*.jsonl',),
}


T = TypeVar('T')


def _build(cls: type[T], mapping: Any) -> T:
  if isinstance(mapping, cls):
    return mapping
  if not hasattr(mapping, 'items'):
    raise DataError(f'{cls.__name__} needs a mapping, not {type(mapping).__name__} {mapping!r}')
  names = [f.name for f in dataclasses.fields(cls)]  # type: ignore[arg-type]
  values = {}
  for key, value in mapping.items():
    if key not in names:
      near = difflib.get_close_matches(key, names, n=1, cutoff=0.4)
      hint = f'; did you mean {near[0]!r}?' if near else f'; known: {", ".join(names)}'
      raise DataError(f'{cls.__name__} has no field {key!r}{hint}')
    values[key] = tuple(value) if isinstance(value, list) else value
  return cls(**values)


def _check_choices(config: Any) -> None:
  for field in dataclasses.fields(config):
    choices = get_args(field.type)
    value = getattr(config, field.name)
    if choices and all(isinstance(c, str) for c in choices) and value not in choices:
      raise DataError(f'{type(config).__name__}.{field.name} is {value!r}; one of {choices} wanted')


@dataclasses.dataclass(frozen=True)
class SourceConfig:
  """One collection of documents.

  Attributes:
    kind: 'stdlib' (the running interpreter's own library, read in place), 'text' (a file is a
      document, unless `separator` is given), 'jsonl', 'parquet', 'array_record', or 'chat' (JSONL, a
      conversation in OpenAI's form a line; see data/conversations.py).
    path: Files, folders or glob patterns; unused by 'stdlib'.
    name: Name in logs; by default the kind and the last part of the path.
    weight: Share of the training rows (hence of tokens) of the mixture, relative to the others.
    patterns: Which files of a folder to take; by default those of the kind.
    exclude: File or folder names to leave out, with wildcards ('.*' is hidden files).
    field: Key or column with the text. Empty for 'array_record': the record is the text itself.
    separator: For 'text': what separates documents within a file, e.g. a blank line ('\\n\\n').
    licence: Of the documents; quoted in the report.
    fim: Whether `DataConfig.fim_rate` applies; False for prose beside code. Never to 'chat'.
    chat_format: For 'chat': whose template, '5', '5.1' or '5.2'.
    clear_thinking: For 'chat': whether reasoning before the last user message is dropped. Then a
      conversation of n turns becomes n samples, each with the history that the model would see, and
      only the last turn is learnt in each. False (preserved thinking) learns all turns in one sample.
  """

  kind: SourceKind = 'stdlib'
  path: str | tuple[str, ...] = ()
  name: str = ''
  weight: float = 1.0
  patterns: tuple[str, ...] = ()
  exclude: tuple[str, ...] = ('.*', '__pycache__')
  field: str = 'text'
  separator: str = ''
  licence: str = ''
  fim: bool = True
  chat_format: Literal['5', '5.1', '5.2'] = '5'
  clear_thinking: bool = False

  @property
  def paths(self) -> tuple[str, ...]:
    return (self.path,) if isinstance(self.path, str) else tuple(self.path)

  def __post_init__(self):
    _check_choices(self)
    if self.kind != 'stdlib' and not any(self.paths):
      raise DataError(f'a {self.kind!r} source needs `path` (files, folders or glob patterns)')
    if self.weight <= 0:
      raise DataError(f'the weight of a source must be positive, not {self.weight}')
    if self.kind == 'stdlib':
      object.__setattr__(self, 'exclude', (*self.exclude, *STDLIB_EXCLUDE))
      if not self.licence:
        object.__setattr__(self, 'licence', 'PSF-2.0 (Python standard library, read in place)')
    if not self.patterns:
      object.__setattr__(self, 'patterns', DEFAULT_PATTERNS[self.kind])
    if not self.name:
      tail = self.paths[0].rstrip('/').rpartition('/')[2] if self.paths else ''
      object.__setattr__(self, 'name', f'{self.kind}:{tail}' if tail else self.kind)


@dataclasses.dataclass(frozen=True)
class TokenizerConfig:
  """Which tokenizer.

  Attributes:
    kind: 'bpe' trains a byte-level BPE on the training documents, 'byte' is one token per byte,
      'file' reads any tokenizer.json (GLM's own, for instance).
    vocab_size: For 'bpe': number of tokens, GLM's 36 special ones included.
    path: For 'file': a tokenizer.json, or a folder with one.
    eot: Token that ends a document; by default '<|endoftext|>' or what the file calls it.
    train_bytes: For 'bpe': at most this much text of each source is looked at.
  """

  kind: Literal['bpe', 'byte', 'file'] = 'bpe'
  vocab_size: int = 4096
  path: str = ''
  eot: str = ''
  train_bytes: int = 64 * 2**20

  def __post_init__(self):
    _check_choices(self)
    if self.kind == 'file' and not self.path:
      raise DataError("tokenizer kind 'file' needs `path`, a tokenizer.json or its folder")


def _check_shares(config: Any, *names: str) -> None:
  for name in names:
    if not 0 <= getattr(config, name) <= 1:
      raise DataError(
        f'{type(config).__name__}.{name} is {getattr(config, name)!r}; it must lie in [0, 1]'
      )


@dataclasses.dataclass(frozen=True)
class InfillingConfig:
  """What GLM blank infilling hides (data/infilling.py; the original's names in brackets).

  A sample hides spans, with `span_prob`; whole sentences, with `sentence_prob`; otherwise one long
  span, "generation". The defaults are GLM-130B's (arXiv 2210.02414, section 2.2): 30 % spans, 70 %
  generation. GLM-10B's: 0.5, 0.3, suffix_prob 0.5, min_generation 0.25, block_mask_prob 0.1.

  Attributes:
    span_prob: Of spans with lengths from a Poisson distribution [bert_prob].
    sentence_prob: Of sentences [gap_sentence_prob].
    suffix_prob: Of a generation sample: that the hidden span is the end of the text rather than
      anywhere in it [gpt_infill_prob].
    min_generation: Shortest hidden span of generation, as a share of the text [gpt_min_ratio].
    mask_ratio: Share of the tokens that spans hide, at least [bert_ratio].
    sentence_ratio: The same of sentences [gap_sentence_ratio].
    single_span_prob: That only one span is hidden.
    block_mask_prob: Share of the inputs within spans replaced by [dBLOCK], which GLM-4.5 and later
      tokenizers lack.
    shuffle_spans: Part B has the spans in random order, or in that of the text [shuffle_blocks].
    task_masks: [sMASK] and [gMASK] for sentences and generation, or [MASK] for all [task_mask].
    block_positions: Row 1 of the positions counts within a span, or is 1 [block_position_encoding].
    random_position: Positions begin at a random number.
  """

  span_prob: float = 0.3
  sentence_prob: float = 0.0
  suffix_prob: float = 1.0
  min_generation: float = 0.5
  mask_ratio: float = 0.15
  sentence_ratio: float = 0.15
  single_span_prob: float = 0.0
  block_mask_prob: float = 0.0
  shuffle_spans: bool = True
  task_masks: bool = True
  block_positions: bool = True
  random_position: bool = False

  def __post_init__(self):
    _check_shares(
      self, 'span_prob', 'sentence_prob', 'suffix_prob', 'min_generation', 'mask_ratio',
      'sentence_ratio', 'single_span_prob', 'block_mask_prob',
    )  # fmt: skip
    if self.span_prob + self.sentence_prob > 1 + 1e-9:
      raise DataError(
        f'InfillingConfig.span_prob {self.span_prob} and sentence_prob {self.sentence_prob} must '
        'not exceed 1 together; the rest is generation'
      )
    if not self.mask_ratio or not self.sentence_ratio:
      raise DataError('InfillingConfig.mask_ratio and sentence_ratio must be positive')


def _sources(value: Any) -> tuple[SourceConfig, ...]:
  if isinstance(value, list | tuple):
    return tuple(_build(SourceConfig, item) for item in value)
  if hasattr(value, 'items') and value and all(hasattr(v, 'items') for v in value.values()):
    return tuple(_build(SourceConfig, {'name': n, **dict(v.items())}) for n, v in value.items())
  return (_build(SourceConfig, value),)


@dataclasses.dataclass(frozen=True)
class DataConfig:
  """Everything that determines the batches.

  Attributes:
    sources: Training documents; with several, `weight` gives their shares.
    validation_sources: Held-out documents. By default a part of `sources` is held out.
    validation_fraction: That part: by whole files ('stdlib', 'text'), else by documents. Chosen by
      hash, so a document stays on its side when others come or go.
    tokenizer: See `TokenizerConfig`.
    seq_len: Row length T in tokens.
    batch_size: Rows in a batch, over all processes.
    packing: 'concat' lays documents end to end and cuts every T tokens (GLM-4.5's pre-training,
      arXiv 2508.06471 section 2.3); 'best_fit' and 'first_fit' keep documents whole where they fit
      (GLM-4.5's mid-training uses best fit).
    long_documents: A document longer than a row is 'split' over rows, left out ('skip') or 'fatal'.
    objective: 'next_token', or 'infilling': GLM's blank infilling (data/infill_rows.py), for which
      batches have a `prefix` as well.
    infilling: See `InfillingConfig`.
    fim_rate: Share of the training documents rearranged for fill-in-the-middle (data/fim.py).
    fim_spm_rate: Of those, the share with the suffix before the prefix.
    on_bad: 'skip' counts and reports bad documents, 'fatal' stops at the first.
    seed: Of the order of documents and rows.
    prefetch: Batches made ahead by a thread; 0 makes them when asked for.
    cache_dir: Where trained tokenizers and tokenized documents are kept; '' keeps nothing.
  """

  sources: tuple[SourceConfig, ...] = (SourceConfig(),)
  validation_sources: tuple[SourceConfig, ...] = ()
  validation_fraction: float = 0.05
  tokenizer: TokenizerConfig = TokenizerConfig()
  seq_len: int = 512
  batch_size: int = 8
  packing: Literal['concat', 'first_fit', 'best_fit'] = 'concat'
  long_documents: Literal['split', 'skip', 'fatal'] = 'split'
  objective: Literal['next_token', 'infilling'] = 'next_token'
  infilling: InfillingConfig = InfillingConfig()
  fim_rate: float = 0.0
  fim_spm_rate: float = 0.0
  on_bad: Literal['skip', 'fatal'] = 'skip'
  seed: int = 0
  prefetch: int = 4
  cache_dir: str = '~/.cache/glm5_jax'

  def __post_init__(self):
    _check_choices(self)
    if not self.sources:
      raise DataError('`sources` is empty; name at least one, e.g. {"kind": "stdlib"}')
    if self.seq_len < 1 or self.batch_size < 1:
      raise DataError(f'seq_len {self.seq_len} and batch_size {self.batch_size} must be positive')
    if not 0 <= self.validation_fraction < 1:
      raise DataError(f'validation_fraction {self.validation_fraction} must lie in [0, 1)')
    _check_shares(self, 'fim_rate', 'fim_spm_rate')
    if self.objective == 'infilling':
      if self.packing == 'concat':
        raise DataError(
          "objective 'infilling' needs documents kept apart, which packing 'concat' does not do: set "
          "packing to 'best_fit' or 'first_fit'"
        )
      if self.long_documents != 'split' or self.seq_len < 16:
        raise DataError(
          "objective 'infilling' needs rows of at least 16 tokens and long_documents='split', not "
          f'seq_len {self.seq_len} and {self.long_documents!r}'
        )
      if any(s.kind == 'chat' for s in (*self.sources, *self.validation_sources)):
        raise DataError("objective 'infilling' is for texts; a 'chat' source needs 'next_token'")
      if self.fim_rate:
        raise DataError("fim_rate is for objective 'next_token'; infilling hides spans itself")
    if self.fim_rate and self.seq_len < 8:
      raise DataError(f'fim_rate needs rows of at least 8 tokens, not seq_len {self.seq_len}')

  def rows_per_process(self, index: int, count: int) -> int:
    """Rows of the batch that process `index` of `count` makes.

    Raises:
      DataError: The batch cannot be divided.
    """
    if not 0 <= index < count or self.batch_size % count:
      raise DataError(
        f'batch_size {self.batch_size} cannot be divided among {count} processes '
        f'(this is number {index})'
      )
    return self.batch_size // count

  @classmethod
  def from_mapping(cls, mapping: Mapping[str, Any]) -> 'DataConfig':
    """Builds the settings from a dict or an ml_collections.ConfigDict.

    Sources are a list of mappings, one mapping, or a mapping from names to mappings; the last form
    suits command lines (`--config.data.sources.stdlib.weight=2`).

    Raises:
      DataError: A key is unknown (the message names the nearest one) or a value impossible.
    """
    values = dict(mapping.items())
    for key in ('sources', 'validation_sources'):
      if key in values:
        values[key] = _sources(values[key])
    if 'tokenizer' in values:
      values['tokenizer'] = _build(TokenizerConfig, values['tokenizer'])
    if 'infilling' in values:
      values['infilling'] = _build(InfillingConfig, values['infilling'])
    return _build(cls, values)
