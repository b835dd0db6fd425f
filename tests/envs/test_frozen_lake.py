"""FrozenLake against Gymnasium, recorded traces, a brute-force search and its own Monte-Carlo play."""

from __future__ import annotations

import functools
import itertools
import json
import pathlib

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from gymnasium.envs.toy_text.frozen_lake import FrozenLakeEnv
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.envs import base, frozen_lake
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.solvers import frozen_lake as solver

GOLDEN = pathlib.Path(__file__).resolve().parents[3] / 'shared' / 'reference' / 'golden_env_traces.json'
NEIGHBOURS = ((0, -1), (1, 0), (0, 1), (-1, 0))  # Left, Down, Right, Up as (row, column)

VARIANTS = (
  {},
  {'size': 5, 'p': 0.6},
  {'success_rate': 0.8},
  {'success_rate': 0.0},
  {'success_rate': 1.0},
  {'is_slippery': False},
  {'is_slippery': False, 'success_rate': 0.5, 'size': 3},
)


@functools.partial(jax.jit, static_argnums=0)
def reset(env, seeds):
  return jax.vmap(lambda seed: env.reset(jax.random.key(seed)))(seeds)


def make_levels(env, n, first=0):
  """Levels of the keys first, first + 1, ..., in blocks of 256 so that an environment's reset compiles once."""
  blocks = [jax.tree.map(np.asarray, reset(env, np.arange(i, i + 256))) for i in range(first, first + n, 256)]
  return jax.tree.map(lambda *leaves: np.concatenate(leaves)[:n], *blocks)


def one(states, i=0):
  return jax.tree.map(lambda leaf: leaf[i], states)


def batch(state):
  return jax.tree.map(lambda leaf: np.asarray(leaf)[None], state)


def desc_of(state):
  board = np.where(np.asarray(state.holes), 'H', 'F').reshape(-1)
  board[int(state.start)], board[int(state.goal)] = 'S', 'G'
  return [''.join(row) for row in board.reshape(state.holes.shape)]


def distances(holes, goal):
  """Steps to the goal over ice from each square, by breadth-first search; squares that are cut off are left out."""
  size = len(holes)
  steps, queue = {int(goal): 0}, [int(goal)]
  for square in queue:
    for dr, dc in NEIGHBOURS:
      row, column = square // size + dr, square % size + dc
      there = row * size + column
      if 0 <= row < size and 0 <= column < size and not holes[row, column] and there not in steps:
        steps[there] = steps[square] + 1
        queue.append(there)
  return steps


def gymnasium_table(env, state):
  """Transition probabilities, rewards and terminations of Gymnasium's environment on the same map."""
  reference = FrozenLakeEnv(desc=desc_of(state), is_slippery=env.is_slippery, success_rate=env.success_rate)
  squares = env.size**2
  chance, reward, ended = np.zeros((squares, 4, squares)), np.zeros(squares), np.zeros(squares, bool)
  for square, action in itertools.product(range(squares), range(4)):
    for probability, there, gain, done in reference.P[square][action]:
      chance[square, action, there] += probability
      if there != square:
        reward[there], ended[there] = gain, done
  return chance, reward, ended


# -- dynamics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('options', VARIANTS)
def test_transition_probabilities_are_gymnasiums(options):
  env = FrozenLake(**options)
  levels = make_levels(env, 8)
  ours = env.transition_probabilities(levels)
  for i in range(8):
    np.testing.assert_allclose(ours[i], gymnasium_table(env, one(levels, i))[0], atol=1e-6)
  np.testing.assert_array_equal(env.transition_probabilities(one(levels)), ours[0])


