"""Which forms of replies and which rewards for them are refused."""

from __future__ import annotations

import pytest

from ragen_jax.config.checks import check_config
from ragen_jax.config.reply_checks import check_replies
from tests.support.configs import assert_refused, small_config

_STATE = {'agent.format': 'world_modeling', 'reward.state_reward': 0.25}
_AGENT = {'train.tags': ('Agent',), 'eval.tags': ('Agent',)}


@pytest.mark.parametrize(
  ('fields', 'message'),
  [
    (
      {'agent.format': 'thinking'},
      r"^agent\.format='thinking': allowed: no_think, free_think, state_estimation, transition_modeling, "
      'world_modeling$',
    ),
    ({'reward.state_place': 'end'}, r"^reward\.state_place='end': allowed: turn, section$"),
    ({'reward.format_reward': -0.1}, r'^reward\.format_reward=-0\.1: must be at least 0$'),
    ({'reward.state_reward': -1.0}, r'^reward\.state_reward=-1\.0: must be at least 0$'),
    ({'reward.state_floor': 1.0}, r'^reward\.state_floor=1\.0: must be at least 0 and below 1$'),
    (
      {'reward.state_reward': 0.5},
      r"^reward\.state_reward=0\.5: replies with agent\.format='free_think' do not describe the board; allowed: state",
    ),
    (
      {**_STATE, 'train.tags': ('FrozenLake', 'Bandit')},
      r'^reward\.state_reward=0\.25: must be 0, since descriptions cannot be compared with the state of Bandit ',
    ),
    ({**_STATE, **_AGENT}, r'^reward\.state_reward=0\.25: must be 0, .*the state of Agent '),
    (
      {**_AGENT, 'reward.format_reward': 0.5},
      r'^reward\.format_reward=0\.5: must be 0, since programs choose the form of replies in Agent$',
    ),
    (
      {**_STATE, 'reward.state_place': 'section', 'algorithm.adv_estimator': 'turn_wise_gae'},
      r"^reward\.state_place='section': algorithm\.adv_estimator='turn_wise_gae' does not read where in a turn",
    ),
    (
      {**_STATE, 'reward.state_place': 'section', 'algorithm.adv_estimator': 'grpo'},
      r"^reward\.state_place='section': algorithm\.adv_estimator='grpo' does not read where in a turn a reward is",
    ),
    (
      {**_STATE, 'reward.state_place': 'section', 'reward.credit': 'trajectory'},
      r"^reward\.state_place='section': reward\.credit='trajectory' puts all rewards on the last token",
    ),
  ],
)
def test_what_is_refused(fields, message):
  assert_refused(check_replies, small_config(fields), message)


@pytest.mark.parametrize(
  'fields',
  [
    {},
    {'reward.format_reward': 0.5, 'train.tags': ('FrozenLake', 'Bandit')},
    _STATE | {'train.tags': ('SimpleSokoban', 'CoordFrozenLake'), 'eval.tags': ('Bandit',)},
    _STATE | {'reward.state_place': 'section', 'algorithm.adv_estimator': 'bi_level_gae'},
    {'agent.format': 'state_estimation', 'train.tags': ('Bandit',)},
  ],
)
def test_what_is_allowed(fields):
  check_replies(small_config(fields))


def test_the_field_of_earlier_versions_is_named_with_what_it_is_now():
  config = small_config()
  config.agent.think = False  # as in a file of a user; the default config is not locked
  assert_refused(
    lambda c: check_config(c, weights=False),
    config,
    r"^agent\.think=False: it is agent\.format now, 'free_think' for True and 'no_think' for False$",
  )
