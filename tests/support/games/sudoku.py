"""A second implementation of Sudoku: a plain backtracking solver and the rules in plain Python; levels to test with."""

from __future__ import annotations

import functools
import itertools

import numpy as np

from ragen_jax.envs.sudoku import Sudoku
from tests.support import environments

SMALL, LARGE = Sudoku(empty_cells=10), Sudoku(side=9, empty_cells=50)
# Its solution is 13 24 / 42 31 / 24 13 / 31 42.
TEXT = '[1] . | .  .\n .  . |[3] .\n------+------\n . [4]| .  .\n .  . | . [2]'


@functools.lru_cache
def make_levels(env, n):
  """`environments.make_levels` of the keys 0, 1, ..., kept."""
  return environments.make_levels(env, n, block=128)


def seen_from(side, row, col):
  """The cells that share a row, column or box with one, itself included."""
  box = {4: 2, 9: 3}[side]
  return {
    (r, c)
    for r, c in itertools.product(range(side), repeat=2)
    if r == row or c == col or (r // box, c // box) == (row // box, col // box)
  }


@functools.cache
def seen_cells(side):
  return {cell: seen_from(side, *cell) for cell in itertools.product(range(side), repeat=2)}


def completions(board, most=2):
  """Up to `most` completions of a board {cell: digit, 0 for empty}, by trying digits in the cell with the fewest."""
  side = 4 if len(board) == 16 else 9
  found = []

  def search():
    left = {
      cell: set(range(1, side + 1)) - {board[other] for other in seen_cells(side)[cell]}
      for cell, digit in board.items()
      if digit == 0
    }
    if not left:
      found.append(dict(board))
      return
    cell = min(left, key=lambda cell: len(left[cell]))
    for digit in left[cell]:
      board[cell] = digit
      search()
      board[cell] = 0
      if len(found) >= most:
        return

  search()
  return found


def as_dict(board):
  return {(r, c): int(digit) for (r, c), digit in np.ndenumerate(board)}


class Game:
  """The rules, in plain Python."""

  def __init__(self, solution, board, legal_reward=-0.1):
    self.solution, self.board, self.legal_reward = as_dict(solution), as_dict(board), legal_reward
    self.side, self.tried, self.done = len(board), set(), False

  def play(self, row, col, digit):
    """Reward, and whether a digit was written."""
    cell = (row - 1, col - 1)
    if self.done:
      return 0, False
    if self.board.get(cell) != 0 or not 1 <= digit <= self.side:
      return -0.1, False
    if digit == self.solution[cell]:
      self.board[cell] = digit
      self.done = 0 not in self.board.values()
      return 11 if self.done else 1, True
    first = (cell, digit) not in self.tried
    self.tried.add((cell, digit))
    legal = all(self.board[other] != digit for other in seen_cells(self.side)[cell])
    return self.legal_reward if first and legal else -0.1, False
