"""Distances and plans of the cube against known counts, a plain search and its own play."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.envs import rubik
from ragen_jax.envs.base import Budget
from ragen_jax.envs.rubik import Rubik2x2
from ragen_jax.envs.solvers import rubik as solver
from tests.support.environments import check_limits_of_plans, check_no_levels, make_levels
from tests.support.games.rubik import cubes, modulo_rotation, moved, near, orientations, step

# Positions at 0, 1, ... quarter turns from solved, modulo rotation: the known counts, 3,674,160 in all.
COUNTS = [1, 6, 27, 120, 534, 2256, 8969, 33058, 114149, 360508, 930588, 1350852, 782536, 90280, 276]


# -- distances ---------------------------------------------------------------------------------------------------------


def test_counts_of_positions_by_distance():
  table = solver.distance_table(14)
  assert np.bincount(table).tolist() == COUNTS and sum(COUNTS) == 3_674_160
  assert [list(near().values()).count(d) for d in range(5)] == COUNTS[:5]
  short = solver.distance_table(5)
  np.testing.assert_array_equal(short, np.where(table <= 5, table, -1))


def test_distances_are_those_of_a_plain_search_in_every_orientation():
  rng = np.random.default_rng(0)
  held = [moved(cube, orientations()[rng.integers(24)]) for cube in near()]
  np.testing.assert_array_equal(Rubik2x2().distance(cubes(held)), list(near().values()))
  # Another turn changes the distance by one, never by none: quarter turns are odd.
  states = make_levels(Rubik2x2(scramble_depth=14), 500)
  distance = Rubik2x2().distance(states).astype(int)
  for action in range(12):
    after, _ = step(states, np.full(500, action))
    assert set(abs(Rubik2x2().distance(after).astype(int) - distance).tolist()) == {1}


# -- plans -------------------------------------------------------------------------------------------------------------


def play(env, solution, states, budget):
  """Plays the plans to the end of the episode: the last states, and the actions that were taken."""
  n = len(states.done)
  left = np.full(n, budget.max_actions)
  for turn in range(budget.max_turns):
    plans = solution.plan(states, np.full(n, budget.max_turns - turn), left)
    assert all(len(plan) <= min(budget.max_actions_per_turn, m) for plan, m in zip(plans, left, strict=True))
    for k in range(budget.max_actions_per_turn):
      acts = np.array([k < len(plan) for plan in plans])
      assert not (acts & states.done).any()
      after, _ = step(states, [plan[k] if k < len(plan) else 0 for plan in plans])
      chosen = acts[:, None]
      states = rubik.State(
        done=np.where(acts, after.done, states.done),
        success=np.where(acts, after.success, states.success),
        stickers=np.where(chosen, after.stickers, states.stickers),
      )
      left = left - acts
  return states, budget.max_actions - left


@pytest.mark.parametrize('budget', [Budget(5, 20, 5), Budget(2, 3, 3), Budget(3, 9, 1), Budget(1, 1, 4)])
def test_plans_reach_what_is_said_of_them(budget):
  levels = jax.tree.map(lambda *x: np.concatenate(x), *(make_levels(Rubik2x2(scramble_depth=d), 60) for d in (1, 2, 4)))
  env = Rubik2x2(scramble_depth=4)
  shortest = np.array([near()[modulo_rotation(tuple(cube))] for cube in levels.stickers.tolist()])
  solution = env.solve(levels, budget)
  possible = shortest <= min(budget.max_actions, budget.max_turns * budget.max_actions_per_turn)
  np.testing.assert_array_equal(solution.success, possible)
  np.testing.assert_array_equal(env.optimal(levels, budget), possible)
  assert solution.success.dtype == np.float32
  states, taken = play(env, solution, levels, budget)
  np.testing.assert_array_equal(states.success, possible)
  np.testing.assert_array_equal(taken[possible], shortest[possible])


@pytest.mark.slow
def test_deep_cubes_are_solved_from_wherever_they_are_turned_to():
  env, budget, rng = Rubik2x2(scramble_depth=14, exact_distance=True), Budget(8, 40, 5), np.random.default_rng(0)
  states = make_levels(env, 40)
  solution = env.solve(states, budget)
  assert solution.success.all() and not env.optimal(states, Budget(3, 13, 5)).any()
  for _ in range(5):
    states, _ = step(states, rng.integers(0, 12, 40))
  states, taken = play(env, solution, states, budget)
  assert states.success.all() and taken.min() >= 9 and taken.max() <= 14


def test_plans_where_success_is_out_of_reach_go_nearer():
  env = Rubik2x2(scramble_depth=4, exact_distance=True)
  levels = make_levels(env, 50)
  solution = env.solve(levels, Budget(5, 10, 2))
  plans = solution.plan(levels, np.ones(50), np.full(50, 10))
  assert {len(plan) for plan in plans} == {2}
  for k in range(2):
    levels, _ = step(levels, [plan[k] for plan in plans])
  assert (env.distance(levels) == 2).all()
  # Beyond the whole budget, nothing is known of the way.
  far = make_levels(env, 3)
  assert env.solve(far, Budget(1, 3, 3)).plan(far, np.ones(3), np.array([3, 1, 0])) == [[0], [0], []]


def test_plans_where_the_episode_is_over():
  levels = make_levels(Rubik2x2(), 4)
  check_limits_of_plans(Rubik2x2(), levels)
  check_no_levels(Rubik2x2(), levels, Budget())
