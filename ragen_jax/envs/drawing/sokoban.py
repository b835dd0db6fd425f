"""Images of Sokoban: a tile for each code of a cell."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.drawing.tiles import Canvas, Colour, paint_person
from ragen_jax.envs.sokoban_boards import (
  BOX,
  BOX_ON_TARGET,
  FLOOR,
  MEANINGS,
  PLAYER,
  PLAYER_ON_TARGET,
  TARGET,
  WALL,
)

_FLOOR_RGB, _LINE_RGB = (238, 232, 218), (220, 212, 194)
_BRICK_RGB, _MORTAR_RGB = (134, 88, 74), (86, 62, 58)
_TARGET_RGB = (214, 58, 62)
_COAT_RGB = (46, 98, 196)
# Planks and frame of a box, away from a target and on one.
_WOOD_RGB, _FRAME_RGB = (222, 172, 98), (146, 96, 42)
_PLACED_RGB, _PLACED_FRAME_RGB = (128, 200, 112), (42, 122, 58)


def cells(walls: jax.Array, targets: jax.Array, boxes: jax.Array, player: jax.Array) -> jax.Array:
  """The codes of cells of one state, i32[R, C], from bool[R, C] each and the player's row and column; traced."""
  walls, targets, boxes = (jnp.asarray(x) for x in (walls, targets, boxes))
  rows, columns = walls.shape
  here = (jnp.arange(rows)[:, None] == player[0]) & (jnp.arange(columns) == player[1])
  codes = jnp.where(targets, TARGET, FLOOR)
  codes = jnp.where(boxes, jnp.where(targets, BOX_ON_TARGET, BOX), codes)
  codes = jnp.where(walls, WALL, codes)
  return jnp.where(here, jnp.where(targets, PLAYER_ON_TARGET, PLAYER), codes).astype(jnp.int32)


@functools.cache
def tiles(tile: int) -> np.ndarray:
  """u8[7, t, t, 3], the tile of each code, with sides of t = `tile` pixels."""
  images = np.zeros((len(MEANINGS), tile, tile, 3), np.uint8)
  images[WALL] = _wall(tile)
  images[FLOOR] = _floor(tile).image()
  for code in (TARGET, PLAYER_ON_TARGET):
    canvas = _floor(tile)
    canvas.paint(canvas.disc(0.5, 0.5, 0.4) & ~canvas.disc(0.5, 0.5, 0.3), _TARGET_RGB)
    if code == TARGET:
      canvas.paint(canvas.disc(0.5, 0.5, 0.14), _TARGET_RGB)
    else:
      paint_person(canvas, _COAT_RGB)
    images[code] = canvas.image()
  canvas = _floor(tile)
  paint_person(canvas, _COAT_RGB)
  images[PLAYER] = canvas.image()
  images[BOX] = _box(tile, _WOOD_RGB, _FRAME_RGB)
  images[BOX_ON_TARGET] = _box(tile, _PLACED_RGB, _PLACED_FRAME_RGB)
  return images


def _floor(tile: int) -> Canvas:
  canvas = Canvas(tile, _FLOOR_RGB)
  canvas.paint(~canvas.box(0.0, 0.0, 0.95, 0.95), _LINE_RGB)
  return canvas


def _wall(tile: int) -> np.ndarray:
  canvas = Canvas(tile, _MORTAR_RGB)
  for row in range(3):
    for column in range(-1, 3):
      left, top = 0.5 * column + 0.25 * (row % 2), row / 3
      canvas.paint(canvas.box(left + 0.02, top + 0.03, left + 0.46, top + 0.3), _BRICK_RGB)
  return canvas.image()


def _box(tile: int, planks: Colour, frame: Colour) -> np.ndarray:
  canvas = _floor(tile)
  canvas.paint(canvas.box(0.07, 0.07, 0.93, 0.93, 0.08), frame)
  canvas.paint(canvas.box(0.18, 0.18, 0.82, 0.82), planks)
  inside = canvas.box(0.12, 0.12, 0.88, 0.88)
  canvas.paint(inside & canvas.line((0.15, 0.15), (0.85, 0.85), 0.12), frame)
  canvas.paint(inside & canvas.line((0.15, 0.85), (0.85, 0.15), 0.12), frame)
  return canvas.image()
