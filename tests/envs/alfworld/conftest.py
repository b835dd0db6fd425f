"""Games in ALFWorld's form, where TextWorld's engine for them is installed."""

from __future__ import annotations

import importlib.util
import pathlib

import pytest

from tests.support.alfworld import TASKS, WALKTHROUGHS, write_game


@pytest.fixture(scope='session')
def engine() -> None:
  """Skips tests that play where a package is missing."""
  if any(importlib.util.find_spec(x) is None for x in ('textworld', 'fast_downward')):
    pytest.skip('needs the engine: pip install -r requirements-alfworld.txt')


@pytest.fixture(scope='session')
def data(tmp_path_factory) -> str:
  """A folder with a game of each task in its parts, each with a walkthrough."""
  folder = tmp_path_factory.mktemp('json_2.1.1')
  for number, split in enumerate(('train', 'valid_seen', 'valid_unseen')):
    for task in TASKS:
      write_game(pathlib.Path(folder) / split, task, number, walkthrough=WALKTHROUGHS[task](number))
  return str(folder)
