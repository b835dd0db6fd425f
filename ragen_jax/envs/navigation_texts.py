"""The state of Navigation as text, for policies that read no pictures."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragen_jax.envs.navigation_view import DIRECTIONS

# In the order of `navigation_view.DIRECTIONS`, from the heading on.
_WAYS = ('ahead', 'right', 'back', 'left')
# In the order of `navigation_view.TILTS`.
_GAZES = ('up', 'straight ahead', 'down', 'far down')


def write_state(instruction: str, seen: Sequence[tuple[str, tuple[int, int]]], free: Sequence[int], tilt: int) -> str:
  """The observation of a state.

  Args:
    seen: names of the objects in view, and their places as steps ahead and to the right.
    free: see `free_steps`.
    tilt: index of `navigation_view.TILTS`.
  """
  objects = '; '.join(f'the {name}, {write_place(*place)}' for name, place in seen) or 'no object'
  steps = ', '.join(f'{count} {way}' for count, way in zip(free, _WAYS, strict=True))
  return f'{instruction}\nIn view: {objects}.\nFree steps: {steps}.\nYou look {_GAZES[tilt]}.'


def write_place(ahead: int, aside: int) -> str:
  """'3 ahead and 1 right', '2 ahead'; in steps."""
  if not aside:
    return f'{ahead} ahead'
  return f'{ahead} ahead and {abs(aside)} {"right" if aside > 0 else "left"}'


def free_steps(walls: np.ndarray, places: np.ndarray, player: np.ndarray, heading: int) -> list[int]:
  """How many steps a player can make ahead, right, back and left; walls bool[R, C], objects i32[N, 2]."""
  taken = np.array(walls)
  taken[tuple(places.T)] = True
  counts = []
  for turn in range(4):
    row, column = DIRECTIONS[(heading + turn) % 4]
    r, c, count = int(player[0]) + row, int(player[1]) + column, 0
    while not taken[r, c]:
      r, c, count = r + row, c + column, count + 1
    counts.append(count)
  return counts
