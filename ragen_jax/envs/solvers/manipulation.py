"""Plans for Manipulation: one skill after another, each chosen from the state.

From a fresh level the play is the shortest. A cube needs one push if a straight push can bring it to its goal, and a
pick and a place otherwise; a cube that must rise, and the apple, need a pick and a place; the drawer needs a push. From
states in which a policy has moved things, the plan reaches the goal, and need not be the shortest.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import Budget, Environment
from ragen_jax.envs.batches import batched
from ragen_jax.envs.manipulation_tasks import (
  APART,
  CABINET_X,
  CLOSED,
  HAND,
  INSIDE,
  ON_LINE,
  ON_TARGET,
  PICK,
  PLACE,
  PUSH,
  STABLE,
  Task,
  drawer_place,
  rest_in_drawer,
)
from ragen_jax.envs.solvers.limits import count_actions

Skill = tuple[int, ...]
Place = tuple[int, int, int]

# Where the hand comes down for a push, before the middle of what it pushes.
_BEFORE = 60
# Places for a cube that is in the way; some of them are always free.
_SPOTS = tuple(itertools.product((-80, -20, 100, 40), (0, -60, 60, -120, 120, -180, 180)))


@dataclasses.dataclass(frozen=True)
class Planner:
  """The next skill in one state of a task.

  Attributes:
    places: x, y, z of the objects.
    held: the object in the hand, -1 for none.
    opening: of the drawer.
  """

  task: Task
  places: tuple[Place, ...]
  held: int
  opening: int

  def next(self) -> Skill:
    """A skill of a plan to the goal: seven numbers. From a goal, and where no plan exists, some skill."""
    if self.task.has_drawer:
      return self._next_for_drawer()
    if self.held >= 0:
      return self._put(self._goal_of(self.held) or next(filter(self._is_free, self._spots())))
    todo = [i for i in self._order() if not self._is_done(i)]
    if len(self.task.objects) < 3:
      pushes = [self._push(i) for i in todo]
      if found := next(filter(None, pushes), None):
        return found
      # A cube that only waits for its way to be free is picked last.
      todo.sort(key=lambda i: self._push(i, alone=True) is not None)
    first = todo[0] if todo else 0
    blocking = self._blocking(first)
    return self._take(first if blocking is None else blocking)

  def _next_for_drawer(self) -> Skill:
    (x, y, z), (a, b, c), rest = self.places[0], drawer_place(self.opening), rest_in_drawer(self.task)
    if self.held >= 0:
      return self._put((max(a, CABINET_X + self.task.half), b, rest))
    if z == rest and self._distance(0, a, b) <= INSIDE**2 and self.opening > CLOSED:
      return (PUSH, min(CABINET_X + self.opening + _BEFORE, self.task.high[0]), b, c, CABINET_X + HAND, b, c)
    return (PICK, x, y, z, 0, 0, 0)

  # -- what is where -------------------------------------------------------------------------------------------------

  def _others(self, i: int) -> list[int]:
    return [j for j in range(len(self.places)) if j not in (i, self.held)]

  def _distance(self, i: int, x: int, y: int) -> int:
    """Squared, along the table."""
    return (self.places[i][0] - x) ** 2 + (self.places[i][1] - y) ** 2

  def _is_on(self, i: int, j: int) -> bool:
    return self._distance(i, *self.places[j][:2]) < STABLE**2 and self.places[i][2] > self.places[j][2]

  def _top(self, i: int) -> int:
    """The highest object on i; i if nothing is on it."""
    return max((j for j in (i, *self._others(i)) if j == i or self._is_on(j, i)), key=lambda j: self.places[j][2])

  def _is_free(self, xy: tuple[int, int]) -> bool:
    """Whether a cube on the table there touches no other but the held one, which is to be put there."""
    return all(self._distance(j, *xy) >= APART**2 for j in self._others(self.held))

  # -- goals ---------------------------------------------------------------------------------------------------------

  def _order(self) -> tuple[int, ...]:
    """The objects in the order in which they can be done: a stack from below."""
    return (1, 0, 2) if len(self.places) == 3 else (0, 1)

  def _is_done(self, i: int) -> bool:
    x, _, z = self.places[i]
    if i == self.held:
      return False
    if len(self.places) == 3:
      return z == self.task.half if i == 1 else self._is_done({0: 1, 2: 0}[i]) and self._is_on(i, {0: 1, 2: 0}[i])
    if self.task.targets:
      return self._distance(i, *self.task.targets[i]) <= ON_TARGET**2
    return abs(x) <= ON_LINE and z == self.task.half

  def _goal_of(self, i: int) -> Place | tuple[int, int] | None:
    """Where the held object i belongs; None if it cannot be put there yet."""
    if len(self.places) == 3:
      below = {0: 1, 2: 0}.get(i)
      if below is None or not self._is_done(below) or self._top(below) != below:
        return None
      x, y, z = self.places[below]
      return x, y, z + 2 * self.task.half
    spots = [self.task.targets[i]] if self.task.targets else [(0, y) for _, y in _SPOTS]
    return next(filter(self._is_free, spots), None)

  def _blocking(self, i: int) -> int | None:
    """An object where i belongs."""
    if len(self.places) == 3:
      below = {0: 1, 2: 0}.get(i)
      return None if below is None or self._top(below) == below else below
    if not self.task.targets:
      return None
    return next((j for j in self._others(i) if self._distance(j, *self.task.targets[i]) < APART**2), None)

  def _spots(self) -> list[tuple[int, int]]:
    """Places for a cube that is in the way, away from the targets."""
    far = (2 * APART) ** 2
    return [(x, y) for x, y in _SPOTS if all((x - a) ** 2 + (y - b) ** 2 >= far for a, b in self.task.targets)]

  # -- skills --------------------------------------------------------------------------------------------------------

  def _take(self, i: int) -> Skill:
    return (PICK, *self.places[self._top(i)], 0, 0, 0)

  def _put(self, at: tuple[int, ...]) -> Skill:
    return (PLACE, *at, 0, 0, 0) if len(at) == 3 else (PLACE, *at, self.task.half, 0, 0, 0)

  def _push(self, i: int, *, alone: bool = False) -> Skill | None:
    """The push that brings i to its goal, if there is one; with `alone`, as if there were no other objects."""
    place, others = self.places[i], [] if alone else self._others(i)
    if place[2] != self.task.half or self._top(i) != i:
      return None
    goals = [(0, 0)]  # axis and coordinate
    if self.task.targets:
      target = self.task.targets[i]
      goals = [(axis, target[axis]) for axis in (0, 1) if abs(place[1 - axis] - target[1 - axis]) <= ON_TARGET]
    for axis, goal in goals:
      sign = 1 if goal > place[axis] else -1
      reach = self.task.half + HAND
      start = max(self.task.low[axis], min(self.task.high[axis], place[axis] - sign * _BEFORE))
      way = sign * (goal - place[axis])
      beside = [j for j in others if abs(self.places[j][1 - axis] - place[1 - axis]) < APART]
      if sign * (place[axis] - start) < reach or any(
        0 < sign * (self.places[j][axis] - place[axis]) < way + APART for j in beside
      ):
        continue
      ends = [list(place), list(place)]
      ends[0][axis], ends[1][axis] = start, goal - sign * reach
      return (PUSH, *ends[0], *ends[1])
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class ManipulationSolution:
  """Best play on N levels.

  Attributes:
    env: the environment of the levels.
    success: f32[N], 1 if the shortest play fits into the budget, else 0.
  """

  env: Environment
  budget: Budget
  success: np.ndarray

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[Skill]]:
    """The next turn's skills; errors are those of `base.Solution`."""
    left = count_actions(self.env.name, self.budget, states.done, turns_left, actions_left)
    return play(self.env, states, np.minimum(left, self.budget.max_actions_per_turn))[0]


