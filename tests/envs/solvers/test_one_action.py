"""Plans of games that last one action."""

from __future__ import annotations

import types

import numpy as np

from ragen_jax.envs.solvers.one_action import OneActionSolution


def test_the_best_action_is_played_once():
  solution = OneActionSolution(np.float32([1, 0, 1]), ['a', 'b', 'c'])
  states = types.SimpleNamespace(done=np.array([False, False, True]))
  ones = np.ones(3, np.int32)
  assert solution.plan(states, ones, ones) == [['a'], ['b'], []]
  for turns, actions in ((0, 1), (1, 0)):
    assert solution.plan(states, turns * ones, actions * ones) == [[]] * 3
