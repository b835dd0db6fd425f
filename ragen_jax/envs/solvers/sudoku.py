"""Sudoku by logic and search: candidates of cells, the order in which plans fill cells, and all solutions of a board.

Boards are i8[S, S] or batches i8[N, S, S], 0 for empty cells. A cell sees the cells of its row, column and box.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

import numpy as np

from ragen_jax.envs.base import Budget
from ragen_jax.envs.solvers.limits import count_actions


@dataclasses.dataclass(frozen=True, eq=False)
class SudokuSolution:
  """Best play on N boards: one right digit after another, in the cells where digits are easiest to find."""

  success: np.ndarray
  budget: Budget

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[tuple[int, int, int]]]:
    """The next turn's digits, each for the cell with the fewest candidates; errors are those of `base.Solution`.

    If the board cannot be completed any more, the plan fills as many cells as it can.
    """
    left = count_actions('sudoku', self.budget, states.done, turns_left, actions_left)
    left = np.minimum(left, self.budget.max_actions_per_turn)
    board, solution, wrong = np.array(states.board), np.asarray(states.solution), np.asarray(states.wrong)
    plans: list[list[tuple[int, int, int]]] = [[] for _ in board]
    for _ in range(int(left.max(initial=0))):
      candidates = find_candidates(board, wrong)
      cells = easiest_cells(candidates, only_places(candidates))
      for i in np.flatnonzero((left > 0) & (board == 0).any(axis=(1, 2))).tolist():
        row, col = cells[i].tolist()
        board[i, row, col] = solution[i, row, col]
        plans[i].append((row + 1, col + 1, int(solution[i, row, col])))
      left = left - 1
    return plans


def find_candidates(board: np.ndarray, wrong: np.ndarray) -> np.ndarray:
  """The digits that remain possible for empty cells, bool[N, S, S, S], from a board i8[N, S, S].

  Entry [n, r, c, d - 1]: the cell is empty, sees no digit d, and d was not tried in it, which `wrong` states.
  """
  return unseen_digits(board) & ~wrong


def unseen_digits(board: np.ndarray) -> np.ndarray:
  """bool[N, S, S, S] from i8[N, S, S]; entry [n, r, c, d - 1]: the cell is empty and sees no digit d."""
  n, side, _ = board.shape
  box = math.isqrt(side)
  placed = board[..., None] == np.arange(1, side + 1)
  in_box = placed.reshape(n, box, box, box, box, side).any(axis=(2, 4))
  in_box = in_box.repeat(box, axis=1).repeat(box, axis=2)
  seen = placed.any(axis=2, keepdims=True) | placed.any(axis=1, keepdims=True) | in_box
  return (board == 0)[..., None] & ~seen


def only_places(candidates: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
  """Whether a cell is the only candidate for a digit in its row, column and box: three bool[N, S, S, S]."""
  n, side, _, _ = candidates.shape
  box = math.isqrt(side)
  in_box = candidates.reshape(n, box, box, box, box, side).sum(axis=(2, 4))
  in_box = in_box.repeat(box, axis=1).repeat(box, axis=2)
  counts = candidates.sum(axis=2, keepdims=True), candidates.sum(axis=1, keepdims=True), in_box
  return tuple(candidates & (count == 1) for count in counts)


def easiest_cells(candidates: np.ndarray, places: tuple[np.ndarray, ...]) -> np.ndarray:
  """i64[N, 2], the first cell with the fewest candidates; the only place of a digit counts as having one candidate."""
  n, side, _, _ = candidates.shape
  count = candidates.sum(axis=3)
  certain = (places[0] | places[1] | places[2]).any(axis=3)
  count = np.where(count == 0, side + 1, np.where(certain, 1, count))
  return np.stack(np.divmod(count.reshape(n, side * side).argmin(axis=1), side), axis=1)


def solutions(board: np.ndarray) -> Iterator[np.ndarray]:
  """All completions i8[S, S] of a board, by backtracking over the cell with the fewest possible digits."""
  side, box = len(board), math.isqrt(len(board))
  # The digits that each row, column and box lacks, as bits.
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
