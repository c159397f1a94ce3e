"""Blank infilling: the published implementation's samples, hand-made ones, and what holds for all."""

import collections
import dataclasses
import itertools
import json
import random

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.data import infilling
from glm5_jax.data.config import InfillingConfig
from glm5_jax.data.report import DataError

# A busy machine is no failure, and 60 random cases find what 100 do.
PROPERTY = settings(deadline=None, max_examples=60)
START, END, MASK, SENTENCE, GENERATION, SOP, EOP, BLOCK = range(1000, 1008)
IDS = infilling.Tokens(START, END, MASK, SENTENCE, GENERATION, SOP, EOP, BLOCK)
MASKS = {'spans': MASK, 'sentences': SENTENCE, 'generation': GENERATION}
# Every tenth word ends a sentence, as in the reference vectors.
SENTENCE_END = np.array([i % 10 == 9 and i < 1000 for i in range(1008)])
# Published names of the parameters, and their defaults where ours differ.
NAMES = {
  'bert_prob': 'span_prob', 'gap_sentence_prob': 'sentence_prob', 'gpt_infill_prob': 'suffix_prob',
  'gpt_min_ratio': 'min_generation', 'single_span_prob': 'single_span_prob',
  'task_mask': 'task_masks', 'shuffle_blocks': 'shuffle_spans',
  'block_position_encoding': 'block_positions',
}  # fmt: skip
PUBLISHED = {'bert_prob': 1.0, 'gpt_infill_prob': 0.5, 'task_mask': False}


def construct(texts, recipe, rng, **options):
  return infilling.construct(texts, recipe, IDS, rng, sentence_end=SENTENCE_END, **options)


def document(*words):
  return [START, *words, END]


# --- The published implementation's outputs ---


@pytest.fixture(scope='module')
def vectors(shared):
  return json.loads((shared / 'data' / 'glm_infill' / 'vectors.json').read_text())


def test_published_samples(vectors):
  names = 'ENC eos MASK sMASK gMASK sop eop dBLOCK'.split()
  assert tuple(vectors['command_ids'][name] for name in names) == IDS
  for case in vectors['cases']:
    params = PUBLISHED | case['params']
    max_length = params.pop('max_seq_length', 512)
    recipe = InfillingConfig(**{NAMES[name]: value for name, value in params.items()})
    texts = [sample['text'] for sample in case['samples']]
    rng = random.Random(case['rng_seed'])
    samples = construct(texts, recipe, rng, max_length=max_length)
    got, want = infilling.pad(samples), case['out']
    for ours, theirs in (
      ('tokens', 'text'), ('targets', 'target'), ('loss_mask', 'loss_mask'),
      ('positions', 'position_id'), ('sep', 'attention_mask'),
    ):  # fmt: skip
      np.testing.assert_array_equal(got[ours], want[theirs], err_msg=f'{case["name"]} {ours}')
    mode = {'bert': 'spans', 'sentence': 'sentences', 'gpt': 'generation'}[want['mode']]
    assert {sample.mode for sample in samples} == {mode}
  print(f'[count] {len(vectors["cases"])} calls')
  assert len(vectors['cases']) == 18


def test_published_draws(vectors):
  table = vectors['block_length_weights']
  np.testing.assert_allclose(infilling.SPAN_WEIGHTS, table['weights'], rtol=1e-12)
  assert len(vectors['sample_spans']) == 6
  for draw in vectors['sample_spans']:
    rng = random.Random(draw['seed'])
    got = infilling.sample_spans(draw['span_lengths'], draw['total_length'], rng, draw['offset'])
    assert got == [tuple(span) for span in draw['spans']]


# --- Samples made by hand ---


