"""Scalar estimators against loops over dictionaries of episodes."""

from __future__ import annotations

import itertools
import math
from types import SimpleNamespace

import jax
import numpy as np
import pytest

from configs import bandit_grpo, default
from ragen_jax.algorithms import group_relative as module

OPTIONS = ('scale_by_std', 'length_weight')
grpo = jax.jit(module.grpo, static_argnames=OPTIONS)


@jax.jit
def every_grpo(*arrays, **options):
  """One program for both options of each switch."""
  values = itertools.product((True, False), repeat=2)
  return {x: module.grpo(*arrays, **dict(zip(OPTIONS, x, strict=True)), **options) for x in values}


rloo = jax.jit(module.rloo)
brpo = jax.jit(module.brpo)
gigpo = jax.jit(module.gigpo, static_argnames='scale_by_std')
both_gigpo = jax.jit(lambda *x, **o: [module.gigpo(*x, **o, scale_by_std=std) for std in (False, True)])
episode_scores = jax.jit(module.episode_scores)


def scores_of(b):
  return np.array([b.rewards[row][b.loss_mask[row]].astype(float).sum() for row in range(len(b.valid))])


def members(b, row):
  return [other for other in np.flatnonzero(b.valid) if b.group[other] == b.group[row]]


def spread(b, of_rows):
  return np.where(b.loss_mask, np.array([of_rows.get(row, 0.0) for row in range(len(b.valid))])[:, None], 0.0)


def several_rows(b):
  """The same episodes with each turn on its own row; `source` says from which."""
  pieces = [(row, k) for row in np.flatnonzero(b.valid) for k in range(b.turn[row].max() + 1)]
  b.rng.shuffle(pieces)
  pieces += [(b.padding, 0)] * (33 - len(pieces))
  source = np.array([row for row, _ in pieces])
  mask = np.stack([b.loss_mask[row] & (b.turn[row] == k) for row, k in pieces])
  return SimpleNamespace(
    source=source,
    loss_mask=mask,
    turn=b.turn[source],
    rewards=b.rewards[source],
    group=b.group[source],
    episode=(50 - 3 * source).astype(np.int32),
  )


def test_episode_scores(batch):
  b = batch(0)
  np.testing.assert_allclose(episode_scores(b.rewards, b.loss_mask), scores_of(b), atol=1e-6)
  parts = several_rows(b)
  got = episode_scores(parts.rewards, parts.loss_mask, parts.episode)
  np.testing.assert_allclose(got, scores_of(b)[parts.source], atol=1e-6)


@pytest.mark.parametrize('scale_by_std', [True, False])
@pytest.mark.parametrize('length_weight', [True, False])
def test_grpo(batch, scale_by_std, length_weight):
  singles = 0
  for seed in range(4):
    b = batch(seed)
    b.group[(b.padding + 1) % 8] = 12345  # a group of one
    scores = scores_of(b)
    lengths = b.loss_mask.sum(-1)
    mean_length = lengths[b.valid].mean()
    expected = {}
    for row in np.flatnonzero(b.valid):
      of = scores[members(b, row)]
      singles += len(of) == 1
      mean, std = (of.mean(), of.std(ddof=1)) if len(of) > 1 else (0.0, 1.0)
      expected[row] = (scores[row] - mean) / (std + 1e-6) if scale_by_std else scores[row] - mean
      if length_weight:
        expected[row] /= lengths[row] / mean_length
    got = every_grpo(scores.astype(np.float32), b.group, b.loss_mask)[scale_by_std, length_weight]
    np.testing.assert_allclose(got, spread(b, expected), atol=2e-5)

    parts = several_rows(b)
    of_parts = scores[parts.source].astype(np.float32), parts.group, parts.loss_mask
    rows = every_grpo(*of_parts, episode=parts.episode)[scale_by_std, length_weight]
    of_rows = np.array([expected.get(row, 0.0) for row in parts.source])
    np.testing.assert_allclose(rows, np.where(parts.loss_mask, of_rows[:, None], 0.0), atol=2e-5)
  assert singles >= 4


@pytest.mark.parametrize('score', [0.1, -0.3, 10.9, 1e-7])
def test_equal_scores_give_exactly_zero(score):
  mask = np.ones((16, 2), bool)
  scores = np.full(16, score, np.float32)
  assert not np.asarray(grpo(scores, np.zeros(16, np.int32), mask, scale_by_std=True, length_weight=False)).any()
  assert not np.asarray(rloo(scores, np.zeros(16, np.int32), mask)).any()
  assert not np.asarray(brpo(scores, mask)).any()


