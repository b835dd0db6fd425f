"""Sudoku: fill a board of 4 x 4 or 9 x 9 cells. Every level is made from a key and has exactly one solution.

RAGEN's game (rewards, free-text actions, brackets around given digits), with levels whose one solution is proved and a
budget that can be checked against the cells to fill.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import numbers
import re
from collections.abc import Iterator
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base

RIGHT_REWARD = 1.0
WRONG_REWARD = -0.1
COMPLETE_REWARD = 10.0

# The most empty cells that a board with one solution can have: 4 givens are needed on 4 x 4 cells, 17 on 9 x 9
# (McGuire, Tugemann and Civario, arXiv 1201.0749).
_MOST_EMPTY = {4: 12, 9: 64}

# Random numbers that a full board takes: for 2 sets of bands, the lines within them, the digits, and the transposition.
_FULL_BOARD_BITS = {4: 2 * 2 + 2 * 4 + 4 + 1, 9: 2 * 3 + 2 * 9 + 9 + 1}

# What one proof of uniqueness may take: steps of the search, and choices that are open at a time. A cell whose proof
# needs more stays given.
_MAX_STEPS = 400
_MAX_DEPTH = 24

_SENTENCE = re.compile(r'(?:place|put|write)?\s*([1-9])\s*(?:at|in|on)?\s*row\s*([1-9])\s*,?\s*col(?:umn)?\s*([1-9])')
_TRIPLE = re.compile(r'\(?\s*([1-9])\s*,\s*([1-9])\s*,\s*([1-9])\s*\)?')
_CELL = re.compile(r'\[([1-9])\]|([1-9])|\.')
_WRONG = 'Wrong: '
_WRONG_ITEM = re.compile(r'row ([1-9]) col ([1-9]) is not ([1-9](?:, [1-9])*)')

# Hints are shown where at most so many cells are empty, as in RAGEN-2.
_HINTED_CELLS = 10
_HINT = re.compile(r'Row ([1-9]) col ([1-9]):((?: [1-9])*)')

# The picture: cells of 16 x 16 pixels; digits of 3 x 5 dots, each row of dots an octal digit, drawn at twice the size.
_TILE = 16
_FONT = {1: '26227', 2: '71747', 3: '71717', 4: '55711', 5: '74717', 6: '74757', 7: '71122', 8: '75757', 9: '75717'}
_PAPER_RGB = (250, 250, 246)
_THIN_RGB = (196, 196, 190)
_THICK_RGB = (60, 60, 60)
_GIVEN_RGB = (20, 20, 20)
_PLACED_RGB = (30, 90, 200)


@struct.dataclass
class State(base.State):
  """A board of S x S cells.

  Attributes:
    solution: i8[S, S], the digits 1 to S.
    board: i8[S, S], the digits that are written, 0 for empty cells.
    given: bool[S, S], the cell was filled from the start.
    wrong: bool[S, S, S], entry [r, c, d - 1]: digit d was tried in the empty cell (r, c), and is not its digit.
  """

  solution: jax.Array
  board: jax.Array
  given: jax.Array
  wrong: jax.Array


@dataclasses.dataclass(frozen=True)
class Sudoku(base.Environment):
  """Write the solution's digit into every empty cell; a board has one solution only.

  A digit of the solution is written and brings 1, the last of them 10 more: success. Any other action costs 0.1 and
  changes no cell, so that the board stays solvable: a wrong digit, a cell that is filled, a cell or digit that does not
  exist. A digit drawn at random for an empty cell still brings more than nothing on average (0.02 on 9 x 9 cells, 0.18
  on 4 x 4), so that to try is better than to wait. An action is effective when it wrote a digit.

  Actions are (row, column, digit), each counted from 1.

  A level is a full board, shuffled, from which cells are taken in random order; one is taken only when a search proves
  that the solution stays the only one. Should all cells have been tried, the level has fewer empty cells than asked
  for. Of 4,096 levels of 9 x 9 cells these were none for 52 empty cells, 0.4 % for 54, 16 % for 56, 75 % for 58; of
  4 x 4 cells none for 11, 18 % for 12. Full boards are those that a cyclic pattern turns into by renaming
  digits, transposing, and permuting bands, stacks, and rows and columns within them: not all that there are.

  Attributes:
    side: cells in a row: 4 (boxes of 2 x 2) or 9 (3 x 3).
    empty_cells: cells of a level that are empty, 1 to 12 (4 x 4) or 64 (9 x 9).
    legal_reward: what a wrong digit brings that is in none of the cell's row, column and box: from -0.1 (as any wrong
      digit) to below 1 (a right one). RAGEN pays 0.5. It is paid once for each cell and digit; still, above -0.1 a
      player with actions to spare earns by trying wrong digits first.
    hints: list, below a board with at most 10 empty cells, the digits for each of them that are in none of its row,
      column and box, as RAGEN-2 does.
  """

  name: ClassVar[str] = 'sudoku'
  action_help: ClassVar[str] = (
    'An action is written "place 3 at row 1 col 2", or in short "1,2,3" (row, column, digit); row 1 is at the top, '
    'col 1 at the left.'
  )

  side: int = 4
  empty_cells: int = 6
  legal_reward: float = WRONG_REWARD
  hints: bool = True

  def __post_init__(self):
    if not _is_integer(self.side) or self.side not in _MOST_EMPTY:
      raise ValueError(f'sudoku: side={self.side!r}; allowed: {", ".join(map(str, _MOST_EMPTY))}')
    most = _MOST_EMPTY[self.side]
    if not _is_integer(self.empty_cells) or not 1 <= self.empty_cells <= most:
      raise ValueError(f'sudoku: empty_cells={self.empty_cells!r}; allowed: 1 to {most} for side={self.side}')
    value = self.legal_reward
    if not isinstance(value, numbers.Real) or isinstance(value, bool) or not WRONG_REWARD <= value < RIGHT_REWARD:
      raise ValueError(f'sudoku: legal_reward={value!r}; allowed: from {WRONG_REWARD:g} to below {RIGHT_REWARD:g}')
    if not isinstance(self.hints, bool):
      raise ValueError(f'sudoku: hints={self.hints!r}; allowed: True, False')

  def check_budget(self, budget: base.Budget) -> None:
    """Raises ValueError where the budget cannot fill a level's empty cells."""
    actions = _capacity(budget, budget.max_turns, budget.max_actions)
    if actions < self.empty_cells:
      raise ValueError(
        f'sudoku: empty_cells={self.empty_cells}; allowed: at most {actions}, since max_actions={budget.max_actions} '
        f'and max_turns={budget.max_turns} of max_actions_per_turn={budget.max_actions_per_turn} let no more be filled'
      )

  # -- traced, one instance ------------------------------------------------------------------------------------------

  def reset(self, key: jax.Array) -> State:
    """A level with one solution from a key."""
    # All of a level's chance in one draw: it compiles several times as fast as one draw for each use.
    bits = jax.random.bits(key, (_FULL_BOARD_BITS[self.side] + self.side**2,))
    bits_full, bits_order = jnp.split(bits, [_FULL_BOARD_BITS[self.side]])
    solution, order = _full_board(bits_full, self.side), _ranks(bits_order)
    given = _remove_cells(solution, order, self.empty_cells)
    no = jnp.bool_(False)
    return State(
      done=no,
      success=no,
      solution=solution.astype(jnp.int8),
      board=jnp.where(given, solution, 0).astype(jnp.int8),
      given=given,
      wrong=jnp.zeros((self.side,) * 3, bool),
    )

  def _step(self, state: State, action: jax.Array, key: jax.Array) -> tuple[State, base.StepOutput]:
    """One digit into one cell; the game has no chance in it."""
    del key
    row, col, digit = action - 1
    rows, cols, box = jnp.arange(self.side)[:, None], jnp.arange(self.side), math.isqrt(self.side)
    cell = (rows == row) & (cols == col)  # [S, S], all False where there is no such cell
    entry = cell[:, :, None] & (jnp.arange(self.side) == digit)  # [S, S, S], all False where there is no such digit
    seen = (rows == row) | (cols == col) | ((rows // box == row // box) & (cols // box == col // box))
    possible = (entry & (state.board == 0)[:, :, None]).any()
    right = possible & (cell & (state.solution == digit + 1)).any()
    new = possible & ~(entry & state.wrong).any()
    legal = ~(seen & (state.board == digit + 1)).any()

    board = jnp.where(right & cell, state.solution, state.board)
    wrong = jnp.where(right, state.wrong & ~cell[:, :, None], state.wrong | (entry & possible))
    complete = (board != 0).all()
    reward = jnp.where(
      right,
      RIGHT_REWARD + COMPLETE_REWARD * complete,
      jnp.where(new & legal, self.legal_reward, WRONG_REWARD),
    )
    state = state.replace(board=board, wrong=wrong, done=complete, success=complete)
    return state, base.StepOutput(reward=reward.astype(jnp.float32), effective=right)

  # -- text ----------------------------------------------------------------------------------------------------------

  @property
  def action_shape(self) -> tuple[int, ...]:
    """Row, column, digit."""
    return (3,)

  def rules(self) -> str:
    """The game in a few sentences, with what each kind of digit earns."""
    side, box = self.side, math.isqrt(self.side)
    text = (
      f'You solve a Sudoku: fill the empty cells of a board of {side} by {side} cells so that each row, each column '
      f'and each box of {box} by {box} cells holds the digits 1 to {side} once. There is one solution. '
      f'A digit of the solution is written and earns {RIGHT_REWARD:g} point; '
      f'when the board is complete you earn {COMPLETE_REWARD:g} more and the game ends. '
      f'Any other action changes no cell and costs {-WRONG_REWARD:g}.'
    )
    if self.legal_reward != WRONG_REWARD:
      text += (
        f' Only a wrong digit that is not yet in its row, column and box brings {self.legal_reward:g} instead, '
        'the first time that it is tried in its cell.'
      )
    if self.hints:
      text += f' For at most {_HINTED_CELLS} empty cells the digits that break no rule are listed.'
    return text

  def legend(self) -> dict[str, str]:
    """Symbol to meaning."""
    return {'.': 'empty cell', '[n]': 'given digit n', 'n': 'digit n that you placed'}

  def parse_action(self, text: str) -> tuple[int, int, int] | None:
    """(row, column, digit) from 'place 5 at row 2 col 3' or '2,3,5'; None for other texts and for other numbers.

    Letter case and blanks do not matter, nor 'put' or 'write' for 'place', 'column' for 'col', or brackets around the
    three numbers.
    """
    text = text.strip().lower().rstrip('.')
    if match := _SENTENCE.fullmatch(text):
      digit, row, col = map(int, match.groups())
    elif match := _TRIPLE.fullmatch(text):
      row, col, digit = map(int, match.groups())
    else:
      return None
    return (row, col, digit) if max(row, col, digit) <= self.side else None

  def format_action(self, action: tuple[int, int, int]) -> str:
    """(row, column, digit) as a sentence."""
    row, col, digit = map(int, action)
    return f'place {digit} at row {row} col {col}'

  # -- host, batched ---------------------------------------------------------------------------------------------------

  def render(self, states: State) -> list[str]:
    """The boards as text, for states with leaves [N, ...].

    Below, the hints, and the digits that were tried in vain in empty cells.
    """
    cells = np.array([[f'[{d}]' for d in range(self.side + 1)], [' . ', *(f' {d} ' for d in range(1, self.side + 1))]])
    given, board = np.asarray(states.given), np.asarray(states.board)
    texts = [self._board_text(rows) for rows in cells[np.where(given, 0, 1), board].tolist()]
    if self.hints:
      texts = ['\n'.join([text, *hints]) for text, hints in zip(texts, _hints(board), strict=True)]
    wrong = np.asarray(states.wrong)
    for i in np.flatnonzero(wrong.any(axis=(1, 2, 3))):
      items = [
        f'row {r + 1} col {c + 1} is not {", ".join(str(d + 1) for d in np.flatnonzero(wrong[i, r, c]))}'
        for r, c in np.argwhere(wrong[i].any(axis=2)).tolist()
      ]
      texts[i] += f'\n{_WRONG}{"; ".join(items)}'
    return texts

  def _board_text(self, cells: list[list[str]]) -> str:
    box = math.isqrt(self.side)
    lines = ['|'.join(''.join(row[i : i + box]) for i in range(0, self.side, box)).rstrip() for row in cells]
    between = '\n' + '+'.join(['-' * 3 * box] * box) + '\n'
    return between.join('\n'.join(lines[i : i + box]) for i in range(0, self.side, box))

  def render_rgb(self, state: State) -> np.ndarray:
    """One board as a picture, u8[16 S + 1, 16 S + 1, 3]: given digits black, placed ones blue."""
    picture = np.full((_TILE * self.side + 1, _TILE * self.side + 1, 3), _PAPER_RGB, np.uint8)
    for step, colour in ((_TILE, _THIN_RGB), (_TILE * math.isqrt(self.side), _THICK_RGB)):
      picture[::step], picture[:, ::step] = colour, colour
    board, given = np.asarray(state.board), np.asarray(state.given)
    for row, col in np.argwhere(board > 0):
      dots = np.array([[int(line) >> shift & 1 for shift in (2, 1, 0)] for line in _FONT[int(board[row, col])]], bool)
      dots = dots.repeat(2, axis=0).repeat(2, axis=1)  # [10, 6]
      top, left = row * _TILE + 4, col * _TILE + 6
      picture[top : top + 10, left : left + 6][dots] = _GIVEN_RGB if given[row, col] else _PLACED_RGB
    return picture

  def from_text(self, text: str) -> State:
    """One state (no batch axis) from an observation. The solution is searched for.

    Raises:
      ValueError: the text is no board of this side, or its given digits have no solution or several, or it has a placed
        digit that is not the solution's or calls one wrong that is, or hints that are not those of the board.
    """
    lines = [line.strip() for line in text.strip().splitlines()]
    wrong_line = lines.pop() if lines and lines[-1].startswith(_WRONG) else ''
    hints = [line for line in lines if _HINT.fullmatch(line)]
    lines = [line for line in lines if line.strip('-+') and line not in hints]
    if len(lines) != self.side:
      raise ValueError(f'sudoku: the board has {len(lines)} rows, must be {self.side}')
    board, given = np.zeros((self.side, self.side), np.int8), np.zeros((self.side, self.side), bool)
    for r, line in enumerate(lines):
      cells = list(_CELL.finditer(line))
      digits = [int(cell[1] or cell[2] or 0) for cell in cells]
      if len(digits) != self.side or max(digits) > self.side or _CELL.sub('', line).strip(' |'):
        raise ValueError(
          f'sudoku: row {r + 1} of the board is {line!r}, must be {self.side} cells, each ".", a digit up to '
          f'{self.side}, or one in brackets'
        )
      board[r], given[r] = digits, [cell[1] is not None for cell in cells]

    solutions = list(itertools.islice(_solutions(np.where(given, board, 0)), 2))
    if len(solutions) != 1:
      count = 'several solutions' if solutions else 'no solution'
      raise ValueError(f'sudoku: the given digits have {count}, must have one')
    solution = solutions[0]
    placed = (board > 0) & ~given
    for r, c in np.argwhere(placed & (board != solution))[:1].tolist():
      raise ValueError(f'sudoku: row {r + 1} col {c + 1} is {board[r, c]}, must be {solution[r, c]} or empty')
    for line, true in itertools.zip_longest(hints, _hints(board[None])[0] if hints else []):
      if line != true:
        raise ValueError(f'sudoku: the board with the hint {line!r}, must be {true!r}')
    complete = np.asarray((board > 0).all())
    return State(
      done=complete,
      success=complete,
      solution=solution,
      board=board,
      given=given,
      wrong=self._parse_wrong(wrong_line, board, solution),
    )

  def _parse_wrong(self, line: str, board: np.ndarray, solution: np.ndarray) -> np.ndarray:
    """bool[S, S, S] from the line below the board."""
    wrong = np.zeros((self.side,) * 3, bool)
    for item in filter(None, line.removeprefix(_WRONG).split('; ')):
      match = _WRONG_ITEM.fullmatch(item)
      if match is None:
        raise ValueError(f'sudoku: {item!r} is not of the form "row 1 col 2 is not 3, 4"')
      row, col, *digits = (int(digit) - 1 for digit in re.findall('[1-9]', item))
      inside = max(row, col, *digits) < self.side
      if not inside or board[row, col] or solution[row, col] - 1 in digits:
        raise ValueError(f'sudoku: {item!r} is not so; it must name an empty cell and digits up to {self.side}')
      wrong[row, col, digits] = True
    return wrong

  def rationale(self, states: State) -> list[str]:
    """Why the plan's first digit goes where it goes: the only candidate, the only place, or the fewest candidates."""
    candidates = _candidates(states)  # [N, S, S, S]
    places = _only_places(candidates)
    cells = _easiest(candidates, places)
    solution = np.asarray(states.solution)
    thoughts = []
    for i, (row, col) in enumerate(cells.tolist()):
      left = (np.flatnonzero(candidates[i, row, col]) + 1).tolist()
      where, digit = f'row {row + 1} col {col + 1}', int(solution[i, row, col])
      in_row, in_col, in_box = (bool(place[i, row, col, digit - 1]) for place in places)
      if np.asarray(states.done)[i]:
        thoughts.append('The board is complete.')
      elif len(left) == 1:
        thoughts.append(f'Only {digit} can be at {where}.')
      elif in_row:
        thoughts.append(f'In row {row + 1} only col {col + 1} can be {digit}.')
      elif in_col:
        thoughts.append(f'In col {col + 1} only row {row + 1} can be {digit}.')
      elif in_box:
        thoughts.append(f'In its box only {where} can be {digit}.')
      else:
        thoughts.append(f'No digit is certain; {where} has the fewest candidates: {", ".join(map(str, left))}.')
    return thoughts

  def legal_actions(self, states: State) -> list[list[tuple[int, int, int]]]:
    """For each empty cell the digits that its row, column and box leave, but for those that were tried."""
    return [[(r + 1, c + 1, d + 1) for r, c, d in np.argwhere(one).tolist()] for one in _candidates(states)]

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> Solution:
    """Success where the budget has an action for every empty cell.

    Args:
      states: batched states with NumPy leaves [N, ...].
      budget: turns and actions of an episode.
      discount: changes nothing, since no plan wastes an action.
    """
    del discount
    empty = (np.asarray(states.board) == 0).sum(axis=(1, 2))
    fits = empty <= _capacity(budget, budget.max_turns, budget.max_actions)
    return Solution(success=np.where(states.done, states.success, fits).astype(np.float32), budget=budget)


@dataclasses.dataclass(frozen=True, eq=False)
class Solution:
  """The best play on N boards: one right digit after the other, where they are easiest to find.

  Attributes:
    success: f32[N].
    budget: what was solved for.
  """

  success: np.ndarray
  budget: base.Budget

  def plan(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """The next turn's digits: each for the cell with the fewest candidates, as `rationale` explains; see base.Solution.

    Where the board cannot be completed any more, it fills what it can.

    Raises:
      ValueError: more turns or actions are left than the budget had.
    """
    left = np.minimum(self._capacity(states, turns_left, actions_left), self.budget.max_actions_per_turn)
    board, solution = np.array(states.board), np.asarray(states.solution)
    plans: list[list[tuple[int, int, int]]] = [[] for _ in board]
    for _ in range(int(left.max(initial=0))):
      candidates = _candidates(states.replace(board=board))
      cells = _easiest(candidates, _only_places(candidates))
      for i in np.flatnonzero((left > 0) & (board == 0).any(axis=(1, 2))).tolist():
        row, col = cells[i].tolist()
        board[i, row, col] = solution[i, row, col]
        plans[i].append((row + 1, col + 1, int(solution[i, row, col])))
      left = left - 1
    return plans

  def value(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    """f32[N], the rewards of the plans to the end of the episode.

    Raises:
      ValueError: see `plan`.
    """
    left = self._capacity(states, turns_left, actions_left)
    empty = (np.asarray(states.board) == 0).sum(axis=(1, 2))
    complete = (empty > 0) & (empty <= left)
    return (RIGHT_REWARD * np.minimum(empty, left) + COMPLETE_REWARD * complete).astype(np.float32)

  def _capacity(self, states: State, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    """i64[N], actions that can still be made."""
    n = len(np.asarray(states.done))
    turns, actions = (np.broadcast_to(np.asarray(x, np.int64), (n,)) for x in (turns_left, actions_left))
    for name, left, most in (
      ('turns_left', turns, self.budget.max_turns),
      ('actions_left', actions, self.budget.max_actions),
    ):
      if n and left.max() > most:
        raise ValueError(f'sudoku: {name}={left.max()}; allowed: at most {most}, the budget that was solved for')
    return np.where(states.done, 0, np.maximum(_capacity(self.budget, turns, actions), 0))


# -- levels, traced ----------------------------------------------------------------------------------------------------


def _full_board(bits: jax.Array, side: int) -> jax.Array:
  """A full board i32[S, S], digits from 1: a cyclic pattern, shuffled by what keeps a Sudoku a Sudoku.

  The pattern of side 4 is 1234 / 3412 / 2341 / 4123. The chance is in random u32[_FULL_BOARD_BITS].
  """
  box = math.isqrt(side)
  bands, within, digits, transpose = jnp.split(bits, np.cumsum([2 * box, 2 * side, side]))
  # Which row and which column of the pattern goes where: bands are permuted, and the lines within each band.
  lines = _ranks(bands.reshape(2, box, 1), axis=1) * box + _ranks(within.reshape(2, box, box))
  row, col = lines.reshape(2, side, 1)[0], lines.reshape(2, side)[1]
  pattern = (box * (row % box) + row // box + col) % side
  pattern = jnp.where(transpose % 2, pattern, pattern.T)
  return _ranks(digits)[pattern] + 1


def _ranks(numbers: jax.Array, axis: int = -1) -> jax.Array:
  """Ranks from 0 along an axis, i32: of random numbers, a random permutation. Equal numbers rank as they stand.

  By comparing all pairs, since sorts compile slowly.
  """
  numbers = jnp.moveaxis(numbers, axis, -1)
  mine, other, place = numbers[..., :, None], numbers[..., None, :], jnp.arange(numbers.shape[-1])
  before = (other < mine) | ((other == mine) & (place < place[:, None]))
  return jnp.moveaxis(before.sum(axis=-1, dtype=jnp.int32), -1, axis)


@struct.dataclass
class _Search:
  """Cells of a full board are tried in order; while one is, a search for a second solution may be going on.

  Attributes:
    board: i32[S, S], one bit a digit: 1 << (digit - 1); 0 for empty cells.
    depth_of: i32[S, S], the number of open choices when the search filled the cell; 0 for cells it did not fill.
    depth: i32[], open choices; 0 where no search is going on.
    cell: i32[D], the cell of each open choice; entry 0 is not used.
    rest: i32[D], the digits (bits) that were not tried yet in it; entry 0 is 0.
    tried: i32[], cells that were tried.
    removed: i32[], cells that were emptied.
    steps: i32[], of the search that is going on.
  """

  board: jax.Array
  depth_of: jax.Array
  depth: jax.Array
  cell: jax.Array
  rest: jax.Array
  tried: jax.Array
  removed: jax.Array
  steps: jax.Array


def _remove_cells(solution: jax.Array, order: jax.Array, empty_cells: int) -> jax.Array:
  """Empties cells one by one, each only if the board keeps its one solution.

  Without the cell, a board has a second solution exactly if it has one with another digit there. That is searched for
  by propagation and backtracking. All of it is one flat loop, so that under vmap no level waits for another's search.

  Args:
    solution: i32[S, S], a full board.
    order: i32[S * S], the cells in the order in which they are tried.
    empty_cells: how many to empty; fewer where that is not possible.

  Returns:
    bool[S, S], the cells that stay.
  """
  side = solution.shape[0]
  zero = jnp.int32(0)
  start = _Search(
    board=(1 << (solution - 1)).astype(jnp.int32),
    depth_of=jnp.zeros((side, side), jnp.int32),
    depth=zero,
    cell=jnp.zeros((_MAX_DEPTH,), jnp.int32),
    rest=jnp.zeros((_MAX_DEPTH,), jnp.int32),
    tried=zero,
    removed=zero,
    steps=zero,
  )
  end = jax.lax.while_loop(
    lambda s: (s.removed < empty_cells) & (s.tried < side * side),
    functools.partial(_search_step, digits=start.board, order=order),
    start,
  )
  return end.board != 0


def _search_step(s: _Search, digits: jax.Array, order: jax.Array) -> _Search:
  """Begins a search (or sees that none is needed), or does one step of it: fill what is forced, choose, or go back.

  Args:
    s: where the work stands.
    digits: i32[S, S], the solution as bits.
    order: i32[S * S], see `_remove_cells`.
  """
  side = digits.shape[0]
  cells = jnp.arange(side * side).reshape(side, side)
  here = cells == order[s.tried]
  begins = s.depth == 0
  board = jnp.where(begins & here, 0, s.board)
  options, forced, contradiction = _propagate(board)
  contradiction &= ~begins

  # The cell has no other digit by plain logic: nothing to search.
  certain = begins & (here & (forced != 0)).any()
  second_solution = ~begins & ~contradiction & (board != 0).all()
  gives_up = ~begins & ((s.steps >= _MAX_STEPS) | (s.depth == _MAX_DEPTH - 1))

  # A new choice: another digit than the solution's for the cell that is tried, then cells with the fewest options.
  chooses = jnp.where(begins, ~certain, ~contradiction & ~second_solution & ~(forced != 0).any())
  fewest = jnp.where(board == 0, jax.lax.population_count(options) * side**2 + cells, 16 * side**2).min() % side**2
  chosen = jnp.where(begins, order[s.tried], fewest)
  choice = jnp.where(cells == chosen, options, 0).sum()
  choice &= jnp.where(begins, ~jnp.where(here, digits, 0).sum(), -1)
  depths = jnp.arange(_MAX_DEPTH)
  opened = chooses & (depths == s.depth + 1)
  cell, rest = jnp.where(opened, chosen, s.cell), jnp.where(opened, choice, s.rest)

  # The next digit of the latest choice that has one left; what was filled since that choice is emptied. If none has,
  # there is no second solution.
  depth = jnp.where((rest != 0) & (depths <= s.depth + chooses), depths, 0).max()
  tries = chooses | contradiction
  latest = depths == depth
  digit = jnp.where(latest, rest & -rest, 0).sum()
  rest = jnp.where(tries & latest, rest & ~digit, rest)
  tried_cell = cells == jnp.where(latest, cell, 0).sum()
  undone = jnp.where((s.depth_of > 0) & (s.depth_of >= depth), 0, board)

  ends_unique = certain | (contradiction & (depth == 0))
  ends = ends_unique | second_solution | gives_up
  restored = jnp.where(here, jnp.where(ends_unique, 0, digits), jnp.where(s.depth_of > 0, 0, board))
  return _Search(
    board=jnp.where(
      ends, restored, jnp.where(tries, jnp.where(tried_cell, digit, undone), jnp.where(forced != 0, forced, board))
    ),
    depth_of=jnp.where(
      ends,
      0,
      jnp.where(
        tries,
        jnp.where(tried_cell, depth, jnp.where(s.depth_of >= depth, 0, s.depth_of)),
        jnp.where(forced != 0, s.depth, s.depth_of),
      ),
    ),
    depth=jnp.where(ends, 0, jnp.where(tries, depth, s.depth)),
    cell=cell,
    rest=rest,
    tried=s.tried + ends,
    removed=s.removed + ends_unique,
    steps=jnp.where(ends, 0, s.steps + 1),
  )


def _propagate(board: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
  """What a board of bits i32[S, S] says about its empty cells.

  Returns:
    i32[S, S], the digits that a cell may hold (a filled cell: its own); i32[S, S], for an empty cell the digit that is
    forced since it is the only option or has no other place in a row, column or box, else 0; bool[], the board has no
    solution: a cell has no option, or a digit no place in a row, column or box. On a full board that finds every fault.
  """
  side = board.shape[0]
  box = math.isqrt(side)
  every = (1 << side) - 1
  zero = jnp.int32(0)

  def units(x):
    """i32[3 * S, S], the cells of all rows, columns and boxes."""
    return jnp.concatenate([x, x.T, x.reshape(box, box, box, box).swapaxes(1, 2).reshape(side, side)])

  def union_of_units(x):
    """i32[S, S], for each cell the bits of its row, column and box, from i32[3 * S]."""
    row, col, block = x.reshape(3, side)
    block = jnp.repeat(jnp.repeat(block.reshape(box, box), box, axis=0), box, axis=1)
    return row[:, None] | col | block

  def count(a, b):
    """Bits that are set once or more, and twice or more."""
    return a[0] | b[0], a[1] | b[1] | (a[0] & b[0])

  used = jax.lax.reduce(units(board), zero, jax.lax.bitwise_or, (1,))
  options = jnp.where(board == 0, every & ~union_of_units(used), board)
  in_units = units(options)
  once, twice = jax.lax.reduce((in_units, jnp.zeros_like(in_units)), (zero, zero), count, (1,))
  contradiction = (options == 0).any() | (once != every).any()
  only_place = options & union_of_units(once & ~twice)
  forced = jnp.where(options & (options - 1) == 0, options, only_place & -only_place)
  return options, jnp.where(board == 0, forced, 0), contradiction


# -- host --------------------------------------------------------------------------------------------------------------


def _hints(board: np.ndarray) -> list[list[str]]:
  """For each board of i8[N, S, S] with few empty cells, a line for each of these: the digits that it sees nowhere."""
  possible = _unseen(board)
  few = (board == 0).sum(axis=(1, 2)) <= _HINTED_CELLS
  lines = [[] for _ in board]
  for i, r, c in np.argwhere((board == 0) & few[:, None, None]).tolist():
    digits = ' '.join(str(d + 1) for d in np.flatnonzero(possible[i, r, c]))
    lines[i].append(f'Row {r + 1} col {c + 1}: {digits}')
  return lines


def _candidates(states: State) -> np.ndarray:
  """bool[N, S, S, S], entry [n, r, c, d - 1]: the cell is empty, no cell that it sees holds d, and d was not tried."""
  return _unseen(np.asarray(states.board)) & ~np.asarray(states.wrong)


def _unseen(board: np.ndarray) -> np.ndarray:
  """bool[N, S, S, S] of i8[N, S, S], entry [n, r, c, d - 1]: the cell is empty, and no cell that it sees holds d."""
  n, side, _ = board.shape
  box = math.isqrt(side)
  placed = board[..., None] == np.arange(1, side + 1)
  in_box = placed.reshape(n, box, box, box, box, side).any(axis=(2, 4))
  in_box = in_box.repeat(box, axis=1).repeat(box, axis=2)
  seen = placed.any(axis=2, keepdims=True) | placed.any(axis=1, keepdims=True) | in_box
  return (board == 0)[..., None] & ~seen


def _only_places(candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Whether a cell is the only one of its row, column, box that a digit is a candidate of: 3 times bool[N, S, S, S]."""
  n, side, _, _ = candidates.shape
  box = math.isqrt(side)
  in_box = candidates.reshape(n, box, box, box, box, side).sum(axis=(2, 4))
  in_box = in_box.repeat(box, axis=1).repeat(box, axis=2)
  counts = candidates.sum(axis=2, keepdims=True), candidates.sum(axis=1, keepdims=True), in_box
  return tuple(candidates & (count == 1) for count in counts)


def _easiest(candidates: np.ndarray, places: tuple[np.ndarray, ...]) -> np.ndarray:
  """i64[N, 2], the cell with the fewest candidates, the first of them; a digit's only place is as good as one."""
  n, side, _, _ = candidates.shape
  count = candidates.sum(axis=3)
  certain = (places[0] | places[1] | places[2]).any(axis=3)
  count = np.where(count == 0, side + 1, np.where(certain, 1, count))
  return np.stack(np.divmod(count.reshape(n, side * side).argmin(axis=1), side), axis=1)


def _solutions(board: np.ndarray) -> Iterator[np.ndarray]:
  """Every completion i8[S, S] of a board (0 for empty cells), by backtracking over the cell with the fewest digits."""
  side, box = len(board), math.isqrt(len(board))
  # The digits that each row, column and box still lacks, as bits.
  lacks = [[(1 << side) - 1] * side for _ in range(3)]
  empty = []
  for row, col in np.ndindex(board.shape):
    units, bit = (row, col, row // box * box + col // box), 1 << int(board[row, col]) >> 1
    if not bit:
      empty.append(units)
    for unit, left in zip(units, lacks, strict=True):
      if bit & ~left[unit]:
        return
      left[unit] ^= bit
  full = np.array(board, np.int8)

  def fill() -> Iterator[np.ndarray]:
    if not empty:
      yield full.copy()
      return
    options = [lacks[0][row] & lacks[1][col] & lacks[2][block] for row, col, block in empty]
    at = min(range(len(empty)), key=lambda i: options[i].bit_count())
    units = empty.pop(at)
    for digit in range(1, side + 1):
      bit = 1 << digit - 1
      if options[at] & bit:
        full[units[:2]] = digit
        for unit, left in zip(units, lacks, strict=True):
          left[unit] ^= bit
        yield from fill()
        for unit, left in zip(units, lacks, strict=True):
          left[unit] ^= bit
    empty.insert(at, units)

  yield from fill()


def _capacity(budget: base.Budget, turns: np.ndarray | int, actions: np.ndarray | int) -> np.ndarray:
  """Actions that fit into so many turns and actions."""
  return np.minimum(actions, turns * np.int64(budget.max_actions_per_turn))


def _is_integer(value: object) -> bool:
  return isinstance(value, numbers.Integral) and not isinstance(value, bool)
