"""The whole pipeline: determinism, resuming, sharding, mixtures, the split, evaluation, caches."""

import collections
import dataclasses
import gzip
import itertools
import json
import lzma
import pathlib
import random
import time

import grain
import ml_collections
import numpy as np
import orbax.checkpoint as ocp
import pytest

from glm5_jax import data
from glm5_jax.data import store as store_lib
from glm5_jax.data.tokenizer import Tokenizer

PACKINGS = ['concat', 'first_fit', 'best_fit']


@pytest.fixture(scope='module')
def texts(tmp_path_factory):
  """A folder of 60 texts of lower-case words, and a JSONL file of 80 of upper-case ones."""
  folder = tmp_path_factory.mktemp('texts')
  rng = random.Random(0)
  words = [''.join(rng.choices('abcdefghij', k=rng.randint(2, 7))) for _ in range(50)]

  def text(n):
    return ' '.join(rng.choices(words, k=n))

  for i in range(60):
    (folder / f'{i:02}.txt').write_text(text(rng.randint(1, 60)))
  lines = [json.dumps({'text': text(rng.randint(1, 40)).upper()}) for _ in range(80)]
  (folder / 'upper.jsonl').write_text('\n'.join(lines) + '\n')
  return folder


def make_config(texts, mixture=False, **options):
  lower = {'kind': 'text', 'path': str(texts), 'patterns': ['*.txt'], 'name': 'lower'}
  upper = {'kind': 'jsonl', 'path': str(texts / 'upper.jsonl'), 'weight': 0.5, 'name': 'upper'}
  settings = {
    'sources': [lower, upper] if mixture else [lower],
    'validation_fraction': 0.2,
    'tokenizer': {'kind': 'byte'},
    'seq_len': 48,
    'batch_size': 4,
    'cache_dir': '',
  }
  return data.DataConfig.from_mapping({**settings, **options})


def take(iterator, n):
  return list(itertools.islice(iterator, n))


def assert_same(a, b):
  assert len(a) == len(b)
  for x, y in zip(a, b, strict=True):
    assert x.keys() == y.keys()
    for key in x:
      np.testing.assert_array_equal(x[key], y[key], err_msg=key)


def bigrams(batches):
  """How often each (segment start, token, target) counts in the loss."""
  counts = collections.Counter()
  for batch in batches:
    use = batch['weights'] > 0
    counts.update(zip(batch['tokens'][use].tolist(), batch['targets'][use].tolist(), strict=True))
  return counts


def expected_bigrams(parts, eot):
  counts = collections.Counter()
  for part in parts:
    for document in part.documents:
      file = part.store.origin(document)
      sequence = [eot, *read_document(file), eot]
      counts.update(itertools.pairwise(sequence))
  return counts


def read_document(origin):
  content = pathlib.Path(origin.path).read_bytes()
  if origin.line:
    content = json.loads(content.splitlines()[origin.line - 1])['text'].encode()
  return list(content)


@pytest.mark.parametrize('packing', PACKINGS)
def test_an_epoch_trains_on_every_byte_once(texts, packing):
  corpus = data.load_corpus(make_config(texts, packing=packing, batch_size=1))
  iterator = data.make_train_iterator(corpus)
  wanted = expected_bigrams(corpus.train, corpus.tokenizer.eot_id)
  first = take(iterator, iterator.rows_per_epoch['lower'])
  assert bigrams(first) == wanted
  assert iterator.epochs() == {'lower': 1.0}
  second = take(iterator, iterator.rows_per_epoch['lower'])
  assert bigrams(second) == wanted
  assert any((a['tokens'] != b['tokens']).any() for a, b in zip(first, second, strict=True))
  filled = sum(b['weights'].sum() for b in first)
  assert iterator.density['lower'] == pytest.approx(filled / (48 * len(first)))


