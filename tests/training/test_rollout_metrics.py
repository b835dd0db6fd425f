"""Metrics of a rollout against loops over its episodes and rows, with several rows an episode and a failed one."""

from __future__ import annotations

import dataclasses
import itertools

import numpy as np
import pytest

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.rollout import Rollout
from ragen_jax.agent.trajectory import Timeline
from ragen_jax.training.rollout_metrics import mean_max_min, over_tags, policy_lag, rollout_metrics
from tests.support import learning

_GROUP = 3
# Rewards of the turns of each episode; groups of three. The second group's scores are equal, in different turns.
_REWARDS = [[0.5, 0.25], [1.0], [-0.5, 0.0, 0.0], [1.0, 1.0], [2.0], [0.5, 1.5], [0.0], [3.0, 1.0], [9.0]]
_FAILED = 8  # its environment failed behind its turn


def _rollout(rewards=_REWARDS, failed=_FAILED) -> Rollout:
  """Each turn of an episode is a row of its own, of random length, numbers and replies; then empty rows."""
  rng, count = np.random.default_rng(0), len(rewards)
  timeline, episodes = Timeline(count, 40), []
  for row, own in enumerate(rewards):
    turns = []
    for i, reward in enumerate(own):
      timeline.begin_row(row)
      timeline.append_context(row, tuple(range(int(rng.integers(2, 9)))), i)
      n = int(rng.integers(1, 7))
      timeline.append_reply(row, range(n), i, entropies=rng.uniform(size=n), logprobs=-rng.uniform(size=n))
      timeline.reward_last_token(row, reward)
      reply = ('left', 'right', 'up')[rng.integers(3)]
      turns.append(Turn(f'board {i}', reply, ['Up'], (reward,), 0.0, True, 1, tokens=n))
    status = Status.ENV_ERROR if row == failed else Status.SUCCESS if own and own[-1] >= 1 else Status.OUT_OF_TURNS
    episodes.append(Episode('Own', row // _GROUP, row // _GROUP, turns, status=status))
  trajectory = timeline.trajectory(
    group=np.arange(count) // _GROUP, episode=np.arange(count), env=np.zeros(count), pad_id=0, policy_version=0,
    status=[e.status for e in episodes],
  )  # fmt: skip
  scores = np.asarray([e.score for e in episodes], np.float32)
  anchors = np.zeros((len(trajectory.length), 3), np.int32)
  return Rollout(trajectory, episodes, anchors, scores, int(trajectory.loss_mask.sum()), 0)


def test_metrics_are_those_of_plain_loops():
  rollout = _rollout()
  t, metrics = rollout.trajectory, rollout_metrics(rollout, _GROUP)
  rows = [row for row in range(len(t.length)) if t.loss_mask[row].any()]
  assert len(rows) == 15 and len(t.length) > len(rows)  # empty ones too
  assert metrics['perf/total_num_tokens'] == sum(int(n) for n in t.length) and 'perf/used_row_steps' not in metrics
  steps = int(t.loss_mask.sum()) * 4
  assert rollout_metrics(dataclasses.replace(rollout, row_steps=steps), _GROUP)['perf/used_row_steps'] == 0.25
  scores = [sum(own) for own in _REWARDS]
  valid = [[s for e, s in enumerate(scores) if e // _GROUP == g and e != _FAILED] for g in range(3)]
  stds = [np.std(own, ddof=1) for own in valid]
  assert stds[1] == 0 < min(stds[0], stds[2])
  sampled = [sum(turn.tokens for turn in e.turns) for e in rollout.episodes]
  lengths = [t.length[row] for row in rows if t.episode[row] != _FAILED]
  pairs = [
    turn.reply == other.reply
    for a, b in itertools.permutations(rollout.episodes, 2)
    if a.group != b.group
    for turn in a.turns
    for other in b.turns
  ]
  expected = {
    'rollout/in_group_reward_std': np.mean(stds),
    'rollout/in_group_reward_mean': np.mean([np.mean(own) for own in valid]),
    'rollout/in_group_reward_max': np.mean([np.max(own) for own in valid]),
    'rollout/zero_std_groups': 1 / 3,
    'critic/score/mean': np.mean(scores), 'critic/score/max': 9.0, 'critic/score/min': -0.5,
    'response_length/mean': np.mean(sampled), 'response_length/max': max(sampled),
    'response_length/min': min(sampled), 'rollout/length/mean': np.mean(lengths), 'rollout/length/max': max(lengths),
    'rollout/length/min': min(lengths), 'rollout/entropy': t.entropies[t.loss_mask].mean(),
    'rollout/repeated_replies': np.mean(pairs), 'train/batch_size': 9,
    'train/Own/success': np.mean([e.success for e in rollout.episodes]), 'train/Own/env_errors': 1 / 9,
    'train/Own/num_turns': 15 / 9,
  }  # fmt: skip
  assert {name: metrics[name] for name in expected} == pytest.approx(expected, rel=1e-6)


def test_a_rollout_whose_environments_all_failed_has_no_lengths():
  rollout = _rollout([[], [], []], failed=-1)
  for episode in rollout.episodes:
    episode.status = Status.ENV_ERROR
  rollout.trajectory.status[:] = Status.ENV_ERROR
  metrics = rollout_metrics(rollout, _GROUP)
  assert metrics['train/Own/env_errors'] == 1 and np.isnan(metrics['rollout/in_group_reward_std'])
  assert metrics['rollout/entropy'] == metrics['rollout/repeated_replies'] == metrics['rollout/zero_std_groups'] == 0
  assert not any(name.startswith('rollout/length/') for name in metrics) and metrics['response_length/max'] == 0


def test_mean_max_and_min_of_nothing_are_left_out():
  assert mean_max_min('x', np.asarray([3.0, -1.0, 4.0])) == {'x/mean': 2.0, 'x/max': 4.0, 'x/min': -1.0}
  assert mean_max_min('x', np.zeros(0)) == {}


def test_the_lag_is_that_of_the_kept_rows(policy, played):
  rollout, _ = played
  trainer, _ = learning.make_trainer(policy)
  selection = trainer.select(rollout)
  version = np.repeat(np.arange(8, dtype=np.int32), 4)  # of the rows of each group
  t = rollout.trajectory
  versions = np.where(np.arange(t.tokens.shape[1]) % 2, version[:, None] + 1, version[:, None])  # the older one counts
  last = np.where(t.loss_mask, np.arange(t.tokens.shape[1]), -1).max(axis=1)
  versions[np.arange(32), last] = version
  rollout = dataclasses.replace(rollout, trajectory=t.replace(versions=versions))
  keep = np.isin(version, (2, 3, 7)) & (np.arange(32) != 8)  # three rows of version 2, four of 3 and of 7
  found = policy_lag(dataclasses.replace(selection, rollout=rollout, keep=keep), 7)
  assert found == {'rollout/policy_lag_mean': (3 * 5 + 4 * 4) / 11, 'rollout/policy_lag_max': 5.0}
  assert policy_lag(dataclasses.replace(selection, keep=np.zeros(32, bool)), 7) == {}


@pytest.mark.slow
def test_an_update_states_how_old_its_rows_are(policy, played):
  rollout, _ = played
  trainer, state = learning.make_trainer(policy, optimizer__mini_batch_size=32)
  selection = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selection)
  for iteration, lag in ((0, 0.0), (1, 1.0)):  # as with train.online_k, which learns from one rollout twice
    assert state.iteration == iteration
    state, metrics = trainer.update(state, batch, selection)
    assert metrics['rollout/policy_lag_mean'] == metrics['rollout/policy_lag_max'] == lag


def test_metrics_of_replies_are_averaged_over_the_tags_that_have_them():
  metrics = {
    'train/A/format_correct': 0.5, 'train/B/format_correct': 1.0, 'train/B/observation_score': 0.25,
    'val-env/B/observation_score': 9.0, 'train/A/success': 1.0, 'critic/score/mean': 0.0,
  }  # fmt: skip
  assert over_tags(metrics, 'train') == {'train/format_correct': 0.75, 'train/observation_score': 0.25}
  assert over_tags({'critic/score/mean': 0.0}, 'train') == {}
