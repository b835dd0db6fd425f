"""Environments outside JAX against the same games played by plain loops, and everything that they can do wrong."""

from __future__ import annotations

import contextlib
import dataclasses
import http.server
import json
import logging
import threading
import time
import types

import gymnasium
import numpy as np
import pytest
from ml_collections import ConfigDict

from ragen_jax import envs as registry
from ragen_jax.envs.base import Budget
from ragen_jax.envs.outside import base as text_env
from ragen_jax.envs.outside import gymnasium as gymnasium_env
from ragen_jax.envs.outside import local
from ragen_jax.envs.outside.base import TextStep, read_observation, read_step
from ragen_jax.utils.threads import Fault, run_calls

# -- a game of our own -------------------------------------------------------------------------------------------------


class Climb:
  """Up and Down on a ladder; the top wins, the ground loses. The member's luck is how far Up goes."""

  action_names = ('Up', 'Down')
  legend = types.MappingProxyType({'#': 'you'})

  def __init__(self, rungs: int = 5):
    self.rungs = rungs

  def rules(self):
    return f'A ladder of {self.rungs} rungs.'

  def reset(self, seed, member):
    self.rung, self.luck = 1 + seed % (self.rungs - 2), 1 + member % 2
    return self.told()

  def told(self):
    return f'rung {self.rung} of {self.rungs}'

  def step(self, action):
    self.rung += self.luck if action == 'Up' else -1
    done = not 0 < self.rung < self.rungs
    return self.told(), 0.25 * self.rung, done, {'success': self.rung >= self.rungs} if done else {}


class Echo:
  """Free text, and no member in reset; goes on for ever. Its observation never changes."""

  rules = 'Say something.'

  def reset(self, seed):
    return 'go on'

  def step(self, action):
    return 'go on', len(action), False, action == 'win'


class Broken:
  """Does what the action says."""

  rules = 'Break.'
  made = 0
  closed = 0

  def __init__(self):
    type(self).made += 1

  def reset(self, seed):
    if seed == 13:
      raise RuntimeError('no such\nlevel')
    return 5 if seed == 14 else f'level {seed}'

  def step(self, action):
    if action == 'raise':
      raise KeyError('lost')
    if action == 'exit':
      raise SystemExit(3)
    if action.startswith('sleep'):
      time.sleep(float(action.split()[1]))
    return 'next', 1.0, False, False

  def close(self):
    type(self).closed += 1


def make(name, **options):
  return registry.make('python', {'class_path': f'{__name__}:{name}', **options})


ACTIONS = [['Up', 'Down', 'Up', 'Up', 'Up', 'Up'], ['Down'] * 6, ['Up'] * 6, ['Down', 'Up', 'Up', 'Up', 'Down', 'Up']]


def by_hand(rungs, seeds, members):
  """Each row's texts, rewards and end, from Climb alone."""
  played = []
  for seed, member, actions in zip(seeds, members, ACTIONS, strict=True):
    game = Climb(rungs)
    row = [game.reset(seed, member)]
    for action in actions:
      observation, reward, done, info = game.step(action)
      row.append((observation, reward, done, info.get('success', False)))
      if done:
        break
    played.append(row)
  return played


def by_session(session, seeds, members):
  """The same from a session, checked as the agent does."""
  rows = list(range(len(seeds)))
  played = [[read_observation(text)] for text in session.reset(rows, seeds, members)]
  for i in range(6):
    live = [row for row in rows if len(played[row]) == i + 1 and (i == 0 or not played[row][-1][2])]
    for row, result in zip(live, session.step(live, [ACTIONS[row][i] for row in live]), strict=True):
      step = read_step(result)
      assert isinstance(step, TextStep), step
      played[row].append((step.observation, step.reward, step.done, step.success))
  return played


@pytest.mark.parametrize('workers', [0, 1, 3])
def test_a_python_class_plays_as_it_does_by_hand_again_and_again(workers):
  env = make('Climb', options=ConfigDict({'rungs': 6}), workers=workers)
  session = env.open(4)
  for first in (3, 8):
    seeds, members = [first, first, first + 1, first + 1], [0, 1, 0, 1]
    assert by_session(session, seeds, members) == by_hand(6, seeds, members)
  assert len({row[0] for row in by_hand(6, seeds, members)}) == 2


