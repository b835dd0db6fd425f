"""The solver of FrozenLake against Gymnasium's tables, a brute-force search and its own play."""

from __future__ import annotations

import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.envs import frozen_lake
from ragen_jax.envs.base import Budget
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.solvers import frozen_lake as solver
from tests.support.environments import batch, check_limits_of_plans, check_no_levels, make_levels, one, raises_one_line
from tests.support.games.frozen_lake import VARIANTS, distances, gymnasium_table

# -- transition probabilities ------------------------------------------------------------------------------------------


@pytest.mark.parametrize('options', VARIANTS)
@pytest.mark.slow_cases('options2', 'options3', 'options4', 'options5')
@pytest.mark.exhaustive_cases('options1')
def test_transition_probabilities_are_gymnasiums(options):
  env = FrozenLake(**options)
  levels = make_levels(env, 8)
  ours = env.transition_probabilities(levels)
  for i in range(8):
    np.testing.assert_allclose(ours[i], gymnasium_table(env, one(levels, i))[0], atol=1e-6)
  np.testing.assert_array_equal(env.transition_probabilities(one(levels)), ours[0])


def test_recorded_slippery_probabilities(golden):
  example = golden['slippery_example']
  env = FrozenLake()
  chance = np.zeros((16, 4, 16))
  for square, by_action in example['P'].items():
    for action, outcomes in by_action.items():
      for probability, there, _, _ in outcomes:
        chance[int(square), int(action), there] += probability
  np.testing.assert_allclose(env.transition_probabilities(env.from_desc(example['desc'])), chance, atol=1e-6)


# -- against brute force -----------------------------------------------------------------------------------------------


def brute_force(chance, goal, hole, budget, discount=1.0):
  """V[turns, actions][square] by walking every sequence as a distribution over squares."""
  squares = len(goal)
  value = {}
  for turns, actions in itertools.product(range(budget.max_turns + 1), range(budget.max_actions + 1)):
    value[turns, actions] = best = np.where(goal, 1.0, 0.0)
    if not turns or not actions:
      continue
    best[~goal & ~hole] = -1
    for length in range(1, min(actions, budget.max_actions_per_turn) + 1):
      after = np.where(goal | hole, goal, value[turns - 1, actions - length])
      for sequence in itertools.product(range(4), repeat=length):
        for square in np.flatnonzero(~goal & ~hole):
          where, worth = np.eye(squares)[square], 0.0
          for k, action in enumerate(sequence, 1):
            where = where @ chance[:, action]
            worth += discount**k * where[goal].sum()
            where[goal | hole] = 0
          best[square] = max(best[square], worth + discount**length * where @ after)
  return value


@pytest.mark.parametrize('options', [{}, {'success_rate': 0.7}, {'is_slippery': False}])
@pytest.mark.slow_cases('options0', 'options2')
def test_optimum_is_what_brute_force_finds(options):
  env = FrozenLake(size=3, p=0.75, **options)
  levels = make_levels(env, 4)
  for budget in (Budget(3, 4, 2), Budget(2, 5, 3), Budget(1, 2, 5)):
    best = env.optimal(levels, budget)
    for i in range(4):
      goal = np.arange(9) == levels.goal[i]
      chance = gymnasium_table(env, one(levels, i))[0]
      value = brute_force(chance, goal, levels.holes[i].reshape(-1), budget)
      want = value[budget.max_turns, budget.max_actions][levels.start[i]]
      np.testing.assert_allclose(best[i], want, atol=1e-5)


def test_plans_are_what_brute_force_finds():
  """Each plan, followed for one turn and then by the best play, is worth the discounted optimum."""
  env, budget, discount = FrozenLake(size=3, p=0.75), Budget(3, 4, 3), 0.9
  level = make_levels(env, 1, first=5)
  solution = env.solve(level, budget, discount)
  goal, hole = np.arange(9) == level.goal[0], level.holes[0].reshape(-1)
  chance = gymnasium_table(env, one(level))[0]
  value = brute_force(chance, goal, hole, budget, discount)
  for turns, actions, square in itertools.product(range(1, 4), range(1, 5), np.flatnonzero(~goal & ~hole)):
    state = level.replace(player=np.array([square], np.int32))
    sequence = solution.plan(state, np.array([turns]), np.array([actions]))[0]
    assert 1 <= len(sequence) <= min(3, actions)
    where, worth = np.eye(9)[square], 0.0
    for k, action in enumerate(sequence, 1):
      where = where @ chance[:, action]
      worth += discount**k * where[goal].sum()
      where[goal | hole] = 0
    worth += discount ** len(sequence) * where @ np.where(goal | hole, goal, value[turns - 1, actions - len(sequence)])
    assert worth == pytest.approx(value[turns, actions][square], abs=2e-4)


# -- by its own play ---------------------------------------------------------------------------------------------------


def play(env, solution, levels, budget, episodes):
  """Plays episodes by the solution's plans: which were won, and the actions they took, [episodes, N]."""

  @jax.jit
  @jax.vmap
  def take(state, actions, key):
    # actions: i32[A], -1 after the last of the turn.
    def one_action(state, x):
      action, key = x
      after, _ = env.step(state, action, key)
      return jax.tree.map(lambda new, old: jnp.where(action < 0, old, new), after, state), (action >= 0) & ~state.done

    keys = jax.random.split(jax.random.wrap_key_data(key), len(actions))
    state, took = jax.lax.scan(one_action, state, (actions, keys))
    return state, took.sum()

  n = len(levels.done)
  won, taken = [], []
  keys = np.asarray(jax.random.key_data(jax.random.split(jax.random.key(7), (episodes, budget.max_turns, n))))
  for i in range(episodes):
    state, left = levels, np.full(n, budget.max_actions)
    for turn in range(budget.max_turns):
      plans = solution.plan(state, np.full(n, budget.max_turns - turn), left)
      actions = [(plan + [-1] * budget.max_actions_per_turn)[: budget.max_actions_per_turn] for plan in plans]
      state, took = jax.tree.map(np.asarray, take(state, np.array(actions, np.int32), keys[i, turn]))
      left = left - took
    assert (left >= 0).all()
    won.append(state.success)
    taken.append(budget.max_actions - left)
  return np.array(won), np.array(taken)


