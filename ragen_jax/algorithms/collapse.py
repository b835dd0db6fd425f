"""Two state machines over the metrics of a run: `EarlyStop` ends the run, `EchoTrap` warns before a collapse.

States are structs of scalars, so checkpoints can contain them. Updates are pure functions on the host, from metrics to
(state, metrics, verdict).
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping

from flax import struct

from ragen_jax.algorithms.diagnostics import Ema

# --- early stopping ---------------------------------------------------------------------------------------------------


# A step is collapsed if its in-group reward deviation is below this fraction of the baseline (RAGEN-2's value).
_COLLAPSED_FRACTION = 0.1
# A validation is hopeless if the success rate of every environment is below this value (RAGEN-2's).
_HOPELESS_SUCCESS = 0.01


@dataclasses.dataclass(frozen=True)
class EarlyStopSettings:
  """The rules that stop a run.

  RAGEN-2's values are 10, 10, 5 and 5. In RAGEN-2 a validation is hopeless if one of its environments is. Fields of
  `config.monitor`.
  """

  baseline_steps: int
  flat_reward_patience: int
  hopeless_patience: int
  empty_patience: int


@struct.dataclass
class EarlyStop:
  """The state of the rules.

  Attributes:
    steps: number of steps in the baseline.
    baseline: mean of the in-group reward deviation over these steps.
    collapsed, hopeless, empty: number of consecutive times that the condition of each rule held.
  """

  steps: int = 0
  baseline: float = 0.0
  collapsed: int = 0
  hopeless: int = 0
  empty: int = 0

  def after_step(
    self, settings: EarlyStopSettings, *, reward_std: float, empty: bool = False
  ) -> tuple[EarlyStop, dict[str, float], str]:
    """Updates the state with one iteration: (state, metrics, reason).

    `reward_std` is the mean in-group deviation of raw rewards, before any filter. If `empty`, the filter kept no group,
    so there was no update; only the rule of `empty_patience` uses such a step. The reason is
    'reward_variance_collapse', 'empty_filtered_steps', or '' to continue. Metrics are `early_stopped/<reason>`, 1 if
    the rule ends the run, and the numbers of consecutive times.
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
    """Updates the state with the success rates in [0, 1] of the environments of a validation: (state, metrics, reason).

    The reason is 'low_validation_success' or ''.
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


# Thresholds of the signals, see `EchoTrap`.
_STD_FRACTION = 0.5
_ENTROPY_FACTOR = 1.5
_GRAD_FACTOR = 5.0
_REPEAT_FRACTION = 0.5
_FORMAT_FALL = 0.25
# Number of steps for which a gradient spike remains a signal.
_SPIKE_HOLD = 10


@dataclasses.dataclass(frozen=True)
class EchoTrapSettings:
  """The rule for a warning. Fields of `config.monitor`."""

  baseline_steps: int
  ema_decay: float
  min_signals: int
  patience: int


@struct.dataclass
class EchoTrap:
  """Early warning of the Echo Trap, RAGEN's name for the collapse of multi-turn RL into repeated phrases.

  The rule. The first `baseline_steps` steps give the baselines: the mean of the in-group reward deviation, of the
  entropy, and of the share of repeated replies. After them there are four signals, and a fifth from the beginning:

    reward_std   the average of the in-group deviation of raw rewards is below 0.5 of its baseline
    entropy      the average of the entropy is above 1.5 times its baseline
    grad_norm    in one of the last 10 steps, the gradient norm was above 5 times the average of the steps before it
    repeats      the average of the share of repeated replies is above the midpoint between its baseline and 1
    format       the average of the share of replies of their form is more than 0.25 below its highest value so far

  Averages are exponential moving averages with the decay `ema_decay`. A spike enters its average with the value of the
  threshold, so that it does not hide the next spike. `min_signals` signals at once, or `format` alone, for `patience`
  consecutive steps, give a warning. One of the others is not enough, because a policy that solves its task loses reward
  deviation too (and entropy, so a fall of the entropy is no signal). The trainer chooses the response to a warning. A
  value that is not finite does not change averages and baselines, but a gradient norm that is not finite counts as a
  spike.

  Attributes:
    steps: number of steps so far.
    baselines, averages: the baseline and the average of each signal. The baseline of `format` is its highest average.
    since_spike: number of steps since the last gradient spike, -1 if there was none.
    in_a_row: number of consecutive steps with enough signals.

  Source: the signals are those of RAGEN, arXiv 2504.20073, but for `format`; the thresholds are this project's.
  """

  steps: int = 0
  baselines: dict[str, Ema] = struct.field(default_factory=dict)
  averages: dict[str, Ema] = struct.field(default_factory=dict)
  since_spike: int = -1
  in_a_row: int = 0

  @classmethod
  def create(cls) -> EchoTrap:
    """The state before the first step; updates keep its tree structure."""
    slow = ('reward_std', 'entropy', 'repeats', 'format')
    return cls(baselines={name: Ema() for name in slow}, averages={name: Ema() for name in (*slow, 'grad_norm')})

  def after_step(
    self,
    settings: EchoTrapSettings,
    *,
    reward_std: float,
    entropy: float,
    grad_norm: float,
    repeats: float,
    format: float = math.nan,
  ) -> tuple[EchoTrap, dict[str, float], bool]:
    """Updates the state with one iteration: (state, metrics, warning).

    `reward_std` is the mean in-group deviation of raw rewards, before any filter (`in_group_reward`), `entropy` the
    mean over sampled tokens in nats, `grad_norm` the policy's global norm before clipping, `repeats` the share of
    `repeated_replies`, and `format` the share of replies of their form, NaN where replies have none. Metrics are
    `echo_trap/<signal>` 0 or 1, `echo_trap/signals` their number, and `echo_trap/warning`.
    """
    seen = {'reward_std': reward_std, 'entropy': entropy, 'repeats': repeats, 'format': format}
    learning = self.steps < settings.baseline_steps
    usual = self.averages['grad_norm'].value
    spike = not learning and (not math.isfinite(grad_norm) or grad_norm > _GRAD_FACTOR * usual)
    if spike:
      since = 0
    else:
      since = self.since_spike + 1 if self.since_spike >= 0 else -1

    baselines = self.baselines
    if learning:  # a plain mean
      baselines = {
        name: Ema(b.total + float(seen[name]), b.weight + 1.0) if math.isfinite(seen[name]) else b
        for name, b in baselines.items()
      } | {'format': baselines['format']}
    averages = {name: self.averages[name].update(x, settings.ema_decay) for name, x in seen.items()}
    entering = min(grad_norm, _GRAD_FACTOR * usual) if spike else grad_norm
    averages['grad_norm'] = self.averages['grad_norm'].update(entering, settings.ema_decay)

    highest, average = baselines['format'].value, averages['format'].value
    if average > highest or (math.isnan(highest) and math.isfinite(average)):
      baselines = baselines | {'format': Ema(average, 1.0)}
    base = {name: b.value for name, b in baselines.items()}
    now = {name: averages[name].value for name in seen}
    signals = {
      'reward_std': now['reward_std'] < _STD_FRACTION * base['reward_std'],
      'entropy': now['entropy'] > _ENTROPY_FACTOR * base['entropy'],
      'grad_norm': 0 <= since < _SPIKE_HOLD,
      'repeats': now['repeats'] > base['repeats'] + _REPEAT_FRACTION * (1.0 - base['repeats']),
      'format': now['format'] < base['format'] - _FORMAT_FALL,
    }
    signals = {name: bool(on) and (name == 'format' or not learning) for name, on in signals.items()}
    count = sum(signals.values())
    in_a_row = self.in_a_row + 1 if count >= settings.min_signals or signals['format'] else 0
    warning = in_a_row >= settings.patience
    state = EchoTrap(self.steps + 1, baselines, averages, since, in_a_row)
    metrics = {f'echo_trap/{name}': float(on) for name, on in signals.items()}
    return state, metrics | {'echo_trap/signals': float(count), 'echo_trap/warning': float(warning)}, warning
