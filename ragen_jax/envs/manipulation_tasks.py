"""The tasks of Manipulation and its skills: integer rules for what pick, place and push do to cubes and a drawer.

All lengths are whole millimetres, so every machine computes the same states. x points to the camera, y to the right of
its picture, z up; the table is at z = 0. Places are those of the middles of things. The tolerances of a pick, of the
height of a place and of a stack, and how far a push reaches, were measured by VAGEN's skills in ManiSkill 3.
"""

from __future__ import annotations

import dataclasses

import jax
import jax.numpy as jnp
from flax import struct

PICK, PLACE, PUSH = range(3)
SKILLS = ('pick', 'place', 'push')
# Numbers that each skill has.
NUMBERS = (3, 3, 6)

# How far a pick may miss the middle of an object: to both sides in x and y, below and above.
_PICK_X, _PICK_Y, _PICK_BELOW, _PICK_ABOVE = 15, 20, 10, 20
# A place may be this much below the height at which the object comes to rest.
_PRESS = 10
# Half of the hand. A push goes on until the hand is at its end.
HAND = 10
# A pushed object has at most this vertical distance from the hand.
_PUSH_Z = 20
# Cubes of any rotation do not touch if their middles are this far apart, along the table.
APART = 57
# A cube rests on another if the distance of their middles, along the table, is smaller.
STABLE = 20

# The cabinet stands behind the y axis of the table; its drawer comes out in the direction of x.
CABINET_X, CABINET_Y, CABINET_HALF, CABINET_TOP = -400, -300, 150, 400
DRAWER_DEPTH, DRAWER_HALF, DRAWER_LOW, DRAWER_HIGH = 240, 140, 100, 200
# Bounds of things in the drawer from its walls, and their floor.
DRAWER_WALL, DRAWER_FLOOR = 20, 120
OPEN_START = 180
# The largest opening of a closed drawer, and the largest distance of a thing in it from its middle, along the table.
CLOSED, INSIDE = 100, 100

# Place: how far the middle of a cube may be from its target. Align: how far it may be from the line x = 0.
ON_TARGET, ON_LINE = 50, 10

# The sum of the stages' values at the end, and the value of each stage before it.
SUCCESS_VALUE, STAGE_VALUE = 10.0, 2.0
SKILL_COST = 0.1

_FAR = 1 << 20


@dataclasses.dataclass(frozen=True)
class Task:
  """A goal, and the levels that have it.

  Attributes:
    objects: names of the N objects.
    half: half of the height and width of the objects.
    goal: the aim, in one sentence.
    low, high: the workspace, in which all numbers of skills are.
    starts: for each object, the least and the largest x and y at the start.
    apart: how far objects are apart in y at the start, besides `APART` in any direction.
    home: where the hand waits, and the object that it holds.
    targets: for each object, the x and y of its target; () without targets.
    has_drawer: whether there is a cabinet with a drawer.
  """

  objects: tuple[str, ...]
  goal: str
  starts: tuple[tuple[tuple[int, int], tuple[int, int]], ...]
  half: int = 20
  low: tuple[int, int, int] = (-100, -200, 10)
  high: tuple[int, int, int] = (150, 200, 200)
  apart: int = 0
  home: tuple[int, int, int] = (0, 0, 170)
  targets: tuple[tuple[int, int], ...] = ()
  has_drawer: bool = False


_ANYWHERE = ((-100, 150), (-200, 200))
_BEHIND = ((-100, 0), (-100, 100))
# VAGEN's tasks, with its start regions, workspaces and rules of success.
TASKS = {
  'align': Task(
    ('red cube', 'green cube'),
    f'Bring both cubes to the line x = 0, each at most {ON_LINE} mm from it and on the table.',
    (((100, 150), (-200, 100)), ((100, 150), (100, 200))),
    apart=APART,
  ),
  'place': Task(
    ('red cube', 'green cube'),
    f'Put the red cube on the left target and the green cube on the right target, with its middle within {ON_TARGET} '
    'mm of the middle of its target. The left target is at (80, -100, 0), the right target at (80, 100, 0).',
    (_BEHIND, _BEHIND),
    targets=((80, -100), (80, 100)),
  ),
  'stack': Task(
    ('red cube', 'green cube', 'purple cube'),
    f'Stack the red cube on the green cube and the purple cube on the red cube; the middles of cubes on one another '
    f'are less than {STABLE} mm apart along the table.',
    (_ANYWHERE,) * 3,
  ),
  'drawer': Task(
    ('apple',),
    f'Put the apple into the open drawer and push the drawer shut, to at most {CLOSED} mm.',
    (((-200, -120), (-50, 150)),),
    half=35,
    low=(-500, -600, 10),
    high=(-100, 200, 650),
    home=(-250, 0, 400),
    has_drawer=True,
  ),
}


