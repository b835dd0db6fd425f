"""Starts this project's programs as a user would, in processes of their own."""

from __future__ import annotations

import atexit
import contextlib
import functools
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
from collections.abc import Iterator
from typing import Any

from tests.support.paths import ROOT


def environment(devices: int | None = None, **variables: str) -> dict[str, str]:
  """The variables of a process that runs on CPU and can import the repository.

  Args:
    devices: number of fake CPU devices; None leaves it as it is. Other flags of XLA stay.
    **variables: set in addition.
  """
  found = os.environ | {'JAX_PLATFORMS': 'cpu', 'PYTHONPATH': str(ROOT)}
  if devices is not None:
    count = '--xla_force_host_platform_device_count'
    others = [flag for flag in found.get('XLA_FLAGS', '').split() if not flag.startswith(count)]
    found['XLA_FLAGS'] = ' '.join([*others, f'{count}={devices}'])
  return found | variables


@contextlib.contextmanager
def coordinator() -> Iterator[str]:
  """An address for the processes of a run, whose port nobody else gets while the block runs."""
  with socket.socket() as held:
    held.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)  # as JAX's coordinator does
    held.bind(('127.0.0.1', 0))
    yield f'127.0.0.1:{held.getsockname()[1]}'


def main_command(*arguments: str) -> list[str]:
  """The command line of `main.py`."""
  return [sys.executable, str(ROOT / 'main.py'), *arguments]


def start_main(*arguments: str, devices: int | None = None, **options: Any) -> subprocess.Popen:
  """Starts `main.py` in the repository's root and does not wait for it; `options` are those of `subprocess.Popen`."""
  return subprocess.Popen(main_command(*arguments), **{'cwd': ROOT, 'env': environment(devices)} | options)


def run_main(*arguments: str, devices: int | None = None, check: bool = False, **options: Any) -> Any:
  """Runs `main.py` in the repository's root.

  Args:
    *arguments: of the command line.
    devices: number of fake CPU devices; None leaves it as it is.
    check: raise if its exit status is not 0.
    **options: of `subprocess.run`.

  Returns:
    A `subprocess.CompletedProcess` with status, output and errors as text.
  """
  options = {'cwd': ROOT, 'env': environment(devices), 'capture_output': True, 'text': True} | options
  return subprocess.run(main_command(*arguments), check=check, **options)


def run_python(code: str, *arguments: str, devices: int | None = None, **options: Any) -> Any:
  """Runs Python code that may import the package and the tests; otherwise as `run_main`."""
  options = {'cwd': ROOT, 'env': environment(devices), 'capture_output': True, 'text': True, 'check': False} | options
  return subprocess.run([sys.executable, '-c', code, *arguments], **options)


# Imports the program once. Each request is then run by a copy of the process, which no other one changes.
_COPIES = """
import gc, json, os, runpy, socket, sys, warnings
gc.disable()
sys.modules['torch'] = None  # transformers would import it where it is there; it takes as long as everything else
import ragen_jax.train
del sys.modules['torch']

warnings.filterwarnings('ignore', message='os.fork')
gc.collect(), gc.freeze(), gc.enable()
requests = socket.socket(fileno=int(sys.argv[1]))
while True:
  message, files, *_ = socket.recv_fds(requests, 1, 4)
  if not message:
    os._exit(0)
  process = os.fork()
  if not process:
    break
  for file in files:
    os.close(file)
  requests.sendall(f'{process}\\n'.encode())
  requests.sendall(f'{os.waitstatus_to_exitcode(os.waitpid(process, 0)[1])}\\n'.encode())

requests.close()
with open(files.pop()) as file:
  request = json.load(file)
for number, file in enumerate(files):
  os.dup2(file, number), os.close(file)
assert not any(os.environ.get(k) != x for k, x in request['variables'].items() if k.startswith('JAX_')), 'read before'
os.environ.clear(), os.environ.update(request['variables'])
os.chdir(request['cwd'])
sys.argv[:] = request['argv']
if request['code'] is None:
  runpy.run_path(sys.argv[0], run_name='__main__')
else:
  exec(request['code'])
"""


class _Copies:
  """The process of which programs get copies."""

  def __init__(self) -> None:
    self.requests, theirs = socket.socketpair()
    with theirs:
      command = [sys.executable, '-c', _COPIES, str(theirs.fileno())]
      self.process = subprocess.Popen(command, cwd=ROOT, env=environment(), pass_fds=[theirs.fileno()])
    self.answers = self.requests.makefile()
    atexit.register(self.close)

  def close(self) -> None:
    self.answers.close()
    self.requests.close()
    self.process.wait()

  def run(self, request: dict[str, Any], given: str, timeout: float) -> subprocess.CompletedProcess:
    with tempfile.TemporaryFile('w+') as told, tempfile.TemporaryFile('w+') as entered:
      json.dump(request, told)
      entered.write(given)
      told.seek(0), entered.seek(0)
      # Pipes, which whatever the program leaves running holds, too: this waits for all of it, as `subprocess.run` does.
      pipes = [os.pipe() for _ in range(2)]
      try:
        socket.send_fds(self.requests, [b'.'], [entered.fileno(), *(theirs for _, theirs in pipes), told.fileno()])
      finally:
        for _, theirs in pipes:
          os.close(theirs)
    texts = [[], []]
    readers = [
      threading.Thread(target=lambda file, text: text.append(file.read()), args=(os.fdopen(ours), text))
      for (ours, _), text in zip(pipes, texts, strict=True)
    ]
    for reader in readers:
      reader.start()
    process = int(self.answers.readline())
    late = threading.Timer(timeout, os.kill, [process, signal.SIGKILL])
    late.start()
    for reader in readers:
      reader.join()
    status = int(self.answers.readline())
    late.cancel()
    late.join()
    return subprocess.CompletedProcess(request['argv'], status, *(text[0] for text in texts))


_copies = functools.cache(_Copies)


def copy_python(
  code: str | None, *arguments: str, devices: int | None = None, cwd: Any = ROOT, given: str = '', name: str = '-c',
  check: bool = False, timeout: float = 280, **variables: str,
) -> subprocess.CompletedProcess:  # fmt: skip
  """Runs Python code as `run_python` does, in a copy of a process that has imported the program already.

  That saves seconds. Not for tests of imports, of PyTorch, or of the variables that JAX reads when it is imported.

  Args:
    code: the code; None for the file `name`.
    *arguments: `sys.argv[1:]`.
    devices: number of fake CPU devices; None leaves it as it is.
    cwd: the folder in which it runs.
    given: standard input.
    name: `sys.argv[0]`.
    check: raise if the exit status is not 0.
    timeout: seconds until it is killed.
    **variables: set in addition.
  """
  argv = [name, *map(str, arguments)]
  request = {'code': code, 'argv': argv, 'cwd': str(cwd), 'variables': environment(devices, **variables)}
  done = _copies().run(request, given, timeout)
  if check and done.returncode:
    sys.stderr.write(done.stderr)
    raise subprocess.CalledProcessError(done.returncode, argv, done.stdout, done.stderr)
  return done


def copy_main(*arguments: str, **options: Any) -> subprocess.CompletedProcess:
  """Runs `main.py` as `run_main` does, in a copy of a process that has imported it already; see `copy_python`."""
  return copy_python(None, *arguments, name=str(ROOT / 'main.py'), **options)
