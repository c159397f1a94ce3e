"""metrics.jsonl stays one clean curve, whatever a crash left in it."""

import json

import numpy as np
import pytest
from tensorboardX.proto import event_pb2

from glm5_jax.train import metrics


def _write(folder, steps, start=0):
  with metrics.MetricsWriter(folder, start) as writer:
    for step in steps:
      writer.write(step, {'loss': np.float32(1 / step), 'load': np.full((2, 4), 0.25)})


def test_rows_and_tensorboard(tmp_path):
  _write(tmp_path, [1, 2])
  rows = metrics.read(tmp_path / 'metrics.jsonl')
  assert rows == [
    {'step': 1, 'loss': 1.0, 'load': [[0.25] * 4] * 2},
    {'step': 2, 'loss': 0.5, 'load': [[0.25] * 4] * 2},
  ]
  data = next((tmp_path / 'tensorboard').iterdir()).read_bytes()
  events, at = [], 0
  while at < len(data):  # TFRecord: length, crc, content, crc.
    size = int.from_bytes(data[at : at + 8], 'little')
    events.append(event_pb2.Event.FromString(data[at + 12 : at + 12 + size]))
    at += size + 16
  scalars = {
    (v.tag, e.step): v.simple_value
    for e in events
    for v in e.summary.value
    if v.HasField('simple_value')
  }
  assert scalars == {('train/loss', 1): 1.0, ('train/loss', 2): 0.5}
  assert sum(v.HasField('histo') for e in events for v in e.summary.value) == 2


def test_not_finite_is_null_and_valid_json(tmp_path):
  with metrics.MetricsWriter(tmp_path) as writer:
    writer.write(1, {'loss': float('nan'), 'grad_norm': np.float32('inf')})
  line = (tmp_path / 'metrics.jsonl').read_text()
  assert json.loads(line, parse_constant=pytest.fail) == {
    'step': 1,
    'loss': None,
    'grad_norm': None,
  }


@pytest.mark.parametrize('tail', ['{"step": 6, "los', '{"step": 6}', '\0\0\0\n', '[6]\n', ''])
def test_resuming_drops_later_rows_and_a_damaged_end(tmp_path, tail):
  _write(tmp_path, range(1, 6))
  file = tmp_path / 'metrics.jsonl'
  before = file.read_bytes().splitlines(keepends=True)
  file.write_bytes(b''.join(before) + tail.encode())
  _write(tmp_path, [4], start=3)
  assert file.read_bytes().splitlines(keepends=True) == before[:3] + [before[3]]
  assert [r['step'] for r in metrics.read(file)] == [1, 2, 3, 4]
  assert [p.name for p in tmp_path.iterdir() if p.name.startswith('.')] == []


def test_a_fresh_run_starts_empty(tmp_path):
  _write(tmp_path, [1, 2])
  _write(tmp_path, [1])
  assert [r['step'] for r in metrics.read(tmp_path / 'metrics.jsonl')] == [1]


def test_read_without_a_file(tmp_path):
  assert metrics.read(tmp_path / 'none.jsonl') == []