@pytest.mark.parametrize('options', VARIANTS)
def test_step_draws_from_the_transition_probabilities(options):
  env = FrozenLake(**options)
  state = one(make_levels(env, 1, first=7))
  chance, reward, ended = gymnasium_table(env, state)
  trials, squares = 3000, env.size**2
  live = np.flatnonzero(env._live(state))

  def play(square, action, key):
    return env.step(state.replace(player=square), action, key)

  square, action = (np.repeat(x, trials) for x in np.meshgrid(live, np.arange(4), indexing='ij'))
  keys = jax.random.split(jax.random.key(1), len(square))
  after, out = jax.jit(jax.vmap(play))(jnp.asarray(square, jnp.int32), jnp.asarray(action), keys)
  counts = np.zeros((squares, 4, squares))
  np.add.at(counts, (square, action, np.asarray(after.player)), 1)
  frequency, expected = counts[live] / trials, chance[live]
  error = np.sqrt(expected * (1 - expected) / trials)
  assert (np.abs(frequency - expected) <= 5 * error + 1e-9).all()

  moved = np.asarray(after.player) != square
  np.testing.assert_array_equal(out.effective, moved)
  np.testing.assert_array_equal(out.reward, np.where(moved, reward[after.player], 0))
  np.testing.assert_array_equal(after.done, np.where(moved, ended[after.player], False))
  np.testing.assert_array_equal(after.success, after.player == int(state.goal))


@pytest.mark.parametrize('end', ['goal', 'hole'])
def test_finished_games_absorb(end):
  env = FrozenLake()
  state = env.from_text('G_O_\n_P__\n____\n____')
  state = state.replace(player=state.goal if end == 'goal' else jnp.int32(2), done=jnp.bool_(True))
  state = state.replace(success=jnp.bool_(end == 'goal'))
  for action in range(4):
    after, out = jax.jit(env.step)(state, jnp.int32(action), jax.random.key(action))
    assert float(out.reward) == 0 and not out.effective
    jax.tree.map(np.testing.assert_array_equal, after, state)


# -- recorded traces ---------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def golden():
  if not GOLDEN.exists():
    pytest.skip('the recorded traces are not beside the repository')
  return json.loads(GOLDEN.read_text())


def test_recorded_traces(golden):
  env = FrozenLake(is_slippery=False)
  step = jax.jit(env.step)
  assert set(golden) == {'sokoban', 'frozen_lake', 'slippery_example'} and len(golden['frozen_lake']) == 30
  for trace in golden['frozen_lake']:
    state = env.from_desc(trace['desc'])
    assert env.render(batch(state)) == [trace['initial']]
    for want in trace['steps']:
      state, out = step(state, env.parse_action(want['action']), jax.random.key(0))
      got = {
        'action': want['action'],
        'reward': float(out.reward),
        'done': bool(state.done),
        'text': env.render(batch(state))[0],
        'effective': bool(out.effective),
        'success': bool(state.success),
      }
      assert got == want


def test_recorded_slippery_probabilities(golden):
  example = golden['slippery_example']
  env = FrozenLake()
  chance = np.zeros((16, 4, 16))
  for square, by_action in example['P'].items():
    for action, outcomes in by_action.items():
      for probability, there, _, _ in outcomes:
        chance[int(square), int(action), there] += probability
  np.testing.assert_allclose(env.transition_probabilities(env.from_desc(example['desc'])), chance, atol=1e-6)


# -- levels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('options', [{}, {'p': 0.3}, {'size': 7, 'p': 0.65}, {'size': 2, 'p': 0.0}, {'p': 1.0}])
def test_levels_are_solvable(options):
  env = FrozenLake(**options)
  levels = make_levels(env, 200)
  for i in range(200):
    level = one(levels, i)
    assert int(level.start) in distances(level.holes, level.goal)
  holes = levels.holes.reshape(200, -1)
  assert (levels.start != levels.goal).all() and (levels.player == levels.start).all()
  assert not holes[np.arange(200), levels.start].any() and not holes[np.arange(200), levels.goal].any()
  assert not levels.done.any() and not levels.success.any()


def test_same_key_same_level():
  env = FrozenLake()
  levels, again = make_levels(env, 50), make_levels(env, 100)
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[:50]), levels, again)
  alone = jax.jit(env.reset)(jax.random.key(3))
  jax.tree.map(lambda a, b: np.testing.assert_array_equal(a, b[3]), alone, levels)
  assert len({text for text in env.render(again)}) > 95