class Script(random.Random):
  """A `random.Random` whose draws are written down."""

  def __init__(self, **draws):
    super().__init__(0)
    self._draws = {name: iter(values) for name, values in draws.items()}

  def random(self):
    return next(self._draws['random'])

  def choices(self, population, weights):  # type: ignore[override]
    del population, weights
    return [next(self._draws['choices'])]

  def randrange(self, *bounds):
    value = next(self._draws['randrange'])
    assert value in range(*bounds)
    return value

  def randint(self, low, high):
    value = next(self._draws['randint'])
    assert low <= value <= high
    return value

  def shuffle(self, items):
    if next(self._draws.get('reverse', itertools.repeat(False))):
      items.reverse()


def check(sample, tokens, targets, rows, sep, one_row):
  assert sample.tokens.tolist() == tokens
  assert sample.targets.tolist() == targets
  assert sample.positions.tolist() == rows
  assert sample.sep == sep
  assert sample.loss_mask.tolist() == [0] * sep + [1] * (len(tokens) - sep)
  assert sample.one_row_positions().tolist() == one_row
  assert {a.dtype.name for a in (sample.tokens, sample.targets, sample.positions)} == {'int32'}


def test_two_spans_by_hand():
  """12 tokens, 40 % are 4: lengths 2 and 3. Free places 3 and 1 of 0..4, in order 1 and 3; the first
  span begins at 1 + 1, the second at 1 + 3 + (2 + 1). Part B has them the other way round.
  """
  rng = Script(random=[0.9, 0.9, 0.0], choices=[2, 3], randrange=[3, 1], reverse=[0, 0, 1])
  recipe = InfillingConfig(span_prob=1.0, mask_ratio=0.4)
  (sample,) = construct([document(*range(11, 21))], recipe, rng)
  part_a = [START, 11, MASK, 14, 15, 16, MASK, 20, END]
  row = [0, 1, 2, 3, 4, 5, 6, 7, 8, 6, 6, 6, 6, 2, 2, 2]
  check(
    sample, [*part_a, SOP, 17, 18, 19, SOP, 12, 13], [*part_a, 17, 18, 19, EOP, 12, 13, EOP],
    [row, [0] * 9 + [1, 2, 3, 4, 1, 2, 3]], 9, row,
  )  # fmt: skip


def test_two_documents_by_hand():
  """The shorter document has room for int(0.5 * 4) = 2 hidden tokens, the longer one for the rest."""
  text = [*document(11, 12, 13, 14), *range(21, 28), END]
  rng = Script(random=[0.9, 0.9, 0.0], choices=[1, 1, 5], randrange=[1, 0, 1])
  recipe = InfillingConfig(span_prob=1.0, mask_ratio=0.5, block_positions=False)
  (sample,) = construct([text], recipe, rng)
  part_a = [START, MASK, 12, 13, MASK, END, 21, MASK, 27, END]
  row = [*range(10), 1, 1, 4, 4, 7, 7, 7, 7, 7, 7]
  check(
    sample, [*part_a, SOP, 11, SOP, 14, SOP, 22, 23, 24, 25, 26],
    [*part_a, 11, EOP, 14, EOP, 22, 23, 24, 25, 26, EOP], [row, [0] * 10 + [1] * 10], 10, row,
  )  # fmt: skip


def test_sentences_by_hand():
  """Sentences end at 19 and 29; what is cut off at the end of a document is none. Both are hidden."""
  text = document(11, 12, 19, 21, 29, 31)
  recipe = InfillingConfig(span_prob=0, sentence_prob=1, sentence_ratio=0.6, shuffle_spans=False)
  (sample,) = construct([text], recipe, random.Random(0))
  part_a = [START, SENTENCE, SENTENCE, 31, END]
  row = [0, 1, 2, 3, 4, 1, 1, 1, 1, 2, 2, 2]
  check(
    sample, [*part_a, SOP, 11, 12, 19, SOP, 21, 29], [*part_a, 11, 12, 19, EOP, 21, 29, EOP],
    [row, [0] * 5 + [1, 2, 3, 4, 1, 2, 3]], 5, row,
  )  # fmt: skip


