"""Fill-in-the-middle: every document comes back from its three parts, in the pipeline as well."""

import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax import data
from glm5_jax.data import fim
from glm5_jax.data.tokenizer import ByteTokenizer, load_tokenizer
from tests.data.test_tokenizer import word_level

# A busy machine is no failure, and 60 random cases find what 100 do.
PROPERTY = settings(deadline=None, max_examples=60)
PRE, SUF, MID, EOT = 1001, 1002, 1003, 1000
IDS = fim.Tokens(PRE, SUF, MID)


def restore(tokens, ids=IDS) -> tuple[list[int], str]:
  """The document of a rearranged one, and the order of its parts, by the rules of the format."""
  tokens = list(tokens)
  places = sorted((tokens.index(token), name) for token, name in zip(ids, 'PSM', strict=True))
  order = ''.join(name for _, name in places)
  begins = [at for at, _ in places]
  assert begins[0] == 0
  parts = {
    name: tokens[at + 1 : end]
    for (at, name), end in zip(places, [*begins[1:], len(tokens)], strict=True)
  }
  return parts['P'] + parts['M'] + parts['S'], order


@PROPERTY
@given(tokens=st.lists(st.integers(0, 999), max_size=40), seed=st.integers(0, 999))
def test_rearranged_text_comes_back(tokens, seed):
  for rate, order in ((0.0, 'PSM'), (1.0, 'SPM')):
    array = np.array(tokens, np.uint16)
    out = fim.rearrange(array, IDS, np.random.default_rng(seed), rate)
    assert out.dtype == np.uint16
    assert restore(out.tolist()) == (tokens, order)
    again = fim.rearrange(array, IDS, np.random.default_rng(seed), rate)
    assert np.array_equal(out, again)


class Script(np.random.Generator):
  """A generator whose draws are written down."""

  def __init__(self, cuts, chance):
    super().__init__(np.random.PCG64(0))
    self._cuts, self._chance = cuts, chance

  def integers(self, low, high, size):  # type: ignore[override]
    assert low == 0 and size == 2 and max(self._cuts) < high
    return np.array(self._cuts)

  def random(self):  # type: ignore[override]
    return self._chance


def test_by_hand():
  tokens = np.array([1, 2, 3, 4, 5])
  psm = [PRE, 1, SUF, 4, 5, MID, 2, 3]
  assert fim.rearrange(tokens, IDS, Script([3, 1], 0.5), 0.5).tolist() == psm
  spm = [SUF, 4, 5, PRE, 1, MID, 2, 3]
  assert fim.rearrange(tokens, IDS, Script([1, 3], 0.4), 0.5).tolist() == spm
  # A part may be empty: here the prefix, then all but the middle, then the middle.
  for cuts, want in (
    ([0, 3], [PRE, SUF, 4, 5, MID, 1, 2, 3]), ([0, 5], [PRE, SUF, MID, 1, 2, 3, 4, 5]),
    ([2, 2], [PRE, 1, 2, SUF, 3, 4, 5, MID]),
  ):  # fmt: skip
    assert fim.rearrange(tokens, IDS, Script(cuts, 0.5)).tolist() == want


def test_cuts_are_uniform():
  """Two independent cuts, each at any of the n + 1 places."""
  counts = np.zeros((9, 9))
  rng = np.random.default_rng(0)
  for _ in range(8100):
    out = fim.rearrange(np.arange(8), IDS, rng).tolist()
    suffix, middle = out.index(SUF), out.index(MID)
    counts[suffix - 1, suffix - 1 + len(out) - middle - 1] += 1
  # 100 on the diagonal, 200 above it, none below.
  assert not np.tril(counts, -1).any()
  assert counts.diagonal() == pytest.approx([100] * 9, abs=45)
  assert counts[np.triu_indices(9, 1)] == pytest.approx([200] * 36, abs=65)


def documents(lengths, seq_len, rate=1.0, spm_rate=0.3, seed=5, **options):
  """Document d is [EOT, d0, d1, ..., EOT] with tokens of its own."""
  bodies = [np.arange(7 * d, 7 * d + n - 1) % 1000 for d, n in enumerate(lengths)]
  whole = [np.concatenate([[EOT], body, [EOT]]) for body in bodies]

  def read(document, start, length):
    assert 0 <= start < start + length <= lengths[document]
    text = whole[document]
    return text[start : start + length], text[start + 1 : start + length + 1]

  made = fim.Documents(np.array(lengths), read, IDS, rate, spm_rate, seed, seq_len, **options)
  return made, bodies


