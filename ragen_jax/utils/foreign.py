"""Foreign code in this process that ends it, or that makes copies of it: the run says whose code it was, and fails.

An environment outside JAX runs in the process of the run. `os._exit` would end it with any status and without a word. A
child of `os.fork` that goes on as if it were the run, or that does not end, would hold the run's files and pipes.
"""

from __future__ import annotations

import atexit
import contextlib
import errno
import faulthandler
import multiprocessing.util  # noqa: F401, before `atexit.register`: at the end it waits for children, which must be over
import os
import signal
import sys
import time
import types
from collections.abc import Callable, Iterator
from typing import Any

# Exit status of a copy of the process that came back from foreign code.
COPY = 70
_MOST_CHILDREN = 256
_GRACE_S = 2.0  # for children to end after the code that made them was closed
_CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
_OWN = __name__.partition('.')[0]


class _Guard:
  """What this process knows of foreign code."""

  def __init__(self) -> None:
    self.pid = 0  # the process; 0 before foreign code was called
    self.names: dict[str, None] = {}  # of the foreign code that was called so far
    self.running: list[str] = []  # names of the code that runs now
    self.children: dict[int, str] = {}  # pid -> name of the code that made this child by `os.fork`
    self.problems: dict[str, int] = {}  # what is wrong with children that have ended -> pid of the last one
    self.end: Callable[[int], Any] = os._exit  # as it was before it was replaced; so is `fork`
    self.fork: Callable[[], int] = os.fork

  def install(self) -> None:
    """Watches `os._exit` and `os.fork` of this process, and crashes."""
    self.pid, self.end, self.fork = os.getpid(), os._exit, os.fork
    os._exit, os.fork = self._exit, self._fork
    atexit.register(_at_exit)
    if not faulthandler.is_enabled() and sys.__stderr__ is not None:
      faulthandler.enable(sys.__stderr__)

  def whose(self) -> str:
    return ' or '.join(dict.fromkeys(self.running or self.names))

  def _exit(self, status: int) -> None:
    """`os._exit`, which says so if foreign code calls it; its status is then not 0."""
    frame = sys._getframe(1)
    if os.getpid() == self.pid and frame.f_globals.get('__name__', '').partition('.')[0] != _OWN:
      where = f'{os.path.basename(frame.f_code.co_filename)}:{frame.f_lineno}'
      line = f'error: {self.whose()}: ended the process of the run by os._exit({status}) ({where})\n'
      with contextlib.suppress(OSError):
        os.write(2, line.encode(errors='replace'))
      status = status if isinstance(status, int) and status & 255 else 1
    self.end(status)

  def forget_ended(self) -> bool:
    """Forgets the children that have ended, and notes those that ended badly; returns whether others are running."""
    for pid, name in list(self.children.items()):
      try:
        ended, status = os.waitpid(pid, os.WNOHANG)
      except ChildProcessError:  # the code has waited for it
        del self.children[pid]
        continue
      if not ended:
        continue
      del self.children[pid]
      status = os.waitstatus_to_exitcode(status)
      if status == COPY:
        self.problems[f'{name}: a child that it made by fork came back, as a second copy of the run'] = pid
      elif -status in _CRASHES:
        self.problems[f'{name}: a child that it made by fork crashed with {signal.Signals(-status).name}'] = pid
    return bool(self.children)

  def _fork(self) -> int:
    """`os.fork`, which notes the child; BlockingIOError if too many children are running."""
    name = self.whose()
    if os.getpid() == self.pid and len(self.children) >= _MOST_CHILDREN:
      self.forget_ended()
      if len(self.children) >= _MOST_CHILDREN:
        raise BlockingIOError(errno.EAGAIN, f'{_MOST_CHILDREN} children that {name} made by fork are running')
    pid = self.fork()
    if pid and os.getpid() == self.pid:
      self.children[pid] = name
    return pid


_guard = _Guard()


@contextlib.contextmanager
def calling(name: str) -> Iterator[None]:
  """Context manager: foreign code, which error messages call `name`, is called in it, also in other threads."""
  if not _guard.pid:
    _guard.install()
  _guard.names[name] = None
  _guard.running.append(name)
  try:
    yield
  finally:
    _guard.running.remove(name)


def named(name: str) -> Callable[[Callable[[], Any]], Any]:
  """A function that calls its argument, and that the stack traces of crashes call `name`."""

  def call(function: Callable[[], Any]) -> Any:
    return function()

  return types.FunctionType(call.__code__.replace(co_name=name, co_qualname=name), call.__globals__)


def end_if_copy(pid: int) -> None:
  """Ends this process if it is not `pid`: then foreign code forked it, and the copy came back."""
  if os.getpid() != pid:
    _guard.end(COPY)


def end_children() -> str:
  """Ends the children that foreign code made by `os.fork` and that are still running, after a moment.

  Returns:
    One line about children that did not end by themselves, crashed, or came back from the foreign code; '' for none.
  """
  if os.getpid() != _guard.pid:
    return ''
  deadline = time.monotonic() + _GRACE_S
  while _guard.forget_ended() and time.monotonic() < deadline:
    time.sleep(0.02)
  for pid, name in _guard.children.items():
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    _guard.problems[f'{name}: a child that it made by fork was still running at the end'] = pid
  _guard.children.clear()
  lines = [f'{problem} (pid {pid})' for problem, pid in _guard.problems.items()]
  _guard.problems.clear()
  return '; '.join(lines)


def _at_exit() -> None:
  """Ends what a program that uses this package leaves; the command line has called `end_children` before."""
  if problems := end_children():
    sys.stderr.write(f'error: {problems}\n')