def test_levels_are_distributed_as_a_plain_rejection_sampler_draws_them():
  env, n, rng = FrozenLake(p=0.7), 3000, np.random.default_rng(0)
  levels = make_levels(env, n)

  def features(holes, start, goal):
    return holes.sum(), distances(holes, goal)[int(start)], start, goal, *holes.reshape(-1)

  ours = np.array([features(levels.holes[i], levels.start[i], levels.goal[i]) for i in range(n)], float)
  reference = []
  while len(reference) < n:
    holes = rng.random((4, 4)) >= env.p
    start, goal = rng.choice(16, 2, replace=False)
    holes.reshape(-1)[[start, goal]] = False
    if start in distances(holes, goal):
      reference.append(features(holes, start, goal))
  reference = np.array(reference, float)
  error = np.sqrt((ours.var(0) + reference.var(0)) / n)
  assert (np.abs(ours.mean(0) - reference.mean(0)) < 4.5 * error).all()


# -- text and pictures -------------------------------------------------------------------------------------------------


@st.composite
def states(draw, size):
  squares = size * size
  start, goal = draw(st.lists(st.integers(0, squares - 1), min_size=2, max_size=2, unique=True))
  holes = np.array(draw(st.lists(st.booleans(), min_size=squares, max_size=squares)))
  holes[[start, goal]] = False
  player = draw(st.integers(0, squares - 1))
  return FrozenLake(size=size)._state(holes, start, goal, player)


@settings(max_examples=60, deadline=None)
@given(data=st.data(), size=st.sampled_from([2, 4, 11]), symbols=st.sampled_from(['P_OGX√', '@.#*xY', 'GPXO_é']))
def test_text_round_trip(data, size, symbols):
  state = data.draw(states(size))
  for observation in ('grid', 'coord', 'grid_coord'):
    env = FrozenLake(size=size, observation=observation, symbols=symbols)
    text = env.render(batch(state))[0]
    read = env.from_text(text)
    if observation == 'grid':
      assert int(read.start) == int(state.player)
      read = read.replace(start=state.start)
    jax.tree.map(np.testing.assert_array_equal, read, state)
    assert jax.tree.map(lambda leaf: leaf.dtype, read) == jax.tree.map(lambda leaf: leaf.dtype, state)


def test_text_of_each_observation():
  text = 'P_O\n__G\nO__'
  states = batch(FrozenLake(size=3).from_text(text))
  assert FrozenLake(size=3).render(states) == [text]
  coordinates = 'Board: 3 rows, 3 columns\nStart: (0, 0)\nGoal: (1, 2)\nPlayer: (0, 0)\nHoles: (0, 2), (2, 0)'
  assert FrozenLake(size=3, observation='coord').render(states) == [coordinates]
  both = f'Coordinates:\n{coordinates}\nGrid Map:\n{text}'
  assert FrozenLake(size=3, observation='grid_coord').render(states) == [both]
  assert FrozenLake(size=3).rationale(states) == ['I am at (0, 0), the goal is at (1, 2); no hole beside me.']
  states = batch(FrozenLake(size=3).from_text('_OG\nOP_\n_O_'))
  thought = 'I am at (1, 1), the goal is at (0, 2); holes beside me: Left, Down, Up.'
  assert FrozenLake(size=3).rationale(states) == [thought]


def test_states_read_from_text_can_be_played():
  env = FrozenLake(size=3, is_slippery=False)
  state, out = jax.jit(env.step)(env.from_text('P_O\n__G\nO__'), jnp.int32(frozen_lake.DOWN), jax.random.key(0))
  assert env.render(batch(state)) == ['__O\nP_G\nO__'] and bool(out.effective)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('P_\n_G', '2 rows, must be 3'),
    ('P__\n_G_\n__', "row 3 of the board is '__'"),
    ('P__\n_G_\n__#', "row 3 of the board is '__#'"),
    ('P__\n_GP\n___', '2 squares with a player'),
    ('P__\n___\n___', '0 squares with a goal'),
  ],
)
def test_bad_grids(text, message):
  with pytest.raises(ValueError, match=message):
    FrozenLake(size=3).from_text(text)