@PROPERTY
@given(
  lengths=st.lists(st.integers(1, 60), min_size=1, max_size=4), seq_len=st.integers(8, 30),
  data=st.data(),
)  # fmt: skip
def test_documents_are_read_in_any_pieces(lengths, seq_len, data):
  """All of a document is its runs rearranged; any part of it is that part of all."""
  made, bodies = documents(lengths, seq_len)
  for d, body in enumerate(bodies):
    size = int(made.lengths[d])
    inputs, targets = made.read(d, 0, size, 0)
    assert len(inputs) == len(targets) == size
    assert np.array_equal(inputs[1:], targets[:-1])
    assert inputs[0] == EOT and targets[-1] == EOT
    if not len(body):
      assert size == 1 and not made.rearranged[d]
      continue
    run = seq_len - 3
    runs = [targets[:-1][i : i + seq_len].tolist() for i in range(0, size - 1, seq_len)]
    assert [restore(part)[0] for part in runs] == [
      body[i : i + run].tolist() for i in range(0, len(body), run)
    ]
    start = data.draw(st.integers(0, size - 1))
    length = data.draw(st.integers(1, size - start))
    part = made.read(d, start, length, 0)
    assert np.array_equal(part[0], inputs[start : start + length])
    assert np.array_equal(part[1], targets[start : start + length])


def test_which_documents_and_where():
  """The seed decides which documents, for good; the epoch decides where they are cut."""
  lengths = [40] * 2000
  made, _ = documents(lengths, 64, rate=0.3)
  again, _ = documents(lengths, 64, rate=0.3)
  other, _ = documents(lengths, 64, rate=0.3, seed=6)
  assert np.array_equal(made.rearranged, again.rearranged)
  assert (made.rearranged != other.rearranged).any()
  assert made.rearranged.mean() == pytest.approx(0.3, abs=0.04)
  assert np.array_equal(made.lengths, 40 + 3 * made.rearranged)
  chosen = np.flatnonzero(made.rearranged)[:200].tolist()
  texts = [[made.read(d, 0, 43, e)[0].tolist() for d in chosen] for e in (0, 1)]
  assert texts[0] == [again.read(d, 0, 43, 0)[0].tolist() for d in chosen]
  assert sum(a != b for a, b in zip(*texts, strict=True)) > 190
  spm = np.mean([text[1] == SUF for text in texts[0]])
  assert spm == pytest.approx(0.3, abs=0.12)
  untouched = int(np.flatnonzero(~made.rearranged)[0])
  assert not {PRE, SUF, MID} & set(made.read(untouched, 0, 40, 0)[0].tolist())


def test_whole_documents_stay_within_a_row():
  made, _ = documents([61, 62], 64, whole=True)
  assert made.lengths.tolist() == [64, 62]
  assert made.rearranged.tolist() == [True, False]


# --- In the pipeline ---


@pytest.fixture(scope='module')
def folder(tmp_path_factory):
  folder = tmp_path_factory.mktemp('code')
  rng = random.Random(0)
  for i in range(40):
    words = [''.join(rng.choices('abcdefghij', k=rng.randint(2, 7))) for _ in range(60)]
    (folder / f'{i:02}.txt').write_text(f'{i:02} ' + ' '.join(words)[: rng.randint(1, 300)])
  return folder


def load(folder, **options):
  source = {'kind': 'text', 'path': str(folder)} | options.pop('source', {})
  settings = {
    'sources': [source], 'validation_fraction': 0.2, 'tokenizer': {'kind': 'byte'},
    'seq_len': 80, 'batch_size': 2, 'cache_dir': '', 'fim_rate': 0.5, 'fim_spm_rate': 0.5,
  }  # fmt: skip
  return data.load_corpus(data.DataConfig.from_mapping({**settings, **options}))


def take(iterator, n):
  return list(itertools.islice(iterator, n))


