"""Tables of patches: small ones by hand, and windows and positions against loops over pixels."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.models.vision import grids


def test_patches_are_listed_token_by_token():
  assert grids.coordinates((4, 4), 2).tolist() == [
    [0, 0], [0, 1], [1, 0], [1, 1], [0, 2], [0, 3], [1, 2], [1, 3],
    [2, 0], [2, 1], [3, 0], [3, 1], [2, 2], [2, 3], [3, 2], [3, 3],
  ]  # fmt: skip


def test_windows_of_6_by_6_tokens():
  found = grids.windows((12, 12), 2, 4)
  assert (found.order[::4] // 4).tolist() == [
    0, 1, 2, 3, 6, 7, 8, 9, 12, 13, 14, 15, 18, 19, 20, 21, 4, 5, 10, 11, 16, 17, 22, 23,
    24, 25, 26, 27, 30, 31, 32, 33, 28, 29, 34, 35,
  ]  # fmt: skip
  assert found.runs == ((1, 64), (2, 32), (1, 16))


@pytest.mark.parametrize('tokens', [(5, 7), (9, 9), (4, 8), (2, 3), (6, 9), (1, 13)])
def test_patches_of_a_window_are_a_run_and_the_order_is_undone(tokens):
  grid, side = (2 * tokens[0], 2 * tokens[1]), 4
  found = grids.windows(grid, 2, side)
  window_of = [(r // (2 * side), c // (2 * side)) for r, c in grids.coordinates(grid, 2)]
  start, seen = 0, []
  for count, size in found.runs:
    for _ in range(count):
      inside = {window_of[patch] for patch in found.order[start : start + size]}
      assert len(inside) == 1
      seen += inside
      start += size
  assert start == grid[0] * grid[1] and len(seen) == len(set(seen)) == len(set(window_of))
  assert len(found.runs) <= 4
  np.testing.assert_array_equal((found.order[::4] // 4)[found.restored], np.arange(tokens[0] * tokens[1]))


def test_angles_come_from_the_row_and_then_the_column():
  found = grids.angles((4, 6), 2, 8)
  assert found.shape == (24, 4)
  for (row, column), own in zip(grids.coordinates((4, 6), 2), found, strict=True):
    np.testing.assert_allclose(own, [row, row * 0.01, column, column * 0.01], rtol=1e-6)


def test_positions_are_between_the_rows_of_the_table():
  table = np.random.default_rng(0).normal(size=(5, 5))
  for grid in ((4, 6), (8, 10), (2, 2)):
    index, weight = grids.interpolation(grid, 2, 5)
    found = (table.ravel()[index] * weight).sum(axis=1)
    for (row, column), own in zip(grids.coordinates(grid, 2), found, strict=True):
      y, x = row * 4 / (grid[0] - 1), column * 4 / (grid[1] - 1)
      lines = [np.interp(x, range(5), line) for line in table]
      np.testing.assert_allclose(own, np.interp(y, range(5), lines), rtol=0, atol=1e-5)
