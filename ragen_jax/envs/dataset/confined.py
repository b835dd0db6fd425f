"""A confined program while it runs: its input, its output, and its end. `Sandbox` (sandbox.py) starts it."""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import functools
import math
import os
import pathlib
import re
import selectors
import subprocess
import time
from collections.abc import Callable, Iterator

from ragen_jax.utils.errors import one_line

_CHUNK = 1 << 16
_TICK_S = 0.02  # processor time is known no better
_GRACE_S = 5.0  # for the end of a program that was killed


class SandboxError(Exception):
  """A program could not be started; it is not the program's fault."""


@dataclasses.dataclass(frozen=True)
class Limits:
  """What a program may use.

  Attributes:
    memory_mib: address space of each process.
    cpu_s: processor time of each process.
    wall_s: time from the start of the program; at 0 and below it is killed at once.
    processes: processes and threads of the program at a time, itself included.
    file_mib: size of a file.
    disk_mib: size of all files.
    open_files: open files of each process.
    output_bytes: what is read of stdout and stderr together. A program that writes more is killed.
  """

  memory_mib: int = 1024
  cpu_s: int = 6
  wall_s: float = 30.0
  processes: int = 8
  file_mib: int = 16
  disk_mib: int = 32
  open_files: int = 64
  output_bytes: int = 4 << 20


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a program ended.

  Attributes:
    verdict: 'ok' (status 0), 'crash' (another status), 'timeout', 'memory' or 'output' (more than `output_bytes`).
      'memory', and the 'timeout' of processor time, are read from what the program leaves, which it can feign.
    status: the exit status; 128 + n after signal n.
    seconds: from the start to the end.
  """

  verdict: str
  stdout: bytes
  stderr: bytes
  status: int
  seconds: float


class Confined:
  """A confined program while it runs, to talk with it by lines. It is killed when the context ends."""

  def __init__(self, process: subprocess.Popen, status_pipe: int, limits: Limits):
    self._process, self._status_pipe, self._limits = process, status_pipe, limits
    self._start = time.monotonic()
    self._verdict, self._told = '', b''
    self._out, self._err, self._unsent = bytearray(), bytearray(), bytearray()
    self._read = 0
    self._exited = False
    self._selector = selectors.DefaultSelector()
    self._pidfd = os.pidfd_open(process.pid)
    self._selector.register(self._pidfd, selectors.EVENT_READ, self._note_exit)
    for pipe, buffer in ((process.stdout, self._out), (process.stderr, self._err)):
      self._selector.register(pipe, selectors.EVENT_READ, functools.partial(self._receive, pipe, buffer))
    if process.stdin is not None:
      os.set_blocking(process.stdin.fileno(), False)

  def __enter__(self) -> Confined:
    return self

  def __exit__(self, *_: object) -> None:
    self._kill('ok')
    self._process.wait()
    self._reap()
    self._selector.close()
    os.close(self._pidfd)
    os.close(self._status_pipe)
    for pipe in (self._process.stdin, self._process.stdout, self._process.stderr):
      if pipe is not None:
        with contextlib.suppress(OSError):  # what was not sent to a program that ended
          pipe.close()

  def send(self, line: bytes) -> None:
    """Queues bytes for stdin; they are written while `read_line` waits."""
    self._unsent += line
    if self._unsent and self._process.stdin.fileno() not in self._selector.get_map():
      self._selector.register(self._process.stdin, selectors.EVENT_WRITE, self._write)

  def read_line(self, seconds: float, cpu_end: float = math.inf) -> bytes | None:
    """The next line of stdout; None if the program ends before, or is killed because it needs longer or a limit.

    Args:
      cpu_end: what `cpu_seconds` may become. Processes that run side by side can exceed it by their number.
    """
    self._pump(lambda: b'\n' in self._out, time.monotonic() + seconds, cpu_end)
    end = self._out.find(b'\n')
    if end < 0:
      return None
    line = bytes(self._out[:end])
    del self._out[: end + 1]
    return line

  def cpu_seconds(self) -> float:
    """Processor time of all processes of the program since its start; 0 where the machine hides them."""
    ticks, waiting = 0, [self._process.pid]
    while waiting:
      folder = f'/proc/{waiting.pop()}'
      with contextlib.suppress(OSError):  # it has ended, and its time is that of its parent
        # The name of a process, in brackets, may hold anything; numbers 11 to 14 after it are its own time and that of
        # children that ended (proc_pid_stat(5)).
        ticks += sum(map(int, pathlib.Path(folder, 'stat').read_bytes().rpartition(b')')[2].split()[11:15]))
        for task in os.listdir(f'{folder}/task'):
          waiting += map(int, pathlib.Path(folder, 'task', task, 'children').read_bytes().split())
    return ticks / os.sysconf('SC_CLK_TCK')

  def finish(self) -> Outcome:
    """Waits for the end of the program.

    Raises:
      SandboxError: the program did not start.
    """
    self._pump(lambda: False, self._start + self._limits.wall_s)
    status = self._process.wait()
    self._told += _drain(self._status_pipe)
    if not self._verdict and b'exit-code' not in self._told:
      message = one_line(bytes(self._err[-500:]).decode(errors='replace'), str)
      raise SandboxError(f'the program could not be started ({message or f"status {status}"})')
    status = status if status >= 0 else 128 - status
    verdict = self._verdict or _verdict(status, self._err)
    return Outcome(verdict, bytes(self._out), bytes(self._err), status, time.monotonic() - self._start)

  def _pump(self, done: Callable[[], bool], deadline: float, cpu_end: float = math.inf) -> None:
    """Reads and writes until `done()` or the end of the program; kills it at the deadline, or after processor time."""
    deadline = min(deadline, self._start + self._limits.wall_s)
    while not self._has_ended() and not done():
      left = deadline - time.monotonic()
      # A process needs at least as long for it.
      cpu_left = cpu_end - self.cpu_seconds() if cpu_end < math.inf else math.inf
      if left <= 0 or cpu_left <= 0:
        self._kill('timeout')
        return
      for key, _ in self._selector.select(min(left, max(cpu_left, _TICK_S))):
        key.data()
      if self._read > self._limits.output_bytes:
        self._kill('output')
        return

  def _reap(self) -> None:
    """In the first process of a container, whose child the sandbox's then is: takes its status; no zombie stays."""
    if os.getpid() != 1:
      return
    self._told += _drain(self._status_pipe)
    if found := re.search(rb'"child-pid": *(\d+)', self._told):
      with contextlib.suppress(ChildProcessError):
        os.waitpid(int(found[1]), 0)

  def _has_ended(self) -> bool:
    return self._exited and not any(
      pipe.fileno() in self._selector.get_map() for pipe in (self._process.stdout, self._process.stderr)
    )

  def _receive(self, pipe, buffer: bytearray) -> None:
    chunk = os.read(pipe.fileno(), _CHUNK)
    if not chunk:
      self._selector.unregister(pipe)
    self._read += len(chunk)
    buffer += chunk

  def _write(self) -> None:
    try:
      sent = os.write(self._process.stdin.fileno(), self._unsent[:_CHUNK])
    except BrokenPipeError:  # the program closed its stdin
      sent = len(self._unsent)
    del self._unsent[:sent]
    if not self._unsent:
      self._selector.unregister(self._process.stdin)

  def _note_exit(self) -> None:
    self._selector.unregister(self._pidfd)
    self._exited = True

  def _kill(self, verdict: str) -> None:
    """Kills the program and waits until all of its processes have closed their output. The first verdict stays."""
    if self._has_ended():
      return
    self._verdict = self._verdict or verdict
    self._process.kill()
    self._process.wait()
    self._exited = True
    give_up = time.monotonic() + _GRACE_S
    for pipe in (self._process.stdout, self._process.stderr):
      if pipe.fileno() in self._selector.get_map():
        self._selector.unregister(pipe)
        _skip(pipe.fileno(), give_up)


