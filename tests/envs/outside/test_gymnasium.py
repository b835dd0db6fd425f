"""Environments of Gymnasium as text, against Gymnasium's own."""

from __future__ import annotations

import logging

import gymnasium
import numpy as np
import pytest

from ragen_jax import envs as registry
from ragen_jax.envs.outside.base import TextStep, read_step
from ragen_jax.envs.outside.games import GymnasiumGames
from tests.support.environments import raises_one_line

TAXI = {'id': 'Taxi-v4', 'task': 'Drive.', 'action_names': ('Down', 'Up', 'Right', 'Left', 'Pick', 'Drop')}


class Switches(gymnasium.Env):
  """Its actions are switches, and its close fails."""

  action_space = gymnasium.spaces.MultiBinary(2)
  observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)

  def close(self):
    raise RuntimeError('stuck')


gymnasium.register('Switches-v0', Switches, order_enforce=False)


class Numbers(gymnasium.Env):
  """Shows more numbers than NumPy prints."""

  action_space = gymnasium.spaces.Discrete(2)
  observation_space = gymnasium.spaces.Box(0, 9999, (30, 40), np.int64)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    return np.arange(1200).reshape(30, 40), {}


gymnasium.register('Numbers-v0', Numbers)


def taxi_text(observation):
  row, column, passenger, goal = observation // 100, observation // 20 % 5, observation // 4 % 5, observation % 4
  return f'row {row}, column {column}, passenger {passenger}, to {goal}'


def test_taxi_is_gymnasium_s_own():
  env = registry.make('gymnasium', TAXI | {'render': f'{__name__}:taxi_text', 'workers': 0})
  session, rng = env.open(6), np.random.default_rng(0)
  seeds = [2**32 - 1, 2**32 - 1, 5, 5, 6, 7]
  texts = session.reset(range(6), seeds, [0, 1] * 3)
  plain = [gymnasium.make('Taxi-v4') for _ in seeds]
  assert texts == [taxi_text(game.reset(seed=seed)[0]) for game, seed in zip(plain, seeds, strict=True)]
  assert len(set(texts)) == 4
  for _ in range(40):
    actions = rng.integers(6, size=6)
    results = session.step(range(6), [env.action_names[a] for a in actions])
    for game, action, result in zip(plain, actions, results, strict=True):
      observation, reward, terminated, truncated, _ = game.step(action)
      assert read_step(result) == TextStep(taxi_text(observation), reward, terminated or truncated, terminated)
    if any(result[2] for result in results):
      break


def test_all_numbers_of_an_observation_are_shown():
  env = registry.make('gymnasium', {'id': 'Numbers-v0', 'task': 'Look.', 'action_names': ('A', 'B'), 'workers': 0})
  (text,) = env.open(1).reset([0], [0], [0])
  assert text.translate(str.maketrans('[]', '  ')).split() == [str(i) for i in range(1200)]


# -- level and luck ----------------------------------------------------------------------------------------------------


@pytest.fixture(scope='module')
def lake():
  kwargs = {'map_name': '8x8', 'render_mode': 'ansi'}
  names = ('Left', 'Down', 'Right', 'Up')
  options = {'id': 'FrozenLake-v1', 'task': 'Skate.', 'action_names': names, 'workers': 0}
  return registry.make('gymnasium', {**options, 'kwargs': kwargs})


def test_members_of_a_group_slip_each_in_their_own_way_and_again_in_the_same(lake):
  def walk(session):
    rows = range(8)
    texts = [session.reset(rows, [4] * 8, list(rows))]
    for _ in range(6):
      texts.append([result[0] for result in session.step(rows, ['Right'] * 8)])
    return texts

  session = lake.open(8)
  first = walk(session)
  assert len(set(first[0])) == 1 and len(set(first[-1])) > 2
  assert walk(session) == first and walk(lake.open(8)) == first
  # With render_mode='ansi' the text is what Gymnasium draws, whose first lines say the last action.
  assert 'SFFFFFFF' in first[0][0].replace('\x1b[41mS\x1b[0m', 'S') and '(Right)' in first[1][0]


def test_slips_are_as_likely_as_gymnasium_says(lake):
  # From the corner, Right slips to: Right and Down leave the corner, Up does not; each is a third.
  session, count = lake.open(1), 0
  for member in range(600):
    session.reset([0], [9], [member])
    count += '\x1b[41mS' not in session.step([0], ['Right'])[0][0]
  assert abs(count / 600 - 2 / 3) < 4 * np.sqrt(2 / 9 / 600)


# -- parsers and success -----------------------------------------------------------------------------------------------


def read_pair(text):
  first, second = text.split(',')
  if first == 'crash':
    raise IndexError('no such thing')
  return np.array([float(first), float(second)], np.float32) if first != 'none' else None


class Push(gymnasium.Env):
  """Two numbers are added to a sum that is to reach 2 within three steps; chance is a coin that info tells."""

  action_space = gymnasium.spaces.Box(-1, 1, (2,), np.float32)
  observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    self.sum, self.steps = np.zeros(1, np.float32), 0
    return self.sum, {}

  def step(self, action):
    self.sum, self.steps = self.sum + action.sum(), self.steps + 1
    info = {'is_success': bool(self.sum >= 2)} if self.steps == 2 else {}
    return self.sum, np.full(1, self.sum[0] * 0.5), self.steps == 2, False, info


def short(observation, reward, terminated, truncated, info):
  return bool(reward < 0.1)


