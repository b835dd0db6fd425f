"""The 2 x 2 x 2 Rubik's cube: twelve quarter turns; levels are scrambles, or positions at an exact distance."""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base
from ragen_jax.envs.drawing import rubik as drawing
from ragen_jax.envs.options import check_flag, check_integer
from ragen_jax.envs.rubik_cube import (
  FACES,
  TURNS,
  corner_orders,
  corner_places,
  corner_twists,
  followers,
  is_solved,
  read_corners,
  rotation_sources,
  solved_stickers,
  turn_sources,
)
from ragen_jax.envs.solvers import rubik as solver

# Colours of the faces of the solved cube, in the order of `FACES`, and their names.
COLOURS = 'WYORGB'
_COLOUR_NAMES = ('white', 'yellow', 'orange', 'red', 'green', 'blue')

_LINE = re.compile(rf'([{FACES}]): ([{COLOURS}]) ([{COLOURS}]) / ([{COLOURS}]) ([{COLOURS}])')


@struct.dataclass
class State(base.State):
  """A cube: `stickers`, i8[24], has the index into `COLOURS` of the sticker at each place."""

  stickers: jax.Array


@dataclasses.dataclass(frozen=True)
class Rubik2x2(base.Environment):
  """Turn faces by quarter turns until each face has one colour: reward 1 then, 0 otherwise.

  The cube may be solved in any of its 24 orientations. Up to these orientations, D has the same effect as U, so both U'
  and D' undo U. The same holds for the other pairs of opposite faces.

  Actions are `U` (clockwise as seen from outside), `U'` (the other way), and so on. Every turn is effective.

  Attributes:
    scramble_depth: number of random quarter turns from the solved cube to a level, 1 to 14. No turn undoes the one
      before it, and scrambles that end in a solved cube are drawn again. The shortest solution may be shorter.
    exact_distance: whether the shortest solution of a level has exactly `scramble_depth` turns; the level is then drawn
      uniformly from all such positions and all 24 orientations.
  """

  name: ClassVar[str] = 'rubik_2x2'
  action_names: ClassVar[tuple[str, ...]] = TURNS

  scramble_depth: int = 1
  exact_distance: bool = False

  def __post_init__(self):
    check_integer('rubik_2x2', 'scramble_depth', self.scramble_depth, 1, solver.DIAMETER)
    check_flag('rubik_2x2', 'exact_distance', self.exact_distance)

  def check_budget(self, budget: base.Budget) -> None:
    actions = budget.most_actions
    if self.exact_distance and actions < self.scramble_depth:
      raise ValueError(
        f'rubik_2x2: scramble_depth={self.scramble_depth}; allowed: at most {actions} with exact_distance=True, since '
        f'max_actions={budget.max_actions} and max_turns={budget.max_turns} of '
        f'max_actions_per_turn={budget.max_actions_per_turn} allow no more turns'
      )

  def reset(self, key: jax.Array) -> State:
    stickers = self._at_exact_distance(key) if self.exact_distance else self._scrambled(key)
    no = jnp.bool_(False)
    return State(done=no, success=no, stickers=stickers)

  def _scrambled(self, key: jax.Array) -> jax.Array:
    """i8[24] after random turns, drawn again while they end in a solved cube."""
    turns, follow, solved = jnp.asarray(turn_sources()), jnp.asarray(followers()), jnp.asarray(solved_stickers())
    choices = jnp.array([12] + [10] * (self.scramble_depth - 1))

    def draw(carry):
      key, _ = carry
      key, key_draw = jax.random.split(key)
      first, *others = jax.random.randint(key_draw, choices.shape, 0, choices)
      stickers, last = solved[turns[first]], first
      for other in others:
        last = follow[last, other]
        stickers = stickers[turns[last]]
      return key, stickers

    return jax.lax.while_loop(lambda carry: is_solved(carry[1]), draw, (key, solved))[1]

  def _at_exact_distance(self, key: jax.Array) -> jax.Array:
    """i8[24], a random position at the exact distance in a random orientation."""
    positions = solver.positions_at(self.scramble_depth)
    which, orientation = jax.random.randint(key, (2,), 0, jnp.array([len(positions), 24]))
    order, twist = jnp.divmod(jnp.asarray(positions)[which], 3**6)
    corner = jnp.asarray(corner_orders())[order]  # [8], the corner at each place
    shift = (jnp.asarray(corner_twists())[twist][:, None] + jnp.arange(3)) % 3  # [8, 3]
    places = jnp.take_along_axis(jnp.asarray(corner_places()), shift, axis=1)
    stickers = jnp.zeros((24,), jnp.int8).at[places].set(jnp.asarray(solved_stickers()[corner_places()])[corner])
    return stickers[jnp.asarray(rotation_sources())[orientation]]

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    del key
    stickers = state.stickers[jnp.asarray(turn_sources())[action]]
    solved = is_solved(stickers)
    out = base.StepOutput(reward=solved.astype(jnp.float32), effective=(stickers != state.stickers).any())
    return state.replace(stickers=stickers, done=solved, success=solved), out

  @property
  def image_grid(self) -> tuple[int, int]:
    return drawing.GRID

  def cells(self, state: State) -> jax.Array:
    return drawing.cells(state.stickers)

  def tiles(self, tile: int) -> np.ndarray:
    return drawing.tiles(tile)

  def rules(self) -> str:
    return (
      "You hold a 2 x 2 x 2 Rubik's cube with the faces U (up), D (down), L (left), R (right), F (front) and B (back). "
      'Turn faces until each face has one colour, no matter which: that earns 1 point and ends the game. '
      "An action turns one face by a quarter: U turns the face U clockwise as seen from outside the cube, U' the other "
      'way, and so with the other faces. '
      'Each face is told as its upper row / its lower row, seen from outside: L, F, R and B with U above them, '
      'U with B above it, D with F above it.'
    )

  def legend(self) -> dict[str, str]:
    return dict(zip(COLOURS, _COLOUR_NAMES, strict=True))

  def parse_action(self, text: str) -> int | None:
    """Also ignores blanks within the text and the kind of apostrophe."""
    return super().parse_action(re.sub('[\u2019\u2032`]', "'", re.sub(r'\s', '', text)))

  def render(self, states: State) -> list[str]:
    """One line for each face, upper row / lower row."""
    cubes = np.array(list(COLOURS))[np.asarray(states.stickers)].reshape(-1, 6, 4).tolist()
    return [
      '\n'.join(f'{face}: {a} {b} / {c} {d}' for face, (a, b, c, d) in zip(FACES, cube, strict=True)) for cube in cubes
    ]

  def from_text(self, text: str) -> State:
    """Also raises ValueError if no turns lead from a solved cube to this one."""
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
    corner, twist = read_corners(stickers[None])
    whole = np.array_equal(np.sort(corner[0]), np.arange(8))
    turned = np.take_along_axis(stickers[corner_places()], (twist[0][:, None] + np.arange(3)) % 3, axis=1)  # [8, 3]
    if not whole or not np.array_equal(turned, solved_stickers()[corner_places()][corner[0]]):
      raise ValueError('rubik_2x2: the stickers are not those of the 8 corners of a cube')
    if twist.sum() % 3:
      raise ValueError('rubik_2x2: no turns lead to this cube: one of its corners is twisted')
    solved = np.asarray(is_solved(stickers))
    return State(done=solved, success=solved, stickers=stickers)

  def rationale(self, states: State) -> list[str]:
    """The faces that have one colour already, and a single turn that solves the cube, if there is one."""
    stickers = np.asarray(states.stickers)
    whole = (stickers.reshape(-1, 6, 4) == stickers.reshape(-1, 6, 4)[:, :, :1]).all(axis=2)  # [N, 6]
    solves = is_solved(stickers[:, turn_sources()])  # [N, 12]
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

  def distance(self, states: State, most: int = solver.DIAMETER) -> np.ndarray:
    """i8[N], the fewest quarter turns to a solved cube, in any orientation; -1 if that is more than `most`."""
    return solver.distances(np.asarray(states.stickers), most)

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> solver.RubikSolution:
    """Shortest play at every discount, by a table of distances."""
    del discount
    near = self.distance(states, budget.most_actions) >= 0
    return solver.RubikSolution(np.where(states.done, states.success, near).astype(np.float32), budget)
