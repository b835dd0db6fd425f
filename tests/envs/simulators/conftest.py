"""Where the real simulators are installed."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest

# The interpreter of an environment of its own, which has the packages ai2thor and mani_skill.
VARIABLE = 'RAGEN_SIMULATORS_PYTHON'


@pytest.fixture(scope='session')
def python_with():
  """Gives the interpreter that has a package, or skips the test."""

  def find(package: str) -> str:
    python = os.environ.get(VARIABLE, sys.executable)
    if subprocess.run([python, '-c', f'import {package}'], capture_output=True, check=False).returncode:
      pytest.skip(f'needs the package {package} in the interpreter that {VARIABLE} names')
    return python

  return find
