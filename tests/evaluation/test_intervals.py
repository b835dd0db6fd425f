"""Intervals against a simulation whose truth is known."""

from __future__ import annotations

import math

import numpy as np
import pytest

from ragen_jax.agent.episode import Episode, Status, Turn
from ragen_jax.agent.metrics import episode_metrics
from ragen_jax.evaluation.intervals import bootstrap, level_intervals


def _episode(rng, group, status):
  turns = [
    Turn('', '', ['Up'] * rng.integers(3), (float(rng.normal()),), -0.1 * (not valid), bool(valid), 0, tokens=7)
    for valid in rng.integers(2, size=rng.integers(1, 4))
  ]
  return Episode('Game', group, group, turns, status=status)


def _episodes(successes: np.ndarray, size: int) -> list[Episode]:
  rng = np.random.default_rng(0)
  return [
    _episode(rng, g, Status.SUCCESS if i < c else Status.OUT_OF_TURNS)
    for g, c in enumerate(successes)
    for i in range(size)
  ]


def test_the_bootstrap_is_that_of_resampling_levels_one_by_one():
  rng = np.random.default_rng(1)
  top, bottom = rng.normal(1, 2, size=(30, 2)), rng.uniform(1, 3, size=(30, 2))
  low, high = bootstrap(top, bottom)
  drawn = [(top[i].sum(axis=0) / bottom[i].sum(axis=0)) for i in rng.integers(30, size=(4000, 30))]
  # A percentile of 2,000 draws wanders by about a twentieth of the interval.
  wanders = 0.08 * (high - low)
  tail = 0.0188  # the normal distribution's below -2.045 * sqrt(30 / 29), 2.045 being Student's t of 29
  assert (np.abs(np.quantile(drawn, tail, axis=0) - low) < wanders).all()
  assert (np.abs(np.quantile(drawn, 1 - tail, axis=0) - high) < wanders).all()
  np.testing.assert_array_equal(bootstrap(top, bottom), (low, high))


def test_95_of_100_intervals_hold_the_truth_and_those_over_episodes_do_not():
  """Levels are of unlike difficulty, so the episodes of one say much the same."""
  rng, size, levels, runs = np.random.default_rng(2), 4, 48, 1000
  chance = rng.beta(0.3, 0.3, size=(levels, 1, runs))  # its mean is a half
  won = (rng.random((levels, size, runs)) < chance).astype(float)

  def share_that_hold(samples) -> float:
    low, high = bootstrap(samples, np.ones_like(samples))
    return float(np.mean((low <= 0.5) & (high >= 0.5)))

  # Three standard deviations of a share of 1,000 are 2 %.
  assert 0.93 < share_that_hold(won.mean(axis=1)) < 0.97
  assert share_that_hold(won.reshape(levels * size, runs)) < 0.8


def test_few_levels_have_wider_intervals():
  """Of 8 values from a normal distribution: as wide as Student's t makes them, 2.365 standard errors to each side."""
  samples = np.random.default_rng(3).normal(size=(8, 400))
  low, high = bootstrap(samples, np.ones_like(samples))
  errors = samples.std(axis=0, ddof=1) / np.sqrt(8)
  assert np.mean((high - low) / 2 / errors) == pytest.approx(2.365, rel=0.05)


def test_metrics_are_those_of_training_evaluations():
  size = 4
  episodes = _episodes(np.asarray([0, 1, 4, 2, 0, 3]), size)
  told = episode_metrics(episodes, size, 'val-env')
  found = level_intervals(episodes, size, best=np.full((6,), 0.8, np.float32))
  for name, value in told.items():
    interval = found[name.removeprefix('val-env/Game/')]
    assert interval.mean == pytest.approx(value, abs=1e-9)
    assert math.isnan(interval.low) or interval.low <= interval.mean <= interval.high
  assert found['pass@1'].mean == found['success'].mean == pytest.approx(10 / 24)
  assert found['pass@2'].mean == pytest.approx((0 + 1 / 2 + 1 + 5 / 6 + 0 + 1) / 6)
  assert found['response_length'].mean == pytest.approx(7 * sum(len(e.turns) for e in episodes) / 24)
  assert found['optimal'].mean == pytest.approx(0.8)
  assert found['fraction_of_optimal'].mean == pytest.approx(10 / 24 / 0.8)
  assert 'optimal' not in level_intervals(episodes, size, best=np.asarray([np.nan] * 6))


@pytest.mark.parametrize('wins', [0, 2])
def test_what_never_or_always_happened_is_not_taken_for_certain(wins):
  found = level_intervals(_episodes(np.full((20,), wins), 2), 2, best=np.full((20,), 0.5))
  bound = 1 - 0.025 ** (1 / 20)  # of 20 levels none: 16.8 %
  interval = found['success']
  assert (interval.low, interval.high) == pytest.approx((0, bound) if wins == 0 else (1 - bound, 1))
  fraction = found['fraction_of_optimal']
  assert (fraction.low, fraction.high) == pytest.approx((2 * interval.low, 2 * interval.high))


def test_one_level_has_no_interval():
  found = level_intervals(_episodes(np.asarray([1]), 2), 2)
  assert found['success'].mean == 0.5 and math.isnan(found['success'].low) and math.isnan(found['score'].high)
