"""Blank infilling in the pipeline: every document restored from its rows, resuming, evaluation."""

import itertools
import json
import random

import numpy as np
import pytest

from glm5_jax import data
from glm5_jax.data.infill_rows import InfillRows, sentence_ends
from glm5_jax.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.test_tokenizer import word_level

SEQ_LEN = 96


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  """Eighty texts of 6 to 399 letters in lines, every one with a number of its own."""
  folder = tmp_path_factory.mktemp('texts')
  rng = random.Random(0)
  for i in range(80):
    words = [''.join(rng.choices('abcdefghij', k=rng.randint(2, 7))) for _ in range(80)]
    text = f'{i:02}: ' + ' '.join(w + rng.choice(['', '', '.\n']) for w in words)
    (folder / f'{i:02}.txt').write_text(text[: rng.randint(6, 399)])
  return folder


def load(folder, **options):
  settings = {
    'sources': [{'kind': 'text', 'path': str(folder)}], 'validation_fraction': 0.2,
    'tokenizer': {'kind': 'byte'}, 'seq_len': SEQ_LEN, 'batch_size': 4, 'cache_dir': '',
    'packing': 'best_fit', 'objective': 'infilling',
    'infilling': {'span_prob': 0.5, 'sentence_prob': 0.2, 'suffix_prob': 0.5},
  }  # fmt: skip
  return data.load_corpus(data.DataConfig.from_mapping({**settings, **options}))


def take(iterator, n):
  return list(itertools.islice(iterator, n))


def assert_same(a, b):
  assert len(a) == len(b)
  for x, y in zip(a, b, strict=True):
    assert x.keys() == y.keys()
    for key in x:
      np.testing.assert_array_equal(x[key], y[key], err_msg=key)


def segments(batches):
  """(batch, row, slots) of every segment, slots being contiguous and numbered from 1 in a row."""
  for batch in batches:
    for row, ids in enumerate(batch['segment_ids']):
      count = ids.max()
      assert set(np.diff(ids[: (ids > 0).sum()]).tolist()) <= {0, 1} and not ids[0] > 1
      for segment in range(1, count + 1):
        yield batch, row, np.flatnonzero(ids == segment)


def restore(batch, row, slots, *, special) -> list[int]:
  """The text of a segment, from Part A and the targets of Part B, by the rules of the format."""
  masks = [special[name] for name in ('[MASK]', '[sMASK]', '[gMASK]')]
  tokens, targets, weights, positions = (
    batch[key][row, slots].tolist() for key in ('tokens', 'targets', 'weights', 'positions')
  )
  (prefix,) = set(batch['prefix'][row, slots].tolist())
  sep = prefix - slots[0]
  assert 0 < sep < len(slots)
  assert weights == [0.0] * sep + [1.0] * (len(slots) - sep)
  assert tokens[sep] == special['<sop>']
  assert positions[:sep] == list(range(sep))
  runs, at = {}, sep
  while at < len(slots):
    end = at
    while end + 1 < len(slots) and tokens[end + 1] != special['<sop>']:
      end += 1
    run = targets[at : end + 1]
    # A hidden end of the document is no <eop>, and has the place of the last mask.
    runs[positions[at]] = run[:-1] if run[-1] == special['<eop>'] else run
    at = end + 1
  generation = special['[gMASK]'] in tokens[:sep]
  if generation:  # Positions just go on.
    assert positions == list(range(len(slots)))
    runs = {tokens.index(special['[gMASK]']): runs[sep]}
  text: list[int] = []
  for position, token in enumerate(tokens[:sep]):
    text += runs.pop(position) if token in masks else [token]
  assert not runs
  return text


def one(found):
  (only,) = found
  return only


@pytest.mark.parametrize('packing', ['best_fit', 'first_fit'])
def test_an_epoch_has_every_document_once(folder, packing):
  corpus = load(folder, packing=packing, batch_size=1)
  iterator = data.make_train_iterator(corpus)
  rows = iterator.rows_per_epoch['text:' + folder.name]
  eot, special = corpus.tokenizer.eot_id, corpus.tokenizer.special_ids
  (part,) = corpus.train
  documents = {
    int(d): part.store.read(int(d), 0, int(part.store.lengths[d]))[1].tolist()
    for d in part.documents
  }
  epochs = [take(iterator, rows) for _ in range(2)]
  for batches in epochs:
    texts = [restore(*segment, special=special) for segment in segments(batches)]
    assert all(text[0] == eot for text in texts)
    covered = {name: np.zeros(len(document), int) for name, document in documents.items()}
    for _, *run in texts:
      here = [
        (name, at)
        for name, document in documents.items()
        for at in range(len(document) - len(run) + 1)
        if document[at : at + len(run)] == run
      ]
      name, at = here[0] if len(run) < 12 else one(here)  # Long ones are found once.
      covered[name][at : at + len(run)] += 1
    # Short rests of documents, here of less than 6 tokens, may have nothing to hide.
    missing = sum(int((count == 0).sum()) for count in covered.values())
    assert sum(int((count > 1).sum()) for count in covered.values()) <= missing <= 30
    assert len(texts) > len(documents) and sum(map(len, documents.values())) > 8000
  # Other tokens are hidden in the next epoch.
  hidden = [
    sorted(batch['targets'][batch['weights'] > 0].tolist() for batch in batches)
    for batches in epochs
  ]
  assert hidden[0] != hidden[1]
  filled = np.mean([(b['segment_ids'] > 0).mean() for b in epochs[0]])
  print(f'[share] {filled:.3f} of the slots used')
  assert filled > 0.85


