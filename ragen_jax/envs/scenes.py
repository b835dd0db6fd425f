"""The things on a board and their places: what a policy may describe of a state."""

from __future__ import annotations

import dataclasses

import numpy as np

Place = tuple[int, int]

# Every kind of thing, in the order of descriptions.
KINDS = ('box', 'target', 'goal', 'hole')


@dataclasses.dataclass(frozen=True)
class Scene:
  """One state: the row and column of the player, and of all things by kind, row by row.

  Kinds of `KINDS` that the game does not have are left out.
  """

  player: Place
  things: dict[str, tuple[Place, ...]]


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