@pytest.mark.parametrize(
  ('old', 'new', 'message'),
  [
    ('Goal: (1, 2)\n', '', "no line that begins with 'Goal: '"),
    ('Goal: (1, 2)', 'Goal: (1, 3)', r'must be within \(2, 2\)'),
    ('Player: (0, 0)', 'Player: none', 'has 0 squares, must be 1'),
    ('3 rows', '5 rows', 'line 2 of the text'),
    ('P_O', '_PO', 'line 8 of the text'),
    ('\nO__', '', 'the text has 9 lines, must be 10'),
  ],
)
def test_bad_coordinates(old, new, message):
  env = FrozenLake(size=3, observation='grid_coord')
  text = env.render(batch(FrozenLake(size=3).from_text('P_O\n__G\nO__')))[0]
  assert old in text
  with pytest.raises(ValueError, match=message):
    env.from_text(text.replace(old, new))


def test_bad_desc():
  with pytest.raises(ValueError, match="2 squares 'S', must be 1"):
    FrozenLake(size=2).from_desc(['SS', 'FG'])
  with pytest.raises(ValueError, match='row 1'):
    FrozenLake(size=2).from_desc(['SX', 'FG'])


def test_picture():
  env = FrozenLake()
  picture = env.render_rgb(env.from_text('P_O_\n___G\n____\n____'))
  assert picture.shape == (64, 64, 3) and picture.dtype == np.uint8
  colour = {name: tuple(picture[row * 16 + 2, column * 16 + 2]) for name, row, column in _TILES}
  assert len(set(colour.values())) == 3 and colour['ice'] == colour['under the player']
  assert tuple(picture[8, 8]) not in colour.values()


_TILES = (('ice', 2, 2), ('hole', 0, 2), ('goal', 1, 3), ('under the player', 0, 0))


def test_rules_tell_the_configuration():
  slippery = FrozenLake(success_rate=0.8).rules()
  assert 'slippery' in slippery and '0.8' in slippery and '0.1' in slippery and '4 by 4' in slippery
  for env in (FrozenLake(is_slippery=False), FrozenLake(success_rate=1.0)):
    assert 'slip' not in env.rules()
  assert '(4, 4)' in FrozenLake(size=5, observation='coord').rules() and '(row' not in FrozenLake().rules()


def test_legend_and_actions():
  env = FrozenLake(symbols='@.#*xY')
  assert env.legend()['@'] == 'player' and env.legend()['#'] == 'hole' and len(env.legend()) == 6
  assert FrozenLake(observation='coord').legend() == {}
  assert [env.parse_action(text) for text in ('left', ' Down ', 'RIGHT', 'Up', 'jump')] == [0, 1, 2, 3, None]


@pytest.mark.parametrize(
  ('field', 'value'),
  [
    ('size', 1),
    ('size', 4.0),
    ('p', 1.1),
    ('p', '0.8'),
    ('success_rate', -0.1),
    ('success_rate', float('nan')),
    ('is_slippery', 1),
    ('observation', 'text'),
    ('symbols', 'P_OGX'),
    ('symbols', 'P_OGXX'),
    ('symbols', 'P OGX√'),
    ('symbols', 'P_OGX|'),
    ('symbols', 'P<OGX√'),
    ('symbols', 'P_O\x00X√'),
    ('symbols', 'P_O\u200bX√'),
  ],
)
def test_bad_options_are_named(field, value):
  with pytest.raises(ValueError, match=rf'frozen_lake: {field}=.*; allowed: ') as error:
    FrozenLake(**{field: value})
  assert '\n' not in str(error.value)


