"""The rooms of Navigation: walls and objects from a key, and the part of the split that a room belongs to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

# Part of the split -> its tenths of all rooms, as a range.
SPLITS = {'all': (0, 10), 'test': (0, 1), 'validation': (1, 2), 'train': (2, 10)}


@struct.dataclass
class Room:
  """Walls and N objects on R x C cells.

  Attributes:
    walls: bool[R, C]; the border is wall.
    places: i32[N, 2], rows and columns of the objects, in different cells without walls.
    names: i32[N], numbers of the objects' names, which differ.
  """

  walls: jax.Array
  places: jax.Array
  names: jax.Array

  @property
  def taken(self) -> jax.Array:
    """bool[R, C], cells with a wall or an object."""
    return jnp.asarray(self.walls).at[self.places[:, 0], self.places[:, 1]].set(True)


def draw_room(key: jax.Array, dim: tuple[int, int], inner_walls: int, num_objects: int, num_names: int, split: str):
  """A `Room` of a part of `SPLITS`, redrawn until it belongs to the part. Returns it and a fresh key.

  Each inner wall is straight, begins at the border, and leaves at least two cells free.
  """
  low, high = SPLITS[split]

  def draw(carry):
    key, *_ = carry
    key, *keys = jax.random.split(key, 4)
    walls = _walls(keys[0], dim, inner_walls)
    free = jnp.where(walls, -1.0, jax.random.uniform(keys[1], dim)).reshape(-1)
    cells = jax.lax.top_k(free, num_objects)[1]
    names = jax.lax.top_k(jax.random.uniform(keys[2], (num_names,)), num_objects)[1].astype(jnp.int32)
    places = jnp.stack(jnp.divmod(cells, dim[1]), axis=1).astype(jnp.int32)
    room = Room(walls, places, names)
    tenth = tenth_of(room)
    return key, room, (tenth >= low) & (tenth < high)

  key, room, _ = jax.lax.while_loop(lambda carry: ~carry[-1], draw, (key, no_room(dim, num_objects), jnp.bool_(False)))
  return room, key


def no_room(dim: tuple[int, int], num_objects: int) -> Room:
  """Arrays of the shapes of a room, all zero."""
  return Room(
    jnp.zeros(dim, bool), jnp.zeros((num_objects, 2), jnp.int32), jnp.zeros((num_objects,), jnp.int32)
  )  # fmt: skip


def tenth_of(room: Room) -> jax.Array:
  """i32[], the tenth of all rooms, 0 to 9, that a room belongs to: a hash of its walls and objects, in any order."""
  cells = jnp.where(room.walls, 1, 0).at[room.places[:, 0], room.places[:, 1]].set(2 + room.names)
  cells = cells.reshape(-1).astype(jnp.uint32)
  places = _mixed(jnp.arange(len(cells), dtype=jnp.uint32))
  total = _mixed(cells * jnp.uint32(0x9E3779B1) + places).sum(dtype=jnp.uint32)
  return (_mixed(total) % 10).astype(jnp.int32)


def _mixed(x: jax.Array) -> jax.Array:
  """A permutation of u32 that spreads every bit over all others."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)


def _walls(key: jax.Array, dim: tuple[int, int], inner_walls: int) -> jax.Array:
  rows, columns = dim
  row, column = jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]
  walls = (row == 0) | (row == rows - 1) | (column == 0) | (column == columns - 1)
  for own in jax.random.split(key, inner_walls):
    keys = jax.random.split(own, 4)
    across, far = jax.random.bernoulli(keys[0]), jax.random.bernoulli(keys[1])
    line = jax.random.randint(keys[2], (), 2, jnp.where(across, rows, columns) - 2)
    inside = jnp.where(across, columns, rows) - 2
    length = jax.random.randint(keys[3], (), 1, inside - 1)
    place, along = jnp.where(across, row, column), jnp.where(across, column, row)
    walls |= (place == line) & jnp.where(far, along > inside - length, along <= length)
  return walls