def test_what_a_class_tells_the_prompt():
  env = make('Climb', options={'rungs': 9})
  assert env.rules() == 'A ladder of 9 rungs.' and env.legend() == {'#': 'you'} and env.action_help == ''
  assert [env.parse_action(t) for t in ('up', ' Down ', 'Left', '')] == ['Up', 'Down', None, None]
  assert env.format_action('Up') == 'Up' and env.action_words == env.action_names == ('Up', 'Down')
  free = make('Echo')
  assert free.action_names == () and free.action_help == 'An action is free text.'
  assert free.parse_action('  any thing ') == 'any thing' and free.parse_action('  ') is None
  assert not env.has_solver
  with pytest.raises(ValueError, match='no solver'):
    env.solve(None, Budget())


def test_environments_may_be_keys_whatever_their_options_are():
  first, second = (make('Climb', options=ConfigDict({'rungs': 6})) for _ in range(2))
  assert len({first, second, first}) == 2
  assert type(first.options) is dict


# -- what a step may return --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
  ('raw', 'expected'),
  [
    (('a', 1, False, False), TextStep('a', 1.0, False, False)),
    (['a', np.float32(0.5), np.bool_(True), np.bool_(True)], TextStep('a', 0.5, True, True)),
    (('a', True, True, {'success': False, 'effective': True}), TextStep('a', 1.0, True, False, True)),
    (('a', -2.5, False, {'effective': False}), TextStep('a', -2.5, False, False, False)),
    (('a', 0, False, True), TextStep('a', 0.0, False, False)),  # nobody has won before the game is over
    (('a\ud800b', 0, False, False), TextStep('a?b', 0.0, False, False)),
  ],
)
def test_results_that_are_read(raw, expected):
  assert read_step(raw) == expected


@pytest.mark.parametrize(
  ('raw', 'kind'),
  [
    (None, 'step did not return'),
    (('a', 1.0, False), 'step did not return'),
    ('abcd', 'step did not return'),
    ((b'a', 1.0, False, False), 'observation is not a string'),
    (('a', '1.0', False, False), 'reward is not a number'),
    (('a', None, False, False), 'reward is not a number'),
    (('a', float('nan'), False, False), 'reward is not within 1e+15'),
    (('a', -float('inf'), False, False), 'reward is not within 1e+15'),
    (('a', 1.1e15, False, False), 'reward is not within 1e+15'),
    (('a', 10**400, False, False), 'reward is not within 1e+15'),
    (('a', 1.0, 'no', False), 'done is not a bool'),
    (('a', 1.0, True, {}), 'success is not a bool'),
    (('a', 1.0, True, 'won'), 'success is not a bool'),
    (('a', 1.0, False, {'effective': 2}), 'effective is not a bool'),
    (Fault('x', 'y'), 'x'),
  ],
)
def test_results_that_are_faults(raw, kind):
  fault = read_step(raw)
  assert isinstance(fault, Fault) and fault.kind.startswith(kind)
  assert '\n' not in str(fault) and len(str(fault)) <= 300


def test_a_fault_is_told_in_one_short_line():
  assert str(Fault('a', 'b\n  c')) == 'a: b c'
  assert len(str(Fault('a', 'b' * 1000))) == 300


# -- calls that raise or hang ------------------------------------------------------------------------------------------


def test_calls_keep_their_order_and_run_side_by_side():
  barrier = threading.Barrier(4, timeout=20)  # breaks unless four wait at once
  results = run_calls([lambda i=i: (barrier.wait(), i)[1] for i in range(8)], what='step', workers=4, timeout_s=30)
  assert results == [(i, None) for i in range(8)]
  assert run_calls([], what='step', workers=2, timeout_s=1) == []
  main = threading.get_ident()
  assert run_calls([threading.get_ident], what='step', workers=0, timeout_s=1) == [(main, None)]
  assert run_calls([threading.get_ident], what='step', workers=1, timeout_s=9)[0][0] != main