# -- solver ------------------------------------------------------------------------------------------------------------


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
def test_optimum_is_what_brute_force_finds(options):
  env = FrozenLake(size=3, p=0.75, **options)
  levels = make_levels(env, 4)
  for budget in (base.Budget(3, 4, 2), base.Budget(2, 5, 3), base.Budget(1, 2, 5)):
    best = env.optimal(levels, budget)
    for i in range(4):
      goal = np.arange(9) == levels.goal[i]
      chance = gymnasium_table(env, one(levels, i))[0]
      value = brute_force(chance, goal, levels.holes[i].reshape(-1), budget)
      want = value[budget.max_turns, budget.max_actions][levels.start[i]]
      np.testing.assert_allclose(best[i], want, atol=1e-5)


def test_plans_are_what_brute_force_finds():
  """Each plan, followed for one turn and then by the best play, is worth the discounted optimum."""
  env, budget, discount = FrozenLake(size=3, p=0.75), base.Budget(3, 4, 3), 0.9
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
def test_its_own_play_reaches_the_optimum(options):
  env, budget, episodes = FrozenLake(**options), base.Budget(), 120
  levels = make_levels(env, 64)
  solution = env.solve(levels, budget)
  won = play(env, solution, levels, budget, episodes)[0].mean(axis=0)
  error = np.sqrt((solution.success * (1 - solution.success)).mean() / 64 / episodes)
  assert abs(won.mean() - solution.success.mean()) < 4 * error
  per_level = (won - solution.success) / np.sqrt(np.maximum(solution.success * (1 - solution.success), 1e-3) / episodes)
  assert np.abs(per_level).max() < 5


def test_deterministic_ice_is_a_shortest_path():
  env, budget = FrozenLake(size=5, p=0.7, is_slippery=False), base.Budget(3, 7, 3)
  levels = make_levels(env, 120)
  steps = np.array([distances(levels.holes[i], levels.goal[i])[int(levels.start[i])] for i in range(120)])
  assert (steps > 7).any()
  solution = env.solve(levels, budget, discount=0.9)
  np.testing.assert_allclose(solution.success, steps <= 7, atol=1e-6)
  (won,), (actions,) = play(env, solution, levels, budget, 1)
  np.testing.assert_array_equal(won, steps <= 7)
  np.testing.assert_array_equal(actions[won], steps[won])


def test_out_of_reach_it_goes_nearer():
  env, budget = FrozenLake(is_slippery=False), base.Budget(1, 2, 2)
  levels = batch(env.from_desc(['SFFF', 'HHHF', 'FFFF', 'GFFF']))
  solution = env.solve(levels, budget)
  assert solution.success[0] == 0
  assert solution.plan(levels, np.array([1]), np.array([2])) == [[frozen_lake.RIGHT, frozen_lake.RIGHT]]


def test_more_budget_is_never_worse():
  env = FrozenLake()
  levels = make_levels(env, 64)

  def optimum(*budget):
    return env.optimal(levels, base.Budget(*budget))

  middle = optimum(4, 8, 3)
  for less, more in (((3, 8, 3), (5, 8, 3)), ((4, 7, 3), (4, 9, 3)), ((4, 8, 2), (4, 8, 4))):
    assert (optimum(*less) <= middle + 1e-5).all() and (middle <= optimum(*more) + 1e-5).all()
    assert optimum(*less).mean() < middle.mean() < optimum(*more).mean()


def test_optimum_on_the_validation_levels():
  env = FrozenLake()
  levels = make_levels(env, 256, first=123)
  best = env.optimal(levels, base.Budget(5, 10, 5))
  single = env.optimal(levels, base.Budget(5, 10, 1))
  assert best.dtype == np.float32 and best.shape == (256,)
  assert 0.47 < best.mean() < 0.51 and 0.27 < single.mean() < 0.30
  assert (single <= best + 1e-5).all()


