"""Warnings of rollouts that have nothing to learn from."""

from __future__ import annotations

import dataclasses
import logging

import pytest

from configs import frozenlake_ppo
from ragen_jax import build
from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.world_model.state_reward import NO_REWARD
from ragen_jax.training.learnable import equal_scores, invalid_replies, paid_invalid_replies, unplayed_episodes


def episode(valid=True, score=0.0, *, group=0, tag='Bandit', status=Status.FAILURE, answered=True, later=True):
  """An episode of two turns, of which the first is valid or not."""
  turns = [
    Turn('board', f'reply {group}\nof two lines', ['Left'], (score,), 0.0, v, 1, answered=answered)
    for v in (valid, later)
  ]
  return Episode(tag, group, 0, turns, status=status)


@pytest.mark.parametrize(('valid', 'warned'), [(5, False), (4, True), (0, True), (9, False)])
def test_more_than_half_of_the_first_replies_must_be_valid(valid, warned):
  lines = invalid_replies([episode(i < valid) for i in range(9)])
  assert len(lines) == warned
  if warned:
    assert lines[0].startswith(f'Bandit: {9 - valid} of 9 first replies are not valid, such as ')
    assert 'agent.request' in lines[0] and '\n' not in lines[0]


def test_half_of_the_first_replies_is_enough():
  assert not invalid_replies([episode(i < 4) for i in range(8)])


def test_later_replies_and_lost_ones_do_not_count():
  assert not invalid_replies([episode(True, later=False)] * 3)
  assert not invalid_replies([episode(False, answered=False)] * 3 + [episode(True)])
  assert not invalid_replies([Episode('Bandit', 0, 0, [])])


def test_each_environment_is_judged_by_itself():
  lines = invalid_replies([episode(True)] * 9 + [episode(False, tag='FrozenLake')] * 3)
  assert [line.split(':')[0] for line in lines] == ['FrozenLake']


def test_scores_that_are_all_equal_teach_nothing():
  assert equal_scores([episode(score=-0.1)] * 4, in_groups=False) == equal_scores(
    [episode(score=-0.1)] * 4, in_groups=True
  )
  line = equal_scores([episode(score=-0.1)] * 4, in_groups=False)
  assert line.startswith('nothing to learn from: all 4 episodes have the score -0.2; try ')
  assert 'train.group_size' in line and '\n' not in line
  assert not equal_scores([episode(score=1.0), episode(score=0.9)], in_groups=False)


def test_equal_scores_within_groups_matter_only_if_groups_are_compared():
  episodes = [episode(score=float(group), group=group) for group in (0, 0, 1, 1)]
  assert not equal_scores(episodes, in_groups=False)
  assert equal_scores(episodes, in_groups=True).startswith('nothing to learn from: in each of the 2 groups all scores')
  assert not equal_scores([*episodes, episode(score=3.0, group=1)], in_groups=True)


@pytest.mark.parametrize('reward', [{'format_reward': 0.5}, {'rewards': {'observation': 0.5}}])
def test_rewards_of_replies_teach_something(reward):
  """Estimators compare scores with the rewards of replies, which the score of an episode does not have."""
  one, other = episode(), episode()
  other.turns[1].reply_reward = dataclasses.replace(NO_REWARD, **reward)
  assert one.score == other.score
  assert not equal_scores([one, other], in_groups=False) and not equal_scores([one, other], in_groups=True)
  assert equal_scores([other, other], in_groups=True)


def test_failed_environments_and_single_episodes_are_no_evidence():
  assert not equal_scores([episode()], in_groups=False)
  assert not equal_scores(
    [episode(), episode(status=Status.ENV_ERROR), episode(status=Status.ENV_ERROR)], in_groups=False
  )
  assert not equal_scores([episode(score=1.0, status=Status.ENV_ERROR), episode()], in_groups=False)


def test_invalid_replies_that_pay_more_than_play_are_told():
  def idle(score=-0.1, n=4, **fields):
    return [episode(False, score, later=False, **fields) for _ in range(n)]

  playing = [episode(True, -0.15)] * 4  # two turns each
  (line,) = paid_invalid_replies([*idle(), *playing, episode(True, 10.0, status=Status.SUCCESS)])
  assert line.startswith('Bandit: invalid replies pay: the mean score is -0.2 in 4 episodes')
  assert '-0.3 in 4 unsuccessful ones' in line and 'agent.format_penalty' in line
  assert not paid_invalid_replies([*idle(-0.2), *playing])  # they cost more
  assert not paid_invalid_replies([*idle(-0.15), *playing])
  assert not paid_invalid_replies([*idle(n=3), *playing]) and not paid_invalid_replies([*idle(), *playing[:3]])
  assert not paid_invalid_replies([*idle(tag='FrozenLake'), *playing])  # another game
  mixed = [episode(False, -0.1), episode(True, -0.1, later=False)]
  assert not paid_invalid_replies([*idle(n=3), *mixed, *playing])
  assert not paid_invalid_replies([*idle(status=Status.ENV_ERROR), *playing])


def test_a_run_says_once_that_it_has_nothing_to_learn_from(caplog):
  config = frozenlake_ppo.get_config()
  config.agent.request = 'Say {form} in {max_words} words.'  # unknown to the built-in model
  config.train.groups, config.train.group_size, config.envs.FrozenLake.max_turns = 4, 2, 1
  config.optimizer.mini_batch_size = 8
  policy = build.load_policy(config)
  trainer = build.make_trainer(config, policy)
  state = trainer.init()
  with caplog.at_level(logging.WARNING):
    for _ in range(2):
      trainer._warn([episode(False, -0.1, group=g, tag='FrozenLake') for g in (0, 0, 1, 1)])
  said = [r.getMessage() for r in caplog.records]
  assert len(said) == 2 and '4 of 4 first replies' in said[0] and said[1].startswith('nothing to learn from')
  caplog.clear()
  with caplog.at_level(logging.WARNING):  # what was not said yet
    trainer._warn([episode(i > 4, -0.3 if i > 4 else -0.1, later=i > 4, tag='FrozenLake') for i in range(9)])
  assert [r.getMessage().split(':')[1] for r in caplog.records] == [' invalid replies pay']
  caplog.clear()
  trainer._warn([episode(True, float(i)) for i in range(4)])
  trainer._warn([episode(True, 1.0) for _ in range(4)])
  assert [r.getMessage().split(':')[0] for r in caplog.records if r.levelno == logging.WARNING] == [
    'nothing to learn from'
  ]
  del state


def test_episodes_that_end_before_their_first_turn_are_told():
  unplayed = [dataclasses.replace(episode(), turns=[], status=Status.OUT_OF_CONTEXT) for _ in range(3)]
  (line,) = unplayed_episodes([*unplayed, episode(), episode(tag='Other')])
  assert line.startswith('Bandit: 3 of 4 episodes ended without a turn') and 'agent.max_context' in line
  later = dataclasses.replace(episode(), status=Status.OUT_OF_CONTEXT)
  failed = dataclasses.replace(episode(), turns=[], status=Status.ENV_ERROR)
  assert unplayed_episodes([later, failed, episode()]) == []
