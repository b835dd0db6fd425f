"""Sokoban: push every box onto a target. Levels are made from a key, with a solution, or read from a Boxoban file."""

from __future__ import annotations

import dataclasses
import functools
import pathlib
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, sokoban_levels
from ragen_jax.envs.drawing import sokoban as drawing
from ragen_jax.envs.options import is_integer
from ragen_jax.envs.scenes import Scene, make_scenes
from ragen_jax.envs.sokoban_boards import (
  BOX,
  BOX_ON_TARGET,
  FLOOR,
  MEANINGS,
  PLAYER,
  PLAYER_ON_TARGET,
  TARGET,
  encode_boards,
  parse_board,
  parse_boxoban,
)
from ragen_jax.envs.solvers import sokoban as sokoban_solver

# The reward of every move, and the reward of the last box on its target beside its own point.
STEP_REWARD = -0.1
SUCCESS_REWARD = 10.0

_SIZE_HEADER = 'Board size:'


@struct.dataclass
class State(base.State):
  """A level in play, R rows by C columns, border included.

  Attributes:
    walls: bool[R, C]; the border is wall.
    targets: bool[R, C].
    boxes: bool[R, C], as many as targets.
    player: i32[2], row and column.
    steps: i32[], actions so far.
  """

  walls: jax.Array
  targets: jax.Array
  boxes: jax.Array
  player: jax.Array
  steps: jax.Array


