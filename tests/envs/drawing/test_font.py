"""Digits and numbers on tiles."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.envs.drawing.font import large_digits, small_digits, write_number

INK = (200, 10, 60)


def _written(number, side):
  """Whether a number was written, and its dots bool[side, side]."""
  tile = np.zeros((side, side, 3), np.uint8)
  fits = write_number(tile, number, INK)
  dots = tile.any(axis=2)
  assert (tile[dots] == INK).all() and dots.any() == fits
  return fits, dots


def _extent(dots):
  rows, columns = np.flatnonzero(dots.any(1)), np.flatnonzero(dots.any(0))
  return (rows[0], len(dots) - 1 - rows[-1]), (columns[0], len(dots) - 1 - columns[-1])


def test_digits_differ_and_fill_their_cells():
  for digits, shape in ((small_digits(), (10, 5, 3)), (large_digits(), (10, 7, 5))):
    assert digits.shape == shape and len({digit.tobytes() for digit in digits}) == 10
    assert digits.any(axis=2).all()
  assert [''.join('.#'[dot] for dot in row) for row in small_digits()[4].astype(int)] == [
    '#.#', '#.#', '###', '..#', '..#'
  ]  # fmt: skip


@pytest.mark.parametrize('side', [16, 28, 32, 56])
def test_numbers_are_in_the_middle_and_all_different(side):
  seen = set()
  for number in [*range(10), 16, 64, 128, 512, 1024, 2048, 16384, 131072]:
    fits, dots = _written(number, side)
    (top, bottom), (left, right) = _extent(dots)
    assert fits and 0 <= top - bottom <= 1 and top + bottom >= side // 4 and min(left, right) >= 1, number
    assert -2 <= left - right <= 2 + side // 8, number  # the small 1 has a free column
    seen.add(dots.tobytes())
  assert len(seen) == 18


def test_a_number_is_as_large_as_fits():
  _, one = _written(8, 28)
  np.testing.assert_array_equal(one[4:25, 7:22], large_digits()[8].repeat(3, 0).repeat(3, 1))
  _, two = _written(88, 28)
  np.testing.assert_array_equal(two[7:21, 3:13], large_digits()[8].repeat(2, 0).repeat(2, 1))
  np.testing.assert_array_equal(two[7:21, 15:25], two[7:21, 3:13])
  assert not two[:, 13:15].any()
  # Four digits do not fit beside one another into 16 pixels: 20 above 48.
  _, lines = _written(2048, 16)
  for i, digit in enumerate((2, 0, 4, 8)):
    row, column = 3 + 6 * (i // 2), 5 + 4 * (i % 2)
    np.testing.assert_array_equal(lines[row : row + 5, column : column + 3], small_digits()[digit])
  assert not lines[8].any()


def test_a_number_that_does_not_fit_is_left_out():
  assert _written(7, 8)[0] and not _written(1024, 8)[0]
