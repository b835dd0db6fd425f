"""Python classes as environments, against the same games played by plain loops."""

from __future__ import annotations

import pytest
from ml_collections import ConfigDict

from ragen_jax import envs as registry
from ragen_jax.envs.base import Budget
from tests.support.environments import raises_one_line
from tests.support.text_games import GAMES, NoNames, by_hand, by_session, make


@pytest.mark.parametrize('workers', [0, 1, 3])
def test_a_python_class_plays_as_it_does_by_hand_again_and_again(workers):
  env = make('Climb', options=ConfigDict({'rungs': 6}), workers=workers)
  session = env.open(4)
  for first in (3, 8):
    seeds, members = [first, first, first + 1, first + 1], [0, 1, 0, 1]
    assert by_session(session, seeds, members) == by_hand(6, seeds, members)
  assert len({row[0] for row in by_hand(6, seeds, members)}) == 2


def test_what_a_class_gives_to_the_prompt():
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


@pytest.mark.parametrize(
  ('options', 'message'),
  [
    ({}, r"python: class_path=''; allowed: 'package\.module:name'"),
    ({'class_path': 'json'}, r"class_path='json'; allowed: 'package\.module:name'"),
    ({'class_path': f'{GAMES}:make'}, 'class_path=.*make.* has no reset'),
    ({'class_path': f'{GAMES}:NoStep'}, 'class_path=.*NoStep.* has no step'),
    ({'class_path': f'{GAMES}:NoRules'}, r"NoRules: rules=''; allowed: text that is not blank"),
    ({'class_path': f'{GAMES}:NoWords'}, r"NoWords: rules cannot be read \(KeyError: 'no.*rules'"),
    ({'class_path': f'{GAMES}:NoNames'}, r'NoNames: action_names cannot be read \(SystemExit: 2\)'),
    ({'class_path': f'{GAMES}:TwinNames'}, r'TwinNames: action_names=.*; allowed: names that differ'),
    ({'class_path': f'{GAMES}:Climb', 'options': {'steps': 1}}, r'options=.*steps.*TypeError'),
    ({'class_path': f'{GAMES}:Climb', 'options': 3}, r'options=3; allowed: a section'),
    ({'class_path': f'{GAMES}:Climb', 'workers': -1}, r'workers=-1; allowed: whole numbers from 0'),
    ({'class_path': f'{GAMES}:Climb', 'step_timeout_s': 0}, r'step_timeout_s=0; allowed: seconds, above'),
  ],
)
def test_wrong_options_are_named_in_one_line(options, message):
  with raises_one_line(message):
    registry.make('python', options)


def test_an_object_that_cannot_be_read_is_closed():
  closed = NoNames.closed
  with pytest.raises(ValueError, match='action_names'):
    make('NoNames')
  assert NoNames.closed == closed + 1
