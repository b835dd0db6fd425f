"""Warnings, stops and rollbacks: by hand-made metrics, and in a run that is made to collapse."""

from __future__ import annotations

import json

import numpy as np
import pytest

from ragen_jax import train
from ragen_jax.runs.metrics import read_metrics
from ragen_jax.training.monitor import Monitor
from tests.support import builders


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
  monitor = Monitor(builders.small_config(monitor__echo_trap=action))
  step, verdict = _collapse(monitor)
  assert 12 <= step < 30 and verdict.action == action
  assert 'reward_std' in verdict.reason and 'repeats' in verdict.reason
  assert monitor.after_iteration(_metrics(std=0.0, repeats=0.95), empty=False)[1].action == 'go_on'  # said already


def test_a_healthy_run_is_left_alone():
  monitor = Monitor(builders.small_config())
  rng = np.random.default_rng(0)
  for _ in range(100):
    noisy = {name: x * rng.uniform(0.7, 1.3) for name, x in _metrics().items()}
    assert monitor.after_iteration(noisy, empty=False)[1].action == 'go_on'


def test_rollbacks_are_counted_and_end():
  monitor = Monitor(builders.small_config(monitor__echo_trap='rollback', monitor__max_rollbacks=1))
  assert _collapse(monitor)[1].action == 'rollback'
  monitor.rolled_back()
  assert monitor.lr_scale == 0.5
  assert _collapse(monitor)[1].action == 'stop'


def test_rules_that_stop():
  monitor = Monitor(builders.small_config(monitor__flat_reward_patience=3, monitor__echo_trap='warn'))
  verdicts = [monitor.after_iteration(_metrics(std=0.4 if i < 10 else 0.001), empty=False)[1] for i in range(13)]
  assert [v.action for v in verdicts] == ['go_on'] * 12 + ['stop']
  assert verdicts[-1].reason == 'reward_variance_collapse'
  monitor = Monitor(builders.small_config(monitor__empty_patience=2))
  actions = [monitor.after_iteration(_metrics(), empty=True)[1].action for _ in range(2)]
  assert actions == ['go_on', 'stop']
  monitor = Monitor(builders.small_config(monitor__hopeless_patience=2))
  assert monitor.after_evaluation({'a': 0.0, 'b': 0.5})[1].action == 'go_on'  # not in all environments
  assert [monitor.after_evaluation({'a': 0.0, 'b': 0.0})[1].action for _ in range(2)] == ['go_on', 'stop']


def test_averages_are_logged_and_a_checkpoint_keeps_everything():
  config = builders.small_config(monitor__ema_decay=0.5)
  whole, first = Monitor(config), Monitor(config)
  rng = np.random.default_rng(1)
  values = [_metrics(std=s, norm=n) for s, n in rng.uniform(0.1, 1, size=(20, 2))]
  for m in values[:12]:
    whole.after_iteration(m, empty=False)
    first.after_iteration(m, empty=False)
  second = Monitor(config)
  second.load_state_dict(json.loads(json.dumps(first.state_dict())))
  for m in values[12:]:
    assert whole.after_iteration(m, empty=False) == second.after_iteration(m, empty=False)
  own, _ = whole.after_iteration(_metrics(), empty=False)
  weights = 0.5 ** np.arange(21)
  expected = np.dot(weights, [0.4] + [m['rollout/in_group_reward_std'] for m in reversed(values)]) / weights.sum()
  assert own['rollout/in_group_reward_std_ema'] == pytest.approx(expected)
  assert 'train/FrozenLake/success_ema' in own and 'response_length/mean_ema' not in own


def _sick(monkeypatch, when):
  """Makes the metrics of a real run look like a collapse from iteration `when` on."""
  healthy = train.Trainer.rollout_metrics
  seen = []

  def rollout_metrics(self, rollout):
    metrics = healthy(self, rollout)
    seen.append(1)
    sick = {'rollout/in_group_reward_std': 0.0, 'rollout/repeated_replies': 1.0}
    return metrics | (
      sick if len(seen) > when else {'rollout/in_group_reward_std': 0.5, 'rollout/repeated_replies': 0.0}
    )

  monkeypatch.setattr(train.Trainer, 'rollout_metrics', rollout_metrics)


def _run_config(action):
  return builders.small_config(
    num_iterations=6, eval__every=2, eval__greedy_too=False, eval__groups=4, monitor__echo_trap=action,
    monitor__baseline_steps=2, monitor__patience=1, monitor__ema_decay=0.0, checkpoint__every=2,
  )  # fmt: skip


def test_a_run_that_stops_is_evaluated_saved_and_stays_stopped(tmp_path, monkeypatch, capsys):
  _sick(monkeypatch, when=2)
  train.train_and_evaluate(_run_config('stop'), str(tmp_path))
  lines = read_metrics(tmp_path)
  assert [line['step'] for line in lines] == [0, 1, 2, 3]
  assert 'val-env/success' in lines[-1] and lines[-1]['echo_trap/warning'] == 1
  assert 'the Echo Trap shows in reward_std, repeats; the run ends here' in capsys.readouterr().err
  before = (tmp_path / 'metrics.jsonl').read_text()
  train.train_and_evaluate(_run_config('stop'), str(tmp_path))
  assert (tmp_path / 'metrics.jsonl').read_text() == before


def test_a_rollback_goes_on_from_the_best_checkpoint_with_a_smaller_step(tmp_path, monkeypatch, capsys):
  _sick(monkeypatch, when=2)
  restored = []
  original = train.Checkpointer.restore

  def restore(self, like, step=None, partial=False):
    restored.append(step)
    return original(self, like, step, partial)

  monkeypatch.setattr(train.Checkpointer, 'restore', restore)
  updated = []
  update = train.Trainer.update

  def spy(self, params, *rest):
    updated.append(np.array(params['policy']['embed_tokens'][...]))
    return update(self, params, *rest)

  monkeypatch.setattr(train.Trainer, 'update', spy)
  train.train_and_evaluate(_run_config('rollback'), str(tmp_path))
  lines = read_metrics(tmp_path)
  assert restored == [2]
  assert [line.get('train/lr_scale') for line in lines] == [None, 1.0, 1.0, 1.0, 0.5, 0.5, 0.5]
  # Iteration 3 collapsed: the fourth update begins, as the third did, with the weights of step 2.
  np.testing.assert_array_equal(updated[3], updated[2])
  assert (updated[4] != updated[3]).any()
  assert 'back to 2, learning rate x 0.5' in capsys.readouterr().err
