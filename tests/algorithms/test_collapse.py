from __future__ import annotations

import dataclasses
import math

import jax
import pytest

from ragen_jax.algorithms.collapse import EarlyStop, EarlyStopSettings, EchoTrap, EchoTrapSettings

# RAGEN-2's patience.
EARLY_STOP = EarlyStopSettings(baseline_steps=10, flat_reward_patience=10, hopeless_patience=5, empty_patience=5)
ECHO_TRAP = EchoTrapSettings(baseline_steps=10, ema_decay=0.9, min_signals=2, patience=3)

# --- early stopping ---------------------------------------------------------------------------------------------------


def reasons(stds, empty=(), **fields):
  """The verdict after each step."""
  state, out, settings = EarlyStop(), [], dataclasses.replace(EARLY_STOP, **fields)
  for i, std in enumerate(stds):
    state, metrics, reason = state.after_step(settings, reward_std=std, empty=i in empty)
    assert {name for name, x in metrics.items() if name.startswith('early_stopped/') and x} == (
      {f'early_stopped/{reason}'} if reason else set()
    )
    out.append(reason)
  return out


def test_reward_variance_collapse():
  baseline = [1.0, 3.0] * 5  # mean 2: the bound is .2
  assert reasons(baseline + [0.19] * 10) == [''] * 19 + ['reward_variance_collapse']
  assert not any(reasons(baseline + [0.21] * 30))
  assert not any(reasons(baseline + ([0.19] * 9 + [0.3]) * 3))  # in a row
  assert not any(reasons([0.0] * 40))  # nothing to lose
  assert not any(reasons([*baseline, *[0.0] * 30], flat_reward_patience=0))


def test_steps_without_update_do_not_count_for_the_baseline():
  stds = [2.0] * 3 + [100.0] * 2 + [2.0] * 7 + [0.19] * 10
  assert reasons(stds, empty=(3, 4))[-1] == 'reward_variance_collapse'
  assert reasons(stds, empty=(3, 4))[-2] == ''


def test_empty_filtered_steps():
  assert reasons([1.0] * 9, empty=range(3, 8)) == [''] * 7 + ['empty_filtered_steps', '']
  assert not any(reasons([1.0] * 9, empty=(0, 1, 2, 3, 5, 6, 7, 8)))
  assert reasons([1.0] * 3, empty_patience=2, empty=(1, 2))[-1] == 'empty_filtered_steps'
  assert not any(reasons([1.0] * 30, empty_patience=0, empty=range(30)))
  assert not any(reasons([1.0] * 30, empty=(12, 13, 14, 15, 17, 18, 19, 20)))  # in a row, behind the baseline too


@pytest.mark.parametrize(('other', 'stops'), [(0.0, True), (0.9, False)])
def test_low_validation_success(other, stops):
  """A validation is hopeless if every environment is."""
  config = EARLY_STOP
  state = EarlyStop()
  for i in range(5):
    state, metrics, reason = state.after_validation(config, {'sokoban': 0.0, 'bandit': other})
    assert bool(reason) == (stops and i == 4)
    assert metrics['early_stopped/low_validation_success'] == float(bool(reason))
  state = EarlyStop()
  for rate in (0.009, 0.0, 0.0, 0.0, 0.01, 0.0, 0.0, 0.0, 0.0):
    state, _, reason = state.after_validation(config, {'bandit': rate})
    assert reason == ''
  state, _, reason = state.after_validation(config, {'bandit': 0.0})
  assert reason == 'low_validation_success'
  assert not state.after_validation(config, {})[2]  # nothing was evaluated


# --- the Echo Trap ----------------------------------------------------------------------------------------------------

HEALTHY = {'reward_std': 1.0, 'entropy': 0.5, 'grad_norm': 2.0, 'repeats': 0.2, 'format': 0.9}


def run(steps):
  """All metrics after each step, from 10 healthy ones on."""
  state, out = EchoTrap.create(), []
  for step in [{}] * 10 + steps:
    state, metrics, warning = state.after_step(ECHO_TRAP, **(HEALTHY | step))
    assert warning == bool(metrics['echo_trap/warning'])
    assert metrics['echo_trap/signals'] == sum(metrics[f'echo_trap/{name}'] for name in HEALTHY)
    out.append(metrics)
  return out[10:]


def test_a_healthy_run_gives_no_signal():
  assert not any(metrics['echo_trap/signals'] for metrics in run([{}] * 50))


