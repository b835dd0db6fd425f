"""Advantages and returns of a selection: rewards, KL, importance weights, masks, bootstraps."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax import build
from ragen_jax.agent.episode import Status
from ragen_jax.training.rollout_metrics import policy_lag
from tests.support import learning
from tests.support.compilations import compiled
from tests.support.configs import small_config


def test_dropped_rows_do_not_touch_the_advantages_of_others(policy, played):
  """Whitening is over what is kept: the advantages are those of a rollout that never had the other rows."""
  rollout, _ = played
  trainer, state = learning.make_trainer(policy)
  selection = trainer.select(rollout)
  keep = rollout.trajectory.group < 5
  batch, _ = trainer.estimate(state, dataclasses.replace(selection, keep=keep))
  changed = rollout.trajectory.replace(rewards=np.where(keep[:, None], rollout.trajectory.rewards, 7.0))
  other = dataclasses.replace(rollout, trajectory=changed)
  again, _ = trainer.estimate(state, dataclasses.replace(selection, rollout=other, keep=keep))
  np.testing.assert_array_equal(batch.advantages, again.advantages)
  assert not batch.mask[~keep].any() and abs(float(batch.advantages[batch.mask].mean())) < 1e-5


def test_a_negative_lambda_is_another_one_and_0_is_a_lambda(policy):
  for lam, expected in ((-1.0, None), (0.0, 0.0), (0.5, 0.5)):
    for name in ('high_level_lam', 'critic_lam'):
      config = small_config({f'algorithm.{name}': lam})
      assert getattr(build.trainer_settings(config, policy).estimate.advantages, name) == expected


def test_the_longest_sample_of_an_episode_is_that_of_its_environment(policy):
  tags = {
    'train__tags': ('FrozenLake', 'Bandit'), 'agent__max_response_tokens': 32, 'envs__FrozenLake__max_turns': 5,
  }  # fmt: skip
  for own, most in ((0, 5 * 32), (8, 5 * 8), (4, 32)):  # the Bandit has one turn
    config = small_config(**tags, envs__FrozenLake__max_response_tokens=own)
    assert build.trainer_settings(config, policy).update.weights.loss_norm_length == most
  config = small_config(**tags, algorithm__loss_norm_length=7)
  assert build.trainer_settings(config, policy).update.weights.loss_norm_length == 7


_ALL_TOKENS = {
  'algorithm__mask_loss': False, 'algorithm__mask_advantages': False, 'algorithm__old_logprobs': 'trainer',
}  # fmt: skip


@pytest.mark.parametrize('fields', [{}, _ALL_TOKENS])
@pytest.mark.slow_cases('fields1')
def test_rollouts_of_another_width_compile_nothing(policy, played, fields):
  trainer, state = learning.make_trainer(policy, **fields)
  rollout, _ = played
  batch, _ = trainer.estimate(state, trainer.select(rollout))
  t = rollout.trajectory
  wider = {
    f.name: np.pad(x, ((0, 0), (0, 3)), constant_values=-1 if f.name == 'turn' else 0)
    for f in dataclasses.fields(t)
    if (x := getattr(t, f.name)) is not None and x.ndim == 2
  }
  rollout = dataclasses.replace(rollout, trajectory=t.replace(**wider))
  with compiled() as found:
    again, _ = trainer.estimate(state, trainer.select(rollout))
  assert found == []
  np.testing.assert_array_equal(batch.advantages, again.advantages)


def test_reward_normalisation_reaches_the_estimator_and_leaves_raw_scores(policy, played):
  rollout, _ = played
  trainer, state = learning.make_trainer(
    policy, algorithm__adv_estimator='arpo', reward__credit='trajectory', reward__method='mean_std',
    algorithm__whiten_advantages=False,
  )  # fmt: skip
  raw = rollout.scores.copy()
  batch, _ = trainer.estimate(state, trainer.select(rollout))
  expected = np.zeros_like(raw)
  for g in range(8):
    own = rollout.trajectory.group == g
    std = raw[own].std(ddof=1)
    expected[own] = (raw[own] - raw[own].mean()) / (std + 1e-6) if std > 1e-6 else 0
  first = [batch.advantages[b][batch.mask[b]][0] for b in range(len(raw))]
  np.testing.assert_allclose(first, expected, atol=1e-4)
  np.testing.assert_array_equal(rollout.scores, raw)


def _nudge(state, by=0.02):
  rng = np.random.default_rng(0)
  return state.replace(
    trained=jax.tree.map(lambda x: x + by * rng.normal(size=x.shape).astype(np.float32), state.trained)
  )


@pytest.mark.slow
def test_kl_to_the_first_weights_enters_loss_and_reward(policy):
  trainer, state = learning.make_trainer(
    policy, algorithm__kl_loss_coef=0.5, algorithm__kl_reward_coef=0.1, algorithm__kl_kind='k1',
    optimizer__mini_batch_size=32,
  )  # fmt: skip
  rollout, selection = trainer.collect(state)
  batch, metrics = trainer.estimate(state, selection)
  # The policy is the reference still.
  np.testing.assert_allclose(batch.ref_logprobs[batch.mask], batch.old_logprobs[batch.mask], atol=1e-4)
  assert abs(metrics['actor/reward_kl_penalty']) < 1e-5

  moved = _nudge(state)
  rollout, selection = trainer.collect(moved)
  batch, metrics = trainer.estimate(moved, selection)
  kl = batch.old_logprobs - batch.ref_logprobs
  assert metrics['actor/reward_kl_penalty'] == pytest.approx(kl[batch.mask].mean(), rel=1e-4)
  np.testing.assert_allclose(
    metrics['critic/rewards/mean'], np.mean(rollout.scores - 0.1 * np.where(batch.mask, kl, 0).sum(axis=1)), atol=1e-4
  )
  _, metrics = trainer.update(moved, batch, selection)
  assert metrics['actor/kl_loss'] == pytest.approx(kl[batch.mask].mean(), rel=1e-2)  # before the only step


@pytest.mark.slow
@pytest.mark.parametrize('credit', ['turn', 'trajectory'])
def test_kl_in_the_reward_lowers_the_scores_that_estimators_compare(policy, credit):
  trainer, state = learning.make_trainer(
    policy, algorithm__adv_estimator='arpo', algorithm__kl_reward_coef=0.1, algorithm__kl_kind='k1',
    reward__credit=credit,
  )  # fmt: skip
  moved = _nudge(state)
  rollout, selection = trainer.collect(moved)
  batch, _ = trainer.estimate(moved, selection)
  kl = np.where(batch.mask, batch.old_logprobs - batch.ref_logprobs, 0).sum(axis=1)
  assert np.abs(kl).max() > 0.1
  expected = np.where(batch.mask, (rollout.scores - 0.1 * kl)[:, None], 0)
  np.testing.assert_allclose(batch.advantages, expected, atol=1e-4)


def test_importance_weights_are_one_where_both_programs_agree_and_capped_where_not(policy):
  trainer, state = learning.make_trainer(policy, algorithm__old_logprobs='trainer', algorithm__tis_cap=1.5)
  rollout, selection = trainer.collect(state)
  batch, metrics = trainer.estimate(state, selection)
  np.testing.assert_allclose(batch.importance[batch.mask], 1, atol=1e-3)
  assert metrics['rollout/importance_mean'] == pytest.approx(1, abs=1e-4)
  # As if the sampler had thought each token half as likely as the trainer does.
  halved = rollout.trajectory.replace(logprobs=rollout.trajectory.logprobs - np.log(2).astype(np.float32))
  other = dataclasses.replace(rollout, trajectory=halved)
  batch, _ = trainer.estimate(state, dataclasses.replace(selection, rollout=other))
  np.testing.assert_allclose(batch.importance[batch.mask], 1.5, atol=1e-3)


@pytest.mark.parametrize('share', [0.0, 0.5, 1.0])
def test_tokens_of_older_weights_are_weighted_by_the_present_ones(policy, played, share):
  """w = min(p_present / p_recorded, cap) token by token, and the ratio of PPO is to the present weights."""
  rollout, _ = played
  cap = 1.05
  trainer, state = learning.make_trainer(policy, algorithm__old_logprobs='trainer', algorithm__tis_cap=cap)
  state = _nudge(state, 0.01).replace(iteration=3)
  t = rollout.trajectory
  older = t.loss_mask & (np.random.default_rng(0).random(t.loss_mask.shape) < share)
  versions = np.where(older, 1, np.where(t.loss_mask, 3, 0)).astype(np.int32)
  selection = trainer.select(dataclasses.replace(rollout, trajectory=t.replace(versions=versions)))
  batch, metrics = trainer.estimate(state, selection)
  weights, of_older, of_present, capped = np.ones_like(batch.importance), [], [], 0
  gaps = []
  for b, r in zip(*np.nonzero(batch.mask), strict=True):
    column = batch.columns[b, r]
    gap = float(batch.old_logprobs[b, r]) - float(t.logprobs[b, column])
    weights[b, r] = min(np.exp(gap), cap)
    capped += np.exp(gap) >= cap
    (of_older if older[b, column] else of_present).append(weights[b, r])
    gaps += [] if older[b, column] else [abs(gap)]
  np.testing.assert_allclose(batch.importance, weights, atol=1e-5)
  assert 0 < capped < batch.mask.sum() and weights.min() < 0.95
  expected = {'rollout/importance_mean': of_present, 'rollout/logprob_gap_mean': gaps}
  expected |= {'rollout/importance_older_mean': of_older}
  for name, values in expected.items():
    assert (name in metrics) == bool(values)
    assert not values or metrics[name] == pytest.approx(np.mean(values), rel=1e-4)
  assert metrics.get('rollout/importance_capped') == (pytest.approx(capped / batch.mask.sum()) if of_older else None)
  assert policy_lag(selection, state.iteration)['rollout/policy_lag_max'] == (2 if share else 0)


@pytest.mark.slow
def test_masks_that_are_off_train_every_token(policy, played):
  rollout, _ = played
  t = rollout.trajectory
  trainer, state = learning.make_trainer(policy, **_ALL_TOKENS)
  selection = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selection)
  assert (batch.mask.sum(axis=1) == t.length - 1).all() and (batch.trained == batch.mask).all()
  # Prompts and observations have advantages, too.
  for row in range(4):
    columns = batch.columns[row][batch.mask[row]]
    assert batch.advantages[row][batch.mask[row]][~t.loss_mask[row, columns]].all()
  _, metrics = trainer.update(state, batch, selection)
  assert metrics['train/num_mini_batches'] == 4


@pytest.mark.slow
def test_only_episodes_that_a_budget_cut_off_are_bootstrapped(policy, played):
  rollout, _ = played
  t = rollout.trajectory
  trainer, state = learning.make_trainer(policy, algorithm__bootstrap_truncated=True, algorithm__gamma=0.9)
  bootstrap = trainer.estimator.bootstrap(state.params, rollout)
  cut = t.status >= Status.OUT_OF_TURNS
  assert 0 < cut.sum() < len(cut)
  assert not bootstrap[~cut].any() and bootstrap[cut].all()
  # Every way to be cut off counts: the same rows, had they ended otherwise.
  status = np.arange(len(t.status), dtype=np.int32) % len(Status)
  bootstrap_of = trainer.estimator.bootstrap(
    state.params, dataclasses.replace(rollout, trajectory=t.replace(status=status))
  )
  cut_off = (Status.OUT_OF_TURNS, Status.OUT_OF_ACTIONS, Status.OUT_OF_CONTEXT)
  np.testing.assert_array_equal(bootstrap_of != 0, np.isin(status, cut_off))
  # And it reaches the returns: at the last token they are the reward and the discounted value behind it.
  selection = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selection)
  last = batch.mask.sum(axis=1) - 1
  rows = np.arange(len(last))
  reward = np.where(t.loss_mask, t.rewards, 0)[rows, batch.columns[rows, last]]
  gamma = trainer.settings.estimate.advantages.gamma
  np.testing.assert_allclose(batch.returns[rows, last], reward + gamma * bootstrap, atol=1e-4)


def test_a_bootstrap_is_the_value_behind_the_last_sampled_token(policy, played):
  """What the sampler would record for a token right behind: the value of a longer episode's own forward pass."""
  rollout, _ = played
  t = rollout.trajectory
  trainer, state = learning.make_trainer(policy, algorithm__bootstrap_truncated=True)
  bootstrap = trainer.estimator.bootstrap(state.params, rollout)
  row = int(np.flatnonzero(t.status >= Status.OUT_OF_TURNS)[0])
  end = int(np.flatnonzero(t.loss_mask[row])[-1]) + 1
  hidden, _ = policy.model.policy(policy.model.policy.embed(t.tokens[row : row + 1, :end]))
  np.testing.assert_allclose(bootstrap[row], policy.model.value_head(hidden)[0, -1], atol=1e-4)


