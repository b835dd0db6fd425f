"""A second, plain writing of the rules of Manipulation, for tests: one state in Python, and levels to play."""

from __future__ import annotations

import functools
import math
from typing import Any

import numpy as np

from ragen_jax.envs.manipulation import Manipulation, State
from ragen_jax.envs.manipulation_tasks import Table
from tests.support.environments import make_levels, one, step

NAMES = ('align', 'place', 'stack', 'drawer')
COUNT = 64
LOW, HIGH = {False: (-100, -200, 10), True: (-500, -600, 10)}, {False: (150, 200, 200), True: (-100, 200, 650)}


@functools.cache
def levels(task: str) -> Any:
  """COUNT levels of a task."""
  return make_levels(Manipulation(task=task), COUNT, block=COUNT)


def act(env: Manipulation, states: Any, actions: Any) -> Any:
  """As `environments.step`, for at most COUNT states; one program of a task plays any number of them."""
  rows = np.resize(np.arange(len(actions)), COUNT)
  return one(step(env, one(states, rows), np.asarray(actions)[rows]), np.s_[: len(actions)])


def make_state(*places: tuple[int, int, int], held: int = -1, opening: int = 0) -> State:
  """A state with objects at these places; no batch axis."""
  no = np.bool_(False)
  return State(no, no, Table(np.array(places, np.int32), np.int32(held), np.int32(opening)), no)


class Plain:
  """One state of a task."""

  def __init__(self, task: str, state: Any):
    self.task, self.drawer = task, task == 'drawer'
    table = state.table
    self.at = [list(map(int, place)) for place in np.asarray(table.places)]
    self.held, self.opening = int(table.held), int(table.opening)

  @property
  def content(self) -> tuple:
    return [tuple(place) for place in self.at], self.held, self.opening

  def flat(self, i, x, y):
    return math.hypot(self.at[i][0] - x, self.at[i][1] - y)

  def act(self, action):
    skill, *n = (int(x) for x in action)
    (self.pick, self.place, self.push)[skill](n)

  def covered(self, i):
    x, y, z = self.at[i]
    return any(self.flat(j, x, y) < 20 and self.at[j][2] > z for j in range(len(self.at)) if j not in (i, self.held))

  def pick(self, n):
    if self.held >= 0:
      return
    found = []
    for i, (x, y, z) in enumerate(self.at):
      hidden = self.drawer and z == 155 and x - 35 < -400
      if abs(x - n[0]) <= 15 and abs(y - n[1]) <= 20 and -10 <= n[2] - z <= 20 and not hidden:
        found.append((math.dist((x, y, z), n[:3]), i))
    if found and not self.covered(min(found)[1]):
      self.held = min(found)[1]
      self.at[self.held] = [-250, 0, 400] if self.drawer else [0, 0, 170]

  def place(self, n):
    x, y, z = n[:3]
    if self.held < 0:
      return
    if self.drawer:
      front = self.opening - 400
      if -400 + 35 <= x <= front - 35 and abs(y + 300) <= 140 - 20 - 35:
        rest = 155
      elif x <= front + 35 and abs(y + 300) <= 185:
        return
      else:
        rest = 35
    else:
      near = [i for i in range(len(self.at)) if i != self.held and self.flat(i, x, y) < 57]
      rest = 20
      if near:
        top = max(self.at[i][2] for i in near)
        if not any(self.at[i][2] == top and self.flat(i, x, y) < 20 for i in near):
          return
        rest = top + 40
    if z >= rest - 10:
      self.at[self.held], self.held = [x, y, rest], -1

  def push(self, n):
    start, end = n[:3], n[3:]
    axis = 0 if abs(end[0] - start[0]) >= abs(end[1] - start[1]) else 1
    if self.held >= 0 or start[axis] == end[axis]:
      return
    if self.drawer:
      front = self.opening - 400
      if axis == 0 and -440 < start[1] < -160 and 100 <= start[2] <= 200 and start[0] >= front + 10 > end[0]:
        new = max(end[0] - 10, -400)
        if self.at[0][2] == 155:
          self.at[0][0] += new - front
        self.opening = new + 400
      return
    way = 1 if end[axis] > start[axis] else -1
    hit = []
    for i, place in enumerate(self.at):
      before = way * (place[axis] - start[axis])
      beside = abs(place[1 - axis] - start[1 - axis]) < 30 and abs(place[2] - start[2]) <= 20
      if beside and 30 <= before < 30 + abs(end[axis] - start[axis]):
        hit.append((before, i))
    if not hit:
      return
    i = min(hit)[1]
    if self.at[i][2] != 20 or self.covered(i):
      return
    goal = end[axis] + way * 30
    bounds = [goal, (HIGH if way > 0 else LOW)[False][axis]]
    for j, other in enumerate(self.at):
      if j != i and abs(other[1 - axis] - self.at[i][1 - axis]) < 57 and way * (other[axis] - self.at[i][axis]) > 0:
        bounds.append(other[axis] - way * 57)
    furthest = min(bounds, key=lambda x: way * x)
    if way * (furthest - self.at[i][axis]) > 0:
      self.at[i][axis] = furthest

  def stages(self):
    """Points of the state, and whether it is won."""
    held = self.held >= 0
    if self.drawer:
      x, y, z = self.at[0]
      inside = not held and 100 <= z <= 400 and math.hypot(x - (self.opening - 520), y + 300) <= 100
      parts = [inside, inside and self.opening <= 100]
    elif self.task == 'place':
      parts = [self.held != i and self.flat(i, 80, y) <= 50 for i, y in ((0, -100), (1, 100))]
    elif self.task == 'align':
      parts = [self.held != i and abs(self.at[i][0]) <= 10 and abs(self.at[i][2]) <= 50 for i in range(2)]
    else:
      on = [
        self.held not in (a, b) and self.flat(a, *self.at[b][:2]) < 20 and self.at[a][2] > self.at[b][2] + 20
        for a, b in ((0, 1), (2, 0))
      ]
      parts = [on[0], all(on)]
      held = self.held == (2 if on[0] else 0)
    won = all(parts) and self.held < 0
    return 10.0 if won else 2.0 * (2 * sum(parts) + held), won
