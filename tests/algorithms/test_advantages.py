"""The dispatcher: every name, its options, its errors, and what all estimators have in common."""

from __future__ import annotations

import jax
import numpy as np
import pytest

from ragen_jax.algorithms import advantages as module
from ragen_jax.algorithms import gae, group_relative, masks
from tests.support.estimators import advantage_settings

NAMES = list(module.ESTIMATORS)
OPTIONS = {'gamma': 0.97, 'lam': 0.9, 'high_level_gamma': 0.8}
_compute = jax.jit(module.compute_advantages, static_argnames='settings')


def compute(name, arrays, **options):
  return _compute(advantage_settings(name, **OPTIONS | options), module.AdvantageInputs(**arrays))


def arrays_of(b):
  anchors = np.where(np.arange(4)[None] <= b.turn.max(-1)[:, None], np.arange(4)[None] % 2, -1).astype(np.int32)
  return {
    'rewards': b.rewards,
    'loss_mask': b.loss_mask,
    'turn': b.turn,
    'group': b.group,
    'values': b.values,
    'bootstrap': b.bootstrap,
    'anchors': anchors,
  }


def test_names():
  assert set(NAMES) == {
    'gae', 'grpo', 'dr_grpo', 'brpo', 'arpo', 'rloo', 'reinforce_plus_plus', 'reinforce_plus_plus_baseline',
    'turn_wise_gae', 'bi_level_gae', 'gigpo',
  }  # fmt: skip


@pytest.mark.parametrize('name', ['grpo', 'dr_grpo', 'rloo', 'brpo', 'arpo', 'reinforce_plus_plus_baseline', 'gigpo'])
def test_scores_that_are_given_are_compared_in_place_of_sums_of_rewards(batch, name):
  b = batch(1)
  given = arrays_of(b) | {'rewards': np.zeros_like(b.rewards)}  # so the steps of 'gigpo' add nothing
  scores = np.where(b.loss_mask.any(-1), np.random.default_rng(0).normal(size=8), 0).astype(np.float32)
  got = compute(name, given | {'scores': scores})
  last = jax.jit(masks.last_sampled)(b.loss_mask)
  no_steps = {'step_weight': 0.0} if name == 'gigpo' else {}
  summed = compute(name, given | {'rewards': np.where(last, scores[:, None], 0)}, **no_steps)
  np.testing.assert_allclose(got.advantages, summed.advantages, atol=1e-6)
  np.testing.assert_allclose(got.returns, summed.returns, atol=1e-6)
  assert np.abs(got.advantages).max() > 0.1


@pytest.mark.parametrize('name', ['gae', 'turn_wise_gae', 'bi_level_gae'])
@pytest.mark.slow_cases('turn_wise_gae')
def test_the_critic_s_targets_may_have_a_lambda_of_their_own(batch, name):
  given = arrays_of(batch(1))
  got = compute(name, given, critic_lam=0.5, high_level_lam=0.7)
  of_policy = compute(name, given, high_level_lam=0.7)
  of_critic = compute(name, given, lam=0.5, high_level_lam=0.5)
  np.testing.assert_array_equal(got.advantages, of_policy.advantages)
  np.testing.assert_array_equal(got.returns, of_critic.returns)
  np.testing.assert_array_equal(got.value_mask, of_policy.value_mask)
  assert np.abs(np.asarray(got.returns) - of_policy.returns).max() > 0.05


