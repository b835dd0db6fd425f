"""The solver of Sokoban against a plain search on text, by its table and by its forward search."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax.envs.base import Budget
from ragen_jax.envs.sokoban import Sokoban
from ragen_jax.envs.solvers import sokoban as sokoban_solver
from tests.support.environments import batch, one
from tests.support.games.sokoban import (
  AMPLE,
  DOWN,
  FOUR_BOXES,
  LARGE,
  RIGHT,
  SMALL,
  UP,
  fresh,
  plan_turns,
  played,
  random_play,
  shortest,
)


@pytest.fixture(params=['table', 'forward'])
def search(request, monkeypatch):
  """The two ways to search; boards of every size can be searched forward."""
  if request.param == 'forward':
    monkeypatch.setattr(sokoban_solver, 'MAX_TABLE', 0)
  return request.param


@pytest.mark.parametrize(('env', 'count'), [(SMALL, 64), (LARGE, 10)], ids=['small', 'large'])
@pytest.mark.slow_cases('table-large', 'forward-large')
def test_lengths_are_those_of_a_plain_search(env, count, search):
  # Fresh levels, and positions that random play has come to, many of them lost.
  _, _, afters, _ = random_play(env, count=count)
  for states in (fresh(env, count), one(afters, 15)):
    wanted = [shortest(text) for text in env.render(states)]
    solution = env.solve(states, AMPLE)
    assert solution.length.tolist() == wanted
    assert solution.success.tolist() == [float(moves >= 0) for moves in wanted]
    assert solution.success.dtype == np.float32


def test_success_counts_the_budget(search):
  states = fresh(SMALL, 200)
  length = SMALL.solve(states, AMPLE).length
  assert {1, 3, 5} < set(length.tolist())
  for options, moves in (
    ({'max_actions': 3}, 3),
    ({'max_turns': 2, 'max_actions_per_turn': 2}, 4),
    ({'max_turns': 1, 'max_actions_per_turn': 1}, 1),
  ):
    success = SMALL.solve(states, dataclasses.replace(AMPLE, **options)).success
    assert (success == (length <= moves)).all()
  short = dataclasses.replace(SMALL, max_steps=2)
  assert (short.optimal(states, AMPLE) == (length <= 2)).all()


@pytest.mark.parametrize(('env', 'count'), [(SMALL, 64), (LARGE, 10)], ids=['small', 'large'])
@pytest.mark.slow_cases('forward-small', 'table-large')
def test_plans_solve_all_that_can_be_solved(env, count, search):
  states = fresh(env, count)
  budget = Budget(max_turns=3, max_actions=6, max_actions_per_turn=2)
  assert (plan_turns(env, states, budget).success == env.optimal(states, budget)).all()
  budget = Budget(max_turns=10, max_actions=50, max_actions_per_turn=5)
  after = plan_turns(env, states, budget)
  assert after.success.all()
  assert (after.steps == env.solve(states, budget).length).all()


@pytest.mark.parametrize(('env', 'count'), [(SMALL, 100), (LARGE, 30)], ids=['small', 'large'])
def test_plans_go_on_from_where_the_policy_has_strayed(env, count, search):
  start, _, afters, _ = random_play(env, count=count)
  solution = env.solve(start, AMPLE)
  strayed = one(afters, 9)
  plans = solution.plan(strayed, np.full(count, 100), np.full(count, 60))
  lengths = env.solve(strayed, AMPLE).length
  assert (lengths == -1).any() and (lengths > 0).any()
  actions = np.full((max(map(len, plans)), count), -1)
  for i, (plan, moves) in enumerate(zip(plans, lengths, strict=True)):
    assert len(plan) == moves if moves >= 0 else len(plan) >= 1
    actions[: len(plan), i] = plan
  after, outs = played(env, strayed, actions)
  assert (after.success[-1] == (lengths >= 0)).all()
  lost = (lengths == -1) & (actions[0] >= 0)
  assert outs.effective[0, lost].all() and lost.any() and (lengths == 0).any()
  waiting = (np.asarray(strayed.boxes) & ~np.asarray(strayed.targets)).sum(axis=(1, 2))
  earned = outs.reward.sum(axis=0)
  np.testing.assert_allclose(earned[lengths > 0], (waiting + 10 - 0.1 * lengths)[lengths > 0], atol=1e-4)


def test_plans_end_with_the_budget(search):
  states = fresh(SMALL, 4)
  solution = SMALL.solve(states, Budget())
  plans = solution.plan(states, np.array([0, 5, 5, 5]), np.array([5, 0, 1, 5]))
  assert plans[0] == plans[1] == [] and len(plans[2]) == 1 and plans[3]
  tired = dataclasses.replace(SMALL, max_steps=2)
  late = states.replace(steps=np.ones(4, np.int32))
  assert all(len(plan) == 1 for plan in tired.solve(states, Budget()).plan(late, np.full(4, 5), np.full(4, 10)))


def test_groups_and_more_than_64_rooms_keep_their_order():
  states = fresh(SMALL, 200)
  order = np.random.default_rng(0).integers(0, 200, 500)
  several = jax.tree.map(lambda leaf: leaf[order], states)
  assert (SMALL.solve(several, AMPLE).length == SMALL.solve(states, AMPLE).length[order]).all()


def test_a_player_who_is_shut_in_gets_a_legal_action(search):
  states = batch(SMALL.from_text('######\n#P####\n######\n##X_O#\n##___#\n######'))
  solution = SMALL.solve(states, Budget())
  assert solution.length.tolist() == [-1] and solution.success.tolist() == [0.0]
  assert solution.plan(states, np.array([5]), np.array([10])) == [[UP]]


def test_large_boards_are_searched_within_the_budget(monkeypatch):
  env = Sokoban(dim=(10, 10), num_boxes=4)
  states = batch(env.from_text(FOUR_BOXES))
  solution = env.solve(states, Budget(max_turns=4, max_actions=20, max_actions_per_turn=5))
  assert solution.length.tolist() == [11] and solution.success.tolist() == [1.0]
  after = plan_turns(env, states, Budget(max_turns=4, max_actions=20, max_actions_per_turn=5))
  assert after.success.all() and after.steps.tolist() == [11]
  assert env.solve(states, Budget()).success.tolist() == [0.0]
  plan = env.solve(states, Budget()).plan(states, np.array([1]), np.array([5]))[0]
  # Too little for all of them: it does what it can, which is the first box.
  assert plan == [DOWN, RIGHT]
  monkeypatch.setattr(sokoban_solver, 'MAX_SEARCH', 50)
  solution = env.solve(states, Budget(max_turns=4, max_actions=20, max_actions_per_turn=5))
  assert solution.length.tolist() == [-2] and np.isnan(solution.success).all()


def test_no_levels_at_all():
  none = jax.tree.map(lambda leaf: leaf[:0], fresh(SMALL, 4))
  solution = SMALL.solve(none, Budget())
  assert solution.success.shape == (0,) and solution.plan(none, np.zeros(0, int), np.zeros(0, int)) == []