@struct.dataclass
class Table:
  """The things of a state.

  Attributes:
    places: i32[N, 3], x, y, z of the objects; that of a held object is `Task.home`.
    held: i32[], the object in the hand, -1 for none.
    opening: i32[], of the drawer; 0 if there is none.
  """

  places: jax.Array
  held: jax.Array
  opening: jax.Array


def drawer_place(opening):
  """x, y, z of the middle of the drawer, of arrays or Python integers."""
  return CABINET_X + opening - DRAWER_DEPTH // 2, CABINET_Y, (DRAWER_LOW + DRAWER_HIGH) // 2


def rest_in_drawer(task: Task) -> int:
  """z of an object that lies in the drawer."""
  return DRAWER_FLOOR + task.half


def execute(task: Task, table: Table, action: jax.Array) -> Table:
  """The table after a skill, i32[7]: the skill and its numbers. A skill that is not possible changes nothing."""
  table = jax.tree.map(jnp.asarray, table)
  start, end = action[1:4], action[4:7]
  after = [_pick(task, table, start), _place(task, table, start), _push(task, table, start, end)]
  return jax.tree.map(lambda *leaves: jnp.stack(leaves)[action[0]], *after)


def _others(table: Table, i: jax.Array) -> jax.Array:
  """bool[N], the objects besides i that are not held."""
  number = jnp.arange(len(table.places))
  return (number != i) & (number != table.held)


def _squared(places: jax.Array, xy: jax.Array) -> jax.Array:
  """i32[N], squared distances along the table."""
  return ((places[:, :2] - xy) ** 2).sum(1)


def _is_covered(table: Table, i: jax.Array) -> jax.Array:
  """bool[], whether an object rests on i."""
  place = table.places[i]
  over = (_squared(table.places, place[:2]) < STABLE**2) & (table.places[:, 2] > place[2])
  return (over & _others(table, i)).any()


def _pick(task: Task, table: Table, at: jax.Array) -> Table:
  """Takes the nearest object within reach, if nothing is on it and it is not inside the cabinet."""
  miss = table.places - at
  near = (jnp.abs(miss[:, 0]) <= _PICK_X) & (jnp.abs(miss[:, 1]) <= _PICK_Y)
  near &= (-miss[:, 2] >= -_PICK_BELOW) & (-miss[:, 2] <= _PICK_ABOVE)
  if task.has_drawer:
    near &= (table.places[:, 2] != rest_in_drawer(task)) | (table.places[:, 0] - task.half >= CABINET_X)
  squared = jnp.where(near, (miss**2).sum(1), _FAR)
  i = jnp.argmin(squared).astype(jnp.int32)
  takes = (table.held < 0) & near[i] & ~_is_covered(table, i)
  home = jnp.asarray(task.home, jnp.int32)
  return table.replace(
    places=jnp.where(takes, table.places.at[i].set(home), table.places), held=jnp.where(takes, i, table.held)
  )


def _place(task: Task, table: Table, at: jax.Array) -> Table:
  """Puts the held object down: on the table, in the drawer, or on a cube. It stays in the hand where it cannot rest."""
  rest, free = _rest_by_drawer(task, table, at) if task.has_drawer else _rest_by_cubes(task, table, at)
  puts = (table.held >= 0) & free & (at[2] >= rest - _PRESS)
  put = table.places.at[table.held].set(jnp.stack([at[0], at[1], rest]))
  return table.replace(places=jnp.where(puts, put, table.places), held=jnp.where(puts, -1, table.held))


