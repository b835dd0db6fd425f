"""Images of 2048 tell the board."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.envs.drawing.game_2048 import tiles
from ragen_jax.envs.game_2048 import Game2048, State
from tests.support.images import draw, least_distance, nearest_tiles, noisy

ENV = Game2048()


@pytest.mark.parametrize('tile', [8, 32])
def test_the_numbers_are_read_from_the_pixels(tile):
  exponents = np.random.default_rng(tile).integers(12, size=(64, 4, 4)).astype(np.int32)
  no = np.zeros(64, bool)
  states = State(no, no, exponents, np.zeros(64, np.int32))
  for image, text in zip(noisy(draw(ENV, states, tile)), ENV.render(states), strict=True):
    read = nearest_tiles(image, ENV.tiles(tile))
    lines = [' '.join(str(2**e if e else 0) for e in row) for row in read.tolist()]
    assert lines == text.splitlines()[:4]


def test_every_goal_has_its_tiles_and_its_colour_is_that_of_every_goal():
  for goal in (3, 11, 17):
    drawn = tiles(28, goal)
    assert len(drawn) == goal + 1 and least_distance(drawn) > 5
    np.testing.assert_array_equal(drawn[goal][2, 14], tiles(28, 11)[11][2, 14])


def test_dark_digits_on_pale_tiles_and_light_ones_on_dark_tiles():
  drawn = tiles(28, 11).astype(int)
  for exponent in range(1, 12):
    paper = drawn[exponent][2, 14].sum()
    ink = max((abs(value - paper), value) for value in drawn[exponent][4:24, 4:24].sum(axis=2).ravel())[1]
    assert abs(ink - paper) > 200, exponent
