"""The rule that ends episodes, and the sums of their rewards."""

from __future__ import annotations

from fractions import Fraction

import pytest

from ragen_jax.agent.episode import TRUNCATED, Episode, Status, Turn, status_after_turn


@pytest.mark.parametrize(
  ('fields', 'status'),
  [
    ({}, Status.RUNNING),
    ({'done': True, 'success': True}, Status.SUCCESS),
    ({'done': True}, Status.FAILURE),
    ({'actions_left': 0}, Status.OUT_OF_ACTIONS),
    ({'actions_left': 1}, Status.RUNNING),
    ({'success': True, 'actions_left': 1}, Status.RUNNING),
    ({'last_turn': True}, Status.OUT_OF_TURNS),
    ({'actions_left': 0, 'last_turn': True}, Status.OUT_OF_ACTIONS),
    # A game that is won and goes on is no failure of the limits.
    ({'success': True}, Status.RUNNING),
    ({'success': True, 'actions_left': 0}, Status.SUCCESS),
    ({'success': True, 'last_turn': True}, Status.SUCCESS),
    # The game's own end comes before the limits.
    ({'done': True, 'success': True, 'actions_left': 0, 'last_turn': True}, Status.SUCCESS),
    ({'done': True, 'actions_left': 0, 'last_turn': True}, Status.FAILURE),
  ],
)
def test_the_status_behind_a_turn(fields, status):
  usual = {'done': False, 'success': False, 'actions_left': 3, 'last_turn': False}
  assert status_after_turn(**usual | fields) == status


def test_limits_truncate_and_the_game_s_own_end_and_failures_do_not():
  assert set(TRUNCATED) == {Status.OUT_OF_TURNS, Status.OUT_OF_ACTIONS, Status.OUT_OF_CONTEXT}


def test_numbers_of_statuses_are_those_of_saved_rollouts():
  names = [
    'RUNNING',
    'SUCCESS',
    'FAILURE',
    'OUT_OF_TURNS',
    'OUT_OF_ACTIONS',
    'OUT_OF_CONTEXT',
    'ENV_ERROR',
    'ABANDONED',
  ]
  assert [status.name for status in sorted(Status)] == names and list(map(int, Status)) == list(range(8))


def test_the_score_is_the_return_with_penalties():
  turns = [
    Turn('x', 'y', [], (reward,), penalty, True, 0) for reward, penalty in ((-0.1, 0.0), (0.0, -0.25), (10.9, 0.0))
  ]
  episode = Episode('Sokoban', 0, 7, turns, status=Status.SUCCESS)
  assert episode.success
  assert episode.env_return == pytest.approx(10.8) and episode.score == pytest.approx(10.55)


def test_sums_of_rewards_are_exact_in_any_order_and_any_turns():
  rewards = [0.1] * 10 + [1e16, -0.3, 1 / 3, -1e16]
  exact = float(sum(map(Fraction, rewards)))
  for step in (1, 3, 14):
    cut = [tuple(rewards[i : i + step]) for i in range(0, len(rewards), step)]
    for turns in (cut, cut[::-1]):
      episode = Episode('A', 0, 7, [Turn('x', 'y', [], own, 0.0, True, 0) for own in turns])
      assert episode.score == episode.env_return == exact
  turn = Turn('x', 'y', [], (0.1, 1e16, -1e16), -0.25, True, 0)
  assert turn.reward == 0.1 and turn.score == float(Fraction(0.1) - Fraction(0.25))
