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


@dataclasses.dataclass(frozen=True)
class EarlyStopConfig:
  """The rules' thresholds. RAGEN-2's values, which it does not let one change; a patience of 0 switches a rule off.

  Attributes:
    baseline_steps: the first steps, over which the baseline of the in-group reward deviation is the mean.
    std_fraction: a step is collapsed when its deviation is below this fraction of the baseline.
    std_patience: collapsed steps in a row until the run stops.
    min_success: a validation is hopeless when its success rate is below this.
    success_patience: hopeless validations in a row until the run stops.
    hopeless: 'all', a validation is hopeless when every environment is; 'any', when one is (as RAGEN-2 has it, where
      one hopeless environment of several ends the run).
    empty_patience: steps in a row of which the filter left nothing, until the run stops.
  """

  baseline_steps: int = 10
  std_fraction: float = 0.1
  std_patience: int = 10
  min_success: float = 0.01
  success_patience: int = 5
  hopeless: str = 'all'
  empty_patience: int = 5


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
    self, config: EarlyStopConfig, *, reward_std: float, empty: bool = False
  ) -> tuple[EarlyStop, dict[str, float], str]:
    """Takes in one iteration.

    Args:
      config: the thresholds.
      reward_std: mean in-group deviation of raw rewards, before any filter.
      empty: the filter left nothing, so that there was no update; only its own rule looks at such a step.

    Returns:
      (state, metrics, reason): the reason is 'reward_variance_collapse', 'empty_filtered_steps', or '' to go on.
      Metrics are `early_stopped/<reason>`, 1 where the rule ends the run, and the counts in a row.
    """
    if empty:
      state = self.replace(empty=self.empty + 1)
    elif self.steps < config.baseline_steps:
      mean = self.baseline + (float(reward_std) - self.baseline) / (self.steps + 1)
      state = self.replace(steps=self.steps + 1, baseline=mean, empty=0)
    else:
      low = reward_std < config.std_fraction * self.baseline
      state = self.replace(collapsed=self.collapsed + 1 if low else 0, empty=0)
    stops = {
      'reward_variance_collapse': 0 < config.std_patience <= state.collapsed,
      'empty_filtered_steps': 0 < config.empty_patience <= state.empty,
    }
    metrics = {f'early_stopped/{name}': float(stop) for name, stop in stops.items()}
    metrics['rollout/consecutive_collapsed_steps'] = float(state.collapsed)
    metrics['rollout/consecutive_empty_after_filter_steps'] = float(state.empty)
    return state, metrics, next((name for name, stop in stops.items() if stop), '')

  def after_validation(
    self, config: EarlyStopConfig, success: Mapping[str, float]
  ) -> tuple[EarlyStop, dict[str, float], str]:
    """Takes in one validation.

    Args:
      config: the thresholds.
      success: success rate in [0, 1] of each environment.

    Returns:
      (state, metrics, reason): the reason is 'low_validation_success' or ''.

    Raises:
      ValueError: `hopeless` is neither 'any' nor 'all'.
    """
    if config.hopeless not in ('any', 'all'):
      raise ValueError(f'early_stop.hopeless is {config.hopeless!r}; it may be one of any, all')
    low = [rate < config.min_success for rate in success.values()]
    bad = bool(low) and (any(low) if config.hopeless == 'any' else all(low))
    state = self.replace(hopeless=self.hopeless + 1 if bad else 0)
    stop = 0 < config.success_patience <= state.hopeless
    metrics = {
      'early_stopped/low_validation_success': float(stop),
      'val-env/consecutive_hopeless': float(state.hopeless),
    }
    return state, metrics, 'low_validation_success' if stop else ''


# --- the Echo Trap ----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class EchoTrapConfig:
  """When a signal of the Echo Trap counts.

  Attributes:
    baseline_steps: the first steps, over which baselines are means; no signal counts before they are over.
    decay: of the averages that are compared with the baselines, in [0, 1).
    std_fraction: reward deviation: the average is below this fraction of its baseline.
    entropy_factor: entropy: the average is above this multiple of its baseline.
    grad_factor: gradient norm: the step's is above this multiple of the average of the steps before.
    repeat_fraction: repeated templates: the average has gone this fraction of the way from its baseline to 1.
    hold: steps for which a gradient spike stays counted.
    min_signals: signals at once that make a warning.
    patience: steps in a row with that many, until the warning is given.
  """

  baseline_steps: int = 10
  decay: float = 0.9
  std_fraction: float = 0.5
  entropy_factor: float = 1.5
  grad_factor: float = 5.0
  repeat_fraction: float = 0.5
  hold: int = 10
  min_signals: int = 2
  patience: int = 3


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
    self, config: EchoTrapConfig, *, reward_std: float, entropy: float, grad_norm: float, repeats: float
  ) -> tuple[EchoTrap, dict[str, float], bool]:
    """Takes in one iteration.

    Args:
      config: the thresholds.
      reward_std: mean in-group deviation of raw rewards, before any filter (`in_group_reward`).
      entropy: mean entropy of the policy on sampled tokens, in nats.
      grad_norm: the policy's global gradient norm before clipping.
      repeats: the share of repeated replies (`repeated_replies`).

    Returns:
      (state, metrics, warning). Metrics are `echo_trap/<signal>` 0 or 1, `echo_trap/signals` their number, and
      `echo_trap/warning`.
    """
    seen = {'reward_std': reward_std, 'entropy': entropy, 'repeats': repeats}
    learning = self.steps < config.baseline_steps
    usual = self.averages['grad_norm'].value
    spike = not learning and (not math.isfinite(grad_norm) or grad_norm > config.grad_factor * usual)
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
    averages = {name: self.averages[name].update(x, config.decay) for name, x in seen.items()}
    entering = min(grad_norm, config.grad_factor * usual) if spike else grad_norm
    averages['grad_norm'] = self.averages['grad_norm'].update(entering, config.decay)

    base = {name: b.value for name, b in baselines.items()}
    now = {name: averages[name].value for name in seen}
    signals = {
      'reward_std': now['reward_std'] < config.std_fraction * base['reward_std'],
      'entropy': now['entropy'] > config.entropy_factor * base['entropy'],
      'grad_norm': 0 <= since < config.hold,
      'repeats': now['repeats'] > base['repeats'] + config.repeat_fraction * (1.0 - base['repeats']),
    }
    signals = {name: bool(on) and not learning for name, on in signals.items()}
    count = sum(signals.values())
    in_a_row = self.in_a_row + 1 if count >= config.min_signals else 0
    warning = in_a_row >= config.patience
    state = EchoTrap(self.steps + 1, baselines, averages, since, in_a_row)
    metrics = {f'echo_trap/{name}': float(on) for name, on in signals.items()}
    return state, metrics | {'echo_trap/signals': float(count), 'echo_trap/warning': float(warning)}, warning
