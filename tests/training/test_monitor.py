"""Warnings, stops and rollbacks by hand-made metrics; test_run.py has a run that is made to collapse."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ragen_jax import build
from tests.support.configs import small_config


def _metrics(std=0.4, entropy=0.5, norm=1.0, repeats=0.1):
  return {
    'rollout/in_group_reward_std': std,
    'actor/entropy': entropy,
    'actor/grad_norm': norm,
    'rollout/repeated_replies': repeats,
    'critic/score/mean': 0.3,
    'train/FrozenLake/success': 0.3,
  }


def _collapse(monitor, steps=40):
  """The first verdict that is not go_on, of a run whose rewards stop to vary and whose replies become one."""
  for step in range(steps):
    sick = step >= 10
    _, verdict = monitor.after_iteration(_metrics(std=0.0 if sick else 0.4, repeats=0.95 if sick else 0.1), empty=False)
    if verdict.action != 'go_on':
      return step, verdict
  return None, verdict


@pytest.mark.parametrize('action', ['warn', 'stop', 'rollback'])
def test_a_collapse_is_answered_as_the_config_says_and_once(action):
  monitor = build.make_monitor(small_config(monitor__echo_trap=action))
  step, verdict = _collapse(monitor)
  assert 12 <= step < 30 and verdict.action == action
  assert 'reward_std' in verdict.reason and 'repeats' in verdict.reason
  assert monitor.after_iteration(_metrics(std=0.0, repeats=0.95), empty=False)[1].action == 'go_on'  # said already


def test_an_iteration_without_an_update_does_not_repeat_the_warning():
  monitor = build.make_monitor(small_config(monitor__echo_trap='warn'))
  assert _collapse(monitor)[1].action == 'warn'
  for _ in range(3):
    assert monitor.after_iteration(_metrics(std=0.0, repeats=0.95), empty=True)[1].action == 'go_on'
    assert monitor.after_iteration(_metrics(std=0.0, repeats=0.95), empty=False)[1].action == 'go_on'


def test_a_healthy_run_is_left_alone():
  monitor = build.make_monitor(small_config())
  rng = np.random.default_rng(0)
  for _ in range(100):
    noisy = {name: x * rng.uniform(0.7, 1.3) for name, x in _metrics().items()}
    assert monitor.after_iteration(noisy, empty=False)[1].action == 'go_on'


def test_rollbacks_are_counted_and_end():
  monitor = build.make_monitor(small_config(monitor__echo_trap='rollback', monitor__max_rollbacks=1))
  assert _collapse(monitor)[1].action == 'rollback'
  monitor.rolled_back()
  assert monitor.rollbacks == 1
  assert _collapse(monitor)[1].action == 'stop'


def test_rules_that_stop():
  monitor = build.make_monitor(small_config(monitor__flat_reward_patience=3, monitor__echo_trap='warn'))
  verdicts = [monitor.after_iteration(_metrics(std=0.4 if i < 10 else 0.001), empty=False)[1] for i in range(13)]
  assert [v.action for v in verdicts] == ['go_on'] * 12 + ['stop']
  assert verdicts[-1].reason == 'reward_variance_collapse'
  monitor = build.make_monitor(small_config(monitor__empty_patience=2))
  actions = [monitor.after_iteration(_metrics(), empty=True)[1].action for _ in range(2)]
  assert actions == ['go_on', 'stop']
  monitor = build.make_monitor(small_config(monitor__hopeless_patience=2))
  assert monitor.after_evaluation({'a': 0.0, 'b': 0.5})[1].action == 'go_on'  # not in all environments
  assert [monitor.after_evaluation({'a': 0.0, 'b': 0.0})[1].action for _ in range(2)] == ['go_on', 'stop']


def test_averages_are_logged_and_a_checkpoint_keeps_everything():
  config = small_config(monitor__ema_decay=0.5)
  whole, first = build.make_monitor(config), build.make_monitor(config)
  rng = np.random.default_rng(1)
  values = [_metrics(std=s, norm=n) for s, n in rng.uniform(0.1, 1, size=(20, 2))]
  for m in values[:12]:
    whole.after_iteration(m, empty=False)
    first.after_iteration(m, empty=False)
  second = build.make_monitor(config)
  second.load_state_dict(json.loads(json.dumps(first.state_dict())))
  for m in values[12:]:
    assert whole.after_iteration(m, empty=False) == second.after_iteration(m, empty=False)
  own, _ = whole.after_iteration(_metrics(), empty=False)
  weights = 0.5 ** np.arange(21)
  expected = np.dot(weights, [0.4] + [m['rollout/in_group_reward_std'] for m in reversed(values)]) / weights.sum()
  assert own['rollout/in_group_reward_std_ema'] == pytest.approx(expected)
  assert 'train/FrozenLake/success_ema' in own and 'response_length/mean_ema' not in own


def test_each_rollback_counts_also_after_a_restart():
  config = small_config(monitor__echo_trap='rollback', monitor__max_rollbacks=2)
  monitor = build.make_monitor(config)
  for count in (1, 2):
    assert _collapse(monitor)[1].action == 'rollback'
    monitor.rolled_back()
    resumed = build.make_monitor(config)
    resumed.load_state_dict(monitor.state_dict())
    assert monitor.rollbacks == resumed.rollbacks == count
    monitor = resumed
  verdict = _collapse(monitor)[1]
  assert verdict.action == 'stop' and verdict.reason.endswith('after 2 rollbacks')


def test_spikes_are_told_once_and_forgotten_after_a_rollback():
  monitor = build.make_monitor(small_config(monitor__baseline_steps=3, monitor__spike_factor=4.0))

  def after(norm):
    own, spikes = monitor.after_update(_metrics(norm=norm))
    assert set(own) == {'monitor/grad_norm_spike'} and own['monitor/grad_norm_spike'] in (0, 1)
    return own['monitor/grad_norm_spike'], [str(s) for s in spikes]

  assert [after(1.0) for _ in range(3)] == [(0, [])] * 3
  assert after(4.0) == (0, []) and after(5.0) == (1, ['actor/grad_norm is 5, 5.0 times its usual 1'])
  assert after(90.0)[0] == 1 and after(90.0)[0] == 1  # it lasts, and then it is usual
  monitor.rolled_back()
  assert after(1000.0) == (0, [])
  off = build.make_monitor(small_config(monitor__baseline_steps=1, monitor__spike_factor=0.0))
  assert [off.after_update(_metrics(norm=x)) for x in (1.0, 1e9)] == [({}, [])] * 2


def test_a_checkpoint_keeps_spikes_and_bad_iterations_and_an_earlier_one_lacks_them():
  config = small_config(monitor__baseline_steps=2)
  first, second, old = (build.make_monitor(config) for _ in range(3))
  for norm in (1.0, 2.0, 100.0):
    first.after_update(_metrics(norm=norm))
  for text in ('bad', 'bad', ''):
    first.after_numbers(text)
  state = json.loads(json.dumps(first.state_dict()))
  second.load_state_dict(state)
  assert second.all_bad_iterations == 2 and second.bad_iterations == 0
  found = second.after_update(_metrics(norm=1000.0))
  assert found == first.after_update(_metrics(norm=1000.0)) == ({'monitor/grad_norm_spike': 1.0}, [])  # told already
  del state['spikes'], state['bad_iterations']
  for kind in ('baselines', 'averages'):
    del state['echo_trap'][kind]['format']
  old.load_state_dict(state)
  assert old.all_bad_iterations == 0 and old.after_update(_metrics(norm=1000.0))[1] == []


def test_replies_that_lose_their_form_are_told():
  monitor, told = build.make_monitor(small_config()), []
  for share in (1.0, 1.0, 0.0, 0.0, 0.0, 0.0):
    metrics = {
      'rollout/in_group_reward_std': 1.0, 'actor/entropy': 0.5, 'actor/grad_norm': 1.0,
      'rollout/repeated_replies': 0.1, 'train/format_correct': share,
    }  # fmt: skip
    told.append(monitor.after_iteration(metrics, empty=False)[1].reason)
  assert [bool(x) for x in told].count(True) == 1 and 'the Echo Trap shows in format' in told
