"""The progress line, on a terminal and without one."""

import io
import re

from glm5_jax.train.progress import ProgressLine


class _Terminal(io.StringIO):
  def isatty(self):
    return True


def test_plain_lines_without_a_terminal():
  out = io.StringIO()
  with ProgressLine(100, stream=out, seconds=3600) as line:
    for step in range(1, 101):
      line.update(step, 5.0 / step, 1234.5)
    line.message('something happened')
  lines = out.getvalue().splitlines()
  assert len(lines) == 3, 'the first step, the last step, the message'
  assert lines[0] == 'step 1/100  loss 5.0000  1,234 tokens/s'
  assert re.fullmatch(r'step 100/100  loss 0\.0500  1,234 tokens/s  0:00 left', lines[1])
  assert lines[2] == 'something happened'
  assert '\x1b' not in out.getvalue()


def test_plain_lines_come_every_few_seconds():
  out = io.StringIO()
  with ProgressLine(10, stream=out, seconds=0) as line:
    for step in range(1, 11):
      line.update(step, 1.0, 10)
    line.note('held-out 1.0')
  assert len(out.getvalue().splitlines()) == 11
  assert out.getvalue().endswith('held-out 1.0\n')


def test_the_number_is_called_what_it_is():
  out = io.StringIO()
  ProgressLine(10, value='reward', stream=out).update(1, 0.25, 10)
  assert out.getvalue() == 'step 1/10  reward 0.2500  10 tokens/s\n'


def test_one_live_line_on_a_terminal(monkeypatch):
  monkeypatch.setenv('TERM', 'xterm-256color')
  monkeypatch.setenv('COLUMNS', '120')
  out = _Terminal()
  with ProgressLine(10, step=4, stream=out) as line:
    line.update(5, 2.5, 4321)
    line.note('held-out 2.4 [nats]')
    line.message('kept above')
  text = out.getvalue()
  assert '\x1b[' in text, 'a terminal gets control codes'
  assert 'step 5/10  loss 2.5000  4,321 tokens/s  held-out 2.4 [nats]' in text
  assert 'kept above\n' in text


def test_time_left_does_not_count_the_first_step(monkeypatch):
  now = [0.0]
  monkeypatch.setattr('glm5_jax.train.progress.time.monotonic', lambda: now[0])
  out = io.StringIO()
  line = ProgressLine(4000, stream=out, seconds=0)
  now[0] = 500.0  # Compilation.
  line.update(1, 1.0, 1)
  now[0] = 502.0
  line.update(3, 1.0, 1)
  assert out.getvalue().splitlines()[-1].endswith('1:06:37 left')