@pytest.mark.parametrize('name', NAMES)
@pytest.mark.slow_cases('gae')
def test_each_name_is_its_function(batch, name):
  b = batch(1)
  given, m, v = arrays_of(b), b.loss_mask, b.values
  whitens = module.ESTIMATORS[name].whitens

  @jax.jit
  def run(given, ends):
    r, v, m, turn, group = (given[key] for key in ('rewards', 'values', 'loss_mask', 'turn', 'group'))
    scores, end = group_relative.episode_scores(r, m), given['bootstrap']
    expected = {
      'gae': lambda: gae.gae(r, v, m, 0.97, 0.9, end)[0],
      'bi_level_gae': lambda: gae.bi_level_gae(r, v, m, turn, 0.97, 0.9, 0.8, None, end)[0],
      'turn_wise_gae': lambda: gae.turn_wise_gae(r, v, m, turn, 0.8, 0.9, end)[0],
      'grpo': lambda: group_relative.grpo(scores, group, m, scale_by_std=True, length_weight=False),
      'dr_grpo': lambda: group_relative.grpo(scores, group, m, scale_by_std=False, length_weight=False),
      'rloo': lambda: group_relative.rloo(scores, group, m),
      'brpo': lambda: group_relative.brpo(scores, m),
      'arpo': lambda: group_relative.arpo(scores, m),
      'reinforce_plus_plus': lambda: gae.discounted_returns(r, m, 0.97),
      'reinforce_plus_plus_baseline': lambda: group_relative.grpo(
        scores, group, m, scale_by_std=False, length_weight=False
      ),
      'gigpo': lambda: group_relative.gigpo(
        r, group, m, turn, given['anchors'], step_gamma=0.95, step_weight=1.0, scale_by_std=False
      ),
    }[name]()
    settings = [advantage_settings(name, **OPTIONS, whiten_advantages=on) for on in (True, False)] if whitens else []
    both = [module.compute_advantages(x, module.AdvantageInputs(**given)) for x in settings]
    return expected, masks.whiten(expected, ends if name == 'turn_wise_gae' else m), both

  expected, whitened, both = jax.device_get(run(given, b.ends))
  got = compute(name, given)
  if whitens:
    np.testing.assert_allclose(both[1].advantages, expected, atol=1e-5)
    # The critic's targets are never whitened. Of two programs, each might round them in its own way.
    np.testing.assert_array_equal(both[0].returns, both[1].returns)
  if name == 'turn_wise_gae':  # every turn counts once, however many tokens it has
    np.testing.assert_allclose(np.asarray(got.advantages)[b.ends], whitened[b.ends], atol=1e-5)
  elif whitens:
    np.testing.assert_allclose(got.advantages, whitened, atol=1e-5)
  else:
    np.testing.assert_allclose(got.advantages, expected, atol=1e-5)
  np.testing.assert_array_equal(got.value_mask, b.ends if name == 'turn_wise_gae' else m)
  if module.ESTIMATORS[name].needs_critic and name != 'turn_wise_gae':
    np.testing.assert_allclose(got.returns, expected + np.where(m, v, 0.0), atol=1e-5)


@pytest.mark.parametrize('name', NAMES)
def test_an_estimator_needs_groups_if_it_compares_the_members_of_a_group(name):
  """Then the reward of one episode changes the advantages of its group's others, and of no other group."""
  given = {  # of the shapes of all batches, so that other tests have compiled most programs
    'rewards': np.random.default_rng(0).normal(size=(8, 32)).astype(np.float32),
    'loss_mask': np.ones((8, 32), bool),
    'turn': np.zeros((8, 32), np.int32),
    'group': np.repeat(np.int32([0, 1]), 4),
    'values': np.zeros((8, 32), np.float32),
    'bootstrap': np.zeros(8, np.float32),
    'anchors': np.repeat(np.int32([[0, -1, -1, -1], [1, -1, -1, -1]]), 4, axis=0),
  }
  other = given | {'rewards': given['rewards'] + np.where(np.arange(8)[:, None] == 0, np.float32(0.5), 0)}
  options = {'whiten_advantages': False} if module.ESTIMATORS[name].whitens else {}
  first, second = (compute(name, x, **options).advantages for x in (given, other))
  changed = (np.abs(first - second) > 1e-4).any(axis=1)
  assert changed[0]
  compares = changed[1:4].all() and not changed[4:].any()
  assert module.ESTIMATORS[name].needs_groups == compares


