"""Ctrl-C, or SIGTERM, between two steps, so that what is done can be saved."""

from __future__ import annotations

import contextlib
import os
import signal
import threading
from types import FrameType, TracebackType


class Stopped(KeyboardInterrupt):
  """A run that a signal asked to stop, and that has saved what it did.

  Attributes:
    status: to leave with, 128 and the signal's number: 130 for Ctrl-C, 143 for SIGTERM.
  """

  def __init__(self, number: int):
    super().__init__(number)
    self.status = 128 + number


class Interrupt:
  """While it is entered, the first SIGINT or SIGTERM only sets `requested`; the second of one kind kills.

  Python's own handler raises wherever the interpreter happens to be, which may be a callback that swallows it. SIGTERM
  is what Kubernetes, Slurm's preemption and spot machines send some time before they kill.

  Attributes:
    requested: number of the signal by which somebody asked to stop; 0 for none.
  """

  def __init__(self, noun: str = 'iteration'):
    self._noun = noun
    self.requested = 0
    self._old = {}

  def __enter__(self) -> Interrupt:
    if threading.current_thread() is threading.main_thread():  # elsewhere handlers cannot be set
      for number in (signal.SIGINT, signal.SIGTERM):
        self._old[number] = signal.signal(number, self._on_signal)
    return self

  def __exit__(self, kind: type | None, error: BaseException | None, trace: TracebackType | None) -> None:
    for number, old in self._old.items():
      if old is not None:  # a handler that Python did not set cannot be set again
        signal.signal(number, old)
    self._old = {}

  def _on_signal(self, number: int, frame: FrameType | None) -> None:
    self.requested = number
    # The second is not Python's to handle, which waits for as long as a program compiles.
    signal.signal(number, signal.SIG_DFL)
    again = 'Ctrl-C' if number == signal.SIGINT else signal.Signals(number).name
    told = f'\nstopping after this {self._noun}, with a checkpoint; {again} again stops at once\n'
    with contextlib.suppress(OSError):
      os.write(2, told.encode())  # sys.stderr may be in the middle of a line, and may not be written to from here
