"""What a batch of environments and its prompts take from a spec."""

from __future__ import annotations

import dataclasses

import pytest

from ragen_jax.agent.context_manager import ContextManager
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.envs.bandit import Bandit
from ragen_jax.envs.base import Budget
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.spec import EnvSpec
from tests.support.speakers import context_settings

_LAKE = EnvSpec('Lake', FrozenLake(size=3), Budget(4, 7, 2), 41, 2)


def test_rows_are_those_of_its_groups_in_the_order_of_the_specs():
  envs = EnvStateManager([_LAKE, EnvSpec('Arms', Bandit(), Budget(1, 1, 1), 9, 3)], 2)
  assert envs.rows == (2 + 3) * 2 and envs.row_env.tolist() == [0] * 4 + [1] * 6
  envs.reset(0)
  assert envs.actions_left().tolist() == [7] * 4 + [1] * 6


def test_each_number_of_it_is_told_in_the_prompt():
  def prompt(spec):
    messages = ContextManager(None, [spec], context_settings()).messages(0, [], 'board', 3)
    return ' '.join(message['content'] for message in messages)

  told = prompt(_LAKE)
  for changed, now in (
    ({'max_words': 57}, '57'),
    ({'budget': Budget(5, 8, 3)}, '8 actions'),
    ({'env': FrozenLake(size=6)}, '6 by 6'),
  ):
    other = prompt(dataclasses.replace(_LAKE, **changed))
    assert now in other and now not in told
  assert prompt(dataclasses.replace(_LAKE, tag='Other', num_groups=9)) == told


def test_it_is_equal_to_another_of_the_same_values_and_cannot_be_changed():
  assert EnvSpec('Lake', FrozenLake(size=3), Budget(4, 7, 2), 41, 2) == _LAKE
  assert dataclasses.replace(_LAKE, env=FrozenLake(size=4)) != _LAKE
  with pytest.raises(dataclasses.FrozenInstanceError):
    _LAKE.num_groups = 3
