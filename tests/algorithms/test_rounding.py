"""Episodes that earned the same are worth the same, however their actions were cut into turns."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.algorithms import advantages, filters, group_relative, masks, rewards, rounding
from ragen_jax.algorithms.advantages import AdvantageInputs
from ragen_jax.algorithms.diagnostics import in_group_reward
from tests.support.estimators import FILTER, advantage_settings

# Five moves of Sokoban that solve a level: four steps, and the one that pushes the box onto its target.
SOLVED = (-0.1, -0.1, -0.1, -0.1, 10.9)
# The same five moves as turns of so many actions.
CUTS = ((5,), (1, 4), (2, 3), (2, 2, 1))
COLUMNS = 12

# Each is one program, as in training, in place of one for each operation.
compute_advantages = jax.jit(advantages.compute_advantages, static_argnums=0)
episode_scores = jax.jit(group_relative.episode_scores)


def rows(cuts, actions=SOLVED):
  """rewards f32[B, T], mask bool[B, T] and turn i32[B, T] of one row for each cut, two tokens a turn.

  A turn's reward is the float32 sum of its actions in order, as compiled programs add them.
  """
  reward = np.zeros((len(cuts), COLUMNS), np.float32)
  turn = np.full(reward.shape, -1, np.int32)
  for row, cut in enumerate(cuts):
    start = 0
    for k, count in enumerate(cut):
      total = np.float32(0)
      for action in actions[start : start + count]:
        total += np.float32(action)
      reward[row, 2 * k + 1] = total
      turn[row, 2 * k : 2 * k + 2] = k
      start += count
  return reward, turn >= 0, turn


def test_the_scores_of_these_rows_differ_in_the_last_bits():
  reward, mask, _ = rows(CUTS)
  scores = np.asarray(episode_scores(reward, mask))
  assert len(set(scores.tolist())) > 1, 'without a difference, the tests below would show nothing'
  np.testing.assert_allclose(scores, 10.5, rtol=1e-6)


@pytest.mark.parametrize('name', ['grpo', 'dr_grpo', 'rloo', 'brpo', 'reinforce_plus_plus_baseline'])
def test_a_group_that_is_fully_solved_has_no_advantages(name):
  reward, mask, turn = rows(CUTS)
  group = np.zeros(len(CUTS), np.int32)
  found = compute_advantages(advantage_settings(name), AdvantageInputs(reward, mask, turn, group))
  np.testing.assert_array_equal(found.advantages, 0)


def test_reinforce_plus_plus_does_not_blow_up_what_is_left_of_equal_returns():
  reward, mask, turn = rows(CUTS)
  ends = np.asarray(jax.jit(masks.turn_ends)(mask, turn))
  first = mask & (turn == 0)
  found = jax.jit(masks.whiten)(np.where(first, episode_scores(reward, mask)[:, None], 0), first)
  assert ends.any()
  np.testing.assert_array_equal(found, 0)


def test_normalised_scores_of_equal_episodes_are_zero():
  reward, mask, _ = rows(CUTS)
  zero = np.zeros(len(CUTS), np.int32)
  ways = itertools.product(rewards.GROUPINGS, ['mean', 'mean_std', 'asym_clip'])

  @jax.jit
  def run(scores):
    return {f'{g} {m}': rewards.normalize_scores(scores, mask, zero, zero, grouping=g, method=m) for g, m in ways}

  for way, found in run(episode_scores(reward, mask)).items():
    np.testing.assert_array_equal(found, 0, err_msg=way)


def test_filters_and_metrics_see_that_the_group_does_not_vary():
  reward, mask, _ = rows(CUTS)
  scores, group, valid = np.asarray(episode_scores(reward, mask)), np.zeros(4, np.int32), np.ones(4, bool)
  assert filters.group_scores('reward_std', group, valid, scores=scores)[1].tolist() == [0.0]
  kept = filters.uncertainty_filter(
    group, valid, scores=scores, metric='reward_std', **FILTER | {'include_zero': False}
  )
  assert not kept.keep.any() and kept.metrics['rollout/filter_zero_count'] == 1
  assert in_group_reward(scores, group, valid)['rollout/in_group_reward_std'] == 0
  np.testing.assert_array_equal(filters.soft_weights(scores, group, valid), 1)  # no group varies


def test_groups_with_the_same_scores_tie_in_any_order_of_their_members():
  rng = np.random.default_rng(0)
  for size in (4, 8, 16):
    own = rng.choice(np.float32([10.5, -1.1, 0.9, 10.4, -0.30000001]), size=size)
    scores, group = np.concatenate([rng.permutation(own) for _ in range(20)]), np.repeat(np.arange(20), size)
    for metric in ('reward_std', 'reward', 'reward_sum'):
      _, ranked = filters.group_scores(metric, group, np.ones(len(group), bool), scores=scores)
      assert len(set(ranked.tolist())) == 1, (metric, size)


def test_min_p_keeps_a_group_whose_score_is_the_bound_up_to_rounding():
  min_p = FILTER | {'strategy': 'min_p', 'value': 0.3}
  third = np.float64(np.float32(0.3))  # a float32 score, below 0.3 * 1.0 in float64 or above it
  for score in (third, 0.3, np.nextafter(0.3, 0), np.nextafter(0.3, 1)):
    assert filters.select_groups(np.array([1.0, score]), **min_p).tolist() == [True, True]
    below = filters.select_groups(np.array([1.0, score]), **min_p | {'kind': 'smallest'})
    assert below.tolist() == [False, True]
  assert filters.select_groups(np.array([1.0, 0.2999]), **min_p).tolist() == [True, False]


@pytest.mark.slow
def test_steps_from_one_state_with_equal_returns_have_no_advantage_when_divided_by_deviations():
  # Before the last turn, which earns 0.7, one row earned much and the other little.
  reward = np.array([[0.3, 1e4, 0.7], [0.1, 0.2, 0.7]], np.float32)
  turn, mask = np.array([[0, 1, 2]] * 2, np.int32), np.ones((2, 3), bool)
  anchors = np.array([[0, 1, 9], [2, 3, 9]], np.int32)
  options = {'step_gamma': 0.95, 'step_weight': 1.0, 'scale_by_std': True}
  found = np.asarray(group_relative.gigpo(reward, np.zeros(2, np.int32), mask, turn, anchors, **options))
  of_episode = found[:, :1]  # the first two turns have no peer, so theirs is the episode's part
  np.testing.assert_array_equal(found[:, 2], of_episode[:, 0])


def test_real_differences_are_not_taken_for_rounding():
  scores = np.array([10.5, 10.4], np.float32)
  assert not rounding.is_constant(10.4, 10.5)
  assert not rounding.is_constant(0.0, 1e-6)
  mask = np.ones((2, 1), bool)
  turn, group = np.zeros((2, 1), np.int32), np.zeros(2, np.int32)
  found = compute_advantages(advantage_settings('grpo'), AdvantageInputs(scores[:, None], mask, turn, group))
  np.testing.assert_allclose(np.asarray(found.advantages)[:, 0], [np.sqrt(0.5), -np.sqrt(0.5)], rtol=1e-4)


@settings(max_examples=40, deadline=None)
@given(
  actions=st.lists(st.sampled_from([-0.1, 0.0, 0.9, -1.1, 1.0, 10.9, 0.1]), min_size=1, max_size=6),
  seed=st.integers(0, 1000),
)
@pytest.mark.slow
def test_any_cut_of_any_actions_gives_no_advantage(actions, seed):
  rng = np.random.default_rng(seed)
  cuts = []
  for _ in range(4):
    ends = np.flatnonzero(rng.random(len(actions) - 1) < 0.5) + 1
    cuts.append(tuple(np.diff([0, *ends, len(actions)]).tolist()))
  reward, mask, turn = rows(cuts, actions)
  group = np.zeros(4, np.int32)
  for name in ('grpo', 'rloo', 'brpo'):
    found = compute_advantages(advantage_settings(name), AdvantageInputs(reward, mask, turn, group))
    np.testing.assert_array_equal(found.advantages, 0)
  scores = np.asarray(episode_scores(reward, mask))
  assert filters.group_scores('reward_std', group, np.ones(4, bool), scores=scores)[1].tolist() == [0.0]
