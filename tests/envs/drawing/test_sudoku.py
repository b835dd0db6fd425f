"""Images of Sudoku tell the board."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.envs.drawing.sudoku import num_symbols
from ragen_jax.envs.sudoku import State, Sudoku
from tests.support.environments import batch, one
from tests.support.images import draw, nearest_tiles, noisy


def random_states(side, n, seed):
  """States of any digits, of which about a third are given and a third empty."""
  rng, no = np.random.default_rng(seed), np.zeros(n, bool)
  solution, kind = rng.integers(1, side + 1, (n, side, side)).astype(np.int8), rng.integers(3, size=(n, side, side))
  board = np.where(kind > 0, solution, 0).astype(np.int8)
  return State(no, no, solution, board, kind == 2, np.zeros((n, side, side, side), bool))


@pytest.mark.parametrize(('side', 'tile'), [(4, 8), (9, 28)])
def test_the_text_is_read_from_the_pixels(side, tile):
  env = Sudoku(side=side, empty_cells=6, hints=False)
  states, seen = random_states(side, 16, tile), set()
  for i, image in enumerate(noisy(draw(env, states, tile))):
    symbols = nearest_tiles(image, env.tiles(tile)) % num_symbols(side)
    given = symbols > side
    read = one(states, i).replace(board=symbols - side * given, given=given)
    assert env.render(batch(read)) == env.render(batch(one(states, i)))
    seen |= set(symbols.ravel().tolist())
  assert seen == set(range(num_symbols(side)))


def test_thick_lines_are_around_boxes_and_thin_ones_within():
  image = draw(Sudoku(), random_states(4, 1, 0), 32)[0].astype(int).sum(axis=2)
  middle = 16 + 32 * np.arange(4)
  assert (image[middle][:, [0, 63, 64, 127]] < 240).all() and (image[[0, 63, 64, 127]][:, middle] < 240).all()
  assert (image[middle][:, [31, 32, 95, 96]] > 300).all() and (image[[31, 32, 95, 96]][:, middle] > 300).all()
