"""2048: equal tiles merge when they are pushed together; the game is won with the tile of the goal.

The rules are those of Gabriele Cirulli's game (2014). A board holds exponents: 0 is an empty cell, e the tile 2**e.
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
from ragen_jax.envs.drawing import game_2048 as drawing
from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.envs.options import check_choice, is_integer

UP, RIGHT, DOWN, LEFT = range(4)

_SIZE = 4
# Quarter turns to the left that bring the side to which an action pushes to the left.
_TURNS = {UP: 1, RIGHT: 2, DOWN: 3, LEFT: 0}
_FOUR_PROBABILITY = 0.1
# The largest tile that a board can hold, by a chain of merges that begins with a 4.
_LARGEST_GOAL = 2**17
_REWARDS = ('log', 'raw')


@struct.dataclass
class State(base.State):
  """A board and its score.

  Attributes:
    board: i32[4, 4], exponents of the tiles, 0 for empty cells.
    score: i32[], sum of all tiles that were made by merges.
  """

  board: jax.Array
  score: jax.Array


@dataclasses.dataclass(frozen=True)
class Game2048(base.Environment):
  """Push the tiles until the board has the goal tile (success) or no move is left.

  A move pushes all tiles to one side. Two equal tiles that meet become their sum, each tile at most once a move,
  beginning at that side: 2 2 2 2 pushed to the left gives 4 4. After a move that changes the board, a tile appears on a
  random empty cell: a 2 with probability 0.9, else a 4. A game begins with two such tiles. A move that changes nothing
  is not effective and adds no tile.

  The reward of a move depends on m, the sum of the tiles that its merges make: 0.1 * log2(1 + m), or m itself.

  Actions: Up, Right, Down, Left are 0, 1, 2, 3. The game has no exact solver.

  Attributes:
    goal: the tile to make, a power of two from 8 to 131072.
    reward: 'log' or 'raw', see above.
  """

  name: ClassVar[str] = 'game_2048'
  action_names: ClassVar[tuple[str, ...]] = ('Up', 'Right', 'Down', 'Left')
  has_solver: ClassVar[bool] = False

  goal: int = 2048
  reward: str = 'log'

  def __post_init__(self):
    goal = self.goal
    if not is_integer(goal) or not 8 <= goal <= _LARGEST_GOAL or goal & (goal - 1):
      raise ValueError(f'game_2048: goal={goal!r}; allowed: powers of two from 8 to {_LARGEST_GOAL}')
    check_choice('game_2048', 'reward', self.reward, _REWARDS)

  def reset(self, key: jax.Array) -> State:
    board = jnp.zeros((_SIZE, _SIZE), jnp.int32)
    for k in jax.random.split(key):
      board = _with_new_tile(board, k)
    no = jnp.bool_(False)
    return State(done=no, success=no, board=board, score=jnp.int32(0))

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    boards, merged = _pushed(state.board)
    board, merged = boards[action], merged[action]
    effective = (board != state.board).any()
    board = jnp.where(effective, _with_new_tile(board, key), board)
    success = (board >= self._goal_exponent).any()
    done = success | ~_can_move(board)
    reward = merged if self.reward == 'raw' else 0.1 * jnp.log2(1.0 + merged)
    state = state.replace(done=done, success=success, board=board, score=state.score + merged)
    return state, base.StepOutput(reward=reward.astype(jnp.float32), effective=effective)

  @property
  def image_grid(self) -> tuple[int, int]:
    return _SIZE, _SIZE

  def cells(self, state: State) -> jax.Array:
    return jnp.asarray(state.board)

  def tiles(self, tile: int) -> np.ndarray:
    return drawing.tiles(tile, self._goal_exponent)

  @property
  def _goal_exponent(self) -> int:
    return int(self.goal).bit_length() - 1

  def rules(self) -> str:
    points = 'm points' if self.reward == 'raw' else '0.1 * log2(1 + m) points'
    return (
      f'You play 2048 on a board of 4 by 4 cells; 0 is an empty cell. The game is won with a tile of {self.goal}. '
      'A move pushes all tiles to one side. Two equal tiles that meet become one tile, their sum; a tile that has just '
      'been made does not merge again in the same move. If the move changed the board, a new tile appears on a random '
      f'empty cell: 2 with probability {1 - _FOUR_PROBABILITY:g}, 4 with probability {_FOUR_PROBABILITY:g}. '
      f'A move whose merges make tiles with the sum m earns {points}. '
      'The game is lost when no move can change the board.'
    )

  def render(self, states: State) -> list[str]:
    """Four rows of numbers, the moves that change the board, and the score, for states [N]."""
    boards = np.asarray(states.board)
    tiles = np.where(boards > 0, 1 << boards, 0).tolist()
    texts = []
    for rows, legal, score in zip(tiles, self.legal_actions(states), np.asarray(states.score).tolist(), strict=True):
      lines = [' '.join(map(str, row)) for row in rows]
      moves = ', '.join(self.action_names[a] for a in legal) or 'none'
      texts.append('\n'.join([*lines, f'Legal moves: {moves}', f'Score: {score}']))
    return texts

  def captions(self, states: State) -> list[str]:
    return ['\n'.join([IMAGE_MARK, *text.splitlines()[_SIZE:]]) for text in self.render(states)]

  def legal_actions(self, states: State) -> list[list[int]]:
    """The moves that change the board; none if the game is over."""
    boards = np.asarray(states.board)  # [N, 4, 4]
    legal = _can_push(boards) & ~np.asarray(states.done)[:, None]
    return [np.flatnonzero(row).tolist() for row in legal]

  def from_text(self, text: str) -> State:
    lines = [' '.join(line.split()) for line in text.strip().splitlines()]
    if len(lines) != _SIZE + 2:
      raise ValueError(f'game_2048: the text has {len(lines)} lines, must be 4 rows, the legal moves and the score')
    tiles = {str(2**e): e for e in range(1, self._goal_exponent + 1)} | {'0': 0}
    for i, line in enumerate(lines[:_SIZE], 1):
      row = line.split()
      if len(row) != _SIZE or not set(row) <= set(tiles):
        raise ValueError(f'game_2048: line {i} is {line!r}, must be 4 of 0, 2, 4, 8 and so on up to {self.goal}')
    score = re.fullmatch(r'Score: (\d{1,9})', lines[-1])
    if score is None:
      raise ValueError(f"game_2048: line 6 is {lines[-1]!r}, must be 'Score: ' and a number")
    board = np.array([[tiles[word] for word in line.split()] for line in lines[:_SIZE]], np.int32)
    if not board.any():
      raise ValueError('game_2048: the board has no tile, must have at least one')
    success = (board >= self._goal_exponent).any()
    state = State(
      done=np.asarray(success or not _can_push(board).any()),
      success=np.asarray(success),
      board=board,
      score=np.asarray(int(score[1]), np.int32),
    )
    drawn = self.render(jax.tree.map(lambda leaf: leaf[None], state))[0].splitlines()
    if lines[_SIZE] != drawn[_SIZE]:
      raise ValueError(f'game_2048: line 5 is {lines[_SIZE]!r}, must be {drawn[_SIZE]!r} by the other lines')
    return state


def _pushed(board: jax.Array) -> tuple[jax.Array, jax.Array]:
  """The boards i32[4, 4, 4] after each action on a board i32[4, 4], without the new tile.

  And i32[4], the sums of the tiles that their merges make.
  """
  turned = jnp.stack([jnp.rot90(board, _TURNS[action]) for action in range(4)])
  a, b, c, d = jnp.moveaxis(_closed_up(turned), -1, 0)  # Each [4, 4], the first column leftmost.
  # The leftmost pair first, and no tile twice: 2 2 2 is 4 2, and 2 2 2 2 is 4 4.
  first = (a > 0) & (a == b)
  second = (b > 0) & (b == c) & ~first
  third = (c > 0) & (c == d) & ~second
  merges = jnp.stack([first, second, third, jnp.zeros_like(first)], axis=-1)
  tiles = jnp.stack([a, b, c, d], axis=-1) + merges
  made = jnp.where(merges, 1 << tiles, 0).sum((-2, -1))
  gone = jnp.stack([jnp.zeros_like(first), first, second, third], axis=-1)
  closed = _closed_up(jnp.where(gone, 0, tiles))
  return jnp.stack([jnp.rot90(closed[action], -_TURNS[action]) for action in range(4)]), made


def _closed_up(rows: jax.Array) -> jax.Array:
  """Rows [..., 4] with their tiles moved to the left, in their order."""
  place = jnp.cumsum(rows > 0, axis=-1) - 1
  goes_to = (place[..., :, None] == jnp.arange(_SIZE)) & (rows > 0)[..., :, None]  # [..., from, to]
  return jnp.where(goes_to, rows[..., :, None], 0).sum(-2)


def _with_new_tile(board: jax.Array, key: jax.Array) -> jax.Array:
  """A board with one more tile, or the same board if it is full."""
  key_cell, key_tile = jax.random.split(key)
  empty = (board == 0).reshape(-1)
  number = jax.random.randint(key_cell, (), 0, jnp.maximum(empty.sum(), 1))
  cell = empty & (jnp.cumsum(empty) - 1 == number)
  exponent = 1 + jax.random.bernoulli(key_tile, _FOUR_PROBABILITY).astype(jnp.int32)
  return jnp.where(cell.reshape(board.shape), exponent, board)


def _can_move(board: jax.Array) -> jax.Array:
  """bool[], a cell is empty or two neighbours are equal."""
  return (board == 0).any() | (board[1:] == board[:-1]).any() | (board[:, 1:] == board[:, :-1]).any()


def _can_push(boards: np.ndarray) -> np.ndarray:
  """bool[..., 4], which actions change boards [..., 4, 4]: some tile has an empty cell or an equal tile ahead."""
  changes = []
  for action in range(4):
    turned = np.rot90(boards, _TURNS[action], axes=(-2, -1))
    ahead, tile = turned[..., :-1], turned[..., 1:]
    changes.append(((tile > 0) & ((ahead == 0) | (ahead == tile))).any((-2, -1)))
  return np.stack(changes, axis=-1)
