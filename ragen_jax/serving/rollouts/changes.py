"""Rollouts: announces changes of the store to the threads and event loops that wait for them."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence


class Changes:
  """Tells threads and event loops that a rollout was queued or is over, and which attempts have ended. `count` is the
  number of changes so far."""

  def __init__(self):
    self.count = 0
    self._changed = threading.Condition()
    self.listeners: list[Callable[[tuple[str, ...]], None]] = []

  def subscribe(self, listener: Callable[[tuple[str, ...]], None]) -> Callable[[], None]:
    """Calls `listener` after each change, in the thread of the change, until the returned function is called.

    The listener gets the ids of the attempts that ended with the change; often none.
    """
    with self._changed:
      self.listeners.append(listener)
    return lambda: self._unsubscribe(listener)

  def notify(self, ended: Sequence[str] = ()) -> None:
    """Announces a change with which attempts have ended."""
    with self._changed:
      self.count += 1
      self._changed.notify_all()
      listeners = tuple(self.listeners)
    for listener in listeners:
      listener(tuple(ended))

  def wait(self, seen: int, timeout_s: float) -> int:
    """Waits until `count` exceeds `seen`, at most `timeout_s` seconds; returns `count`."""
    with self._changed:
      self._changed.wait_for(lambda: self.count > seen, timeout_s)
      return self.count

  def _unsubscribe(self, listener: Callable[[tuple[str, ...]], None]) -> None:
    with self._changed:
      if listener in self.listeners:
        self.listeners.remove(listener)