@pytest.mark.filterwarnings('ignore:.*reward returned by:UserWarning')  # Push pays in arrays on purpose
def test_a_parser_reads_actions_of_any_space_and_success_is_judged(caplog):
  gymnasium.register('Push-v0', Push, order_enforce=False)
  options = {'id': 'Push-v0', 'task': 'Push.', 'parse': f'{__name__}:read_pair', 'action_help': 'Two numbers.'}
  env = registry.make('gymnasium', options)
  texts = ('0.5,1', 'Left', '5,5', 'none,1', 'crash,1', 'crash,2', '')
  with caplog.at_level(logging.WARNING):
    assert [env.parse_action(t) for t in texts] == ['0.5,1', None, None, None, None, None, None]
  assert len([r for r in caplog.records if 'IndexError' in r.message]) == 1  # ValueError is a parser's way to say no
  session = env.open(2)
  assert session.reset([0, 1], [1, 1], [0, 1]) == ['[0.]', '[0.]']
  assert read_step(session.step([0, 1], ['0.5,1', '0,0'])[0]) == TextStep('[1.5]', 0.75, False, False)
  last = [read_step(r) for r in session.step([0, 1], ['0.5,0.5', '0,0'])]
  assert [(s.reward, s.done, s.success) for s in last] == [(1.25, True, True), (0.0, True, False)]
  judged = registry.make('gymnasium', options | {'success': f'{__name__}:short'}).open(1)
  judged.reset([0], [1], [0])
  assert [read_step(judged.step([0], ['0,0'])[0]).success for _ in range(2)] == [False, True]


def test_without_a_word_from_gymnasium_a_win_is_an_end_with_a_reward():
  names = {name: '' for name in ('parse', 'render', 'success')}
  game = GymnasiumGames(id='Taxi-v4', kwargs={}, action_names=TAXI['action_names'], images=0, **names).make()
  cases = [((0, 20, True, False, {}), True), ((0, -1, True, False, {}), False), ((0, 1.0, False, True, {}), False)]
  for arguments, expected in cases:
    assert game.is_won(*arguments) is expected
  assert game.is_won(0, 20, True, False, {'success': False}) is False
  for yes in (True, 1, 1.0, np.bool_(True), np.float32(1), np.array([True])):
    assert game.is_won(0, 0, True, False, {'is_success': yes}) is True
  for lie in ('False', 'no', None, 0.5, [True], np.array([True, True])):
    with pytest.raises(TypeError, match=r"info\['success'\] is .*, must be a bool"):
      game.is_won(0, 0, True, False, {'success': lie})
  game.close()


@pytest.mark.parametrize(('flags', 'kind'), [(('False', False), 'terminated'), ((False, 'no'), 'truncated')])
def test_flags_that_are_text_are_not_taken_for_true(flags, kind, monkeypatch):
  session = registry.make('gymnasium', TAXI).open(1)
  session.reset([0], [1], [0])
  monkeypatch.setattr(session._games[0]._env, 'step', lambda action: (0, 1.0, *flags, {}))
  (fault,) = session.step([0], [TAXI['action_names'][0]])
  assert fault.kind == 'step raised TypeError' and f'{kind} is {flags[kind == "truncated"]!r}, must be' in str(fault)


# -- options -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    (TAXI | {'id': 'Taxi-v99'}, r"id='Taxi-v99' with kwargs=\{\} cannot be made"),
    (TAXI | {'kwargs': {'wheels': 4}}, r"kwargs=\{'wheels': 4\} cannot be made \(TypeError"),
    (TAXI | {'task': ' '}, r"task=' '; allowed: text that is not blank"),
    (
      TAXI | {'action_names': ('Go',)},
      r"action_names=\('Go',\); allowed: one word for each action of Dis",
    ),
    (
      TAXI | {'id': f'{__name__}:Switches-v0', 'action_names': ('Go', 'Stop')},
      r"action_names=\('Go', 'Stop'\); allowed: none for MultiBinary\(2\), which is not a Discrete space and",
    ),
    (TAXI | {'action_names': ()}, r"action_names=\(\), parse=''; allowed: one of them"),
    (TAXI | {'parse': f'{__name__}:make'}, r"parse='.*make'; allowed: one of them"),
    (TAXI | {'render': f'{__name__}:TAXI'}, 'render=.*TAXI.* is dict; allowed: a function'),
  ],
)
def test_wrong_options_are_named_in_one_line(options, message):
  with raises_one_line(message):
    registry.make('gymnasium', options)


def test_without_gymnasium_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'gymnasium', None)
  with pytest.raises(ValueError, match='pip install gymnasium'):
    registry.make('gymnasium', TAXI)


class Measured(gymnasium.Env):
  """Measures its steps."""

  action_space = gymnasium.spaces.Discrete(2)
  observation_space = gymnasium.spaces.Discrete(1)

  def reset(self, *, seed=None, options=None):
    super().reset(seed=seed)
    return 0, {}

  def step(self, action):
    return 0, 1.0, False, False, {'metrics': {'speed': np.float32(action / 2)}, 'other': object()}


def test_an_environment_s_metrics_are_carried():
  gymnasium.register('Measured-v0', Measured)
  env = registry.make('gymnasium', {'id': 'Measured-v0', 'task': 'x', 'action_names': ('Slow', 'Fast')})
  session = env.open(2)
  session.reset([0, 1], [0, 0], [0, 1])
  assert [read_step(raw).metrics for raw in session.step([0, 1], ['Slow', 'Fast'])] == [{'speed': 0.0}, {'speed': 0.5}]
