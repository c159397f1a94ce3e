"""Unions of neighbouring queries' selections by merging: those of sets, and those of `layout.row_lists`."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import tpu as pltpu

from pallas_kernels.interpret import races_found
from pallas_kernels.sparse_mla import kernel_lists, layout
from tests import tiny


@functools.partial(jax.jit, static_argnames='queries', compiler_options=dict(tiny.FAST_COMPILE))
def unions(indices, queries):
  return kernel_lists.unions(indices, queries, interpret=True)


def selections(rng, count: int, k: int, rows: int) -> np.ndarray:
  """[count, k]: some full, some short, some empty; ascending."""
  indices = np.full((count, k), -1, np.int32)
  for row in indices:
    size = min(k, rows) if rng.random() < 0.5 else rng.integers(0, min(k, rows) + 1)
    row[:size] = np.sort(rng.choice(rows, size, replace=False))
  return indices


def check(indices: np.ndarray, queries: int) -> None:
  """Against sets, then all that the kernels get against `row_lists`."""
  rows, masks, sizes = map(np.asarray, unions(jnp.asarray(indices), queries))
  for g in range(len(indices) // queries):
    want: dict[int, int] = {}
    for m, row in enumerate(indices[g * queries : (g + 1) * queries]):
      for i in row[row >= 0]:
        want[int(i)] = want.get(int(i), 0) | 1 << m
    assert sizes[g] == len(want)
    assert rows[g, : sizes[g]].tolist() == sorted(want)
    assert masks[g, : sizes[g]].tolist() == [want[i] for i in sorted(want)]
  total = int(max(indices.max(), 0)) + 1
  ours = layout.fill_up(*map(jnp.asarray, (rows, masks, sizes)), 8, total)
  theirs = layout.row_lists(jnp.asarray(indices), queries, 8, total)
  for a, b in zip(ours, theirs, strict=True):
    np.testing.assert_array_equal(a, b)


@pytest.mark.parametrize(
  'blocks, queries, k, rows',
  [
    (3, 2, 5, 40),  # Fewer entries than the least.
    (130, 4, 33, 60),  # More blocks than lanes; a length that is no power of two.
    (2, 8, 100, 90),  # More than there are rows.
    (3, 16, 64, 5000),  # Hardly any row twice.
    (2, 3, 20, 50),  # Queries that are no power of two.
  ],
)  # fmt: skip
def test_unions(blocks, queries, k, rows):
  rng = np.random.default_rng(blocks * queries)
  check(selections(rng, blocks * queries, k, rows), queries)


def test_everything_is_the_same_and_nothing_is():
  """Runs of 16 of each row, which cross sublanes; then no row twice; then nothing, and one alone."""
  same = np.tile(np.arange(64, dtype=np.int32) * 3, (16, 1))
  disjoint = np.arange(16 * 64, dtype=np.int32).reshape(64, 16).T
  empty = np.full((16, 64), -1, np.int32)
  one = empty.copy()
  one[11, 0] = 7
  # Runs of 15 and less do not end where sublanes do.
  shifted = same.copy()
  shifted[5, 20:] = np.append(same[5, 21:], -1)
  check(np.concatenate([same, disjoint, empty, one, shifted]), 16)


def test_the_largest_rows():
  """27 bits of a row and 4 of a query."""
  largest = (1 << 31) // 16 - 2
  indices = np.full((16, 8), -1, np.int32)
  indices[:, :3] = [0, largest - 1, largest]
  rows, masks, sizes = unions(jnp.asarray(indices), 16)
  assert sizes.tolist() == [3] and rows[0, :3].tolist() == [0, largest - 1, largest]
  assert masks[0, :3].tolist() == [0xFFFF] * 3


def test_more_than_its_words_can_tell_apart_is_refused():
  assert kernel_lists.fits(16, 2048) and kernel_lists.fits(2, 16_384)
  assert not kernel_lists.fits(16, 2049) and not kernel_lists.fits(1, 8)
  assert not kernel_lists.fits(17, 8)
  with pytest.raises(ValueError, match=r'from 2 to 16 queries, and 32768 entries'):
    kernel_lists.unions(jnp.zeros((16, 2049), jnp.int32), 16)


def test_as_a_tpu_runs_it():
  """With memory that holds NaN's bits before it is written, and a watch for races."""
  interpret = pltpu.InterpretParams(detect_races=True, uninitialized_memory='nan')
  indices = selections(np.random.default_rng(0), 258, 5, 40)
  got = kernel_lists.unions(jnp.asarray(indices), 2, interpret=interpret)
  assert not races_found()
  ours = layout.fill_up(*got, 8, 40)
  for a, b in zip(ours, layout.row_lists(jnp.asarray(indices), 2, 8, 40), strict=True):
    np.testing.assert_array_equal(a, b)
