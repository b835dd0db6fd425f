"""Sessions of objects in this process: objects that fail are replaced, and closed if they can be."""

from __future__ import annotations

import logging
import time
import types

import pytest

from ragen_jax import envs as registry
from ragen_jax.envs.outside.base import TextStep, read_observation, read_step
from ragen_jax.envs.outside.local import LocalSession, close_all
from ragen_jax.utils.threads import Fault
from tests.support.stopped_clock import stop_clock
from tests.support.text_games import Broken, make


@pytest.fixture
def clock(monkeypatch):
  """The clock of the time limits."""
  stopped = stop_clock(monkeypatch, 'ragen_jax.utils.threads')
  yield stopped
  stopped.release.set()


def test_a_game_that_failed_is_replaced_and_closed_unless_it_may_still_run(monkeypatch, clock):
  monkeypatch.setattr('tests.support.text_games.time', types.SimpleNamespace(sleep=clock.hang))
  for counter in ('made', 'closed'):
    monkeypatch.setattr(Broken, counter, 0)
  env = make('Broken', step_timeout_s=0.3)
  assert (Broken.made, Broken.closed) == (1, 1)  # the object whose rules were read
  session = env.open(4)
  texts = session.reset(range(4), [1, 2, 13, 14], [0] * 4)
  assert texts[:2] == ['level 1', 'level 2']
  assert str(texts[2]).startswith('reset raised RuntimeError: no such level (text_games.py:')
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


def test_an_environment_that_hangs_again_and_again_is_no_longer_played(monkeypatch, clock):
  monkeypatch.setattr('tests.support.text_games.time', types.SimpleNamespace(sleep=clock.hang))
  monkeypatch.setattr('ragen_jax.utils.threads._MOST_ABANDONED', 2)
  for counter in ('made', 'closed'):
    monkeypatch.setattr(Broken, counter, 0)
  env, other = make('Broken', step_timeout_s=0.1), make('Broken', step_timeout_s=0.1)
  sessions = [env.open(3), env.open(3)]  # those of training and of evaluation share the limit
  for session in sessions:
    assert session.reset(range(3), [1, 2, 3], [0] * 3) == ['level 1', 'level 2', 'level 3']
  first, second = (session.step(range(3), ['walk', 'sleep 1', 'walk']) for session in sessions)
  assert first[0][0] == first[2][0] == second[0][0] == 'next' and first[1].hung and second[1].hung
  refused = 'is no longer called: 2 calls that took too long are still running'
  assert str(second[2]) == f'step {refused}' and Broken.closed == 3  # and that row's game, which could be closed
  faults = sessions[0].reset(range(3), [1, 2, 3], [0] * 3)
  assert [str(fault) for fault in faults] == [f'reset {refused}'] * 3 and Broken.made == 8
  # Another environment plays on.
  assert other.open(1).reset([0], [1], [0]) == ['level 1']


@pytest.mark.parametrize(
  ('kind', 'options', 'module'),
  [
    ('python', {'class_path': 'tests.support.text_games:Broken'}, 'local'),
    ('gymnasium', {'id': 'CartPole-v1', 'task': 'Balance.', 'action_names': ('Left', 'Right')}, 'local'),
    ('http', {'url': 'http://localhost:1', 'task': 'Climb.'}, 'http'),
  ],
)
def test_the_sessions_of_an_environment_share_its_limit_of_threads(kind, options, module, monkeypatch):
  env, owners = registry.make(kind, options), []

  def run(calls, *, owner, **others):
    owners.append(owner)
    return [(None, Fault('x'))] * len(calls)

  monkeypatch.setattr(f'ragen_jax.envs.outside.{module}.run_calls', run)
  for session in (env.open(1), env.open(1)):
    assert session.reset([0], [1], [0]) == [Fault('x')]
  assert set(owners) == {env}


def test_a_close_that_hangs_or_fails_ends_nothing(caplog, clock):
  closed = []

  class Stuck:
    def close(self):
      clock.hang(1.0)

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
    close_all(games, workers=1, timeout_s=0.2)
    assert len(closed) == 4
    session = LocalSession(Game, 50, workers=1, step_timeout_s=0.2)
    session.reset(range(50), [0] * 50, [0] * 50)
    assert session.step(range(40), ['a'] * 40)[39].kind == 'step raised KeyError'
    del session  # which closes the ten games that are left
  assert time.monotonic() - start < 60  # what hangs takes longer
  messages = [r.getMessage() for r in caplog.records]
  assert [m.split(' (')[0] for m in messages[:2]] == [
    'Strange: close raised GeneratorExit:', 'Stuck: close took longer than 0.2 s',
  ]  # fmt: skip
  assert len(messages) == 4 and messages[2].endswith('; 40 like it') and messages[3].endswith('; 10 like it')