def test_the_critic_learns_where_the_estimator_has_returns(policy, played):
  """Turn-wise GAE has one return a turn, at its end: elsewhere the critic would learn that all states are worth 0."""
  rollout, _ = played
  trainer, state = learning.make_trainer(policy, algorithm__adv_estimator='turn_wise_gae')
  batch, metrics = trainer.estimate(state, trainer.select(rollout))
  following = np.pad(batch.turn[:, 1:], ((0, 0), (0, 1)), constant_values=-1)
  np.testing.assert_array_equal(batch.valued, batch.mask & (batch.turn != following))
  assert batch.valued.sum() < batch.trained.sum() == rollout.trajectory.loss_mask.sum()
  for name, x in (('returns', batch.returns), ('values', batch.old_values)):
    x = np.asarray(x)[np.asarray(batch.valued)]
    found = [metrics[f'critic/{name}/{kind}'] for kind in ('mean', 'max', 'min')]
    np.testing.assert_allclose(found, [x.mean(), x.max(), x.min()], rtol=1e-5)


def test_discounts_and_masks_of_the_config_reach_their_places(policy, played):
  """Advantages of a row by a loop, with a discount and a decay that differ."""
  rollout, _ = played
  t = rollout.trajectory
  for everywhere in (False, True):
    trainer, state = learning.make_trainer(
      policy, algorithm__gamma=0.9, algorithm__lam=0.5, algorithm__whiten_advantages=False,
      algorithm__mask_advantages=not everywhere, algorithm__old_logprobs='trainer',
    )  # fmt: skip
    batch, _ = trainer.estimate(state, trainer.select(rollout))
    for row in range(3):
      through = batch.mask[row]
      rewards = np.where(t.loss_mask[row], t.rewards[row], 0)[batch.columns[row][through]]
      assert len(rewards) == (t.length[row] - 1 if everywhere else t.loss_mask[row].sum())
      values, following, advantage = batch.old_values[row][through], 0.0, 0.0
      expected = []
      for reward, value in zip(rewards[::-1], values[::-1], strict=True):
        advantage = reward + 0.9 * following - value + 0.9 * 0.5 * advantage
        following = value
        expected.append(advantage)
      np.testing.assert_allclose(batch.advantages[row][through], expected[::-1], atol=1e-4)


