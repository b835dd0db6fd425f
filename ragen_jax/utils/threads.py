"""Calls foreign code in threads: several calls at a time, each with a time limit. Exceptions become faults."""

from __future__ import annotations

import collections
import dataclasses
import os
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any

from ragen_jax.utils.errors import one_line, printable
from ragen_jax.utils.foreign import end_if_copy

# After this many consecutive time-outs, the remaining calls are not made.
_GIVE_UP_AFTER = 3
# While so many abandoned threads of one owner are running, none of the owner's calls is made.
_MOST_ABANDONED = 64
_LONGEST_MESSAGE = 300  # characters


@dataclasses.dataclass(frozen=True)
class Fault:
  """The reason why a call has no usable result. `str` gives one printable line of at most 300 characters."""

  kind: str  # a few words, equal for all faults of one kind, such as 'step raised KeyError'
  detail: str = ''  # of this fault; may be empty
  hung: bool = False  # whether the call exceeded its time limit and may still be running

  def __str__(self) -> str:
    line = ' '.join((f'{self.kind}: {self.detail}' if self.detail else self.kind).split())
    return printable(line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 3] + '...')


class _Call:
  def __init__(self, function: Callable[[], Any]):
    self.function = function
    self.started = 0.0
    self.thread: _Worker | None = None
    self.outcome: Any = None
    self.over = False


class _Worker(threading.Thread):
  """A thread that calls functions of `owner`; `abandoned` if nobody waits for its last call any more."""

  def __init__(self, work: Callable[[], None], what: str, owner: Any):
    super().__init__(target=work, daemon=True, name=f'ragen_jax-{what}')
    self.owner, self.abandoned = owner, False


def _has_too_many_abandoned(owner: Any) -> bool:
  """Whether the limit of abandoned threads is reached. A thread that ends no longer counts."""
  mine = (t for t in threading.enumerate() if isinstance(t, _Worker) and t.owner is owner)
  return sum(t.abandoned for t in mine) >= _MOST_ABANDONED


def run_calls(
  functions: Sequence[Callable[[], Any]],
  *,
  what: str,
  workers: int,
  timeout_s: float,
  owner: Any = None,
  always: bool = False,
) -> list[tuple[Any, Fault | None]]:
  """Calls functions in a few threads and waits for each call at most `timeout_s` seconds.

  Python cannot stop a thread. A call that exceeds its limit is abandoned: its thread runs until the call returns, and
  the result is dropped. While 64 abandoned threads of one owner are running, further calls are not made: otherwise code
  that hangs now and then would fill the process with threads. Code that never releases the interpreter's lock cannot be
  abandoned.

  Args:
    what: name of the operation in the faults, one word.
    workers: number of threads. With 0 the calls run in the caller's thread, one after another, without a time limit.
    owner: an object that stands for the code that is called, such as its environment; abandoned threads are counted for
      each owner, so that one environment that hangs does not stop others.
    always: whether the calls are made even while 64 abandoned threads are running.

  Returns:
    For each function, in order, (result, None), or (None, fault) if it raised, exceeded the limit, or was not called
    because three calls in a row exceeded theirs or too many abandoned threads are running.
  """
  if workers == 0:
    return [attempt(f, what) for f in functions]
  calls = [_Call(f) for f in functions]
  waiting, running = collections.deque(calls), set()
  changed = threading.Condition()
  late = Fault(f'{what} took longer than {timeout_s:g} s', hung=True)
  not_tried = Fault(late.kind, 'not tried, because earlier calls took too long')
  refused = Fault(f'{what} is no longer called', f'{_MOST_ABANDONED} calls that took too long are still running')
  late_in_a_row = 0

  def work() -> None:
    nonlocal late_in_a_row
    while True:
      with changed:
        if not waiting:
          return
        call = waiting.popleft()
        call.started, call.thread = time.monotonic(), threading.current_thread()
        running.add(call)
        changed.notify()
      outcome = attempt(call.function, what)
      with changed:
        if call.over:
          return  # the call was abandoned, and another thread replaces this one
        call.outcome, call.over = outcome, True
        running.discard(call)
        late_in_a_row = 0
        changed.notify()

  def start() -> None:
    _Worker(work, what, owner).start()

  def give_up(fault: Fault) -> None:
    for call in waiting:
      call.outcome = None, fault
    waiting.clear()

  if not always and _has_too_many_abandoned(owner):
    give_up(refused)
  for _ in range(min(workers, len(waiting))):
    start()
  with changed:
    while waiting or running:
      now = time.monotonic()
      overdue = [call for call in running if now - call.started >= timeout_s]
      for call in overdue:
        call.outcome, call.over = (None, late), True
        call.thread.abandoned = True
        running.discard(call)
      late_in_a_row += len(overdue)
      if late_in_a_row >= _GIVE_UP_AFTER:
        give_up(not_tried)
      elif overdue and not always and _has_too_many_abandoned(owner):
        give_up(refused)
      for _ in range(min(len(overdue), len(waiting))):
        start()
      if running:
        first = min(call.started for call in running)
        changed.wait(max(first + timeout_s - time.monotonic(), 0.0))
      elif waiting:
        changed.wait()
  return [call.outcome for call in calls]


def attempt(function: Callable[[], Any], what: str) -> tuple[Any, Fault | None]:
  """Calls a function: (result, None), or (None, fault) if it raised.

  Raises KeyboardInterrupt in the main thread only, where it comes from the user.
  """
  pid = os.getpid()
  try:
    result = function()
    end_if_copy(pid)
    return result, None
  except BaseException as e:  # foreign code may raise any exception, which becomes a fault
    end_if_copy(pid)
    if isinstance(e, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
      raise
    return None, raised(e, what)


def raised(error: BaseException, what: str) -> Fault:
  """The fault of a call that raised an exception, with the line that raised it."""
  frame = traceback.extract_tb(error.__traceback__)[-1]
  where = f'{os.path.basename(frame.filename)}:{frame.lineno}'
  return Fault(f'{what} raised {type(error).__name__}', f'{one_line(error, str)} ({where})')
