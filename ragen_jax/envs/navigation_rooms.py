"""The rooms of Navigation: walls and objects from a key, and the part of the split that a room belongs to."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.envs.splits import SPLITS, tenth


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


def draw_room(
  key: jax.Array, dim: tuple[int, int], inner_walls: int, num_objects: int, num_names: int, split: str, spare: int
) -> tuple[Room, jax.Array, jax.Array]:
  """A room of a part of `SPLITS`, redrawn until it belongs to the part, f32[spare] further random numbers, and a key.

  Each inner wall is straight, begins at the border, and leaves at least two cells free.
  """
  low, high = SPLITS[split]
  squares = dim[0] * dim[1]

  def draw(carry):
    key, *_ = carry
    key, own = jax.random.split(key)
    # All random numbers of a room at once, since each call of a generator takes long to compile.
    luck = jax.random.uniform(own, (squares + num_names + 4 * inner_walls + spare,))
    walls = _walls(luck[squares + num_names : len(luck) - spare].reshape(inner_walls, 4), dim)
    free = jnp.where(walls.reshape(-1), -1.0, luck[:squares])
    cells = jax.lax.top_k(free, num_objects)[1]
    names = jax.lax.top_k(luck[squares : squares + num_names], num_objects)[1].astype(jnp.int32)
    places = jnp.stack(jnp.divmod(cells, dim[1]), axis=1).astype(jnp.int32)
    room = Room(walls, places, names)
    part = tenth_of(room)
    return key, room, luck[len(luck) - spare :], (part >= low) & (part < high)

  carry = key, no_room(dim, num_objects), jnp.zeros((spare,)), jnp.bool_(False)
  key, room, luck, _ = jax.lax.while_loop(lambda carry: ~carry[-1], draw, carry)
  return room, luck, key


def no_room(dim: tuple[int, int], num_objects: int) -> Room:
  """Arrays of the shapes of a room, all zero."""
  return Room(
    jnp.zeros(dim, bool), jnp.zeros((num_objects, 2), jnp.int32), jnp.zeros((num_objects,), jnp.int32)
  )  # fmt: skip


def tenth_of(room: Room) -> jax.Array:
  """i32[], the tenth of all rooms, 0 to 9, that a room belongs to: a hash of its walls and objects, in any order."""
  cells = jnp.where(room.walls, 1, 0).at[room.places[:, 0], room.places[:, 1]].set(2 + room.names)
  return tenth(cells.reshape(-1))


def _walls(luck: jax.Array, dim: tuple[int, int]) -> jax.Array:
  """bool[R, C], the border, and an inner wall for each row of random numbers, f32[walls, 4]."""
  rows, columns = dim
  row, column = jnp.arange(rows)[:, None], jnp.arange(columns)[None, :]
  walls = (row == 0) | (row == rows - 1) | (column == 0) | (column == columns - 1)
  for across, far, line, length in luck:
    across, far = across < 0.5, far < 0.5
    line = 2 + (line * (jnp.where(across, rows, columns) - 4)).astype(jnp.int32)
    inside = jnp.where(across, columns, rows) - 2
    length = 1 + (length * (inside - 2)).astype(jnp.int32)
    place, along = jnp.where(across, row, column), jnp.where(across, column, row)
    walls |= (place == line) & jnp.where(far, along > inside - length, along <= length)
  return walls
