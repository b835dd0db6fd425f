from __future__ import annotations

import math

import numpy as np
import pytest

from ragen_jax.algorithms import diagnostics as module


def test_ema_is_a_weighted_mean():
  values = [3.0, -1.0, 4.0, 1.0]
  ema = module.Ema()
  assert math.isnan(ema.value)
  for i, x in enumerate(values):
    ema = ema.update(x, 0.8)
    weights = 0.8 ** np.arange(i, -1, -1)
    assert ema.value == pytest.approx(np.average(values[: i + 1], weights=weights))
  assert ema.update(math.nan, 0.8) == ema and ema.update(math.inf, 0.8) == ema
  assert module.Ema().update(2.0, 0.0).update(5.0, 0.0).value == 5.0


def test_update_emas():
  emas, first = module.update_emas({}, {'a': 1.0}, 0.5)
  emas, second = module.update_emas(emas, {'a': 4.0, 'b': 2.0}, 0.5)
  assert first == {'a_ema': 1.0}
  assert second == {'a_ema': pytest.approx(3.0), 'b_ema': 2.0}
  assert set(emas) == {'a', 'b'}


def test_ratios_are_counted_as_numpy_counts_them_and_parts_add_up():
  rng = np.random.default_rng(0)
  ratio = np.exp(rng.normal(scale=10.0 ** rng.uniform(-5, 1, size=(6, 50)))).astype(np.float32)
  ratio[0, :3] = 1.0, 0.0, np.exp(20)
  mask = rng.random((6, 50)) < 0.7
  mask[0, :3] = True
  edges = module.RATIO_EDGES.astype(np.float32)
  wide = np.concatenate([[-np.inf], edges[1:-1], [np.inf]])
  expected = np.histogram(ratio[mask], wide)[0]
  got = module.ratio_counts(ratio, mask)
  np.testing.assert_array_equal(got, expected)
  np.testing.assert_array_equal(
    got, module.ratio_counts(ratio[:2], mask[:2]) + module.ratio_counts(ratio[2:], mask[2:])
  )
  assert expected[0] > 1 and expected[-1] > 1  # what lies outside the edges
  assert edges[0] == pytest.approx(0.1) and edges[-1] == pytest.approx(10) and len(expected) == len(edges) - 1


def test_in_group_reward():
  scores = np.array([0.0, 1.0, 2.0, 2.0, 100.0])
  group = np.array([4, 4, 9, 9, 9])
  valid = np.array([1, 1, 1, 1, 0], bool)
  got = module.in_group_reward(scores, group, valid)
  assert got == {
    'rollout/in_group_reward_std': pytest.approx(np.sqrt(0.5) / 2),
    'rollout/in_group_reward_max': 1.5,
    'rollout/in_group_reward_mean': 1.25,
  }
  rows = np.array([0, 0, 1, 1, 2, 3, 4])  # the first two episodes have two rows each
  again = module.in_group_reward(scores[rows], group[rows], valid[rows], episode=rows)
  assert again == got
  assert all(math.isnan(x) for x in module.in_group_reward(scores, group, np.zeros(5, bool)).values())


def test_reward_std_buckets():
  std = np.array([0.2, 5.5, 1.0, 0.0, 9.0, 2.5])
  np.testing.assert_array_equal(module.reward_std_buckets(std, mode='fixed_rv', count=6), [0, 5, 1, 0, 5, 2])
  np.testing.assert_array_equal(module.reward_std_buckets(std, mode='quantile', count=3), [0, 2, 1, 0, 2, 1])
  with pytest.raises(ValueError, match="bucket_mode is 'rank'"):
    module.reward_std_buckets(std, mode='rank', count=6)


def test_logprob_gap(batch):
  b = batch(0)
  m = b.loss_mask
  trainer = np.where(m, b.logprobs + 0.1 * b.rng.normal(size=m.shape), np.nan)
  got = module.logprob_gap(trainer, b.logprobs, m)
  x, y = trainer[m], b.logprobs[m].astype(float)
  assert got['rollout/logprob_gap_mean'] == pytest.approx(np.abs(x - y).mean())
  assert got['rollout/logprob_gap_max'] == pytest.approx(np.abs(x - y).max())
  assert got['rollout/logprob_pearson'] == pytest.approx(np.corrcoef(x, y)[0, 1])
  same = module.logprob_gap(b.logprobs, b.logprobs, m)
  assert same['rollout/logprob_gap_max'] == 0.0 and same['rollout/logprob_pearson'] == pytest.approx(1.0)
  assert math.isnan(module.logprob_gap(np.ones_like(trainer), b.logprobs, m)['rollout/logprob_pearson'])
  assert module.logprob_gap(trainer, b.logprobs, np.zeros_like(m))['rollout/logprob_gap_mean'] == 0.0