def test_a_call_that_hangs_is_left_behind_and_the_others_are_not():
  release = threading.Event()
  functions = [lambda: 'a', lambda: release.wait(60), lambda: 'b', lambda: 1 / 0, lambda: 'c']
  start = time.monotonic()
  results = run_calls(functions, what='step', workers=1, timeout_s=0.3)
  assert time.monotonic() - start < 20
  release.set()
  assert [result for result, _ in results] == ['a', None, 'b', None, 'c']
  assert results[1][1] == Fault('step took longer than 0.3 s', hung=True)
  assert results[3][1].kind == 'step raised ZeroDivisionError'
  assert 'test_text_env.py' in results[3][1].detail


def test_the_limit_is_one_call_s_own_and_not_that_of_the_queue():
  results = run_calls([lambda: time.sleep(0.15)] * 6, what='step', workers=1, timeout_s=0.6)
  assert results == [(None, None)] * 6


def test_where_nothing_answers_the_rest_is_not_tried():
  release, begun = threading.Event(), []
  functions = [lambda i=i: (begun.append(i), release.wait(60)) for i in range(50)]
  start = time.monotonic()
  results = run_calls(functions, what='reset', workers=1, timeout_s=0.2)
  assert time.monotonic() - start < 8
  release.set()
  assert begun == [0, 1, 2]
  assert {fault.kind for _, fault in results} == {'reset took longer than 0.2 s'}
  assert [fault.hung for _, fault in results] == [True] * 3 + [False] * 47


def test_a_game_that_failed_is_replaced_and_closed_unless_it_may_still_run():
  env = make('Broken', step_timeout_s=0.3)
  assert (Broken.made, Broken.closed) == (1, 1)  # the one that was asked for its rules
  session = env.open(4)
  texts = session.reset(range(4), [1, 2, 13, 14], [0] * 4)
  assert texts[:2] == ['level 1', 'level 2']
  assert str(texts[2]).startswith('reset raised RuntimeError: no such level (test_text_env.py:')
  assert read_observation(texts[3]) == Fault('observation is not a string', '5')
  assert (Broken.made, Broken.closed) == (5, 2)
  results = session.step([0, 1, 3], ['raise', 'sleep 1', 'walk'])
  assert results[0].kind == 'step raised KeyError' and results[1].hung
  assert read_step(results[2]) == TextStep('next', 1.0, False, False)
  assert (Broken.made, Broken.closed) == (5, 3)
  assert session.reset(range(4), [1, 2, 3, 4], [0] * 4) == ['level 1', 'level 2', 'level 3', 'level 4']
  assert (Broken.made, Broken.closed) == (8, 3)
  assert session.step([0], ['exit'])[0].kind == 'step raised SystemExit'
  del session  # and with it the three games that are left
  assert (Broken.made, Broken.closed) == (8, 7)


def test_a_close_that_hangs_or_fails_ends_nothing(caplog):
  release, closed = threading.Event(), []

  class Stuck:
    def close(self):
      release.wait(60)

  class Strange:
    @property
    def close(self):
      raise GeneratorExit

  class Good:
    def close(self):
      closed.append(self)

  class Game(Stuck):
    def reset(self, seed, member):
      return 'x'

    def step(self, action):
      raise KeyError(action)

  start = time.monotonic()
  with caplog.at_level(logging.WARNING):
    games = [Good(), Strange(), None, object(), Stuck(), *(Good() for _ in range(3))]
    local.close_all(games, workers=1, timeout_s=0.2)
    assert len(closed) == 4
    session = local.LocalSession(Game, 50, workers=1, step_timeout_s=0.2)
    session.reset(range(50), [0] * 50, [0] * 50)
    assert session.step(range(40), ['a'] * 40)[39].kind == 'step raised KeyError'
    del session  # which closes the ten games that are left
  assert time.monotonic() - start < 10
  release.set()
  messages = [r.getMessage() for r in caplog.records]
  assert [m.split(' (')[0] for m in messages[:2]] == [
    'Strange: close raised GeneratorExit:', 'Stuck: close took longer than 0.2 s',
  ]  # fmt: skip
  assert len(messages) == 4 and messages[2].endswith('; 40 like it') and messages[3].endswith('; 10 like it')


class Nameless(BaseException):
  def __str__(self):
    raise RuntimeError('no words')


class Unwritten(str):
  def encode(self, *arguments):
    raise Nameless

  def __repr__(self):
    raise RuntimeError('no words')


