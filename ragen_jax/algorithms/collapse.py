"""Two small state machines over a run's metrics: `EarlyStop` ends it, `EchoTrap` warns before it collapses.

States are structs of scalars, so that a checkpoint holds them. Updates are pure: metrics in, (state, metrics, verdict)
out. They run on the host.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from flax import struct

from ragen_jax.algorithms.diagnostics import Ema

# --- early stopping ---------------------------------------------------------------------------------------------------


# A step is collapsed when its in-group reward deviation is below this fraction of the baseline (RAGEN-2's value).
_COLLAPSED_FRACTION = 0.1
# A validation is hopeless when the success rate of every environment is below this (RAGEN-2's value).
_HOPELESS_SUCCESS = 0.01


@dataclasses.dataclass(frozen=True)
class EarlyStopSettings:
  """When a run is stopped. Fields are those of `config.monitor`; a patience of 0 switches its rule off.

  RAGEN-2 has 10, 10, 5 and 5, and calls a validation hopeless if one environment of several is.

  Attributes:
    baseline_steps: number of first steps whose mean is the baseline of the in-group reward deviation.
    flat_reward_patience: collapsed steps in a row until the run stops.
    hopeless_patience: hopeless validations in a row until the run stops.
    empty_patience: steps in a row of which the filter kept nothing, until the run stops.
  """

  baseline_steps: int
  flat_reward_patience: int
  hopeless_patience: int
  empty_patience: int


@struct.dataclass
class EarlyStop:
  """Where the rules stand.

  Attributes:
    steps: steps with an update that have been counted into the baseline.
    baseline: the mean of the in-group reward deviation over them.
    collapsed, hopeless, empty: how many times in a row each rule has been met.
  """

  steps: int = 0
  baseline: float = 0.0
  collapsed: int = 0
  hopeless: int = 0
  empty: int = 0

  def after_step(
    self, settings: EarlyStopSettings, *, reward_std: float, empty: bool = False
  ) -> tuple[EarlyStop, dict[str, float], str]:
    """Takes in one iteration.

    Args:
      settings: the thresholds.
      reward_std: mean in-group deviation of raw rewards, before any filter.
      empty: the filter left nothing, so that there was no update; only its own rule looks at such a step.

    Returns:
      (state, metrics, reason): the reason is 'reward_variance_collapse', 'empty_filtered_steps', or '' to go on.
      Metrics are `early_stopped/<reason>`, 1 where the rule ends the run, and the counts in a row.
    """
    if empty:
      state = self.replace(empty=self.empty + 1)
    elif self.steps < settings.baseline_steps:
      mean = self.baseline + (float(reward_std) - self.baseline) / (self.steps + 1)
      state = self.replace(steps=self.steps + 1, baseline=mean, empty=0)
    else:
      low = reward_std < _COLLAPSED_FRACTION * self.baseline
      state = self.replace(collapsed=self.collapsed + 1 if low else 0, empty=0)
    stops = {
      'reward_variance_collapse': 0 < settings.flat_reward_patience <= state.collapsed,
      'empty_filtered_steps': 0 < settings.empty_patience <= state.empty,
    }
    metrics = {f'early_stopped/{name}': float(stop) for name, stop in stops.items()}
    metrics['rollout/consecutive_collapsed_steps'] = float(state.collapsed)
    metrics['rollout/consecutive_empty_after_filter_steps'] = float(state.empty)
    return state, metrics, next((name for name, stop in stops.items() if stop), '')

  def after_validation(
    self, settings: EarlyStopSettings, success: Mapping[str, float]
  ) -> tuple[EarlyStop, dict[str, float], str]:
    """Takes in one validation.

    Args:
      settings: the thresholds.
      success: success rate in [0, 1] of each environment.

    Returns:
      (state, metrics, reason): the reason is 'low_validation_success' or ''.
    """
    bad = bool(success) and all(rate < _HOPELESS_SUCCESS for rate in success.values())
    state = self.replace(hopeless=self.hopeless + 1 if bad else 0)
    stop = 0 < settings.hopeless_patience <= state.hopeless
    metrics = {
      'early_stopped/low_validation_success': float(stop),
      'val-env/consecutive_hopeless': float(state.hopeless),
    }
    return state, metrics, 'low_validation_success' if stop else ''


# --- the Echo Trap ----------------------------------------------------------------------------------------------------


# Thresholds of the four signals, see `EchoTrap`.
_STD_FRACTION = 0.5
_ENTROPY_FACTOR = 1.5
_GRAD_FACTOR = 5.0
_REPEAT_FRACTION = 0.5
# Steps for which a gradient spike stays counted.
_SPIKE_HOLD = 10


@dataclasses.dataclass(frozen=True)
class EchoTrapSettings:
  """When a warning is given. Fields are those of `config.monitor`.

  Attributes:
    baseline_steps: number of first steps whose means are the baselines; no signal counts before they are over.
    ema_decay: of the averages that are compared with the baselines, in [0, 1).
    min_signals: signals at once that make a warning.
    patience: steps in a row with that many signals until the warning is given.
  """

  baseline_steps: int
  ema_decay: float
  min_signals: int
  patience: int


@struct.dataclass
class EchoTrap:
  """Early warning of the Echo Trap, RAGEN's name for the collapse of multi-turn RL into repeated phrases.

  The rule. The first `baseline_steps` steps give the baselines: the mean of the in-group reward deviation, of the
  entropy, and of the share of repeated replies. From then on four signals are looked at:

    reward_std   the average of the in-group deviation of raw rewards is below 0.5 of its baseline
    entropy      the average of the entropy is above 1.5 times its baseline
    grad_norm    the gradient norm was, in one of the last 10 steps, above 5 times the average of the steps before it
    repeats      the average of the share of repeated replies is past the middle between its baseline and 1

  Averages forget with decay 0.9; a spike enters its average as if it were just at the threshold, so that it does not
  hide the next one. Two signals at once, for 3 steps in a row, are a warning; one alone is not, since a policy that
  solves its task loses reward deviation too (and entropy, which is why a fall of that is no signal). What a warning
  does (nothing, stop, roll back) is the trainer's choice. A value that is not finite leaves averages and baselines as
  they are, except that a gradient norm that is not finite is a spike.

  Attributes:
    steps: steps taken in.
    baselines, averages: by signal; `averages['grad_norm']` is that of the steps before the present one.
    since_spike: steps since the last gradient spike, -1 where there was none.
    in_a_row: steps in a row with enough signals.

  Source: the signs are those of RAGEN, arXiv 2504.20073; thresholds are this project's.
  """

  steps: int = 0
  baselines: dict[str, Ema] = struct.field(default_factory=dict)
  averages: dict[str, Ema] = struct.field(default_factory=dict)
  since_spike: int = -1
  in_a_row: int = 0

  @classmethod
  def create(cls) -> EchoTrap:
    """The state before the first step, with the structure that it keeps."""
    slow = ('reward_std', 'entropy', 'repeats')
    return cls(baselines={name: Ema() for name in slow}, averages={name: Ema() for name in (*slow, 'grad_norm')})

  def after_step(
    self, settings: EchoTrapSettings, *, reward_std: float, entropy: float, grad_norm: float, repeats: float
  ) -> tuple[EchoTrap, dict[str, float], bool]:
    """Takes in one iteration.

    Args:
      settings: the thresholds.
      reward_std: mean in-group deviation of raw rewards, before any filter (`in_group_reward`).
      entropy: mean entropy of the policy on sampled tokens, in nats.
      grad_norm: the policy's global gradient norm before clipping.
      repeats: the share of repeated replies (`repeated_replies`).

    Returns:
      (state, metrics, warning). Metrics are `echo_trap/<signal>` 0 or 1, `echo_trap/signals` their number, and
      `echo_trap/warning`.
    """
    seen = {'reward_std': reward_std, 'entropy': entropy, 'repeats': repeats}
    learning = self.steps < settings.baseline_steps
    usual = self.averages['grad_norm'].value
    spike = not learning and (not math.isfinite(grad_norm) or grad_norm > _GRAD_FACTOR * usual)
    if spike:
      since = 0
    else:
      since = self.since_spike + 1 if self.since_spike >= 0 else -1

    baselines = self.baselines
    if learning:  # a mean: every value weighs the same
      baselines = {
        name: Ema(b.total + float(seen[name]), b.weight + 1.0) if math.isfinite(seen[name]) else b
        for name, b in baselines.items()
      }
    averages = {name: self.averages[name].update(x, settings.ema_decay) for name, x in seen.items()}
    entering = min(grad_norm, _GRAD_FACTOR * usual) if spike else grad_norm
    averages['grad_norm'] = self.averages['grad_norm'].update(entering, settings.ema_decay)

    base = {name: b.value for name, b in baselines.items()}
    now = {name: averages[name].value for name in seen}
    signals = {
      'reward_std': now['reward_std'] < _STD_FRACTION * base['reward_std'],
      'entropy': now['entropy'] > _ENTROPY_FACTOR * base['entropy'],
      'grad_norm': 0 <= since < _SPIKE_HOLD,
      'repeats': now['repeats'] > base['repeats'] + _REPEAT_FRACTION * (1.0 - base['repeats']),
    }
    signals = {name: bool(on) and not learning for name, on in signals.items()}
    count = sum(signals.values())
    in_a_row = self.in_a_row + 1 if count >= settings.min_signals else 0
    warning = in_a_row >= settings.patience
    state = EchoTrap(self.steps + 1, baselines, averages, since, in_a_row)
    metrics = {f'echo_trap/{name}': float(on) for name, on in signals.items()}
    return state, metrics | {'echo_trap/signals': float(count), 'echo_trap/warning': float(warning)}, warning
