"""Credit, normalisation of scores and the KL penalty against loops in NumPy."""

from __future__ import annotations

import itertools

import jax
import numpy as np
import pytest

from ragen_jax.algorithms import rewards as module
from tests.support.estimators import REWARD

OPTIONS = ('credit', 'grouping', 'method')
_shape_rewards = jax.jit(module.shape_rewards, static_argnames=OPTIONS)
normalize_scores = jax.jit(module.normalize_scores, static_argnames=OPTIONS[1:])
kl_in_reward = jax.jit(module.kl_in_reward)


def shape_rewards(*arrays, **options):
  return _shape_rewards(*arrays, **REWARD | options)


def scores_of(b):
  return np.array([b.rewards[row][b.loss_mask[row]].astype(float).sum() for row in range(len(b.valid))])


def test_trajectory_credit(batch):
  b = batch(1)
  got, scores = map(np.asarray, shape_rewards(b.rewards, b.loss_mask, b.turn, b.group, b.env))
  np.testing.assert_allclose(scores, scores_of(b), atol=1e-6)
  for row in range(8):
    columns = np.flatnonzero(b.loss_mask[row])
    expected = np.zeros(32)
    if len(columns):
      expected[columns[-1]] = scores_of(b)[row]
    np.testing.assert_allclose(got[row], expected, atol=1e-6)


def test_trajectory_credit_over_rows():
  """The sum goes to the last token of the row with the latest turn, wherever that row is."""
  mask = np.array([[1, 1, 0], [0, 1, 1], [0, 0, 0], [1, 1, 0]], bool)
  turn = np.array([[2, 2, -1], [0, 0, 0], [5, 5, 5], [1, 1, -1]])
  rewards = np.array([[0, 3, 0], [0, 0, 1], [9, 9, 9], [0, 5, 0]], np.float32)
  zeros = np.zeros(4, np.int32)
  got, scores = shape_rewards(rewards, mask, turn, zeros, zeros, episode=np.array([8, 8, 8, 4]))
  np.testing.assert_array_equal(scores, [4, 4, 0, 5])
  np.testing.assert_array_equal(got, [[0, 4, 0], [0, 0, 0], [0, 0, 0], [0, 5, 0]])


def loop_normalize(x, method):
  if method == 'identity':
    return x
  if len(x) == 1:
    return np.zeros(1)
  centred = x - x.mean()
  if method == 'mean':
    return centred
  std = x.std(ddof=1)
  normal = centred / (std + 1e-6) if std >= 1e-6 else np.zeros_like(x)
  return np.clip(normal, -1, 3) if method == 'asym_clip' else normal


@jax.jit
def _by_every_method(*arrays):
  """One program for all ways to group and to normalise."""
  ways = itertools.product(module.GROUPINGS, module.METHODS)
  return {f'{g} {m}': module.shape_rewards(*arrays, **REWARD | {'grouping': g, 'method': m}) for g, m in ways}


@pytest.mark.parametrize('grouping', module.GROUPINGS)
@pytest.mark.parametrize('method', module.METHODS)
def test_normalization(batch, grouping, method):
  for seed in range(3):
    b = batch(seed)
    b.rewards *= 3.0
    scores = scores_of(b)
    keys = {'state': b.group, 'inductive': b.env, 'batch': np.zeros(8)}[grouping]
    expected = np.zeros(8)
    for key in np.unique(keys):
      rows = np.flatnonzero((keys == key) & b.valid)
      if len(rows):
        expected[rows] = loop_normalize(scores[rows], method)
    got, normal = _by_every_method(b.rewards, b.loss_mask, b.turn, b.group, b.env)[f'{grouping} {method}']
    np.testing.assert_allclose(normal, expected, atol=1e-5)
    np.testing.assert_allclose(np.asarray(got).sum(-1), expected, atol=1e-5)
    assert ((np.asarray(got) != 0) <= b.ends).all()