def test_generation_by_hand():
  """6 tokens, at least 4 of them to hide and at most 4. The suffix ends in the document's own end."""
  recipe = InfillingConfig(span_prob=0.0, suffix_prob=1.0, min_generation=0.7)
  (sample,) = construct([document(11, 12, 13, 14)], recipe, random.Random(0))
  check(
    sample, [START, 11, GENERATION, SOP, 12, 13, 14], [START, 11, GENERATION, 12, 13, 14, END],
    [[0, 1, 2, 2, 2, 2, 2], [0, 0, 0, 1, 2, 3, 4]], 3, [0, 1, 2, 3, 4, 5, 6],
  )  # fmt: skip
  # A span that long has one place, between start and end.
  recipe = InfillingConfig(
    span_prob=0.0, suffix_prob=0.0, min_generation=0.7, task_masks=False
  )  # fmt: skip
  (sample,) = construct([document(11, 12, 13, 14)], recipe, random.Random(0))
  check(
    sample, [START, MASK, END, SOP, 11, 12, 13, 14], [START, MASK, END, 11, 12, 13, 14, EOP],
    [[0, 1, 2, 1, 1, 1, 1, 1], [0, 0, 0, 1, 2, 3, 4, 5]], 3, list(range(8)),
  )  # fmt: skip


def test_a_batch_shares_the_length_of_generation():
  """5 of at most 6, or what the shorter text has; two documents always hide their end."""
  two = [*document(11, 12), 21, 22, 23, END]
  rng = Script(random=[0.9, 0.9, 0.9, 0.9], randint=[5], randrange=[0])
  recipe = InfillingConfig(span_prob=0.0, suffix_prob=0.5, min_generation=0.25)
  long, short = construct([two, document(31, 32, 33, 34)], recipe, rng)
  assert long.tokens.tolist() == [START, 11, 12, GENERATION, SOP, END, 21, 22, 23]
  assert long.targets.tolist() == [START, 11, 12, GENERATION, END, 21, 22, 23, END]
  assert short.tokens.tolist() == [START, GENERATION, END, SOP, 31, 32, 33, 34]


def test_short_texts_by_hand():
  """Length 32; the run at 45 moves back to word 40, which follows the end of a sentence, and its end
  from word 72 to 69.
  """
  rng = Script(randrange=[32, 45])
  (run,) = infilling.split_texts([document(*range(1, 101))], IDS, SENTENCE_END, 64, rng)
  assert run == [START, *range(40, 70)]


# --- What holds for every sample ---


def hidden_spans(sample):
  """The spans of Part B, without their structure: [(position of the mask, tokens)]."""
  out, rest = [], sample.targets[sample.sep :].tolist()
  places = sample.positions[0][sample.sep :].tolist()
  while rest:
    length = rest.index(EOP) if EOP in rest else len(rest)
    assert set(places[: length + 1]) == {places[0]}
    out.append((places[0], rest[:length]))
    rest, places = rest[length + 1 :], places[length + 1 :]
  return out


def restored(sample):
  """The text again: every mask of Part A replaced by the span at its position."""
  by_position = dict(hidden_spans(sample))
  text: list[int] = []
  for position, token in zip(
    sample.positions[0][: sample.sep].tolist(), sample.tokens[: sample.sep].tolist(), strict=True
  ):
    text += by_position.pop(position) if token in MASKS.values() else [token]
  assert not by_position
  return text


TEXTS = st.lists(
  st.lists(st.integers(1, 999), min_size=8, max_size=80), min_size=1, max_size=3
).map(lambda documents: [START, *itertools.chain(*([*d, END] for d in documents))])
RECIPES = st.builds(
  InfillingConfig, span_prob=st.sampled_from([0.0, 0.4, 1.0]), sentence_prob=st.just(0.0),
  suffix_prob=st.sampled_from([0.0, 0.5, 1.0]), min_generation=st.floats(0, 0.8),
  single_span_prob=st.sampled_from([0.0, 0.3]), shuffle_spans=st.booleans(),
) | st.just(InfillingConfig(span_prob=0.0, sentence_prob=1.0))  # fmt: skip


