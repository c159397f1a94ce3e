"""Packing: nothing lost or doubled, rows well formed, algorithms against naive ones and Grain's."""

import grain
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from glm5_jax.data import packing

# A busy machine is no failure, and 60 random cases find what 100 do.
PROPERTY = settings(deadline=None, max_examples=60)
LENGTHS = st.lists(st.integers(1, 70), min_size=1, max_size=12)
METHODS = st.sampled_from(['concat', 'first_fit', 'best_fit'])
PAD = -1


def reader(lengths):
  """Documents whose input number i is 1000 * document + i and is followed by its successor."""

  def read(document, start, length):
    assert 0 <= start < start + length <= lengths[document]
    inputs = 1000 * document + np.arange(start, start + length)
    return inputs, inputs + 1

  return read


@PROPERTY
@given(lengths=LENGTHS, seq_len=st.integers(1, 32), method=METHODS, seed=st.integers(0, 99))
def test_every_input_once_in_well_formed_rows(lengths, seq_len, method, seed):
  plan = packing.plan_rows(np.array(lengths), seq_len, method, seed)
  read = reader(lengths)
  seen = []
  for index in range(len(plan)):
    row = packing.build_row(plan.row(index), read, seq_len, PAD)
    assert {k: (v.shape, v.dtype.name) for k, v in row.items()} == {
      'tokens': ((seq_len,), 'int32'),
      'targets': ((seq_len,), 'int32'),
      'weights': ((seq_len,), 'float32'),
      'segment_ids': ((seq_len,), 'int32'),
      'positions': ((seq_len,), 'int32'),
    }
    segments = row['segment_ids']
    used = int((segments > 0).sum())
    assert 0 < used <= seq_len
    # Segments 1, 2, ... in order without gaps, then only padding.
    assert segments[0] == 1
    assert set(np.diff(segments[:used]).tolist()) <= {0, 1}
    assert not segments[used:].any() and not row['positions'][used:].any()
    assert (row['tokens'][used:] == PAD).all() and (row['targets'][used:] == PAD).all()
    assert np.array_equal(row['weights'], segments > 0)
    for segment in range(1, segments.max() + 1):
      inside = segments == segment
      tokens = row['tokens'][inside]
      assert np.array_equal(row['positions'][inside], np.arange(len(tokens)))
      assert (np.diff(tokens) == 1).all()  # One document, nothing left out.
      assert np.array_equal(row['targets'][inside], tokens + 1)
    seen += row['tokens'][:used].tolist()
  assert sorted(seen) == [1000 * d + i for d, n in enumerate(lengths) for i in range(n)]
  assert plan.density == pytest.approx(sum(lengths) / (len(plan) * seq_len))


@PROPERTY
@given(lengths=LENGTHS, seq_len=st.integers(1, 32), seed=st.integers(0, 9))
def test_concat_fills_every_row_but_one(lengths, seq_len, seed):
  plan = packing.plan_rows(np.array(lengths), seq_len, 'concat', seed)
  assert len(plan) == -(-sum(lengths) // seq_len)
  fill = [int(plan.row(i).length.sum()) for i in range(len(plan))]
  assert fill[:-1] == [seq_len] * (len(plan) - 1)


@PROPERTY
@given(lengths=LENGTHS, seq_len=st.integers(1, 32))
def test_fitting_methods_cut_only_what_must_be(lengths, seq_len):
  for method in ('first_fit', 'best_fit'):
    plan = packing.plan_rows(np.array(lengths), seq_len, method, 0)
    assert len(plan.pieces.length) == sum(-(-n // seq_len) for n in lengths)


@PROPERTY
@given(
  lengths=LENGTHS, seq_len=st.integers(2, 32), overlap=st.integers(0, 31), seed=st.integers(0, 9)
)
def test_overlap_gives_context_and_still_counts_once(lengths, seq_len, overlap, seed):
  if overlap >= seq_len:
    with pytest.raises(ValueError, match='overlap'):
      packing.cut(np.array(lengths), seq_len, overlap)
    return
  plan = packing.plan_rows(np.array(lengths), seq_len, 'best_fit', seed, overlap)
  read = reader(lengths)
  counted = []
  for index in range(len(plan)):
    row = packing.build_row(plan.row(index), read, seq_len, PAD)
    counted += row['tokens'][row['weights'] > 0].tolist()
  assert sorted(counted) == [1000 * d + i for d, n in enumerate(lengths) for i in range(n)]
  continued = plan.pieces.start > 0
  assert (plan.pieces.context == np.where(continued, overlap, 0)).all()


def naive(lengths, capacity, order, choose):
  rows, free = np.empty(len(lengths), int), []
  for i in order:
    fitting = [r for r, f in enumerate(free) if f >= lengths[i]]
    if fitting:
      row = choose(fitting, free)
    else:
      row = len(free)
      free.append(capacity)
    free[row] -= lengths[i]
    rows[i] = row
  return rows, free


ITEMS = st.lists(st.integers(1, 20), min_size=1, max_size=80).map(np.array)


@PROPERTY
@given(lengths=ITEMS)
def test_first_fit_is_first_fit(lengths):
  expected, _ = naive(lengths, 20, range(len(lengths)), lambda fitting, free: fitting[0])
  np.testing.assert_array_equal(packing.first_fit(lengths, 20), expected)


@PROPERTY
@given(lengths=ITEMS, open_rows=st.integers(1, 4))
def test_first_fit_with_few_open_rows_never_overfills(lengths, open_rows):
  rows = packing.first_fit(lengths, 20, open_rows)
  assert np.bincount(rows, weights=lengths).max() <= 20
  assert sorted(set(rows.tolist())) == list(range(rows.max() + 1))


@PROPERTY
@given(lengths=ITEMS)
def test_best_fit_is_best_fit_decreasing(lengths):
  order = np.argsort(-lengths, kind='stable')
  _, free = naive(lengths, 20, order, lambda fitting, free: min(fitting, key=lambda r: free[r]))
  rows = packing.best_fit(lengths, 20)
  room = 20 - np.bincount(rows, weights=lengths)
  # Ties between equally full rows are free; the rows' contents are then the same.
  assert sorted(room.tolist()) == sorted(free)


def test_denser_than_grain_on_log_normal_lengths():
  rng = np.random.default_rng(0)
  documents = np.maximum(1, rng.lognormal(5, 1, 1000).astype(int))
  pieces = packing.cut(documents, 512).length
  source = grain.MapDataset.source(pieces).map(lambda n: {'x': np.zeros(n, np.int32)})
  grains = grain.experimental.BestFitPackIterDataset(
    source.to_iter_dataset(), length_struct={'x': 512}, num_packing_bins=64
  )
  ours = packing.plan_rows(documents, 512, 'best_fit', 0)
  assert len(ours) <= sum(1 for _ in grains)
  assert ours.density > 0.995
  assert packing.plan_rows(documents, 512, 'first_fit', 0).density > 0.98


def test_concat_cuts_elsewhere_each_epoch():
  """Random truncation: even a single document is cut at other points."""
  starts = [
    tuple(packing.plan_rows(np.array([1000]), 64, 'concat', (0, epoch)).pieces.start.tolist())
    for epoch in range(5)
  ]
  assert len(set(starts)) == 5