def test_rloo(batch):
  for seed in range(3):
    b = batch(seed)
    b.group[(b.padding + 1) % 8] = 12345
    scores = scores_of(b)
    expected = {}
    for row in np.flatnonzero(b.valid):
      others = [other for other in members(b, row) if other != row]
      expected[row] = scores[row] - (scores[others].mean() if others else 0.0)
    got = rloo(scores.astype(np.float32), b.group, b.loss_mask)
    np.testing.assert_allclose(got, spread(b, expected), atol=2e-6)


def test_brpo_and_arpo(batch):
  b = batch(2)
  scores = scores_of(b)
  of = scores[b.valid]
  expected = {row: (scores[row] - of.mean()) / (of.std(ddof=1) + 1e-6) for row in np.flatnonzero(b.valid)}
  np.testing.assert_allclose(brpo(scores.astype(np.float32), b.loss_mask), spread(b, expected), atol=1e-5)
  raw = {row: scores[row] for row in np.flatnonzero(b.valid)}
  np.testing.assert_allclose(module.arpo(scores.astype(np.float32), b.loss_mask), spread(b, raw), atol=1e-6)


# --- GiGPO ------------------------------------------------------------------------------------------------------------


def loop_gigpo(b, anchors, gamma, weight, scale_by_std):
  scores = scores_of(b)
  steps = {}  # (row, turn): return from that turn on
  for row in np.flatnonzero(b.valid):
    following = 0.0
    for k in reversed(range(b.turn[row].max() + 1)):
      reward = b.rewards[row][b.loss_mask[row] & (b.turn[row] == k)].astype(float).sum()
      steps[row, k] = following = reward + gamma * following
  out = np.zeros(b.loss_mask.shape)
  shared = 0
  for (row, k), value in steps.items():
    of = scores[members(b, row)]
    mean, std = (of.mean(), of.std(ddof=1)) if len(of) > 1 else (0.0, 1.0)
    advantage = (scores[row] - mean) / (std + 1e-6 if scale_by_std else 1.0)
    peers = [v for (r, j), v in steps.items() if b.group[r] == b.group[row] and anchors[r, j] == anchors[row, k] >= 0]
    if len(peers) > 1:
      shared += 1
      advantage += weight * (value - np.mean(peers)) / (np.std(peers, ddof=1) + 1e-6 if scale_by_std else 1.0)
    out[row, b.loss_mask[row] & (b.turn[row] == k)] = advantage
  return out, shared


@pytest.mark.parametrize('scale_by_std', [False, True])
def test_gigpo(batch, scale_by_std):
  total = 0
  for seed in range(4):
    b = batch(seed)
    anchors = b.rng.integers(0, 3, size=(8, 4)).astype(np.int32)
    anchors[np.arange(4)[None] > b.turn.max(-1)[:, None]] = -1
    anchors[b.rng.random((8, 4)) < 0.2] = -1  # a turn without an anchor has no step part
    # rewards on tokens inside the turn count with the turn
    inside = b.loss_mask & (b.rng.random(b.loss_mask.shape) < 0.3)
    b.rewards = np.where(inside, b.rewards - 0.2, b.rewards).astype(np.float32)
    expected, shared = loop_gigpo(b, anchors, 0.9, 0.5, scale_by_std)
    total += shared
    options = {'step_gamma': 0.9, 'step_weight': 0.5}
    got = both_gigpo(b.rewards, b.group, b.loss_mask, b.turn, anchors, **options)[scale_by_std]
    np.testing.assert_allclose(got, expected, atol=5e-5)

    parts = several_rows(b)
    rows = both_gigpo(
      parts.rewards, parts.group, parts.loss_mask, parts.turn, anchors[parts.source], episode=parts.episode, **options
    )[scale_by_std]
    together = np.zeros_like(expected)
    np.add.at(together, parts.source, np.asarray(rows))
    np.testing.assert_allclose(together, expected, atol=5e-5)
  assert total > 10


