"""Tokenizers: any tokenizer.json, a byte-level BPE trained here, or plain bytes.

All three carry GLM's 36 special tokens after the base vocabulary, in the order of GLM's own
tokenizer.json (GLM-4.5 to GLM-5.2), so code that speaks of `<|endoftext|>` or `<think>` by name
works with each. Text is split as GLM splits it.
"""

import functools
import hashlib
import json
import logging
import os
import pathlib
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tokenizers
from tokenizers import models, pre_tokenizers, trainers

from glm5_jax.data.config import TokenizerConfig
from glm5_jax.data.report import DataError

END_OF_TEXT = '<|endoftext|>'
# In the order of their ids. The first 18 are "special" in the file, i.e. dropped by decoders that
# are told to skip special tokens; the rest are ordinary added tokens.
SPECIAL_TOKENS = (
  END_OF_TEXT, '[MASK]', '[gMASK]', '[sMASK]', '<sop>', '<eop>',
  '<|system|>', '<|user|>', '<|assistant|>', '<|observation|>',
  '<|begin_of_image|>', '<|end_of_image|>', '<|begin_of_video|>', '<|end_of_video|>',
  '<|begin_of_audio|>', '<|end_of_audio|>',
  '<|begin_of_transcription|>', '<|end_of_transcription|>',
  '<|code_prefix|>', '<|code_middle|>', '<|code_suffix|>',
  '<think>', '</think>', '<tool_call>', '</tool_call>', '<tool_response>', '</tool_response>',
  '<arg_key>', '</arg_key>', '<arg_value>', '</arg_value>', '/nothink',
  '<|begin_of_box|>', '<|end_of_box|>', '<|image|>', '<|video|>',
)  # fmt: skip
NUM_SKIPPABLE = 18

# GLM's pre-tokenizer (that of cl100k_base): contractions, words with one leading mark or space,
# up to three digits, punctuation, line ends, white space.
SPLIT_PATTERN = (
  r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}|"
  r' ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+'
)
# Names of the end of a document in other families' files, tried in this order.
_OTHER_ENDS = ('<|end_of_text|>', '<｜end▁of▁sentence｜>', '</s>', '<eos>', '<|im_end|>', '[SEP]')
# Ids that no token has (a model may have more rows than its tokenizer has tokens) decode to this.
_UNKNOWN = '\N{REPLACEMENT CHARACTER}'

_log = logging.getLogger(__name__)


