"""Poses in Navigation and what the camera sees: the silhouettes of objects, and which objects are in view, exactly.

All lengths are in cells, heights too. The camera is at the middle of a cell, `eye` above the floor, and looks along the
rows or columns. A thing `depth` cells ahead and `aside` cells to the right is at aside / depth on the picture, whose
left and right edges are at -tan and tan of half the field of view; the vertical coordinate is
(height - eye) / depth + tan(tilt), so that vertical edges stay vertical whatever the tilt. Each object is an upright
silhouette that faces the camera in the middle of its cell.
"""

from __future__ import annotations

import functools
import math

import jax
import jax.numpy as jnp
import numpy as np

KINDS = ('ball', 'cube', 'post', 'cone')
# Rows and columns of a step in each heading: up, right, down, left on the map.
DIRECTIONS = ((-1, 0), (0, 1), (1, 0), (0, -1))
# Downward tilts of the camera, in degrees.
TILTS = (-30, 0, 30, 60)
LEVEL = TILTS.index(0)

# Of each action: the direction of its step, in quarter turns to the right of the heading, or None; its turn; its tilt.
_STEPS = (0, 2, 1, 3, None, None, None, None)
_TURNS = (0, 0, 0, 0, 1, -1, 0, 0)
_TILT_CHANGES = (0, 0, 0, 0, 0, 0, -1, 1)

_RADIUS = 0.42
_TOPS = (2 * _RADIUS, 0.76, 1.9, 1.3)
_HALF_WIDTHS = (_RADIUS, 0.38, 0.16, _RADIUS)
# Heights of the points by which an object is in view or not.
_MIDDLES = (_RADIUS, 0.37, 0.93, 0.41)
_TANGENTS = tuple(math.tan(math.radians(tilt)) for tilt in TILTS)


@functools.cache
def poses_after() -> np.ndarray:
  """i32[8, 4, 4], for each action and heading: the change of the tilt, the new heading, the change of row and column.

  Nothing blocks the action, and the tilt has no limits.
  """
  table = np.zeros((len(_STEPS), len(DIRECTIONS), 4), np.int32)
  for action, step in enumerate(_STEPS):
    for heading in range(4):
      moved = (0, 0) if step is None else DIRECTIONS[(heading + step) % 4]
      table[action, heading] = _TILT_CHANGES[action], (heading + _TURNS[action]) % 4, *moved
  table.setflags(write=False)
  return table


def tangents() -> jax.Array:
  """f32[4], the tangents of `TILTS`."""
  return jnp.asarray(_TANGENTS, jnp.float32)


def squared_half_width(kind: jax.Array, height: jax.Array) -> jax.Array:
  """The square of half the width of a kind of object at a height, negative where there is nothing of it; f32."""
  top, half = jnp.asarray(_TOPS, jnp.float32)[kind], jnp.asarray(_HALF_WIDTHS, jnp.float32)[kind]
  ball = _RADIUS**2 - (height - _RADIUS) ** 2
  cone = (half * (1 - height / top)) ** 2
  square = jnp.where(kind == KINDS.index('ball'), ball, jnp.where(kind == KINDS.index('cone'), cone, half**2))
  return jnp.where((height >= 0) & (height <= top), square, -1.0)


def offsets(places: jax.Array, cell: jax.Array, heading: jax.Array) -> tuple[jax.Array, jax.Array]:
  """How many cells ahead of, and to the right of, a player places i32[..., 2] are; NumPy or JAX."""
  xp = jnp if isinstance(places, jax.Array) else np
  directions = xp.asarray(DIRECTIONS)
  away = places - cell
  return (away * directions[heading]).sum(-1), (away * directions[(heading + 1) % 4]).sum(-1)


def in_view(
  walls: jax.Array,
  places: jax.Array,
  kinds: jax.Array,
  cell: jax.Array,
  heading: jax.Array,
  tilt: jax.Array,
  *,
  eye: float,
  half_view: float,
) -> jax.Array:
  """bool[N], which objects are in view: their middle is in the picture, and neither walls nor objects hide it.

  Args:
    walls: bool[R, C].
    places: i32[N, 2], cells of the objects.
    kinds: i32[N], indices of `KINDS`.
    cell, heading, tilt: i32[2], i32[], i32[], the pose; `tilt` is an index of `TILTS`.
    half_view: tangent of half the field of view.
  """
  depth, aside = offsets(places, cell, heading)  # [N]
  middle = jnp.asarray(_MIDDLES, jnp.float32)[kinds]
  near = jnp.maximum(depth, 1).astype(jnp.float32)
  slope = (middle - eye) / near
  framed = (depth > 0) & (jnp.abs(aside) <= half_view * near) & (jnp.abs(slope + tangents()[tilt]) <= half_view)
  # Where the line to each object passes each other object: [object, other].
  share = depth[None, :] / near[:, None]
  beside = aside[:, None] * share - aside[None, :]
  height = eye + (middle - eye)[:, None] * share
  covered = beside**2 <= squared_half_width(kinds[None, :], height)
  hidden = (covered & (depth[None, :] > 0) & (depth[None, :] < depth[:, None])).any(1)
  return framed & ~hidden & is_clear(walls, cell, places)


def is_clear(walls: jax.Array, cell: jax.Array, places: jax.Array) -> jax.Array:
  """bool[N], whether the straight lines from the middle of a cell to those of others enter no wall.

  Lines may touch the corner of a wall. The arithmetic is that of integers, with half cells as units.
  """
  rows, columns = walls.shape
  y0, x0 = (2 * cell[i] + 1 for i in range(2))
  y1, x1 = ((2 * places[:, i] + 1)[:, None, None] for i in range(2))  # [N, 1, 1]
  top, left = 2 * jnp.arange(rows)[:, None], 2 * jnp.arange(columns)[None, :]
  beside = (jnp.maximum(y0, y1) > top) & (jnp.minimum(y0, y1) < top + 2)
  beside &= (jnp.maximum(x0, x1) > left) & (jnp.minimum(x0, x1) < left + 2)
  # On which side of the line the four corners of each cell are.
  sides = [(x1 - x0) * (top + i - y0) - (y1 - y0) * (left + j - x0) for i in (0, 2) for j in (0, 2)]
  low, high = sides[0], sides[0]
  for side in sides[1:]:
    low, high = jnp.minimum(low, side), jnp.maximum(high, side)
  return ~(walls & beside & (low < 0) & (high > 0)).any((1, 2))


def can_be_seen(kind: int, reach: int, *, eye: float, half_view: float) -> bool:
  """Whether an object of a kind is in view from some cell, of those whose squared distance is at most `reach`."""
  for depth in range(1, math.isqrt(reach) + 1):
    slope = (_MIDDLES[kind] - eye) / depth
    if any(abs(slope + tangent) < 0.99 * half_view for tangent in _TANGENTS):
      return True
  return False