@PROPERTY
@given(text=TEXTS, recipe=RECIPES, seed=st.integers(0, 999), cut_off=st.booleans())
def test_every_sample(text, recipe, seed, cut_off):
  text = text[:-1] if cut_off else text
  samples = construct([text], recipe, random.Random(seed))
  assert len(samples) <= 1
  for sample in samples:
    assert restored(sample) == text
    spans = hidden_spans(sample)
    a, b = slice(0, sample.sep), slice(sample.sep, None)
    # Part A: inputs are targets, nothing counts; positions are 0, 1, 2, ...
    assert np.array_equal(sample.tokens[a], sample.targets[a])
    assert not sample.loss_mask[a].any() and sample.loss_mask[b].all()
    assert np.array_equal(sample.positions[0][a], np.arange(sample.sep))
    assert (sample.tokens[a] == MASKS[sample.mode]).sum() == len(spans)
    assert not sample.positions[1][a].any()
    # Part B: inputs are the targets one later, with <sop> in place of <eop>.
    suffix = sample.mode == 'generation' and EOP not in sample.targets
    assert sample.loss_mask.sum() == sum(len(tokens) + (not suffix) for _, tokens in spans)
    shifted = np.where(sample.targets[b] == EOP, SOP, sample.targets[b])
    assert sample.tokens[b].tolist() == [SOP, *shifted[:-1].tolist()][: len(shifted)]
    assert len(sample) == len(text) + (1 if suffix else 2 * len(spans))
    assert suffix or all(END not in tokens for _, tokens in spans)
    if sample.mode == 'spans':
      first = sorted(place for place, _ in spans)
      assert all(q - p > 1 for p, q in itertools.pairwise(first))  # A kept token between.
      if not recipe.single_span_prob:
        assert sum(len(tokens) for _, tokens in spans) >= int(0.15 * len(text))
    if not recipe.shuffle_spans:
      assert spans == sorted(spans)


def test_share_masked_and_span_lengths():
  """Of long texts: at least 15 %, hardly more, in spans of 3.157 on average: Poisson(3) above 0."""
  text = document(*(i % 900 + 1 for i in range(2000)))
  rng = random.Random(1)
  recipe = InfillingConfig(span_prob=1.0)
  samples = [sample for _ in range(40) for sample in construct([text], recipe, rng)]
  lengths = [[len(tokens) for _, tokens in hidden_spans(sample)] for sample in samples]
  shares = [sum(spans) / len(text) for spans in lengths]
  assert min(shares) >= 0.15 - 1e-3 and max(shares) < 0.15 + 12 / 2000
  every = list(itertools.chain(*lengths))
  mean = np.mean(every)
  print(f'[mean] {len(samples)} samples, {len(every)} spans of {mean:.3f}')
  assert mean == pytest.approx(3 / (1 - np.exp(-3)), abs=0.1)  # 5 standard errors
  counts = collections.Counter(every)
  for length, probability in ((1, 0.1572), (2, 0.2358), (3, 0.2358), (4, 0.1769)):
    assert counts[length] / len(every) == pytest.approx(probability, abs=0.03)
  # Anywhere in the text.
  starts = np.array([place for sample in samples for place, _ in hidden_spans(sample)])
  assert np.histogram(starts, 4, (0, 1800))[0] / len(every) == pytest.approx([0.25] * 4, abs=0.05)


def test_modes_have_their_shares():
  text = document(*range(1, 60))
  recipe = InfillingConfig(span_prob=0.5, sentence_prob=0.3)
  rng = random.Random(0)
  modes = collections.Counter(
    sample.mode for _ in range(2000) for sample in construct([text], recipe, rng)
  )
  shares = {mode: count / 2000 for mode, count in modes.items()}
  assert shares == pytest.approx({'spans': 0.5, 'sentences': 0.3, 'generation': 0.2}, abs=0.03)


