"""What must not change a token's output: later tokens, other documents of its row, padding."""

import numpy as np
import pytest

from glm5_jax.modules.block import Options
from tests import oracle, tiny

STEPS = 3
TIME = 48
# Two rows: documents of 20, 9 and 17 tokens with padding between; one of 5, then one of 43.
ROWS = (((0, 20), (20, 29), (31, 48)), ((0, 5), (5, 48)))
# Equal but for the order of additions: an expert's tokens sit elsewhere in its blocks.
ROUNDING = 3e-6


def run(golden, ids, segments=None, positions=None):
  return tiny.forward(
    golden.params, ids, golden.config, segments=segments, positions=positions,
    options=Options(capture=True), mtp_steps=STEPS,
  )  # fmt: skip


def packed() -> tuple[np.ndarray, np.ndarray]:
  """Segment ids and positions of ROWS; padding is 0."""
  segments, positions = np.zeros((2, 2, TIME), np.int32)
  for b, documents in enumerate(ROWS):
    for i, (start, end) in enumerate(documents):
      segments[b, start:end] = i + 1
      positions[b, start:end] = np.arange(end - start)
  return segments, positions


@pytest.fixture(scope='module')
def base(with_mtp):
  return run(with_mtp, with_mtp.ids)


@pytest.fixture(scope='module')
def packed_run(with_mtp):
  return run(with_mtp, with_mtp.ids, *packed())


def test_packed_documents_equal_separate_ones(with_mtp, packed_run):
  """Main and MTP logits of each document are those of the document alone in its row."""
  assert max(end - start for row in ROWS for start, end in row) > with_mtp.config.index_topk
  for b, documents in enumerate(ROWS):
    for start, end in documents:
      length = end - start
      alone = np.zeros((2, TIME), np.int32)
      alone[b, :length] = with_mtp.ids[b, start:end]
      segments = np.zeros_like(alone)
      segments[b, :length] = 1
      single = run(with_mtp, alone, segments)
      tiny.close(
        f'packed document of {length} tokens', packed_run.logits[b, start:end],
        single.logits[b, :length], 1e-5,
      )  # fmt: skip
      for k in range(STEPS):
        kept = length - k - 1  # Whose token k + 1 ahead is still of the document.
        tiny.close(
          f'MTP step {k + 1}', packed_run.mtp_logits[k][b, start : start + kept],
          single.mtp_logits[k][b, :kept], 1e-5,
        )  # fmt: skip


def test_packed_rows_equal_the_oracle(with_mtp, packed_run):
  segments, positions = packed()
  want = oracle.forward(
    with_mtp.tensors, with_mtp.raw, with_mtp.ids, segments=segments, positions=positions
  )
  where = (segments > 0)[..., None]
  tiny.close('packed logits', packed_run.logits, want['logits'], 1e-5, where=where)
  for ours, theirs in zip(
    tiny.layers(with_mtp.config, packed_run.aux), want['layers'], strict=True
  ):
    np.testing.assert_array_equal(ours['selected'], theirs['selected'])
    if 'load' in ours:  # Padding counts nowhere in the router's statistics.
      chosen = theirs['experts'].reshape(2, TIME, -1)[segments > 0]
      counts = np.bincount(chosen.ravel(), minlength=8)
      np.testing.assert_allclose(ours['load'], counts / counts.sum(), atol=1e-6)


def test_only_relative_positions_count(with_mtp, packed_run):
  """Positions that run through the row, or start at 100, give what restarted ones give."""
  segments, _ = packed()
  positions = np.broadcast_to(np.arange(TIME), segments.shape) + np.array([[0], [100]])
  shifted = run(with_mtp, with_mtp.ids, segments, positions)
  where = (segments > 0)[..., None]
  tiny.close('shifted positions', shifted.logits, packed_run.logits, 2e-5, where=where)


@pytest.mark.parametrize('changed', [47, 30, 17, 1])
def test_causality(with_mtp, base, changed):
  """Another token at `changed` of row 0: nothing before it moves, nor anything of row 1, neither in
  the selections nor in the routing; an MTP step sees as many tokens further as its number says.
  """
  ids = with_mtp.ids.copy()
  ids[0, changed] = (ids[0, changed] + 1) % 256
  after = run(with_mtp, ids)
  tiny.close('past logits', after.logits[0, :changed], base.logits[0, :changed], ROUNDING)
  tiny.close('other row', after.logits[1], base.logits[1], ROUNDING)
  assert np.abs(after.logits[0, changed] - base.logits[0, changed]).max() > 0.1
  for k in range(STEPS):
    seen = changed - k - 1
    if seen <= 0:
      continue
    tiny.close(
      f'MTP step {k + 1}', after.mtp_logits[k][0, :seen], base.mtp_logits[k][0, :seen], ROUNDING
    )
    assert np.abs(after.mtp_logits[k][0, seen] - base.mtp_logits[k][0, seen]).max() > 0.1
  for a, b in zip(
    tiny.layers(with_mtp.config, after.aux), tiny.layers(with_mtp.config, base.aux), strict=True
  ):
    np.testing.assert_array_equal(a['selected'][0, :changed], b['selected'][0, :changed])
    np.testing.assert_array_equal(a['selected'][1], b['selected'][1])
    if 'router_experts' in a:
      np.testing.assert_array_equal(a['router_experts'][:changed], b['router_experts'][:changed])


def test_padding_content_is_irrelevant(with_mtp, packed_run):
  """Whatever fills the padding, and where the documents' outputs are read, nothing differs."""
  segments, positions = packed()
  rng = np.random.default_rng(0)
  for trial in range(2):
    ids, places = with_mtp.ids.copy(), positions.copy()
    padding = segments == 0
    ids[padding] = rng.integers(0, 256, padding.sum()) if trial else 0
    places[padding] = rng.integers(0, 1000, padding.sum())
    after = run(with_mtp, ids, segments, places)
    tiny.close('logits', after.logits, packed_run.logits, ROUNDING, where=~padding[..., None])
    for a, b in zip(
      tiny.layers(with_mtp.config, after.aux), tiny.layers(with_mtp.config, packed_run.aux),
      strict=True,
    ):  # fmt: skip
      np.testing.assert_array_equal(a['selected'][~padding], b['selected'][~padding])
      for name in ('load', 'balance_loss'):
        if name in a:
          np.testing.assert_allclose(a[name], b[name], atol=1e-6)
    assert np.isfinite(after.logits).all()


def test_order_of_rows_is_irrelevant(with_mtp, base):
  flipped = run(with_mtp, with_mtp.ids[::-1])
  tiny.close('flipped rows', flipped.logits[::-1], base.logits, ROUNDING)
