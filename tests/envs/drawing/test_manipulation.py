"""Pictures of Manipulation against a plain ray tracer; what moves, and what hides what."""

from __future__ import annotations

import dataclasses
import itertools
import math

import jax
import numpy as np
import pytest

from ragen_jax.envs.manipulation import Manipulation
from tests.support.environments import batch, one, raises_one_line
from tests.support.games.manipulation import make_state
from tests.support.images import draw

PLACE = Manipulation(picture=3, cameras=2)
STACK, DRAWER = (dataclasses.replace(PLACE, task=task) for task in ('stack', 'drawer'))
# Eye, target, and field of view of both cameras.
TABLE_VIEWS = (((1000, 0, 600), (0, 0, 60), 0.65), ((250, 0, 700), (20, 0, 0), 1.0))
DRAWER_VIEWS = (((1000, 0, 600), (-200, -100, 100), 1.0), ((50, -200, 1150), (-280, -200, 0), 1.0))
RGB = {'red': (214, 40, 40), 'green': (44, 160, 66), 'purple': (148, 62, 186), 'apple': (200, 24, 48)}
HAND, ARM, WOOD, FRONT = (70, 74, 82), (236, 236, 240), (150, 104, 60), (206, 164, 110)


def axes_of(view):
  eye, target, fov = (np.array(x, float) for x in view)
  ahead = (target - eye) / np.linalg.norm(target - eye)
  right = np.array([-ahead[1], ahead[0], 0]) * -1
  right /= np.linalg.norm(right)
  return eye, ahead, right, np.cross(right, ahead), math.tan(float(fov) / 2)


def boxes_of(env, state):
  """Boxes (low, high, colour) and balls (middle, radius, colour) of a state."""
  drawer = env.task == 'drawer'
  half = 35 if drawer else 20
  x, y, z = (-250, 0, 400) if drawer else (0, 0, 170)
  boxes = [((x - 20, y - half - 20, z + half + 20), (x + 20, y + half + 20, z + half + 50), HAND)]
  boxes.append(((x - 15, y - 15, z + half + 50), (x + 15, y + 15, z + 900), ARM))
  for low, high in ((y - half - 10, y - half), (y + half, y + half + 10)):
    boxes.append(((x - 8, low, z - 5), (x + 8, high, z + half + 20), HAND))
  places = np.asarray(state.table.places, float)
  if not drawer:
    for place, name in zip(places, ('red', 'green', 'purple'), strict=False):
      boxes.append((place - 20, place + 20, RGB[name]))
    return boxes, []
  front, back = int(state.table.opening) - 400, -660
  boxes += [
    ((back, -450, 0), (-400, -150, 100), WOOD), ((back, -450, 200), (-400, -150, 400), WOOD),
    ((back, -450, 100), (-400, -440, 200), WOOD), ((back, -160, 100), (-400, -150, 200), WOOD),
    ((back, -450, 100), (back + 20, -150, 200), WOOD), ((front - 240, -440, 100), (front, -160, 120), FRONT),
    ((front - 240, -440, 120), (front, -420, 200), FRONT), ((front - 240, -180, 120), (front, -160, 200), FRONT),
    ((front - 20, -440, 100), (front, -160, 200), FRONT),
  ]  # fmt: skip
  return boxes, [(places[0], 35.0, RGB['apple'])]


def colour_at(env, state, eye, ray):
  """The colour of the nearest point of a ray: every plane of every box is tried."""
  boxes, balls = boxes_of(env, state)
  found = [(math.inf, (226, 230, 236))]
  if ray[2] < 0:
    t = -eye[2] / ray[2]
    x, y = (eye + t * ray)[:2]
    colour = (98, 122, 142) if (math.floor(x / 100) + math.floor(y / 100)) % 2 else (112, 136, 156)
    if env.task == 'place' and min(math.hypot(x - 80, y - 100), math.hypot(x - 80, y + 100)) < 50:
      colour = (250, 250, 250)
    found.append((t, colour))
  for low, high, colour in boxes:
    for axis, plane in itertools.product(range(3), (low, high)):
      t = (plane[axis] - eye[axis]) / ray[axis]
      at = eye + t * ray
      if t > 0 and all(low[k] <= at[k] <= high[k] for k in range(3) if k != axis):
        found.append((t, np.multiply(colour, (0.85, 0.68, 1.0)[axis])))
  for middle, radius, colour in balls:
    a, b, c = ray @ ray, 2 * ray @ (eye - middle), (eye - middle) @ (eye - middle) - radius**2
    if b * b > 4 * a * c:
      t = (-b - math.sqrt(b * b - 4 * a * c)) / (2 * a)
      top = (eye + t * ray)[2] > middle[2] + 0.4 * radius
      found.append((t, np.multiply(colour, 1 if top else 0.68)))
  return min(found, key=lambda x: x[0])[1]


def some_states(env):
  """A fresh level; things on one another or in the drawer; something in the hand."""
  if env.task == 'drawer':
    places = ((-150, 20, 35), -1), ((-340, -300, 155), -1), ((-250, 0, 400), 0)
    return [make_state(place, held=held, opening=180) for place, held in places]
  if env.task == 'stack':
    flat, stacked = ((-90, 120, 20), (140, -30, 20), (0, -190, 20)), ((50, 50, 60), (50, 50, 20), (40, 40, 100))
    return [make_state(*flat), make_state(*stacked)]
  return [make_state((-90, 80, 20), (-30, -90, 20)), make_state((0, 0, 170), (60, 100, 20), held=0)]


