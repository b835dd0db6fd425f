"""Which groups an update learns from: filters, refills, soft weights; each against what it should come to by hand."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax.agent.episode import Status
from ragen_jax.agent.finite import NotFinite
from ragen_jax.training.selection import draw_groups, has_replies, with_replayed, without_groups
from tests.support import learning


def _groups(selection):
  return sorted(np.unique(selection.rollout.trajectory.group[selection.keep]).tolist())


def test_without_a_filter_all_rows_are_kept(policy, played):
  selection = learning.make_trainer(policy)[0].select(played[0])
  assert selection.keep.all() and selection.groups == 8 and (selection.scale == 1).all()


def test_starpo_s_keeps_the_groups_whose_rewards_vary_most(policy, played):
  rollout, std = played
  trainer, _ = learning.make_trainer(policy, filter__strategy='top_k', filter__value=0.25, filter__loss_scaling='sqrt')
  selection = trainer.select(rollout)
  assert _groups(selection) == sorted(np.argsort(-std, kind='stable')[:2].tolist())
  assert selection.keep.sum() == 2 * 4
  np.testing.assert_allclose(selection.scale, 0.25**0.5)


@pytest.mark.parametrize('metric', ['entropy', 'length'])
def test_groups_are_ranked_by_their_episodes_entropies_or_lengths(policy, played, metric):
  rollout, _ = played
  t = rollout.trajectory
  tokens = t.loss_mask.sum(axis=1)
  of_episodes = {'entropy': np.where(t.loss_mask, t.entropies, 0).sum(axis=1) / tokens, 'length': tokens}[metric]
  ranked = np.argsort([-of_episodes[t.group == g].mean() for g in range(8)], kind='stable')
  trainer, _ = learning.make_trainer(policy, filter__metric=metric, filter__strategy='top_k', filter__value=0.5)
  assert _groups(trainer.select(rollout)) == sorted(ranked[:4].tolist())


def test_soft_reweighting_drops_nothing_and_weighs_by_deviation(policy, played):
  rollout, std = played
  trainer, state = learning.make_trainer(policy, filter__soft=True)
  selection = trainer.select(rollout)
  assert selection.keep.all()
  np.testing.assert_allclose(selection.scale, (std / std.max())[rollout.trajectory.group], rtol=1e-5)
  both, _ = learning.make_trainer(
    policy, filter__soft=True, filter__strategy='top_k', filter__value=0.5, filter__loss_scaling='linear'
  )
  np.testing.assert_allclose(both.select(rollout).scale, 0.5 * selection.scale, rtol=1e-5)
  plain, _ = trainer.estimate(state, dataclasses.replace(selection, scale=np.ones_like(selection.scale)))
  scaled, _ = trainer.estimate(state, selection)
  np.testing.assert_allclose(scaled.advantages, plain.advantages * selection.scale[:, None], rtol=1e-5)


def test_nothing_is_learnt_from_a_rollout_with_numbers_that_are_not_finite(policy, played):
  trainer, _ = learning.make_trainer(policy, filter__soft=True, filter__strategy='top_k', filter__value=0.5)
  selection = trainer.select(played[0])
  found = {'sampled_logprobs': NotFinite(1, 'one')}
  none = without_groups(selection, found)
  assert not none.keep.any() and none.keep.shape == selection.keep.shape and none.groups == 0
  assert (none.scale == 1).all() and (selection.scale != 1).any()
  assert none.rollout is selection.rollout and none.metrics == {**selection.metrics, **found}


def test_no_more_groups_are_drawn_than_are_wanted(policy, played):
  selection = learning.make_trainer(policy)[0].select(played[0])
  drawn = draw_groups(selection, 3, np.random.default_rng(0))
  assert drawn.groups == 3 == len(_groups(drawn)) and drawn.keep.sum() == 12
  assert _groups(drawn) == _groups(draw_groups(selection, 3, np.random.default_rng(0)))
  assert draw_groups(selection, 8, np.random.default_rng(0)) is selection


def test_replayed_rows_come_behind_the_fresh_ones(policy, played):
  rollout, _ = played
  selection = learning.make_trainer(policy)[0].select(rollout)
  scale = np.full(32, 0.5, np.float32)
  longer = with_replayed(selection, [(rollout, scale)], multiple=24)
  assert longer.fresh == 32 and len(longer.keep) == 72 and longer.keep.sum() == 64 and not longer.keep[64:].any()
  np.testing.assert_array_equal(longer.scale, np.concatenate([selection.scale, scale, np.zeros(8)]))
  assert longer.metrics['rollout/replayed_groups'] == 8
  assert sorted(np.unique(longer.rollout.trajectory.group[:64])) == list(range(16))
  nothing = with_replayed(selection, [], multiple=24)
  assert nothing.rollout is rollout and nothing.metrics['rollout/replayed_groups'] == 0


def test_rows_of_failed_environments_are_not_learnt_from(policy, played):
  rollout, _ = played
  t = rollout.trajectory
  assert has_replies(t).all()
  failed = t.replace(
    status=np.where(np.arange(32) < 3, Status.ENV_ERROR, t.status),
    loss_mask=t.loss_mask & (np.arange(32) != 9)[:, None],
  )
  assert np.flatnonzero(~has_replies(failed)).tolist() == [0, 1, 2, 9]
  # Of the first group one member is left: an estimator that compares members learns nothing from it.
  for estimator, kept in (('gae', 28), ('grpo', 27)):
    trainer, _ = learning.make_trainer(policy, algorithm__adv_estimator=estimator)
    assert trainer.select(dataclasses.replace(rollout, trajectory=failed)).keep.sum() == kept


def test_fresh_groups_are_played_until_enough_are_kept(policy):
  """DAPO's dynamic sampling: only groups that vary, and as many as without a filter."""
  trainer, state = learning.make_trainer(policy, filter__include_zero=False, filter__max_rollouts=6)
  rollout, selection = trainer.collect(state)
  t = rollout.trajectory
  count = int(selection.metrics['rollout/rollouts'])
  assert 1 < count <= 6 and len(t.group) == count * 32
  assert selection.groups == 8 and selection.keep.sum() == 32
  for g in np.unique(t.group[selection.keep]):
    assert np.ptp(rollout.scores[t.group == g]) > 0
  # Fresh levels, and rows that still belong to their episodes.
  seeds = [e.level_seed for e in rollout.episodes]
  assert len(set(seeds)) == count * 8 and sorted(np.unique(t.group)) == list(range(count * 8))
  assert t.episode.tolist() == list(range(count * 32))
  np.testing.assert_allclose(np.where(t.loss_mask, t.rewards, 0).sum(axis=1), rollout.scores, atol=1e-5)
  assert all(e.group == g for e, g in zip(rollout.episodes, t.group, strict=True))


@pytest.mark.parametrize(('fixed', 'steps'), [(True, 4), (False, 1)])
@pytest.mark.slow
def test_a_filter_need_not_mean_fewer_steps(policy, played, fixed, steps):
  trainer, state = learning.make_trainer(
    policy, filter__strategy='top_k', filter__value=0.25, filter__fixed_steps=fixed
  )
  selection = trainer.select(played[0])
  batch, _ = trainer.estimate(state, selection)
  before = jax.device_get(state.trained)
  state, metrics = trainer.update(state, batch, selection)
  assert metrics['train/num_mini_batches'] == steps
  moved = [(a != b).any() for a, b in zip(*map(jax.tree.leaves, (before, jax.device_get(state.trained))), strict=True)]
  assert np.mean(moved) > 0.9
