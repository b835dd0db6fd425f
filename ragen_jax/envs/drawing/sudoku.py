"""Images of Sudoku: digits on paper, with thick lines between boxes."""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.drawing.font import write_number
from ragen_jax.envs.drawing.tiles import Canvas

_PAPER_RGB, _GIVEN_PAPER_RGB = (253, 252, 247), (226, 226, 218)
_THIN_RGB, _THICK_RGB = (190, 190, 184), (56, 56, 60)
_GIVEN_RGB, _PLACED_RGB = (20, 20, 24), (28, 88, 208)
# Widths of half a line, the other half of which is on the neighbouring tile.
_THIN, _THICK = 0.02, 0.06


def num_symbols(side: int) -> int:
  """Number of symbols: an empty cell, placed digits, given digits."""
  return 1 + 2 * side


def cells(board: jax.Array, given: jax.Array) -> jax.Array:
  """The codes of cells of one state, i32[S, S], from i8[S, S] digits, 0 for empty cells, and bool[S, S]; traced.

  A code is a symbol plus `num_symbols` times the lines around the cell. Symbols: 0 for an empty cell, d for a placed
  digit, S + d for a given one. The lines follow from the cell's row and column in its box.
  """
  side = board.shape[0]
  place = _places(side)
  lines = place[:, None] * 3 + place
  return (jnp.asarray(board, jnp.int32) + side * jnp.asarray(given) + num_symbols(side) * lines).astype(jnp.int32)


def _places(side: int) -> np.ndarray:
  """i32[S], whether a row or column is the first (0) or the last (2) of its boxes, or neither (1)."""
  box = math.isqrt(side)
  at = np.arange(side) % box
  return np.where(at == 0, 0, np.where(at == box - 1, 2, 1)).astype(np.int32)


@functools.cache
def tiles(tile: int, side: int) -> np.ndarray:
  """u8[9 (1 + 2 S), t, t, 3], the tile of each code, for boards of S = `side` cells in a row and t = `tile` pixels."""
  images = np.zeros((9, num_symbols(side), tile, tile, 3), np.uint8)
  for lines in range(9):
    empty = [_cell(tile, lines, given) for given in (False, True)]
    for symbol in range(num_symbols(side)):
      given = symbol > side
      image = empty[given].copy()
      if symbol:
        digit = symbol - side * given
        write_number(image, digit, _GIVEN_RGB if given else _PLACED_RGB)
      images[lines, symbol] = image
  return images.reshape(-1, tile, tile, 3)


def _cell(tile: int, lines: int, given: bool) -> np.ndarray:
  """An empty cell with the lines around it."""
  row, column = divmod(lines, 3)
  left, right = (_THICK if column == end else _THIN for end in (0, 2))
  top, bottom = (_THICK if row == end else _THIN for end in (0, 2))
  canvas = Canvas(tile, _THIN_RGB)
  canvas.paint(canvas.box(_THIN, _THIN, 1 - _THIN, 1 - _THIN), _GIVEN_PAPER_RGB if given else _PAPER_RGB)
  for width, beyond in ((left, canvas.x), (right, 1 - canvas.x), (top, canvas.y), (bottom, 1 - canvas.y)):
    if width == _THICK:
      canvas.paint(np.broadcast_to(beyond < _THICK, (canvas.y.size, canvas.x.size)), _THICK_RGB)
  return canvas.image()