def _with_reply_rewards(rollout):
  """The rollout with rewards of replies on a third of all sampled tokens."""
  t, rng = rollout.trajectory, np.random.default_rng(0)
  paid = np.where(t.loss_mask & (rng.random(t.loss_mask.shape) < 0.3), rng.random(t.loss_mask.shape), 0)
  return dataclasses.replace(rollout, trajectory=t.replace(reply_rewards=paid.astype(np.float32)))


def test_rewards_of_replies_reach_scores_that_are_compared_and_neither_filter_nor_raw_scores(policy, played):
  rollout, paid = played[0], _with_reply_rewards(played[0])
  trainer, state = learning.make_trainer(
    policy, algorithm__adv_estimator='arpo', filter__strategy='top_k', filter__value=0.5,
    filter__include_zero=True,
  )  # fmt: skip
  selection = trainer.select(paid)
  np.testing.assert_array_equal(selection.keep, trainer.select(rollout).keep)
  batch, _ = trainer.estimate(state, selection)
  total = rollout.scores.astype(np.float64) + paid.trajectory.reply_rewards.sum(axis=1, dtype=np.float64)
  expected = np.where(batch.mask, total[:, None], 0) * selection.scale[:, None]
  np.testing.assert_allclose(batch.advantages, expected, rtol=1e-6)
  np.testing.assert_array_equal(paid.scores, rollout.scores)
  assert 0 < selection.keep.sum() < len(selection.keep) and paid.trajectory.reply_rewards.sum() > 1