@dataclasses.dataclass(frozen=True)
class Sokoban(base.Environment):
  """RAGEN's game, with gym-sokoban's rules. The actions are Up, Down, Left, Right; walking into a box pushes it.

  An action costs 0.1, blocked or not. A box that moves onto a target earns 1, a box that leaves a target loses 1, and
  the last box on its target earns 10 more. The game ends then, or after `max_steps` actions.

  Attributes:
    dim: rows and columns of the board, including the border of walls.
    num_boxes: number of boxes, and of targets.
    max_steps: number of actions after which the game ends unsolved.
    search_depth: maximum moves of the reverse play that makes a level (at most `max_steps`, so that every level can be
      solved in time), and so an upper bound on the length of its shortest solution. In RAGEN it bounds the depth of a
      depth-first search over the same moves.
    min_solution: minimum moves of a level's shortest solution, 0 for no bound. The bounds are exact (breadth-first
      search over the room's positions). They hold if one of `sokoban_levels.MAX_ATTEMPTS` rooms has such a level;
      otherwise the level violates them.
    max_solution: maximum moves of a level's shortest solution, 0 for no bound.
    observation: 'grid' (rows of symbols), 'spaced' (with blanks between them, see `base.board_texts`), 'coord' (lists
      of coordinates, without the walls) or 'grid_coord' (symbols and coordinates).
    symbols: one character each for wall, floor, target, box on target, box, player, player on target.
    levels: a file of levels in Boxoban's format, which replaces generated levels, see `from_boxoban`; '' for none. Seed
      s plays level s modulo their number, so consecutive seeds play the file in order. Only levels within
      `min_solution` and `max_solution` are played; `search_depth` and `max_steps` do not select among them.
  """

  dim: tuple[int, int] = (6, 6)
  num_boxes: int = 1
  max_steps: int = 100
  search_depth: int = 300
  min_solution: int = 0
  max_solution: int = 0
  observation: str = 'grid'
  symbols: tuple[str, ...] = ('#', '_', 'O', '√', 'X', 'P', 'S')
  levels: str = ''

  name: ClassVar[str] = 'sokoban'
  action_names: ClassVar[tuple[str, ...]] = ('Up', 'Down', 'Left', 'Right')
  scene_kinds: ClassVar[tuple[str, ...]] = ('box', 'target')

  def __post_init__(self):
    # Configs contain lists; tuples keep the environment hashable.
    object.__setattr__(self, 'dim', _as_tuple(self.dim))
    object.__setattr__(self, 'symbols', _as_tuple(self.symbols))
    if len(self.dim) != 2 or not all(is_integer(size) and 5 <= size <= 32 for size in self.dim):
      raise ValueError(f'dim={self.dim}; allowed: (rows, columns), 5 to 32 each')
    for field in ('num_boxes', 'max_steps', 'search_depth', 'min_solution', 'max_solution'):
      if not is_integer(getattr(self, field)):
        raise ValueError(f'{field}={getattr(self, field)!r}; allowed: an integer')
    most_boxes = min((self.dim[0] - 2) * (self.dim[1] - 2) // 4, 100)
    if not 1 <= self.num_boxes <= most_boxes:
      raise ValueError(f'num_boxes={self.num_boxes}; allowed: 1 to {most_boxes} for dim={self.dim}')
    if self.max_steps < 1:
      raise ValueError(f'max_steps={self.max_steps}; allowed: 1 or more')
    if not 1 <= self.search_depth <= 10_000:
      raise ValueError(f'search_depth={self.search_depth}; allowed: 1 to 10000')
    if not 0 <= self.min_solution <= self._walk_depth:
      raise ValueError(
        f'min_solution={self.min_solution}; allowed: 0 to {self._walk_depth} for search_depth={self.search_depth} '
        f'and max_steps={self.max_steps}'
      )
    if self.max_solution < 0 or 0 < self.max_solution < self.min_solution:
      raise ValueError(f'max_solution={self.max_solution}; allowed: 0, or min_solution={self.min_solution} or more')
    bounded = self.min_solution or self.max_solution
    if bounded and sokoban_solver.table_size(self.dim, self.num_boxes) > sokoban_solver.MAX_TABLE:
      field = 'min_solution' if self.min_solution else 'max_solution'
      raise ValueError(f'{field}={bounded}; allowed: 0 for num_boxes={self.num_boxes} on dim={self.dim} (too large)')
    if self.observation not in base.BOARD_FORMS:
      raise ValueError(f'observation={self.observation!r}; allowed: {", ".join(base.BOARD_FORMS)}')
    plain = all(
      isinstance(s, str) and len(s) == 1 and s.isprintable() and not s.isspace() and s not in '<|' for s in self.symbols
    )
    if len(self.symbols) != 7 or len(set(self.symbols)) != 7 or not plain:
      raise ValueError(
        f'symbols={self.symbols}; allowed: 7 different single characters, none blank, < or |, for {", ".join(MEANINGS)}'
      )
    if not isinstance(self.levels, str):
      raise ValueError(f'levels={self.levels!r}; allowed: the name of a file, or an empty string')
    if self.levels:
      self._file_levels  # noqa: B018, reads the file, so that a wrong one raises here

  @property
  def _walk_depth(self) -> int:
    return min(self.search_depth, self.max_steps)

  @functools.cached_property
  def _file_levels(self) -> State:
    """The levels of the file within the bounds, NumPy leaves [M, ...]; ValueError if there is none, or one is wrong."""
    where = f'levels={self.levels!r}'
    try:
      states = self.from_boxoban(pathlib.Path(self.levels).read_text(encoding='utf-8'))
    except (OSError, UnicodeDecodeError) as e:
      reason = getattr(e, 'strerror', None) or 'no text'
      raise ValueError(f'{where}; allowed: a file of levels that can be read ({reason})') from e
    except ValueError as e:
      raise ValueError(f'{where}; allowed: levels that fit, but {str(e).removeprefix(f"{self.name}: ")}') from e
    if states.done.any():
      raise ValueError(f'{where}; allowed: levels to solve, but number {states.done.argmax() + 1} is solved already')
    if not (self.min_solution or self.max_solution):
      return states
    length = self.solve(states, base.Budget()).length
    kept = (length >= max(self.min_solution, 1)) & (length <= (self.max_solution or length.max()))
    if not kept.any():
      bounds = f'min_solution={self.min_solution} and max_solution={self.max_solution}'
      raise ValueError(f'{where}; allowed: a file with levels within {bounds}, but {_describe_lengths(length)}')
    return jax.tree.map(lambda leaf: leaf[kept], states)

  def check_budget(self, budget: base.Budget) -> None:
    """Raises ValueError if the game can end before the budget of actions, which the prompt states, is used up."""
    base.check_max_steps(self.max_steps, budget)

  def reset(self, key: jax.Array) -> State:
    """A level by reverse play (`sokoban_levels.generate`), solvable and not yet solved, or a level of the file."""
    if self.levels:
      # The last 32-bit word of a key is its seed.
      number = jax.random.key_data(key)[-1] % len(self._file_levels.done)
      return jax.tree.map(lambda leaf: jnp.asarray(leaf)[number], self._file_levels)
    level = sokoban_levels.generate(
      key, self.dim, self.num_boxes, self._walk_depth, self.min_solution, self.max_solution
    )
    return State(
      done=jnp.bool_(False),
      success=jnp.bool_(False),
      walls=level.walls,
      targets=level.targets,
      boxes=level.boxes,
      player=level.player,
      steps=jnp.int32(0),
    )

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    del key
    move = jnp.asarray(sokoban_solver.DIRECTIONS)[action]
    walls, targets, boxes = (jnp.asarray(x).reshape(-1) for x in (state.walls, state.targets, state.boxes))
    # Cells are numbered row by row. `beyond` is off the board only if the border is ahead, and is not used then.
    stride = move[0] * self.dim[1] + move[1]
    ahead = state.player[0] * self.dim[1] + state.player[1] + stride
    beyond = ahead + stride
    pushes = boxes[ahead]
    moves = ~walls[ahead] & ~(pushes & (walls[beyond] | boxes[beyond]))
    pushed = pushes & moves
    cell = jnp.arange(boxes.size)
    boxes = jnp.where(pushed, (boxes & (cell != ahead)) | (cell == beyond), boxes)
    gained = jnp.where(pushed, targets[beyond].astype(jnp.int32) - targets[ahead], 0)
    success = ~(boxes & ~targets).any()
    steps = state.steps + 1
    reward = STEP_REWARD + gained + SUCCESS_REWARD * success
    after = state.replace(
      boxes=boxes.reshape(self.dim),
      player=jnp.where(moves, state.player + move, state.player),
      steps=steps,
      success=success,
      done=success | (steps >= self.max_steps),
    )
    return after, base.StepOutput(reward=reward, effective=moves)

  @property
  def image_grid(self) -> tuple[int, int]:
    return self.dim

  def cells(self, state: State) -> jax.Array:
    return drawing.cells(state.walls, state.targets, state.boxes, state.player)

  def tiles(self, tile: int) -> np.ndarray:
    return drawing.tiles(tile)

  def rules(self) -> str:
    one = self.num_boxes == 1
    rows, cols = self.dim
    lines = [
      f'You are the player in a game of Sokoban on a board of {rows} rows and {cols} columns.',
      f'Push {"the box onto the target" if one else f"the {self.num_boxes} boxes onto the {self.num_boxes} targets"}.',
      'Walking into a box pushes it one cell further in that direction, if that cell holds no wall and no other box.',
      'Boxes can only be pushed, never pulled, and nothing passes through a wall.',
    ]
    if one:
      lines[2] = 'Walking into the box pushes it one cell further in that direction, if that cell is no wall.'
      lines[3] = 'The box can only be pushed, never pulled, and nothing passes through a wall.'
    step, success = STEP_REWARD, SUCCESS_REWARD
    lines.append(
      f'Each action costs {-step:g} points. A box pushed onto a target earns 1 point, a box pushed off one costs 1 '
      f'point, and {"the box" if one else "the last box"} on its target ends the game and earns {success:g} more.'
    )
    if 'coord' in self.observation:
      lines.append(
        f'A place is written (row, column), counted from 0: the top left is (0, 0), the bottom right '
        f'({rows - 1}, {cols - 1}).'
      )
    if self.observation == 'coord':
      lines.append('Walls are not listed; the border of the board is wall.')
    return ' '.join(lines)

  def legend(self) -> dict[str, str]:
    return {} if self.observation == 'coord' else dict(zip(self.symbols, MEANINGS, strict=True))

  def render(self, states: State) -> list[str]:
    """Coordinates are (row, column) from 0; kinds without a cell are left out."""
    contents = _contents(states)  # [N, R, C]
    return base.board_texts(self.observation, lambda: self._grids(contents), lambda: self._coordinates(contents))

  def _grids(self, contents: np.ndarray) -> list[str]:
    count, rows, cols = contents.shape
    # One array of characters with a line break in the last column, read as one string for each board.
    characters = np.full((count, rows, cols + 1), '\n')
    characters[:, :, :cols] = np.array(self.symbols)[contents]
    boards = np.ascontiguousarray(characters.reshape(count, -1)[:, :-1])
    return boards.view(f'U{boards.shape[1]}').ravel().tolist()

  def _coordinates(self, contents: np.ndarray) -> list[str]:
    _, rows, cols = contents.shape
    place = [[f'({r}, {c})' for c in range(cols)] for r in range(rows)]
    listed: list[dict[int, list[str]]] = [{} for _ in contents]
    shown = np.nonzero(contents > FLOOR)
    for n, r, c, kind in zip(*(axis.tolist() for axis in shown), contents[shown].tolist(), strict=True):
      listed[n].setdefault(kind, []).append(place[r][c])
    kinds = {
      TARGET: 'Targets',
      BOX: 'Boxes',
      BOX_ON_TARGET: 'Boxes on target',
      PLAYER: 'Player',
      PLAYER_ON_TARGET: 'Player on target',
    }
    size = f'{_SIZE_HEADER} {rows} rows, {cols} columns'
    return [
      '\n'.join([size] + [f'{title}: {", ".join(at[kind])}' for kind, title in kinds.items() if kind in at])
      for at in listed
    ]

  def from_text(self, text: str) -> State:
    """The fresh state of a grid of `symbols`, or of a 'grid_coord' text; ValueError for a 'coord' text: no walls."""
    lines = text.split(base.GRID_HEADER)[-1].strip('\n').split('\n')
    if self.observation == 'spaced':
      lines = [''.join(line.split()) for line in lines]
    if base.GRID_HEADER not in text and any(line.startswith(_SIZE_HEADER) for line in lines):
      raise ValueError(
        f'{self.name}: coordinates alone are not a level, as the walls are missing; allowed: a text with a grid'
      )
    return _fresh(parse_board(lines, self.dim, self.dim, self.num_boxes, self.symbols, 'level'))

  def from_boxoban(self, text: str) -> State:
    """Reads the levels of a Boxoban file, each a header line `; number` and its board, in order as states [M, ...].

    A board has ` ` floor, `#` wall, `.` target, `$` box, `*` box on target, `@` player, `+` player on target. It has
    `num_boxes` boxes and at most `dim` rows and columns (Boxoban's own: 4 and (10, 10)); smaller boards are filled up
    with wall on the right and below.

    Raises:
      ValueError: there is no level, or a level does not fit; the message gives the level and the place.
    """
    states = [_fresh(level) for level in parse_boxoban(text, self.dim, self.num_boxes)]
    return jax.tree.map(lambda *leaves: np.stack(leaves), *states)

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> sokoban_solver.SokobanSolution:
    """Exact shortest play by breadth-first search, within the budget and `max_steps`.

    The game is deterministic, so a level can be solved within the budget or not, and at every discount below 1 the
    shortest solution is the best. Boards of more than `sokoban_solver.MAX_TABLE` positions are searched one by one.
    That search can give up, and `success` is then NaN.
    """
    del discount
    return sokoban_solver.SokobanSolution(states, budget, self.max_steps)

  def scenes(self, states: State) -> list[Scene]:
    return make_scenes(states.player, {'box': states.boxes, 'target': states.targets})

  def rationale(self, states: State) -> list[str]:
    """The places of the player, of the boxes that are not on a target, and of the targets without a box."""
    rows, cols = self.dim
    place = [f'({r}, {c})' for r in range(rows) for c in range(cols)]
    targets, boxes = (np.asarray(x).reshape(-1, rows * cols) for x in (states.targets, states.boxes))
    misplaced, free = (
      [[place[i] for i in np.flatnonzero(row)] for row in board] for board in (boxes & ~targets, targets & ~boxes)
    )
    player = [place[r * cols + c] for r, c in np.asarray(states.player).tolist()]
    return [self._thought(*known) for known in zip(player, misplaced, free, strict=True)]

  def _thought(self, player: str, misplaced: list[str], free: list[str]) -> str:
    if not misplaced:
      return 'The box is on the target.' if self.num_boxes == 1 else 'All boxes are on targets.'
    if self.num_boxes == 1:
      return f'I am at {player}, the box is at {misplaced[0]}, the target is at {free[0]}.'
    if len(misplaced) == 1:
      return f'I am at {player}, the box left is at {misplaced[0]}, the free target is at {free[0]}.'
    return f'I am at {player}, the boxes left are at {_and(misplaced)}, the free targets are at {_and(free)}.'


def _as_tuple(value) -> tuple:
  return tuple(value) if isinstance(value, list | tuple | str) else (value,)


def _fresh(level: dict[str, np.ndarray]) -> State:
  """The state of a level that was read, before the first action."""
  solved = np.bool_((level['boxes'] == level['targets']).all())
  return State(done=solved, success=solved, steps=np.int32(0), **level)


def _contents(states: State) -> np.ndarray:
  """i8[N, R, C], the codes of cells of batched states."""
  return encode_boards(*(np.asarray(x) for x in (states.walls, states.targets, states.boxes, states.player)))


def _describe_lengths(length: np.ndarray) -> str:
  known = length[length > 0]
  return f'its shortest solutions take {known.min()} to {known.max()} moves' if len(known) else 'none can be solved'


def _and(words: list[str]) -> str:
  return ', '.join(words[:-1]) + ' and ' + words[-1]
