"""Starts this project's programs as a user would, in processes of their own."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import subprocess
import sys
from collections.abc import Iterator, Sequence
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


# Imports the program once. Each list of arguments then runs in a copy of the process, which no other one changes.
_MANY = """
import json, os, sys, tempfile, traceback, warnings
import ragen_jax.train
from ragen_jax.__main__ import run

warnings.filterwarnings('ignore', message='os.fork')
found = []
for arguments in json.loads(sys.argv[1]):
  with tempfile.TemporaryFile() as out, tempfile.TemporaryFile() as err:
    process = os.fork()
    if not process:
      os.dup2(out.fileno(), 1)
      os.dup2(err.fileno(), 2)
      sys.argv, status = ['main.py', *arguments], 0
      try:
        run()
      except SystemExit as e:
        status = e.code
      except BaseException:
        traceback.print_exc()
        status = 1
      sys.stdout.flush(), sys.stderr.flush()
      os._exit(status)  # at once: the interpreter takes a second to end
    _, status = os.waitpid(process, 0)
    out.seek(0), err.seek(0)
    found.append((os.waitstatus_to_exitcode(status), out.read().decode(), err.read().decode()))
print(json.dumps(found))
"""


def run_mains(*commands: Sequence[str]) -> list[subprocess.CompletedProcess]:
  """Runs the program once for each list of arguments, in the repository's root, without starting Python for each.

  For commands that end before JAX looks for devices.
  """
  done = run_python(_MANY, json.dumps(commands), check=True)
  return [
    subprocess.CompletedProcess(list(command), *result)
    for command, result in zip(commands, json.loads(done.stdout), strict=True)
  ]