def test_batch_format(folder):
  batch = next(data.make_train_iterator(load(folder)))
  kinds = {k: (v.shape, v.dtype.name) for k, v in batch.items()}
  assert kinds == dict.fromkeys(
    ('tokens', 'targets', 'segment_ids', 'positions', 'prefix'), ((4, SEQ_LEN), 'int32')
  ) | {'weights': ((4, SEQ_LEN), 'float32')}
  padding = batch['segment_ids'] == 0
  assert not batch['prefix'][padding].any() and not batch['weights'][padding].any()
  # Part A of a segment never reaches into another one.
  assert ((batch['prefix'] <= SEQ_LEN) & (batch['prefix'] >= 0)).all()


def test_resumes_and_divides(folder):
  whole = take(data.make_train_iterator(load(folder)), 80)
  iterator = data.make_train_iterator(load(folder))
  take(iterator, 57)  # In the second epoch.
  assert max(iterator.epochs().values()) > 1
  state = json.loads(json.dumps(iterator.get_state()))
  resumed = data.make_train_iterator(load(folder))
  resumed.set_state(state)
  assert_same(take(resumed, 10), whole[57:67])
  corpus = load(folder)
  halves = [take(data.make_train_iterator(corpus, p, 2), 20) for p in range(2)]
  joined = [
    {key: np.concatenate([a[key], b[key]]) for key in a} for a, b in zip(*halves, strict=True)
  ]
  assert_same(joined, whole[:20])
  causal = load(folder, objective='next_token')
  with pytest.raises(data.DataError, match="objective was 'infilling', is None"):
    data.make_train_iterator(causal).set_state(state)
  other = load(folder, infilling={'span_prob': 1.0})
  with pytest.raises(data.DataError, match='infilling was'):
    data.make_train_iterator(other).set_state(state)


@pytest.mark.parametrize('overlap', [0, 24])
def test_evaluation_generates_every_token_once(folder, overlap):
  """Behind [gMASK], left to right: as many targets as bytes and ends of documents."""
  corpus = load(folder)
  held_out = data.make_eval_batches(corpus, overlap=overlap)
  special = corpus.tokenizer.special_ids
  targets = []
  for batch, row, slots in segments(held_out.batches):
    restore(batch, row, slots, special=special)
    sep = batch['prefix'][row, slots[0]] - slots[0]
    assert batch['tokens'][row, slots[sep - 1]] == special['[gMASK]']
    assert sep == 2 or (overlap and sep == 2 + overlap)
    targets += batch['targets'][row, slots[sep:]].tolist()
  contents = data.held_out_texts(corpus)
  ends = [corpus.tokenizer.eot_id] * len(contents)
  assert sorted(targets) == sorted([*itertools.chain(*contents), *ends])
  assert held_out.num_targets == sum(batch['weights'].sum() for batch in held_out.batches)
  assert_same(data.make_eval_batches(corpus, overlap=overlap).batches, held_out.batches)


def test_reserve_is_rarely_exceeded_and_never_by_a_row():
  """Of 2000 texts at the reserve's two standard deviations few draws need another one."""
  config = data.DataConfig.from_mapping(
    {'objective': 'infilling', 'packing': 'best_fit', 'seq_len': 512,
     'infilling': {'span_prob': 1.0}}
  )  # fmt: skip
  rows = InfillRows(config, ByteTokenizer())
  inputs = np.arange(1, 513)
  slots = rows.slots(inputs)
  assert (np.diff(slots) >= 0).all() and (slots >= inputs + 3).all()
  assert slots[-1] <= 1.13 * 512
  rng = random.Random(0)
  first_draws = [
    rows._draw([256, *([97] * int(n))], int(slots[n - 1]), rng) for n in rng.choices(inputs, k=400)
  ]
  long_enough = [sample for sample in first_draws if sample is not None]
  assert len(long_enough) > 390


def test_sentence_ends():
  ends = sentence_ends(ByteTokenizer())
  assert [chr(i) for i in np.flatnonzero(ends)] == ['\n', '!', '.', ':', ';', '?']


def test_impossible_settings(folder, tmp_path):
  for options, message in (
    ({'packing': 'concat'}, "set packing to 'best_fit' or 'first_fit'"),
    ({'long_documents': 'skip'}, "long_documents='split', not seq_len 96 and 'skip'"),
    ({'seq_len': 8}, 'at least 16 tokens'),
    ({'fim_rate': 0.5}, "fim_rate is for objective 'next_token'"),
    ({'objective': 'infiling'}, "DataConfig.objective is 'infiling'; one of"),
    ({'infilling': {'span_probs': 1}}, "no field 'span_probs'; did you mean 'span_prob'"),
    ({'infilling': {'mask_ratio': 0}}, 'mask_ratio and sentence_ratio must be positive'),
    ({'infilling': 0.5}, 'InfillingConfig needs a mapping, not float'),
  ):
    with pytest.raises(data.DataError, match=message):
      load(folder, **options)
  foreign = load_tokenizer(word_level(tmp_path, ['</s>']))
  config = load(folder).config
  with pytest.raises(data.DataError, match=r"objective 'infilling' needs .* token '\[MASK\]'"):
    InfillRows(config, foreign)
  corpus = load(folder, infilling={'block_mask_prob': 0.1})
  with pytest.raises(data.DataError, match=r"block_mask_prob needs .* token '\[dBLOCK\]'"):
    data.make_train_iterator(corpus)
