"""The things of a state and where they are, seen from the player: what a policy may describe of a state.

A claim about a thing has two parts, each a word of a closed vocabulary: on boards, where the thing is vertically and
horizontally; in rooms, in which direction and how far away; on tables, at which coordinates, and on or in what.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

from ragen_jax.envs.navigation_view import offsets

Place = tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Vocabulary:
  """The words of claims 'the KIND is FIRST and SECOND'.

  Attributes:
    kinds: every kind of thing, in the order of descriptions.
    first: words of the first part.
    second: words of the second part.
    shown_as: what the things are in: 'board', 'room' or 'table'.
  """

  kinds: tuple[str, ...]
  first: tuple[str, ...]
  second: tuple[str, ...]
  shown_as: str = 'board'

  @property
  def shape(self) -> tuple[int, int]:
    """Numbers of words of both parts."""
    return len(self.first), len(self.second)


# The words of the signs -1, 0, 1 of row and column differences, thing minus player.
VERTICAL = ('above', 'in the same row', 'below')
HORIZONTAL = ('to the left', 'in the same column', 'to the right')
# Every kind of thing on boards, in the order of descriptions, and its weight in a score; those that are present are
# divided by their sum.
_BOARD_WEIGHTS = {'box': 0.5, 'target': 0.5, 'goal': 0.7, 'hole': 0.3}
KINDS = tuple(_BOARD_WEIGHTS)
BOARD = Vocabulary(KINDS, VERTICAL, HORIZONTAL)

# Directions in rooms, by the signs of the steps ahead and to the right.
_DIRECTIONS = {
  (1, 0): 'ahead', (1, -1): 'ahead to the left', (1, 1): 'ahead to the right', (0, -1): 'to the left',
  (0, 1): 'to the right', (-1, 0): 'behind', (-1, -1): 'behind to the left', (-1, 1): 'behind to the right',
}  # fmt: skip
DIRECTIONS = tuple(_DIRECTIONS.values())
# Distances in rooms: near enough for the target, up to twice as far, farther.
DISTANCES = ('near', 'midway', 'far')


def room_vocabulary(kinds: tuple[str, ...]) -> Vocabulary:
  """The words for rooms with objects of some names."""
  return Vocabulary(kinds, DIRECTIONS, DISTANCES, 'room')


# Coordinates of things on tables are told as whole multiples of this, in millimetres, so within half of it.
TICK = 20
# What a thing on a table is on or in; a drawer itself is open or closed.
HOLDERS, _OF_DRAWERS = ('on the table', 'on a cube', 'in the hand'), ('in the drawer', 'open', 'closed')


@functools.lru_cache(maxsize=64)
def table_vocabulary(kinds: tuple[str, ...], low: Place, high: Place) -> Vocabulary:
  """The words for tables with things of some names, whose x and y are between bounds, or up to a tick beyond them."""
  x, y = (range((least - TICK) // TICK * TICK, most + TICK + 1, TICK) for least, most in zip(low, high, strict=True))
  holders = HOLDERS + _OF_DRAWERS * ('drawer' in kinds)
  return Vocabulary(kinds, tuple(f'at x {a} y {b}' for a in x for b in y), holders, 'table')


@dataclasses.dataclass(frozen=True)
class Scene:
  """One state of a board: the row and column of the player, and of all things by kind, row by row.

  Kinds of `KINDS` that the game does not have are left out.
  """

  player: Place
  things: dict[str, tuple[Place, ...]]

  @property
  def words(self) -> Vocabulary:
    """The words of claims about it."""
    return BOARD

  def relation(self, place: Place) -> tuple[int, int]:
    """Where a place is, as indices of the words of both parts."""
    rows, columns = (int(np.sign(there - here)) + 1 for there, here in zip(place, self.player, strict=True))
    return rows, columns

  def weight(self, kind: str) -> float:
    """The weight of a kind in a score."""
    return _BOARD_WEIGHTS[kind]


@dataclasses.dataclass(frozen=True)
class RoomScene(Scene):
  """One state of a room: the player, and by name the target and the other things in view.

  Attributes:
    heading: index of `navigation_view.DIRECTIONS`.
    target: the target's name; its weight is that of all other things together.
    reach: the largest squared distance that is near, in steps.
    kinds: every name that things can have.
  """

  heading: int
  target: str
  reach: int
  kinds: tuple[str, ...]

  @property
  def words(self) -> Vocabulary:
    return room_vocabulary(self.kinds)

  def relation(self, place: Place) -> tuple[int, int]:
    """Where a place is, which is not the player's, as indices of the words of both parts."""
    ahead, aside = (int(x) for x in offsets(np.array(place), np.array(self.player), self.heading))
    squared = ahead**2 + aside**2
    direction = _DIRECTIONS[int(np.sign(ahead)), int(np.sign(aside))]
    return DIRECTIONS.index(direction), (squared > self.reach) + (squared > 4 * self.reach)

  def weight(self, kind: str) -> float:
    """The weight of a name in a score."""
    return 1.0 if kind == self.target else 1.0 / max(len(self.things) - 1, 1)


@dataclasses.dataclass(frozen=True)
class TableScene(Scene):
  """One state of a table, where `things` have, by name, indices of the words of both parts in place of places.

  There is no player. A drawer, which is at one place until it is pushed, weighs a fifth of an object.

  Attributes:
    kinds, low, high: see `table_vocabulary`.
  """

  kinds: tuple[str, ...]
  low: Place
  high: Place

  @classmethod
  def of(cls, things: dict[str, tuple[Place, str]], low: Place, high: Place) -> TableScene:
    """A scene from the x and y of things in millimetres, and what they are on or in."""
    words = table_vocabulary(tuple(things), low, high)
    relations = {}
    for name, (place, holder) in things.items():
      x, y = ((number + TICK // 2) // TICK * TICK for number in place)
      relations[name] = ((words.first.index(f'at x {x} y {y}'), words.second.index(holder)),)
    return cls((0, 0), relations, words.kinds, low, high)

  @property
  def words(self) -> Vocabulary:
    return table_vocabulary(self.kinds, self.low, self.high)

  def relation(self, place: Place) -> tuple[int, int]:
    """The place itself, see above."""
    return place

  def weight(self, kind: str) -> float:
    return 0.2 if kind == 'drawer' else 1.0


def make_scenes(player: np.ndarray, boards: dict[str, np.ndarray]) -> list[Scene]:
  """The scenes of N states, from i32[N, 2], the player's rows and columns, and bool[N, R, C] for each kind of thing."""
  found = [{kind: [] for kind in boards} for _ in player]
  for kind, board in boards.items():
    for n, row, column in np.argwhere(board).tolist():
      found[n][kind].append((row, column))
  return [
    Scene((row, column), {kind: tuple(places) for kind, places in things.items()})
    for (row, column), things in zip(np.asarray(player).tolist(), found, strict=True)
  ]