def test_discount_shortens_the_play_and_leaves_the_optimum():
  env, budget = FrozenLake(is_slippery=False), base.Budget(5, 10, 3)
  levels = make_levels(env, 32)
  patient, hasty = env.solve(levels, budget), env.solve(levels, budget, discount=0.8)
  np.testing.assert_array_equal(patient.success, hasty.success)
  patient_actions, hasty_actions = (play(env, solution, levels, budget, 1)[1] for solution in (patient, hasty))
  assert (hasty_actions <= patient_actions).all() and hasty_actions.mean() < patient_actions.mean() - 0.5


@pytest.mark.parametrize(('turns', 'actions'), [(1, 1), (2, 7), (3, 3), (5, 10)])
def test_value_is_the_optimum_of_a_game_that_begins_here(turns, actions):
  env = FrozenLake()
  levels = make_levels(env, 32)
  solution = env.solve(levels, base.Budget(), discount=0.9)
  squares = np.random.default_rng(turns).integers(0, 16, size=32)
  in_hole, at_goal = levels.holes.reshape(32, 16)[np.arange(32), squares], squares == levels.goal
  states = levels.replace(player=squares.astype(np.int32), done=in_hole | at_goal, success=at_goal)
  value = solution.value(states, np.full(32, turns), np.full(32, actions))
  here = env.solve(states, base.Budget(turns, actions, 5)).success
  np.testing.assert_allclose(value, np.where(states.done, 0, here), atol=1e-6)
  assert value.min() == 0 and value.max() > 0.2
  with pytest.raises(ValueError, match='turns_left=6'):
    solution.value(states, np.full(32, 6), np.full(32, 10))


def test_plans_where_the_episode_is_over():
  env, budget = FrozenLake(), base.Budget()
  levels = make_levels(env, 4)
  solution = env.solve(levels, budget)
  done = levels.replace(done=np.array([True, False, False, False]))
  plans = solution.plan(done, np.array([5, 0, 5, 5]), np.array([10, 10, 0, 1]))
  assert plans[:3] == [[], [], []] and len(plans[3]) == 1
  with pytest.raises(ValueError, match='turns_left=6; allowed: at most 5'):
    solution.plan(levels, np.full(4, 6), np.full(4, 10))
  with pytest.raises(ValueError, match='actions_left=11; allowed: at most 10'):
    solution.plan(levels, np.full(4, 5), np.full(4, 11))


def test_levels_that_are_over_or_missing():
  env = FrozenLake()
  levels = make_levels(env, 2).replace(done=np.array([True, True]), success=np.array([True, False]))
  np.testing.assert_array_equal(env.optimal(levels, base.Budget()), [1, 0])
  none = jax.tree.map(lambda leaf: leaf[:0], levels)
  solution = env.solve(none, base.Budget())
  assert solution.success.shape == (0,) and solution.plan(none, np.zeros(0, int), np.zeros(0, int)) == []
  assert env.render(none) == []


def test_solution_does_not_depend_on_the_batch():
  env, budget = FrozenLake(), base.Budget(3, 6, 3)
  levels = make_levels(env, 37)
  solution = env.solve(levels, budget)
  alone = [env.optimal(jax.tree.map(lambda leaf, i=i: leaf[i : i + 1], levels), budget)[0] for i in range(0, 37, 9)]
  np.testing.assert_allclose(alone, solution.success[::9], atol=1e-6)


@pytest.mark.parametrize(
  ('budget', 'discount', 'message'),
  [
    (base.Budget(max_turns=0), 1.0, 'budget.max_turns=0'),
    (base.Budget(5, 20, 12), 1.0, 'budget.max_actions_per_turn=12'),
    (base.Budget(), 0.0, 'discount=0.0'),
    (base.Budget(), 1.5, 'discount=1.5'),
  ],
)
def test_bad_solver_arguments(budget, discount, message):
  env = FrozenLake()
  with pytest.raises(ValueError, match=message):
    env.solve(make_levels(env, 1), budget, discount)


def test_sequence_numbers():
  listed = [list(s) for length in (1, 2, 3) for s in itertools.product(range(4), repeat=length)]
  assert [solver.numbered_sequence(k) for k in range(84)] == listed
