"""Shapes on tiles, images from tiles, and what holds for the images of every environment."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs.bandit import Bandit
from ragen_jax.envs.countdown import Countdown
from ragen_jax.envs.drawing.tiles import Canvas, check_tile, compose, paint_person
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.game_2048 import Game2048
from ragen_jax.envs.rubik import Rubik2x2
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.sudoku import Sudoku
from tests.support.environments import make_levels, one, raises_one_line
from tests.support.images import draw, least_distance

BLACK, WHITE = (0, 0, 0), (255, 255, 255)
DRAWN = [Sokoban(), FrozenLake(), Game2048(), Sudoku(), Rubik2x2()]


@functools.cache
def _levels(env):
  return make_levels(env, 16, block=16)


each = pytest.mark.parametrize('env', DRAWN, ids=lambda env: env.name)


def _shape(tile, paint):
  """The share of each pixel that a shape covers, in percent, of a white shape on black."""
  canvas = Canvas(tile, BLACK)
  canvas.paint(paint(canvas), WHITE)
  image = canvas.image()
  assert image.shape == (tile, tile, 3) and image.dtype == np.uint8 and (image == image[:, :, :1]).all()
  return (image[:, :, 0] / 2.55).round().astype(int)


def test_shapes():
  # A box: whole pixels, and the half of those that it covers by half.
  box = _shape(8, lambda c: c.box(0.25, 0.5, 0.6875, 1.0))
  expected = np.zeros((8, 8), int)
  expected[4:, 2:5], expected[4:, 5] = 100, 50
  np.testing.assert_array_equal(box, expected)
  # An ellipse has the area pi a b and is longer along x, a disc is the same turned round.
  ellipse, disc = _shape(16, lambda c: c.ellipse(0.5, 0.5, 0.4, 0.2)), _shape(16, lambda c: c.disc(0.5, 0.5, 0.3))
  assert abs(ellipse.mean() - 100 * np.pi * 0.08) < 0.5 and abs(disc.mean() - 100 * np.pi * 0.09) < 0.5
  assert ellipse[8, 2] == 100 and ellipse[2, 8] == 0 and (disc == disc.T).all() and (disc == disc[::-1]).all()
  # Rounded corners are missing, and only they.
  rounded, sharp = (_shape(16, lambda c, r=r: c.box(0.0, 0.0, 1.0, 1.0, r)) for r in (0.25, 0.0))
  assert (
    (sharp == 100).all() and rounded[0, 0] == rounded[15, 0] == rounded[0, 15] == 0 and (rounded[4:12] == 100).all()
  )
  assert abs(100 - rounded.mean() - 100 * (4 - np.pi) / 16) < 0.5
  # A stroke has its width and round ends; a triangle is the half of its box.
  stroke = _shape(16, lambda c: c.line((0.25, 0.5), (0.75, 0.5), 0.25))
  assert abs(stroke.mean() - 100 * (0.125 + np.pi / 64)) < 0.5 and stroke[8, 3] > 0 == stroke[8, 1]
  triangle = _shape(16, lambda c: c.triangle((0.0, 0.0), (1.0, 0.0), (0.0, 1.0)))
  assert abs(triangle.mean() - 50) < 0.5 and triangle[0, 0] == 100 and triangle[15, 15] == 0


@pytest.mark.parametrize(('value', 'mean'), [(31, 0), (33, 1)])
def test_the_colour_of_a_pixel_is_the_rounded_mean_of_its_samples(value, mean):
  canvas = Canvas(8, BLACK)
  canvas.paint((canvas.x < 1 / 64) & (canvas.y < 1 / 64), (value,) * 3)  # one of 64 samples
  assert canvas.image()[0, 0].tolist() == [mean] * 3 and not canvas.image()[1:].any()


def test_a_person_has_its_coat_and_place():
  canvases = [Canvas(28, WHITE) for _ in range(2)]
  for canvas, x in zip(canvases, (0.5, 0.25), strict=True):
    paint_person(canvas, (10, 200, 30), x)
  middle, left = (canvas.image() for canvas in canvases)
  np.testing.assert_array_equal(middle[:, 7:], left[:, :21])
  assert (middle[18, 14] == (10, 200, 30)).all() and (middle[1, 1] == 255).all()


def test_an_image_is_its_tiles_in_their_places():
  rng = np.random.default_rng(0)
  tiles, cells = rng.integers(256, size=(5, 8, 8, 3)).astype(np.uint8), rng.integers(5, size=(3, 4))
  image = np.asarray(jax.jit(lambda c: compose(tiles, c))(jnp.asarray(cells)))
  assert image.shape == (24, 32, 3) and image.dtype == np.uint8
  for (r, c), code in np.ndenumerate(cells):
    np.testing.assert_array_equal(image[8 * r : 8 * r + 8, 8 * c : 8 * c + 8], tiles[code])


@pytest.mark.parametrize('tile', [7, 65, 28.0, True, '28', None])
def test_wrong_sizes_are_named(tile):
  with raises_one_line('tile=.*; allowed: whole numbers of pixels from 8 to 64'):
    check_tile(tile)
  with raises_one_line('tile='):
    DRAWN[1].pixels(one(_levels(DRAWN[1])), tile)


@each
@pytest.mark.slow_cases('sokoban', 'sudoku')
def test_images_have_the_stated_size_and_tiles_differ(env):
  states = _levels(env)
  rows, columns = env.image_grid
  for tile in (8, 28):
    tiles = env.tiles(tile)
    assert tiles.shape[1:] == (tile, tile, 3) and tiles.dtype == np.uint8 and tiles is env.tiles(tile)
    assert least_distance(tiles) > 5
    assert jax.eval_shape(lambda s, t=tile: env.pixels(s, t), one(states)).shape == (rows * tile, columns * tile, 3)


@each
@pytest.mark.slow_cases('sokoban')
def test_jit_and_vmap_do_not_change_an_image_and_equal_boards_have_equal_images(env):
  states = _levels(env)
  images, texts = draw(env, states, 28), env.render(states)
  np.testing.assert_array_equal(images[5], env.pixels(one(states, 5), 28))
  np.testing.assert_array_equal(env.render_rgb(one(states, 5)), env.pixels(one(states, 5), 16))
  assert images.dtype == np.uint8
  # Without the lines around the board, see `Environment.pixels`.
  boards = [text.split('\nRow')[0].split('\nLegal')[0] for text in texts]
  assert 1 < len(set(boards)) == len({image.tobytes() for image in images})
  assert len(set(zip(boards, (image.tobytes() for image in images), strict=True))) == len(set(boards))


@pytest.mark.parametrize('env', [Bandit(), Countdown()], ids=lambda env: env.name)
def test_environments_without_images_say_so(env):
  assert env.image_grid is None
  for call in (lambda: env.pixels(None, 28), lambda: env.cells(None), lambda: env.tiles(28)):
    with pytest.raises(NotImplementedError, match=f'{env.name} draws no images'):
      call()