def test_noise_in_spans_only():
  """[dBLOCK] replaces inputs of spans, at its rate; neither targets nor any other draw change."""
  text = document(*range(1, 900))
  for recipe, noisy in (
    (InfillingConfig(span_prob=1.0), True),
    (InfillingConfig(span_prob=0.0, sentence_prob=1.0), False),
    (InfillingConfig(span_prob=0.0, suffix_prob=0.0), False),
  ):
    (plain,) = construct([text], recipe, random.Random(3))
    with_noise = dataclasses.replace(recipe, block_mask_prob=0.4)
    (sample,) = construct([text], with_noise, random.Random(3), noise=random.Random(4))
    assert np.array_equal(sample.targets, plain.targets)
    changed = sample.tokens != plain.tokens
    assert not changed[: plain.sep].any()
    assert (sample.tokens[changed] == BLOCK).all() and not (plain.tokens[changed] == SOP).any()
    inside = (plain.tokens != SOP)[plain.sep :].sum()
    assert changed.sum() / inside == pytest.approx(0.4 * noisy, abs=0.12)
  with pytest.raises(DataError, match='dBLOCK'):
    ids = IDS._replace(block_mask=None)
    recipe = InfillingConfig(block_mask_prob=0.1)
    infilling.construct([text], recipe, ids, random.Random(0))


def test_random_positions_stay_within_the_length():
  text = document(*range(1, 41))
  offsets = set()
  for seed in range(300):
    for sample in construct(
      [text], InfillingConfig(span_prob=1.0, random_position=True), random.Random(seed),
      max_length=48,
    ):  # fmt: skip
      offset = int(sample.positions[0, 0])
      offsets.add(offset)
      assert sample.positions[0].max() < 48
      assert np.array_equal(
        sample.positions[0, : sample.sep] - offset, np.arange(sample.sep)
      )  # fmt: skip
      assert sample.positions[0, sample.sep :].min() >= offset
      assert sample.positions[1].max() <= 40
  assert min(offsets) == 0 and max(offsets) >= 10


def test_short_texts():
  """Cut texts are runs of the text, shorter than it, and most begin after a sentence."""
  text = document(*range(1, 120))
  recipe = InfillingConfig(span_prob=1.0)
  lengths, aligned = [], []
  for seed in range(60):
    rng = random.Random(seed)
    for run in infilling.split_texts([text], IDS, SENTENCE_END, 128, rng):
      assert run[0] == START
      assert run[1:] in [text[i : i + len(run) - 1] for i in range(len(text))]
      lengths.append(len(run))
      aligned.append(run[1] == 1 or SENTENCE_END[run[1] - 1])
    always = construct([text], recipe, random.Random(seed), max_length=128, short_prob=1.0)
    assert all(restored(sample)[1:3] != [START, START] for sample in always)
  assert max(lengths) <= 128 and min(lengths) < 64
  assert all(aligned)


def test_what_does_not_fit_is_left_out():
  tiny, long = document(1), document(*range(1, 80))
  recipe = InfillingConfig(span_prob=1.0, single_span_prob=1.0)
  left_out = 0
  for seed in range(30):
    samples = construct([tiny, long], recipe, random.Random(seed))
    assert 1 <= len(samples) <= 2
    left_out += len(samples) == 1
  assert left_out > 15  # A span of one word fits, and 84 % are longer.
  assert construct([[START, END]], InfillingConfig(span_prob=0.0), random.Random(0)) == []


def test_impossible_recipes():
  with pytest.raises(DataError, match=r'span_prob is 1\.5; it must lie in'):
    InfillingConfig(span_prob=1.5)
  with pytest.raises(DataError, match='must not exceed 1 together'):
    InfillingConfig(span_prob=0.7, sentence_prob=0.5)
  with pytest.raises(DataError, match='sentence_end'):
    recipe = InfillingConfig(span_prob=0.0, sentence_prob=1.0)
    infilling.construct([document(1, 2, 3)], recipe, IDS, random.Random(0))