@pytest.mark.parametrize('options', [{}, {'success_rate': 0.8, 'size': 5}])
@pytest.mark.slow
def test_its_own_play_reaches_the_optimum(options):
  env, budget, episodes = FrozenLake(**options), Budget(), 120
  levels = make_levels(env, 64)
  solution = env.solve(levels, budget)
  won = play(env, solution, levels, budget, episodes)[0].mean(axis=0)
  error = np.sqrt((solution.success * (1 - solution.success)).mean() / 64 / episodes)
  assert abs(won.mean() - solution.success.mean()) < 4 * error
  per_level = (won - solution.success) / np.sqrt(np.maximum(solution.success * (1 - solution.success), 1e-3) / episodes)
  assert np.abs(per_level).max() < 5


def test_deterministic_ice_is_a_shortest_path():
  env, budget = FrozenLake(size=5, p=0.7, is_slippery=False), Budget(3, 7, 3)
  levels = make_levels(env, 120)
  steps = np.array([distances(levels.holes[i], levels.goal[i])[int(levels.start[i])] for i in range(120)])
  assert (steps > 7).any()
  solution = env.solve(levels, budget, discount=0.9)
  np.testing.assert_allclose(solution.success, steps <= 7, atol=1e-6)
  (won,), (actions,) = play(env, solution, levels, budget, 1)
  np.testing.assert_array_equal(won, steps <= 7)
  np.testing.assert_array_equal(actions[won], steps[won])


def test_out_of_reach_it_goes_nearer():
  env, budget = FrozenLake(is_slippery=False), Budget(1, 2, 2)
  levels = batch(env.from_desc(['SFFF', 'HHHF', 'FFFF', 'GFFF']))
  solution = env.solve(levels, budget)
  assert solution.success[0] == 0
  assert solution.plan(levels, np.array([1]), np.array([2])) == [[frozen_lake.RIGHT, frozen_lake.RIGHT]]


def test_more_budget_is_never_worse():
  env = FrozenLake()
  levels = make_levels(env, 64)

  def optimum(*budget):
    return env.optimal(levels, Budget(*budget))

  middle = optimum(4, 8, 3)
  for less, more in (((3, 8, 3), (5, 8, 3)), ((4, 7, 3), (4, 9, 3)), ((4, 8, 2), (4, 8, 4))):
    assert (optimum(*less) <= middle + 1e-5).all() and (middle <= optimum(*more) + 1e-5).all()
    assert optimum(*less).mean() < middle.mean() < optimum(*more).mean()


def test_optimum_on_the_validation_levels():
  env = FrozenLake()
  levels = make_levels(env, 256, first=123)
  best = env.optimal(levels, Budget(5, 10, 5))
  single = env.optimal(levels, Budget(5, 10, 1))
  assert best.dtype == np.float32 and best.shape == (256,)
  assert 0.47 < best.mean() < 0.51 and 0.27 < single.mean() < 0.30
  assert (single <= best + 1e-5).all()


def test_discount_shortens_the_play_and_leaves_the_optimum():
  env, budget = FrozenLake(is_slippery=False), Budget(5, 10, 3)
  levels = make_levels(env, 32)
  patient, hasty = env.solve(levels, budget), env.solve(levels, budget, discount=0.8)
  np.testing.assert_array_equal(patient.success, hasty.success)
  patient_actions, hasty_actions = (play(env, solution, levels, budget, 1)[1] for solution in (patient, hasty))
  assert (hasty_actions <= patient_actions).all() and hasty_actions.mean() < patient_actions.mean() - 0.5


# -- limits ------------------------------------------------------------------------------------------------------------


def test_plans_where_the_episode_is_over():
  levels = make_levels(FrozenLake(), 4)
  check_limits_of_plans(FrozenLake(), levels)
  check_no_levels(FrozenLake(), levels, Budget())


def test_solution_does_not_depend_on_the_batch():
  env, budget = FrozenLake(), Budget(3, 6, 3)
  levels = make_levels(env, 37)
  solution = env.solve(levels, budget)
  alone = [env.optimal(jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], levels), budget)[0] for i in range(0, 37, 9)]
  np.testing.assert_allclose(alone, solution.success[::9], atol=1e-6)


@pytest.mark.parametrize(
  ('budget', 'discount', 'message'),
  [
    (Budget(max_turns=0), 1.0, 'budget.max_turns=0'),
    (Budget(5, 20, 12), 1.0, 'budget.max_actions_per_turn=12'),
    (Budget(), 0.0, 'discount=0.0'),
    (Budget(), 1.5, 'discount=1.5'),
  ],
)
def test_bad_solver_arguments(budget, discount, message):
  env = FrozenLake()
  with raises_one_line(message):
    env.solve(make_levels(env, 1), budget, discount)


def test_sequence_numbers():
  listed = [list(s) for length in (1, 2, 3) for s in itertools.product(range(4), repeat=length)]
  assert [solver.numbered_sequence(k) for k in range(84)] == listed