class Unreal(float):
  def __float__(self):
    raise Nameless

  __repr__ = Unwritten.__repr__


class OddMapping(dict):
  def get(self, *arguments):
    raise Nameless


@pytest.mark.parametrize('workers', [0, 1])
def test_exceptions_of_any_kind_become_faults(workers):
  def fail(error):
    raise error

  errors = [Nameless(), GeneratorExit(), SystemExit(1), UnicodeError('\ud800')]
  errors += [KeyboardInterrupt()] * workers  # in a thread it is not the user's
  start = time.monotonic()
  results = run_calls([lambda e=e: fail(e) for e in errors], what='step', workers=workers, timeout_s=20)
  assert time.monotonic() - start < 10
  assert [fault.kind for _, fault in results] == [f'step raised {type(e).__name__}' for e in errors]
  assert 'Nameless that cannot be written: RuntimeError' in str(results[0][1])
  assert '?' in str(results[3][1]) and str(results[3][1]).encode()
  with pytest.raises(KeyboardInterrupt):
    run_calls([lambda: fail(KeyboardInterrupt())], what='step', workers=0, timeout_s=20)


def test_odd_objects_are_faults_or_harmless():
  assert read_observation(Unwritten('a')) == 'a'
  odd = type('Odd', (), {'__repr__': Unwritten.__repr__})()
  for fault in (
    read_observation(odd),
    *map(read_step, (odd, (odd,) * 4, ('a', odd, False, False), ('a', 0, odd, False), ('a', 0, True, odd))),
    *map(read_step, (('a', Unreal(1), False, False), ('a', 0, True, OddMapping()), ('a', 10**5000, False, False))),
  ):
    assert isinstance(fault, Fault) and len(str(fault)) <= 300


@dataclasses.dataclass(frozen=True)
class Moody(text_env.TextEnvironment):
  """Its reader of replies fails."""

  name = 'moody'

  def rules(self):
    return 'Say.'

  def open(self, rows):
    return None

  def parse_action(self, text):
    if text == 'key':
      raise KeyError(text)
    if text == 'exit':
      raise SystemExit(1)
    return 3 if text == 'three' else None if text == 'none' else text

  def format_action(self, action):
    if action == 'odd':
      raise Nameless
    return action.upper()


def test_a_reader_of_replies_that_fails_finds_no_action_and_says_so_once(caplog):
  env = Moody()
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      read = [env.read_action(t) for t in ('a', 'key', 'exit', 'three', 'none', 'odd')]
      assert read == [('a', 'A'), None, None, None, None, None]
  messages = [r.getMessage() for r in caplog.records]
  assert len(messages) == 4 and all(m.startswith('moody: parse_action or format_action raised') for m in messages)
  assert Moody() == env and hash(Moody()) == hash(env)


# -- options -----------------------------------------------------------------------------------------------------------


class NoRules:
  def reset(self, seed):
    return ''

  def step(self, action):
    return '', 0.0, True, True


class TwinNames(NoRules):
  rules = 'Twins.'
  action_names = ('Up', 'up')


class NoWords(NoRules):
  def rules(self):
    raise Nameless if self.silent else KeyError('no\nrules')

  silent = False


class NoNames(NoRules):
  rules = 'No names.'
  closed = 0

  @property
  def action_names(self):
    raise SystemExit(2)

  def close(self):
    type(self).closed += 1


class NoStep:
  reset = NoRules.reset


@dataclasses.dataclass(frozen=True)
class Unfinished(text_env.TextEnvironment):
  name = 'unfinished'

  def rules(self):
    return 'x'


class NotFrozen(Unfinished):
  def open(self, rows):
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Own(text_env.TextEnvironment):
  """A way of one's own: a session that plays all rows itself."""

  name = 'own'
  task: str

  def rules(self):
    return self.task

  def open(self, rows):
    return None


def test_a_class_of_one_s_own_may_be_the_type():
  env = registry.make(f'{__name__}:Own', {'task': 'do it'})
  assert type(env) is Own and env.rules() == 'do it'


TAXI = {'id': 'Taxi-v4', 'task': 'Drive.', 'action_names': ('Down', 'Up', 'Right', 'Left', 'Pick', 'Drop')}
SERVER = {'url': 'http://localhost:1', 'task': 'Climb.'}


