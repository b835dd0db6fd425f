"""Digits of dots, and numbers that are written on tiles."""

from __future__ import annotations

import numpy as np

# Each digit row by row; `#` is a dot.
_SMALL = """
### .#. ### ### #.# ### ### ### ### ###
#.# ##. ..# ..# #.# #.. #.. ..# #.# #.#
#.# .#. ### ### ### ### ### .#. ### ###
#.# .#. #.. ..# ..# ..# #.# .#. #.# ..#
### ### ### ### ..# ### ### .#. ### ###
"""
_LARGE = """
.###. ..#.. .###. .###. ...## ##### .###. ##### .###. .###.
##.## .###. ##.## ##.## ..### ##... ##... ...## ##.## ##.##
##.## ..##. ...## ...## .#.## ####. ####. ...## ##.## ##.##
##.## ..##. ..##. .###. ##.## ...## ##.## ..##. .###. .####
##.## ..##. .##.. ...## ##### ...## ##.## ..##. ##.## ...##
##.## ..##. ##... ##.## ...## ##.## ##.## .##.. ##.## ...##
.###. .#### ##### .###. ...## .###. .###. .##.. .###. .###.
"""


def _digits(drawn: str) -> np.ndarray:
  rows = [line.split() for line in drawn.split('\n') if line]
  return np.array([[[dot == '#' for dot in row[digit]] for row in rows] for digit in range(10)])


def small_digits() -> np.ndarray:
  """bool[10, 5, 3], the dots of the digits 0 to 9."""
  return _digits(_SMALL)


def large_digits() -> np.ndarray:
  """bool[10, 7, 5], the dots of the digits 0 to 9."""
  return _digits(_LARGE)


def write_number(tile: np.ndarray, number: int, colour: tuple[int, int, int]) -> bool:
  """Writes a number, 0 or above, into the middle of a tile u8[t, t, 3], as large as fits, in one line or else in two.

  A margin stays free on the left and right, a quarter of the height, and half of it for one line of several digits.
  Returns whether the number fits; if it does not, the tile is unchanged.
  """
  side = len(tile)
  text = str(number)
  half = (len(text) + 1) // 2
  widest = side - 2 * max(side // 14, 1)
  for lines in ((text,), (text[:half], text[half:])):
    highest = side // 2 if lines == (text,) and len(text) > 1 else 3 * side // 4
    shapes = [_text_dots(lines, digits) for digits in (small_digits(), large_digits())]
    enlarged = [dots.repeat(k, 0).repeat(k, 1) for dots in shapes for k in range(1, side)]
    fitting = [dots for dots in enlarged if dots.shape[0] <= highest and dots.shape[1] <= widest]
    if fitting:
      dots = max(fitting, key=lambda dots: (dots.shape[0], dots.shape[1]))
      top, left = (side - dots.shape[0] + 1) // 2, (side - dots.shape[1] + 1) // 2
      tile[top : top + dots.shape[0], left : left + dots.shape[1]][dots] = colour
      return True
  return False


def _text_dots(lines: tuple[str, ...], digits: np.ndarray) -> np.ndarray:
  """bool[h, w], lines of digits, with a dot between digits and between lines."""
  _, height, width = digits.shape
  dots = np.zeros(((height + 1) * len(lines) - 1, (width + 1) * max(map(len, lines)) - 1), bool)
  for row, line in enumerate(lines):
    for column, digit in enumerate(line):
      top, left = row * (height + 1), column * (width + 1)
      dots[top : top + height, left : left + width] = digits[int(digit)]
  return dots