def _rest_by_cubes(task: Task, table: Table, at: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The height at which a cube comes to rest above a place, and whether it can rest there, not half on another cube."""
  squared, height = _squared(table.places, at[:2]), table.places[:, 2]
  beneath = _others(table, table.held) & (squared < APART**2)
  top = jnp.where(beneath, height, -_FAR).max()
  stable = beneath & (height == top) & (squared < STABLE**2)
  return jnp.where(beneath.any(), top + 2 * task.half, task.half), ~beneath.any() | stable.any()


def _rest_by_drawer(task: Task, table: Table, at: jax.Array) -> tuple[jax.Array, jax.Array]:
  """As `_rest_by_cubes`: in the open part of the drawer, or on the table beside the cabinet and its drawer."""
  front, aside = CABINET_X + table.opening, jnp.abs(at[1] - CABINET_Y)
  inside = (at[0] >= CABINET_X + task.half) & (at[0] <= front - task.half)
  inside &= aside <= DRAWER_HALF - DRAWER_WALL - task.half
  beside = (at[0] > front + task.half) | (aside > CABINET_HALF + task.half)
  return jnp.where(inside, rest_in_drawer(task), task.half), inside | beside


def _push(task: Task, table: Table, start: jax.Array, end: jax.Array) -> Table:
  """Moves the hand along x or y, whichever has the larger difference, and what is in its way with it."""
  way = end - start
  along_x = jnp.abs(way[0]) >= jnp.abs(way[1])
  axis = jnp.where(along_x, 0, 1)
  sign, length = jnp.sign(way[axis]), jnp.abs(way[axis])
  empty = table.held < 0
  if task.has_drawer:
    front = CABINET_X + table.opening
    hits = empty & along_x & (jnp.abs(start[1] - CABINET_Y) < DRAWER_HALF)
    hits &= (start[2] >= DRAWER_LOW) & (start[2] <= DRAWER_HIGH) & (start[0] >= front + HAND)
    opening = jnp.where(hits, (end[0] - HAND - CABINET_X).clip(0, table.opening), table.opening)
    moved = jnp.where(table.places[:, 2] == rest_in_drawer(task), opening - table.opening, 0)
    return table.replace(places=table.places.at[:, 0].add(moved), opening=opening)
  reach = task.half + HAND
  place, across = table.places[:, axis], jnp.abs(table.places[:, 1 - axis] - start[1 - axis])
  ahead = sign * (place - start[axis])
  hits = (across < reach) & (ahead >= reach) & (ahead - reach < length) & (sign != 0)
  hits &= jnp.abs(table.places[:, 2] - start[2]) <= _PUSH_Z
  i = jnp.argmin(jnp.where(hits, ahead, _FAR)).astype(jnp.int32)
  # Others stop it, and so does the end of the workspace.
  before = sign * (place - place[i])
  beside = jnp.abs(table.places[:, 1 - axis] - table.places[i, 1 - axis]) < APART
  others = _others(table, i) & beside & (before > 0)
  low, high = (jnp.asarray(bound)[axis] for bound in (task.low, task.high))
  room = jnp.where(sign > 0, high - place[i], place[i] - low)
  way = jnp.minimum(length + reach - ahead[i], jnp.minimum(room, jnp.where(others, before - APART, _FAR).min()))
  moves = empty & hits[i] & (table.places[i, 2] == task.half) & ~_is_covered(table, i)
  moved = jnp.where(moves, sign * jnp.maximum(way, 0), 0)
  return table.replace(places=table.places.at[i, axis].add(moved))


def goals_reached(task: Task, table: Table) -> jax.Array:
  """bool[2], which parts of the goal hold: those of both objects, or one after another for a stack and a drawer."""
  places, held = table.places, table.held
  x, z = places[:, 0], places[:, 2]
  free = jnp.arange(len(places)) != held
  if task.has_drawer:
    squared = _squared(places, jnp.array(drawer_place(table.opening)[:2]))
    inside = (squared[0] <= INSIDE**2) & (z[0] >= 100) & (z[0] <= 400) & free[0]
    return jnp.stack([inside, inside & (table.opening <= CLOSED)])
  if task.targets:
    return ((places[:, :2] - jnp.asarray(task.targets)) ** 2).sum(1) <= jnp.where(free, ON_TARGET**2, -1)
  if len(places) == 2:
    return (jnp.abs(x) <= ON_LINE) & (jnp.abs(z) <= 50) & free
  # Red (0) on green (1), and purple (2) on red.
  above, below = jnp.array([0, 2]), jnp.array([1, 0])
  near = ((places[above, :2] - places[below, :2]) ** 2).sum(1) < STABLE**2
  first, second = near & (z[above] > z[below] + 20) & free[above] & free[below]
  return jnp.stack([first, first & second])


def worth(task: Task, table: Table) -> tuple[jax.Array, jax.Array]:
  """f32[], the value of the stages that a table has reached, and bool[], whether the goal is reached.

  Each part of the goal is two stages: its object in the hand, and the part itself. A stack and a drawer have an order:
  only the next object counts. At the goal the hand is empty, because each object is at its place.
  """
  reached = goals_reached(task, table)
  success = reached.all()
  wanted = table.held >= 0
  if len(task.objects) == 3:
    wanted &= table.held == jnp.where(reached[0], 2, 0)
  stages = 2 * reached.sum() + wanted
  return jnp.where(success, SUCCESS_VALUE, STAGE_VALUE * stages.astype(jnp.float32)), success
