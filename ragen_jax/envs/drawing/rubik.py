"""Images of the 2 x 2 x 2 cube: its net as in `rubik_cube`, one tile for each sticker."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.drawing.tiles import Canvas
from ragen_jax.envs.rubik_cube import FACES

GRID = (6, 8)
GROUND = 0  # the code of a place without a sticker; colour c has the code 1 + c

_NET = {'U': (0, 2), 'L': (2, 0), 'F': (2, 2), 'R': (2, 4), 'B': (2, 6), 'D': (4, 2)}  # top left: row, column
_GROUND_RGB, _BODY_RGB = (206, 208, 212), (22, 22, 26)
_COLOURS_RGB = ((250, 250, 250), (250, 218, 40), (246, 128, 26), (202, 26, 44), (24, 154, 74), (28, 84, 196))


def cells(stickers: jax.Array) -> jax.Array:
  """The codes of the places of the net, i32[6, 8], from i8[24], the colour at each place of the cube; traced."""
  codes = 1 + jnp.asarray(stickers, jnp.int32)
  return jnp.concatenate([codes, jnp.full((1,), GROUND, jnp.int32)])[_sources()]


@functools.cache
def _sources() -> np.ndarray:
  """i32[6, 8], the sticker in each place of the net, 24 for none."""
  sources = np.full(GRID, 24, np.int32)
  for face, (row, column) in _NET.items():
    sources[row : row + 2, column : column + 2] = 4 * FACES.index(face) + np.arange(4).reshape(2, 2)
  return sources


@functools.cache
def tiles(tile: int) -> np.ndarray:
  """u8[7, t, t, 3], the ground and the six colours, with sides of t = `tile` pixels."""
  images = [Canvas(tile, _GROUND_RGB).image()]
  for colour in _COLOURS_RGB:
    canvas = Canvas(tile, _BODY_RGB)
    canvas.paint(canvas.box(0.06, 0.06, 0.94, 0.94, 0.14), colour)
    images.append(canvas.image())
  return np.stack(images)
