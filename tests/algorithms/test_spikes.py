"""Spikes of losses and gradient norms against the median of the values before, written out with NumPy."""

from __future__ import annotations

import json
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ragen_jax.algorithms.spikes import SERIES, Spikes, SpikeSettings

_RULE = SpikeSettings(spike_factor=10.0, baseline_steps=3)


def _run(values, rule=_RULE, metric='actor/grad_norm', state=None):
  """The state, and the metric and the begun spikes of each step."""
  state, shown, begun = state or Spikes(), [], []
  for x in values:
    state, own, spikes = state.after_step(rule, {metric: x, 'perf/throughput': 1.0})
    shown.append(own.get(f'monitor/{SERIES[metric]}_spike'))
    begun.append([(s.metric, s.value, s.usual) for s in spikes])
  return state, shown, begun


@pytest.mark.parametrize('metric', SERIES)
def test_a_value_far_above_the_usual_one_is_a_spike_that_is_told_once(metric):
  _, shown, begun = _run([1.0, -3.0, 2.0, 20.0, 20.1, 31.0, 2.0, 400.0], metric=metric)
  # The median is 2, then that of 3, 2, 20; at 31 it is 20, so 31 is no spike.
  assert shown == [0, 0, 0, 0, 0, 0, 0, 1]
  _, shown, begun = _run([1.0, -3.0, 2.0, -20.1, 31.0, 2.0, 400.0], metric=metric)
  assert shown == [0, 0, 0, 1, 1, 0, 1]
  assert begun == [[], [], [], [(metric, -20.1, 2.0)], [], [], [(metric, 400.0, 20.1)]]


def test_there_are_no_spikes_without_a_usual_value_and_none_if_the_rule_is_off():
  assert _run([1.0, 1.0, 1e9, 1.0])[1] == [0, 0, 0, 0]  # two values are not three
  assert _run([0.0, 0.0, 0.0, 5.0])[1] == [0, 0, 0, 0]  # nothing was learnt before
  state, shown, _ = _run([1.0] * 5 + [1e9], SpikeSettings(spike_factor=0.0, baseline_steps=3))
  assert shown == [None] * 6 and state == Spikes()
  assert Spikes().after_step(_RULE, {'perf/throughput': 1.0})[1] == {}  # an iteration without an update


@pytest.mark.parametrize('x', [math.nan, math.inf, -math.inf])
def test_numbers_that_are_not_finite_are_no_spikes_and_enter_no_median(x):
  state, shown, begun = _run([1.0, 1.0, 1.0, x, x, 11.0])
  assert shown == [0, 0, 0, 0, 0, 1] and begun[-1] == [('actor/grad_norm', 11.0, 1.0)]
  assert state.recent['actor/grad_norm'] == (1.0, 1.0, 11.0)


def test_the_line_names_the_value_the_usual_value_and_their_ratio():
  state, _, _ = _run([0.5, 0.5, 0.5])
  _, _, (spike,) = state.after_step(_RULE, {'actor/grad_norm': 21.0})
  assert str(spike) == 'actor/grad_norm is 21, 42.0 times its usual 0.5'


_VALUES = st.lists(st.floats(allow_nan=True, width=32), max_size=30)


@given(values=_VALUES, cut=st.integers(0, 30), steps=st.integers(1, 6), factor=st.sampled_from([1.5, 10.0]))
@settings(deadline=None, max_examples=100)
def test_the_rule_is_a_median_of_the_last_values_and_a_checkpoint_changes_nothing(values, cut, steps, factor):
  rule = SpikeSettings(factor, steps)
  expected, before = [], []
  for x in values:
    usual = float(np.median(before[-steps:])) if len(before) >= steps else 0.0
    expected.append(float(math.isfinite(x) and usual > 0 and abs(x) > factor * usual))
    if math.isfinite(x):
      before.append(abs(x))
  whole, shown, begun = _run(values, rule)
  assert shown == expected
  assert [bool(b) for b in begun] == [bool(x and not y) for x, y in zip(shown, [0, *shown], strict=False)]
  first, *_ = _run(values[:cut], rule)
  restored = Spikes.from_state_dict(json.loads(json.dumps(first.state_dict())))
  again, shown, rest = _run(values[cut:], rule, state=restored)
  assert again == whole and shown == expected[cut:] and rest == begun[cut:]


@given(values=st.lists(st.floats(0.1, 1.0), max_size=40))
@settings(deadline=None, max_examples=50)
def test_values_within_a_tenfold_range_are_no_spikes(values):
  assert not any(_run(values)[1])
