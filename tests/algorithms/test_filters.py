from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.algorithms import filters as module
from tests.support.estimators import FILTER


def kept(scores, **options):
  return np.flatnonzero(module.select_groups(np.array(scores, float), **FILTER | options)).tolist()


def uncertainty_filter(group, valid, **options):
  return module.uncertainty_filter(group, valid, **{'metric': 'reward_std'} | FILTER | options)


# --- the metric of a group --------------------------------------------------------------------------------------------


def test_group_scores_against_loops():
  rng = np.random.default_rng(0)
  group = rng.choice([-4, 0, 9, 77], size=40)
  valid = rng.random(40) < 0.8
  arrays = {'scores': rng.normal(size=40), 'entropy': rng.random(40), 'length': rng.integers(1, 50, size=40)}
  expected = {
    'reward_std': ('scores', lambda x: x.std(ddof=1)),
    'reward': ('scores', np.mean),
    'reward_sum': ('scores', np.sum),
    'entropy': ('entropy', np.mean),
    'entropy_variance': ('entropy', lambda x: x.std(ddof=1)),
    'length': ('length', np.mean),
  }
  assert set(expected) == set(module.METRICS)
  for metric, (name, f) in expected.items():
    groups, got = module.group_scores(metric, group, valid, **{name: arrays[name]})
    np.testing.assert_array_equal(groups, [-4, 0, 9, 77])
    np.testing.assert_allclose(got, [f(arrays[name][valid & (group == g)]) for g in groups])
    with pytest.raises(ValueError, match=f"metric is '{metric}', which needs"):
      module.group_scores(metric, group, valid)


def test_group_scores_count_an_episode_once_and_padding_never():
  group = np.array([0, 0, 0, 0, 1, 2])
  episode = np.array([5, 5, 5, 6, 7, 8])
  valid = np.array([1, 1, 1, 1, 1, 0], bool)
  scores = np.array([1.0, 1.0, 1.0, 0.0, 3.0, 9.0])
  groups, mean = module.group_scores('reward', group, valid, scores=scores, episode=episode)
  np.testing.assert_array_equal(groups, [0, 1])
  np.testing.assert_allclose(mean, [0.5, 3.0])
  _, std = module.group_scores('reward_std', group, valid, scores=scores, episode=episode)
  np.testing.assert_allclose(std, [np.sqrt(0.5), 0.0])  # a single episode does not vary


def test_equal_rewards_have_a_deviation_of_exactly_zero():
  scores = np.full(16, 0.1, np.float32)
  _, std = module.group_scores('reward_std', np.zeros(16, int), np.ones(16, bool), scores=scores)
  assert std[0] == 0.0


def test_rewards_that_differ_by_rounding_have_a_deviation_of_exactly_zero():
  scores = np.array([0.3, 0.1 + 0.2, 1.0, 1.0 + 1e-3])
  assert scores[0] != scores[1]
  _, std = module.group_scores('reward_std', np.array([0, 0, 1, 1]), np.ones(4, bool), scores=scores)
  assert std[0] == 0.0 < std[1]


# --- the choice of groups ---------------------------------------------------------------------------------------------

SCORES = [0.3, 0.0, 5.0, 0.2, 0.0, 0.3]


@pytest.mark.parametrize(
  ('options', 'expected'),
  [
    ({'strategy': 'top_k', 'value': 0.5}, [0, 2, 5]),
    ({'strategy': 'top_k', 'value': 0.4}, [0, 2]),  # floor(2.4), and the first of the tie
    ({'strategy': 'top_k', 'value': 0.1}, []),
    ({'strategy': 'top_k', 'value': 1.0}, [0, 1, 2, 3, 4, 5]),
    ({'strategy': 'top_k', 'value': 1.0, 'include_zero': False}, [0, 2, 3, 5]),
    ({'strategy': 'top_k', 'value': 0.5, 'kind': 'smallest'}, [1, 3, 4]),
    ({'strategy': 'top_k', 'value': 0.5, 'kind': 'smallest', 'include_zero': False}, [0, 3, 5]),
    ({'strategy': 'top_k_abs', 'value': 1}, [2]),
    ({'strategy': 'top_k_abs', 'value': 2}, [0, 2]),
    ({'strategy': 'top_k_abs', 'value': 100}, [0, 1, 2, 3, 4, 5]),
    ({'strategy': 'top_k_abs', 'value': 1, 'kind': 'smallest'}, [1]),
    ({'strategy': 'min_p', 'value': 0.05}, [0, 2, 5]),
    ({'strategy': 'min_p', 'value': 0.06}, [0, 2, 5]),  # .3 is the bound itself
    ({'strategy': 'min_p', 'value': 0.07}, [2]),
    ({'strategy': 'min_p', 'value': 0.0}, [0, 1, 2, 3, 4, 5]),
    ({'strategy': 'min_p', 'value': 0.05, 'kind': 'smallest'}, [1, 3, 4]),
    ({'strategy': 'top_p', 'value': 1.0}, [0, 1, 2, 3, 4, 5]),
    ({'strategy': 'top_p', 'value': 1.0, 'include_zero': False}, [0, 2, 3, 5]),
    ({'strategy': 'top_p', 'value': 0.9}, [0, 2]),  # total 5.8: 5.0 < 5.21 <= 5.3
    ({'strategy': 'top_p', 'value': 0.85}, [2]),  # 4.92
    ({'strategy': 'top_p', 'value': 5.01 / 5.8, 'eps': 0.02}, [2]),
    ({'strategy': 'top_p', 'value': 5.01 / 5.8, 'eps': 0.0}, [0, 2]),
    ({'strategy': 'top_p', 'value': 0.1, 'kind': 'smallest'}, [0, 1, 3, 4, 5]),  # .57: 0, 0, .2, .5, .8
    ({'strategy': 'top_p', 'value': 0.9, 'top_p_mode': 'softmax'}, [2]),  # exp(5) outweighs the rest
    ({'strategy': 'top_p', 'value': 0.0}, []),
  ],
)  # fmt: skip
def test_select_groups_by_hand(options, expected):
  assert kept(SCORES, **options) == expected


