"""A second implementation of the cube: stickers are points in space, each with the direction that it faces."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from ragen_jax.envs import rubik
from ragen_jax.envs.rubik import Rubik2x2
from tests.support import environments

NAMES = Rubik2x2.action_names


def step(states, actions):
  """`environments.step` of cubes."""
  return environments.step(Rubik2x2(), states, actions)


def cubes(stickers):
  """Batched states [N] of lists of 24 colours."""
  stickers = np.array(stickers, np.int8)
  solved = np.array([is_solved(cube) for cube in stickers.tolist()])
  return rubik.State(done=solved, success=solved, stickers=stickers)


# -- the cube in space -------------------------------------------------------------------------------------------------


# Right, up and front are the directions x, y and z. For each face: where it looks, and the directions in which the
# columns and the rows of its picture run.
VIEWS = {
  'U': ((0, 1, 0), (1, 0, 0), (0, 0, 1)),
  'D': ((0, -1, 0), (1, 0, 0), (0, 0, -1)),
  'L': ((-1, 0, 0), (0, 0, 1), (0, -1, 0)),
  'R': ((1, 0, 0), (0, 0, -1), (0, -1, 0)),
  'F': ((0, 0, 1), (1, 0, 0), (0, -1, 0)),
  'B': ((0, 0, -1), (-1, 0, 0), (0, -1, 0)),
}
PLACES = [
  (tuple(n + (2 * col - 1) * c + (2 * row - 1) * r for n, c, r in zip(*view, strict=True)), view[0])
  for view in (VIEWS[face] for face in 'UDLRFB')
  for row, col in itertools.product(range(2), repeat=2)
]


def dot(a, b):
  return sum(x * y for x, y in zip(a, b, strict=True))


def clockwise(v, axis):
  """A vector after a quarter turn, clockwise for one who looks against the axis: v x axis, and what lies along it."""
  (a, b, c), (x, y, z), along = v, axis, dot(v, axis)
  return b * z - c * y + along * x, c * x - a * z + along * y, a * y - b * x + along * z


@functools.cache
def targets(axis, layers):
  """The place to which a turn takes each sticker; `layers` are those that turn, 1 next to the face, -1 opposite."""
  return tuple(
    PLACES.index((clockwise(at, axis), clockwise(facing, axis))) if dot(at, axis) in layers else i
    for i, (at, facing) in enumerate(PLACES)
  )


def moved(cube, to):
  after = [0] * 24
  for i, place in enumerate(to):
    after[place] = cube[i]
  return tuple(after)


def turned(cube, name):
  """A cube, a tuple of 24 colours, after a turn such as "U'"."""
  for _ in range(3 if name.endswith("'") else 1):
    cube = moved(cube, targets(VIEWS[name[0]][0], (1,)))
  return cube


def after_turns(cube, names):
  return functools.reduce(turned, names.split(), cube)


def is_solved(cube):
  return all(len(set(cube[i : i + 4])) == 1 for i in range(0, 24, 4))


@functools.cache
def orientations():
  """The 24 ways to hold a cube, as places to which stickers go."""
  found = [tuple(range(24))]
  for to in found:
    for face in 'UR':
      quarter = targets(VIEWS[face][0], (1, -1))
      after = tuple(quarter[place] for place in to)
      if after not in found:
        found.append(after)
  return found


def modulo_rotation(cube):
  return min(moved(cube, to) for to in orientations())


WHOLE = tuple(i // 4 for i in range(24))


@functools.cache
def near():
  """Distances of the cubes within 4 turns, each held in one way: breadth-first search over all twelve turns."""
  distance, newest = {modulo_rotation(WHOLE): 0}, [WHOLE]
  for d in range(1, 5):
    reached = {}
    for cube, name in itertools.product(newest, NAMES):
      after = turned(cube, name)
      reached.setdefault(modulo_rotation(after), after)
    newest = [cube for key, cube in reached.items() if key not in distance]
    distance.update({key: d for key in reached if key not in distance})
  return distance
