"""The 2 x 2 x 2 Rubik's cube: twelve quarter turns, levels by scrambling, and the exact distance to the solved cube.

Faces are numbered in the order of `FACES`. Sticker 4 * face + i is the i-th of its face, row by row, where the face is
seen from outside as in this net:

          U U
          U U
      L L F F R R B B
      L L F F R R B B
          D D
          D D
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base

FACES = 'UDLRFB'
# No position is further than this from solved, in quarter turns.
DIAMETER = 14
# Colours of the faces of the solved cube, and their names.
COLOURS = 'WYORGB'
_COLOUR_NAMES = ('white', 'yellow', 'orange', 'red', 'green', 'blue')

# A clockwise quarter turn of each face: each of the stickers goes to the place of the next, the last to the first's.
_CYCLES = {
  'U': 'U0 U1 U3 U2, F0 L0 B0 R0, F1 L1 B1 R1',
  'D': 'D0 D1 D3 D2, F2 R2 B2 L2, F3 R3 B3 L3',
  'L': 'L0 L1 L3 L2, U0 F0 D0 B3, U2 F2 D2 B1',
  'R': 'R0 R1 R3 R2, U1 B2 D1 F1, U3 B0 D3 F3',
  'F': 'F0 F1 F3 F2, U2 R0 D1 L3, U3 R2 D0 L1',
  'B': 'B0 B1 B3 B2, U0 L2 D3 R1, U1 L0 D2 R3',
}
# The corners, their stickers clockwise from that of U or D. The last is the one that the solver holds fixed.
_CORNERS = ('U3 R0 F1', 'U2 F0 L1', 'U0 L0 B1', 'U1 B0 R1', 'D1 F3 R2', 'D0 L3 F2', 'D3 R3 B2', 'D2 B3 L2')
# Turns that leave the last corner where it is; every other turn is one of them and a rotation of the whole cube.
_FIXING_TURNS = ('U', "U'", 'R', "R'", 'F', "F'")
_POSITIONS = math.factorial(7) * 3**6

_LINE = re.compile(rf'([{FACES}]): ([{COLOURS}]) ([{COLOURS}]) / ([{COLOURS}]) ([{COLOURS}])')

# The picture: the net, stickers of 16 x 16 pixels.
_TILE = 16
_NET = {'U': (0, 2), 'L': (2, 0), 'F': (2, 2), 'R': (2, 4), 'B': (2, 6), 'D': (4, 2)}  # top left: row, column
_RGB = ((245, 245, 245), (250, 215, 40), (245, 130, 30), (200, 30, 45), (30, 150, 75), (30, 80, 190))
_LINE_RGB = (20, 20, 20)
_GROUND_RGB = (120, 120, 120)


@struct.dataclass
class State(base.State):
  """A cube.

  Attributes:
    stickers: i8[24], index into `COLOURS` of the sticker at each place.
  """

  stickers: jax.Array


@dataclasses.dataclass(frozen=True)
class Rubik2x2(base.Environment):
  """Turn faces by quarters until each has one colour: 1 for that, 0 otherwise.

  The cube may be solved in any of its 24 orientations. Up to those, D does what U does: one layer is turned one way, or
  the other layer the other way. So U is undone by U' and by D', and likewise with the other faces.

  Actions are `U` (clockwise as seen from outside), `U'` (the other way), and so on. Every turn is effective.

  Attributes:
    scramble_depth: random quarter turns that make a level from the solved cube, 1 to 14. None undoes the one before,
      and scrambles that come back to a solved cube are drawn again. The way to the solved cube may be shorter.
    exact_distance: the level is `scramble_depth` turns from solved, no fewer: drawn from all positions of which that is
      true, each as likely, and held in one of the 24 orientations, each as likely.
  """

  name: ClassVar[str] = 'rubik_2x2'
  action_names: ClassVar[tuple[str, ...]] = tuple(face + prime for face in FACES for prime in ('', "'"))

  scramble_depth: int = 1
  exact_distance: bool = False

  def __post_init__(self):
    depth = self.scramble_depth
    if not isinstance(depth, numbers.Integral) or isinstance(depth, bool) or not 1 <= depth <= DIAMETER:
      raise ValueError(f'rubik_2x2: scramble_depth={depth!r}; allowed: integers from 1 to {DIAMETER}')
    if not isinstance(self.exact_distance, (bool, np.bool_)):
      raise ValueError(f'rubik_2x2: exact_distance={self.exact_distance!r}; allowed: True, False')

  def check_budget(self, budget: base.Budget) -> None:
    """Raises ValueError where no level can be solved within the budget."""
    actions = min(budget.max_actions, budget.max_turns * budget.max_actions_per_turn)
    if self.exact_distance and actions < self.scramble_depth:
      raise ValueError(
        f'rubik_2x2: scramble_depth={self.scramble_depth}; allowed: at most {actions} with exact_distance=True, since '
        f'max_actions={budget.max_actions} and max_turns={budget.max_turns} of '
        f'max_actions_per_turn={budget.max_actions_per_turn} let no more turns be made'
      )

  # -- traced, one instance ------------------------------------------------------------------------------------------

  def reset(self, key: jax.Array) -> State:
    """A level from a key; never solved."""
    stickers = self._at_exact_distance(key) if self.exact_distance else self._scrambled(key)
    no = jnp.bool_(False)
    return State(done=no, success=no, stickers=stickers)

  def _scrambled(self, key: jax.Array) -> jax.Array:
    """i8[24] after random turns; drawn again as long as they come back to a solved cube."""
    turns, followers, solved = jnp.asarray(_turns()), jnp.asarray(_followers()), jnp.asarray(_solved())
    choices = jnp.array([12] + [10] * (self.scramble_depth - 1))

    def draw(carry):
      key, _ = carry
      key, key_draw = jax.random.split(key)
      first, *others = jax.random.randint(key_draw, choices.shape, 0, choices)
      stickers, last = solved[turns[first]], first
      for other in others:
        last = followers[last, other]
        stickers = stickers[turns[last]]
      return key, stickers

    return jax.lax.while_loop(lambda carry: _is_solved(carry[1]), draw, (key, solved))[1]

  def _at_exact_distance(self, key: jax.Array) -> jax.Array:
    """i8[24], any position at that distance in any orientation."""
    positions = _positions_at(self.scramble_depth)
    which, orientation = jax.random.randint(key, (2,), 0, jnp.array([len(positions), 24]))
    order, twist = jnp.divmod(jnp.asarray(positions)[which], 3**6)
    corner = jnp.asarray(_orders())[order]  # [8], the corner at each place
    shift = (jnp.asarray(_twists())[twist][:, None] + jnp.arange(3)) % 3  # [8, 3]
    places = jnp.take_along_axis(jnp.asarray(_corners()), shift, axis=1)
    stickers = jnp.zeros((24,), jnp.int8).at[places].set(jnp.asarray(_solved()[_corners()])[corner])
    return stickers[jnp.asarray(_rotations())[orientation]]

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    """One quarter turn; the game has no chance in it."""
    del key
    stickers = state.stickers[jnp.asarray(_turns())[action]]
    solved = _is_solved(stickers)
    out = base.StepOutput(reward=solved.astype(jnp.float32), effective=(stickers != state.stickers).any())
    return state.replace(stickers=stickers, done=solved, success=solved), out

  # -- text ----------------------------------------------------------------------------------------------------------

  def rules(self) -> str:
    """The game in a few sentences, and how the cube is told."""
    return (
      "You hold a 2 x 2 x 2 Rubik's cube with the faces U (up), D (down), L (left), R (right), F (front) and B (back). "
      'Turn faces until each face has one colour, no matter which: that earns 1 point and ends the game. '
      "An action turns one face by a quarter: U turns the face U clockwise as seen from outside the cube, U' the other "
      'way, and so with the other faces. '
      'Each face is told as its upper row / its lower row, seen from outside: L, F, R and B with U above them, '
      'U with B above it, D with F above it.'
    )

  def legend(self) -> dict[str, str]:
    """Letters of the colours."""
    return dict(zip(COLOURS, _COLOUR_NAMES, strict=True))

  def parse_action(self, text: str) -> int | None:
    """The turn that a text names, or None; letter case, blanks and the kind of apostrophe do not matter."""
    return super().parse_action(re.sub('[\u2019\u2032`]', "'", re.sub(r'\s', '', text)))

  # -- host, batched ---------------------------------------------------------------------------------------------------

  def render(self, states: State) -> list[str]:
    """A line a face, upper row / lower row, for states with leaves [N, ...]."""
    cubes = np.array(list(COLOURS))[np.asarray(states.stickers)].reshape(-1, 6, 4).tolist()
    return [
      '\n'.join(f'{face}: {a} {b} / {c} {d}' for face, (a, b, c, d) in zip(FACES, cube, strict=True)) for cube in cubes
    ]

  def render_rgb(self, state: State) -> np.ndarray:
    """The net of one cube, u8[96, 128, 3], stickers of 16 x 16 pixels."""
    picture = np.full((6 * _TILE, 8 * _TILE, 3), _GROUND_RGB, np.uint8)
    for place, colour in enumerate(np.asarray(state.stickers).tolist()):
      face, i = divmod(place, 4)
      row, col = (_TILE * (x + y) for x, y in zip(_NET[FACES[face]], divmod(i, 2), strict=True))
      picture[row : row + _TILE, col : col + _TILE] = _LINE_RGB
      picture[row + 1 : row + _TILE - 1, col + 1 : col + _TILE - 1] = _RGB[colour]
    return picture

  def from_text(self, text: str) -> State:
    """One state (no batch axis) from an observation.

    Raises:
      ValueError: the text is not of the form that `render` writes, or no turns of a solved cube lead there.
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    if len(lines) != 6:
      raise ValueError(f'rubik_2x2: the text has {len(lines)} lines, must be 6, one a face')
    stickers = []
    for face, line in zip(FACES, lines, strict=True):
      match = _LINE.fullmatch(line)
      if match is None or match[1] != face:
        raise ValueError(f'rubik_2x2: {line!r} must be like "{face}: W W / W W", with the letters {COLOURS}')
      stickers += [COLOURS.index(letter) for letter in match.groups()[1:]]
    stickers = np.array(stickers, np.int8)
    corner, twist = _corners_of(stickers[None])
    whole = np.array_equal(np.sort(corner[0]), np.arange(8))
    turned = np.take_along_axis(stickers[_corners()], (twist[0][:, None] + np.arange(3)) % 3, axis=1)  # [8, 3]
    if not whole or not np.array_equal(turned, _solved()[_corners()][corner[0]]):
      raise ValueError('rubik_2x2: the stickers are not those of the 8 corners of a cube')
    if twist.sum() % 3:
      raise ValueError('rubik_2x2: no turns lead to this cube: one of its corners is twisted')
    solved = np.asarray(_is_solved(stickers))
    return State(done=solved, success=solved, stickers=stickers)

  def rationale(self, states: State) -> list[str]:
    """Which faces have one colour already, and which single turn solves the cube, if one does."""
    stickers = np.asarray(states.stickers)
    whole = (stickers.reshape(-1, 6, 4) == stickers.reshape(-1, 6, 4)[:, :, :1]).all(axis=2)  # [N, 6]
    solves = _is_solved(stickers[:, _turns()])  # [N, 12]
    thoughts = []
    for faces, turns in zip(whole, solves, strict=True):
      names = ', '.join(face for face, one in zip(FACES, faces, strict=True) if one)
      thought = f'Faces of one colour: {names}.' if names else 'No face has one colour.'
      if faces.all():
        thought += ' The cube is solved.'
      elif turns.any():
        thought += f' {self.action_names[int(turns.argmax())]} solves the cube.'
      else:
        thought += ' It takes more than one turn.'
      thoughts.append(thought)
    return thoughts

  # -- solver ----------------------------------------------------------------------------------------------------------

  def distance(self, states: State, most: int = DIAMETER) -> np.ndarray:
    """i8[N], the fewest quarter turns to a solved cube, in any orientation; -1 where that is more than `most`."""
    return distance_table(most)[_position(np.asarray(states.stickers))]

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> Solution:
    """Shortest play, by a table of distances.

    Args:
      states: batched states with NumPy leaves [N, ...].
      budget: turns and actions of an episode.
      discount: changes nothing, since the plans are the shortest.
    """
    del discount
    most = min(budget.max_actions, budget.max_turns * budget.max_actions_per_turn)
    near = self.distance(states, min(most, DIAMETER)) >= 0
    return Solution(success=np.where(states.done, states.success, near).astype(np.float32), env=self, budget=budget)


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
  """The best play on N cubes: one of the shortest ways to a solved one.

  Attributes:
    success: f32[N], 1 where that fits into the budget, else 0.
    env: the cubes' environment.
    budget: what was solved for.
  """

  success: np.ndarray
  env: Rubik2x2
  budget: base.Budget

  def plan(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[int]]:
    """The next turn's actions of a shortest way to a solved cube; see `base.Solution`.

    Where that is further than what is left of the budget, the plan goes nearer; where it is further than the whole
    budget, it is one action.

    Raises:
      ValueError: more turns or actions are left than the budget had.
    """
    left = np.minimum(self._left(states, turns_left, actions_left), self.budget.max_actions_per_turn)
    distance, stickers = self._distance(states), np.asarray(states.stickers)
    plans = [[0] if m > 0 and d < 0 else [] for m, d in zip(left, distance, strict=True)]
    left = np.minimum(left, distance)
    for k in range(int(left.max(initial=0))):
      moving = np.flatnonzero(left > k)
      after = stickers[moving][:, _turns()]  # [n, 12, 24]
      nearer = self._distance(states.replace(stickers=after.reshape(-1, 24))).reshape(-1, 12)
      action = (nearer == distance[moving, None] - 1).argmax(axis=1)
      for i, a in zip(moving.tolist(), action.tolist(), strict=True):
        plans[i].append(a)
      stickers, distance = stickers.copy(), distance.copy()
      stickers[moving], distance[moving] = after[np.arange(len(moving)), action], distance[moving] - 1
    return plans

  def value(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    """f32[N], 1 where a solved cube is within what is left of the budget, else 0, also when the episode is over.

    Raises:
      ValueError: see `plan`.
    """
    left = self._left(states, turns_left, actions_left)
    distance = self._distance(states)
    return ((distance > 0) & (distance <= left)).astype(np.float32)

  def _distance(self, states: State) -> np.ndarray:
    """i8[N], -1 where it is beyond the budget."""
    most = min(self.budget.max_actions, self.budget.max_turns * self.budget.max_actions_per_turn)
    return self.env.distance(states, min(most, DIAMETER))

  def _left(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    """i64[N], actions that can still be made."""
    n = len(np.asarray(states.done))
    turns, actions = (np.broadcast_to(np.asarray(x, np.int64), (n,)) for x in (turns_left, actions_left))
    for name, left, most in (
      ('turns_left', turns, self.budget.max_turns),
      ('actions_left', actions, self.budget.max_actions),
    ):
      if n and left.max() > most:
        raise ValueError(f'rubik_2x2: {name}={left.max()}; allowed: at most {most}, the budget that was solved for')
    most = np.minimum(actions, turns * self.budget.max_actions_per_turn)
    return np.where(states.done, 0, np.maximum(most, 0))


# -- the cube ----------------------------------------------------------------------------------------------------------


def _is_solved(stickers):
  """bool[...], each face has one colour, from [..., 24]; for NumPy and JAX arrays."""
  faces = stickers.reshape(*stickers.shape[:-1], 6, 4)
  return (faces == faces[..., :1]).all(axis=(-2, -1))


def _solved() -> np.ndarray:
  """i8[24], each face in its own colour."""
  return np.repeat(np.arange(6, dtype=np.int8), 4)


def _place(name: str) -> int:
  """The place of a sticker, such as 5 of 'D1'."""
  return 4 * FACES.index(name[0]) + int(name[1])


@functools.cache
def _turns() -> np.ndarray:
  """i32[12, 24], where the sticker at each place comes from, for the turns in the order of `action_names`."""
  turns = np.tile(np.arange(24, dtype=np.int32), (12, 1))
  for face, cycles in _CYCLES.items():
    clockwise = turns[2 * FACES.index(face)]
    for cycle in cycles.split(', '):
      places = [_place(name) for name in cycle.split()]
      clockwise[places[1:] + places[:1]] = places
    turns[2 * FACES.index(face) + 1] = np.argsort(clockwise)
  return turns


@functools.cache
def _followers() -> np.ndarray:
  """i32[12, 10], the turns that do not undo a turn: not the other way round on its axis."""
  return np.array([[b for b in range(12) if a // 4 != b // 4 or a % 2 == b % 2] for a in range(12)], np.int32)


@functools.cache
def _rotations() -> np.ndarray:
  """i32[24, 24], the rotations of the whole cube, as `_turns`: two opposite faces turned alike, in any sequence."""
  turns = _turns()
  steps = [turns[2 * FACES.index(a)][turns[2 * FACES.index(b) + 1]] for a, b in ('UD', 'RL')]
  found = [tuple(range(24))]
  for rotation in found:
    for step in steps:
      after = tuple(np.array(rotation)[step].tolist())
      if after not in found:
        found.append(after)
  return np.array(found, np.int32)


# -- positions modulo rotation: the last corner is held fixed, the others are in an order and have twists --------------


@functools.cache
def _corners() -> np.ndarray:
  """i64[8, 3], places of the stickers of the corners."""
  return np.array([[_place(name) for name in corner.split()] for corner in _CORNERS])


def _corners_of(stickers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """Which corner is at each place, and its twist: where, of 0 to 2, its U or D sticker is; each i64[N, 8].

  Where three stickers are those of no corner, the corner is -1.
  """
  shown = stickers[:, _corners()]  # [N, 8, 3]
  kind = np.full(64, -1)
  kind[(1 << _solved()[_corners()].astype(np.int64)).sum(axis=1)] = np.arange(8)
  bits = np.bitwise_or.reduce(1 << shown.astype(np.int64), axis=2)
  return kind[bits], (shown < 2).argmax(axis=2)


@functools.cache
def _orders() -> np.ndarray:
  """i8[5040, 8], the corner at each place: the permutations of the first seven in lexicographic order."""
  orders = np.array(list(itertools.permutations(range(7))), np.int8)
  return np.pad(orders, ((0, 0), (0, 1)), constant_values=7)


@functools.cache
def _twists() -> np.ndarray:
  """i8[729, 8], the twist at each place: six free ones, as digits, and the seventh that makes the sum 0 modulo 3."""
  free = np.stack(np.unravel_index(np.arange(3**6), (3,) * 6), axis=1)
  return np.column_stack([free, -free.sum(axis=1) % 3, np.zeros(3**6)]).astype(np.int8)


def _order_index(orders: np.ndarray) -> np.ndarray:
  """Rows of `_orders` from [N, 8]: each place counts the later places with lower corners."""
  index = np.zeros(len(orders), np.int64)
  for i in range(7):
    index = index * (7 - i) + (orders[:, i + 1 : 7] < orders[:, i : i + 1]).sum(axis=1)
  return index


def _twist_index(twists: np.ndarray) -> np.ndarray:
  """Rows of `_twists` from [N, 8]."""
  return twists[:, :6].astype(np.int64) @ 3 ** np.arange(5, -1, -1)


def _position(stickers: np.ndarray) -> np.ndarray:
  """i64[N], the number of a cube's position modulo rotation, 0 for the solved one, from i8[N, 24]."""
  last, rotations = _corners()[7], _rotations()
  held = stickers[:, rotations[:, last]]  # [N, 24, 3], what is at the last corner's place after each rotation
  rotation = (held == _solved()[last]).all(axis=2).argmax(axis=1)
  corner, twist = _corners_of(np.take_along_axis(stickers, rotations[rotation], axis=1))
  return _order_index(corner) * 3**6 + _twist_index(twist)


@functools.lru_cache(maxsize=2)
def distance_table(depth: int) -> np.ndarray:
  """Quarter turns from solved for every position modulo rotation, by breadth-first search.

  Args:
    depth: how far to search, at most `DIAMETER`, which takes about half a second; 6 takes a hundredth.

  Returns:
    i8[3674160], -1 for positions that are further away. Kept for the two depths that were asked for last.
  """
  corner_at = np.empty(24, np.int64)
  corner_at[_corners()] = np.arange(8)[:, None]
  place_in_corner = np.empty(24, np.int64)
  place_in_corner[_corners()] = np.arange(3)
  after = []
  for name in _FIXING_TURNS:
    # Of each corner, the place from which its first sticker comes says where the corner comes from, and its new twist.
    source = _turns()[Rubik2x2.action_names.index(name)][_corners()[:, 0]]
    orders = _orders()[:, corner_at[source]]
    twists = (_twists()[:, corner_at[source]] - place_in_corner[source]) % 3
    after.append((_order_index(orders), _twist_index(twists)))

  distance = np.full(_POSITIONS, -1, np.int8)
  distance[0] = 0
  newest = np.zeros(1, np.int64)
  for d in range(1, depth + 1):
    order, twist = np.divmod(newest, 3**6)
    for order_after, twist_after in after:
      reached = order_after[order] * 3**6 + twist_after[twist]
      distance[reached[distance[reached] < 0]] = d
    newest = np.flatnonzero(distance == d)
  distance.setflags(write=False)
  return distance


@functools.lru_cache(maxsize=2)
def _positions_at(depth: int) -> np.ndarray:
  """i32[M], the positions at exactly that distance."""
  return np.flatnonzero(distance_table(depth) == depth).astype(np.int32)
