"""A child process and the connection to it: start, messages with time limits, and an end that leaves nothing behind."""

from __future__ import annotations

import contextlib
import json
import math
import os
import pathlib
import select
import signal
import socket
import subprocess
import sys
import time

from ragen_jax.utils.worker_process import LARGEST_MESSAGE, LENGTH

_ROOT = str(pathlib.Path(__file__).parents[2])
_KEPT_OUTPUT = 1 << 14  # bytes of the end of stderr
_GLANCE_S = 0.1  # between two looks at whether the process still exists
_DYING_S = 2.0  # from the end of the connection to that of the process, for example while a core file is written
_REAP_S = 10.0
_PART = 1 << 18  # bytes that are read at a time

# The child finds modules where the parent does, or another interpreter where it does by itself, and then this package
# and what lies in the present folder. It loads neither the parent's main module nor JAX.
_CODE = (
  'import sys, json; path = json.loads(sys.argv[4]); sys.path[0 if sys.argv[5] == "all" else len(sys.path):] = path; '
  'from ragen_jax.utils.worker_process import main; main(int(sys.argv[2]), int(sys.argv[3]))'
)


class Ended(Exception):
  """The process ended, or ended the connection, before it answered."""


class Garbled(Exception):
  """The process sent what is no message."""


class Link:
  """A running process.

  Attributes:
    process: the number that its owner gave it.
    requests: number of requests that it was sent.
  """

  def __init__(self, name: str, process: int, python: str = ''):
    """Starts the process.

    Args:
      name: for lists of processes.
      python: its interpreter, of Python 3.11 or newer and with msgpack; '' for that of this process.

    Raises:
      OSError: the system cannot start it.
    """
    self.process, self.requests = process, 0
    self._output, self._out, self._in = bytearray(), memoryview(b''), bytearray()
    with contextlib.ExitStack() as child_s:
      self._socket, theirs = socket.socketpair()
      child_s.callback(theirs.close)
      # The kernel closes this end if this process is killed, which ends the child.
      lifeline, self._lifeline = os.pipe()
      child_s.callback(os.close, lifeline)
      path = [_ROOT, os.getcwd()] if python else [entry for entry in sys.path if isinstance(entry, str)]
      modules = [json.dumps(path), 'added' if python else 'all']
      try:
        self._popen = subprocess.Popen(
          [python or sys.executable, '-P', '-c', _CODE, name, str(theirs.fileno()), str(lifeline), *modules],
          stdin=subprocess.DEVNULL,
          stdout=subprocess.DEVNULL,
          stderr=subprocess.PIPE,
          bufsize=0,
          pass_fds=(theirs.fileno(), lifeline),
          # A process group of its own: Ctrl-C does not reach it, and what it starts is ended with it.
          start_new_session=True,
          # An accelerator belongs to the run; JAX in a second process would take most of its memory.
          env=os.environ | {'JAX_PLATFORMS': 'cpu'},
        )
      except BaseException:
        self._close()
        raise
    os.set_blocking(self._popen.stderr.fileno(), False)
    self._socket.setblocking(False)
    self._poll = select.poll()
    self._poll.register(self._popen.stderr, select.POLLIN)

  def send(self, message: bytes) -> None:
    """Begins to send a request; `receive` sends the rest.

    Raises:
      Ended: the process has ended.
    """
    self.requests += 1
    self._out, self._in = memoryview(LENGTH.pack(len(message)) + message), bytearray()
    self._send()

  def receive(self, timeout_s: float) -> bytes:
    """The answer to the request that was sent last.

    Raises:
      TimeoutError: it is not complete after `timeout_s` seconds.
      Ended: the process ended.
      Garbled: it sent something else.
    """
    deadline = time.monotonic() + timeout_s
    while True:
      left = deadline - time.monotonic()
      if left <= 0:
        raise TimeoutError
      ended = self.has_ended()  # before the look at the socket, where its last answer may be
      self._poll.register(self._socket, select.POLLIN | (select.POLLOUT if self._out else 0))
      events = dict(self._poll.poll(math.ceil(1000 * min(left, _GLANCE_S))))
      if self._popen.stderr.fileno() in events:
        self._read_output()
      if self._out and events.get(self._socket.fileno(), 0) & select.POLLOUT:
        self._send()
      if events.get(self._socket.fileno(), 0) & ~select.POLLOUT:
        self._read()
        answer = self._complete()
        if answer is not None:
          return answer
      elif ended:  # and a child of it holds its end of the connection open
        raise Ended

  def has_ended(self) -> bool:
    """Whether the process has ended. It stays a zombie, so its number is not given to another process group."""
    if not hasattr(os, 'waitid'):
      return self._popen.poll() is not None
    try:
      return os.waitid(os.P_PID, self._popen.pid, os.WEXITED | os.WNOHANG | os.WNOWAIT) is not None
    except ChildProcessError:  # other code has waited for it
      return True

  def kill(self) -> None:
    """Ends the process and the processes of its group."""
    with contextlib.suppress(ProcessLookupError, PermissionError):
      os.killpg(self._popen.pid, signal.SIGKILL)

  def end(self, dying: bool) -> str:
    """Ends the process group, waits for the process, and closes the connection.

    Args:
      dying: whether the process ends by itself, and its own exit status is wanted.

    Returns:
      How the process ended: its exit status or signal, and the last lines of its stderr.
    """
    deadline = time.monotonic() + (_DYING_S if dying else 0.0)
    while not self.has_ended() and time.monotonic() < deadline:
      self._read_output()  # a full pipe would hold it
      time.sleep(0.005)
    by_itself = self.has_ended()
    self.kill()
    with contextlib.suppress(subprocess.TimeoutExpired):  # the kernel holds it; it is killed when that is over
      self._popen.wait(_REAP_S)
    self._read_output()
    self._close()
    status = _status(self._popen.returncode) if by_itself else 'it ended the connection'
    return '; '.join(filter(None, [status, last_words(self._output.decode(errors='replace'))]))

  def _send(self) -> None:
    try:
      while self._out:
        self._out = self._out[self._socket.send(self._out) :]
    except BlockingIOError:
      pass
    except OSError as e:
      raise Ended from e

  def _read(self) -> None:
    try:
      part = self._socket.recv(_PART)
    except BlockingIOError:
      return
    except OSError as e:
      raise Ended from e
    if not part:
      raise Ended
    self._in += part

  def _complete(self) -> bytes | None:
    """The answer, once all of it has arrived."""
    if len(self._in) < LENGTH.size:
      return None
    (size,) = LENGTH.unpack_from(self._in)
    if size > LARGEST_MESSAGE or len(self._in) > LENGTH.size + size:
      raise Garbled(f'a message of {size} bytes, of which {len(self._in) - LENGTH.size} have arrived')
    return bytes(memoryview(self._in)[LENGTH.size :]) if len(self._in) == LENGTH.size + size else None

  def _read_output(self) -> None:
    """Takes what there is in the pipe of stderr."""
    with contextlib.suppress(BlockingIOError, KeyError):
      while part := os.read(self._popen.stderr.fileno(), _PART):
        self._output = (self._output + part)[-_KEPT_OUTPUT:]
      self._poll.unregister(self._popen.stderr)  # it is at its end, perhaps since long ago

  def _close(self) -> None:
    self._socket.close()
    os.close(self._lifeline)
    if popen := getattr(self, '_popen', None):
      popen.stderr.close()


def _status(code: int) -> str:
  if code >= 0:
    return f'exit status {code}'
  try:
    name = signal.Signals(-code).name
  except ValueError:
    name = f'signal {-code}'
  return name + (', as the system sends where memory is full' if -code == signal.SIGKILL else '')


def last_words(output: str) -> str:
  """The last lines of a program's stderr; after a crash, the line of Python that it was in."""
  lines = [line.strip() for line in output.splitlines() if line.strip()]
  crash = next((i for i, line in enumerate(lines) if line.startswith('Fatal Python error')), None)
  if crash is not None:
    place = next((line for line in lines[crash:] if line.startswith('File ')), '')
    return ' '.join([lines[crash], place]).strip()
  return ' | '.join(lines[-3:])