def test_batch_format(texts):
  batch = next(data.make_train_iterator(data.load_corpus(make_config(texts))))
  assert {k: (v.shape, v.dtype.name) for k, v in batch.items()} == {
    'tokens': ((4, 48), 'int32'),
    'targets': ((4, 48), 'int32'),
    'weights': ((4, 48), 'float32'),
    'segment_ids': ((4, 48), 'int32'),
    'positions': ((4, 48), 'int32'),
  }


@pytest.mark.parametrize('prefetch', [0, 4])
@pytest.mark.parametrize('packing', PACKINGS)
def test_resumes_exactly(texts, packing, prefetch):
  """Mid-epoch and over an epoch's end, with a mixture, in a pipeline built from scratch."""
  config = make_config(texts, mixture=True, packing=packing, prefetch=prefetch)
  whole = take(data.make_train_iterator(data.load_corpus(config)), 150)
  for stop in (0, 1, 37, 120):
    iterator = data.make_train_iterator(data.load_corpus(config))
    assert_same(take(iterator, stop), whole[:stop])
    state = json.loads(json.dumps(iterator.get_state()))
    assert iterator.batches == stop
    iterator.close()
    resumed = data.make_train_iterator(data.load_corpus(config))
    take(resumed, 3)  # Wherever it was before.
    resumed.set_state(state)
    assert_same(take(resumed, 30), whole[stop : stop + 30])
    assert len(json.dumps(state)) < 1000
  epochs = data.make_train_iterator(data.load_corpus(config)).rows_per_epoch
  assert 2 * max(epochs.values()) < 150 * 4


def test_orbax_saves_and_restores_the_position(texts, tmp_path):
  corpus = data.load_corpus(make_config(texts))
  iterator = data.make_train_iterator(corpus)
  take(iterator, 5)
  with ocp.CheckpointManager(tmp_path / 'checkpoints') as manager:
    manager.save(5, args=ocp.args.Composite(data=grain.checkpoint.CheckpointSave(iterator)))
    manager.wait_until_finished()
    wanted = take(iterator, 3)
    fresh = data.make_train_iterator(corpus)
    manager.restore(5, args=ocp.args.Composite(data=grain.checkpoint.CheckpointRestore(fresh)))
  assert_same(take(fresh, 3), wanted)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'seq_len': 32}, 'seq_len was 48, is 32'),
    ({'packing': 'best_fit'}, "packing was 'concat', is 'best_fit'"),
    ({'seed': 1}, 'seed was 0, is 1'),
    ({'validation_fraction': 0.5}, 'documents was'),
    ({'mixture': True}, 'weights was'),
  ],
)
def test_a_position_in_other_data_is_refused(texts, change, message):
  state = data.make_train_iterator(data.load_corpus(make_config(texts))).get_state()
  other = data.make_train_iterator(data.load_corpus(make_config(texts, **change)))
  with pytest.raises(data.DataError, match=message):
    other.set_state(state)


@pytest.mark.parametrize('packing', PACKINGS)
def test_processes_share_each_batch(texts, packing):
  """Disjoint and complete: the blocks of 1, 2 or 4 processes are the same global batch."""
  corpus = data.load_corpus(make_config(texts, mixture=True, packing=packing))
  whole = take(data.make_train_iterator(corpus), 60)
  for count in (2, 4):
    shards = [take(data.make_train_iterator(corpus, p, count), 60) for p in range(count)]
    joined = [
      {key: np.concatenate([b[key] for b in blocks]) for key in blocks[0]}
      for blocks in zip(*shards, strict=True)
    ]
    assert_same(joined, whole)
  # A position saved by one process serves any number of them.
  state = data.make_train_iterator(corpus, 1, 2).get_state()
  assert state == data.make_train_iterator(corpus, 3, 4).get_state()
  with pytest.raises(data.DataError, match='batch_size 4 cannot be divided among 3'):
    data.make_train_iterator(corpus, 0, 3)


def test_seed_decides_the_order_and_nothing_else(texts):
  def first(seed):
    return take(data.make_train_iterator(data.load_corpus(make_config(texts, seed=seed))), 3)

  assert_same(first(0), first(0))
  assert any((a['tokens'] != b['tokens']).any() for a, b in zip(first(0), first(1), strict=True))


