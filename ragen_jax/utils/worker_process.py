"""The child process of a `Worker` (workers.py): makes an object, and calls its methods as the parent asks.

It loads little, so that it starts at once: the package's `utils`, and what the factory needs. Calls run in the main
thread, because some libraries work there only. What is printed to stdout is dropped; the parent reads stderr.
"""

from __future__ import annotations

import contextlib
import faulthandler
import fcntl
import os
import resource
import select
import signal
import socket
import struct
import threading
from collections.abc import Callable
from typing import Any

from ragen_jax.utils.foreign import end_if_copy
from ragen_jax.utils.imports import import_object
from ragen_jax.utils.messages import pack, unpack
from ragen_jax.utils.threads import Fault, raised

TYPES = (Fault,)  # the dataclasses that messages may contain
LARGEST_MESSAGE = 1 << 30  # bytes; the largest observation, of 16 images of 4096 x 4096 pixels, has fewer
LENGTH = struct.Struct('>Q')  # in front of each message


def main(link: int, lifeline: int) -> None:
  """Answers requests until the parent ends.

  A request is (number, method, arguments), the first one (0, factory, (memory_mib, *arguments)). The answer is
  (number, result, fault, whether memory ran out).

  Args:
    link: file descriptor of a socket to the parent.
    lifeline: file descriptor of a pipe whose other end the parent closes by ending.
  """
  end_with_parent(lifeline)
  faulthandler.enable()
  with contextlib.suppress(OSError), open('/proc/self/oom_score_adj', 'w') as file:
    file.write('1000')  # where memory is full, the system should end this process, not the run
  os.set_inheritable(link, False)
  link = socket.socket(fileno=link)
  served: list[Any] = []

  def make(memory_mib: int, *arguments: Any) -> None:
    if memory_mib:
      limit_memory(memory_mib << 20)
    served.append(import_object('factory', factory)(*arguments))

  number, factory, arguments = _receive(link)
  _answer(link, number, 'start', lambda: make(*arguments))
  while True:
    number, method, arguments = _receive(link)
    if method == 'close':  # which not every object has
      _answer(link, number, method, lambda: getattr(served[0], 'close', lambda: None)())
    else:
      _answer(link, number, method, lambda: getattr(served[0], method)(*arguments))  # noqa: B023, called at once


def _answer(link: socket.socket, number: int, what: str, call: Callable[[], Any]) -> None:
  """Makes a call and sends its outcome. To write the result is part of the call, because it runs foreign code too."""
  pid, full = os.getpid(), False
  try:
    message = pack((number, call(), None, False), TYPES, describe=True)
    if len(message) > LARGEST_MESSAGE:
      raise ValueError(f'the result has {len(message)} bytes; allowed: {LARGEST_MESSAGE}')
  except BaseException as e:  # noqa: BLE001, foreign code may raise any exception, which becomes a fault
    full = isinstance(e, MemoryError)
    fault = raised(e, what)
    message = pack((number, None, fault, full), TYPES)
  end_if_copy(pid)
  link.sendall(LENGTH.pack(len(message)) + message)


def _receive(link: socket.socket) -> tuple[int, str, tuple[Any, ...]]:
  """The next request; ends the process if there is none, because the parent has ended."""
  (size,) = LENGTH.unpack(_read(link, LENGTH.size))
  return unpack(_read(link, size), TYPES)


def _read(link: socket.socket, size: int) -> bytes:
  data = bytearray()
  while len(data) < size:
    part = link.recv(min(size - len(data), 1 << 20))
    if not part:
      os._exit(0)
    data += part
  return bytes(data)


def limit_memory(size: int) -> None:
  """Limits the memory that this process may write to, in bytes.

  RLIMIT_DATA counts heap, anonymous memory and stacks of threads. RLIMIT_AS would also count addresses without memory:
  files that libraries map, and ranges that they reserve, which are often many times larger than what they use.
  """
  _, most = resource.getrlimit(resource.RLIMIT_DATA)
  size = size if most == resource.RLIM_INFINITY else min(size, most)
  resource.setrlimit(resource.RLIMIT_DATA, (size, size))


def end_with_parent(lifeline: int, by_kernel: bool = hasattr(fcntl, 'F_SETSIG')) -> None:
  """Ends this process, and all of its process group, when no other process holds the other end of a pipe any more.

  Args:
    by_kernel: whether the kernel sends the signal, which Linux can: also while C code holds the interpreter's lock.
      (PR_SET_PDEATHSIG would end the process with the thread that started it.) Otherwise a thread waits for it.
  """
  os.set_inheritable(lifeline, False)
  if not by_kernel:
    threading.Thread(target=_wait_for_end, args=(lifeline,), daemon=True).start()
    return
  fcntl.fcntl(lifeline, fcntl.F_SETSIG, signal.SIGKILL)
  fcntl.fcntl(lifeline, fcntl.F_SETOWN, -os.getpgrp())
  fcntl.fcntl(lifeline, fcntl.F_SETFL, fcntl.fcntl(lifeline, fcntl.F_GETFL) | os.O_ASYNC)
  poll = select.poll()
  poll.register(lifeline, 0)
  if poll.poll(0):  # the parent ended before
    os.killpg(0, signal.SIGKILL)


def _wait_for_end(lifeline: int) -> None:
  os.read(lifeline, 1)
  os.killpg(0, signal.SIGKILL)
