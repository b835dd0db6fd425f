"""Navigation written a second time, in plain loops: movement, sight, pictures and shortest play."""

from __future__ import annotations

import collections
import functools
import itertools
import math
from fractions import Fraction

import numpy as np

from ragen_jax.envs.navigation import Navigation, State
from ragen_jax.envs.navigation_rooms import Room as Arrays
from tests.support.environments import make_levels

# Cells up, right, down, left.
AHEAD = [(-1, 0), (0, 1), (1, 0), (0, -1)]
TILTS = [-30, 0, 30, 60]
# Kind -> height, half of the width at the floor, height of the point by which it is seen; in cells.
SHAPES = {'ball': (0.84, 0.42, 0.42), 'cube': (0.76, 0.38, 0.37), 'post': (1.9, 0.16, 0.93), 'cone': (1.3, 0.42, 0.41)}
COLOURS = {
  'red': (214, 40, 40), 'green': (44, 160, 66), 'blue': (46, 92, 214), 'yellow': (240, 208, 48),
  'purple': (148, 62, 186), 'orange': (240, 132, 32),
}  # fmt: skip

# The game that most tests play, all with as many levels, since each takes seconds to compile.
ENV = Navigation(
  dim=(7, 9), inner_walls=2, num_objects=5, stride=0.43, radius=1.3, fov=95.0, success_reward=3.0, min_path=2,
  max_steps=40, picture=3,
)  # fmt: skip
COUNT = 64


@functools.cache
def levels():
  """`COUNT` levels of `ENV`."""
  return make_levels(ENV, COUNT, block=COUNT)