def test_repeated_replies():
  rng = np.random.default_rng(0)
  replies = [('a', 'b', 'c', 'd')[i] for i in rng.integers(0, 4, size=30)]
  group = rng.choice([-3, 5, 6], size=30)
  pairs = [(i, j) for i in range(30) for j in range(30) if group[i] != group[j]]
  expected = np.mean([replies[i] == replies[j] for i, j in pairs])
  assert module.repeated_replies(replies, group) == pytest.approx(expected)
  assert module.repeated_replies(['x'] * 6, np.array([0, 0, 1, 1, 2, 2])) == 1.0
  # the same words for one prompt are no template
  assert module.repeated_replies([(1, 2), (1, 2), (3,), (3,)], np.array([0, 0, 1, 1])) == 0.0
  assert module.repeated_replies(['x', 'x'], np.array([0, 0])) == 0.0
  assert module.repeated_replies([], np.zeros(0, int)) == 0.0


# --- mutual information -----------------------------------------------------------------------------------------------


@pytest.mark.slow
def test_mutual_information_against_loops():
  rng = np.random.default_rng(0)
  scores = rng.normal(size=(9, 6)) * 3 - 10
  own = rng.integers(0, 6, size=9)
  lengths = rng.integers(1, 20, size=9)
  got = module.mutual_information(scores, own, lengths=lengths)
  for suffix, log in (('', scores), ('_per_token', scores / lengths[:, None])):
    matched = np.array([log[z, own[z]] for z in range(9)])
    marginal = np.array([np.log(np.mean(np.exp(log[z]))) for z in range(9)])
    assert got['mi' + suffix] == pytest.approx((matched - marginal).mean())
    assert got['cond_entropy' + suffix] == pytest.approx(-matched.mean())
    assert got['entropy' + suffix] == pytest.approx(-marginal.mean())
    assert got['mi_zscore' + suffix] == pytest.approx((matched - marginal).mean() / marginal.std(ddof=1))
  for k in (1, 2, 4):
    hits, chances = [], []
    for z in range(9):
      best = np.argsort(-scores[z])[:k]
      hits.append(own[z] in best)
      draws = [rng.choice(6, size=k, replace=False) for _ in range(4000)]
      chances.append(np.mean([own[z] in draw for draw in draws]))
    assert got[f'retrieval_top{k}'] == pytest.approx(np.mean(hits))
    assert got[f'retrieval_top{k}_chance'] == pytest.approx(np.mean(chances), abs=0.02)
  assert 'retrieval_top8' not in got  # there are only 6 prompts


def test_mutual_information_of_the_extremes():
  """Reasoning that ignores its prompt has none; reasoning that only its prompt explains has log M."""
  template = np.repeat(np.random.default_rng(0).normal(size=(5, 1)), 5, axis=1)
  got = module.mutual_information(template, np.arange(5))
  assert got['mi'] == pytest.approx(0.0, abs=1e-12)
  assert got['retrieval_top1'] == 0.0  # ties count against it
  bound = module.mutual_information(np.where(np.eye(5, dtype=bool), -1.0, -1e4), np.arange(5))
  assert bound['mi'] == pytest.approx(math.log(5))
  assert bound['retrieval_top1'] == 1.0 and bound['retrieval_top1_chance'] == pytest.approx(0.2)
  assert module.mutual_information(np.zeros((0, 3)), np.zeros(0, int)) == {}


def test_mi_zscore_of_marginals_that_do_not_vary_divides_by_the_smallest_deviation():
  scores = np.array([[0.0, -1.0], [-1.0, 0.0]])
  got = module.mutual_information(scores, np.arange(2))
  assert got['marginal_std'] == 0.0 and got['mi_zscore'] == pytest.approx(got['mi'] / 1e-3)
