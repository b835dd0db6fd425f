"""Square tiles, and images that are made of them.

An image of a board is one tile for each cell, so it is a function of the cells' codes: a gather, which `jax.jit` and
`jax.vmap` transform. Tiles are drawn once for each size, on the host, by painting shapes on a `Canvas`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.options import is_integer

Colour = tuple[int, int, int]

# The place of an image in a text.
IMAGE_MARK = '<image>'

MIN_TILE, MAX_TILE = 8, 64
# The side of a tile of `Environment.render_rgb`, in pixels.
PICTURE_TILE = 16
# Samples of a side of a pixel; the colour of a pixel is the mean of its samples, which makes edges smooth.
_SAMPLES = 8


def check_tile(tile: Any) -> None:
  if not is_integer(tile) or not MIN_TILE <= tile <= MAX_TILE:
    raise ValueError(f'tile={tile!r}; allowed: whole numbers of pixels from {MIN_TILE} to {MAX_TILE}')


def compose(tiles: np.ndarray, cells: jax.Array) -> jax.Array:
  """The image of a board, u8[R t, C t, 3], from tiles u8[K, t, t, 3] and the code of each place, i32[R, C]."""
  rows, columns = cells.shape
  side = tiles.shape[1]
  return jnp.asarray(tiles)[cells].swapaxes(1, 2).reshape(rows * side, columns * side, 3)


class Canvas:
  """A tile in the making. Coordinates go from 0 to 1, to the right and down.

  Methods that return bool arrays describe shapes, which `&`, `|` and `~` combine; `paint` fills a shape.

  Attributes:
    x: f64[1, n], the samples' distances from the left side.
    y: f64[n, 1], the samples' distances from the top.
  """

  def __init__(self, tile: int, colour: Colour):
    """A tile of `tile` x `tile` pixels of one colour."""
    n = tile * _SAMPLES
    self.x = (np.arange(n)[None, :] + 0.5) / n
    self.y = (np.arange(n)[:, None] + 0.5) / n
    self._samples = np.full((n, n, 3), colour, np.uint8)

  def paint(self, shape: np.ndarray, colour: Colour) -> None:
    """Fills a shape, bool[n, n], with a colour."""
    self._samples[shape] = colour

  def image(self) -> np.ndarray:
    """The tile, u8[t, t, 3]."""
    t = len(self._samples) // _SAMPLES
    sums = self._samples.reshape(t, _SAMPLES, t, _SAMPLES, 3).sum(axis=(1, 3), dtype=np.int64)
    return ((sums + _SAMPLES**2 // 2) // _SAMPLES**2).astype(np.uint8)

  def ellipse(self, x: float, y: float, across: float, down: float) -> np.ndarray:
    """bool[n, n], an ellipse with its centre and its two radii."""
    return ((self.x - x) / across) ** 2 + ((self.y - y) / down) ** 2 < 1

  def disc(self, x: float, y: float, radius: float) -> np.ndarray:
    """bool[n, n], a disc."""
    return self.ellipse(x, y, radius, radius)

  def box(self, left: float, top: float, right: float, bottom: float, corner: float = 0.0) -> np.ndarray:
    """bool[n, n], a rectangle whose corners are rounded with the radius `corner`."""
    dx = np.maximum(np.maximum(left + corner - self.x, self.x - (right - corner)), 0)
    dy = np.maximum(np.maximum(top + corner - self.y, self.y - (bottom - corner)), 0)
    inside = (self.x > left) & (self.x < right) & (self.y > top) & (self.y < bottom)
    return inside & (dx**2 + dy**2 <= corner**2 if corner else True)

  def line(self, start: tuple[float, float], end: tuple[float, float], width: float) -> np.ndarray:
    """bool[n, n], a straight stroke with round ends, between two places (x, y)."""
    dx, dy = end[0] - start[0], end[1] - start[1]
    along = (((self.x - start[0]) * dx + (self.y - start[1]) * dy) / (dx**2 + dy**2)).clip(0, 1)
    return np.hypot(self.x - start[0] - along * dx, self.y - start[1] - along * dy) < width / 2

  def triangle(self, *corners: tuple[float, float]) -> np.ndarray:
    """bool[n, n], a triangle whose corners (x, y) go clockwise."""
    inside = True
    for (x0, y0), (x1, y1) in zip(corners, (*corners[1:], corners[0]), strict=True):
      inside = inside & ((x1 - x0) * (self.y - y0) - (y1 - y0) * (self.x - x0) >= 0)
    return inside


def paint_person(canvas: Canvas, coat: Colour, x: float = 0.5) -> None:
  """A person with a coat of a colour, whose middle is at `x`."""
  canvas.paint(canvas.box(x - 0.15, 0.74, x - 0.03, 0.92, 0.04), (52, 48, 56))
  canvas.paint(canvas.box(x + 0.03, 0.74, x + 0.15, 0.92, 0.04), (52, 48, 56))
  canvas.paint(canvas.line((x - 0.17, 0.52), (x - 0.25, 0.7), 0.11), (240, 200, 165))
  canvas.paint(canvas.line((x + 0.17, 0.52), (x + 0.25, 0.7), 0.11), (240, 200, 165))
  canvas.paint(canvas.box(x - 0.21, 0.43, x + 0.21, 0.79, 0.12), coat)
  canvas.paint(canvas.disc(x, 0.27, 0.19), (240, 200, 165))
  canvas.paint(canvas.disc(x, 0.25, 0.2) & (canvas.y < 0.21), (84, 56, 38))
  for eye in (x - 0.075, x + 0.075):
    canvas.paint(canvas.disc(eye, 0.29, 0.03), (40, 36, 40))
