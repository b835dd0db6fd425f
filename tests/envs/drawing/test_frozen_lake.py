"""Images of FrozenLake tell the board."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.envs.frozen_lake import FrozenLake, State
from tests.support.images import draw, nearest_tiles, noisy

ENV = FrozenLake()


def random_states(n, seed):
  """States of any board, with the player anywhere and the goal on ice."""
  rng, no = np.random.default_rng(seed), np.zeros(n, bool)
  holes = rng.random((n, 4, 4)) < 0.4
  start, goal, player = rng.integers(16, size=(3, n)).astype(np.int32)
  holes.reshape(n, 16)[np.arange(n), goal] = False
  return State(no, no, holes, start, goal, player)


@pytest.mark.parametrize('tile', [8, 32])
def test_the_text_is_read_from_the_pixels(tile):
  states, symbols = random_states(96, tile), set()
  for image, text in zip(noisy(draw(ENV, states, tile)), ENV.render(states), strict=True):
    read = np.array(list(ENV.symbols))[nearest_tiles(image, ENV.tiles(tile))]
    assert '\n'.join(''.join(row) for row in read) == text
    symbols |= set(text)
  assert symbols == {*ENV.symbols, '\n'}
