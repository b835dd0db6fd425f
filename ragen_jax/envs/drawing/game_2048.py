"""Images of 2048: a tile for each power of two, with its number on a colour that depends on the goal."""

from __future__ import annotations

import functools

import numpy as np

from ragen_jax.envs.drawing.font import write_number
from ragen_jax.envs.drawing.tiles import Canvas

_GROUND_RGB, _EMPTY_RGB = (119, 110, 101), (152, 142, 132)
_DARK_RGB, _LIGHT_RGB = (58, 52, 46), (255, 252, 246)
# The colours from the smallest tile to the goal: pale, orange, red, violet.
_STOPS = np.array([[238, 228, 218], [242, 160, 90], [220, 60, 60], [110, 50, 160]])


@functools.cache
def tiles(tile: int, goal_exponent: int) -> np.ndarray:
  """u8[goal_exponent + 1, t, t, 3], t = `tile` pixels: entry 0 is an empty cell, entry e the tile 2**e.

  Numbers that do not fit into a small tile are left out; colours still tell the tiles apart.
  """
  images = []
  for exponent in range(goal_exponent + 1):
    colour = _colour(exponent / goal_exponent) if exponent else _EMPTY_RGB
    canvas = Canvas(tile, _GROUND_RGB)
    canvas.paint(canvas.box(0.04, 0.04, 0.96, 0.96, 0.1), colour)
    image = canvas.image()
    if exponent:
      write_number(image, 2**exponent, _DARK_RGB if sum(colour) > 480 else _LIGHT_RGB)
    images.append(image)
  return np.stack(images)


def _colour(share: float) -> tuple[int, int, int]:
  """The colour of a tile whose exponent is this share, in (0, 1], of the goal's."""
  return tuple(round(np.interp(3 * share, range(4), channel)) for channel in _STOPS.T)
