"""Lines that tell how far a slow stage is, such as the rollout of a large model on a CPU."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable, Iterator
from typing import TypeVar

_T = TypeVar('_T')

SECONDS = 30.0  # between two lines; a shorter stage logs nothing

_log = logging.getLogger(__name__)


class Heartbeat:
  """Logs how much of a stage is done, at most once in `SECONDS`.

  heartbeat = Heartbeat('playing: %d of %d episodes are over', 128)
  heartbeat.beat(37)  # playing: 37 of 128 episodes are over after 31 s
  """

  def __init__(self, text: str, total: int, clock: Callable[[], float] = time.monotonic):
    """Logs nothing. `text` has a place for the number that is done and one for the total."""
    self._text, self._total, self._clock = text, total, clock
    self._began = self._last = clock()

  def beat(self, done: int) -> None:
    """Logs that `done` of the total are done, if the last line was long enough ago."""
    now = self._clock()
    if now - self._last >= SECONDS:
      self._last = now
      _log.info(f'{self._text} after %.0f s', done, self._total, now - self._began)

  def over(self, parts: Iterable[_T], done: int = 0) -> Iterator[_T]:
    """The parts, with a beat before each; `done` parts of the total came before them."""
    for i, part in enumerate(parts, done):
      self.beat(i)
      yield part
