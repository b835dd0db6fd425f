"""Games of TextWorld, made once, where the package is installed."""

from __future__ import annotations

import importlib.util

import pytest

from ragen_jax.envs.textworld import library

SIZE = {'rooms': 2, 'objects': 3, 'quest_length': 2}


@pytest.fixture(scope='session')
def made(tmp_path_factory) -> str:
  """A folder with two games that the package made."""
  if importlib.util.find_spec('textworld') is None:
    pytest.skip('needs TextWorld: pip install -r requirements-textworld.txt')
  cache = str(tmp_path_factory.mktemp('games'))
  recipe = library.Recipe(games=2, seed=0, cache=cache, **SIZE)
  assert len(library.make_games(recipe, processes=1, memory_mib=4096, timeout_s=250.0)) == 2
  return cache
