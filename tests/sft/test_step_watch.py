"""What is found in the metrics of a warm start's steps, read a few steps at a time."""

from __future__ import annotations

import json

import pytest

from ragen_jax.algorithms.spikes import SpikeSettings
from ragen_jax.sft.step_watch import GRAD_NORM, LOSS, VALUE_LOSS, StepWatch, WatchSettings, diverged
from ragen_jax.utils.errors import Diverged

_RULES = WatchSettings(max_bad_iterations=3, spikes=SpikeSettings(spike_factor=10.0, baseline_steps=4))


def _watch():
  """Steps have the metrics 'loss', 'norm' and 'bad', a text."""
  return StepWatch(_RULES, lambda m: m['bad'], lambda m: {LOSS: m['loss'], GRAD_NORM: m['norm']})


def _read(watch, steps, every):
  """The results of `read` after every so many steps; steps are (loss, norm, text)."""
  found = []
  for i, (loss, norm, bad) in enumerate(steps, 1):
    watch.add(i, {'loss': loss, 'norm': norm, 'bad': bad})
    if i % every == 0:
      found.append(watch.read())
  return found


@pytest.mark.parametrize('every', [1, 2, 4])
def test_spikes_do_not_depend_on_when_steps_are_read(every):
  steps = [(1.0, 2.0, '')] * 4 + [(10.5, 2.0, ''), (10.5, 2.0, ''), (1.0, 30.0, ''), (1.0, 2.0, '')]
  found = _read(_watch(), steps, every)
  spikes = [(step, s.metric, s.value, s.usual) for part in found for step, s in part.spikes]
  assert spikes == [(5, LOSS, 10.5, 1.0), (7, GRAD_NORM, 30.0, 2.0)]
  flags = [(part.metrics['monitor/loss_spike'], part.metrics['monitor/grad_norm_spike']) for part in found]
  wanted = [(0, 0)] * 4 + [(1, 0), (1, 0), (0, 1), (0, 0)]
  assert flags == [tuple(map(max, zip(*wanted[i : i + every], strict=True))) for i in range(0, 8, every)]


def test_the_usual_values_go_on_after_a_stop():
  whole, before, after = _watch(), _watch(), _watch()
  steps = [(1.0, 2.0, '')] * 4 + [(25.0, 2.0, '')]
  _read(before, steps[:4], 2)
  after.load_state_dict(json.loads(json.dumps(before.state_dict())))
  assert _read(after, steps[4:], 1)[0].metrics == _read(whole, steps, 5)[0].metrics
  assert _read(_watch(), steps[4:], 1)[0].spikes == []  # nothing is usual without the steps before


def test_skipped_steps_are_read_up_to_the_one_that_ends_the_warm_start():
  nan = float('nan')
  watch = _watch()
  steps = [(1.0, 1.0, ''), (nan, nan, 'first'), (1.0, 1.0, ''), (nan, nan, 'second'), (nan, nan, 'third')]
  (found,) = _read(watch, steps, 5)
  assert (found.skipped, found.reason, found.spikes) == ([2, 4, 5], 'first', [])
  assert (watch.skipped_in_a_row, watch.too_many, watch.reason) == (2, False, 'first')
  watch.add(6, {'loss': nan, 'norm': nan, 'bad': 'fourth'})
  watch.add(7, {'loss': 1.0, 'norm': 1.0, 'bad': ''})
  found = watch.read()
  assert (found.skipped, found.reason, watch.too_many, watch.reason) == ([6], 'fourth', True, 'fourth')


def test_a_value_loss_is_watched_too():
  watch = StepWatch(_RULES, lambda m: '', lambda m: m)
  for step, x in enumerate([1.0, 1.0, 1.0, 1.0, 99.0], 1):
    watch.add(step, {VALUE_LOSS: x})
  ((step, spike),) = watch.read().spikes
  assert (step, spike.metric) == (5, VALUE_LOSS)


@pytest.mark.parametrize(('good', 'left'), [(None, 'there is no checkpoint'), (40, 'that of step 40,')])
def test_the_error_of_a_warm_start_says_what_is_left(good, left):
  error = diverged(50, 'not finite: the loss', good)
  assert isinstance(error, Diverged) and str(error).startswith('step 50: not finite: the loss; ') and left in str(error)