@pytest.mark.parametrize(
  ('signal', 'good', 'bad'),
  [
    ('reward_std', {'reward_std': 0.51}, {'reward_std': 0.49}),
    ('entropy', {'entropy': 0.74}, {'entropy': 0.76}),
    ('repeats', {'repeats': 0.59}, {'repeats': 0.61}),
  ],
)
def test_slow_signals_are_averages_against_baselines(signal, good, bad):
  assert not any(metrics['echo_trap/signals'] for metrics in run([good] * 80))
  metrics = run([bad] * 80)
  assert metrics[-1][f'echo_trap/{signal}'] == 1.0 and metrics[-1]['echo_trap/signals'] == 1.0
  assert metrics[0]['echo_trap/signals'] == 0.0  # one step is not enough
  assert not any(m['echo_trap/warning'] for m in metrics)  # nor is one signal


def test_gradient_spike_holds_for_a_while_and_does_not_hide_the_next():
  metrics = run([{'grad_norm': 10.1}] + [{}] * 12)
  assert [m['echo_trap/grad_norm'] for m in metrics] == [1.0] * 10 + [0.0] * 3
  assert not any(m['echo_trap/grad_norm'] for m in run([{'grad_norm': 9.9}]))
  assert run([{'grad_norm': math.nan}])[0]['echo_trap/grad_norm'] == 1.0
  # a spike of 1000 counts as one of 10 in the average, which is then about 2.9
  twice = run([{'grad_norm': 1000.0}] + [{}] * 10 + [{'grad_norm': 15.0}])
  assert twice[-2]['echo_trap/grad_norm'] == 0.0 and twice[-1]['echo_trap/grad_norm'] == 1.0


def test_two_signals_for_three_steps_are_a_warning():
  collapse = {'reward_std': 0.0, 'entropy': 2.0}
  metrics = run([collapse] * 20)
  both = [m['echo_trap/signals'] >= 2 for m in metrics]
  first = both.index(True)
  assert all(both[first:])
  assert [m['echo_trap/warning'] for m in metrics] == [0.0] * (first + 2) + [1.0] * (20 - first - 2)


def test_replies_that_lose_their_form_are_a_warning_by_themselves():
  assert not any(metrics['echo_trap/signals'] for metrics in run([{'format': 0.66}] * 80))
  metrics = run([{'format': 0.0}] * 10)
  # Averages of 0.77, 0.66 and 0.57 in the first three steps, and a baseline of 0.9.
  assert [m['echo_trap/format'] for m in metrics] == [0.0] * 2 + [1.0] * 8
  assert [m['echo_trap/signals'] for m in metrics] == [m['echo_trap/format'] for m in metrics]
  assert [m['echo_trap/warning'] for m in metrics] == [0.0] * 4 + [1.0] * 6
  # Form that is learnt, and lost again; and form that is lost before there are baselines.
  late = run([{'format': 1.0}] * 40 + [{'format': 0.7}] * 40)
  assert late[-1]['echo_trap/warning'] == 1.0 and not any(m['echo_trap/signals'] for m in late[:50])
  state, warned = EchoTrap.create(), []
  for share in (0.9, 0.9, 0.1, 0.0, 0.0, 0.0, 0.0):
    state, _, warning = state.after_step(ECHO_TRAP, **(HEALTHY | {'format': share}))
    warned.append(warning)
  assert warned == [False] * 4 + [True] * 3  # averages of 0.9, 0.9, 0.61, 0.43 and 0.33
  # Replies of an agent program have no form.
  assert not any(m['echo_trap/signals'] for m in run([{'format': math.nan}] * 20))


def test_a_policy_that_solves_its_task_is_not_warned():
  """Reward deviation and entropy both fall; gradients and replies stay as they are."""
  solved = [{'reward_std': 0.97**i, 'entropy': 0.5 * 0.97**i} for i in range(100)]
  metrics = run(solved)
  assert metrics[-1]['echo_trap/reward_std'] == 1.0
  assert not any(m['echo_trap/warning'] for m in metrics)


def test_no_signal_before_the_baseline_is_there():
  state = EchoTrap.create()
  for i in range(10):
    state, metrics, _ = state.after_step(
      ECHO_TRAP, reward_std=2.0**-i, entropy=2.0**i, grad_norm=100.0**i, repeats=i / 10
    )
    assert metrics['echo_trap/signals'] == 0.0


def test_states_are_trees_of_fixed_structure_for_checkpoints():
  state = EchoTrap.create()
  structure = jax.tree.structure(state)
  for _ in range(12):
    state, _, _ = state.after_step(ECHO_TRAP, **HEALTHY)
  assert jax.tree.structure(state) == structure
  assert len(jax.tree.leaves(EarlyStop())) == 5