class Tokenizer:
  """Text to ids and back, over the content of a tokenizer.json.

  Attributes:
    vocab_size: One more than the largest id.
    eot_id: Id of the token that ends (and, in a row, precedes) every document.
    special_ids: Name -> id of every added token.
    fingerprint: Hash of the content; equal fingerprints mean equal ids for every text.
  """

  def __init__(self, spec: dict[str, Any], eot: str = ''):
    # Truncation and padding belong to a model's input, not to its tokenizer.
    self._spec = {**spec, 'truncation': None, 'padding': None}
    # Text from a corpus must never produce a control token, so it meets a tokenizer without any.
    self._plain = _backend({**self._spec, 'added_tokens': []})
    self.special_ids: dict[str, int] = {t['content']: t['id'] for t in spec['added_tokens']}
    names = [eot] if eot else [END_OF_TEXT, *_OTHER_ENDS]
    found = [name for name in names if name in self.special_ids]
    if not found:
      raise DataError(
        f'the tokenizer has no end-of-document token {" or ".join(map(repr, names))}; set `eot` to '
        f'one of its added tokens: {", ".join(self.special_ids) or "(none)"}'
      )
    self.eot_id = self.special_ids[found[0]]
    ids = self._plain.get_vocab().values()
    self.vocab_size = max(max(ids, default=-1), *self.special_ids.values()) + 1
    self._canonical = json.dumps(self._spec, ensure_ascii=False, sort_keys=True)
    self.fingerprint = hashlib.sha256(f'{found[0]}\0{self._canonical}'.encode()).hexdigest()

  @functools.cached_property
  def _full(self) -> tokenizers.Tokenizer:
    return _backend(self._spec)

  def encode(self, text: str, allow_special: bool = False) -> np.ndarray:
    """Ids [n] int32 of a text.

    Args:
      text: Any string; lone surrogates count as '?'.
      allow_special: Whether names of special tokens in the text become those tokens. Off by
        default, so that no document can end itself or open a turn.
    """
    return self.encode_batch([text], allow_special)[0]

  def encode_batch(self, texts: Sequence[str], allow_special: bool = False) -> list[np.ndarray]:
    """`encode` of several texts, in parallel."""
    backend = self._full if allow_special else self._plain
    encodings = backend.encode_batch_fast([_valid(t) for t in texts], add_special_tokens=False)
    return [np.array(e.ids, np.int32) for e in encodings]

  def decode(self, ids: Iterable[int]) -> str:
    """Text of any ids; incomplete UTF-8 and unknown ids become U+FFFD, special tokens their names.

    Never fails: a sampled id may be any row of the model's embedding.
    """
    text: list[str] = []
    run: list[int] = []
    for token in map(int, ids):
      if 0 <= token < self.vocab_size and self._full.id_to_token(token) is not None:
        run.append(token)
      else:
        text += [self._decode_known(run), _UNKNOWN]
        run = []
    return ''.join([*text, self._decode_known(run)])

  def _decode_known(self, ids: list[int]) -> str:
    return self._full.decode(ids, skip_special_tokens=False) if ids else ''

  def special(self, name: str, purpose: str) -> int:
    """Id of an added token that `purpose` needs.

    Raises:
      DataError: There is none of that name.
    """
    if name not in self.special_ids:
      raise DataError(f'{purpose} needs a tokenizer with the token {name!r}, which this one lacks')
    return self.special_ids[name]

  def save(self, directory: str | os.PathLike[str]) -> pathlib.Path:
    """Writes `directory`/tokenizer.json, which transformers and `load_tokenizer` read; atomic."""
    path = pathlib.Path(directory, 'tokenizer.json')
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f'.{path.name}.{os.getpid()}')
    partial.write_text(json.dumps(self._spec, ensure_ascii=False, indent=1), encoding='utf-8')
    partial.replace(path)
    return path


class ByteTokenizer(Tokenizer):
  """One token per byte of UTF-8 (id = the byte), then GLM's special tokens: 292 ids."""

  def __init__(self, eot: str = ''):
    vocab = {char: byte for byte, char in enumerate(_byte_characters())}
    super().__init__(_spec(vocab, [], [{**_BYTE_LEVEL, 'use_regex': False}]), eot)

  def encode_batch(self, texts: Sequence[str], allow_special: bool = False) -> list[np.ndarray]:
    if allow_special:
      return super().encode_batch(texts, allow_special)
    return [np.frombuffer(_valid(t).encode(), np.uint8).astype(np.int32) for t in texts]

  def _decode_known(self, ids: list[int]) -> str:
    names = {token: name.encode() for name, token in self.special_ids.items()}
    data = b''.join(names[i] if i > 255 else bytes([i]) for i in ids)
    return data.decode('utf-8', 'replace')


def load_tokenizer(path: str | os.PathLike[str], eot: str = '') -> Tokenizer:
  """Reads a tokenizer.json, or the one in a folder.

  Args:
    path: The file or folder.
    eot: Name of the token that ends a document, if it is not one of the usual ones.

  Raises:
    DataError: The file is absent or no tokenizer.json, or has no such token.
  """
  file = pathlib.Path(path).expanduser()
  file = file / 'tokenizer.json' if file.is_dir() else file
  try:
    spec = json.loads(file.read_text(encoding='utf-8'))
  except (OSError, ValueError) as error:
    raise DataError(f'{file}: cannot be read as a tokenizer.json: {error}') from error
  if not isinstance(spec, dict) or 'model' not in spec:
    raise DataError(f'{file}: not a tokenizer.json: an object with a "model" was expected')
  spec.setdefault('added_tokens', [])
  try:
    return Tokenizer(spec, eot)
  except DataError as error:
    raise DataError(f'{file}: {error}') from error


