"""Sessions of objects in this process: objects that fail are replaced, and closed if they can be."""

from __future__ import annotations

import logging
import threading
import time
import types

import numpy as np
import pytest

from ragen_jax import envs as registry
from ragen_jax.envs.outside.base import TextStep, read_observation, read_step
from ragen_jax.envs.outside.images import ImageForm
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
    ('http', {'url': 'http://localhost:1', 'task': 'Climb.'}, 'timed_http'),
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


# -- results that are no plain values ----------------------------------------------------------------------------------


IMAGE = np.zeros((2, 3, 3), np.uint8)


def late_objects(clock):
  """Objects whose methods hang, as those of a proxy whose server is gone do; by the name of the method."""

  def hang(self, *arguments, **options):
    assert threading.current_thread() is not threading.main_thread()  # which has no time limit
    clock.hang(1.0)
    return 'late'

  late = {
    'repr': type('Late', (), {'__repr__': hang})(),
    'class': type('Late', (), {'__class__': property(hang)})(),
    'float': type('Late', (float,), {'__float__': hang})(),
    'get': type('Late', (dict,), {'get': hang})(),
    'len': type('Late', (list,), {'__len__': hang})(),
    'error': type('Late', (Exception,), {'__str__': hang})(),
    'texts': Fault('x', type('Late', (), {'__str__': hang})()),
  }
  image = {'__class__': np.ndarray, 'dtype': IMAGE.dtype, 'shape': IMAGE.shape, '__array__': hang}
  return late | {'array': type('Late', (), image)()}


class Late:
  """Returns what the hook `of` gives for 'reset' or 'step', and raises it if it is an exception."""

  rules = 'Wait.'
  of = staticmethod(lambda what: None)

  def reset(self, seed, member):
    return self.give('reset') if seed == 13 else 'first'

  def step(self, action):
    return self.give('step') if action == 'late' else ('next', 1.0, False, False)

  def give(self, what):
    given = type(self).of(what)
    if isinstance(given, Exception):
      raise given
    return given


STEPS = {
  'a reward that cannot be written': lambda late: ('x', late['repr'], False, {}),
  'a reward that is no number yet': lambda late: ('x', late['float'], False, {}),
  'a flag': lambda late: ('x', 0.0, late['repr'], {}),
  'an info that is not read': lambda late: ('x', 0.0, False, late['get']),
  'a success': lambda late: ('x', 0.0, True, {'success': late['repr']}),
  'an effect': lambda late: ('x', 0.0, False, {'effective': late['repr']}),
  'an observation': lambda late: (late['repr'], 0.0, False, {}),
  'a result': lambda late: late['repr'],
  'a result of unknown class': lambda late: late['class'],
  'a result of unknown length': lambda late: late['len'],
  'a fault': lambda late: late['texts'],
  'an exception': lambda late: late['error'],
}
OBSERVATIONS = {
  'an observation': (None, lambda late: late['repr']),
  'an observation of unknown class': (None, lambda late: late['class']),
  'a fault': (None, lambda late: late['texts']),
  'an exception': (None, lambda late: late['error']),
  'a mapping': (ImageForm(1, 2, 3), lambda late: late['get']),
  'images': (ImageForm(1, 2, 3), lambda late: {'text': '', 'images': late['len']}),
  'an image': (ImageForm(1, 2, 3), lambda late: {'text': '', 'images': [late['array']]}),
  'a fault of an image': (ImageForm(1, 2, 3), lambda late: {'text': '', 'images': [late['texts']]}),
}


@pytest.mark.parametrize('name', STEPS)
def test_a_step_whose_result_hangs_ends_its_episode_alone(name, monkeypatch, clock):
  late = late_objects(clock)
  monkeypatch.setattr(Late, 'of', staticmethod(lambda what: STEPS[name](late)))
  session = LocalSession(Late, 3, workers=1, step_timeout_s=0.1)
  assert session.reset(range(3), [0] * 3, [0] * 3) == ['first'] * 3
  steps = [read_step(result) for result in session.step(range(3), ['a', 'late', 'a'])]
  good = TextStep('next', 1.0, False, False)
  assert steps == [good, Fault('step took longer than 0.1 s', hung=True), good]
  assert session.reset([1], [0], [0]) == ['first']  # of another object


@pytest.mark.parametrize('name', OBSERVATIONS)
def test_a_reset_whose_result_hangs_ends_its_episode_alone(name, monkeypatch, clock):
  late, (form, observation) = late_objects(clock), OBSERVATIONS[name]
  monkeypatch.setattr(Late, 'of', staticmethod(lambda what: observation(late)))
  session = LocalSession(Late, 2, workers=1, step_timeout_s=0.1, form=form)
  texts = [read_observation(text, form) for text in session.reset(range(2), [13, 0], [0] * 2)]
  assert texts[0] == Fault('reset took longer than 0.1 s', hung=True)
  assert texts[1] == 'first' if form is None else texts[1].kind.startswith('observation is not {')


def plain(value):
  """Whether a value consists of built-in values and arrays alone."""
  if type(value) in (tuple, dict):
    return all(map(plain, value.values() if type(value) is dict else value))
  return type(value) in (str, float, bool, type(None), np.ndarray)


@pytest.mark.parametrize('workers', [0, 1])
def test_results_are_plain_values_whatever_the_game_returns(workers, monkeypatch):
  text, number = type('Text', (str,), {}), type('Number', (float,), {})
  array, mapping = IMAGE.view(type('Array', (np.ndarray,), {})), type('Info', (dict,), {})
  told = {
    None: text('x'),
    ImageForm(1, 2, 3): mapping(text=text('x'), images=[array]),
  }
  for form, observation in told.items():
    info = mapping(success=np.True_, effective=np.False_, more=object())
    given = {'reset': observation, 'step': [observation, number(0.5), np.True_, info]}
    monkeypatch.setattr(Late, 'of', staticmethod(given.get))
    session = LocalSession(Late, 1, workers=workers, step_timeout_s=90.0, form=form)
    (first,), (step,) = session.reset([0], [13], [0]), session.step([0], ['late'])
    assert plain(first) and plain(step)
    assert read_observation(first, form) == read_observation(observation, form)
    assert read_step(step, form) == read_step(given['step'], form)
    assert read_step(step, form) == TextStep(read_observation(observation, form), 0.5, True, True, False)


def test_a_fault_of_the_game_s_own_has_short_plain_texts(monkeypatch):
  text = type('Text', (str,), {})
  monkeypatch.setattr(Late, 'of', staticmethod(lambda what: Fault(text(what), text('a\n' * 1000), hung=5)))
  session = LocalSession(Late, 1, workers=1, step_timeout_s=90.0)
  for what, fault in (('reset', session.reset([0], [13], [0])[0]), ('step', session.step([0], ['late'])[0])):
    assert fault == Fault(what, 'a ' * 150, hung=True) and type(fault.kind) is type(fault.detail) is str
    assert type(fault.hung) is bool