@pytest.mark.parametrize(
  ('env_type', 'options', 'message'),
  [
    ('nowhere', {}, r"type='nowhere'; allowed: .*frozen_lake.*python.*'package\.module:ClassName'"),
    ('no_such_module_here:Game', {}, r"type='no_such_module_here:Game' cannot be imported \(ModuleNotFoundError"),
    ('json:Game', {}, r"type='json:Game' cannot be imported \(AttributeError"),
    ('json:JSONEncoder', {}, "'json:JSONEncoder' is no subclass of Environment or TextEnvironment"),
    (f'{__name__}:Unfinished', {}, 'Unfinished.* lacks open'),
    (f'{__name__}:NotFrozen', {}, 'NotFrozen.* is no frozen dataclass'),
    (f'{__name__}:Own', {}, 'task is missing; .*Own needs task'),
    (f'{__name__}:Own', {'tusk': 1}, 'tusk is no option of .*; allowed: task'),
    ('python', {}, r"python: class_path=''; allowed: 'package\.module:name'"),
    ('python', {'class_path': 'json'}, r"class_path='json'; allowed: 'package\.module:name'"),
    ('python', {'class_path': f'{__name__}:make'}, 'class_path=.*make.* has no reset'),
    ('python', {'class_path': f'{__name__}:NoStep'}, 'class_path=.*NoStep.* has no step'),
    ('python', {'class_path': f'{__name__}:NoRules'}, r"NoRules: rules=''; allowed: text that is not blank"),
    ('python', {'class_path': f'{__name__}:NoWords'}, r"NoWords: rules cannot be read \(KeyError: 'no.*rules'"),
    ('python', {'class_path': f'{__name__}:NoNames'}, r'NoNames: action_names cannot be read \(SystemExit: 2\)'),
    ('python', {'class_path': f'{__name__}:TwinNames'}, r'TwinNames: action_names=.*; allowed: names that differ'),
    ('python', {'class_path': f'{__name__}:Climb', 'options': {'steps': 1}}, r'options=.*steps.*TypeError'),
    ('python', {'class_path': f'{__name__}:Climb', 'options': 3}, r'options=3; allowed: a section'),
    ('python', {'class_path': f'{__name__}:Climb', 'workers': -1}, r'workers=-1; allowed: whole numbers from 0'),
    ('python', {'class_path': f'{__name__}:Climb', 'step_timeout_s': 0}, r'step_timeout_s=0; allowed: seconds, above'),
    ('gymnasium', TAXI | {'id': 'Taxi-v99'}, r"id='Taxi-v99' with kwargs=\{\} cannot be made"),
    ('gymnasium', TAXI | {'kwargs': {'wheels': 4}}, r"kwargs=\{'wheels': 4\} cannot be made \(TypeError"),
    ('gymnasium', TAXI | {'task': ' '}, r"task=' '; allowed: text that is not blank"),
    (
      'gymnasium',
      TAXI | {'action_names': ('Go',)},
      r"action_names=\('Go',\); allowed: one word for each action of Dis",
    ),
    (
      'gymnasium',
      TAXI | {'id': f'{__name__}:Switches-v0', 'action_names': ('Go', 'Stop')},
      r"action_names=\('Go', 'Stop'\); allowed: none for MultiBinary\(2\), which is no Discrete space and needs parse",
    ),
    ('gymnasium', TAXI | {'action_names': ()}, r"action_names=\(\), parse=''; allowed: one of them"),
    ('gymnasium', TAXI | {'parse': f'{__name__}:make'}, r"parse='.*make'; allowed: one of them"),
    ('gymnasium', TAXI | {'render': f'{__name__}:TAXI'}, 'render=.*TAXI.* is dict; allowed: a function'),
    ('http', {'task': 'x'}, r"url=''; allowed: 'http://"),
    ('http', SERVER | {'url': 'file:///etc'}, r"url='file:///etc'; allowed: 'http://"),
    ('http', SERVER | {'task': ''}, r"task=''; allowed: text"),
    ('http', SERVER | {'retries': -1}, r'retries=-1; allowed: whole numbers from 0'),
    ('http', SERVER | {'batch_size': 0}, r'batch_size=0; allowed: whole numbers from 1'),
    ('http', SERVER | {'timeout_s': float('inf')}, r'timeout_s=inf; allowed: seconds'),
    ('http', SERVER | {'options': {'x': float('nan')}}, r'options=.*; allowed: what JSON can say'),
    ('http', SERVER | {'symbols': {'#': 3}}, r'symbols=.*; allowed: texts by symbol'),
  ],
)
def test_wrong_options_are_told_in_one_line(env_type, options, message):
  with pytest.raises(ValueError, match=message) as e:
    registry.make(env_type, options)
  assert '\n' not in str(e.value)