def test_mixture_has_the_asked_proportions(texts):
  corpus = data.load_corpus(make_config(texts, mixture=True))
  iterator = data.make_train_iterator(corpus)
  upper = []
  for batch in take(iterator, 300):
    letters = batch['tokens'][:, :, None]
    is_upper = ((letters >= ord('A')) & (letters <= ord('Z'))).any((1, 2))
    is_lower = ((letters >= ord('a')) & (letters <= ord('z'))).any((1, 2))
    assert (is_upper != is_lower).all()  # Sources do not share rows.
    upper += is_upper.tolist()
  assert np.mean(upper) == pytest.approx(1 / 3, abs=0.005)
  # Everywhere, not only on average.
  windows = np.convolve(upper, np.ones(30) / 30, 'valid')
  assert abs(windows - 1 / 3).max() < 0.05
  shares = {n: e * iterator.rows_per_epoch[n] for n, e in iterator.epochs().items()}
  assert shares == pytest.approx({'lower': 800, 'upper': 400})


def test_split_is_disjoint_stable_and_by_file(texts, tmp_path):
  def names(parts):
    return {p.store.origin(d).path for p in parts for d in p.documents}

  corpus = data.load_corpus(make_config(texts))
  train, held_out = names(corpus.train), names(corpus.validation)
  assert not train & held_out
  assert len(train | held_out) == 60
  assert 4 <= len(held_out) <= 22
  # A larger share keeps those held out already.
  more = data.load_corpus(make_config(texts, validation_fraction=0.4))
  assert held_out < names(more.validation)


@pytest.mark.parametrize('overlap', [0, 16])
def test_evaluation_covers_every_byte_once(texts, overlap):
  corpus = data.load_corpus(make_config(texts, mixture=True))
  held_out = data.make_eval_batches(corpus, overlap=overlap)
  assert bigrams(held_out.batches) == expected_bigrams(corpus.validation, corpus.tokenizer.eot_id)
  assert held_out.num_targets == sum(b['weights'].sum() for b in held_out.batches)
  contents = data.held_out_texts(corpus)
  assert held_out.num_bytes == sum(map(len, contents))
  assert held_out.num_documents == len(contents)
  # One target per byte, and one for each end.
  assert held_out.num_targets == held_out.num_bytes + held_out.num_documents
  assert all(b['tokens'].shape == (4, 48) for b in held_out.batches)
  assert_same(data.make_eval_batches(corpus, overlap=overlap).batches, held_out.batches)
  shards = [data.make_eval_batches(corpus, p, 2, overlap=overlap).batches for p in range(2)]
  assert len(shards[0]) == len(shards[1]) == len(held_out.batches)
  assert sum((bigrams(s) for s in shards), collections.Counter()) == bigrams(held_out.batches)


def test_small_evaluation_is_whole_documents(texts):
  corpus = data.load_corpus(make_config(texts, mixture=True))
  small = data.make_eval_batches(corpus, max_bytes=500)
  contents = data.held_out_texts(corpus, max_bytes=500)
  assert 500 <= small.num_bytes < data.make_eval_batches(corpus).num_bytes
  assert small.num_bytes == sum(map(len, contents))
  assert bigrams(small.batches) == sum(
    (
      collections.Counter(itertools.pairwise([256, *text, 256]))
      for text in contents
    ),
    collections.Counter(),
  )  # fmt: skip
  assert set(contents) < set(data.held_out_texts(corpus))
  assert len(data.held_out_texts(corpus, max_bytes=1)) == 1


def test_compression_baselines():
  files = [b'abc' * 1000, bytes(range(256)) * 4]
  found = data.compression_baselines(files)
  total = sum(map(len, files))
  assert found['xz_by_file'] == 8 * sum(len(lzma.compress(f, preset=9)) for f in files) / total
  assert found['gzip_together'] == 8 * len(gzip.compress(b''.join(files), 9)) / total
  assert found['gzip_by_file'] == 8 * sum(len(gzip.compress(f, 9)) for f in files) / total
  assert found['xz_together'] < found['xz_by_file']


