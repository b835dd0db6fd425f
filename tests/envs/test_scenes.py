"""Places of things, against the boards' texts read by plain loops."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.game_2048 import Game2048
from ragen_jax.envs.scenes import KINDS, Scene, make_scenes
from ragen_jax.envs.sokoban import Sokoban
from tests.support.environments import batch

SOKOBAN = Sokoban(dim=(6, 7), num_boxes=2)
BOARDS = {
  SOKOBAN: [
    '#######\n#_P_O_#\n#_X#__#\n#__√__#\n#_____#\n#######',
    '#######\n#_S_O_#\n#_X#__#\n#_X___#\n#_____#\n#######',
    '#######\n#_____#\n#_√#__#\n#_P_√_#\n#_____#\n#######',
  ],
  FrozenLake(): [
    'P_O_\n___G\nO___\n____',
    '__X_\n___G\nO___\n____',
    '__O_\n___√\nO___\n____',
    '____\nG___\n____\n___P',
  ],
}
# The kinds that each symbol shows.
SHOWN = {
  'sokoban': {'O': ('target',), 'X': ('box',), '√': ('box', 'target'), 'P': ('player',), 'S': ('player', 'target')},
  'frozen_lake': {
    'O': ('hole',), 'G': ('goal',), 'P': ('player',), 'X': ('player', 'hole'), '√': ('player', 'goal'),
  },
}  # fmt: skip


@pytest.mark.parametrize('env', BOARDS, ids=lambda env: env.name)
def test_scenes_are_those_of_the_texts(env):
  states = batch(*map(env.from_text, BOARDS[env]))
  scenes = env.scenes(states)
  for text, scene in zip(env.render(states), scenes, strict=True):
    places = {kind: [] for kind in ('player', *scene.things)}
    for row, line in enumerate(text.split('\n')):
      for column, symbol in enumerate(line):
        for kind in SHOWN[env.name].get(symbol, ()):
          places[kind].append((row, column))
    assert scene == Scene(places.pop('player')[0], {kind: tuple(at) for kind, at in places.items()})
  assert set(scenes[0].things) < set(KINDS)


def test_a_board_without_things_keeps_its_kinds():
  (scene,) = make_scenes(np.array([[1, 2]]), {'hole': np.zeros((1, 3, 3), bool)})
  assert scene == Scene((1, 2), {'hole': ()})


def test_games_without_a_player_say_so():
  with pytest.raises(NotImplementedError, match='game_2048 has no scenes'):
    Game2048().scenes(None)
