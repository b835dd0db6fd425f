"""What is read from environments outside JAX, and every way in which it can be wrong."""

from __future__ import annotations

import dataclasses
import gc
import logging
import warnings

import numpy as np
import pytest

from ragen_jax.envs.outside.base import TextEnvironment, TextStep, read_observation, read_step
from ragen_jax.utils.threads import Fault
from tests.support.text_games import Nameless, OddMapping, Unreal, Unwritten


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


def test_an_async_step_is_told():
  async def step():
    return 'a', 0.0, False, False

  with warnings.catch_warnings():
    warnings.simplefilter('error')  # of a coroutine that was never awaited
    assert str(read_step(step())) == 'step is async: define it with def, and call asyncio.run in it'
    gc.collect()


def test_odd_objects_are_faults_or_harmless():
  assert read_observation(Unwritten('a')) == 'a'
  odd = type('Odd', (), {'__repr__': Unwritten.__repr__})()
  for fault in (
    read_observation(odd),
    *map(read_step, (odd, (odd,) * 4, ('a', odd, False, False), ('a', 0, odd, False), ('a', 0, True, odd))),
    *map(read_step, (('a', Unreal(1), False, False), ('a', 0, True, OddMapping()), ('a', 10**5000, False, False))),
  ):
    assert isinstance(fault, Fault) and len(str(fault)) <= 300


# -- actions -----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Moody(TextEnvironment):
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
