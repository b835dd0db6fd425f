"""Lines that tell how far a slow stage is, such as the rollout of a large model on a CPU."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar('_T')

SECONDS = 30.0  # least time between two lines; a shorter stage logs nothing

_log = logging.getLogger(__name__)


class Heartbeat:
  """Counts what is done of a stage, and logs it at most once in `SECONDS`. Threads may share it.

  heartbeat = Heartbeat('playing: %d of %d episodes are over', 128)
  heartbeat.advance(37)  # after half a minute: playing: 37 of 128 episodes are over after 31 s
  """

  def __init__(self, text: str, total: int, clock: Callable[[], float] = time.monotonic):
    """Logs nothing. `text` has a place for the number that is done and one for the total."""
    self._text, self._total, self._clock = text, total, clock
    self._done, self._lock = 0, threading.Lock()
    self._began = self._last = clock()

  def advance(self, count: int = 1) -> None:
    """Adds to what is done, and logs it if the last line was long enough ago."""
    with self._lock:
      self._done += count
      now = self._clock()
      if now - self._last < SECONDS:
        return
      self._last, done = now, self._done
    _log.info(f'{self._text} after %.0f s', done, self._total, now - self._began)

  def over(self, parts: Iterable[_T]) -> Iterator[_T]:
    """The parts; each counts as done when the next one is asked for."""
    for part in parts:
      yield part
      self.advance()
