"""What a run shows while it trains: one live line, and plain tables."""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

LINE_SECONDS = 10.0  # between two lines when the stream is no terminal
WINDOW = 20  # updates in the moving averages


class Progress:
  """One line that says how far a run is.

    iteration 12/60 | success 0.41 | reward 0.39 | 45.2k tok/s | 2.1 s/it | 01:40 left

  On a terminal the line is drawn in place; elsewhere (a file, a pipe, CI) a line is printed about every 10 seconds and
  at the end. Times are moving averages over the last 20 updates without the first one, which compiles.
  """

  def __init__(
    self,
    total: int,
    start: int = 0,
    stream: TextIO | None = None,
    enabled: bool = True,
    clock: Callable[[], float] = time.monotonic,
    noun: str = 'iteration',
  ):
    """Starts the clock.

    Args:
      total: number of iterations of the run.
      start: how many of them are done already (a resumed run).
      stream: where to write; None means standard error.
      enabled: False shows nothing (processes other than the first).
      clock: seconds since any fixed moment.
      noun: what is counted.
    """
    self._noun = noun
    self._total = total
    self._done = start
    self._stream = sys.stderr if stream is None else stream
    self._enabled = enabled
    self._clock = clock
    self._live = self._stream.isatty() and os.environ.get('TERM') != 'dumb'
    # (iterations, seconds, tokens) of each update
    self._window: collections.deque[tuple[int, float, int]] = collections.deque(maxlen=WINDOW)
    self._compiled = False  # whether the update that compiles is behind us
    self._last_update = clock()
    self._last_print = -float('inf')
    self._parts: list[str] = []
    self._shown = True

  def update(self, done: int, values: Mapping[str, float] | None = None, tokens: int = 0) -> None:
    """Shows that `done` iterations are behind us.

    Args:
      done: iterations done in all, those before `start` included.
      values: name -> number to show, in this order.
      tokens: tokens sampled or trained on since the last update, for tok/s; 0 leaves it out.
    """
    now = self._clock()
    interval = (max(done - self._done, 1), now - self._last_update, tokens)
    if self._compiled:
      self._window.append(interval)
    self._done, self._last_update = done, now
    self._parts = self._format(values or {}, interval)
    self._compiled = True
    self._shown = False
    if self._live or now - self._last_print >= LINE_SECONDS:
      self._show()

  def write(self, text: str) -> None:
    """Writes lines that stay, above the live one."""
    if not self._enabled:
      return
    self._stream.write(f'\r\x1b[K{text}\n' if self._live else f'{text}\n')
    if self._live and self._parts:
      self._show()
    self._stream.flush()

  def close(self) -> None:
    """Leaves the last line on the screen; closing twice is fine."""
    if not self._shown:
      self._show()
    if self._enabled and self._live and self._parts:
      self._stream.write('\n')
      self._stream.flush()
    self._parts = []

  def __enter__(self) -> Progress:
    return self

  def __exit__(self, *exc: object) -> None:
    self.close()

  def _format(self, values: Mapping[str, float], interval: tuple[int, float, int]) -> list[str]:
    iterations, seconds, tokens = (sum(column) for column in zip(*(self._window or [interval]), strict=True))
    parts = [f'{self._noun} {self._done}/{self._total}']
    parts += [f'{name} {value:.2f}' for name, value in values.items()]
    if tokens and seconds > 0:
      parts.append(f'{_count(tokens / seconds)} tok/s')
    parts.append(f'{seconds / iterations:.{1 if seconds >= iterations else 2}f} s/it')
    left = max(self._total - self._done, 0) * seconds / iterations
    parts.append(f'{_clock_time(left) if self._window or not left else "--:--"} left')
    return parts

  def _show(self) -> None:
    self._shown = True
    self._last_print = self._clock()
    if not self._enabled:
      return
    if self._live:
      self._stream.write(f'\r{_fit(self._parts, _columns(self._stream) - 1)}\x1b[K')
    else:
      self._stream.write(f'{" | ".join(self._parts)}\n')
    self._stream.flush()


def _fit(parts: list[str], columns: int) -> str:
  """The parts in one line; where it is too long, those before the last go first, and the rest is cut."""
  parts = list(parts)
  while len(parts) > 2 and len(' | '.join(parts)) > columns:
    del parts[-2]
  return ' | '.join(parts)[:columns]


def _count(number: float) -> str:
  """940, 45.2k, 1.3M."""
  for limit, divisor, unit in ((1e3, 1, ''), (1e6, 1e3, 'k'), (float('inf'), 1e6, 'M')):
    if number < limit:
      return f'{number / divisor:.{1 if unit else 0}f}{unit}'
  return f'{number}'


def _clock_time(seconds: float) -> str:
  """01:40, or 2:05:09 from an hour on."""
  minutes, seconds = divmod(round(seconds), 60)
  hours, minutes = divmod(minutes, 60)
  return f'{hours}:{minutes:02d}:{seconds:02d}' if hours else f'{minutes:02d}:{seconds:02d}'


def _columns(stream: TextIO) -> int:
  try:
    return os.get_terminal_size(stream.fileno()).columns or 80
  except (OSError, ValueError, AttributeError):
    return 80
