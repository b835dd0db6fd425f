"""Compiles programs in background threads, so that a run does not wait for them when it needs them."""

from __future__ import annotations

import heapq
import itertools
import logging
import threading
import time
from collections.abc import Callable, Hashable, Iterable

from ragen_jax.utils.errors import one_line

_log = logging.getLogger(__name__)

# Seconds that `close` waits for all threads together; a compiler cannot be stopped.
_PATIENCE = 5.0


_NAME = 'ragen_jax-compile'


def still_compiling() -> bool:
  """Whether a thread of this process compiles; the end of the interpreter would abort it, and the process with it."""
  return any(thread.name.startswith(_NAME) for thread in threading.enumerate())


class Background:
  """Programs that are compiled in a few threads, the most urgent first; each program once.

  What fails is logged: the run compiles the program itself when it needs it.
  """

  def __init__(self, threads: int):
    """Starts the threads; without one, nothing is compiled."""
    self._changed = threading.Condition()
    self._waiting: list[tuple[int, int, Hashable, Callable[[], object]]] = []
    self._numbers = itertools.count()  # of equally urgent programs, the first wanted comes first
    self._known: set[Hashable] = set()
    self._running: set[Hashable] = set()
    self._needed: set[Hashable] = set()
    self._done: list[Hashable] = []
    self._closed = False
    self._threads = [threading.Thread(target=self._work, daemon=True, name=f'{_NAME}-{i}') for i in range(threads)]
    for thread in self._threads:
      thread.start()

  @property
  def threads(self) -> int:
    """Their number."""
    return len(self._threads)

  @property
  def done(self) -> list[Hashable]:
    """The programs that were compiled here, in this order."""
    with self._changed:
      return list(self._done)

  def want(self, programs: Iterable[tuple[Hashable, Callable[[], object]]], urgency: int) -> None:
    """Asks for programs: a key of each, and what compiles it. Known keys are ignored; low urgencies come first."""
    with self._changed:
      for key, compile_program in programs:
        if key not in self._known and not self._closed:
          self._known.add(key)
          heapq.heappush(self._waiting, (urgency, next(self._numbers), key, compile_program))
      self._changed.notify_all()

  def need(self, key: Hashable) -> bool:
    """Says that the caller is about to run a program, and returns whether for the first time.

    Waits while the program is being compiled here. A program that still waits is left to the caller.
    """
    if key in self._needed:
      return False
    with self._changed:
      self._needed.add(key)
      self._changed.wait_for(lambda: key not in self._running)
    return True

  def wait(self, timeout: float) -> bool:
    """Waits until nothing is left to compile. Returns False if that takes longer than `timeout` seconds."""
    with self._changed:
      return self._changed.wait_for(lambda: not self._waiting and not self._running, timeout)

  def stop(self) -> None:
    """Drops what waits, and compiles nothing new; does not wait for what is being compiled."""
    with self._changed:
      self._closed = True
      self._waiting.clear()
      self._changed.notify_all()

  def close(self) -> None:
    """Stops, and waits at most `_PATIENCE` seconds for what is being compiled."""
    self.stop()
    deadline = time.monotonic() + _PATIENCE
    for thread in self._threads:
      thread.join(max(deadline - time.monotonic(), 0))

  def _work(self) -> None:
    while True:
      with self._changed:
        self._changed.wait_for(lambda: self._waiting or self._closed)
        if self._closed:
          return
        _, _, key, compile_program = heapq.heappop(self._waiting)
        if key in self._needed:
          self._changed.notify_all()
          continue
        self._running.add(key)
      try:
        compile_program()
        compiled = True
      except Exception as e:  # noqa: BLE001, a compiler may raise anything, and the run goes on without its program
        _log.warning('a program was not compiled ahead, %s: %s', key, one_line(e, str))
        compiled = False
      with self._changed:
        self._running.remove(key)
        if compiled:
          self._done.append(key)
        self._changed.notify_all()