def ids_of(tokenizer):
  return fim.Tokens(
    *(tokenizer.special_ids[f'<|code_{n}|>'] for n in ('prefix', 'suffix', 'middle'))
  )


def test_rows_hold_every_document(folder):
  """Of best-fit rows, each segment is a document, or a run of one as long as a row, in three parts."""
  corpus = load(folder, packing='best_fit', batch_size=1)
  ids, eot = ids_of(corpus.tokenizer), corpus.tokenizer.eot_id
  iterator = data.make_train_iterator(corpus)
  (rows,) = iterator.rows_per_epoch.values()
  (part,) = corpus.train
  want = []
  for d in part.documents:
    _, targets = part.store.read(int(d), 0, int(part.store.lengths[d]))
    want.append(targets.tolist())
  epochs = [take(iterator, rows) for _ in range(2)]
  for batches in epochs:
    found, rearranged = [], 0
    for batch in batches:
      segments = batch['segment_ids'][0]
      for segment in range(1, segments.max() + 1):
        here = segments == segment
        assert batch['weights'][0, here].all()
        run = batch['targets'][0, here].tolist()
        if {*ids} & {*run}:
          rearranged += 1
          ends = run[-1] == eot
          text, order = restore(run[:-1] if ends else run, ids)
          assert order in ('PSM', 'SPM')
          run = [*text, eot] if ends else text
        found.append(run)
    assert sorted(itertools.chain(*found)) == sorted(itertools.chain(*want))
    short = [document for document in want if len(document) < 70]
    assert short and all(document in found for document in short)
    assert 10 < rearranged < len(found) - 10
  assert any((a['tokens'] != b['tokens']).any() for a, b in zip(*epochs, strict=True))


@pytest.mark.parametrize('packing', ['concat', 'best_fit'])
def test_resumes_and_divides(folder, packing):
  corpus = load(folder, packing=packing)
  whole = take(data.make_train_iterator(corpus), 120)
  iterator = data.make_train_iterator(corpus)
  take(iterator, 77)
  assert max(iterator.epochs().values()) > 1
  state = json.loads(json.dumps(iterator.get_state()))
  resumed = data.make_train_iterator(load(folder, packing=packing))
  resumed.set_state(state)
  halves = [take(data.make_train_iterator(corpus, p, 2), 120) for p in range(2)]
  for i, batch in enumerate(take(resumed, 43), 77):
    for key, value in batch.items():
      np.testing.assert_array_equal(value, whole[i][key])
      np.testing.assert_array_equal(value, np.concatenate([h[i][key] for h in halves]))
  plain = data.make_train_iterator(load(folder, packing=packing, fim_rate=0.0))
  with pytest.raises(data.DataError, match='fim was'):
    plain.set_state(state)


def test_only_where_asked(folder):
  """Neither the held-out documents nor a source that says no, and by default nothing at all."""
  codes = {*ids_of(ByteTokenizer())}
  corpus = load(folder, fim_rate=1.0)
  assert codes <= set(take(data.make_train_iterator(corpus), 1)[0]['tokens'].ravel().tolist())
  quiet = [
    *data.make_eval_batches(corpus).batches,
    *take(data.make_train_iterator(load(folder, source={'fim': False})), 20),
    *take(data.make_train_iterator(load(folder, fim_rate=0.0)), 20),
  ]
  assert not codes & set(np.concatenate([b['tokens'].ravel() for b in quiet]).tolist())
  assert data.DataConfig().fim_rate == 0


def test_impossible_settings(folder, tmp_path):
  for options, message in (
    ({'fim_rate': 1.5}, r'DataConfig.fim_rate is 1\.5; it must lie in \[0, 1\]'),
    ({'fim_spm_rate': -1}, 'DataConfig.fim_spm_rate is -1; it must'),
    ({'fim_rates': 1}, "no field 'fim_rates'; did you mean 'fim_rate'"),
    ({'seq_len': 6}, 'fim_rate needs rows of at least 8 tokens'),
  ):
    with pytest.raises(data.DataError, match=message):
      load(folder, **options)
  foreign = load_tokenizer(word_level(tmp_path, ['</s>']))
  with pytest.raises(data.DataError, match=r"fim_rate needs .* token '<\|code_prefix\|>'"):
    fim.Tokens.of(foreign)