def test_normalization_of_equal_scores_is_zero():
  mask = np.ones((4, 1), bool)
  group = np.zeros(4, np.int32)
  for method in ('mean', 'mean_std', 'asym_clip'):
    got = normalize_scores(np.full(4, 0.1, np.float32), mask, group, group, grouping='state', method=method)
    assert not np.asarray(got).any()


def test_scores_that_hardly_differ_are_not_blown_up():
  mask = np.ones((4, 1), bool)
  group = np.zeros(4, np.int32)
  scores = np.array([0, 0, 0, 1e-6], np.float32)  # a deviation of 5e-7
  for method in ('mean_std', 'asym_clip'):
    assert not np.asarray(normalize_scores(scores, mask, group, group, grouping='state', method=method)).any()


def test_asym_clip_clips():
  scores = np.array([0] * 15 + [1], np.float32)
  group = np.zeros(16, np.int32)
  options = {'grouping': 'state', 'method': 'asym_clip'}
  got = normalize_scores(scores, np.ones((16, 1), bool), group, group, **options)
  assert float(got[-1]) == 3.0
  got = normalize_scores(-scores, np.ones((16, 1), bool), group, group, **options)
  assert float(got[-1]) == -1.0


def test_an_episode_counts_once_however_many_rows_it_has():
  mask = np.ones((4, 1), bool)
  turn = np.array([[0], [1], [2], [0]])
  rewards = np.array([[1.0], [0.0], [1.0], [0.0]], np.float32)  # episodes of score 2 and 0
  zeros = np.zeros(4, np.int32)
  got, normal = shape_rewards(rewards, mask, turn, zeros, zeros, method='mean', episode=np.array([5, 5, 5, 6]))
  np.testing.assert_allclose(normal, [1, 1, 1, -1])
  np.testing.assert_allclose(got, [[0], [0], [1], [-1]])


def test_turn_credit_leaves_rewards_where_they_are(batch):
  b = batch(0)
  got, scores = shape_rewards(b.rewards, b.loss_mask, b.turn, b.group, b.env, credit='turn')
  np.testing.assert_array_equal(got, np.where(b.loss_mask, b.rewards, 0.0))
  np.testing.assert_allclose(scores, scores_of(b), atol=1e-6)


@pytest.mark.parametrize('credit', module.CREDITS)
def test_scores_that_are_given_take_the_place_of_float32_sums(batch, credit):
  b = batch(0)
  given = np.arange(8, dtype=np.float32)
  got, scores = shape_rewards(b.rewards, b.loss_mask, b.turn, b.group, b.env, credit=credit, scores=given)
  np.testing.assert_array_equal(scores, np.where(b.loss_mask.any(-1), given, 0))
  if credit == 'trajectory':
    np.testing.assert_array_equal(np.asarray(got).sum(-1), scores)


def test_kl_in_reward(batch):
  b = batch(0)
  m, given = b.loss_mask, np.arange(8, dtype=np.float32)
  penalty = np.where(m, 0.1 * b.values, 0)
  got, scores = kl_in_reward(b.rewards, given, b.values, m, 0.1)
  np.testing.assert_allclose(got[m], b.rewards[m] - penalty[m], atol=1e-6)
  np.testing.assert_allclose(scores, given - penalty.sum(-1), atol=1e-5)
  # An episode of several rows pays for all of them.
  episode = np.arange(8) // 2
  _, scores = kl_in_reward(b.rewards, given, b.values, m, 0.1, episode=episode)
  expected = given - np.where(m.any(-1), np.bincount(episode, penalty.sum(-1))[episode], 0)
  np.testing.assert_allclose(scores, expected, atol=1e-5)


@pytest.mark.parametrize(
  ('options', 'field'),
  [
    ({'credit': 'token'}, 'credit'),
    ({'grouping': 'prompt'}, 'grouping'),
    ({'method': 'std'}, 'method'),
    ({'credit': 'turn', 'method': 'mean'}, 'method'),
  ],
)
def test_errors_name_the_field(batch, options, field):
  b = batch(0)
  with pytest.raises(ValueError, match=rf'reward\.{field} is '):
    module.shape_rewards(b.rewards, b.loss_mask, b.turn, b.group, b.env, **REWARD | options)
