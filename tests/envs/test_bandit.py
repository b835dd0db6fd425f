"""Bandit: the odds of its arms, its names and their order, and the text."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.envs import bandit
from ragen_jax.envs.bandit import HIGH, LOW, Bandit
from ragen_jax.envs.base import Budget
from tests.support.environments import batch, check_text_round_trip, make_levels, raises_one_line, step

PRESETS = (
  'PHOENIX_DRAGON',
  'TRADER_LIBRARIAN',
  'PROFESSIONS_TRAIN',
  'PROFESSIONS_TEST',
  'REVERSED_TRAIN',
  'REVERSED_TEST',
  'RAGEN2_TRAIN',
  'RAGEN2_TEST',
)
QUESTION = 'Think about which name suggests low risk and which high risk, then pull one arm.'


# -- dynamics ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('options', [{}, {'low_reward': -0.5, 'high_reward': 3.0, 'high_probability': 0.6}])
def test_what_the_arms_pay(options):
  env, n = Bandit(**options), 20_000
  levels = make_levels(env, n)
  low, high = (env.parse_action(name) for name in env.arms[0])

  after, out = step(env, levels, np.full(n, low))
  np.testing.assert_array_equal(out.reward, np.float32(env.low_reward))
  assert after.done.all() and not after.success.any() and out.effective.all()

  after, out = step(env, levels, np.full(n, high))
  paid = out.reward == env.high_reward
  assert (paid | (out.reward == 0)).all()
  error = np.sqrt(env.high_probability * (1 - env.high_probability) / n)
  assert abs(paid.mean() - env.high_probability) < 4 * error
  assert after.done.all() and after.success.all() and out.effective.all()
  np.testing.assert_array_equal(after.points, out.reward)


def test_the_order_of_the_names_does_not_change_the_odds():
  env, n = Bandit(), 20_000
  levels = make_levels(env, n)
  paid = step(env, levels, np.full(n, env.parse_action('dragon')))[1].reward
  error = np.sqrt(0.25 * 0.75 / (n / 2))
  for first in (True, False):
    assert abs(paid[levels.high_first == first].mean() - 0.25) < 4 * error


def test_one_pull_ends_the_game():
  env = Bandit()
  levels = make_levels(env, 200)
  after, _ = step(env, levels, np.arange(200) % 2)
  again, out = step(env, after, (np.arange(200) + 1) % 2, seed=1)
  jax.tree.map(np.testing.assert_array_equal, again, after)
  assert not out.reward.any() and not out.effective.any()


def test_an_arm_that_is_not_on_offer_does_nothing():
  env = Bandit(arms=bandit.RAGEN2_TRAIN)
  levels = make_levels(env, 300)
  for action in (env.parse_action('Nurse'), env.parse_action('Cryptominer'), -1, len(env.names)):
    after, out = step(env, levels, np.full(300, action))
    offered = np.array([0 <= action < len(env.names) and env.names[action] in env.arms[p] for p in levels.pair])
    np.testing.assert_array_equal(after.done, offered)
    np.testing.assert_array_equal(out.effective, offered)
    assert not out.reward[~offered].any()
    same = jax.tree.map(lambda a, b, offered=offered: np.array_equal(a[~offered], b[~offered]), after, levels)
    assert all(jax.tree.leaves(same))


# -- levels ------------------------------------------------------------------------------------------------------------


def test_pairs_and_orders_are_equally_likely():
  env, n = Bandit(arms=bandit.RAGEN2_TEST), 16_000
  levels = make_levels(env, n)
  counts = np.bincount(levels.pair * 2 + levels.high_first, minlength=16)
  assert (np.abs(counts - n / 16) < 4.5 * np.sqrt(n / 16)).all()


def test_same_key_same_prompt():
  env = Bandit(arms=bandit.RAGEN2_TRAIN)
  texts = env.render(make_levels(env, 200))
  assert texts == env.render(make_levels(env, 200))
  assert texts[17] == env.render(batch(jax.jit(env.reset)(jax.random.key(17))))[0]
  assert len(set(texts)) == 24


# -- names -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize('text', ['Dragon', 'dragon', ' DRAGON\n', 'drag on'])
def test_names_are_read_in_any_case(text):
  env = Bandit()
  assert env.parse_action(text) == 1 and env.format_action(1) == 'Dragon'


def test_every_name_has_one_id():
  env = Bandit(arms=(('Nurse', 'Pilot'), ('Clerk', 'Pilot'), ('Pilot', 'Diver')))
  assert env.names == ('Nurse', 'Pilot', 'Clerk', 'Diver')
  assert [env.parse_action(env.format_action(i)) for i in range(4)] == [0, 1, 2, 3]
  assert env.parse_action('Gardener') is None and env.parse_action('') is None
  levels = make_levels(env, 100)
  after, _ = step(env, levels, np.full(100, env.parse_action('pilot')))
  # The same name is the high arm of two pairs and the low arm of the third.
  np.testing.assert_array_equal(after.pulled, np.where(levels.pair == 2, LOW, HIGH))


@pytest.mark.parametrize('preset', PRESETS)
def test_presets(preset):
  env = Bandit(arms=getattr(bandit, preset))
  assert len(env.names) == 2 * len(env.arms)
  texts = env.render(make_levels(env, 50))
  assert all(env.parse_action(line) is not None for text in texts for line in text.splitlines()[1:3])


def test_training_and_test_pairs_share_no_name():
  for train, test in (
    (bandit.PHOENIX_DRAGON, bandit.TRADER_LIBRARIAN),
    (bandit.PROFESSIONS_TRAIN, bandit.PROFESSIONS_TEST),
    (bandit.REVERSED_TRAIN, bandit.REVERSED_TEST),
    (bandit.RAGEN2_TRAIN, bandit.RAGEN2_TEST),
  ):
    assert not {n for pair in train for n in pair} & {n for pair in test for n in pair}
  assert len(bandit.RAGEN2_TRAIN) == 12 and len(bandit.RAGEN2_TEST) == 8
  assert tuple(pair[::-1] for pair in bandit.PROFESSIONS_TRAIN) == bandit.REVERSED_TRAIN
  assert tuple(pair[::-1] for pair in bandit.PROFESSIONS_TEST) == bandit.REVERSED_TEST


# -- text and pictures -------------------------------------------------------------------------------------------------


def test_text():
  env = Bandit()
  state = make_levels(env, 1)
  for high_first, names in ((False, 'Phoenix\nDragon'), (True, 'Dragon\nPhoenix')):
    state = state.replace(high_first=np.array([high_first]))
    assert env.render(state) == [f'Arms on offer:\n{names}\n{QUESTION}']
  after, _ = step(env, state, [0])
  assert env.render(after) == ['Arms on offer:\nDragon\nPhoenix\nPhoenix: 0.1 points']
  won = state.replace(pulled=np.array([HIGH]), points=np.ones(1, np.float32))
  assert env.render(won) == ['Arms on offer:\nDragon\nPhoenix\nDragon: 1 points']
  assert env.rationale(state) == ['Dragon sounds riskier than Phoenix and may pay more.']
  assert 'risk' in env.rules() and not any(name in env.rules() for name in env.names)


def test_text_round_trip():
  env = Bandit(arms=bandit.RAGEN2_TEST, low_reward=0.15)
  levels = make_levels(env, 200)
  after, _ = step(env, levels, env._ids[levels.pair, np.arange(200) % 2])
  for states in (levels, after):
    check_text_round_trip(env, states)


@pytest.mark.parametrize(
  ('text', 'message'),
  [
    ('Dragon\nPhoenix', 'on 4 lines'),
    ('Arms on offer:\nDragon\nDragon\nDragon: 1 points', 'must be a pair of'),
    ('Arms on offer:\nDragon\nPhoenix\nPhoenix: 1 points', 'line 4 is'),
  ],
)
def test_bad_text(text, message):
  with raises_one_line(message):
    Bandit().from_text(text)


def test_picture():
  env = Bandit()
  level = env.from_text(f'Arms on offer:\nPhoenix\nDragon\n{QUESTION}')
  picture = env.render_rgb(level)
  assert picture.shape == (32, 64, 3) and picture.dtype == np.uint8
  mirrored = env.render_rgb(level.replace(high_first=np.asarray(True)))
  np.testing.assert_array_equal(mirrored, np.concatenate([picture[:, 32:], picture[:, :32]], axis=1))
  assert (picture[16, 16] != picture[16, 48]).any()
  pulled = env.render_rgb(env.from_text('Arms on offer:\nPhoenix\nDragon\nDragon: 1 points'))
  np.testing.assert_array_equal(pulled[:, :32], picture[:, :32])
  assert (pulled[:, 32:] != picture[:, 32:]).any()


# -- solver and options ------------------------------------------------------------------------------------------------


def test_solution():
  env = Bandit(arms=bandit.RAGEN2_TRAIN)
  levels = make_levels(env, 50)
  budget = Budget(1, 1, 1)
  solution = env.solve(levels, budget)
  assert (solution.success == 1).all() and solution.success.dtype == np.float32
  plans = solution.plan(levels, np.full(50, 1), np.full(50, 1))
  assert [env.format_action(plan[0]) for plan in plans] == [env.arms[p][HIGH] for p in levels.pair]
  after, _ = step(env, levels, [plan[0] for plan in plans])
  assert after.success.all()
  assert solution.plan(after, np.full(50, 1), np.full(50, 1)) == [[]] * 50
  assert solution.plan(levels, np.full(50, 0), np.full(50, 1)) == [[]] * 50


def test_environments_of_lists_are_hashable():
  assert hash(Bandit(arms=[['Phoenix', 'Dragon']])) == hash(Bandit())


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({'arms': ()}, r'arms=\(\)'),
    ({'arms': ('Phoenix', 'Dragon')}, 'arms='),
    ({'arms': 5}, 'arms=5; allowed: one or more pairs'),
    ({'arms': None}, 'arms=None; allowed: one or more pairs'),
    ({'arms': (5,)}, r'arms=\(5,\); allowed: one or more pairs'),
    ({'arms': (('Phoenix', 'Dragon', 'Griffin'),)}, 'arms='),
    ({'arms': (('Phoenix', 'Phoenix'),)}, 'and its reverse'),
    ({'arms': (('Phoenix', 'Dragon'), ('Dragon', 'Phoenix'))}, 'and its reverse'),
    ({'arms': (('Phoenix', 'Dragon'), ('Nurse', 'dragon'))}, 'one way to write'),
    ({'arms': (('Phoenix', 'Dra||gon'),)}, r'the name .Dra\|\|gon'),
    ({'low_reward': 0.25}, 'low_reward=0.25'),
    ({'high_reward': '1'}, 'high_reward='),
    ({'high_reward': 0.0, 'low_reward': -1.0}, 'high_reward=0.0; allowed: above 0'),
    ({'high_reward': -1.0, 'low_reward': -2.0}, 'high_reward=-1.0; allowed: above 0'),
    ({'high_probability': 0.0}, r'high_probability=0.0; allowed: above 0, at most 1'),
    ({'high_probability': float('nan')}, 'high_probability=nan'),
  ],
)
def test_bad_options_are_named(options, message):
  with raises_one_line(message) as error:
    Bandit(**options)
  assert 'allowed: ' in str(error.value)
