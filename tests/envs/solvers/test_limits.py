"""Turns and actions that remain to an episode."""

from __future__ import annotations

import numpy as np

from ragen_jax.envs.base import Budget
from ragen_jax.envs.solvers.limits import check_left, count_actions
from tests.support.environments import raises_one_line

BUDGET = Budget(max_turns=4, max_actions=9, max_actions_per_turn=3)


def test_actions_fit_into_turns_and_into_the_actions_left():
  done = np.array([False, False, False, True, False])
  counts = count_actions('game', BUDGET, done, [4, 2, 0, 4, 4], [9, 9, 9, 9, -1])
  np.testing.assert_array_equal(counts, [9, 6, 0, 0, 0])


def test_one_number_serves_all_levels():
  turns, actions = check_left('game', BUDGET, 4, 7, 3)
  assert turns.tolist() == [4] * 3 and actions.tolist() == [7] * 3
  assert [x.shape for x in check_left('game', BUDGET, 9, 99, 0)] == [(0,), (0,)]


def test_more_than_the_budget_is_refused():
  with raises_one_line('game: turns_left=5; allowed: at most 4, the budget that was solved for'):
    check_left('game', BUDGET, [1, 5], [1, 1], 2)
  with raises_one_line('game: actions_left=10; allowed: at most 9, the budget that was solved for'):
    count_actions('game', BUDGET, np.zeros(2, bool), [1, 1], [1, 10])