@pytest.mark.parametrize('zeros', range(9))
def test_zero_one_rewards_linear_drops_what_softmax_keeps(zeros):
  """The reference's simulated case: 8 groups of deviation 0 or .5, p = .9."""
  scores = [0.0] * zeros + [0.5] * (8 - zeros)
  linear = kept(scores, value=0.9)
  assert all(scores[i] > 0 for i in linear)
  assert len(linear) == int(np.ceil(0.9 * (8 - zeros) - 0.01 / 0.5 - 1e-9)) if zeros < 8 else linear == []
  assert len(kept(scores, value=0.9, top_p_mode='softmax')) in (7, 8)


def test_rewards_of_sokobans_scale():
  scores = [5.0, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1, 0.1]
  assert len(kept(scores, value=0.9, top_p_mode='softmax')) == 1
  assert len(kept(scores, value=0.9)) == 3


@pytest.mark.parametrize('strategy', ['top_k', 'top_k_abs', 'min_p', 'top_p'])
def test_all_zero_and_empty(strategy):
  value = 3 if strategy == 'top_k_abs' else 0.5
  zeros = [0.0, 0.0, 0.0, 0.0]
  assert kept(zeros, strategy=strategy, value=value, include_zero=False) == []
  expected = {'top_k': [0, 1], 'top_k_abs': [0, 1, 2], 'min_p': [0, 1, 2, 3], 'top_p': []}[strategy]
  assert kept(zeros, strategy=strategy, value=value) == expected
  assert kept([], strategy=strategy, value=value) == []


def test_tiny_scores_leave_nothing_in_linear_top_p():
  assert kept([0.001, 0.002, 0.003], value=0.9) == []
  assert kept([0.001, 0.002, 0.003], value=0.9, eps=0.0) == [0, 1, 2]
  assert kept([0.001, 0.002, 0.003], value=1.0, include_zero=False) == [0, 1, 2]


def test_what_is_not_a_number_is_never_kept():
  assert kept([np.nan, 1.0, np.inf, 2.0], value=1.0) == [1, 3]
  assert kept([np.nan, np.nan], strategy='top_k', value=1.0) == []


def test_negative_scores():
  """Mean rewards may be negative: the mass is counted from the lowest."""
  scores = [-1.0, -0.5, 0.0, -1.0]  # masses 0, .5, 1, 0
  assert kept(scores, value=0.8, eps=0.1) == [1, 2]
  assert kept(scores, value=0.6, eps=0.1) == [2]
  assert kept(scores, strategy='min_p', value=0.5) == [1, 2]


@pytest.mark.parametrize('strategy', ['top_k', 'top_p'])
def test_a_negative_score_is_not_a_zero(strategy):
  """Ranked by their mean reward, groups that lost are not those in which nothing happened."""
  assert kept([-1.0, 0.0, 0.5, -1e-9, 1e-11], strategy=strategy, value=1.0, include_zero=False) == [0, 2, 3]


def test_ties_go_to_the_first_in_large_batches_too():
  scores = np.random.default_rng(0).integers(0, 2, size=200).astype(float)
  for kind, best in (('largest', 1.0), ('smallest', 0.0)):
    assert kept(scores, strategy='top_k_abs', value=30, kind=kind) == np.flatnonzero(scores == best)[:30].tolist()