def play(env: Environment, states: Any, most: np.ndarray) -> tuple[list[list[Skill]], Any]:
  """Plays plans of at most `most`, i64[N], skills from states [N] and returns the skills, and the states after them."""
  states = jax.tree.map(np.array, states)
  plans: list[list[Skill]] = [[] for _ in most]
  for number in range(int(most.max(initial=0))):
    rows = np.flatnonzero(~states.done & (most > number))
    if not len(rows):
      break
    own = jax.tree.map(lambda leaf, rows=rows: leaf[rows], states)
    skills = [planner.next() for planner in planners(env.task_of_levels, own)]
    after = batched(_stepped, env, (own, np.array(skills, np.int32)))
    for leaf, new in zip(jax.tree.leaves(states), jax.tree.leaves(after), strict=True):
      leaf[rows] = new
    for row, skill in zip(rows.tolist(), skills, strict=True):
      plans[row].append(skill)
  return plans, states


def planners(task: Task, states: Any) -> list[Planner]:
  """The planners of states [N]."""
  table = states.table
  rows = zip(*(np.asarray(x).tolist() for x in (table.places, table.held, table.opening)), strict=True)
  return [Planner(task, tuple(map(tuple, places)), held, opening) for places, held, opening in rows]


@functools.partial(jax.jit, static_argnums=0)
def _stepped(env: Environment, rows: Any) -> Any:
  states, skills = rows
  return jax.vmap(env.step, (0, 0, None))(jax.tree.map(jnp.asarray, states), skills, jax.random.key(0))[0]
