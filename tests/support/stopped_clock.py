"""A clock that tests move: a limit expires where it should, at once, and never where a machine is slow."""

from __future__ import annotations

import threading
import types

_PATIENCE = 120.0


class StoppedClock:
  """Stands still until a test moves it; see `stop_clock`.

  Attributes:
    now: the time, in seconds.
    release: set it at the end of a test: what hangs goes on.
  """

  def __init__(self):
    self.now, self.release = 1000.0, threading.Event()
    self._seen, self._tester = threading.Event(), threading.get_ident()

  def monotonic(self) -> float:
    """The time, as `time.monotonic` gives it."""
    now = self.now
    if threading.get_ident() == self._tester:
      self._seen.set()
    return now

  def hang(self, seconds: float) -> None:
    """Takes so many seconds by this clock, and does not return before `release`."""
    self.now += seconds
    self.release.wait(_PATIENCE)

  def take(self, seconds: float) -> None:
    """Takes so many seconds by this clock, and returns when the test's thread has looked at it."""
    self.now += seconds
    self._seen.clear()
    assert self._seen.wait(_PATIENCE), 'nobody looks at the clock'


def stop_clock(monkeypatch, module: str, **others) -> StoppedClock:
  """Puts a clock in the place of the `time` that a module has imported; `others` are what else the module needs of it.

  A module that waits for a limit waits for so long by the true clock, and then asks this one whether it has expired.
  """
  clock = StoppedClock()
  monkeypatch.setattr(f'{module}.time', types.SimpleNamespace(monotonic=clock.monotonic, **others))
  return clock
