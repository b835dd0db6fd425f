"""The 2 x 2 x 2 cube as arrays: its turns and rotations, its corners, and the numbers of its positions.

Faces are numbered in the order of `FACES`. Sticker 4 * face + i is the i-th sticker of its face, row by row, where the
face is seen from outside as in this net:

          U U
          U U
      L L F F R R B B
      L L F F R R B B
          D D
          D D

The cube has no fixed orientation. A position is a cube modulo rotation, with its last corner held in place: an order of
the other seven corners, which is a permutation, and their twists, of which six are free.
"""

from __future__ import annotations

import functools
import itertools
import math

import numpy as np

FACES = 'UDLRFB'
# The actions, by id: each face clockwise as seen from outside, then the other way.
TURNS = tuple(face + prime for face in FACES for prime in ('', "'"))
# Turns that leave the last corner in place; every other turn is one of them and a rotation of the whole cube.
FIXING_TURNS = ('U', "U'", 'R', "R'", 'F', "F'")
POSITIONS = math.factorial(7) * 3**6

# A clockwise quarter turn of each face: each sticker goes to the place of the next, the last to the first's place.
_CYCLES = {
  'U': 'U0 U1 U3 U2, F0 L0 B0 R0, F1 L1 B1 R1',
  'D': 'D0 D1 D3 D2, F2 R2 B2 L2, F3 R3 B3 L3',
  'L': 'L0 L1 L3 L2, U0 F0 D0 B3, U2 F2 D2 B1',
  'R': 'R0 R1 R3 R2, U1 B2 D1 F1, U3 B0 D3 F3',
  'F': 'F0 F1 F3 F2, U2 R0 D1 L3, U3 R2 D0 L1',
  'B': 'B0 B1 B3 B2, U0 L2 D3 R1, U1 L0 D2 R3',
}
# The corners, each by its stickers clockwise from that of U or D. The solver holds the last corner in place.
_CORNERS = ('U3 R0 F1', 'U2 F0 L1', 'U0 L0 B1', 'U1 B0 R1', 'D1 F3 R2', 'D0 L3 F2', 'D3 R3 B2', 'D2 B3 L2')


def is_solved(stickers):
  """bool[...], each face has one colour, from [..., 24]; for NumPy and JAX arrays."""
  faces = stickers.reshape(*stickers.shape[:-1], 6, 4)
  return (faces == faces[..., :1]).all(axis=(-2, -1))


def solved_stickers() -> np.ndarray:
  """i8[24], each face in its own colour."""
  return np.repeat(np.arange(6, dtype=np.int8), 4)


def _place(name: str) -> int:
  """The place of a sticker by its name: 5 for 'D1'."""
  return 4 * FACES.index(name[0]) + int(name[1])


@functools.cache
def turn_sources() -> np.ndarray:
  """i32[12, 24], where the sticker at each place comes from, for the turns in the order of `TURNS`."""
  turns = np.tile(np.arange(24, dtype=np.int32), (12, 1))
  for face, cycles in _CYCLES.items():
    clockwise = turns[2 * FACES.index(face)]
    for cycle in cycles.split(', '):
      places = [_place(name) for name in cycle.split()]
      clockwise[places[1:] + places[:1]] = places
    turns[2 * FACES.index(face) + 1] = np.argsort(clockwise)
  return turns


@functools.cache
def followers() -> np.ndarray:
  """i32[12, 10], for each turn the turns that may follow it in a scramble: all but the two that undo it."""
  return np.array([[b for b in range(12) if a // 4 != b // 4 or a % 2 == b % 2] for a in range(12)], np.int32)


@functools.cache
def rotation_sources() -> np.ndarray:
  """i32[24, 24], the rotations of the whole cube, like `turn_sources`: sequences of equal turns of opposite faces."""
  turns = turn_sources()
  steps = [turns[2 * FACES.index(a)][turns[2 * FACES.index(b) + 1]] for a, b in ('UD', 'RL')]
  found = [tuple(range(24))]
  for rotation in found:
    for step in steps:
      after = tuple(np.array(rotation)[step].tolist())
      if after not in found:
        found.append(after)
  return np.array(found, np.int32)


# -- positions ---------------------------------------------------------------------------------------------------------


@functools.cache
def corner_places() -> np.ndarray:
  """i64[8, 3], places of the stickers of the corners."""
  return np.array([[_place(name) for name in corner.split()] for corner in _CORNERS])


def read_corners(stickers: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The corner at each place of cubes i8[N, 24], and its twist, i64[N, 8] each.

  A corner is -1 where three stickers belong to no corner; a twist is the index, 0 to 2, of the U or D sticker.
  """
  shown = stickers[:, corner_places()]  # [N, 8, 3]
  kind = np.full(64, -1)
  kind[(1 << solved_stickers()[corner_places()].astype(np.int64)).sum(axis=1)] = np.arange(8)
  bits = np.bitwise_or.reduce(1 << shown.astype(np.int64), axis=2)
  return kind[bits], (shown < 2).argmax(axis=2)


@functools.cache
def corner_orders() -> np.ndarray:
  """i8[5040, 8], the corner at each place: the permutations of the first seven in lexicographic order."""
  orders = np.array(list(itertools.permutations(range(7))), np.int8)
  return np.pad(orders, ((0, 0), (0, 1)), constant_values=7)


@functools.cache
def corner_twists() -> np.ndarray:
  """i8[729, 8], the twist at each place: six free ones, as digits, and a seventh that makes the sum 0 modulo 3."""
  free = np.stack(np.unravel_index(np.arange(3**6), (3,) * 6), axis=1)
  return np.column_stack([free, -free.sum(axis=1) % 3, np.zeros(3**6)]).astype(np.int8)


def order_index(orders: np.ndarray) -> np.ndarray:
  """Row numbers in `corner_orders` of [N, 8]: the digit of a place is the number of later places with lower corners."""
  index = np.zeros(len(orders), np.int64)
  for i in range(7):
    index = index * (7 - i) + (orders[:, i + 1 : 7] < orders[:, i : i + 1]).sum(axis=1)
  return index


def twist_index(twists: np.ndarray) -> np.ndarray:
  """Row numbers in `corner_twists` of [N, 8]."""
  return twists[:, :6].astype(np.int64) @ 3 ** np.arange(5, -1, -1)


def position_number(stickers: np.ndarray) -> np.ndarray:
  """i64[N], the numbers of the positions of cubes i8[N, 24]; 0 is the solved cube."""
  last, rotations = corner_places()[7], rotation_sources()
  held = stickers[:, rotations[:, last]]  # [N, 24, 3], the stickers at the last corner's place after each rotation
  rotation = (held == solved_stickers()[last]).all(axis=2).argmax(axis=1)
  corner, twist = read_corners(np.take_along_axis(stickers, rotations[rotation], axis=1))
  return order_index(corner) * 3**6 + twist_index(twist)
