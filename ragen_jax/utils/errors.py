"""`UserError` and its kinds, and functions that write values and exceptions in one line."""

from __future__ import annotations

import difflib
import reprlib
import threading
from collections.abc import Callable, Iterable
from typing import Any, ClassVar

_SHOWN = 300  # characters of a foreign value
_WRITER = reprlib.Repr()
_WRITER.maxlevel, _WRITER.maxstring, _WRITER.maxother, _WRITER.maxlong = 4, _SHOWN, _SHOWN, _SHOWN


class UserError(Exception):
  """Wrong input, or an output that cannot be written. The message is one line with the mistake and a remedy.

  `main.py` shows the message without a traceback and exits with a non-zero status.
  """

  status: ClassVar[int] = 2  # the exit status

  def __init__(self, message: str, everywhere: bool = False):
    super().__init__(message)
    self.everywhere = everywhere  # whether all processes of the run raise it, at the same place


class DiskError(UserError):
  """A file of a run cannot be written: the disk is full, fails, or is not writable."""

  status: ClassVar[int] = 74  # EX_IOERR of sysexits.h


class StoreAway(UserError):
  """A bucket cannot be reached at the moment; the same command may succeed later."""

  status: ClassVar[int] = 75  # EX_TEMPFAIL of sysexits.h


class Diverged(UserError):
  """A run ends because its numbers are not finite; all processes raise it."""

  status: ClassVar[int] = 1

  def __init__(self, message: str):
    super().__init__(message, everywhere=True)


def did_you_mean(name: str, known: Iterable[str]) -> str:
  """A question with the known name that resembles an unknown one, and a space; '' if none does."""
  known = list(known)
  begun = sorted((x for x in known if name.startswith(f'{x}-')), key=len, reverse=True)  # the name has an addition
  close = begun or difflib.get_close_matches(name, known, n=1)
  return f'did you mean {close[0]!r}? ' if close else ''


def printable(text: str, also: str = '') -> str:
  """The text with a question mark for each character that is not printable and not in `also`.

  Such characters would let foreign text move the cursor of a terminal, change its title, or reverse a line.
  """
  return text if text.isprintable() else ''.join(c if c.isprintable() or c in also else '?' for c in text)


def one_line(value: Any, write: Callable[[Any], str] = repr) -> str:
  """`write(value)` in one `printable` line; a placeholder if it raises, which objects of foreign code may do."""
  try:
    return printable(' '.join(write(value).split()))
  except BaseException as e:  # foreign code may raise any exception; a message must not end a run
    if isinstance(e, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
      raise  # it comes from the user
    return f'({type(value).__name__} that cannot be written: {type(e).__name__})'


def short(value: Any) -> str:
  """`one_line` of about 300 characters at most, for a value of foreign code, which may be large.

  Long texts, bytes and collections are cut before they are written.
  """
  if isinstance(value, bytes | bytearray):
    value = value[:_SHOWN]
  line = one_line(value, _WRITER.repr)
  return line if len(line) <= _SHOWN else line[: _SHOWN - 3] + '...'


def describe_error(error: BaseException) -> str:
  """An exception's type and message in one line."""
  return f'{type(error).__name__}: {one_line(error, str)}'


def out_of_memory(error: RuntimeError) -> str:
  """What to do, in one line, if a device had no memory left for a program of JAX; '' for other errors."""
  message = str(error)
  if type(error).__name__ not in ('JaxRuntimeError', 'XlaRuntimeError') or 'out of memory' not in message.lower():
    return ''
  reason = one_line(message.partition('\n')[0], str)[:_SHOWN]
  return (
    f'a device ran out of memory ({reason}); try model.remat=True, a smaller optimizer.micro_batch_size (with '
    '--mode=sft a smaller sft.batch_size) or agent.rows_in_flight, or LoRA; docs/troubleshooting.md#out-of-memory says '
    'what each costs'
  )
