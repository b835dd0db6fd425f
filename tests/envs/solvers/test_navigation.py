"""Shortest play of Navigation against a plain search, and its plans played to their end."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ragen_jax.envs.base import Budget
from ragen_jax.envs.solvers import navigation as solver
from tests.support.environments import check_limits_of_plans, check_no_levels, one, step, where
from tests.support.games import navigation
from tests.support.games.navigation import COUNT, ENV, Room


@pytest.fixture(scope='module')
def levels():
  return navigation.levels()


@pytest.fixture(scope='module')
def shortest(levels):
  return np.array([Room(ENV, one(levels, i)).shortest() for i in range(COUNT)])


def test_distances_are_those_of_a_plain_search(levels, shortest):
  solution = ENV.solve(levels, Budget(1, 5, 5))
  here = solution.distance[np.arange(COUNT), levels.tilt, levels.heading, *levels.player.T]
  np.testing.assert_array_equal(here, shortest)
  np.testing.assert_array_equal(solution.success, shortest <= 5)
  assert 0 < solution.success.mean() < 1 and shortest.min() >= ENV.min_path == 2
  # Walls and objects are not entered.
  for i in range(4):
    room = Room(ENV, one(levels, i))
    assert all((solution.distance[i, :, :, r, c] == solver.FAR).all() for r, c in room.walls | room.cells)


@pytest.mark.parametrize('budget', [Budget(5, 20, 4), Budget(2, 3, 2)])
def test_plans_reach_the_success_that_they_state(levels, shortest, budget):
  solution = ENV.solve(levels, budget)
  states, left = levels, np.full(COUNT, budget.max_actions)
  for turn in range(budget.max_turns):
    plans = solution.plan(states, np.full(COUNT, budget.max_turns - turn), left)
    for k in range(budget.max_actions_per_turn):
      acts = np.array([k < len(plan) for plan in plans])
      assert not (acts & states.done).any()
      after, _ = step(ENV, states, [plan[k] if k < len(plan) else 0 for plan in plans])
      assert (after.blocked <= ~acts).all()
      states = where(acts, after, states)
      left = left - acts
  np.testing.assert_array_equal(states.success, solution.success == 1)
  np.testing.assert_array_equal(solution.success, shortest <= budget.most_actions)
  assert (states.steps[states.success] == shortest[states.success]).all()


def test_the_games_own_limit_counts(levels, shortest):
  env = dataclasses.replace(ENV, max_steps=6)
  late = levels.replace(steps=np.full(COUNT, 3, np.int32))
  solution = env.solve(late, Budget(5, 6, 5))
  np.testing.assert_array_equal(solution.success, shortest <= 3)
  assert max(len(plan) for plan in solution.plan(late, 5, 6)) == 3


def test_poses_without_a_way_have_one_action(levels):
  state = one(levels, np.s_[:1])
  walls = np.ones_like(state.room.walls)
  row, column = state.player[0]
  walls[0, row, column] = False
  state = state.replace(room=state.room.replace(walls=walls))
  solution = ENV.solve(state, Budget(2, 5, 5))
  assert solution.success.tolist() == [0]
  assert solution.plan(state, 2, 5) == [[0]]


def test_limits(levels):
  check_limits_of_plans(ENV, one(levels, np.s_[:4]))
  check_no_levels(ENV, levels, Budget())
