"""Exact shortest play of Navigation: breadth-first search over all poses, backwards from those that win.

A pose is a cell, a heading and a tilt of the camera. Arrays of poses are [..., TILTS, HEADINGS, R, C]. The map is known
to the search, so its play is a bound with full information: a policy that sees pictures may have to look around first.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from ragen_jax.envs.base import Budget
from ragen_jax.envs.navigation_view import DIRECTIONS, poses_after
from ragen_jax.envs.solvers.limits import count_actions

# The distance of poses from which no play wins.
FAR = 1 << 20


def distances(wins: jax.Array, free: jax.Array) -> jax.Array:
  """i32[T, 4, R, C], the fewest actions from every pose to a pose that wins; `FAR` if there are none. Traced.

  Args:
    wins: bool[T, 4, R, C], poses in which the target is found.
    free: bool[R, C], cells that the player can enter.
  """

  def nearer(carry):
    distance, _ = carry
    beside = jnp.pad(distance, ((0, 0), (0, 0), (1, 1), (1, 1)), constant_values=FAR)
    tilted = jnp.pad(distance, ((1, 1), (0, 0), (0, 0), (0, 0)), constant_values=FAR)
    rows, columns = free.shape
    best = jnp.minimum(tilted[:-2], tilted[2:])
    for row, column in DIRECTIONS:  # a player can move in all four, whatever the heading
      best = jnp.minimum(best, beside[:, :, 1 + row : 1 + row + rows, 1 + column : 1 + column + columns])
    for turn in (-1, 1):
      best = jnp.minimum(best, jnp.roll(distance, turn, axis=1))
    after = jnp.where(free, jnp.minimum(distance, best + 1), FAR)
    return after, (after != distance).any()

  start = jnp.where(wins & free, 0, FAR).astype(jnp.int32)
  return jnp.minimum(jax.lax.while_loop(lambda carry: carry[1], nearer, (start, jnp.bool_(True)))[0], FAR)


@dataclasses.dataclass(frozen=True, eq=False)
class NavigationSolution:
  """Best play on N levels: a shortest sequence of actions to a pose from which the target is found.

  Attributes:
    distance: i32[N, T, 4, R, C], see `distances`.
    success: f32[N], 1 if the sequence fits into the budget and the game's own limit, else 0.
    max_steps: actions after which the game ends.
  """

  distance: np.ndarray
  success: np.ndarray
  budget: Budget
  max_steps: int

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[int]]:
    """The next turn's actions of a shortest play; errors are those of `base.Solution`.

    If the target is out of reach within the remaining budget, the plan goes nearer; from poses without any way to it,
    the plan is one action.
    """
    left = np.minimum(self._left(states, turns_left, actions_left), self.budget.max_actions_per_turn)
    poses = self._poses(states)
    plans = []
    for i, (most, pose) in enumerate(zip(left.tolist(), zip(*(x.tolist() for x in poses), strict=True), strict=True)):
      plans.append(self._actions(self.distance[i], pose, most))
    return plans

  def _actions(self, distance: np.ndarray, pose: tuple[int, int, int, int], most: int) -> list[int]:
    """Up to `most` actions from a pose, each of which is one step nearer."""
    if most > 0 and distance[pose] >= FAR:
      return [0]
    actions = []
    while len(actions) < most and distance[pose] > 0:
      for action, (tilted, heading, down, right) in enumerate(poses_after()[:, pose[1]].tolist()):
        after = (pose[0] + tilted, heading, pose[2] + down, pose[3] + right)
        if 0 <= after[0] < distance.shape[0] and distance[after] < distance[pose]:
          actions.append(action)
          pose = after
          break
    return actions

  def _left(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
    left = count_actions('navigation', self.budget, states.done, turns_left, actions_left)
    return np.minimum(left, self.max_steps - np.asarray(states.steps))

  def _poses(self, states: Any) -> tuple[np.ndarray, ...]:
    """Tilts, headings, rows and columns of the players, i32[N] each."""
    return (np.asarray(states.tilt), np.asarray(states.heading), *np.moveaxis(np.asarray(states.player), -1, 0))
