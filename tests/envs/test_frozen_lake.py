"""FrozenLake against Gymnasium and recorded traces; its levels, text and pictures."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.envs import frozen_lake
from ragen_jax.envs.frozen_lake import FrozenLake
from tests.support.environments import batch, make_levels, one, raises_one_line
from tests.support.games.frozen_lake import VARIANTS, distances, gymnasium_table

# -- dynamics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('options', VARIANTS)
@pytest.mark.slow_cases('options2', 'options3', 'options4', 'options5')
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


# -- levels ------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('options', [{}, {'p': 0.3}, {'size': 7, 'p': 0.65}, {'size': 2, 'p': 0.0}, {'p': 1.0}])
@pytest.mark.slow_cases('options2', 'options3', 'options4')
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
  for observation in ('grid', 'spaced', 'coord', 'grid_coord'):
    env = FrozenLake(size=size, observation=observation, symbols=symbols)
    text = env.render(batch(state))[0]
    read = env.from_text(text)
    if observation in ('grid', 'spaced'):
      assert int(read.start) == int(state.player)
      read = read.replace(start=state.start)
    jax.tree.map(np.testing.assert_array_equal, read, state)
    assert jax.tree.map(lambda leaf: leaf.dtype, read) == jax.tree.map(lambda leaf: leaf.dtype, state)


def test_text_of_each_observation():
  text = 'P_O\n__G\nO__'
  states = batch(FrozenLake(size=3).from_text(text))
  assert FrozenLake(size=3).render(states) == [text]
  spaced = FrozenLake(size=3, observation='spaced')
  assert spaced.render(states) == ['P _ O\n_ _ G\nO _ _'] and spaced.rules() == FrozenLake(size=3).rules()
  assert spaced.legend() == FrozenLake(size=3).legend()
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
  with raises_one_line(message):
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
  with raises_one_line(message):
    env.from_text(text.replace(old, new))


def test_bad_desc():
  with raises_one_line("2 squares 'S', must be 1"):
    FrozenLake(size=2).from_desc(['SS', 'FG'])
  with raises_one_line('row 1'):
    FrozenLake(size=2).from_desc(['SX', 'FG'])


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
  with raises_one_line(rf'frozen_lake: {field}=.*; allowed: '):
    FrozenLake(**{field: value})
