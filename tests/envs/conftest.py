"""The recorded traces, which several tests compare with."""

import pathlib
from typing import Any

import pytest

from tests.support.environments import read_golden_traces


@pytest.fixture(scope='session')
def golden(shared_dir: pathlib.Path) -> dict[str, Any]:
  """Traces of other implementations, by game."""
  return read_golden_traces(shared_dir)
