"""First-person pictures against a plain ray caster, and what is in view against what they show."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax.envs.navigation import Navigation
from tests.support.environments import one, raises_one_line, step
from tests.support.games.navigation import COLOURS, COUNT, ENV, SHAPES, TILTS, Room, levels, make_state
from tests.support.images import draw


@pytest.fixture(scope='module')
def states():
  """Poses in many directions, some tilted."""
  states, rng = levels(), np.random.default_rng(1)
  for _ in range(4):
    states, _ = step(ENV, states, rng.integers(8, size=COUNT))
  return states


def test_pictures_are_those_of_a_plain_ray_caster(states):
  side, half = 24, np.tan(np.radians(ENV.fov / 2))
  images = draw(ENV, states, 8).astype(int)
  assert images.shape == (COUNT, side, side, 3)
  wrong = total = 0
  shown = set()
  for i in range(0, COUNT, 10):
    room = Room(ENV, one(states, i))
    for row in range(side):
      for column in range(side):
        colour = room.colour_at(((column + 0.5) / side * 2 - 1) * half, (1 - (row + 0.5) / side * 2) * half)
        wrong += np.abs(images[i, row, column] - colour).max() > 1
        total += 1
        shown.add(tuple(np.round(colour).astype(int)))
  assert wrong <= total // 1000
  assert len(shown) > 40


@pytest.mark.slow
def test_what_is_in_view_is_in_the_picture(states):
  """The pixel at the middle of an object shows it if it is in view, and something else if it is hidden."""
  env = dataclasses.replace(ENV, picture=32)
  side, half, eye = 256, np.tan(np.radians(env.fov / 2)), 1.0 / env.stride
  images = draw(env, states, 8).astype(float)
  seen = np.asarray(jax.jit(jax.vmap(env.seen))(states))
  right = wrong = hidden = 0
  for i in range(COUNT):
    room = Room(env, one(states, i))
    for k, (kind, colour, cell) in enumerate(room.objects):
      ahead, aside = room.place(room.pose, cell)
      if ahead <= 0:
        continue
      x = aside / ahead / half
      y = ((SHAPES[kind][2] - eye) / ahead + np.tan(np.radians(TILTS[room.pose[3]]))) / half
      if max(abs(x), abs(y)) > 0.97:
        continue
      pixel = images[i, int((1 - y) / 2 * side), int((x + 1) / 2 * side)]
      shows = np.abs(pixel - np.multiply(COLOURS[colour], 7 / (7 + ahead * env.stride))).max() <= 1
      right, wrong, hidden = right + (shows == seen[i, k]), wrong + (shows != seen[i, k]), hidden + (not seen[i, k])
  # The few differences are lines of sight that touch the corner of a wall.
  assert right > 40 and hidden > 10 and wrong <= right // 20


def test_pictures_differ_by_pose_and_kind_and_nearer_things_are_larger():
  env = Navigation(inner_walls=0, num_objects=2, picture=4)

  def red_pixels(kind, distance, heading=0):
    state = make_state(env, {f'red {kind}': (8 - distance, 5), 'blue cone': (9, 5)}, (8, 5), heading)
    image = env.render_rgb(state)
    assert image.shape == (64, 64, 3)
    return int(((image[..., 0] > 120) & (image[..., 1] < 60) & (image[..., 2] < 60)).sum())

  for kind in env.kinds:
    assert red_pixels(kind, 3) > red_pixels(kind, 6) > 0 == red_pixels(kind, 3, heading=2)
  assert len({red_pixels(kind, 3) for kind in env.kinds}) == 4


def test_tiles_that_are_not_allowed(states):
  with raises_one_line('tile=7; allowed: whole numbers of pixels from 8 to 64'):
    ENV.pixels(one(states, 0), 7)
