"""Plans of Sudoku against brute force and their own play."""

from __future__ import annotations

import functools
import itertools

import jax
import numpy as np
import pytest

from ragen_jax.envs.base import Budget
from ragen_jax.envs.sudoku import Sudoku
from tests.support.environments import batch, check_limits_of_plans, check_no_levels, one, raises_one_line, step, where
from tests.support.games.sudoku import LARGE, SMALL, TEXT, Game, make_levels


def play(env, solution, states, budget):
  """Plays the plans to the end of the episode: the last states, and what each brought."""
  n = len(states.done)
  left, total = np.full(n, budget.max_actions), np.zeros(n)
  for turn in range(budget.max_turns):
    turns = np.full(n, budget.max_turns - turn)
    plans = solution.plan(states, turns, left)
    assert all(len(plan) <= min(budget.max_actions_per_turn, m) for plan, m in zip(plans, left, strict=True))
    for k in range(budget.max_actions_per_turn):
      actions = [plan[k] if k < len(plan) else (0, 0, 0) for plan in plans]
      acts = np.array([k < len(plan) for plan in plans])
      after, out = step(env, states, actions)
      states = where(acts, after, states)
      total, left = total + np.where(acts, out.reward, 0), left - acts
  return states, total


@pytest.mark.parametrize(
  ('env', 'budget', 'success'),
  [
    (SMALL, Budget(5, 10, 5), 1),
    (SMALL, Budget(10, 10, 1), 1),
    (SMALL, Budget(9, 10, 1), 0),
    (SMALL, Budget(5, 9, 5), 0),
    (LARGE, Budget(10, 60, 5), 1),
    (LARGE, Budget(9, 60, 5), 0),
  ],
)
@pytest.mark.slow_cases('env4-budget4-1')
def test_plans_reach_what_is_said_of_them(env, budget, success):
  levels = jax.tree.map(lambda leaf: leaf[:16], make_levels(env, 40))
  solution = env.solve(levels, budget)
  assert (solution.success == success).all() and solution.success.dtype == np.float32
  np.testing.assert_array_equal(env.optimal(levels, budget), solution.success)
  states, total = play(env, solution, levels, budget)
  assert (states.success == success).all()
  filled = (states.board != 0).sum(axis=(1, 2)) - (levels.board != 0).sum(axis=(1, 2))
  np.testing.assert_allclose(total, filled + 10 * success, atol=1e-4)
  if success:
    env.check_budget(budget)
  else:
    with raises_one_line(f'empty_cells={env.empty_cells}; allowed: at most {filled[0]}, '):
      env.check_budget(budget)


def test_success_is_what_brute_force_over_all_actions_finds():
  env = Sudoku()
  board = env.render(batch(env.from_text(TEXT)))[0]
  for old, new in ((' .  . |[3] .', ' 4  2 |[3] 1'), ('[4]| .  .', '[4]| 1  3'), (' .  . | . [2]', ' 3  1 | 4 [2]')):
    board = board.replace(old, new)
  state = env.from_text(board.replace('[1] . | .  .', '[1] 3 | .  .'))
  assert (state.board == 0).sum() == 3
  actions = list(itertools.product(range(1, 5), repeat=3))

  @functools.cache
  def best(cells, left):
    """Highest probability of success and then the highest sum of rewards, with `left` actions from a board."""
    if not left:
      return 0, 0
    found = []
    for action in actions:
      game = Game(state.solution, np.array(cells).reshape(4, 4))
      reward, _ = game.play(*action)
      after = (1, 0) if game.done else best(tuple(game.board.values()), left - 1)
      found.append((after[0], reward + after[1]))
    return max(found)

  cells = tuple(state.board.reshape(-1).tolist())
  for left in range(1, 5):
    solution = env.solve(batch(state), Budget(1, left, left))
    success, value = best(cells, left)
    assert solution.success[0] == success
    _, total = play(env, solution, batch(state), Budget(1, left, left))
    assert total == pytest.approx(value)


def test_plans_where_the_episode_is_over():
  levels = one(make_levels(SMALL, 256), np.s_[:4])
  check_limits_of_plans(SMALL, levels)
  check_no_levels(SMALL, levels, Budget())
