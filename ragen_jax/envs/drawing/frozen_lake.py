"""Images of FrozenLake: a tile for each symbol of the text."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.drawing.tiles import Canvas, paint_person

# The codes of squares, in the order of `FrozenLake.symbols`.
PLAYER, ICE, HOLE, GOAL, IN_HOLE, ON_GOAL = range(6)

_ICE_RGB, _EDGE_RGB, _SHINE_RGB = (214, 234, 247), (178, 208, 230), (240, 249, 255)
_RIM_RGB, _WATER_RGB, _WAVE_RGB = (126, 166, 202), (24, 54, 98), (84, 136, 190)
_POLE_RGB, _FLAG_RGB = (96, 70, 44), (36, 158, 78)
_COAT_RGB = (226, 104, 34)


def cells(holes: jax.Array, goal: jax.Array, player: jax.Array) -> jax.Array:
  """The codes of squares of one state, i32[size, size]; traced. `goal` and `player` are numbers of squares."""
  holes = jnp.asarray(holes)
  square = jnp.arange(holes.size).reshape(holes.shape)
  codes = jnp.where(holes, HOLE, jnp.where(square == goal, GOAL, ICE))
  occupied = jnp.where(square == goal, ON_GOAL, jnp.where(holes, IN_HOLE, PLAYER))
  return jnp.where(square == player, occupied, codes).astype(jnp.int32)


@functools.cache
def tiles(tile: int) -> np.ndarray:
  """u8[6, t, t, 3], the tile of each code, with sides of t = `tile` pixels."""
  images = np.zeros((6, tile, tile, 3), np.uint8)
  for code in range(6):
    canvas = Canvas(tile, _ICE_RGB)
    canvas.paint(canvas.line((0.1, 0.34), (0.34, 0.1), 0.05), _SHINE_RGB)
    canvas.paint(canvas.line((0.66, 0.9), (0.9, 0.66), 0.05), _SHINE_RGB)
    canvas.paint(~canvas.box(0.0, 0.0, 0.95, 0.95), _EDGE_RGB)
    if code in (HOLE, IN_HOLE):
      canvas.paint(canvas.ellipse(0.49, 0.5, 0.44, 0.41), _RIM_RGB)
      canvas.paint(canvas.ellipse(0.49, 0.53, 0.38, 0.34), _WATER_RGB)
    if code in (GOAL, ON_GOAL):
      _paint_flag(canvas, 0.3 if code == GOAL else 0.54)
    if code in (PLAYER, IN_HOLE, ON_GOAL):
      paint_person(canvas, _COAT_RGB, 0.28 if code == ON_GOAL else 0.5)
    if code == IN_HOLE:
      _paint_water(canvas)
    images[code] = canvas.image()
  return images


def _paint_flag(canvas: Canvas, x: float) -> None:
  """A flag with its pole at `x`."""
  canvas.paint(canvas.ellipse(x + 0.03, 0.87, 0.16, 0.06), _EDGE_RGB)
  canvas.paint(canvas.box(x, 0.1, x + 0.07, 0.88, 0.03), _POLE_RGB)
  canvas.paint(canvas.triangle((x + 0.07, 0.12), (x + 0.4, 0.3), (x + 0.07, 0.5)), _FLAG_RGB)


def _paint_water(canvas: Canvas) -> None:
  """Water up to the shoulders of a person in a hole."""
  below = (canvas.y > 0.5) & canvas.ellipse(0.49, 0.53, 0.38, 0.34)
  canvas.paint((canvas.y > 0.5) & canvas.box(0.2, 0.4, 0.8, 0.95), _ICE_RGB)
  canvas.paint((canvas.y > 0.5) & canvas.ellipse(0.49, 0.5, 0.44, 0.41), _RIM_RGB)
  canvas.paint(below, _WATER_RGB)
  for y in (0.56, 0.7):
    canvas.paint(below & canvas.line((0.3, y), (0.7, y), 0.05), _WAVE_RGB)
