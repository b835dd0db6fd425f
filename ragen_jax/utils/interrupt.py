"""Ctrl-C between two steps, so that what is done can be saved."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType, TracebackType


class Interrupt:
  """While it is entered, the first SIGINT only sets `requested`; the second interrupts at once.

  Python's own handler raises wherever the interpreter happens to be, which may be a callback that swallows it.

  Attributes:
    requested: somebody asked to stop.
  """

  def __init__(self, noun: str = 'iteration'):
    self._noun = noun
    self.requested = False
    self._old = None

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():  # elsewhere handlers cannot be set
      self._old = signal.signal(signal.SIGINT, self._on_signal)
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    self._restore()

  def _restore(self) -> None:
    if self._old is not None:
      signal.signal(signal.SIGINT, self._old)
      self._old = None

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self.requested = True
    self._restore()
    sys.stderr.write(f'\nstopping after this {self._noun}, with a checkpoint; Ctrl-C again stops at once\n')
