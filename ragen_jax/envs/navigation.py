"""Navigation: find an object in a room, from first-person pictures, as in VAGEN's environment of this name.

The actions, limits and rewards are those of VAGEN (arXiv 2510.16907), which plays scenes of AI2-THOR; the rooms here
are made from a seed and drawn in JAX. A room is divided into cells with sides of one step.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base
from ragen_jax.envs.batches import batched, one
from ragen_jax.envs.drawing import navigation as drawing
from ragen_jax.envs.drawing.tiles import IMAGE_MARK, PICTURE_TILE, check_tile
from ragen_jax.envs.navigation_rooms import Room, draw_room, no_room
from ragen_jax.envs.navigation_texts import free_steps, write_place, write_state
from ragen_jax.envs.navigation_view import KINDS, LEVEL, TILTS, can_be_seen, in_view, offsets, poses_after
from ragen_jax.envs.options import check_choice, check_flag, check_integer, is_number
from ragen_jax.envs.scenes import RoomScene, Vocabulary, room_vocabulary
from ragen_jax.envs.solvers import navigation as solver
from ragen_jax.envs.splits import SPLITS

_NAMES = {
  'thor': ('moveahead', 'moveback', 'moveright', 'moveleft', 'rotateright', 'rotateleft', 'lookup', 'lookdown'),
  'words': (
    'move_forward', 'move_backward', 'move_right', 'move_left', 'turn_right', 'turn_left', 'look_up', 'look_down',
  ),
}  # fmt: skip
_STARTS = ('any', 'facing', 'away')
# Heights in metres.
_EYE, _CEILING = 1.0, 2.5
# Rooms that are tried for a level within the bounds of its shortest play.
MAX_ATTEMPTS = 64
_MOST_OBJECTS = 8


@struct.dataclass
class State(base.State):
  """A room with N objects, and a player in it.

  Attributes:
    room: the walls and the objects; object 0 is the target.
    player: i32[2], row and column.
    heading: i32[], 0 to 3: up, right, down, left on the map.
    tilt: i32[], index of `navigation_view.TILTS`.
    blocked: bool[], whether the last action changed nothing.
    steps: i32[], actions so far.
  """

  room: Room
  player: jax.Array
  heading: jax.Array
  tilt: jax.Array
  blocked: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Navigation(base.Environment):
  """Walk through a room until the object that the instruction names is near and in view.

  The eight actions step ahead, back, right and left, turn by 90 degrees to the right and left, and tilt the camera by
  30 degrees up and down. Walls, objects, and the limits of the tilt (30 up, 60 down) block an action; it then counts,
  and changes nothing. The target is found if the player is within `radius` of it after an action and, with `must_see`,
  its middle is in view. This ends the game, as do `max_steps` actions.

  Attributes:
    dim: rows and columns of cells, including the border of walls.
    stride: metres of a step, which is the side of a cell.
    radius: metres, along the floor, within which the target is found.
    must_see: whether the target must also be in view; VAGEN's rule is without it.
    fov: field of view in degrees, horizontally and vertically.
    inner_walls: number of walls that begin at the border.
    num_objects: number of objects, the target included.
    kinds: shapes of objects, of `navigation_view.KINDS`.
    colours: colours of objects, of `drawing.navigation.COLOURS`. No two objects of a room have shape and colour in
      common.
    min_path: minimum actions of a level's shortest play. The bounds are exact. They hold if one of `MAX_ATTEMPTS` rooms
      has such a start; otherwise the level violates them.
    max_path: maximum actions of a level's shortest play, 0 for no bound.
    start: 'any', 'facing' (the target is in view at the start) or 'away' (it is not).
    split: the part of all rooms that is played, of `splits.SPLITS`; parts have no room in common.
    success_reward: the reward of finding the target.
    max_steps: actions after which the game ends.
    picture: rows, and columns, of tiles of a picture. The size of a tile is `tile` of `pixels`.
    names: the names of the actions, 'thor' (as moveahead) or 'words' (as move_forward).
  """

  name: ClassVar[str] = 'navigation'
  shown_as: ClassVar[str] = 'room'

  dim: tuple[int, int] = (11, 11)
  stride: float = 0.5
  radius: float = 1.5
  must_see: bool = True
  fov: float = 100.0
  inner_walls: int = 1
  num_objects: int = 6
  kinds: tuple[str, ...] = KINDS
  colours: tuple[str, ...] = tuple(drawing.COLOURS)
  min_path: int = 3
  max_path: int = 0
  start: str = 'any'
  split: str = 'all'
  success_reward: float = 10.0
  max_steps: int = 30
  picture: int = 9
  names: str = 'thor'

  def __post_init__(self):
    # Configs contain lists; tuples keep the environment hashable.
    for field in ('dim', 'kinds', 'colours'):
      value = getattr(self, field)
      object.__setattr__(self, field, tuple(value) if isinstance(value, list | tuple) else (value,))
    if len(self.dim) != 2:
      raise ValueError(f'navigation: dim={self.dim}; allowed: (rows, columns)')
    for size in self.dim:
      check_integer('navigation', 'dim', size, 6, 32)
    for field, low, high in (('stride', 0.1, 2), ('radius', 0.1, 20), ('fov', 40, 140), ('success_reward', 0.01, 1000)):
      value = getattr(self, field)
      if not is_number(value) or not low <= value <= high:
        raise ValueError(f'navigation: {field}={value!r}; allowed: numbers from {low} to {high}')
    check_flag('navigation', 'must_see', self.must_see)
    for field, choices in (('kinds', KINDS), ('colours', tuple(drawing.COLOURS))):
      value = getattr(self, field)
      if not value or len(set(value)) != len(value):
        raise ValueError(f'navigation: {field}={value!r}; allowed: different names of {", ".join(choices)}')
      for chosen in value:
        check_choice('navigation', field, chosen, choices)
    for field, choices in (('start', _STARTS), ('split', tuple(SPLITS)), ('names', tuple(_NAMES))):
      check_choice('navigation', field, getattr(self, field), choices)
    check_integer('navigation', 'inner_walls', self.inner_walls, 0, 3)
    cells = (self.dim[0] - 2) * (self.dim[1] - 2)
    most = min(_MOST_OBJECTS, cells // 4, len(self.object_names))
    if most < 2:
      raise ValueError(f'navigation: kinds={self.kinds} of colours={self.colours}; allowed: two different objects')
    check_integer('navigation', 'num_objects', self.num_objects, 2, most)
    check_integer('navigation', 'max_steps', self.max_steps, 1, 10_000)
    check_integer('navigation', 'min_path', self.min_path, 1, self.max_steps)
    if self.max_path != 0:
      check_integer('navigation', 'max_path', self.max_path, self.min_path, 10_000)
    check_integer('navigation', 'picture', self.picture, 2, 64)
    if self._reach < 1:
      raise ValueError(f'navigation: radius={self.radius!r}; allowed: at least stride={self.stride!r}')
    if self.must_see:
      for kind in self.kinds:
        if not can_be_seen(KINDS.index(kind), self._reach, eye=self._eye, half_view=self._half_view):
          raise ValueError(
            f'navigation: radius={self.radius!r} with must_see=True; allowed: more, since no {kind} so near is in view '
            f'with stride={self.stride!r} and fov={self.fov!r}'
          )

  @property
  def action_names(self) -> tuple[str, ...]:
    return _NAMES[self.names]

  @functools.cached_property
  def object_names(self) -> tuple[str, ...]:
    """Every name of an object; `Room.names` are their numbers."""
    return tuple(f'{colour} {kind}' for colour in self.colours for kind in self.kinds)

  @property
  def scene_kinds(self) -> tuple[str, ...]:
    return self.object_names

  @property
  def scene_words(self) -> Vocabulary:
    return room_vocabulary(self.object_names)

  @property
  def _eye(self) -> float:
    """Height of the camera, in cells."""
    return _EYE / self.stride

  @property
  def _half_view(self) -> float:
    return math.tan(math.radians(self.fov / 2))

  @property
  def _reach(self) -> int:
    """The largest squared distance, in cells, within which the target is found."""
    return math.floor((self.radius / self.stride) ** 2 + 1e-6)

  def _kinds_of(self, names: jax.Array) -> jax.Array:
    """The numbers of `KINDS` of objects by the numbers of their names."""
    return jnp.asarray([KINDS.index(kind) for kind in self.kinds], jnp.int32)[names % len(self.kinds)]

  def check_budget(self, budget: base.Budget) -> None:
    """Raises ValueError if the game can end before the budget of actions, which the prompt states, is used up."""
    base.check_max_steps(self.max_steps, budget)

  # -- the game ------------------------------------------------------------------------------------------------------

  def seen(self, state: State) -> jax.Array:
    """bool[N], which objects are in view (`navigation_view.in_view`); traced."""
    return self._seen(state.room, state.player, state.heading, state.tilt)

  def _seen(self, room: Room, player: jax.Array, heading: jax.Array, tilt: jax.Array) -> jax.Array:
    room = jax.tree.map(jnp.asarray, room)
    kinds = self._kinds_of(room.names)
    return in_view(
      room.walls, room.places, kinds, player, heading, tilt, eye=self._eye, half_view=self._half_view
    )  # fmt: skip

  def _finds(self, room: Room, player: jax.Array, heading: jax.Array, tilt: jax.Array) -> jax.Array:
    """bool[], whether the target is found in a pose."""
    near = ((room.places[0] - player) ** 2).sum() <= self._reach
    return near & self._seen(room, player, heading, tilt)[0] if self.must_see else near

  def _over_poses(self, function, room: Room) -> jax.Array:
    """A function of (room, player, heading, tilt) in all poses, [T, 4, R, C]."""
    rows, columns = self.dim
    cells = jnp.stack(jnp.meshgrid(jnp.arange(rows), jnp.arange(columns), indexing='ij'), -1).reshape(-1, 2)
    over = jax.vmap(function, (None, 0, None, None))
    over = jax.vmap(jax.vmap(over, (None, None, 0, None)), (None, None, None, 0))
    found = over(room, cells, jnp.arange(4), jnp.arange(len(TILTS)))
    return found.reshape(len(TILTS), 4, rows, columns)

  def distances(self, room: Room) -> jax.Array:
    """i32[T, 4, R, C], the fewest actions from every pose; see `solvers.navigation.distances`. Traced."""
    room = jax.tree.map(jnp.asarray, room)
    return solver.distances(self._over_poses(self._finds, room), ~room.taken)

  def reset(self, key: jax.Array) -> State:
    """A level from a key: a room of the split, and a start from which the shortest play is within the bounds."""
    num_names = len(self.object_names)
    most = self.max_path or solver.FAR - 1

    def draw(carry):
      key, attempt, *_ = carry
      room, luck, key = draw_room(
        key, self.dim, self.inner_walls, self.num_objects, num_names, self.split, 4 * self.dim[0] * self.dim[1]
      )
      distance = self.distances(room)[LEVEL]  # [4, R, C]
      allowed = (distance >= 1) & (distance < solver.FAR)
      within = (distance >= self.min_path) & (distance <= most)
      if self.start != 'any':
        seen = self._over_poses(lambda *pose: self._seen(*pose)[0], room)[LEVEL]
        within &= seen if self.start == 'facing' else ~seen
      luck = luck.reshape(distance.shape)
      chosen = jnp.argmax(jnp.where(within, 2 + luck, jnp.where(allowed, luck, -1.0))).astype(jnp.int32)
      good = within.any() | (allowed.any() & (attempt + 1 >= MAX_ATTEMPTS))
      return key, attempt + 1, room, chosen, good

    nothing = no_room(self.dim, self.num_objects)
    carry = key, jnp.int32(0), nothing, jnp.int32(0), jnp.bool_(False)
    _, _, room, chosen, _ = jax.lax.while_loop(lambda carry: ~carry[-1], draw, carry)
    heading, row, column = jnp.unravel_index(chosen, (4, *self.dim))
    no = jnp.bool_(False)
    return State(
      done=no,
      success=no,
      room=room,
      player=jnp.stack([row, column]).astype(jnp.int32),
      heading=heading.astype(jnp.int32),
      tilt=jnp.int32(LEVEL),
      blocked=no,
      steps=jnp.int32(0),
    )

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    del key
    room = jax.tree.map(jnp.asarray, state.room)
    tilt, heading, *player = jnp.asarray(poses_after())[action, state.heading] + jnp.stack(
      [state.tilt, 0, *state.player]
    )
    player, tilt = jnp.stack(player), tilt.clip(0, len(TILTS) - 1)
    player = jnp.where(room.taken[player[0], player[1]], state.player, player)
    moved = (player != state.player).any() | (heading != state.heading) | (tilt != state.tilt)
    success = self._finds(room, player, heading, tilt)
    after = state.replace(
      player=player.astype(jnp.int32),
      heading=heading.astype(jnp.int32),
      tilt=tilt.astype(jnp.int32),
      blocked=~moved,
      steps=state.steps + 1,
      success=success,
      done=success | (state.steps + 1 >= self.max_steps),
    )
    return after, base.StepOutput(reward=self.success_reward * success.astype(jnp.float32), effective=moved)

  # -- pictures ------------------------------------------------------------------------------------------------------

  @property
  def image_grid(self) -> tuple[int, int]:
    return self.picture, self.picture

  def pixels(self, state: State, tile: int) -> jax.Array:
    """What the player sees, u8[picture * tile, picture * tile, 3]."""
    check_tile(tile)
    room = jax.tree.map(jnp.asarray, state.room)
    colours = jnp.asarray([drawing.COLOURS[colour] for colour in self.colours], jnp.uint8)
    return drawing.draw(
      room.walls, room.places, self._kinds_of(room.names), colours[room.names // len(self.kinds)],
      jnp.asarray(state.player), state.heading, state.tilt,
      side=self.picture * tile, eye=self._eye, half_view=self._half_view, wall_height=_CEILING / self.stride,
      step=self.stride,
    )  # fmt: skip

  def render_rgb(self, state: State) -> np.ndarray:
    return np.asarray(_drawn(self, jax.tree.map(jnp.asarray, state)))

  # -- text ----------------------------------------------------------------------------------------------------------

  def rules(self) -> str:
    seen = 'in view ' if self.must_see else ''
    return (
      f'You are in a room and look for an object. A move goes {self.stride:g} m, a rotation 90 degrees, a look up or '
      f'down 30. Walls and objects block moves. The object is found when it is {seen}within {self.radius:g} m. '
      f'This earns {self.success_reward:g} points and ends the game.'
    )

  def render(self, states: State) -> list[str]:
    """The instruction, the objects in view with their places in steps, the free steps, and the tilt, for states [N]."""
    listed = self._listed(states)
    texts = []
    for i, instruction in enumerate(self._instructions(states)):
      state = one(states, i)
      free = free_steps(state.room.walls, state.room.places, state.player, int(state.heading))
      texts.append(write_state(instruction, listed[i], free, int(state.tilt)))
    return texts

  def captions(self, states: State) -> list[str]:
    return [f'{instruction}\n{IMAGE_MARK}' for instruction in self._instructions(states)]

  def _instructions(self, states: State) -> list[str]:
    """What each player looks for, and whether the last action was blocked."""
    blocked = np.asarray(states.blocked).tolist()
    return [
      f'Find the {name}.' + (' The last action was blocked.' if stuck else '')
      for name, stuck in zip(self._targets(states), blocked, strict=True)
    ]

  def _targets(self, states: State) -> list[str]:
    return [self.object_names[name] for name in np.asarray(states.room.names)[:, 0].tolist()]

  def _in_view(self, states: State) -> list[list[int]]:
    """Of each state the numbers of the objects in view, nearest first."""
    if not len(np.asarray(states.done)):
      return []
    found = []
    for i, seen in enumerate(batched(_seen_by, self, states)):
      state = one(states, i)
      squared = ((state.room.places - state.player) ** 2).sum(1)
      found.append(sorted(np.flatnonzero(seen).tolist(), key=squared.__getitem__))
    return found

  def _listed(self, states: State) -> list[list[tuple[str, tuple[int, int]]]]:
    """Of each state the objects in view, nearest first: names, and steps ahead and to the right."""
    found = []
    for i, listed in enumerate(self._in_view(states)):
      state = one(states, i)
      ahead, aside = offsets(state.room.places, state.player, int(state.heading))
      found.append([(self.object_names[state.room.names[k]], (int(ahead[k]), int(aside[k]))) for k in listed])
    return found

  def rationale(self, states: State) -> list[str]:
    """Where the target is, if it is in view."""
    thoughts = []
    for name, listed in zip(self._targets(states), self._listed(states), strict=True):
      place = dict(listed).get(name)
      thoughts.append(f'The {name} is {write_place(*place)}.' if place else f'The {name} is not in view.')
    return thoughts

  def scenes(self, states: State) -> list[RoomScene]:
    """The target, in view or not, and the other objects in view."""
    found = []
    for i, listed in enumerate(self._in_view(states)):
      state = one(states, i)
      names = [self.object_names[name] for name in state.room.names.tolist()]
      places = [tuple(place) for place in state.room.places.tolist()]
      things = {names[k]: (places[k],) for k in dict.fromkeys([0, *listed])}
      player = tuple(state.player.tolist())
      found.append(RoomScene(player, things, int(state.heading), names[0], self._reach, self.object_names))
    return found

  # -- best play -----------------------------------------------------------------------------------------------------

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> solver.NavigationSolution:
    """Exact shortest play by breadth-first search over poses, within the budget and `max_steps`.

    The game is deterministic, so the shortest play is the best at every discount.
    """
    del discount
    states = jax.tree.map(np.asarray, states)
    count = len(states.done)
    shape = (count, len(TILTS), 4, *self.dim)
    distance = batched(_distances_of, self, states.room) if count else np.zeros(shape, np.int32)
    here = distance[(np.arange(count), states.tilt, states.heading, states.player[:, 0], states.player[:, 1])]
    left = np.minimum(budget.most_actions, self.max_steps - states.steps)
    success = np.where(states.done, states.success, here <= left).astype(np.float32)
    return solver.NavigationSolution(distance, success, budget, self.max_steps)


@functools.partial(jax.jit, static_argnums=0)
def _drawn(env: Navigation, state: State) -> jax.Array:
  return env.pixels(state, PICTURE_TILE)


@functools.partial(jax.jit, static_argnums=0)
def _seen_by(env: Navigation, states: State) -> jax.Array:
  return jax.vmap(env.seen)(jax.tree.map(jnp.asarray, states))


@functools.partial(jax.jit, static_argnums=0)
def _distances_of(env: Navigation, rooms: Room) -> jax.Array:
  """i32[N, T, 4, R, C]; room by room, so that memory does not grow with their number."""
  return jax.lax.map(env.distances, jax.tree.map(jnp.asarray, rooms))
