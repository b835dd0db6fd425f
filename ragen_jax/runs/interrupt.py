"""Delays Ctrl-C and SIGTERM to the end of a step, so that the run can save a checkpoint; no callback loses Ctrl-C."""

from __future__ import annotations

import contextlib
import os
import signal
import sys
import threading
from collections.abc import Iterator
from types import FrameType, TracebackType

# Seconds after which a lost Ctrl-C is raised again; the callback that lost it must have ended.
_AGAIN = 0.05


@contextlib.contextmanager
def lost_interrupts_again() -> Iterator[None]:
  """Context in which Ctrl-C is not lost in a callback of the garbage collector, of a weak reference or in `__del__`.

  Python prints an exception that such a callback raises, and goes on. If it is `KeyboardInterrupt`, the signal is sent
  again shortly afterwards instead.
  """
  before = sys.unraisablehook

  def hook(lost: sys.UnraisableHookArgs) -> None:
    if not issubclass(lost.exc_type, KeyboardInterrupt):
      before(lost)
      return
    number = lost.exc_value.number if isinstance(lost.exc_value, Stopped) else signal.SIGINT
    # At once, the signal would be raised in this hook, which is a part of the callback.
    timer = threading.Timer(_AGAIN, os.kill, (os.getpid(), number))
    timer.daemon = True
    timer.start()

  sys.unraisablehook = hook
  try:
    yield
  finally:
    sys.unraisablehook = before


class Stopped(KeyboardInterrupt):
  """A signal stopped the run at the end of a step, or while it waited."""

  def __init__(self, number: int):
    super().__init__(number)
    self.number = number
    self.status = 128 + number  # the exit status: 130 for Ctrl-C, 143 for SIGTERM


def raise_at_signals() -> None:
  """SIGINT and SIGTERM raise `Stopped` from now on. A second signal of the same kind kills.

  A shell without a terminal starts its background programs with SIGINT ignored, and Linux ignores SIGTERM for the first
  process of a container, unless they have handlers. Must be called from the main thread.
  """

  def stop(number: int, frame: FrameType | None) -> None:
    signal.signal(number, signal.SIG_DFL)  # what ends then may wait for a compilation
    raise Stopped(number)

  for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, stop)


class Interrupt:
  """Context in which the first SIGINT or SIGTERM only sets `requested`. A second signal of the same kind kills.

  Python's own handler raises at an arbitrary point, possibly in a callback that swallows the exception. Kubernetes,
  Slurm and spot machines send SIGTERM some time before they kill a process. Outside of the block, no signal is noticed.
  """

  def __init__(self, noun: str = 'this iteration or evaluation'):
    self._noun = noun
    self._learnt = True
    self.requested = 0  # number of the received signal; 0 for none
    self._old = {}

  @contextlib.contextmanager
  def before_learning(self) -> Iterator[None]:
    """Context manager of what comes before the first iteration: a signal says that there is nothing to save."""
    self._learnt = False
    try:
      yield
    finally:
      self._learnt = True

  def check(self) -> None:
    """Raises `Stopped` if a signal was received. Code that waits calls this while it waits."""
    if self.requested:
      raise Stopped(self.requested)

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():  # other threads cannot set handlers
      for number in (signal.SIGINT, signal.SIGTERM):
        self._old[number] = signal.signal(number, self._on_signal)
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    for number, old in self._old.items():
      if old is not None:  # None: the handler was not set from Python and cannot be restored
        signal.signal(number, old)
    self._old = {}

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self.requested = number
    # The default handler kills at once; a Python handler would wait until a compilation ends.
    signal.signal(number, signal.SIG_DFL)
    again = 'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name
    saved = 'what has been learnt is saved' if self._learnt else 'nothing has been learnt yet'
    message = f'\nstopping after {self._noun}; {saved}; {again} again stops at once\n'
    with contextlib.suppress(OSError):
      os.write(2, message.encode())  # a signal handler must not write to sys.stderr's buffer
