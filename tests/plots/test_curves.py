"""The curves: the numbers that are drawn, and how."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ragen_jax.plots import curves as curves_lib
from ragen_jax.plots import runs as runs_lib
from tests.support.made_up_runs import read, two_algorithms


@pytest.fixture(scope='module')
def runs(tmp_path_factory):
  return two_algorithms(tmp_path_factory.mktemp('runs'))


def test_the_moving_average_is_a_weighted_mean():
  x = np.random.default_rng(0).normal(size=30)
  expected = [np.average(x[: i + 1], weights=0.9 ** np.arange(i, -1, -1)) for i in range(30)]
  np.testing.assert_allclose(curves_lib.ema(x), expected, rtol=1e-12)


def test_bands_go_from_the_lowest_to_the_highest_seed():
  rng = np.random.default_rng(1)
  seeds = [{int(s): rng.normal() for s in steps} for steps in (range(1, 9), range(1, 5), (1, 3, 8))]
  series = [(np.array(list(seed)), np.array(list(seed.values()))) for seed in seeds]
  for smooth in (True, False):
    band = curves_lib.band(series, smooth)
    assert band.steps.tolist() == list(range(1, 9)) and band.runs.tolist() == [3, 2, 3, 2, 1, 1, 1, 2]
    for i, step in enumerate(band.steps.tolist()):
      there = [seed for seed in seeds if step in seed]
      raw, lines = [seed[step] for seed in there], []
      for seed in there:
        past = [x for s, x in seed.items() if s <= step]
        lines.append(np.average(past, weights=0.9 ** np.arange(len(past))[::-1]) if smooth else seed[step])
      assert (band.raw[i], band.mean[i]) == pytest.approx((np.mean(raw), np.mean(lines)))
      assert (band.low[i], band.high[i]) == pytest.approx((min(lines), max(lines)))


def test_what_is_drawn_are_the_numbers(runs):
  curves = runs_lib.group([read(run) for run in runs])
  success, entropy = curves_lib.PANELS[0], next(p for p in curves_lib.PANELS if p.name == 'entropy')
  axes = curves_lib.draw_panels([success, entropy], curves, width=7).axes
  for axis, panel in zip(axes, (success, entropy), strict=True):
    for curve, colour in zip(curves, curves_lib.COLOURS, strict=False):
      band = curves_lib.band([run.series[panel.metric] for run in curve.runs], panel.every_iteration)
      lines = [line for line in axis.lines if line.get_color() == colour and len(line.get_xdata()) > 2]
      # The whole mean, where all seeds are there, and behind it the thinner one of those that are left.
      thick = next(line for line in lines if line.get_linewidth() == 1.5)
      whole = int((band.runs == 3).sum())
      np.testing.assert_allclose(np.array(thick.get_data()), [band.steps[:whole], band.mean[:whole]])
      thin = [line for line in lines if line.get_linewidth() == 0.8]
      assert len(thin) == (whole < len(band.steps))
      for line in thin:
        np.testing.assert_allclose(line.get_ydata(), band.mean[whole - 1 :])
  levels = [line.get_ydata()[0] for line in axes[0].lines if line.get_color() == 'black']
  assert levels == [0.49] and not [line for line in axes[1].lines if line.get_color() == 'black']
  for axis in axes:  # two warnings began, at 7 and at 15
    assert sorted({line.get_xdata()[0] for line in axis.lines if line.get_marker() == 'v'}) == [7, 15]


def test_only_gradient_norms_may_be_on_a_logarithmic_axis_which_hides_zeros_and_what_is_below(runs):
  values = np.array([-1.0, 0.0, 0.01, 0.01, 0.01, 0.3])
  for panel in curves_lib.PANELS:
    run = dataclasses.replace(read(runs[0]), series={panel.metric: (np.arange(6), values)}, marks=[])
    (axis,) = curves_lib.draw_panels([panel], [runs_lib.Curve('a', (run,))], width=3.5).axes
    assert (axis.get_yscale() == 'log') == (panel.name == 'grad_norm'), panel.name