@pytest.mark.parametrize(
  ('env', 'views'),
  [
    (PLACE, TABLE_VIEWS),
    pytest.param(STACK, TABLE_VIEWS, marks=pytest.mark.slow),
    pytest.param(DRAWER, DRAWER_VIEWS, marks=pytest.mark.slow),
  ],
)
def test_pictures_are_those_of_a_plain_ray_tracer(env, views):
  states = some_states(env)
  images = draw(env, batch(*states), 8).astype(int)
  side = 24
  assert images.shape == (len(states), 2 * side, side, 3)
  wrong, shown = 0, set()
  for i, (state, (view, first)) in enumerate(itertools.product(states, zip(views, (0, side), strict=True))):
    eye, ahead, right, up, tangent = axes_of(view)
    for row, column in itertools.product(range(side), repeat=2):
      ray = ahead + tangent * (((column + 0.5) / side * 2 - 1) * right - ((row + 0.5) / side * 2 - 1) * up)
      colour = colour_at(env, state, eye, ray)
      wrong += np.abs(images[i // 2, first + row, column] - colour).max() > 1
      shown.add(tuple(np.round(colour).astype(int)))
  assert wrong <= len(states) * 2 * side**2 // 500 and len(shown) > 8


def test_jit_vmap_and_what_is_not_seen_do_not_change_a_picture():
  states = batch(*some_states(PLACE))
  images = draw(PLACE, states, 8)
  np.testing.assert_array_equal(images, draw(PLACE, states.replace(blocked=~states.blocked, done=~states.done), 8))
  np.testing.assert_array_equal(images[1], jax.jit(lambda state: PLACE.pixels(state, 8))(one(states, 1)))
  single = dataclasses.replace(PLACE, cameras=1)
  np.testing.assert_array_equal(images[:, :24], draw(single, states, 8))
  assert len({image.tobytes() for image in images}) == 2 and (PLACE.image_count, single.image_count) == (2, 1)
  assert single.render_rgb(one(states, 0)).shape == (48, 48, 3)
  with raises_one_line('tile=7; allowed'):
    PLACE.pixels(one(states, 0), 7)


def test_a_cube_that_moves_changes_the_picture_near_its_places_only():
  env = dataclasses.replace(PLACE, picture=16)
  places = [(-50, -60, 20), (100, 120, 20), (100, 120, 60)]
  images = draw(env, batch(*[make_state(place, (20, 20, 20)) for place in places]), 8).astype(int)
  side = 128
  for before, after in itertools.combinations(range(3), 2):
    changed = (images[before] != images[after]).any(-1).reshape(2, side, side)
    for number, view in enumerate(TABLE_VIEWS):
      eye, ahead, right, up, tangent = axes_of(view)
      near = np.zeros((side, side), bool)
      for k in (before, after):
        corners = np.array(list(itertools.product((-20, 20), repeat=3))) + places[k] - eye
        depth = corners @ ahead * tangent
        columns, rows = ((1 + corners @ right / depth) * side / 2, (1 - corners @ up / depth) * side / 2)
        box = [round(x) for x in (rows.min() - 1, rows.max() + 1, columns.min() - 1, columns.max() + 1)]
        near[max(box[0], 0) : box[1] + 1, max(box[2], 0) : box[3] + 1] = True
      assert changed[number].sum() > 30 and not (changed[number] & ~near).any()


def pixels_of(env, state, name, camera=0):
  image = draw(dataclasses.replace(env, picture=8), batch(state), 16)[0].astype(int)
  image = image[128 * camera : 128 * (camera + 1)]
  return sum(
    int((np.abs(image - np.round(np.multiply(RGB[name], k))).max(-1) <= 1).sum()) for k in (1, 0.85, 0.68)
  )  # fmt: skip


@pytest.mark.slow
def test_the_drawer_hides_what_is_in_it_and_the_cabinet_what_is_behind_it():
  def seen(place, opening, camera):
    return pixels_of(DRAWER, make_state(place, opening=opening), 'apple', camera)

  for camera in (0, 1):
    assert seen((-150, 0, 35), 180, camera) > 20
    assert seen((-520, -300, 155), 0, camera) == 0  # in the closed drawer
    assert seen((-620, -300, 35), 180, camera) == 0  # inside the cabinet
  # The front of the open drawer hides a part of the apple from the camera before it, and nothing from above.
  in_front, in_drawer = (seen((-340, -300, 155), opening, 0) for opening in (0, 180))
  assert 0 < in_drawer < 0.8 * in_front
  assert seen((-340, -300, 155), 180, 1) > 20
  assert seen((-800, -300, 35), 180, 0) == 0  # behind the cabinet


def test_a_cube_hides_what_is_behind_it():
  hidden = pixels_of(STACK, make_state((0, 0, 20), (100, 100, 20), (-41, 0, 20)), 'purple')
  whole = pixels_of(STACK, make_state((0, -100, 20), (100, 100, 20), (-41, 0, 20)), 'purple')
  assert 0 < hidden < 0.8 * whole


@pytest.mark.slow
def test_a_step_and_its_picture_are_one_program():
  """Drawing needs no host: a scan plays and draws."""
  env = dataclasses.replace(PLACE, cameras=1)
  skills = np.array([(0, 20, 20, 20, 0, 0, 0), (1, 80, -100, 20, 0, 0, 0)], np.int32)

  def play(state, skill):
    state, _ = env.step(state, skill, jax.random.key(0))
    return state, env.pixels(state, 8)

  start = jax.tree.map(jax.numpy.asarray, make_state((20, 20, 20), (-50, 50, 20)))
  _, images = jax.jit(lambda state: jax.lax.scan(play, state, skills))(start)
  np.testing.assert_array_equal(images[1], draw(env, batch(make_state((80, -100, 20), (-50, 50, 20))), 8)[0])