@pytest.mark.parametrize('credit', ['turn', 'trajectory'])
def test_rewards_of_replies_stay_on_their_tokens_with_turn_credit_only(policy, played, credit):
  paid = _with_reply_rewards(played[0])
  t = paid.trajectory
  trainer, state = learning.make_trainer(
    policy, algorithm__gamma=0.9, algorithm__lam=0.5, algorithm__whiten_advantages=False, reward__credit=credit
  )
  batch, metrics = trainer.estimate(state, trainer.select(paid))
  for row in range(3):
    own = t.loss_mask[row]
    rewards = (t.rewards[row] + t.reply_rewards[row])[own].astype(float)
    if credit == 'trajectory':
      rewards = np.append(np.zeros(len(rewards) - 1), paid.scores[row] + t.reply_rewards[row].sum())
    following = advantage = 0.0
    expected = []
    for reward, value in zip(rewards[::-1], t.values[row][own][::-1], strict=True):
      advantage = reward + 0.9 * following - value + 0.9 * 0.5 * advantage
      following = value
      expected.append(advantage)
    np.testing.assert_allclose(batch.advantages[row][batch.mask[row]], expected[::-1], atol=1e-4)
  assert metrics['critic/rewards/mean'] == pytest.approx(paid.trained_scores.mean(), rel=1e-4)
