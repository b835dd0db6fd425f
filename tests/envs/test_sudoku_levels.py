"""Levels of Sudoku: one solution each, by a plain backtracking solver, and all shuffles of the pattern."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import sudoku_levels
from ragen_jax.envs.sudoku import Sudoku
from tests.support.environments import one
from tests.support.games.sudoku import LARGE, SMALL, as_dict, completions, make_levels


@pytest.mark.parametrize(('env', 'n'), [(SMALL, 256), (LARGE, 40)], ids=['4', '9'])
@pytest.mark.slow_cases('9')
def test_every_level_has_one_solution(env, n):
  levels = make_levels(env, n)
  np.testing.assert_array_equal((levels.board == 0).sum(axis=(1, 2)), env.empty_cells)
  np.testing.assert_array_equal(levels.given, levels.board != 0)
  assert not levels.done.any() and not levels.success.any() and not levels.wrong.any()
  for i in range(n):
    assert completions(as_dict(levels.board[i])) == [as_dict(levels.solution[i])]


def test_where_too_many_empty_cells_are_asked_for_none_is_left_to_take():
  env = Sudoku(empty_cells=12)
  levels = make_levels(env, 256)
  empty = (levels.board == 0).sum(axis=(1, 2))
  assert 0 < (empty < 12).sum() < 128 and empty.max() == 12
  for i in np.flatnonzero(empty < 12):
    board = as_dict(levels.board[i])
    assert len(completions(board)) == 1
    for cell, digit in as_dict(levels.board[i]).items():
      if digit:
        assert len(completions({**board, cell: 0})) == 2


def test_a_search_that_gives_up_keeps_the_cell(monkeypatch):
  solution = one(make_levels(LARGE, 1)).solution.astype(np.int32)

  def given():
    return np.asarray(jax.jit(lambda board: sudoku_levels.remove_cells(board, jnp.arange(81), 64))(solution))

  fewest = given().sum()
  for limit, value in (('_MAX_STEPS', 0), ('_MAX_DEPTH', 2)):
    with monkeypatch.context() as patch:
      patch.setattr(sudoku_levels, limit, value)
      kept = given()
    assert fewest < kept.sum() < 50
    assert len(completions(as_dict(np.where(kept, solution, 0)))) == 1


def test_ranks():
  numbers = np.array([[7, 2, 7, 0], [3, 3, 3, 3], [0, 1, 2, 3]], np.uint32)
  np.testing.assert_array_equal(sudoku_levels.ranks(jnp.asarray(numbers)), [[2, 1, 3, 0], [0, 1, 2, 3], [0, 1, 2, 3]])
  np.testing.assert_array_equal(sudoku_levels.ranks(jnp.asarray(numbers), axis=0)[:, 0], [2, 1, 0])


@pytest.mark.slow
def test_full_boards_are_all_shuffles_of_the_pattern_and_equally_likely():
  pattern = ('1234', '3412', '2341', '4123')
  lines = [(*a, *b) for a, b in itertools.product(((0, 1), (1, 0)), ((2, 3), (3, 2)))]
  lines += [(c, d, a, b) for a, b, c, d in lines]
  want = set()
  for rows, cols, digits in itertools.product(lines, lines, itertools.permutations('1234')):
    board = tuple(''.join(digits[int(pattern[r][c]) - 1] for c in cols) for r in rows)
    want |= {board, tuple(map(''.join, zip(*board, strict=True)))}
  n = 64 * len(want)
  got = [tuple(''.join(map(str, row)) for row in board.tolist()) for board in make_levels(SMALL, n).solution]
  counts = {board: got.count(board) for board in set(got)}
  assert set(counts) == want
  assert max(abs(count - 64) for count in counts.values()) < 5 * 8


def test_same_key_same_level():
  levels, again = make_levels(LARGE, 40), make_levels.__wrapped__(LARGE, 128)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:40]), levels, again)
  assert len(set(LARGE.render(again))) == 128
  alone = jax.tree.map(np.asarray, jax.jit(SMALL.reset)(jax.random.key(3)))
  jax.tree.map(np.testing.assert_array_equal, alone, one(make_levels(SMALL, 256), 3))
