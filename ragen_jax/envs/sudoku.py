"""Sudoku: fill a board of 4 x 4 or 9 x 9 cells. Every level is made from a key and has exactly one solution.

The game is RAGEN's (rewards, free-text actions, brackets around given digits). Here a search proves that a level has
only one solution, and the budget is checked against the number of empty cells.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
import re
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.envs import base, sudoku_levels
from ragen_jax.envs.drawing import sudoku as drawing
from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.envs.options import check_flag, is_integer, is_number
from ragen_jax.envs.solvers import sudoku as solver

RIGHT_REWARD = 1.0
WRONG_REWARD = -0.1
COMPLETE_REWARD = 10.0

# Maximum number of empty cells of a board with one solution: it needs 4 given digits on 4 x 4 cells, 17 on 9 x 9
# (McGuire, Tugemann and Civario, arXiv 1201.0749).
_MOST_EMPTY = {4: 12, 9: 64}

_SENTENCE = re.compile(r'(?:place|put|write)?\s*([1-9])\s*(?:at|in|on)?\s*row\s*([1-9])\s*,?\s*col(?:umn)?\s*([1-9])')
_TRIPLE = re.compile(r'\(?\s*([1-9])\s*,\s*([1-9])\s*,\s*([1-9])\s*\)?')
_CELL = re.compile(r'\[([1-9])\]|([1-9])|\.')
_WRONG = 'Wrong: '
_WRONG_ITEM = re.compile(r'row ([1-9]) col ([1-9]) is not ([1-9](?:, [1-9])*)')

# Hints are shown if at most this many cells are empty, as in RAGEN-2.
_HINTED_CELLS = 10
_HINT = re.compile(r'Row ([1-9]) col ([1-9]):((?: [1-9])*)')


@struct.dataclass
class State(base.State):
  """A board of S x S cells.

  Attributes:
    solution: i8[S, S], the digits 1 to S.
    board: i8[S, S], the written digits, 0 for empty cells.
    given: bool[S, S], cells that were filled at the start.
    wrong: bool[S, S, S]; entry [r, c, d - 1]: digit d was tried in the empty cell (r, c) and is wrong.
  """

  solution: jax.Array
  board: jax.Array
  given: jax.Array
  wrong: jax.Array


@dataclasses.dataclass(frozen=True)
class Sudoku(base.Environment):
  """Write the solution's digit into every empty cell; a board has exactly one solution.

  A digit of the solution is written and earns 1; the last digit earns 10 more and is the success. Any other action (a
  wrong digit, a filled cell, a cell or digit that does not exist) costs 0.1 and changes no cell, so the board stays
  solvable. The expected reward of a random digit in an empty cell is above 0 (0.02 on 9 x 9 cells, 0.18 on 4 x 4), so
  trying is better than waiting. An action is effective if it writes a digit.

  Actions are (row, column, digit), each counted from 1.

  A level is a shuffled full board whose cells are emptied in random order; a cell is emptied only if a search proves
  that the solution remains the only one. If all cells have been tried, the level has fewer empty cells than requested.
  Of 4,096 levels of 9 x 9 cells, this was the case in none with 52 empty cells, 0.4 % with 54, 16 % with 56 and 75 %
  with 58; of 4,096 levels of 4 x 4 cells, in none with 11 and 18 % with 12. Full boards are made from a cyclic pattern
  by renaming digits, transposing, and permuting bands, stacks, and rows and columns within them, so not all full boards
  occur.

  Attributes:
    side: cells in a row: 4 (boxes of 2 x 2) or 9 (3 x 3).
    empty_cells: number of empty cells of a level, 1 to 12 (4 x 4) or 64 (9 x 9).
    legal_reward: reward of a wrong digit that is not in the cell's row, column or box, from -0.1 (the reward of other
      wrong digits) to below 1 (the reward of a right digit). RAGEN's is 0.5. It is paid once for each cell and digit.
      If it is above 0, a player with spare actions can still gain by trying wrong digits first.
    hints: whether boards with at most 10 empty cells are followed by a list of the digits that are not in the row,
      column or box of each empty cell, as in RAGEN-2.
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
    if not is_integer(self.side) or self.side not in _MOST_EMPTY:
      raise ValueError(f'sudoku: side={self.side!r}; allowed: {", ".join(map(str, _MOST_EMPTY))}')
    most = _MOST_EMPTY[self.side]
    if not is_integer(self.empty_cells) or not 1 <= self.empty_cells <= most:
      raise ValueError(f'sudoku: empty_cells={self.empty_cells!r}; allowed: 1 to {most} for side={self.side}')
    value = self.legal_reward
    if not is_number(value) or not WRONG_REWARD <= value < RIGHT_REWARD:
      raise ValueError(f'sudoku: legal_reward={value!r}; allowed: from {WRONG_REWARD:g} to below {RIGHT_REWARD:g}')
    check_flag('sudoku', 'hints', self.hints)

  def check_budget(self, budget: base.Budget) -> None:
    actions = budget.most_actions
    if actions < self.empty_cells:
      raise ValueError(
        f'sudoku: empty_cells={self.empty_cells}; allowed: at most {actions}, since max_actions={budget.max_actions} '
        f'and max_turns={budget.max_turns} of max_actions_per_turn={budget.max_actions_per_turn} allow no more'
      )

  def reset(self, key: jax.Array) -> State:
    solution, given = sudoku_levels.generate(key, self.side, self.empty_cells)
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
    del key
    row, col, digit = action - 1
    rows, cols, box = jnp.arange(self.side)[:, None], jnp.arange(self.side), math.isqrt(self.side)
    cell = (rows == row) & (cols == col)  # [S, S], all False if there is no such cell
    entry = cell[:, :, None] & (jnp.arange(self.side) == digit)  # [S, S, S], all False if there is no such digit
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

  @property
  def image_grid(self) -> tuple[int, int]:
    return self.side, self.side

  def cells(self, state: State) -> jax.Array:
    return drawing.cells(state.board, state.given)

  def tiles(self, tile: int) -> np.ndarray:
    return drawing.tiles(tile, self.side)

  @property
  def action_shape(self) -> tuple[int, ...]:
    """Row, column, digit."""
    return (3,)

  def rules(self) -> str:
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
    return {'.': 'empty cell', '[n]': 'given digit n', 'n': 'digit n that you placed'}

  def parse_action(self, text: str) -> tuple[int, int, int] | None:
    """(row, column, digit) from 'place 5 at row 2 col 3' or '2,3,5'; None for other texts and numbers out of range.

    Letter case and blanks are ignored. 'put' or 'write' for 'place', 'column' for 'col', and parentheses around the
    three numbers are accepted.
    """
    text = ' '.join(text.lower().split()).rstrip('.')  # single blanks: a long run of them would take quadratic time
    if match := _SENTENCE.fullmatch(text):
      digit, row, col = map(int, match.groups())
    elif match := _TRIPLE.fullmatch(text):
      row, col, digit = map(int, match.groups())
    else:
      return None
    return (row, col, digit) if max(row, col, digit) <= self.side else None

  def example_actions(self, observation: str) -> tuple[str, ...]:
    """Every digit, each in another cell of the diagonal."""
    del observation
    return tuple(self.format_action((i, i, i)) for i in range(1, self.side + 1))

  def format_action(self, action: tuple[int, int, int]) -> str:
    row, col, digit = map(int, action)
    return f'place {digit} at row {row} col {col}'

  def render(self, states: State) -> list[str]:
    """The boards; the hints and the wrong digits that were tried in empty cells follow below the board."""
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

  def captions(self, states: State) -> list[str]:
    lines = self.side + math.isqrt(self.side) - 1  # of the board
    return ['\n'.join([IMAGE_MARK, *text.splitlines()[lines:]]) for text in self.render(states)]

  def _board_text(self, cells: list[list[str]]) -> str:
    box = math.isqrt(self.side)
    lines = ['|'.join(''.join(row[i : i + box]) for i in range(0, self.side, box)).rstrip() for row in cells]
    between = '\n' + '+'.join(['-' * 3 * box] * box) + '\n'
    return between.join('\n'.join(lines[i : i + box]) for i in range(0, self.side, box))

  def from_text(self, text: str) -> State:
    """Reads one state (no batch axis) from an observation. The solution is found by search.

    Raises ValueError also if the given digits have no solution or several, a placed digit is not the solution's, a
    digit that the text calls wrong is right, or its hints are not those of the board.
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

    solutions = list(itertools.islice(solver.solutions(np.where(given, board, 0)), 2))
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
        raise ValueError(f'sudoku: {item!r} is wrong; it must name an empty cell and digits up to {self.side}')
      wrong[row, col, digits] = True
    return wrong

  def rationale(self, states: State) -> list[str]:
    """The reason for the plan's first digit: the only candidate, the only place, or the fewest candidates."""
    candidates = solver.find_candidates(np.asarray(states.board), np.asarray(states.wrong))  # [N, S, S, S]
    places = solver.only_places(candidates)
    cells = solver.easiest_cells(candidates, places)
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
    """For each empty cell, the digits that are not in its row, column or box and were not tried in it."""
    return [
      [(r + 1, c + 1, d + 1) for r, c, d in np.argwhere(one).tolist()]
      for one in solver.find_candidates(np.asarray(states.board), np.asarray(states.wrong))
    ]

  def solve(self, states: State, budget: base.Budget, discount: float = 1.0) -> solver.SudokuSolution:
    """Success if the budget has an action for every empty cell; no plan wastes an action, whatever the discount."""
    del discount
    empty = (np.asarray(states.board) == 0).sum(axis=(1, 2))
    fits = empty <= budget.most_actions
    success = np.where(states.done, states.success, fits).astype(np.float32)
    return solver.SudokuSolution(success, budget)


def _hints(board: np.ndarray) -> list[list[str]]:
  """For each board of i8[N, S, S] with few empty cells, a line for each empty cell: the digits that it does not see."""
  possible = solver.unseen_digits(board)
  few = (board == 0).sum(axis=(1, 2)) <= _HINTED_CELLS
  lines = [[] for _ in board]
  for i, r, c in np.argwhere((board == 0) & few[:, None, None]).tolist():
    digits = ' '.join(str(d + 1) for d in np.flatnonzero(possible[i, r, c]))
    lines[i].append(f'Row {r + 1} col {c + 1}: {digits}')
  return lines
