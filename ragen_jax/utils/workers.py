"""Objects in processes of their own, for code that needs a main thread, holds the interpreter's lock, hangs or crashes.

A call that exceeds its time limit is ended with its process. The next call starts a new process with a new object. What
processes send is read as plain values, see messages.py; worker_process.py is the other side.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import logging
import os
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from typing import Any

from ragen_jax.utils.errors import describe_error, one_line, short
from ragen_jax.utils.messages import pack, unpack
from ragen_jax.utils.threads import Fault, run_calls
from ragen_jax.utils.worker_link import Ended, Garbled, Link
from ragen_jax.utils.worker_process import TYPES

MOST_WORKERS = 256
_START_S = 120.0  # for the start of a process, with the imports of its factory
_CLOSE_S = 5.0  # for all objects together to close
_MOST_FAILED_STARTS = 3  # in a row
_NO_MEMORY = ('MemoryError', 'bad_alloc', 'memory allocation', 'Cannot allocate memory')  # in the output of a crash

_log = logging.getLogger(__name__)


class _Held:
  """What a worker must not leave behind."""

  def __init__(self, name: str) -> None:
    self.name = name
    self.lock = threading.Lock()
    self.link: Link | None = None
    self.closed = False
    self.owner = os.getpid()


class Worker:
  """A process with one object, which methods are called on. It is started at the first call, and again if it has ended.

  One call is made at a time, in the main thread of the process; calls of other threads wait. The process has a process
  group of its own, which is ended as a whole. It ends when this process does, however that ends.

  Attributes:
    last_end: why the last process ended.
    failed_starts: number of starts in a row that failed.
  """

  def __init__(
    self,
    factory: str,
    args: tuple = (),
    *,
    memory_mib: int = 0,
    name: str = '',
    start_timeout_s: float = _START_S,
    python: str = '',
  ):
    """Starts nothing yet.

    Args:
      factory: import path of the function or class that makes the object, 'package.module:function' or
        'folder/file.py:function'. Packages on the path are loaded too: a module of `ragen_jax.envs` loads JAX, which
        takes a second, and its file loaded by its path does not.
      args: plain values, see `messages.pack`.
      memory_mib: limit of the memory that the process may write to (on Linux); 0 for no limit.
      name: for the log and for lists of processes.
      start_timeout_s: time limit of the start, with the call of the factory.
      python: see `Link`.

    Raises:
      TypeError: an argument is not plain.
    """
    pack(tuple(args))
    self.last_end, self.failed_starts = '', 0
    self._factory, self._args, self._memory_mib = factory, tuple(args), memory_mib
    self._start_timeout_s, self._python = start_timeout_s, python
    self._starts = 0
    self._held = _Held(name or factory)
    self._finalize = weakref.finalize(self, _close, [self._held])

  @property
  def process(self) -> int:
    """The number of the running process, from 1; 0 if none is running. What earlier processes held is lost."""
    link = self._held.link
    return 0 if link is None else link.process

  def call(self, method: str, *args: Any, timeout_s: float) -> tuple[Any, Fault | None]:
    """Calls a method of the object.

    Args:
      args: plain values, see `messages.pack`.
      timeout_s: time limit of the call, without the start of the process.

    Returns:
      (result, None); or (None, fault) if the call raised, exceeded the limit, or ended its process. A part of the
      result that is not plain is read as a `messages.Foreign`.

    Raises:
      TypeError: an argument is not plain.
    """
    held = self._held
    with held.lock:
      try:
        fault = self._start()
        return (None, fault) if fault else self._ask(method, method, args, timeout_s)
      finally:
        if held.closed and held.link is not None:  # it was closed while its process started
          self._end(because='the worker was closed')

  def restart(self, because: str) -> None:
    """Ends the process, without the object's `close`; the next call starts another one. `because` is for `last_end`."""
    with self._held.lock:
      if self._held.link is not None:
        self._end(because=because)

  def close(self) -> None:
    """Calls the object's `close`, if it has one, and ends the process. Later calls give faults."""
    self._finalize()

  def _start(self) -> Fault | None:
    """Starts a process unless one is running; returns the fault if that fails."""
    held = self._held
    if held.closed:
      return Fault('the worker is closed')
    if held.link is not None and not held.link.has_ended():
      return None
    if held.link is not None:
      self._end(dying=True)
      _log.warning('%s: the process ended between two calls: %s', held.name, self.last_end)
    self._starts += 1
    try:
      held.link = Link(held.name, self._starts, self._python)
    except OSError as e:
      fault = Fault('no process can be started', describe_error(e))
    else:
      _, fault = self._ask('start', self._factory, (self._memory_mib, *self._args), self._start_timeout_s)
    self.failed_starts = self.failed_starts + 1 if fault else 0
    if fault and held.link is not None:
      self._end(because=str(fault))
    return fault

  def _ask(self, what: str, target: str, args: tuple, timeout_s: float) -> tuple[Any, Fault | None]:
    """The outcome of a request to the running process, which is ended if it does not answer as it should."""
    link = self._held.link
    message, number = pack((link.requests, target, args), TYPES), link.requests
    try:
      link.send(message)
      result, fault, full = _outcome(link.receive(timeout_s), number)
    except TimeoutError:
      self._end(because=f'{what} took longer than {timeout_s:g} s')
      return None, Fault(self.last_end, 'its process was ended')
    except Ended:
      how = self._end(dying=True)
      return None, self._death(what, how)
    except Garbled as e:
      self._end(because=f'{what} sent what is no answer')
      return None, Fault(self.last_end, one_line(e, str))
    except BaseException:  # such as Ctrl-C; the next call must not get this call's answer
      self._end(because=f'{what} was interrupted')
      raise
    if full:
      fault = self._death(what, fault.detail, full=True)
      self._end(because=fault.kind)
    return result, fault

  def _death(self, what: str, how: str, full: bool = False) -> Fault:
    """The fault of a call that ended its process, or filled its memory."""
    if full or any(words in how for words in _NO_MEMORY):
      limit = f'the limit is {self._memory_mib} MiB; ' if self._memory_mib else ''
      fault = Fault(f'{what} ran out of memory', f'{limit}its process was ended; {how}')
    else:
      fault = Fault(f'{what} ended its process', how)
    self.last_end = str(fault)
    return fault

  def _end(self, *, because: str = '', dying: bool = False) -> str:
    """Ends the process. `last_end` becomes the reason, or how it ended."""
    link, self._held.link = self._held.link, None
    how = link.end(dying)
    self.last_end = because or how
    return how


