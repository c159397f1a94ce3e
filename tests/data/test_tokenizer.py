"""Tokenizers: GLM's special tokens, round trips, determinism, foreign files and bad ones."""

import json

import numpy as np
import pytest
import tokenizers
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.data.report import DataError
from glm5_jax.data.tokenizer import ByteTokenizer, load_tokenizer, train_bpe

TEXTS = [
  'def f(x):\n    return x + 12345  # naïve\n\n\nclass A:\n\tpass\n' * 3,
  "it's what we'll do; 你好，世界。 Ünïcödé\r\n" * 5,
]
# A busy machine is no failure.
PROPERTY = settings(deadline=None)
BYTES = ByteTokenizer()
BPE = train_bpe(TEXTS, 400)
BOTH = pytest.mark.parametrize('tokenizer', [BYTES, BPE], ids=['byte', 'bpe'])


@BOTH
@PROPERTY
@given(text=st.text())
def test_round_trip(tokenizer, text):
  ids = tokenizer.encode(text)
  assert ids.dtype == np.int32
  valid = text.encode('utf-8', 'replace').decode()
  assert tokenizer.decode(ids) == valid


@BOTH
@PROPERTY
@given(data=st.data())
def test_decode_takes_any_ids(tokenizer, data):
  ids = data.draw(st.lists(st.integers(-3, tokenizer.vocab_size + 3)))
  text = tokenizer.decode(ids)
  assert text.encode().decode() == text
  unknown = sum(not 0 <= i < tokenizer.vocab_size for i in ids)
  assert text.count('\N{REPLACEMENT CHARACTER}') >= unknown


@PROPERTY
@given(data=st.binary())
def test_byte_ids_are_the_bytes(data):
  assert BYTES.decode(list(data)) == data.decode('utf-8', 'replace')
  text = data.decode('utf-8', 'replace')
  assert bytes(BYTES.encode(text).tolist()) == text.encode()


def test_lone_surrogate_counts_as_question_mark():
  for tokenizer in (BYTES, BPE):
    assert tokenizer.decode(tokenizer.encode('a\ud800b')) == 'a?b'


@BOTH
def test_special_tokens_follow_the_base_vocabulary(tokenizer):
  base = tokenizer.vocab_size - 36
  assert list(tokenizer.special_ids.values()) == list(range(base, base + 36))
  # Spot checks of GLM's order: offsets from the first id.
  offsets = {name: i - base for name, i in tokenizer.special_ids.items()}
  assert offsets['<|endoftext|>'] == 0
  assert offsets['[gMASK]'] == 2
  assert offsets['<|observation|>'] == 9
  assert offsets['<think>'] == 21
  assert offsets['/nothink'] == 31
  assert offsets['<|video|>'] == 35
  assert tokenizer.eot_id == base


def test_special_tokens_and_pattern_are_those_of_glm(shared):
  table = json.loads((shared / 'data/tokenizer/glm_special_tokens.json').read_text())
  wanted = table['glm5_family']['added_tokens']
  ours = BPE._spec['added_tokens']
  first = wanted[0]['id']
  for a, b in zip(ours, wanted, strict=True):
    assert (a['id'] - BPE.eot_id, a['content'], a['special']) == (
      b['id'] - first,
      b['content'],
      b['special'],
    )
    assert not (a['normalized'] or a['lstrip'] or a['rstrip'])
  split = BPE._spec['pre_tokenizer']['pretokenizers'][0]
  assert split['pattern']['Regex'] == table['pipeline']['pre_tokenizer_split_regex']


def test_text_never_becomes_a_control_token_unless_allowed():
  text = 'a<|endoftext|>b<think>/nothink'
  for tokenizer in (BYTES, BPE):
    special = set(tokenizer.special_ids.values())
    assert not special & set(tokenizer.encode(text).tolist())
    allowed = tokenizer.encode(text, allow_special=True).tolist()
    names = ['<|endoftext|>', '<think>', '/nothink']
    assert [i for i in allowed if i in special] == [tokenizer.special_ids[n] for n in names]
    assert tokenizer.decode(allowed) == text