def test_without_gymnasium_the_error_says_what_to_install(monkeypatch):
  monkeypatch.setitem(__import__('sys').modules, 'gymnasium', None)
  with pytest.raises(ValueError, match='pip install gymnasium'):
    registry.make('gymnasium', TAXI)


def test_an_object_that_tells_nothing_is_closed():
  closed = NoNames.closed
  with pytest.raises(ValueError, match='action_names'):
    make('NoNames')
  assert NoNames.closed == closed + 1


# -- Gymnasium ---------------------------------------------------------------------------------------------------------


class Switches(gymnasium.Env):
  """Its actions are switches, and its close fails."""

  action_space = gymnasium.spaces.MultiBinary(2)
  observation_space = gymnasium.spaces.Box(-9, 9, (1,), np.float32)

  def close(self):
    raise RuntimeError('stuck')


gymnasium.register('Switches-v0', Switches, order_enforce=False)


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
  assert session.step([0, 1], ['0.5,1', '0,0'])[0] == ('[1.5]', 0.75, False, {'success': False})
  last = [read_step(r) for r in session.step([0, 1], ['0.5,0.5', '0,0'])]
  assert [(s.reward, s.done, s.success) for s in last] == [(1.25, True, True), (0.0, True, False)]
  judged = registry.make('gymnasium', options | {'success': f'{__name__}:short'}).open(1)
  judged.reset([0], [1], [0])
  assert [read_step(judged.step([0], ['0,0'])[0]).success for _ in range(2)] == [False, True]


def test_without_a_word_from_gymnasium_a_win_is_an_end_with_a_reward():
  game = gymnasium_env._Game(registry.make('gymnasium', TAXI))
  cases = [((0, 20, True, False, {}), True), ((0, -1, True, False, {}), False), ((0, 1.0, False, True, {}), False)]
  for arguments, expected in cases:
    assert game._is_won(*arguments) is expected
  assert game._is_won(0, 20, True, False, {'success': False}) is False
  game.close()


# -- HTTP --------------------------------------------------------------------------------------------------------------


class Server(http.server.ThreadingHTTPServer):
  """Climb behind the protocol. `trouble` is asked before and after each request and may do something else."""

  daemon_threads = True

  def __init__(self):
    super().__init__(('127.0.0.1', 0), Handler)
    self.games, self.requests, self.executed, self.closed = {}, [], [], []
    self.trouble = lambda when, path, number: None
    self.lock = threading.Lock()
    self.url = f'http://127.0.0.1:{self.server_address[1]}/games'

  def handle_error(self, request, client_address):
    """Broken connections are what some tests are about."""

  def answer(self, path, body):
    episodes = []
    for item in body['episodes']:
      if path == '/games/reset':
        game = self.games[item['id']] = [Climb(**body['options']), {}]
        episodes.append({'observation': game[0].reset(item['seed'], item['member'])})
      elif path == '/games/step':
        game, told = self.games[item['id']]
        if item['step'] not in told:
          self.executed.append((item['id'], item['step']))
          observation, reward, done, info = game.step(item['action'])
          told[item['step']] = {'observation': observation, 'reward': reward, 'done': done, **info}
        episodes.append(told[item['step']])
      else:
        self.closed.append(item['id'])
        del self.games[item['id']]
    return {'episodes': episodes}


