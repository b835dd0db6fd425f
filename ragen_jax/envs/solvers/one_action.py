"""Best play of games that last one action: Bandit and Countdown."""

from __future__ import annotations

import dataclasses
from typing import Any

import numpy as np


@dataclasses.dataclass(frozen=True, eq=False)
class OneActionSolution:
  """Best play on N levels of a game that ends with its first action, which any budget allows.

  `success`, f32[N], is its probability with the best `actions`.
  """

  success: np.ndarray
  actions: list[Any]

  def plan(self, states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> list[list[Any]]:
    over = _is_over(states, turns_left, actions_left)
    return [[] if stop else [action] for action, stop in zip(self.actions, over.tolist(), strict=True)]


def _is_over(states: Any, turns_left: np.ndarray, actions_left: np.ndarray) -> np.ndarray:
  return np.asarray(states.done) | (np.asarray(turns_left) < 1) | (np.asarray(actions_left) < 1)