def test_cache_spares_tokenizing_and_training(texts, tmp_path, monkeypatch):
  options = {'cache_dir': str(tmp_path / 'cache'), 'tokenizer': {'vocab_size': 320}}
  first = data.load_corpus(make_config(texts, **options))
  wanted = take(data.make_train_iterator(first), 5)

  def refuse(*args, **kwargs):
    raise AssertionError('tokenized again')

  monkeypatch.setattr(Tokenizer, 'encode_batch', refuse)
  monkeypatch.setattr(data.tokenizer, 'train_bpe', refuse)
  again = data.load_corpus(make_config(texts, **options))
  assert_same(take(data.make_train_iterator(again), 5), wanted)
  assert again.summary() == first.summary()
  # Another split or a changed file is another corpus.
  with pytest.raises(AssertionError, match='tokenized again'):
    data.load_corpus(make_config(texts, **{**options, 'validation_fraction': 0.5}))
  assert not [p for p in (tmp_path / 'cache').rglob('*') if 'partial' in p.name]


def test_damaged_cache_is_made_anew(texts, tmp_path, caplog):
  options = {'cache_dir': str(tmp_path / 'cache'), 'tokenizer': {'vocab_size': 320}}
  wanted = data.load_corpus(make_config(texts, **options))
  for name in ('tokens.bin', 'meta.json', 'documents.npz', 'tokenizer.json'):
    (path,) = (tmp_path / 'cache').rglob(name)
    path.write_bytes(path.read_bytes()[:-7])
    caplog.clear()
    found = data.load_corpus(make_config(texts, **options))
    assert 'damaged' in caplog.text
    assert found.summary() == wanted.summary()
    assert found.train[0].store.fingerprint == wanted.train[0].store.fingerprint


def test_an_interrupted_build_leaves_no_cache_entry(texts, tmp_path, monkeypatch):
  config = make_config(texts, cache_dir=str(tmp_path / 'cache'))

  def die(documents, *rest):
    next(iter(documents))
    raise KeyboardInterrupt

  with monkeypatch.context() as patch:
    patch.setattr(store_lib, '_write', die)
    with pytest.raises(KeyboardInterrupt):
      data.load_corpus(config)
  assert not list((tmp_path / 'cache/tokens').iterdir())
  assert len(data.load_corpus(config).train[0].documents) > 30


def test_vocabulary_never_saw_the_held_out_text(tmp_path):
  for i in range(40):
    (tmp_path / f'{i}.txt').write_text(f'word{i:02} ' * 50)
  source = {'kind': 'text', 'path': str(tmp_path)}
  config = {'sources': [source], 'validation_fraction': 0.3, 'cache_dir': '', 'seq_len': 64}
  corpus = data.load_corpus(
    data.DataConfig.from_mapping({**config, 'tokenizer': {'vocab_size': 2000}})
  )

  def single_tokens(part):
    numbers = [pathlib.Path(part.store.origin(d).path).stem for d in part.documents]
    return [len(corpus.tokenizer.encode(f'{int(n):02}')) == 1 for n in numbers]

  assert all(single_tokens(corpus.train[0]))
  assert not any(single_tokens(corpus.validation[0]))


def bad_folder(tmp_path):
  (tmp_path / 'a.jsonl').write_text(
    '{"text": "fine"}\n{"text": \n{"text": "' + 'long ' * 100 + '"}\n{"text": "fine too"}\n'
  )
  source = {'kind': 'jsonl', 'path': str(tmp_path / 'a.jsonl')}
  return {'sources': [source], 'validation_fraction': 0.0, 'tokenizer': {'kind': 'byte'},
          'seq_len': 64, 'batch_size': 1, 'cache_dir': str(tmp_path / 'cache')}  # fmt: skip


