"""Checks of the remaining turns and actions, which are arguments of `Solution.plan` and `Solution.value`."""

from __future__ import annotations

from typing import Any

import numpy as np

from ragen_jax.envs.base import Budget


def check_left(
  env: str, budget: Budget, turns_left: Any, actions_left: Any, count: int
) -> tuple[np.ndarray, np.ndarray]:
  """Remaining turns and actions of each level, two i64[count], from integers for each level or one for all.

  Raises ValueError if more turns or actions remain than the budget has that the levels were solved for.
  """
  turns, actions = (np.broadcast_to(np.asarray(x, np.int64), (count,)) for x in (turns_left, actions_left))
  for name, left, most in (
    ('turns_left', turns, budget.max_turns),
    ('actions_left', actions, budget.max_actions),
  ):
    if count and left.max() > most:
      raise ValueError(f'{env}: {name}={left.max()}; allowed: at most {most}, the budget that was solved for')
  return turns, actions


def count_actions(env: str, budget: Budget, done: Any, turns_left: Any, actions_left: Any) -> np.ndarray:
  """i64[N], the actions that can still be made in each level; 0 where `done`, bool[N]. Errors as in `check_left`."""
  turns, actions = check_left(env, budget, turns_left, actions_left, len(np.asarray(done)))
  return np.where(done, 0, np.maximum(np.minimum(actions, turns * budget.max_actions_per_turn), 0))