def test_gigpo_by_hand():
  """Two episodes share their first state, and one of them comes back to it: a set of three steps."""
  mask = np.ones((2, 2), bool)
  turn = np.array([[0, 1], [0, 1]])
  anchors = np.array([[4, 4], [4, 9]], np.int32)
  rewards = np.array([[0.0, 1.0], [0.0, 0.0]], np.float32)
  options = {'step_gamma': 0.5, 'step_weight': 1.0, 'scale_by_std': False}
  got = gigpo(rewards, np.zeros(2, np.int32), mask, turn, anchors, **options)
  # returns from the steps on: [[.5, 1], [0, 0]]; the mean over the three at state 4 is .5; state 9 has no peer
  np.testing.assert_allclose(got, [[0.5 + 0.0, 0.5 + 0.5], [-0.5 - 0.5, -0.5 + 0.0]], atol=1e-6)
  # Tokens of no turn, or of one without an anchor, have the part of their episode only.
  wide, more = np.ones((2, 4), bool), np.pad(turn, ((0, 0), (1, 1)), constant_values=((0, 0), (-1, 2)))
  sampled, rewards = (np.pad(x, ((0, 0), (1, 1))) for x in (mask, rewards))
  wider = gigpo(rewards, np.zeros(2, np.int32), wide, more, anchors, loss_mask=sampled, **options)
  np.testing.assert_allclose(wider, np.concatenate([[[0.5], [-0.5]], got, [[0.5], [-0.5]]], axis=1), atol=1e-6)


def test_statistics_of_as_many_steps_as_long_games_make():
  """A rollout of 2048 in rows of one turn each has 200,000 pairs of a row and a turn."""
  rng = np.random.default_rng(0)
  n = 200_000
  group, anchor = rng.integers(0, 64, n), rng.integers(-1, 1000, n)
  x = rng.normal(size=n).astype(np.float32)
  weights = (rng.random(n) < 0.7).astype(np.float32)
  mean, std, count = jax.jit(module.group_statistics)(x, (group, anchor), weights)
  key = group * 2000 + anchor + 1
  counts = np.bincount(key, weights)[key]
  means = np.bincount(key, weights * x)[key] / np.maximum(counts, 1)
  deviations = weights * (x - means) ** 2
  np.testing.assert_array_equal(count, counts)
  np.testing.assert_allclose(mean, means, atol=1e-5)
  np.testing.assert_allclose(std, np.sqrt(np.bincount(key, deviations)[key] / np.maximum(counts - 1, 1)), atol=1e-5)


def advantage_of_the_safe_arm(size, safe, *, scale_by_std):
  """The exact mean advantage of an episode that pulls the Bandit's safe arm, in a group where `safe` of them do."""
  bandit = default.get_config().envs.Bandit
  risky, p = size - safe, bandit.high_probability
  payments = range(risky + 1)  # one group for each number of payments
  chance = np.asarray([math.comb(risky, n) * p**n * (1 - p) ** (risky - n) for n in payments])
  scores = [[bandit.low_reward] * safe + [bandit.high_reward] * n + [0.0] * (risky - n) for n in payments]
  group = np.repeat(np.arange(len(chance)), size)
  found = grpo(
    np.asarray(scores, np.float32).ravel(), group, np.ones((len(group), 1), bool), scale_by_std=scale_by_std,
    length_weight=False,
  )  # fmt: skip
  return float(chance @ np.asarray(found).reshape(len(chance), size)[:, 0])


@pytest.mark.parametrize('preset', ['', 'qwen2.5-0.5b'])
def test_groups_of_the_bandit_are_so_large_that_grpo_favours_the_better_arm(preset):
  size = bandit_grpo.get_config(preset).train.group_size
  assert all(advantage_of_the_safe_arm(size, safe, scale_by_std=True) < -0.1 for safe in range(1, size // 2 + 1))


def test_in_groups_of_eight_grpo_favours_the_safe_arm_of_the_bandit_and_dr_grpo_does_not():
  for safe in range(1, 8):
    assert advantage_of_the_safe_arm(8, safe, scale_by_std=True) > 0
    assert advantage_of_the_safe_arm(8, safe, scale_by_std=False) < -0.015


@pytest.mark.parametrize(
  ('size', 'quarter', 'half', 'most'),
  [(4, 0.35, 0.27, None), (8, 0.01, 0.07, 0.18), (16, -0.22, -0.12, 0.10), (32, -0.28, -0.21, 0.01)],
)
def test_the_means_of_the_table_in_the_docs(size, quarter, half, most):
  for safe, mean in ((size // 4, quarter), (size // 2, half), (size - size // 8, most)):
    if mean is not None:
      assert advantage_of_the_safe_arm(size, safe, scale_by_std=True) == pytest.approx(mean, abs=0.006)
