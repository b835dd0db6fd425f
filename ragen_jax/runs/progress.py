"""The progress of a run while it trains: one live line on a terminal, plain lines elsewhere."""

from __future__ import annotations

import collections
import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import TextIO

from tqdm import tqdm

LINE_SECONDS = 10.0  # seconds between two plain lines
WINDOW = 20  # number of updates in the moving averages


class Progress:
  """One line with the progress of a run.

    iteration 12/60 | success 0.41 | reward 0.39 | 45.2k tok/s | 2.1 s/it | 01:40 left

  On a terminal, tqdm draws the line in place; elsewhere (a file, a pipe, CI) a line is printed about every 10 seconds
  and at the end. Times are moving averages over the last 20 updates without the first one, which compiles; tqdm's own
  averages include it, so its rate and time left would be wrong for minutes.
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
    """Starts the clock; `start` iterations are done already. Nothing is shown if not `enabled`."""
    self._noun, self._total, self._done = noun, total, start
    self._stream = sys.stderr if stream is None else stream
    self._enabled, self._clock = enabled, clock
    live = enabled and self._stream.isatty() and os.environ.get('TERM') != 'dumb'
    self._bar = tqdm(file=self._stream, bar_format='{desc}', dynamic_ncols=True, delay=1e-9) if live else None
    # (iterations, seconds, tokens) of each update
    self._window: collections.deque[tuple[int, float, int]] = collections.deque(maxlen=WINDOW)
    self._compiled = False  # whether the first update, which compiles, is done
    self._last_update, self._last_print = clock(), -float('inf')
    self._parts: list[str] = []
    self._shown = True

  def restart(self) -> None:
    """Restarts the clock: what was done until now is no iteration."""
    self._last_update = self._clock()

  def update(self, done: int, values: Mapping[str, float] | None = None, tokens: int = 0) -> None:
    """Shows that `done` iterations are finished, including `start`, and the values in their order.

    `tokens` have been sampled or trained on since the last update, for tok/s; 0 omits tok/s.
    """
    now = self._clock()
    interval = (max(done - self._done, 1), now - self._last_update, tokens)
    if self._compiled:
      self._window.append(interval)
    self._done, self._last_update, self._compiled = done, now, True
    self._parts, self._shown = self._format(values or {}, interval), False
    if self._bar is not None or now - self._last_print >= LINE_SECONDS:
      self._show()

  def write(self, text: str) -> None:
    """Writes lines that stay, above the live line."""
    if self._enabled:
      tqdm.write(text, file=self._stream)
      self._stream.flush()

  def close(self) -> None:
    """Leaves the last line on the screen; a second call does nothing."""
    if not self._shown:
      self._show()
    if self._bar is not None:
      self._bar.leave = bool(self._parts)
      self._bar.close()

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
    left = round(max(self._total - self._done, 0) * seconds / iterations)
    parts.append(f'{tqdm.format_interval(left) if self._window or not left else "--:--"} left')
    return parts

  def _show(self) -> None:
    self._shown, self._last_print = True, self._clock()
    if self._bar is not None:
      self._bar.set_description_str(_fit(self._parts, (self._bar.format_dict['ncols'] or 80) - 1))
    elif self._enabled:
      self._stream.write(f'{" | ".join(self._parts)}\n')
      self._stream.flush()


def _fit(parts: list[str], columns: int) -> str:
  """The parts in one line; if it is too long, parts before the last one are dropped, and the rest is cut."""
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