class Room:
  """A room and a pose in it: sets of walls, objects [(kind, colour, cell)], the first of which is the target."""

  def __init__(self, env, state):
    self.env = env
    self.walls = {(r, c) for r in range(env.dim[0]) for c in range(env.dim[1]) if state.room.walls[r][c]}
    names = [env.object_names[n].split() for n in state.room.names]
    places = [tuple(int(x) for x in place) for place in state.room.places]
    self.objects = [(kind, colour, place) for (colour, kind), place in zip(names, places, strict=True)]
    self.cells = {place for *_, place in self.objects}
    self.pose = (*(int(x) for x in state.player), int(state.heading), int(state.tilt))

  def moved(self, pose, action):
    """The pose after an action, by its name."""
    row, column, heading, tilt = pose
    if action.startswith('move'):
      way = ('ahead', 'right', 'back', 'left').index(action[4:])
      down, right = AHEAD[(heading + way) % 4]
      there = (row + down, column + right)
      return pose if there in self.walls or there in self.cells else (*there, heading, tilt)
    if action.startswith('rotate'):
      return row, column, (heading + (1 if action == 'rotateright' else 3)) % 4, tilt
    return row, column, heading, min(max(tilt + (1 if action == 'lookdown' else -1), 0), 3)

  def place(self, pose, cell):
    """Cells ahead and to the right."""
    (up, right), (up2, right2) = AHEAD[pose[2]], AHEAD[(pose[2] + 1) % 4]
    down, across = cell[0] - pose[0], cell[1] - pose[1]
    return down * up + across * right, down * up2 + across * right2

  def has_free_line(self, start, end):
    """Whether the middle of each piece of the line between two cells, cut at the edges of cells, is in no wall."""
    cuts = {Fraction(0), Fraction(1)}
    for axis in range(2):
      a, b = start[axis] + Fraction(1, 2), end[axis] + Fraction(1, 2)
      if a != b:
        cuts |= {(k - a) / (b - a) for k in range(40) if 0 < (k - a) / (b - a) < 1}
    cuts = sorted(cuts)
    for before, after in itertools.pairwise(cuts):
      t = (before + after) / 2
      point = [start[i] + Fraction(1, 2) + t * (end[i] - start[i]) for i in range(2)]
      if any(x.denominator == 1 for x in point):
        continue  # along an edge
      if tuple(math.floor(x) for x in point) in self.walls:
        return False
    return True

  def sees(self, pose, number):
    """Whether the middle of an object is in the picture, and nothing is before it."""
    kind, _, cell = self.objects[number]
    ahead, aside = self.place(pose, cell)
    if ahead <= 0:
      return False
    half, eye, middle = math.tan(math.radians(self.env.fov / 2)), 1.0 / self.env.stride, SHAPES[kind][2]
    vertical = (middle - eye) / ahead + math.tan(math.radians(TILTS[pose[3]]))
    if abs(aside / ahead) > half or abs(vertical) > half or not self.has_free_line(pose[:2], cell):
      return False
    for other, (other_kind, _, other_cell) in enumerate(self.objects):
      near, beside = self.place(pose, other_cell)
      if other != number and 0 < near < ahead:
        height = eye + (middle - eye) * near / ahead
        if is_inside(other_kind, aside * near / ahead - beside, height):
          return False
    return True

  def finds(self, pose):
    target = self.objects[0][2]
    near = math.dist(pose[:2], target) * self.env.stride <= self.env.radius + 1e-9
    return near and (not self.env.must_see or self.sees(pose, 0))

  def shortest(self):
    """Fewest actions to a pose that finds the target, by breadth-first search from the pose; None if there is none."""
    moves = [f'move{x}' for x in ('ahead', 'back', 'right', 'left')]
    names = [*moves, 'rotateright', 'rotateleft', 'lookup', 'lookdown']
    seen, queue = {self.pose: 0}, collections.deque([self.pose])
    while queue:
      pose = queue.popleft()
      if self.finds(pose):
        return seen[pose]
      for name in names:
        after = self.moved(pose, name)
        if after not in seen:
          seen[after] = seen[pose] + 1
          queue.append(after)
    return None

  def colour_at(self, across, up):
    """The colour of the picture where a ray goes `across` to the right and `up` a cell ahead, by walking along it."""
    stride, eye = self.env.stride, 1.0 / self.env.stride
    (down, right), (down2, right2) = AHEAD[self.pose[2]], AHEAD[(self.pose[2] + 1) % 4]
    slope = up - math.tan(math.radians(TILTS[self.pose[3]]))
    direction = (down + across * down2, right + across * right2)
    start = (self.pose[0] + 0.5, self.pose[1] + 0.5)
    dim = lambda depth: 7.0 / (7.0 + depth * stride)  # noqa: E731
    for kind, colour, cell in sorted(self.objects, key=lambda x: self.place(self.pose, x[2])[0]):
      ahead, aside = self.place(self.pose, cell)
      if ahead > 0 and is_inside(kind, across * ahead - aside, eye + slope * ahead):
        end = tuple(s + d * ahead for s, d in zip(start, direction, strict=True))
        if self._wall(start, direction)[0] > ahead and end:
          return tuple(x * dim(ahead) for x in COLOURS[colour])
    depth, from_side = self._wall(start, direction)
    height = eye + slope * depth
    if 0 <= height <= 2.5 / stride:
      return tuple(x * dim(depth) * (0.82 if from_side else 1) for x in (186, 176, 160))
    if slope >= 0:
      return (226, 230, 236)
    depth = eye / -slope
    row, column = (math.floor(s + d * depth) for s, d in zip(start, direction, strict=True))
    return tuple(x * dim(depth) for x in ((146, 116, 86), (122, 96, 70))[(row + column) % 2])

  def _wall(self, start, direction):
    """Depth of the first wall along a ray, and whether it is met across the heading."""
    cuts = []
    for axis in range(2):
      if abs(direction[axis]) > 1e-9:
        cuts += [((k - start[axis]) / direction[axis], axis) for k in range(40)]
    facing = 0 if AHEAD[self.pose[2]][0] else 1
    for depth, axis in sorted(x for x in cuts if x[0] > 0):
      behind = tuple(math.floor(s + d * (depth + 1e-7)) for s, d in zip(start, direction, strict=True))
      if behind in self.walls:
        return depth, axis != facing
    raise AssertionError('no wall')


def make_state(env, objects, player, heading=0, tilt=1, inner=()):
  """A state from objects {name: cell}, the target first, and cells of inner walls; no batch axis."""
  walls = np.zeros(env.dim, bool)
  walls[[0, -1]] = walls[:, [0, -1]] = True
  for cell in inner:
    walls[cell] = True
  names = np.array([env.object_names.index(name) for name in objects], np.int32)
  room = Arrays(walls, np.array([*objects.values()], np.int32), names)
  no, pose = np.bool_(False), (np.int32(heading), np.int32(tilt))
  return State(no, no, room, np.array(player, np.int32), *pose, blocked=no, steps=np.int32(0))


def is_inside(kind, aside, height):
  top, half, _ = SHAPES[kind]
  if not 0 <= height <= top:
    return False
  if kind == 'ball':
    return math.hypot(aside, height - half) <= half
  return abs(aside) <= (half * (1 - height / top) if kind == 'cone' else half)