class Handler(http.server.BaseHTTPRequestHandler):
  def log_message(self, *arguments):
    """Quiet."""

  def do_POST(self):
    body = json.loads(self.rfile.read(int(self.headers['Content-Length'])))
    server = self.server
    with server.lock:
      server.requests.append((self.path, len(body['episodes'])))
      number = len(server.requests)
    if server.trouble('before', self.path, number) is not None:
      return self.reply(*server.trouble('before', self.path, number))
    with server.lock:
      answer = json.dumps(server.answer(self.path, body)).encode()
    other = server.trouble('after', self.path, number)
    return self.reply(200, answer) if other is None else self.reply(*other)

  def reply(self, status, data):
    if status == 0:  # hangs up
      self.close_connection = True
      return
    self.send_response(status)
    self.send_header('Content-Length', str(len(data)))
    self.end_headers()
    self.wfile.write(data)


@pytest.fixture
def server():
  with Server() as server:
    thread = threading.Thread(target=server.serve_forever, kwargs={'poll_interval': 0.02}, daemon=True)
    thread.start()
    yield server
    server.shutdown()
    thread.join()


def connect(server, **options):
  fields = {'url': server.url, 'task': 'Climb.', 'action_names': ['Up', 'Down'], 'options': ConfigDict({'rungs': 6})}
  return registry.make('http', fields | {'timeout_s': 5.0, 'backoff_s': 0.01} | options)


SEEDS, MEMBERS = [3, 3, 4, 4], [0, 1, 0, 1]


@pytest.mark.parametrize(('batch_size', 'requests'), [(64, 1), (3, 2), (1, 4)])
def test_a_server_plays_as_its_game_does_by_hand(server, batch_size, requests):
  env = connect(server, batch_size=batch_size, workers=2)
  session = env.open(4)
  assert by_session(session, SEEDS, MEMBERS) == by_hand(6, SEEDS, MEMBERS)
  assert [path for path, _ in server.requests].count('/games/reset') == requests
  assert sum(n for path, n in server.requests if path == '/games/reset') == 4
  assert len(server.games) == 4
  session.end()
  assert not server.games and len(server.closed) == 4
  session.end()  # there is nothing left to close
  assert len(server.closed) == 4
  # A reset closes what was left open.
  session.reset(range(4), SEEDS, MEMBERS)
  session.reset(range(4), SEEDS, MEMBERS)
  assert len(server.games) == 4 and len(server.closed) == 8


TROUBLES = {
  'the server is busy': ('before', lambda: (503, b'busy')),
  'too many requests': ('before', lambda: (429, b'')),
  'it has an error of its own': ('before', lambda: (500, b'oops')),
  'it hangs up': ('before', lambda: (0, b'')),
  'the answer is lost': ('after', lambda: (0, b'')),
  'the answer is no JSON': ('after', lambda: (200, b'<html>')),
  'the answer is no object': ('after', lambda: (200, b'[1]')),
  'the answer is too short': ('after', lambda: (200, b'{"episodes": []}')),
  'the answer is too late': ('after', lambda: time.sleep(0.8)),
}


@pytest.mark.parametrize('name', TROUBLES)
def test_a_request_is_tried_again_and_no_action_is_carried_out_twice(server, name):
  when, trouble = TROUBLES[name]
  # Of two requests the first goes wrong, in each pair.
  server.trouble = lambda now, path, number: trouble() if now == when and number % 2 else None
  session = connect(server, retries=1, timeout_s=0.4 if 'late' in name else 5.0).open(4)
  assert by_session(session, SEEDS, MEMBERS) == by_hand(6, SEEDS, MEMBERS)
  expected = sum(len(row) - 1 for row in by_hand(6, SEEDS, MEMBERS))
  assert len(server.executed) == len(set(server.executed)) == expected
  assert len(server.requests) >= 2 * (1 + max(len(row) for row in by_hand(6, SEEDS, MEMBERS)) - 1)


def test_tries_are_counted_and_what_is_refused_is_not_tried_again(server):
  server.trouble = lambda now, path, number: (503, b'') if now == 'before' else None
  faults = connect(server, retries=2).open(3).reset(range(3), [1, 2, 3], [0] * 3)
  assert len(server.requests) == 3 and len(set(faults)) == 1
  assert str(faults[0]) == f'reset got no answer: {server.url}/reset: status 503 Service Unavailable, 3 tries'
  server.trouble = lambda now, path, number: (404, b'') if now == 'before' else None
  faults = connect(server, retries=2).open(3).reset(range(3), [1, 2, 3], [0] * 3)
  assert len(server.requests) == 4
  assert str(faults[0]) == f'reset got no answer: {server.url}/reset: status 404 Not Found'


