"""First-person pictures of Navigation, cast column by column.

The camera is that of envs/navigation_view.py. A column of the picture has one horizontal ray, which meets the walls at
one depth; the heights at which a row of the picture meets floor, ceiling and the objects depend on the row alone. So a
pixel compares numbers of its row with numbers of its column.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ragen_jax.envs.navigation_view import offsets, squared_half_width, tangents

Colour = tuple[int, int, int]

COLOURS: dict[str, Colour] = {
  'red': (214, 40, 40),
  'green': (44, 160, 66),
  'blue': (46, 92, 214),
  'yellow': (240, 208, 48),
  'purple': (148, 62, 186),
  'orange': (240, 132, 32),
}
_WALL_RGB, _CEILING_RGB = (186, 176, 160), (226, 230, 236)
_FLOOR_RGBS = (146, 116, 86), (122, 96, 70)
# Brightness of walls that the camera sees from the side.
_SIDE = 0.82
# Brightness falls to a half at this depth, in metres.
_DIM_AT = 7.0


def draw(
  walls: jax.Array,
  places: jax.Array,
  kinds: jax.Array,
  colours: jax.Array,
  cell: jax.Array,
  heading: jax.Array,
  tilt: jax.Array,
  *,
  side: int,
  eye: float,
  half_view: float,
  wall_height: float,
  step: float,
) -> jax.Array:
  """The picture from a pose, u8[side, side, 3].

  Args:
    walls, places, kinds, cell, heading, tilt, eye, half_view: see `navigation_view.in_view`.
    colours: u8[N, 3], of the objects.
    wall_height: in cells, as all lengths are; `step` is the side of a cell in metres.
  """
  across = ((jnp.arange(side) + 0.5) / side * 2 - 1) * half_view  # [W], lengths aside per length ahead
  slope = -across - tangents()[tilt]  # [H], rise per length ahead

  # Columns: at which slopes the wall begins and ends, and its colour.
  wall_depth, is_side = _wall_depths(walls, cell, heading, across)  # [W]
  low, high = -eye / wall_depth, (wall_height - eye) / wall_depth
  wall = _packed(_WALL_RGB, jnp.where(is_side, _SIDE, 1.0) * _brightness(wall_depth * step))

  # Rows: the depth of the floor, and its two colours.
  floor_depth = eye / jnp.maximum(-slope, 1e-3)
  light, dark = (_packed(rgb, _brightness(floor_depth * step)) for rgb in _FLOOR_RGBS)
  swapped = (jnp.floor(floor_depth + 0.5).astype(jnp.int32) + cell.sum()) & 1 == 1
  light, dark = jnp.where(swapped, dark, light), jnp.where(swapped, light, dark)

  # Objects, the nearest last: for each column the squared distance from its middle, for each row that of its edge.
  depth, aside = offsets(places, cell, heading)
  order = jnp.argsort(-depth)
  ahead, aside = depth[order].astype(jnp.float32)[:, None], aside[order][:, None]  # [N, 1]
  beside = jnp.where((ahead > 0) & (ahead < wall_depth), (across * ahead - aside) ** 2, jnp.inf)  # [N, W]
  square = squared_half_width(kinds[order][:, None], eye + slope * ahead)  # [N, H]
  paint = _packed(jnp.moveaxis(colours[order], -1, 0), _brightness(ahead[:, 0] * step))  # [N]

  # Without the barrier, the compiler would compute these again for every pixel.
  rows, columns = jax.lax.optimization_barrier(
    ((slope, floor_depth, light, dark, square), (across, low, high, wall, beside, paint))
  )
  slope, floor_depth, light, dark, square = (x[..., :, None] for x in rows)
  across, low, high, wall, beside, paint = columns
  odd = jnp.floor(floor_depth * across + 0.5).astype(jnp.int32) & 1
  picture = jnp.where(slope < 0, jnp.where(odd == 1, dark, light), _packed(_CEILING_RGB, jnp.float32(1)))
  picture = jnp.where((slope >= low) & (slope <= high), wall, picture)
  for i in range(len(places)):
    picture = jnp.where(beside[i] <= square[i], paint[i], picture)
  return jax.lax.bitcast_convert_type(picture, jnp.uint8)[..., :3]


def _wall_depths(
  walls: jax.Array, cell: jax.Array, heading: jax.Array, across: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """For each column of the picture, f32[W], the depth of the nearest wall, and bool[W], whether its side is seen."""
  rows, columns = walls.shape
  size = max(rows, columns)
  square = jnp.pad(walls, ((0, size - rows), (0, size - columns)), constant_values=True)
  # The map, turned so that the camera looks up on it.
  square = jnp.stack([jnp.rot90(square, k) for k in range(4)])[heading]
  row, column = cell
  row, column = (
    jnp.stack([row, size - 1 - column, size - 1 - row, column])[heading],
    jnp.stack([column, row, size - 1 - column, size - 1 - row])[heading],
  )
  square = square.reshape(-1)

  def is_wall(r, c):
    return square[r.clip(0, size - 1) * size + c.clip(0, size - 1)]

  number = jnp.arange(1, size)[:, None]  # of the edges that a ray crosses, [S, 1]
  front = number - 0.5 + jnp.zeros_like(across)
  front_hit = is_wall(row - number, jnp.floor(column + 0.5 + front * across).astype(jnp.int32))
  step_aside = jnp.where(across < 0, -1, 1)
  beside = (number - 0.5) / jnp.maximum(jnp.abs(across), 1e-6)
  beside_hit = is_wall(row - jnp.floor(jnp.minimum(beside, size) + 0.5).astype(jnp.int32), column + step_aside * number)
  front = jnp.where(front_hit, front, jnp.inf).min(0)
  beside = jnp.where(beside_hit, beside, jnp.inf).min(0)
  return jnp.minimum(front, beside), beside < front


def _brightness(metres: jax.Array) -> jax.Array:
  return _DIM_AT / (_DIM_AT + metres)


def _packed(rgb: Sequence[Any], brightness: jax.Array) -> jax.Array:
  """i32[...], a colour in one number, red in its lowest byte, at each brightness f32[...]."""
  red, green, blue = (jnp.round(jnp.asarray(x, jnp.float32) * brightness).astype(jnp.int32) for x in rgb)
  return red | green << 8 | blue << 16