def _outcome(answer: bytes, number: int) -> tuple[Any, Fault | None, bool]:
  """(result, fault, whether memory ran out) of the request with a number; raises Garbled if it is no answer to it."""
  try:
    answered, result, fault, full = unpack(answer, TYPES)
  except Exception as e:  # whatever a process sends must not end the run
    raise Garbled(describe_error(e)) from e
  if answered != number:
    raise Garbled(f'it answers request {short(answered)}, not {number}')
  if fault is None:
    return result, None, False
  if type(fault) is not Fault or not type(fault.kind) is type(fault.detail) is str:
    raise Garbled('its fault is none')
  return None, Fault(fault.kind, fault.detail), bool(full)


def _close(workers: Sequence[_Held]) -> None:
  """Lets the objects of workers close, all at the same time, and ends the processes. A call that runs ends at once."""
  deadline, asked = time.monotonic() + _CLOSE_S, []
  for held in workers:
    if os.getpid() != held.owner:  # a copy of the process, made by fork
      continue
    held.closed = True
    if not held.lock.acquire(blocking=False):
      if (link := held.link) is not None:
        link.kill()  # the thread that waits for its answer does the rest
      continue
    with contextlib.ExitStack() as stack:
      stack.callback(held.lock.release)
      if held.link is not None:
        with contextlib.suppress(Ended):
          held.link.send(pack((held.link.requests, 'close', ()), TYPES))
        asked.append((held, stack.pop_all()))
  for held, release in asked:
    with release:
      fault = None
      try:
        _, fault, _ = _outcome(held.link.receive(max(deadline - time.monotonic(), 0.01)), held.link.requests - 1)
      except TimeoutError:
        fault = Fault(f'close took longer than {_CLOSE_S:g} s')
      except Exception as e:  # noqa: BLE001, also `Ended`; the process is ended in any case
        fault = Fault('close failed', describe_error(e))
      finally:
        link, held.link = held.link, None
        link.end(dying=False)
      if fault is not None:
        _log.warning('%s: %s', held.name, fault)