def test_the_waits_between_tries_double(server, monkeypatch):
  waits = []
  monkeypatch.setattr('ragen_jax.envs.outside.http.time.sleep', waits.append)
  server.trouble = lambda now, path, number: (503, b'') if now == 'before' else None
  connect(server, retries=8, backoff_s=0.5).open(1).reset([0], [1], [0])
  assert waits == [0.5, 1.0, 2.0, 4.0, 8.0, 16.0, 30.0, 30.0]


def test_a_dead_server_costs_its_tries_once_and_one_that_is_back_is_used(server):
  session = connect(server, batch_size=1, workers=1, retries=1).open(4)
  dead = True
  server.trouble = lambda now, path, number: (0, b'') if now == 'before' and dead else None
  faults = session.reset(range(4), SEEDS, MEMBERS)
  assert len(server.requests) == 2 and {f.kind for f in faults} == {'reset got no answer'}
  dead = False
  assert by_session(session, SEEDS, MEMBERS) == by_hand(6, SEEDS, MEMBERS)
  assert not server.closed  # those that never began need no end


def test_a_server_that_trickles_is_cut_off(server):
  def trickle(now, path, number):
    return (200, SlowBytes()) if now == 'after' else None

  class SlowBytes(bytes):
    def __len__(self):
      return 1000

  server.trouble = trickle
  original = Handler.reply

  def reply(handler, status, data):
    if not isinstance(data, SlowBytes):
      return original(handler, status, data)
    handler.send_response(200)
    handler.send_header('Content-Length', '1000')
    handler.end_headers()
    with contextlib.suppress(OSError):
      for _ in range(40):
        handler.wfile.write(b' ')
        handler.wfile.flush()
        time.sleep(0.1)

  Handler.reply = reply
  try:
    start = time.monotonic()
    fault = connect(server, retries=0, timeout_s=0.5).open(1).reset([0], [1], [0])[0]
    assert time.monotonic() - start < 3 and 'no whole answer in 0.5 s' in str(fault)
  finally:
    Handler.reply = original


def test_an_answer_that_is_too_large_is_not_read_to_its_end(server, monkeypatch):
  monkeypatch.setattr('ragen_jax.envs.outside.http._LARGEST_ANSWER_MIB', 1)
  server.trouble = lambda now, path, number: (200, b' ' * (1 << 21)) if now == 'after' else None
  fault = connect(server, retries=3).open(1).reset([0], [1], [0])[0]
  assert str(fault).endswith('/reset: the answer is larger than 1 MiB') and len(server.requests) == 1


def test_episodes_that_cannot_be_closed_are_told_of_once(server, caplog):
  server.trouble = lambda now, path, number: (404, b'') if now == 'before' and path.endswith('close') else None
  session = connect(server).open(2)
  with caplog.at_level(logging.WARNING):
    for _ in range(3):
      session.reset([0, 1], [3, 3], [0, 1])
  (message,) = [r.getMessage() for r in caplog.records]
  assert message.startswith('http: 2 episodes may stay open on the server (logged once): close got no answer: ')


def test_one_episode_s_error_is_its_own(server):
  def answer(path, body):
    good = {'observation': 'x', 'reward': 1.0, 'done': False}
    return {'episodes': [{'error': 'no\nmap'}, 7, good, good | {'reward': float('nan')}, good | {'observation': None}]}

  server.answer = answer
  session = connect(server).open(5)
  texts = [read_observation(t) for t in session.reset(range(5), [1] * 5, [0] * 5)]
  assert [str(t) for t in texts] == [
    'reset answered an error: no map', 'reset answered no object: 7', 'x', 'x', 'observation is not a string: None',
  ]  # fmt: skip
  steps = [read_step(r) for r in session.step(range(5), ['Up'] * 5)]
  assert [str(s) for s in steps[:2]] == ['step answered an error: no map', 'step answered no object: 7']
  assert steps[2] == TextStep('x', 1.0, False, False)
  assert [s.kind for s in steps[3:]] == ['reward is not within 1e+15', 'observation is not a string']
