"""What a person sees while a run is on: one live line on a terminal, plain lines elsewhere."""

import sys
import time
from typing import TextIO

from rich.console import Console
from rich.progress import BarColumn, Progress, TextColumn


class ProgressLine:
  """`step 120/600  loss 2.345  4,321 tokens/s  1:23 left  eval 2.4`.

  On a terminal the line is redrawn in place under a bar. Without one (a pipe, a log file) the same
  text is printed as a line of its own, at most every `seconds` and at the last step.

  Args:
    total: the last step.
    step: the step the run starts from.
    value: what the number is that every step shows.
    stream: where to write; standard output by default.
    seconds: between plain lines.
  """

  def __init__(
    self,
    total: int,
    step: int = 0,
    *,
    value: str = 'loss',
    stream: TextIO | None = None,
    seconds: float = 5.0,
  ):
    self._total, self._step = total, step
    self._value, self._seconds = value, seconds
    self._stream = stream or sys.stdout
    self._last_line = -float('inf')
    self._timed: tuple[float, int] | None = None
    self._text = 'compiling'
    self._note = ''
    console = Console(file=self._stream)
    self._bar: Progress | None = None
    if console.is_terminal:
      self._bar = Progress(
        BarColumn(bar_width=20), TextColumn('{task.description}'), console=console,
        refresh_per_second=4, redirect_stdout=False, redirect_stderr=False,
      )  # fmt: skip
      self._task = self._bar.add_task(self._text, total=total, completed=step)
      self._bar.start()

  def update(self, step: int, value: float, tokens_per_second: float) -> None:
    """Shows a finished step. The time left comes from the steps after the first, which compiles."""
    now = time.monotonic()
    self._step = step
    left = ''
    if self._timed is None:
      self._timed = (now, step)
    elif step > self._timed[1]:
      start, first = self._timed
      left = f'  {_duration((now - start) / (step - first) * (self._total - step))} left'
    self._text = (
      f'step {step}/{self._total}  {self._value} {value:.4f}'
      f'  {tokens_per_second:,.0f} tokens/s{left}'
    )
    self._show(force=step >= self._total)

  def note(self, text: str) -> None:
    """A short remark that stays at the end of the line, such as the last evaluation."""
    self._note = text
    self._show()

  def message(self, text: str) -> None:
    """A full line that stays above the live one."""
    if self._bar:
      self._bar.console.print(text, markup=False, highlight=False, soft_wrap=True)
    else:
      print(text, file=self._stream, flush=True)

  def close(self) -> None:
    if self._bar:
      self._bar.stop()
      self._bar = None

  def _show(self, force: bool = False) -> None:
    text = f'{self._text}  {self._note}' if self._note else self._text
    if self._bar:
      self._bar.update(self._task, completed=self._step, description=text.replace('[', r'\['))
      return
    now = time.monotonic()
    if force or now - self._last_line >= self._seconds:
      self._last_line = now
      print(text, file=self._stream, flush=True)

  def __enter__(self):
    return self

  def __exit__(self, *_):
    self.close()


def _duration(seconds: float) -> str:
  minutes, seconds = divmod(max(0, round(seconds)), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02}:{seconds:02}' if hours else f'{minutes}:{seconds:02}'
