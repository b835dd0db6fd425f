"""Standard input, output and error of a command: they may be missing, or lead to a terminal or reader that is gone."""

from __future__ import annotations

import contextlib
import os
import sys
from typing import Any, TextIO

from ragen_jax.utils.errors import DiskError


def open_missing() -> None:
  """Gives the process the standard streams that it was started without (`2>&-`); they lead to the null device.

  Otherwise the next files that are opened would get their numbers, and what libraries write to standard error.
  """
  for name, mode in (('stdin', 'r'), ('stdout', 'w'), ('stderr', 'w')):
    if getattr(sys, name) is None:
      setattr(sys, name, open(os.devnull, mode, encoding='utf-8'))  # noqa: SIM115, open until the end


class _Stream:
  """A text stream; what it does not define is that of the stream that it belongs to."""

  def __init__(self, stream: TextIO):
    self._stream = stream

  def __getattr__(self, name: str) -> Any:
    return getattr(self._stream, name)


class Messages(_Stream):
  """A text stream that leaves out what cannot be written, so that a run goes on if its terminal or its pipe is gone."""

  def write(self, text: str) -> int:
    """Writes the text if possible; returns its length."""
    with contextlib.suppress(OSError):
      self._stream.write(text)
    return len(text)

  def flush(self) -> None:
    """Writes what is buffered if possible."""
    with contextlib.suppress(OSError):
      self._stream.flush()


class Results(_Stream):
  """Standard output. Raises `DiskError` once if it cannot be written; what follows is left out."""

  def write(self, text: str) -> int:
    """Writes the text and returns its length."""
    try:
      self._stream.write(text)
    except OSError as e:
      self._fail(e)
    return len(text)

  def flush(self) -> None:
    """Writes what is buffered."""
    try:
      self._stream.flush()
    except OSError as e:
      self._fail(e)

  def _fail(self, error: OSError) -> None:
    # The interpreter writes what is still buffered when it ends.
    with open(os.devnull, 'w') as null:
      os.dup2(null.fileno(), self._stream.fileno())
    raise DiskError(f'standard output cannot be written: {error.strerror or error}') from error
