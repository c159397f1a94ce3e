"""The selection against a stable sort: exact ties, signed zeros, infinities, short rows."""

import functools

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp

from glm5_jax.ops import topk
from glm5_jax.ops.cumsum import cumulative_count
from tests import oracle

SIZE = 23
INF = np.float32(np.inf)


@functools.partial(jax.jit, static_argnums=2)
def select(scores, visible, k):
  return topk.select_mask(scores, visible, k)


def check(scores, visible, k):
  scores = np.asarray(scores, np.float32)
  visible = np.broadcast_to(np.asarray(visible, bool), scores.shape)
  got = np.asarray(select(scores, visible, k))
  np.testing.assert_array_equal(got, oracle.top_k_mask(scores, visible, k))
  return got


# Few distinct values, so that most rows have ties at the boundary; both zeros, both infinities.
COARSE = st.sampled_from([0.0, -0.0, 1.0, -1.0, 2.5, float(INF), -float(INF), 1e-30, -3e38])
ANY = st.floats(width=32, allow_nan=False, allow_subnormal=False)


@hypothesis.settings(max_examples=60, deadline=None, derandomize=True)
@hypothesis.given(
  scores=st.one_of(
    hnp.arrays(np.float32, (4, SIZE), elements=COARSE),
    hnp.arrays(np.float32, (4, SIZE), elements=ANY),
  ),
  visible=hnp.arrays(bool, (4, SIZE)),
  k=st.sampled_from([1, 5, SIZE - 1, SIZE, SIZE + 4]),
)
def test_equals_a_stable_sort(scores, visible, k):
  check(scores, visible, k)


def test_lowest_index_wins_ties():
  scores = np.array([[3.0, 1.0, 2.0, 2.0, 2.0, 0.0, 2.0]])
  got = check(scores, True, 3)
  assert np.flatnonzero(got[0]).tolist() == [0, 2, 3]


def test_all_equal_rows():
  for value in (0.0, -0.0, 7.0, -float(INF), float(INF)):
    got = check(np.full((2, SIZE), value), True, 5)
    assert np.flatnonzero(got[0]).tolist() == [0, 1, 2, 3, 4]


def test_negative_zero_equals_zero():
  """ReLU sums leave both zeros; a comparison of bit patterns alone would rank them."""
  scores = np.array([[-0.0, 0.0, -0.0, 0.0, -1.0, 0.0], [0.0, -0.0, 0.0, -0.0, 1.0, -0.0]])
  got = check(scores, True, 3)
  assert np.flatnonzero(got[0]).tolist() == [0, 1, 2]
  assert np.flatnonzero(got[1]).tolist() == [0, 1, 4]


def test_rows_shorter_than_k():
  """As in a causal mask: query t sees t + 1 keys; all are selected until there are more than k."""
  scores = np.random.default_rng(0).standard_normal((SIZE, SIZE))
  got = check(scores, np.tri(SIZE), 9)
  assert got.sum(1).tolist() == [min(t + 1, 9) for t in range(SIZE)]
  assert not check(scores, np.zeros((SIZE, SIZE)), 9).any()


def test_k_of_at_least_the_row_selects_all_visible():
  visible = np.random.default_rng(0).random((4, SIZE)) < 0.5
  for k in (SIZE, SIZE + 1, 1000):
    np.testing.assert_array_equal(check(np.zeros((4, SIZE)), visible, k), visible)


def test_minus_infinity_is_a_score_like_others():
  """Visible keys scored -inf come before invisible ones, wherever they stand."""
  scores = np.full((2, 8), -INF)
  scores[:, 7] = 1.0
  visible = np.array([[False, False, False, True, True, True, True, True], [True] * 8])
  got = check(scores, visible, 3)
  assert np.flatnonzero(got[0]).tolist() == [3, 4, 7]
  got = check(scores, visible & (np.arange(8) > 5), 3)  # Fewer than k visible, one at -inf.
  assert np.flatnonzero(got[0]).tolist() == [6, 7]


def test_nan_is_selected():
  """A diverged score must not silently drop out, whatever its sign bit (x86 makes negative NaNs)."""
  scores = np.zeros((2, 8), np.float32)
  scores[0, 5], scores[1, 6] = np.nan, np.copysign(np.float32(np.nan), np.float32(-1))
  got = np.asarray(select(scores, np.ones((2, 8), bool), 2))
  assert [np.flatnonzero(row).tolist() for row in got] == [[0, 5], [0, 6]]


@pytest.mark.parametrize('rows', [1, 512, 700, 1024, 1536])
def test_many_rows_in_blocks(rows):
  """Long inputs are processed in blocks of rows; every row count must come out whole."""
  rng = np.random.default_rng(rows)
  scores = np.round(rng.standard_normal((rows, 12)), 1)
  check(scores, rng.random((rows, 12)) < 0.8, 4)


def test_leading_axes_and_dtypes():
  scores = np.random.default_rng(1).standard_normal((2, 3, SIZE)).astype('float32')
  visible = np.broadcast_to(np.tri(3, SIZE, 8, dtype=bool), scores.shape)
  np.testing.assert_array_equal(select(scores, visible, 4), oracle.top_k_mask(scores, visible, 4))
  half = jnp.asarray(scores, jnp.bfloat16)
  want = oracle.top_k_mask(np.asarray(half, np.float32), visible, 4)
  np.testing.assert_array_equal(select(half, visible, 4), want)


def test_selection_does_not_depend_on_the_other_rows():
  """A row that needs many sweeps must not disturb one that settled earlier."""
  easy = np.arange(SIZE, dtype=np.float32)
  hard = np.nextafter(np.float32(1), np.float32(2)) * np.ones(SIZE, np.float32)
  hard[3], hard[17] = 1.0, 3e38
  mixed = check(np.stack([easy, hard, -easy, -hard]), True, 6)
  for i, row in enumerate((easy, hard, -easy, -hard)):
    np.testing.assert_array_equal(check(np.stack([row] * 4), True, 6)[0], mixed[i])


@hypothesis.settings(max_examples=40, deadline=None, derandomize=True)
@hypothesis.given(mask=hnp.arrays(bool, (2, 3, SIZE)), k=st.sampled_from([4, SIZE, SIZE + 3]))
def test_mask_to_indices_and_back(mask, k):
  mask = mask & (np.cumsum(mask, -1) <= k)
  indices = np.asarray(_to_indices(mask, k))
  assert indices.shape == (2, 3, k)
  for row in np.ndindex(2, 3):
    set_ = np.flatnonzero(mask[row])
    assert indices[row].tolist() == set_.tolist() + [-1] * (k - len(set_))
  np.testing.assert_array_equal(_to_mask(indices, SIZE), mask)


_to_indices = jax.jit(topk.mask_to_indices, static_argnums=1)
_to_mask = jax.jit(topk.indices_to_mask, static_argnums=1)


@pytest.mark.parametrize('size', [1, 127, 128, 129, 20000])
def test_cumulative_count(size):
  x = np.random.default_rng(size).integers(0, 2, (2, size)).astype(bool)
  x[0] = True
  got = cumulative_count(jnp.asarray(x))
  assert got.dtype == jnp.int32
  np.testing.assert_array_equal(got, np.cumsum(x, -1))
