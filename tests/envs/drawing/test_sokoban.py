"""Images of Sokoban tell the board."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.envs.sokoban import Sokoban, State
from tests.support.images import draw, nearest_tiles, noisy

ENV = Sokoban(dim=(6, 7), num_boxes=2)


def random_states(n, seed):
  """States of any board: walls, targets and boxes anywhere, boxes and player not on walls."""
  rng, no = np.random.default_rng(seed), np.zeros(n, bool)
  boards = rng.random((3, n, *ENV.dim)) < 0.4
  player = rng.integers(ENV.dim, size=(n, 2)).astype(np.int32)
  boards[:, np.arange(n), player[:, 0], player[:, 1]] &= np.array([[False], [True], [False]])
  walls, targets, boxes = boards
  return State(no, no, walls, targets & ~walls, boxes & ~walls, player, np.zeros(n, np.int32))


@pytest.mark.parametrize('tile', [8, 28])
def test_the_text_is_read_from_the_pixels(tile):
  states, symbols = random_states(48, tile), set()
  for image, text in zip(noisy(draw(ENV, states, tile)), ENV.render(states), strict=True):
    read = np.array(ENV.symbols)[nearest_tiles(image, ENV.tiles(tile))]
    assert '\n'.join(''.join(row) for row in read) == text
    symbols |= set(text)
  assert symbols == {*ENV.symbols, '\n'}