def train_bpe(texts: Iterable[str], vocab_size: int, eot: str = '') -> Tokenizer:
  """Trains a byte-level BPE with GLM's pre-tokenizer; the same texts give the same tokenizer.

  Args:
    texts: The corpus.
    vocab_size: Number of tokens with the 36 special ones; fewer come out if the texts are short.
    eot: As in `load_tokenizer`.

  Raises:
    DataError: `vocab_size` has no room for 256 bytes and the special tokens.
  """
  smallest = 256 + len(SPECIAL_TOKENS)
  if vocab_size < smallest:
    raise DataError(
      f'a byte-level BPE needs vocab_size >= {smallest} (256 bytes and {len(SPECIAL_TOKENS)} '
      f'special tokens), not {vocab_size}'
    )
  bpe = tokenizers.Tokenizer(models.BPE())
  split = pre_tokenizers.Split(tokenizers.Regex(SPLIT_PATTERN), 'isolated')
  byte_level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
  bpe.pre_tokenizer = pre_tokenizers.Sequence([split, byte_level])
  trainer = trainers.BpeTrainer(
    vocab_size=vocab_size - len(SPECIAL_TOKENS),
    initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
    show_progress=False,
  )
  bpe.train_from_iterator(map(_valid, texts), trainer)
  trained = json.loads(bpe.to_str())
  model = trained['model']
  tokenizer = Tokenizer(
    _spec(model['vocab'], model['merges'], trained['pre_tokenizer']['pretokenizers']), eot
  )
  if tokenizer.vocab_size < vocab_size:
    _log.warning('the texts gave %d tokens of the %d asked for', tokenizer.vocab_size, vocab_size)
  return tokenizer


def make_tokenizer(config: TokenizerConfig, texts: Iterable[str]) -> Tokenizer:
  """The tokenizer a config asks for; `texts` are only consumed if one has to be trained."""
  if config.kind == 'file':
    return load_tokenizer(config.path, config.eot)
  if config.kind == 'byte':
    return ByteTokenizer(config.eot)
  return train_bpe(texts, config.vocab_size, config.eot)


_BYTE_LEVEL = {
  'type': 'ByteLevel', 'add_prefix_space': False, 'trim_offsets': False, 'use_regex': False,
}  # fmt: skip


def _spec(vocab: dict[str, int], merges: list, pre_tokenizer: list[dict]) -> dict[str, Any]:
  """A tokenizer.json with GLM's pipeline and special tokens around a vocabulary."""
  added = [
    {
      'id': len(vocab) + i, 'content': name, 'single_word': False, 'lstrip': False,
      'rstrip': False, 'normalized': False, 'special': i < NUM_SKIPPABLE,
    }
    for i, name in enumerate(SPECIAL_TOKENS)
  ]  # fmt: skip
  # An ignored merge means that a piece which is itself a token is never taken apart, as in GLM.
  model = {'type': 'BPE', 'ignore_merges': True, 'vocab': vocab, 'merges': merges}
  return {
    'version': '1.0',
    'added_tokens': added,
    'normalizer': None,
    'pre_tokenizer': {'type': 'Sequence', 'pretokenizers': pre_tokenizer},
    'post_processor': _BYTE_LEVEL,
    'decoder': _BYTE_LEVEL,
    'model': model,
  }


def _backend(spec: dict[str, Any]) -> tokenizers.Tokenizer:
  try:
    return tokenizers.Tokenizer.from_str(json.dumps(spec, ensure_ascii=False))
  except Exception as error:  # The library raises bare Exception.
    raise DataError(f'not a usable tokenizer.json: {error}') from error


def _valid(text: str) -> str:
  try:
    text.encode()
  except UnicodeEncodeError:
    return text.encode('utf-8', 'replace').decode()
  return text


def _byte_characters() -> list[str]:
  """The printable character that stands for each byte in byte-level vocabularies (GPT-2's table).

  Printable bytes stand for themselves; the others follow from U+0100 on, in order.
  """
  printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
  rest = iter(range(256, 512))
  return [chr(byte) if byte in printable else chr(next(rest)) for byte in range(256)]