def test_pieces_never_join_what_glm_splits():
  text = '12345 words_here\n\n  x'
  pieces = [BPE.decode([i]) for i in BPE.encode(text)]
  # Borders of GLM's pattern that must also be borders between tokens.
  ends = np.cumsum([len(p) for p in pieces]).tolist()
  for border in (3, 5, 11, 16, 18, 19):
    assert border in ends, (border, pieces)


def test_training_is_deterministic_and_sized():
  again = train_bpe(iter(TEXTS), 400)
  assert again.fingerprint == BPE.fingerprint
  assert train_bpe(TEXTS, 350).fingerprint != BPE.fingerprint
  assert train_bpe(TEXTS, 350).vocab_size == 350
  assert len(BPE.encode(TEXTS[0])) < len(BYTES.encode(TEXTS[0])) / 2
  with pytest.raises(DataError, match='vocab_size >= 292'):
    train_bpe(TEXTS, 291)


def test_short_corpus_gives_fewer_tokens_and_says_so(caplog):
  tokenizer = train_bpe(['ab'], 1000)
  assert tokenizer.vocab_size == 256 + 1 + 36
  assert 'of the 1000 asked for' in caplog.text


@BOTH
def test_saved_file_is_a_tokenizer_json(tokenizer, tmp_path):
  path = tokenizer.save(tmp_path)
  loaded = load_tokenizer(tmp_path)
  plain = tokenizers.Tokenizer.from_file(str(path))
  for text in [*TEXTS, 'x <think> y']:
    ids = tokenizer.encode(text, allow_special=True).tolist()
    assert loaded.encode(text, allow_special=True).tolist() == ids
    assert plain.encode(text).ids == ids
    assert loaded.decode(ids) == tokenizer.decode(ids) == text
  assert loaded.fingerprint == tokenizer.fingerprint
  assert [p.name for p in tmp_path.iterdir()] == ['tokenizer.json']


def word_level(tmp_path, specials):
  """A tokenizer.json of another family, with truncation and padding switched on."""
  model = tokenizers.models.WordLevel({'[UNK]': 0, 'to': 1, 'be': 2}, unk_token='[UNK]')
  foreign = tokenizers.Tokenizer(model)
  foreign.pre_tokenizer = tokenizers.pre_tokenizers.Whitespace()
  foreign.add_special_tokens(specials)
  foreign.enable_truncation(2)
  foreign.enable_padding(length=8)
  path = tmp_path / 'foreign.json'
  foreign.save(str(path))
  return path


def test_foreign_tokenizer_json(tmp_path):
  tokenizer = load_tokenizer(word_level(tmp_path, ['</s>', '<extra>']))
  assert tokenizer.eot_id == tokenizer.special_ids['</s>'] == 3
  assert tokenizer.vocab_size == 5
  # Neither cut to two tokens nor padded to eight.
  assert tokenizer.encode('to be to be').tolist() == [1, 2, 1, 2]
  assert load_tokenizer(tmp_path / 'foreign.json', eot='<extra>').eot_id == 4


def test_unusable_tokenizer_files_are_named(tmp_path):
  path = word_level(tmp_path, ['<extra>'])
  with pytest.raises(DataError, match=r'foreign\.json.*no end-of-document token.*<extra>'):
    load_tokenizer(path)
  with pytest.raises(DataError, match=r'foreign\.json.*no end-of-document token .<none>'):
    load_tokenizer(path, eot='<none>')
  for content in ('{"model": ', '[]', '{}', '{"model": {"type": "BPE"}}'):
    path.write_text(content)
    with pytest.raises(DataError, match=r'foreign\.json'):
      load_tokenizer(path)
  with pytest.raises(DataError, match=r'absent/tokenizer.*cannot be read'):
    load_tokenizer(tmp_path / 'absent/tokenizer.json')