def test_bad_data_is_reported_also_from_the_cache(tmp_path):
  settings = bad_folder(tmp_path)
  for _ in range(2):
    corpus = data.load_corpus(data.DataConfig.from_mapping(settings))
    assert corpus.report.counts == {'broken_json': 1}
    assert 'a.jsonl:2: ' in str(corpus.report)
    read = corpus.summary()['read']
    assert (read['documents'], read['bad']) == (3, 1)
    json.dumps(corpus.summary())
    with pytest.raises(data.DataError, match=r'a\.jsonl:2: is not a JSON object'):
      data.load_corpus(data.DataConfig.from_mapping({**settings, 'on_bad': 'fatal'}))


def test_long_documents(tmp_path):
  settings = bad_folder(tmp_path)

  def load(policy):
    return data.load_corpus(data.DataConfig.from_mapping({**settings, 'long_documents': policy}))

  split = load('split')
  assert split.long_documents == 1
  assert 'too_long' not in split.report.counts
  assert split.train[0].num_targets == 5 + 501 + 9
  skip = load('skip')
  assert skip.report.counts['too_long'] == 1
  assert 'a.jsonl:3: is longer than a row: 501 inputs, seq_len is 64' in str(skip.report)
  assert skip.train[0].num_targets == 5 + 9
  with pytest.raises(data.DataError, match=r"a\.jsonl:3: .*501 inputs.*long_documents='split'"):
    load('fatal')


def test_nothing_to_train_or_evaluate_on(tmp_path):
  (tmp_path / 'only.txt').write_text('one\n\ntwo\n\nthree\n\nfour')
  source = {'kind': 'text', 'path': str(tmp_path)}
  base = {'sources': [source], 'tokenizer': {'kind': 'byte'}, 'cache_dir': ''}
  corpus = data.load_corpus(data.DataConfig.from_mapping(base))
  with pytest.raises(data.DataError, match=r'no document is held out.*separator'):
    data.make_eval_batches(corpus)
  with pytest.raises(data.DataError, match=r'nothing to train on.*1 documents were read'):
    data.load_corpus(data.DataConfig.from_mapping({**base, 'validation_fraction': 0.999}))
  own = {**base, 'validation_sources': [{**source, 'separator': '\n\n'}]}
  corpus = data.load_corpus(data.DataConfig.from_mapping(own))
  assert len(corpus.train[0].documents) == 1
  assert data.make_eval_batches(corpus).num_documents == 4
  (tmp_path / 'only.txt').write_text('changed')
  with pytest.raises(data.DataError, match=r'only\.txt:\d: has changed'):
    data.held_out_texts(corpus)


@pytest.mark.parametrize(
  ('settings', 'message'),
  [
    ({'seqlen': 8}, "DataConfig has no field 'seqlen'; did you mean 'seq_len'"),
    ({'sources': [{'kindd': 'text'}]}, "SourceConfig has no field 'kindd'; did you mean 'kind'"),
    ({'tokenizer': {'vocab': 8}}, "TokenizerConfig has no field 'vocab'; did you mean"),
    ({'tokenizer': 'bpe'}, 'TokenizerConfig needs a mapping, not str'),
    ({'packing': 'tight'}, "packing is 'tight'; one of .*best_fit"),
    ({'sources': []}, '`sources` is empty'),
    ({'seq_len': 0}, 'must be positive'),
    ({'validation_fraction': 1.0}, r'must lie in \[0, 1\)'),
    ({'tokenizer': {'kind': 'file'}}, 'needs `path`'),
  ],
)
def test_settings_are_checked(settings, message):
  with pytest.raises(data.DataError, match=message):
    data.DataConfig.from_mapping(settings)