class Workers:
  """Several workers with equal objects.

  Attributes:
    workers: the workers; each may also be called by itself.
  """

  def __init__(
    self, factory: str, args: tuple = (), *, count: int, memory_mib: int = 0, name: str = '', python: str = ''
  ):
    """Starts nothing yet.

    Args:
      factory, args, memory_mib, name, python: see `Worker`.
      count: number of processes, 1 to `MOST_WORKERS`.
    """
    if not 1 <= count <= MOST_WORKERS:
      raise ValueError(f'{count} worker processes; allowed: 1 to {MOST_WORKERS}')
    names = [f'{name or factory} {i}' for i in range(count)]
    self.workers = [Worker(factory, args, memory_mib=memory_mib, name=own, python=python) for own in names]
    self._finalize = weakref.finalize(self, _close, [worker._held for worker in self.workers])
    self._mapping: set[int] = set()  # indices of the workers that make a call of `map`
    self._changed = threading.Condition()

  def each(self, function: Callable[[int, Worker], Any], what: str) -> list[tuple[Any, Fault | None]]:
    """Calls a function with the index of each worker and the worker, in a thread for each, and waits for all.

    The function's calls must have time limits, as `Worker.call` has.

    Args:
      what: name of the operation, for faults.
    """
    calls = [functools.partial(function, i, worker) for i, worker in enumerate(self.workers)]
    threads = len(calls) if len(calls) > 1 else 0
    return run_calls(calls, what=what, workers=threads, timeout_s=threading.TIMEOUT_MAX / 2)

  def map(self, method: str, arguments: Sequence[tuple], *, timeout_s: float) -> list[tuple[Any, Fault | None]]:
    """Calls a method once for each tuple of arguments; each worker makes a call as soon as it is free.

    Several threads may call this at the same time; a worker that makes a call for one of them is not free for others.
    Every call is made, whatever others do, so this takes up to `timeout_s` times the calls for each worker. Only if no
    process can be started, the rest is not tried.

    Returns:
      The outcomes in the order of the arguments, see `Worker.call`.

    Raises:
      TypeError: an argument is not plain.
    """
    for own in arguments:
      pack(own, TYPES)
    waiting = collections.deque(enumerate(arguments))
    outcomes: list[tuple[Any, Fault | None]] = [(None, Fault(f'{method} was not called'))] * len(arguments)
    last: list[Fault] = []

    def work(i: int, worker: Worker) -> None:
      while worker.failed_starts < _MOST_FAILED_STARTS or not last:
        with self._changed:
          self._changed.wait_for(lambda: i not in self._mapping or not waiting)
          if not waiting:
            return
          number, own = waiting.popleft()
          self._mapping.add(i)
          self._changed.notify_all()
        try:
          outcomes[number] = worker.call(method, *own, timeout_s=timeout_s)
        finally:
          with self._changed:
            self._mapping.discard(i)
            self._changed.notify_all()
        if worker.failed_starts:
          last.append(outcomes[number][1])

    self.each(work, method)
    for number, _ in waiting if last else ():
      outcomes[number] = None, Fault(last[-1].kind, 'not tried, because no process can be started')
    return outcomes

  def close(self) -> None:
    """Closes all workers, see `Worker.close`."""
    self._finalize()