def _skip(pipe: int, give_up: float) -> None:
  """Reads a pipe to its end."""
  with selectors.DefaultSelector() as selector:
    selector.register(pipe, selectors.EVENT_READ)
    while selector.select(max(give_up - time.monotonic(), 0)) and os.read(pipe, _CHUNK):
      pass


def _drain(pipe: int) -> bytes:
  """What a pipe holds at the moment."""
  os.set_blocking(pipe, False)
  try:
    return os.read(pipe, _CHUNK)
  except BlockingIOError:
    return b''


def _verdict(status: int, stderr: bytes | bytearray) -> str:
  if status == 0:
    return 'ok'
  if status == 128 + 24:  # SIGXCPU
    return 'timeout'
  last = bytes(stderr[-1000:]).strip().rpartition(b'\n')[2]
  return 'memory' if last.startswith(b'MemoryError') else 'crash'


@contextlib.contextmanager
def memory_file(data: bytes) -> Iterator[int]:
  """A file in memory that cannot be changed any more."""
  file = os.memfd_create('ragen-jax', os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
  try:
    with open(file, 'wb', closefd=False) as f:
      f.write(data)
    os.lseek(file, 0, os.SEEK_SET)
    fcntl.fcntl(file, fcntl.F_ADD_SEALS, fcntl.F_SEAL_WRITE | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SHRINK)
    yield file
  finally:
    os.close(file)
