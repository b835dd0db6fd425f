"""What worker processes of tests serve: an object that does what it is told, also what a good one never does.

The processes load this module, so it imports little.
"""

from __future__ import annotations

import contextlib
import os
import pathlib
import re
import signal
import socket
import stat
import subprocess
import sys
import threading
import time

THING = f'{__name__}:Thing'


class Nameless(BaseException):
  def __str__(self):
    raise RuntimeError('no words')


class Slow:
  def __repr__(self):
    time.sleep(600)
    return 'late'


class Strange(dict):
  def items(self):
    raise RuntimeError('no items')


def _open_files() -> list[int]:
  """Numbers of the open files beyond stderr. The connection keeps the number that it has in the parent: any."""
  return [fd for fd in map(int, os.listdir('/dev/fd')) if fd > 2]


ERRORS = {kind.__name__: kind for kind in (KeyError, SystemExit, KeyboardInterrupt, GeneratorExit, Nameless)}
RESULTS = {
  'object': lambda: object(),
  'function': lambda: [1, print],
  'class': lambda: (Nameless, {'a': Nameless}),
  'slow': Slow,
  'strange': Strange,
}


class Thing:
  def __init__(self, *arguments, note=''):
    self.arguments = arguments

  def given(self):
    return self.arguments

  def echo(self, value):
    return value

  def about(self):
    main = threading.current_thread() is threading.main_thread()
    return os.getpid(), os.getpgid(0), os.getsid(0), main, os.environ.get('JAX_PLATFORMS')

  def modules(self):
    return sorted(sys.modules)

  def hang(self, path=''):
    if path:
      pathlib.Path(path).touch()
    time.sleep(600)

  def hold(self, path=''):
    """Never gives the interpreter's lock back."""
    if path:
      pathlib.Path(path).touch()
    re.match('(a|aa)+$', 'a' * 200 + 'b')

  def leave(self, status):
    sys.stderr.write('first\nsecond\n\nthird\nfourth\n')
    os._exit(status)

  def signal(self, number):
    os.kill(os.getpid(), number)
    time.sleep(600)

  def fail(self, name):
    raise ERRORS[name]('lost')

  def recurse(self):
    return self.recurse()

  def make(self, name):
    return RESULTS[name]()

  def take(self, mib):
    self.taken = bytearray(mib << 20)
    return len(self.taken)

  def talk(self, size):
    """Writes to stdout and stderr in every way there is."""
    print('p' * size, flush=True)
    sys.stdout.write('w')
    os.write(1, b'f' * size)
    os.write(2, b'e' * size + b'\n')
    subprocess.run(['printf', 'from a child'], check=True)
    return sys.stdin.read()

  def start_child(self, then=''):
    """A child that would go on for ten minutes, with all of this process's pipes if it is a copy."""
    if then == 'copy and leave':
      pid = os.fork()
      if not pid:
        time.sleep(600)
        os._exit(0)
      pathlib.Path(self.arguments[0]).write_text(str(pid))
      os._exit(4)
    return subprocess.Popen(['sleep', '600']).pid

  def copy(self):
    """Comes back twice."""
    return os.fork() == 0

  def meddle(self, data):
    """Writes to the sockets that it finds open, and answers nothing; for `data` that begins with '+', it answers."""
    answers, data = data[:1] == b'+', data.removeprefix(b'+')
    for fd in _open_files():
      try:
        if stat.S_ISSOCK(os.fstat(fd).st_mode):
          socket.socket(fileno=os.dup(fd)).sendall(data)
      except OSError:
        continue
    if not answers:
      time.sleep(600)
    return 'honest'

  def cut(self):
    """Closes the connection, and goes on."""
    for fd in _open_files():
      with contextlib.suppress(OSError):  # the list's own
        os.close(fd)
    time.sleep(600)

  def meet(self, own, other):
    """Returns only while another call runs at the same time."""
    pathlib.Path(own).touch()
    while not pathlib.Path(other).exists():
      time.sleep(0.005)
    return own


class Closing(Thing):
  """Notes its end in a file; with 'hang' it does not end, and with 'one hangs' the first of several does not."""

  def close(self):
    path, *more = self.arguments
    if more == ['one hangs']:
      with contextlib.suppress(FileExistsError):
        os.close(os.open(path + '.first', os.O_CREAT | os.O_EXCL))
        more = ['hang']
    if more == ['hang']:
      time.sleep(600)
    if more == ['fail']:
      raise KeyError('stuck')
    with open(path, 'a') as file:
      file.write('closed\n')


class BadStart:
  def __init__(self, path, what):
    with open(path, 'a') as file:
      file.write('started\n')
    getattr(Thing(), what)(*{'leave': (5,), 'fail': ('KeyError',), 'take': (512,)}.get(what, ()))


def is_running(pid: int) -> bool:
  """Whether a process exists; a zombie has ended."""
  try:
    return pathlib.Path(f'/proc/{pid}/stat').read_text().rpartition(')')[2].split()[0] not in 'ZX'
  except (FileNotFoundError, ProcessLookupError):
    return False


def wait_until(condition, seconds=100.0):
  """Waits for a condition, much longer than it takes."""
  deadline = time.monotonic() + seconds
  while not condition():
    assert time.monotonic() < deadline, 'it did not happen'
    time.sleep(0.01)


CRASHES = (signal.SIGSEGV, signal.SIGABRT, signal.SIGBUS, signal.SIGILL, signal.SIGFPE)
