"""FrozenLake: a slippery walk over random ice to a goal, as in Gymnasium's toy text game.

The rules are those of `gymnasium.envs.toy_text.frozen_lake`; levels have a random start and goal, as in RAGEN.
Squares are numbered row by row from the top left, `square = row * size + column`.
"""

from __future__ import annotations

import dataclasses
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base
from ragen_jax.envs.drawing import frozen_lake as drawing
from ragen_jax.envs.options import check_choice, check_flag, check_integer, is_number
from ragen_jax.envs.scenes import Scene, make_scenes
from ragen_jax.envs.solvers import frozen_lake as solver

LEFT, DOWN, RIGHT, UP = range(4)

_MEANINGS = ('player', 'ice', 'hole', 'goal', 'player in a hole', 'player on the goal')
_DESC_LETTERS = 'SFHG'


@struct.dataclass
class State(base.State):
  """A lake and the player's square.

  Attributes:
    holes: bool[size, size], True where the ice has a hole.
    start: i32[], the square where the episode began.
    goal: i32[], the square to reach.
    player: i32[], the player's square.
  """

  holes: jax.Array
  start: jax.Array
  goal: jax.Array
  player: jax.Array


@dataclasses.dataclass(frozen=True)
class FrozenLake(base.Environment):
  """Walk over the ice to the goal: reward 1 at the goal, 0 otherwise; a hole ends the game.

  Actions: Left, Down, Right, Up are 0, 1, 2, 3, as in Gymnasium. One is effective if it changes the square.

  Attributes:
    size: rows and columns of the lake, at least 2.
    p: probability that a square of a new level is ice; start and goal always are.
    is_slippery: whether a move can slip sideways.
    success_rate: on slippery ice, the probability that a move goes in its direction; the two directions at right angles
      share the rest. It has no effect without `is_slippery`, as in Gymnasium.
    observation: 'grid' (symbols), 'spaced' (with a blank between them, see `base.board_texts`), 'coord' (a list of
      coordinates) or 'grid_coord' (symbols and coordinates).
    symbols: six characters for player, ice, hole, goal, player in a hole, player on the goal.
  """

  name: ClassVar[str] = 'frozen_lake'
  action_names: ClassVar[tuple[str, ...]] = ('Left', 'Down', 'Right', 'Up')
  scene_kinds: ClassVar[tuple[str, ...]] = ('goal', 'hole')

  size: int = 4
  p: float = 0.8
  is_slippery: bool = True
  success_rate: float = 1 / 3
  observation: str = 'grid'
  symbols: str = 'P_OGX√'

  def __post_init__(self):
    check_integer('frozen_lake', 'size', self.size, 2, 64)
    for field in ('p', 'success_rate'):
      value = getattr(self, field)
      if not is_number(value) or not 0 <= value <= 1:
        raise ValueError(f'frozen_lake: {field}={value!r}; allowed: numbers from 0 to 1')
    check_flag('frozen_lake', 'is_slippery', self.is_slippery)
    check_choice('frozen_lake', 'observation', self.observation, base.BOARD_FORMS)
    symbols = self.symbols
    different = isinstance(symbols, str) and len(symbols) == 6 == len(set(symbols))
    if not different or not symbols.isprintable() or re.search(r'[\s<|]', symbols):
      raise ValueError(
        f'frozen_lake: symbols={symbols!r}; allowed: 6 different characters that can be printed, none blank, < or |'
      )

  @property
  def slip(self) -> tuple[float, float, float]:
    """Probabilities that an action moves in direction action - 1, action, action + 1 (mod 4)."""
    if not self.is_slippery:
      return 0.0, 1.0, 0.0
    aside = (1 - self.success_rate) / 2
    return aside, float(self.success_rate), aside

  def reset(self, key: jax.Array) -> State:
    """A level from a key: ice with probability p, start and goal anywhere, redrawn until a path over ice joins them."""

    def draw(carry):
      key, _, _, _, _ = carry
      key, key_ice, key_start, key_goal = jax.random.split(key, 4)
      squares = self.size * self.size
      start = jax.random.randint(key_start, (), 0, squares, jnp.int32)
      goal = (start + jax.random.randint(key_goal, (), 1, squares, jnp.int32)) % squares
      ice = jax.random.bernoulli(key_ice, self.p, (squares,))
      ice = (ice | (jnp.arange(squares) == start) | (jnp.arange(squares) == goal)).reshape(self.size, self.size)
      return key, ice, start, goal, _reached(ice, start).reshape(-1)[goal]

    carry = key, jnp.zeros((self.size, self.size), bool), jnp.int32(0), jnp.int32(0), jnp.bool_(False)
    _, ice, start, goal, _ = jax.lax.while_loop(lambda carry: ~carry[-1], draw, carry)
    no = jnp.bool_(False)
    return State(done=no, success=no, holes=~ice, start=start, goal=goal, player=start)

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    direction = action
    if self.is_slippery:
      aside, ahead, _ = self.slip
      u = jax.random.uniform(key)
      direction = (action - 1 + (u >= aside) + (u >= aside + ahead)) % 4
    player = _neighbour(state.player, direction, self.size).astype(jnp.int32)
    success = player == state.goal
    done = success | jnp.asarray(state.holes).reshape(-1)[player]
    out = base.StepOutput(reward=success.astype(jnp.float32), effective=player != state.player)
    return state.replace(done=done, success=success, player=player), out

  @property
  def image_grid(self) -> tuple[int, int]:
    return self.size, self.size

  def cells(self, state: State) -> jax.Array:
    return drawing.cells(state.holes, state.goal, state.player)

  def tiles(self, tile: int) -> np.ndarray:
    return drawing.tiles(tile)

  def rules(self) -> str:
    text = (
      f'You are on a frozen lake of {self.size} by {self.size} squares. Walk to the goal and avoid the holes. '
      'Reaching the goal earns 1 point and ends the game; falling into a hole ends it with 0 points. '
      'A move goes one square in its direction; at the edge you stay in place.'
    )
    aside, ahead, _ = self.slip
    if aside > 0:
      text += (
        f' The ice is slippery: a move goes in its direction with probability {ahead:.3g}, '
        f'and in each of the two directions at right angles with probability {aside:.3g}.'
      )
    if 'coord' in self.observation:
      last = self.size - 1
      text += (
        f' A square is written (row, column), from (0, 0) at the top left to ({last}, {last}) at the bottom right.'
      )
    return text

  def legend(self) -> dict[str, str]:
    return {} if self.observation == 'coord' else dict(zip(self.symbols, _MEANINGS, strict=True))

  def render(self, states: State) -> list[str]:
    return base.board_texts(self.observation, lambda: self._grids(states), lambda: self._coordinates(states))

  def _grids(self, states: State) -> list[str]:
    holes = np.asarray(states.holes)  # [N, size, size]
    goal, player = np.asarray(states.goal), np.asarray(states.player)
    n, size = len(holes), self.size
    code = np.array([ord(symbol) for symbol in self.symbols], np.uint32)
    # A text is a row of code points: `size` times `size` symbols and a line break, without the last break.
    text = np.full((n, size, size + 1), ord('\n'), np.uint32)
    text[:, :, :size] = np.where(holes, code[2], code[1])
    text = text.reshape(n, size * (size + 1))
    rows = np.arange(n)
    text[rows, goal + goal // size] = code[3]
    in_hole = holes.reshape(n, size * size)[rows, player]
    text[rows, player + player // size] = np.where(player == goal, code[5], np.where(in_hole, code[4], code[0]))
    text = np.ascontiguousarray(text[:, :-1])
    return text.view(f'U{text.shape[1]}')[:, 0].tolist()

  def _coordinates(self, states: State) -> list[str]:
    holes = np.asarray(states.holes)
    n, size = len(holes), self.size
    names = [f'({row}, {column})' for row in range(size) for column in range(size)]
    holes_of = [[] for _ in range(n)]
    for i, square in zip(*(x.tolist() for x in np.nonzero(holes.reshape(n, size * size))), strict=True):
      holes_of[i].append(names[square])
    squares = (np.asarray(x).tolist() for x in (states.start, states.goal, states.player))
    return [
      f'Board: {size} rows, {size} columns\nStart: {names[start]}\nGoal: {names[goal]}\nPlayer: {names[player]}\n'
      f'Holes: {", ".join(hole) or "none"}'
      for start, goal, player, hole in zip(*squares, holes_of, strict=True)
    ]

  def scenes(self, states: State) -> list[Scene]:
    goals = np.arange(self.size**2) == np.asarray(states.goal)[:, None]
    player = np.stack(np.divmod(np.asarray(states.player), self.size), axis=1)
    return make_scenes(player, {'goal': goals.reshape(-1, self.size, self.size), 'hole': np.asarray(states.holes)})

  def rationale(self, states: State) -> list[str]:
    """Where the player and the goal are, as (row, column), and on which sides of the player there is a hole."""
    player, goal = np.asarray(states.player), np.asarray(states.goal)
    holes = np.asarray(states.holes).reshape(len(player), self.size * self.size)
    beside = np.stack([holes[np.arange(len(player)), _neighbour(player, a, self.size)] for a in range(4)], axis=1)
    thoughts = []
    for square, target, sides in zip(player.tolist(), goal.tolist(), beside, strict=True):
      names = ', '.join(name for name, hole in zip(self.action_names, sides, strict=True) if hole)
      danger = f'holes beside me: {names}.' if names else 'no hole beside me.'
      thoughts.append(f'I am at {divmod(square, self.size)}, the goal is at {divmod(target, self.size)}; {danger}')
    return thoughts

  def from_text(self, text: str) -> State:
    """The state of an observation. A grid does not show the start; it is then the player's square."""
    text = '\n'.join(line.strip() for line in text.strip().splitlines())
    if self.observation == 'spaced':
      text = '\n'.join(' '.join(line.split()) for line in text.splitlines())
    grid = text.replace(' ', '') if self.observation == 'spaced' else text
    state = self._from_coordinates(text) if 'coord' in self.observation else self._from_grid(grid)
    drawn = self.render(jax.tree.map(lambda leaf: leaf[None], state))[0]
    for i, (got, want) in enumerate(zip(text.splitlines(), drawn.splitlines(), strict=False), 1):
      if got != want:
        raise ValueError(f'frozen_lake: line {i} of the text is {got!r}, must be {want!r} by the other lines')
    if text != drawn:
      raise ValueError(f'frozen_lake: the text has {len(text.splitlines())} lines, must be {len(drawn.splitlines())}')
    return state

  def _from_grid(self, text: str) -> State:
    player, _, hole, goal, in_hole, on_goal = self.symbols
    board = self._board(text.splitlines(), self.symbols)
    players = np.flatnonzero(np.isin(board, (player, in_hole, on_goal)))
    goals = np.flatnonzero(np.isin(board, (goal, on_goal)))
    for what, found in (('player', players), ('goal', goals)):
      if len(found) != 1:
        raise ValueError(f'frozen_lake: the board has {len(found)} squares with a {what}, must be 1')
    return self._state(np.isin(board, (hole, in_hole)), players[0], goals[0], players[0])

  def _from_coordinates(self, text: str) -> State:
    squares = {}
    for field in ('Start', 'Goal', 'Player', 'Holes'):
      line = re.search(rf'^{field}: (.*)$', text, re.MULTILINE)
      if line is None:
        raise ValueError(f'frozen_lake: the text has no line that begins with {field + ": "!r}')
      pairs = [(int(row), int(column)) for row, column in re.findall(r'\((\d+), (\d+)\)', line[1])]
      if field != 'Holes' and len(pairs) != 1:
        raise ValueError(f'frozen_lake: {line[0]!r} has {len(pairs)} squares, must be 1')
      for pair in pairs:
        if max(pair) >= self.size:
          raise ValueError(f'frozen_lake: {line[0]!r} has {pair}, must be within ({self.size - 1}, {self.size - 1})')
      squares[field] = [row * self.size + column for row, column in pairs]
    holes = np.zeros(self.size * self.size, bool)
    holes[squares['Holes']] = True
    return self._state(holes, squares['Start'][0], squares['Goal'][0], squares['Player'][0])

  def from_desc(self, desc: list[str]) -> State:
    """Reads a fresh level (no batch axis) from a map of Gymnasium: S start, F ice, H hole, G goal.

    Raises:
      ValueError: the map has not `size` rows of `size` of these letters, or not one start and one goal.
    """
    board = self._board(desc, _DESC_LETTERS)
    start, goal = np.flatnonzero(board == 'S'), np.flatnonzero(board == 'G')
    for what, found in (('S', start), ('G', goal)):
      if len(found) != 1:
        raise ValueError(f'frozen_lake: the board has {len(found)} squares {what!r}, must be 1')
    return self._state(board == 'H', start[0], goal[0], start[0])

  def _board(self, lines: list[str], letters: str) -> np.ndarray:
    """The characters of `size` lines of `size` letters, [size * size]."""
    if len(lines) != self.size:
      raise ValueError(f'frozen_lake: the board has {len(lines)} rows, must be {self.size}')
    for i, line in enumerate(lines, 1):
      if len(line) != self.size or not set(line) <= set(letters):
        raise ValueError(f'frozen_lake: row {i} of the board is {line!r}, must be {self.size} of {letters!r}')
    return np.array(list(''.join(lines)))

  def _state(self, holes: np.ndarray, start: int, goal: int, player: int) -> State:
    if holes[goal] or (holes[start] and start != player):
      raise ValueError('frozen_lake: the start or the goal is a hole, must be ice')
    return State(
      done=np.asarray(player == goal or holes[player]),
      success=np.asarray(player == goal),
      holes=holes.reshape(self.size, self.size),
      start=np.asarray(start, np.int32),
      goal=np.asarray(goal, np.int32),
      player=np.asarray(player, np.int32),
    )

  def transition_probabilities(self, states: State) -> np.ndarray:
    """f32[..., S, 4, S], S = size * size; [s, a, t] is the probability that action a on square s ends on square t.

    The states may have any leading axes. Holes and the goal are never left.
    """
    return solver.transition_probabilities(self._moves, self.slip, self._live(states))

  @property
  def _moves(self) -> np.ndarray:
    """i64[S, 4], the square that each action leads to from each square if nothing slips."""
    return _neighbour(np.arange(self.size * self.size)[:, None], np.arange(4), self.size)

  def _live(self, states: State) -> np.ndarray:
    """bool[..., S], squares on which the game continues."""
    holes = np.asarray(states.holes)
    holes = holes.reshape(*holes.shape[:-2], self.size * self.size)
    return ~holes & (np.arange(self.size * self.size) != np.asarray(states.goal)[..., None])

  def naive_view(self) -> FrozenLake:
    """Ice that does not slip: its best play is the shortest path, however close to the holes."""
    return dataclasses.replace(self, is_slippery=False)

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> solver.FrozenLakeSolution:
    """Exact best play by dynamic programming, see envs/solvers/frozen_lake.py, from the current squares of the players.

    Raises:
      ValueError: the budget or the discount is out of range, or one turn has too many sequences of actions.
    """
    solver.check_solvable(self.size, budget, discount)
    states = jax.tree.map(np.asarray, states)
    return solver.FrozenLakeSolution(
      moves=self._moves,
      slip=self.slip,
      live=self._live(states),
      goal=states.goal,
      player=states.player,
      done=states.done,
      won=states.success,
      budget=budget,
      discount=discount,
    )


def _neighbour(square, direction, size: int):
  """The square one step away in a direction (Left, Down, Right, Up), or the same square at an edge; NumPy or JAX."""
  row = square // size + (direction == DOWN) * 1 - (direction == UP) * 1
  column = square % size + (direction == RIGHT) * 1 - (direction == LEFT) * 1
  return row.clip(0, size - 1) * size + column.clip(0, size - 1)


def _reached(ice: jax.Array, start: jax.Array) -> jax.Array:
  """bool[size, size], the squares that a path over ice joins with `start`, by flood fill."""

  def spread(carry):
    reached, _ = carry
    around = jnp.pad(reached, 1)
    wider = ice & (reached | around[:-2, 1:-1] | around[2:, 1:-1] | around[1:-1, :-2] | around[1:-1, 2:])
    return wider, (wider != reached).any()

  first = (jnp.arange(ice.size) == start).reshape(ice.shape)
  return jax.lax.while_loop(lambda carry: carry[1], spread, (first, jnp.bool_(True)))[0]
