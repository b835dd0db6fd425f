"""Exact distances and shortest play of the 2 x 2 x 2 cube, by a table over all 3,674,160 positions."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import numpy as np

from ragen_jax.envs.base import Budget
from ragen_jax.envs.rubik_cube import (
  FIXING_TURNS,
  POSITIONS,
  TURNS,
  corner_orders,
  corner_places,
  corner_twists,
  order_index,
  position_number,
  turn_sources,
  twist_index,
)
from ragen_jax.envs.solvers.limits import count_actions

# The largest distance of a position from the solved cube, in quarter turns.
DIAMETER = 14


@functools.lru_cache(maxsize=2)
def distance_table(depth: int) -> np.ndarray:
  """i8[3674160], quarter turns to the solved cube from every position modulo rotation; -1 if more than `depth`.

  The breadth-first search takes about half a second for `DIAMETER`, a hundredth of a second for 6. The tables of the
  two latest depths are kept.
  """
  corner_at = np.empty(24, np.int64)
  corner_at[corner_places()] = np.arange(8)[:, None]
  place_in_corner = np.empty(24, np.int64)
  place_in_corner[corner_places()] = np.arange(3)
  after = []
  for name in FIXING_TURNS:
    # For each corner, the place from which its first sticker comes determines which corner it was, and its new twist.
    source = turn_sources()[TURNS.index(name)][corner_places()[:, 0]]
    orders = corner_orders()[:, corner_at[source]]
    twists = (corner_twists()[:, corner_at[source]] - place_in_corner[source]) % 3
    after.append((order_index(orders), twist_index(twists)))

  distance = np.full(POSITIONS, -1, np.int8)
  distance[0] = 0
  newest = np.zeros(1, np.int64)
  for d in range(1, depth + 1):
    order, twist = np.divmod(newest, 3**6)
    for order_after, twist_after in after:
      reached = order_after[order] * 3**6 + twist_after[twist]
      distance[reached[distance[reached] < 0]] = d
    newest = np.flatnonzero(distance == d)
  distance.setflags(write=False)
  return distance


@functools.lru_cache(maxsize=2)
def positions_at(depth: int) -> np.ndarray:
  """i32[M], the numbers of the positions at exactly this distance from the solved cube."""
  return np.flatnonzero(distance_table(depth) == depth).astype(np.int32)


def distances(stickers: np.ndarray, most: int = DIAMETER) -> np.ndarray:
  """i8[N], the fewest quarter turns to a solved cube in any orientation from i8[N, 24]; -1 if more than `most`."""
  return distance_table(min(most, DIAMETER))[position_number(stickers)]


@dataclasses.dataclass(frozen=True, eq=False)
class RubikSolution:
  """Best play on N cubes: a shortest sequence of turns to a solved cube.

  `success` is f32[N], 1 if the sequence fits into the budget, else 0.
  """

  success: np.ndarray
  budget: Budget

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[int]]:
    """The next turn's actions of a shortest solution; errors are those of `base.Solution`.

    If the solved cube is further away than the remaining budget, the plan goes nearer; if it is further away than the
    whole budget, the plan is one action.
    """
    left = count_actions('rubik_2x2', self.budget, states.done, turns_left, actions_left)
    left = np.minimum(left, self.budget.max_actions_per_turn)
    stickers = np.asarray(states.stickers)
    distance = self._distances(stickers)
    plans = [[0] if m > 0 and d < 0 else [] for m, d in zip(left, distance, strict=True)]
    left = np.minimum(left, distance)
    for k in range(int(left.max(initial=0))):
      moving = np.flatnonzero(left > k)
      after = stickers[moving][:, turn_sources()]  # [n, 12, 24]
      nearer = self._distances(after.reshape(-1, 24)).reshape(-1, 12)
      action = (nearer == distance[moving, None] - 1).argmax(axis=1)
      for i, a in zip(moving.tolist(), action.tolist(), strict=True):
        plans[i].append(a)
      stickers, distance = stickers.copy(), distance.copy()
      stickers[moving], distance[moving] = after[np.arange(len(moving)), action], distance[moving] - 1
    return plans

  def _distances(self, stickers: np.ndarray) -> np.ndarray:
    """i8[N], the distances; -1 if they exceed the budget."""
    return distances(stickers, self.budget.most_actions)
