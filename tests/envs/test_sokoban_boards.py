"""Boards of Sokoban from text: what is read and what is refused."""

from __future__ import annotations

import pytest

from ragen_jax.envs.sokoban_boards import BOXOBAN
from tests.support.environments import raises_one_line
from tests.support.games.sokoban import CORNERED, SMALL, TWO


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    (CORNERED[:-7], r'level has 5 rows; dim=\(6, 6\) has 6'),
    (CORNERED.replace('#____#', '#___#'), r'row 4 has 5 columns; dim=\(6, 6\) has 6'),
    (CORNERED.replace('O', '0'), "row 3, column 2 is '0'; allowed: # _ O √ X P S"),
    (CORNERED.replace('#__P_#', '#__P__'), "row 2, column 5 is '_'; the border has to be wall"),
    (CORNERED.replace('P', '_'), 'level has 0 players; there have to be 1'),
    (CORNERED.replace('X_', 'XX'), 'level has 2 boxes; there have to be 1'),
    (CORNERED.replace('O', '_'), 'level has 0 targets; there have to be 1'),
  ],
)
def test_bad_text(text, message):
  with raises_one_line(message):
    SMALL.from_text(text)


def test_boxoban_files():
  boards = [
    '#######\n#_P___#\n#_X_O_#\n#_√___#\n#_____#\n#######',
    '#######\n#_____#\n#_X_S_#\n#_X_O_#\n##____#\n#######',
  ]
  text = '\n'.join(f'; {i}\n{board}\n' for i, board in enumerate(boards))
  for symbol, theirs in zip(TWO.symbols, BOXOBAN, strict=True):
    text = text.replace(symbol, theirs)
  states = TWO.from_boxoban(text)
  assert TWO.render(states) == boards and states.player.tolist() == [[1, 2], [2, 4]]
  assert TWO.render(TWO.from_boxoban(text.replace('\n', '\r\n'))) == boards
  with raises_one_line(r"level 1, row 4, column 1 is '%'; allowed: # {3}\. \* \$ @ \+"):
    TWO.from_boxoban(text.replace('##    #', '#%    #'))
  with raises_one_line('level 0 has 1 boxes; there have to be 2'):
    TWO.from_boxoban(text.replace('*', '.', 1))
  with raises_one_line('before the first header'):
    TWO.from_boxoban(text.removeprefix('; 0\n'))
  with raises_one_line('holds no level'):
    TWO.from_boxoban('\n')
