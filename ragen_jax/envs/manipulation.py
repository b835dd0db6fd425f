"""Manipulation: pick, place and push cubes and close a drawer by coordinates, as in VAGEN's PrimitiveSkill.

The tasks, skills, limits and rewards are those of VAGEN (arXiv 2510.16907), which plays ManiSkill with a robot arm;
here a skill is an exact rule in JAX (envs/manipulation_tasks.py), and pictures are drawn in JAX.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import re
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base
from ragen_jax.envs import manipulation_tasks as tasks
from ragen_jax.envs.drawing import manipulation as drawing
from ragen_jax.envs.drawing.tiles import IMAGE_MARK, PICTURE_TILE, check_tile
from ragen_jax.envs.manipulation_tasks import NUMBERS, PICK, PLACE, PUSH, SKILLS, TASKS, Table, Task
from ragen_jax.envs.options import check_choice, check_integer
from ragen_jax.envs.scenes import TableScene, Vocabulary, table_vocabulary
from ragen_jax.envs.solvers import manipulation as solver
from ragen_jax.envs.splits import SPLITS, tenth

_POSITIONS = ('named', 'list', 'none')
_ACTION = re.compile(r'(pick|place|push)\s*\(([^()]*)\)', re.IGNORECASE | re.ASCII)
_NUMBER = re.compile(r'[+-]?\d{1,6}(?:\.\d{1,9})?', re.ASCII)

# A camera where VAGEN's stands, and one from above: without a drawer, and with one.
_CAMERAS = {
  False: (drawing.Camera((1000, 0, 600), (0, 0, 60), 0.65), drawing.Camera((250, 0, 700), (20, 0, 0))),
  True: (drawing.Camera((1000, 0, 600), (-200, -100, 100)), drawing.Camera((50, -200, 1150), (-280, -200, 0))),
}


@struct.dataclass
class State(base.State):
  """Things on a table, and whether the last skill changed nothing, bool[]."""

  table: Table
  blocked: jax.Array


@dataclasses.dataclass(frozen=True)
class Manipulation(base.Environment):
  """Bring the objects of a table to where the task says, by skills with coordinates.

  Actions are seven integers: the skill (`manipulation_tasks.SKILLS`) and its three or six numbers in millimetres, then
  zeros. The reward of a skill is the change of the value of the stages that the state has reached, minus 0.1: 2 for
  each object in the hand and for each reached part of the goal, and 10 at the end, so that a play of n skills that
  reaches the goal earns 10 - n / 10 in sum.

  Attributes:
    task: of `manipulation_tasks.TASKS`.
    positions: what an observation says of the places of objects: 'named', 'list' (without the names, as in VAGEN) or
      'none', so that they must be read from a picture.
    cameras: number of pictures of an observation: 1, or 2 with one from above.
    split: the part of all levels that is played, of `splits.SPLITS`; parts have no level in common.
    picture: rows, and columns, of tiles of a picture. The size of a tile is `tile` of `pixels`.
  """

  name: ClassVar[str] = 'manipulation'
  shown_as: ClassVar[str] = 'table'

  task: str = 'place'
  positions: str = 'named'
  cameras: int = 1
  split: str = 'all'
  picture: int = 9

  def __post_init__(self):
    for field, choices in (('task', tuple(TASKS)), ('positions', _POSITIONS), ('split', tuple(SPLITS))):
      check_choice('manipulation', field, getattr(self, field), choices)
    check_integer('manipulation', 'cameras', self.cameras, 1, 2)
    check_integer('manipulation', 'picture', self.picture, 2, 64)

  @property
  def task_of_levels(self) -> Task:
    """The task with all that its levels have in common."""
    return TASKS[self.task]

  @property
  def scene_kinds(self) -> tuple[str, ...]:
    task = self.task_of_levels
    return task.objects + ('drawer',) * task.has_drawer

  @property
  def scene_words(self) -> Vocabulary:
    task = self.task_of_levels
    return table_vocabulary(self.scene_kinds, task.low[:2], task.high[:2])

  # -- the game ------------------------------------------------------------------------------------------------------

  def reset(self, key: jax.Array) -> State:
    """A level from a key: objects in the start regions of the task, apart from one another."""
    task, (low, high) = self.task_of_levels, SPLITS[self.split]
    starts = np.array(task.starts)  # [N, 2, 2]

    def draw(carry):
      key, own = jax.random.split(carry[0])
      xy = jax.random.randint(own, starts.shape[:2], starts[..., 0], starts[..., 1] + 1)
      between = xy[:, None] - xy[None]  # [N, N, 2]
      near = ((between**2).sum(-1) < tasks.APART**2) | (jnp.abs(between[..., 1]) < task.apart)
      part = tenth(xy.reshape(-1))
      return key, xy, ~(near & ~np.eye(len(xy), dtype=bool)).any() & (part >= low) & (part < high)

    carry = key, jnp.zeros(starts.shape[:2], jnp.int32), jnp.bool_(False)
    _, xy, _ = jax.lax.while_loop(lambda carry: ~carry[-1], draw, carry)
    no = jnp.bool_(False)
    places = jnp.concatenate([xy, jnp.full((len(xy), 1), task.half)], axis=1).astype(jnp.int32)
    opening = jnp.int32(tasks.OPEN_START if task.has_drawer else 0)
    return State(done=no, success=no, table=Table(places, jnp.int32(-1), opening), blocked=no)

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    del key
    task = self.task_of_levels
    table = tasks.execute(task, state.table, action)
    changed = jax.tree.reduce(
      jnp.logical_or, jax.tree.map(lambda new, old: (new != jnp.asarray(old)).any(), table, state.table)
    )
    before, _ = tasks.worth(task, state.table)
    after, success = tasks.worth(task, table)
    state = state.replace(table=table, blocked=~changed, done=success, success=success)
    return state, base.StepOutput(reward=after - before - tasks.SKILL_COST, effective=changed)

  # -- actions -------------------------------------------------------------------------------------------------------

  @property
  def action_shape(self) -> tuple[int, ...]:
    """The skill and six numbers."""
    return (7,)

  @property
  def action_help(self) -> str:
    task = self.task_of_levels
    x, y, z = (f'{low} to {high}' for low, high in zip(task.low, task.high, strict=True))
    return (
      'Skills: pick(x, y, z) takes the object there; place(x, y, z) puts it down; push(x1, y1, z1, x2, y2, z2) moves '
      'the closed hand along x or y from the first place to the second and pushes what is in its way; it begins at '
      f'least {task.half + tasks.HAND} mm before the middle of that. Numbers are millimetres: x from {x}, y from {y}, '
      f'z from {z}.'
    )

  def parse_action(self, text: str) -> tuple[int, ...] | None:
    """The skill and its numbers from 'pick(10, -20, 20)'; None for other texts, and for places outside the workspace.

    Letter case and blanks are ignored. Decimals are rounded, halves up.
    """
    match = _ACTION.fullmatch(text.strip())
    if match is None:
      return None
    skill = SKILLS.index(match[1].lower())
    written = [number.strip() for number in match[2].split(',')]
    if len(written) != NUMBERS[skill] or not all(map(_NUMBER.fullmatch, written)):
      return None
    numbers = [math.floor(float(number) + 0.5) for number in written]
    task = self.task_of_levels
    bounds = zip(numbers, task.low * 2, task.high * 2, strict=False)
    if not all(low <= number <= high for number, low, high in bounds):
      return None
    return (skill, *numbers, *[0] * (6 - len(numbers)))

  def format_action(self, action: Any) -> str:
    skill, *numbers = map(int, action)
    return f'{SKILLS[skill]}({", ".join(map(str, numbers[: NUMBERS[skill]]))})'

  def example_actions(self, observation: str) -> tuple[str, ...]:
    """Each skill once."""
    del observation
    low, high = self.task_of_levels.low, self.task_of_levels.high
    numbers = [(a * (9 - share) + b * share) // 9 for share in (7, 2) for a, b in zip(low, high, strict=True)]
    return tuple(self.format_action((skill, *numbers)) for skill in range(3))

  def legal_actions(self, states: State) -> list[list[tuple[int, ...]]]:
    """For random play, which knows the places: picks of the objects, or places for the held one, and pushes."""
    task = self.task_of_levels
    found = []
    for planner in solver.planners(task, states):
      free = [place for i, place in enumerate(planner.places) if i != planner.held]
      if planner.held >= 0:
        spots = [(x, y, z + 2 * task.half) for x, y, z in free]
        spots += [(x, y, task.half) for x, y in task.targets]
        spots += [tasks.drawer_place(planner.opening)] * task.has_drawer
        x, y = (range(low, high + 1, (high - low) // 2) for low, high in zip(task.low[:2], task.high, strict=False))
        spots += [(a, b, task.half) for a in x for b in y]
        actions = [(PLACE, *spot, 0, 0, 0) for spot in spots]
      else:
        actions = [(PICK, *place, 0, 0, 0) for place in free]
        things = [tasks.drawer_place(planner.opening)] if task.has_drawer else free
        for _, y, z in things:
          ends = (task.high[0], task.low[0])
          actions += [(PUSH, start, y, z, end, y, z) for start, end in (ends, ends[::-1])]
      found.append([action for action in actions if self.parse_action(self.format_action(action))])
    return found

  # -- pictures ------------------------------------------------------------------------------------------------------

  @property
  def image_grid(self) -> tuple[int, int]:
    return self.picture, self.picture

  @property
  def image_count(self) -> int:
    return self.cameras

  def pixels(self, state: State, tile: int) -> jax.Array:
    """What the cameras see, u8[cameras * picture * tile, picture * tile, 3], one picture below the other."""
    check_tile(tile)
    task, table = self.task_of_levels, jax.tree.map(jnp.asarray, state.table)
    boxes = _hand(task) + (_cabinet(table.opening) if task.has_drawer else [])
    for i, name in enumerate(task.objects):
      low, high = table.places[i] - task.half, table.places[i] + task.half
      boxes.append(drawing.Box(low, high, name.split()[0], round=task.has_drawer))
    targets = tuple((x, y, tasks.ON_TARGET) for x, y in task.targets)
    pictures = [
      drawing.draw(camera, boxes, targets, self.picture * tile) for camera in _CAMERAS[task.has_drawer][: self.cameras]
    ]
    return jnp.concatenate(pictures)

  def render_rgb(self, state: State) -> np.ndarray:
    return np.asarray(_drawn(self, jax.tree.map(jnp.asarray, state)))

  # -- text ----------------------------------------------------------------------------------------------------------

  def rules(self) -> str:
    task = self.task_of_levels
    size = f'The apple has a diameter of {2 * task.half} mm.' if task.has_drawer else 'Cubes have sides of 40 mm.'
    return (
      f'You control a robot arm at a table. {task.goal} Places are x, y, z of the middle of a thing: x points to the '
      f'camera, y to the right, z up from the table. {size} The hand must be empty at the end. A skill that is '
      f'not possible changes nothing. Success earns {tasks.SUCCESS_VALUE:g} points in sum, a skill costs '
      f'{tasks.SKILL_COST:g}.'
    )

  def render(self, states: State) -> list[str]:
    """The places of things as `positions` says, what the hand does, and whether the last skill changed nothing."""
    task, texts = self.task_of_levels, []
    blocked = np.asarray(states.blocked).tolist()
    for planner, stuck in zip(solver.planners(task, states), blocked, strict=True):
      things = list(zip(task.objects, planner.places, strict=True))
      if task.has_drawer:
        things.append(('drawer', tasks.drawer_place(planner.opening)))
      lines = []
      if self.positions != 'none':
        named = self.positions == 'named'
        listed = ', '.join(f'{name} {place}' if named else str(place) for name, place in things)
        lines.append(f'Positions: {listed}.')
        if task.has_drawer:
          lines.append(f'The drawer is open by {planner.opening} mm.')
      lines.append('The hand is empty.' if planner.held < 0 else 'The hand holds an object.')
      if stuck:
        lines.append('The last skill changed nothing.')
      texts.append('\n'.join(lines))
    return texts

  def captions(self, states: State) -> list[str]:
    marks = IMAGE_MARK if self.cameras == 1 else f'From the front:\n{IMAGE_MARK}\nFrom above:\n{IMAGE_MARK}'
    return [f'{text}\n{marks}' for text in self.render(states)]

  def rationale(self, states: State) -> list[str]:
    """The next skill of the plan, and what it moves."""
    task, thoughts = self.task_of_levels, []
    planners = solver.planners(task, states)
    _, after = solver.play(self, states, np.ones(len(planners), int))
    moved = (after.table.places != np.asarray(states.table.places)).any(-1)  # [N, objects]
    for planner, number in zip(planners, moved.argmax(-1).tolist(), strict=True):
      skill, x, y, *_ = planner.next()
      if skill == PUSH and task.has_drawer:
        thoughts.append('I push the drawer shut.')
        continue
      name = task.objects[planner.held if skill == PLACE else number]
      thoughts.append(f'I {SKILLS[skill]} the {name}{f" at x {x}, y {y}" if skill == PLACE else ""}.')
    return thoughts

  def scenes(self, states: State) -> list[TableScene]:
    task, found = self.task_of_levels, []
    for planner in solver.planners(task, states):
      things = {}
      for i, (name, (x, y, z)) in enumerate(zip(task.objects, planner.places, strict=True)):
        inside = task.has_drawer and z == tasks.rest_in_drawer(task)
        how = 'in the hand' if i == planner.held else 'in the drawer' if inside else ''
        things[name] = (x, y), how or ('on the table' if z == task.half else 'on a cube')
      if task.has_drawer:
        how = 'closed' if planner.opening <= tasks.CLOSED else 'open'
        things['drawer'] = tasks.drawer_place(planner.opening)[:2], how
      found.append(TableScene.of(things, task.low[:2], task.high[:2]))
    return found

  # -- best play -----------------------------------------------------------------------------------------------------

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> solver.ManipulationSolution:
    """The shortest play of fresh levels. The game is deterministic, so it is the best at every discount."""
    del discount
    count = len(np.asarray(states.done))
    _, after = solver.play(self, states, np.full((count,), budget.most_actions))
    return solver.ManipulationSolution(self, budget, np.asarray(after.success, np.float32))


def _hand(task: Task) -> list[drawing.Box]:
  """The open hand where it waits, and the arm above it."""
  x, y, z = task.home
  half = task.half
  return [
    drawing.Box(np.array(low, np.float32), np.array(high, np.float32), colour)
    for low, high, colour in (
      ((x - 8, y - half - 10, z - 5), (x + 8, y - half, z + half + 20), 'hand'),
      ((x - 8, y + half, z - 5), (x + 8, y + half + 10, z + half + 20), 'hand'),
      ((x - 20, y - half - 20, z + half + 20), (x + 20, y + half + 20, z + half + 50), 'hand'),
      ((x - 15, y - 15, z + half + 50), (x + 15, y + 15, z + 900), 'arm'),
    )
  ]


def _cabinet(opening: jax.Array) -> list[drawing.Box]:
  """The cabinet around an opening for its drawer, and the drawer: its front, sides and floor."""
  back, front = tasks.CABINET_X - tasks.DRAWER_DEPTH - 20, tasks.CABINET_X
  left, right = tasks.CABINET_Y - tasks.CABINET_HALF, tasks.CABINET_Y + tasks.CABINET_HALF
  wall, half = tasks.DRAWER_WALL, tasks.DRAWER_HALF
  low, floor, high = tasks.DRAWER_LOW, tasks.DRAWER_FLOOR, tasks.DRAWER_HIGH
  end = front + opening
  start = end - tasks.DRAWER_DEPTH
  y0, y1 = tasks.CABINET_Y - half, tasks.CABINET_Y + half
  parts = (
    ((back, left, 0), (front, right, low), 'cabinet'),
    ((back, left, high), (front, right, tasks.CABINET_TOP), 'cabinet'),
    ((back, left, low), (front, y0, high), 'cabinet'),
    ((back, y1, low), (front, right, high), 'cabinet'),
    ((back, left, low), (back + 20, right, high), 'cabinet'),
    ((start, y0, low), (end, y1, floor), 'drawer'),
    ((start, y0, floor), (end, y0 + wall, high), 'drawer'),
    ((start, y1 - wall, floor), (end, y1, high), 'drawer'),
    ((end - wall, y0, low), (end, y1, high), 'drawer'),
  )
  return [drawing.Box(jnp.array(a), jnp.array(b), colour) for a, b, colour in parts]


@functools.partial(jax.jit, static_argnums=0)
def _drawn(env: Manipulation, state: State) -> jax.Array:
  return env.pixels(state, PICTURE_TILE)
