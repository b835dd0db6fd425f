"""Plans and values of games that last one action."""

from __future__ import annotations

import types

import numpy as np

from ragen_jax.envs.solvers.one_action import OneActionSolution


def test_the_best_action_is_played_once():
  solution = OneActionSolution(np.float32([1, 0, 1]), ['a', 'b', 'c'], np.float32([0.5, 0.1, 2]))
  states = types.SimpleNamespace(done=np.array([False, False, True]))
  ones = np.ones(3, np.int32)
  assert solution.plan(states, ones, ones) == [['a'], ['b'], []]
  value = solution.value(states, ones, ones)
  np.testing.assert_array_equal(value, np.float32([0.5, 0.1, 0]))
  assert value.dtype == np.float32
  for turns, actions in ((0, 1), (1, 0)):
    assert solution.plan(states, turns * ones, actions * ones) == [[]] * 3
    assert not solution.value(states, turns * ones, actions * ones).any()
