"""Checks of options: the values that pass, and the line that names the option and its value where they do not."""

from __future__ import annotations

import functools
import math

import numpy as np
import pytest
from ml_collections import ConfigDict

from ragen_jax.envs import options
from tests.support.environments import raises_one_line


class _Unwritable:
  def __repr__(self):
    raise RuntimeError


@pytest.mark.parametrize(
  ('check', 'allowed', 'refused', 'message'),
  [
    (
      functools.partial(options.check_integer, low=2, high=9),
      (2, 9, np.int32(5)),
      (1, 10, 5.0, True, None, '5', math.nan),
      'allowed: integers from 2 to 9$',
    ),
    (options.check_flag, (True, False, np.bool_(True)), (0, 1, None, 'True'), 'allowed: True, False$'),
    (
      functools.partial(options.check_choice, allowed=('up', 'down')), ('up',), ('Up', '', None), 'allowed: up, down$'
    ),
    (
      functools.partial(options.check_whole_number, least=1),
      (1, 10**12),
      (0, True, 1.0, np.int64(3), None),
      'allowed: whole numbers from 1$',
    ),
    (options.check_seconds, (0.5, 3, np.float32(1)), (0, -1.0, math.inf, math.nan, True, '1'), 'allowed: seconds'),
    (options.check_text, ('a', '', ' '), (3, None, b'a', _Unwritable()), 'allowed: text$'),
    (functools.partial(options.check_text, blank=False), ('a',), ('', ' \n', 3), 'allowed: text that is not blank$'),
    (options.check_mapping, ({}, {'a': 1}), ({1: 2}, [('a', 1)], 3, _Unwritable()), 'allowed: a section of options by'),
    (options.check_legend, ({'#': 'wall'},), ({'#': 3}, {3: 'wall'}, 'wall'), 'allowed: (texts|a section)'),
  ],
)  # fmt: skip
def test_options_are_checked_with_their_name_and_value(check, allowed, refused, message):
  for value in allowed:
    check('game', 'depth', value)
  for value in refused:
    with raises_one_line(rf'^game: depth=.+; {message}') as e:
      check('game', 'depth', value)
    assert isinstance(value, _Unwritable) or f'depth={value!r};' in str(e.value)


@pytest.mark.parametrize(
  ('value', 'integer', 'number'),
  [
    (3, True, True), (np.int8(3), True, True), (3.0, False, True), (np.float32(3), False, True),
    (math.nan, False, True),
    (math.inf, False, True), (True, False, False), (np.bool_(True), False, False), (3j, False, False),
    ('3', False, False), (None, False, False),
  ],
)  # fmt: skip
def test_booleans_are_no_numbers_and_those_of_numpy_are(value, integer, number):
  assert (options.is_integer(value), options.is_number(value)) == (integer, number)


def test_threads_and_time_limits_are_checked_together():
  options.check_workers('game', 0, 0.1)
  for workers, seconds, message in ((-1, 1.0, 'workers=-1; .* from 0'), (1, 0, 'step_timeout_s=0; allowed: seconds')):
    with raises_one_line(f'^game: {message}'):
      options.check_workers('game', workers, seconds)


def test_sections_of_a_config_become_dicts_at_any_depth():
  section = ConfigDict({'a': {'b': {'c': 1}}, 'd': (1, 2)})
  found = options.check_mapping('game', 'kwargs', {'outer': section})
  assert found == {'outer': {'a': {'b': {'c': 1}}, 'd': (1, 2)}}
  assert type(found['outer']) is type(found['outer']['a']['b']) is dict
  found['outer']['a']['b']['c'] = 2
  assert section.a.b.c == 1


def test_names_of_actions_differ_without_regard_to_case():
  assert options.check_action_names('game', ['Up', 'down']) == ('Up', 'down')
  assert options.check_action_names('game', ()) == ()
  for names in (('Up', 'UP'), ('Up', ''), ('Up', ' Down'), ('Up', 3), 'Up', None):
    with raises_one_line('^game: action_names=.*; allowed: names that differ, letter case aside$'):
      options.check_action_names('game', names)