def test_settings_from_ml_collections():
  """Named sources, since command-line overrides cannot reach into a list."""
  settings = ml_collections.ConfigDict(
    {
      'seq_len': 64,
      'tokenizer': {'kind': 'byte'},
      'sources': {'mine': {'kind': 'text', 'path': 'a'}, 'stdlib': {'weight': 2.0}},
    }
  )
  settings.sources.stdlib.weight = 3.0
  for mapping in (settings, ml_collections.FrozenConfigDict(settings)):
    config = data.DataConfig.from_mapping(mapping)
    assert config.tokenizer == data.TokenizerConfig(kind='byte')
    assert config.sources == (
      data.SourceConfig(kind='text', path='a', name='mine'),
      data.SourceConfig(kind='stdlib', weight=3.0),
    )
    assert hash(config) == hash(dataclasses.replace(config))
  single = data.DataConfig.from_mapping({'sources': {'kind': 'text', 'path': 'a'}})
  assert [s.name for s in single.sources] == ['text:a']


def test_unwritable_cache_dir(texts):
  with pytest.raises(data.DataError, match=r'cache_dir .*cannot be made'):
    data.load_corpus(make_config(texts, cache_dir='/dev/null/cache'))


def test_stdlib_with_bytes_end_to_end():
  config = data.DataConfig.from_mapping(
    {'tokenizer': {'kind': 'byte'}, 'seq_len': 256, 'batch_size': 16, 'cache_dir': ''}
  )
  corpus = data.load_corpus(config)
  assert 'PSF-2.0' in corpus.summary()['licences']['stdlib']
  iterator = data.make_train_iterator(corpus)
  next(iterator)
  start = time.perf_counter()
  tokens = sum(int(b['weights'].sum()) for b in take(iterator, 200))
  # Far below what an idle core does (about a million), so that a busy machine passes.
  assert tokens / (time.perf_counter() - start) > 50_000
  held_out = data.make_eval_batches(corpus, max_bytes=100_000)
  contents = data.held_out_texts(corpus, max_bytes=100_000)
  assert held_out.num_bytes == sum(map(len, contents)) >= 100_000
  assert 1.0 < data.compression_baselines(contents)['gzip_by_file'] < 4.0


def test_real_texts(shared):
  """Four real collections in one mixture: nothing bad in them, every byte is there."""
  text = shared / 'data/text'
  config = data.DataConfig.from_mapping(
    {
      'sources': [
        {'kind': 'text', 'path': str(text / 'tinyshakespeare.txt'), 'separator': '\n\n'},
        {'kind': 'text', 'path': [str(text / 'wikitext2')], 'patterns': ['*.txt']},
        {'kind': 'jsonl', 'path': str(text / 'udhr_24_languages.jsonl')},
        {'kind': 'jsonl', 'path': str(text / 'zh_classics.jsonl'), 'weight': 2.0},
      ],
      'tokenizer': {'kind': 'byte'},
      'validation_fraction': 0.1,
      'seq_len': 256,
      'packing': 'best_fit',
      'cache_dir': '',
    }
  )
  corpus = data.load_corpus(config)
  assert not corpus.report.counts
  plays, wiki, udhr, zh = corpus.train
  # Separators are no part of the documents.
  plays_text = (text / 'tinyshakespeare.txt').read_text()
  assert plays.store.num_bytes.sum() == len(plays_text) - 2 * (len(plays.store) - 1)
  assert len(plays.store) == 7222
  assert wiki.store.num_bytes.sum() == 2_378_130
  lines = (text / 'udhr_24_languages.jsonl').read_text().splitlines()
  assert udhr.store.num_bytes.sum() == sum(len(json.loads(s)['text'].encode()) for s in lines)
  assert len(zh.store) == 1454
  for document in (0, 700, 1453):
    tokens, _ = zh.store.read(document, 1, int(zh.store.lengths[document]) - 1)
    assert tokens.tolist() == read_document(zh.store.origin(document))
  iterator = data.make_train_iterator(corpus)
  assert min(iterator.density.values()) > 0.98
  next(iterator)
  # A vocabulary from 24 languages (several scripts) writes every one of them without loss.
  texts = [json.loads(s)['text'] for s in lines]
  tokenizer = data.train_bpe([t[:2000] for t in texts], 1000)
  assert [tokenizer.decode(ids) for ids in tokenizer.encode_batch(texts)] == texts