@pytest.mark.parametrize('name', NAMES)
def test_padding_has_no_influence(batch, name):
  """More padding rows and columns, with the ids of real groups, and poison on them, change nothing."""
  b = batch(2)
  given = arrays_of(b)
  got = compute(name, given)
  wide = dict(given)
  for key in ('rewards', 'values'):
    wide[key] = np.pad(given[key], ((3, 0), (0, 5)), constant_values=np.nan)
  wide['loss_mask'] = np.pad(b.loss_mask, ((3, 0), (0, 5)))
  wide['turn'] = np.pad(b.turn, ((3, 0), (0, 5)), constant_values=-1)
  wide['group'] = np.pad(b.group, (3, 0), constant_values=7)
  wide['bootstrap'] = np.pad(b.bootstrap, (3, 0), constant_values=100.0)
  wide['anchors'] = np.pad(given['anchors'], ((3, 0), (0, 0)), constant_values=1)
  padded = compute(name, wide)
  for field in ('advantages', 'returns'):
    x = np.asarray(getattr(padded, field))
    assert not x[:3].any() and not x[:, 32:].any()
    np.testing.assert_allclose(x[3:, :32], getattr(got, field), atol=1e-5)
  assert not np.asarray(got.advantages)[~b.loss_mask].any()
  assert np.abs(got.advantages).max() > 0.1


@pytest.mark.parametrize('name', NAMES)
def test_rows_of_an_episode_are_together_its_single_row(batch, name):
  b = batch(4)
  given = arrays_of(b)
  whole = compute(name, given)
  pieces = [(row, k) for row in np.flatnonzero(b.valid) for k in range(b.turn[row].max() + 1)]
  b.rng.shuffle(pieces)
  source = np.array([row for row, _ in pieces])
  split = {key: x[source] for key, x in given.items()}
  split['loss_mask'] = np.stack([b.loss_mask[row] & (b.turn[row] == k) for row, k in pieces])
  rows = compute(name, split | {'episode': source.astype(np.int32)})
  for field in ('advantages', 'returns', 'value_mask'):
    together = np.zeros(b.loss_mask.shape)
    np.add.at(together, source, np.asarray(getattr(rows, field)))
    np.testing.assert_allclose(together, np.asarray(getattr(whole, field), float), atol=2e-5, err_msg=field)


def test_length_weight_reaches_grpo(batch):
  b = batch(1)
  plain, weighted = (compute('grpo', arrays_of(b), length_weight=on).advantages for on in (False, True))
  lengths = b.loss_mask.sum(-1, keepdims=True)
  expected = np.asarray(plain) * lengths[b.valid].mean() / np.maximum(lengths, 1)
  np.testing.assert_allclose(weighted, expected, atol=1e-5)
  assert np.abs(np.asarray(weighted) - plain).max() > 0.1


def test_advantage_mask(batch):
  b = batch(1, poison=0.5)
  every = np.arange(32)[None] < b.length[:, None]
  got = compute('gae', arrays_of(b) | {'adv_mask': every}, whiten_advantages=False)
  expected = jax.jit(gae.gae)(b.rewards, b.values, every, 0.97, 0.9, b.bootstrap)[0]
  np.testing.assert_allclose(got.advantages, expected, atol=1e-5)
  np.testing.assert_array_equal(got.value_mask, every)

  # turns of bi-level GAE still end with the policy's tokens, and not with the last token of the turn's columns
  got = compute('bi_level_gae', arrays_of(b) | {'adv_mask': every}, whiten_advantages=False)
  bi_level_gae = jax.jit(gae.bi_level_gae)
  arguments = b.rewards, b.values, every, b.turn, 0.97, 0.9, 0.8, None, b.bootstrap
  np.testing.assert_allclose(got.advantages, bi_level_gae(*arguments, loss_mask=b.loss_mask)[0], atol=1e-5)
  assert np.abs(np.asarray(got.advantages) - bi_level_gae(*arguments)[0]).max() > 0.1


@pytest.mark.slow
def test_errors(batch):
  b = batch(0)
  given = arrays_of(b)
  with pytest.raises(ValueError, match=r"adv_estimator is 'ppo'; it may be one of gae, "):
    compute('ppo', given)
  for name in ('gae', 'turn_wise_gae', 'bi_level_gae'):
    with pytest.raises(ValueError, match='values'):
      compute(name, given | {'values': None})
  with pytest.raises(ValueError, match='anchor'):
    compute('gigpo', given | {'anchors': None})
