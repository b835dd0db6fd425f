"""Starts this project's programs as a user would, in processes of their own."""

from __future__ import annotations

import contextlib
import os
import socket
import subprocess
import sys
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