def test_fraction_does_not_lose_a_group_to_rounding():
  assert len(kept(np.arange(100.0), strategy='top_k', value=0.29)) == 29  # .29 * 100 = 28.999999999999996
  assert len(kept(np.full(10, 0.1), value=0.9, eps=0.0)) == 9


@settings(max_examples=100, deadline=None)
@given(
  scores=st.lists(st.floats(0, 10), min_size=1, max_size=12),
  value=st.floats(0.01, 0.99),
  scale=st.floats(0.1, 100),
  kind=st.sampled_from(module.TYPES),
)
def test_linear_top_p_properties(scores, value, scale, kind):
  """Enough mass, no group too many, better ones first, and no change with the scale."""
  scores, options = np.array(scores), FILTER | {'value': value, 'kind': kind, 'eps': 0.0}
  keep = module.select_groups(scores, **options)
  total = scores.sum()
  assert scores[keep].sum() >= value * total * (1 - 1e-9)
  if keep.any():
    worst = scores[keep].min() if kind == 'largest' else scores[keep].max()
    assert scores[keep].sum() - worst <= value * total * (1 + 1e-9)
    better = scores > worst if kind == 'largest' else scores < worst
    assert keep[better].all()
  if scores.min() > 1e-6:  # rounding may move a boundary only where masses meet p exactly
    other = module.select_groups(scores * 2.0**5, **options)
    np.testing.assert_array_equal(keep, other)


@pytest.mark.parametrize(
  ('options', 'field'),
  [
    ({'strategy': 'topp'}, 'strategy'),
    ({'kind': 'std'}, 'type'),
    ({'top_p_mode': 'log'}, 'top_p_mode'),
    ({'value': -0.1}, 'value'),
    ({'value': np.nan}, 'value'),
  ],
)
def test_errors_name_the_field(options, field):
  with pytest.raises(ValueError, match=rf'filter\.{field} is '):
    module.select_groups(np.ones(3), **FILTER | options)


# --- the whole filter -------------------------------------------------------------------------------------------------


def test_uncertainty_filter_keeps_whole_groups_of_raw_scores():
  group = np.array([3, 8, 3, 8, 5, 5, 3, 8])
  valid = np.array([1, 1, 1, 1, 1, 1, 0, 1], bool)
  scores = np.array([0.0, 1.0, 0.0, 0.0, 0.0, 0.1, 50.0, 1.0])
  got = uncertainty_filter(group, valid, scores=scores, strategy='top_k', value=0.34)
  np.testing.assert_array_equal(got.keep_groups, [False, False, True])
  np.testing.assert_array_equal(got.keep, [0, 1, 0, 1, 0, 0, 0, 1])
  assert got.metrics == {
    'rollout/filter_kept_count': 1.0,
    'rollout/filter_kept_ratio': pytest.approx(1 / 3),
    'rollout/filter_zero_count': 1.0,
  }
  everything = uncertainty_filter(group, valid, scores=scores)
  np.testing.assert_array_equal(everything.keep, valid)
  varying = uncertainty_filter(group, valid, scores=scores, include_zero=False)
  np.testing.assert_array_equal(varying.keep, valid & (group != 3))
  nothing = uncertainty_filter(group, np.zeros(8, bool), scores=scores)
  assert not nothing.keep.any() and nothing.metrics['rollout/filter_kept_ratio'] == 0.0


def test_uncertainty_filter_by_length():
  group = np.array([0, 0, 1, 1])
  got = uncertainty_filter(
    group,
    np.ones(4, bool),
    metric='length',
    length=np.array([3, 5, 9, 9]),
    strategy='top_k_abs',
    value=1,
    kind='smallest',
  )
  np.testing.assert_array_equal(got.keep, [1, 1, 0, 0])


def test_loss_scale():
  assert [module.loss_scale(0.25, scaling) for scaling in module.LOSS_SCALINGS] == [1.0, 0.25, 0.5]
  with pytest.raises(ValueError, match="loss_scaling is 'log'"):
    module.loss_scale(0.25, 'log')


def test_soft_weights():
  group = np.array([1, 1, 2, 2, 3, 3, 4])
  valid = np.array([1, 1, 1, 1, 1, 1, 0], bool)
  scores = np.array([0.0, 1.0, 0.0, 4.0, 2.0, 2.0, 9.0])
  np.testing.assert_allclose(module.soft_weights(scores, group, valid), [0.25, 0.25, 1, 1, 0, 0, 0])
  np.testing.assert_array_equal(module.soft_weights(np.ones(7), group, valid), [1, 1, 1, 1, 1, 1, 0])
  assert not module.soft_weights(scores, group, np.zeros(7, bool)).any()
