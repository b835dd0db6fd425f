"""Pictures of Manipulation: boxes and balls above a table, cast ray by ray from a camera that does not move.

A pixel shows the nearest thing that its ray meets. Rays, the table and its targets are constants of a program, so a
picture costs one test of three slabs for each box and pixel.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence

import jax
import jax.numpy as jnp
import numpy as np

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
  'red': (214, 40, 40), 'green': (44, 160, 66), 'purple': (148, 62, 186), 'apple': (200, 24, 48),
  'hand': (70, 74, 82), 'arm': (236, 236, 240), 'cabinet': (150, 104, 60), 'drawer': (206, 164, 110),
  'target': (250, 250, 250),
}  # fmt: skip
_TABLE, _LINES, _BACKGROUND = (112, 136, 156), (98, 122, 142), (226, 230, 236)
# Brightness of faces across x, y and z.
_FACES = (0.85, 0.68, 1.0)
# Distance of lines on the table, in millimetres.
_SQUARE = 100


@dataclasses.dataclass(frozen=True)
class Camera:
  """Where a camera stands, what it looks at (x, y, z in millimetres), and its field of view in radians."""

  eye: tuple[float, float, float]
  target: tuple[float, float, float]
  fov: float = 1.0


@dataclasses.dataclass(frozen=True)
class Box:
  """A box along the axes, or, if `round`, the ball in it.

  `low` and `high` are its corners, f32[3] in millimetres, traced or constant.
  """

  low: jax.Array
  high: jax.Array
  colour: str
  round: bool = False


def draw(camera: Camera, boxes: Sequence[Box], targets: tuple[tuple[int, int, int], ...], side: int) -> jax.Array:
  """The picture of a camera, u8[side, side, 3].

  Args:
    targets: discs on the table, (x, y, radius).
  """
  picture, depth = _floor(camera, targets, side)
  rays, eye = _rays(camera, side), np.asarray(camera.eye, np.float32)
  for box in boxes:
    low, high = (jnp.asarray(corner, jnp.float32) for corner in (box.low, box.high))
    if box.round:
      hit, near, top = _ball(rays, eye, (low + high) / 2, (high[2] - low[2]) / 2)
      paint = jnp.where(top, _packed(COLOURS[box.colour], 1.0), _packed(COLOURS[box.colour], _FACES[1]))
    else:
      ends = [((low[k] - eye[k]) / rays[..., k], (high[k] - eye[k]) / rays[..., k]) for k in range(3)]
      x, y, z = (jnp.minimum(*pair) for pair in ends)
      near = jnp.maximum(jnp.maximum(x, y), z)
      far = functools.reduce(jnp.minimum, (jnp.maximum(*pair) for pair in ends))
      hit = (near < far) & (near > 0)
      faces = [_packed(COLOURS[box.colour], brightness) for brightness in _FACES]
      paint = jnp.where(near == z, faces[2], jnp.where(near == x, faces[0], faces[1]))
    hit &= near < depth
    picture, depth = jnp.where(hit, paint, picture), jnp.where(hit, near, depth)
  return jax.lax.bitcast_convert_type(picture, jnp.uint8)[..., :3]


def _ball(
  rays: np.ndarray, eye: np.ndarray, middle: jax.Array, radius: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
  """bool[H, W], where the rays meet a ball, f32[H, W], at which multiple of the ray, and bool[H, W], at its top."""
  away = eye - middle
  a, b = (rays**2).sum(-1), (rays * away).sum(-1)
  root = b**2 - a * ((away**2).sum() - radius**2)
  near = (-b - jnp.sqrt(jnp.maximum(root, 0))) / a
  return root > 0, near, eye[2] + near * rays[..., 2] > middle[2] + 0.4 * radius


@functools.lru_cache(maxsize=64)
def _rays(camera: Camera, side: int) -> np.ndarray:
  """f32[side, side, 3], the directions of the pixels' rays; no part of them is 0."""
  ahead = np.subtract(camera.target, camera.eye)
  ahead = ahead / np.linalg.norm(ahead)
  right = np.cross(ahead, (0.0, 0.0, 1.0))
  right /= np.linalg.norm(right)
  up = np.cross(right, ahead)
  across = ((np.arange(side) + 0.5) / side * 2 - 1) * math.tan(camera.fov / 2)
  rays = ahead + across[None, :, None] * right - across[:, None, None] * up
  return np.where(np.abs(rays) < 1e-6, 1e-6, rays).astype(np.float32)


@functools.lru_cache(maxsize=64)
def _floor(camera: Camera, targets: tuple[tuple[int, int, int], ...], side: int) -> tuple[np.ndarray, np.ndarray]:
  """The picture of the empty table, i32[side, side] of `_packed` colours, and its depth f32[side, side]."""
  rays = _rays(camera, side).astype(np.float64)
  depth = np.where(rays[..., 2] < 0, camera.eye[2] / np.maximum(-rays[..., 2], 1e-9), np.inf)
  x, y = (np.where(np.isinf(depth), 1e9, camera.eye[k] + np.minimum(depth, 1e9) * rays[..., k]) for k in range(2))
  square = (np.floor(x / _SQUARE) + np.floor(y / _SQUARE)).astype(np.int64)
  picture = np.where(square % 2, _packed(_LINES, 1.0), _packed(_TABLE, 1.0))
  for a, b, radius in targets:
    picture = np.where((x - a) ** 2 + (y - b) ** 2 < radius**2, _packed(COLOURS['target'], 1.0), picture)
  picture = np.where(np.isinf(depth), _packed(_BACKGROUND, 1.0), picture)
  return picture.astype(np.int32), depth.astype(np.float32)


def _packed(rgb: Colour, brightness: float) -> np.int32:
  """A colour in one number, red in its lowest byte."""
  red, green, blue = (round(x * brightness) for x in rgb)
  return np.int32(red | green << 8 | blue << 16)
