"""Watches a run for signs of a collapse, and gives a verdict after each iteration and each evaluation.

Checkpoints contain the state of the rules, which are those of `algorithms/collapse.py`.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from flax import serialization

from ragen_jax.algorithms.collapse import EarlyStop, EarlyStopSettings, EchoTrap, EchoTrapSettings
from ragen_jax.algorithms.diagnostics import Ema, update_emas
from ragen_jax.algorithms.spikes import Spike, Spikes, SpikeSettings

ECHO_TRAP_ACTIONS = ('warn', 'stop', 'rollback')
# The metrics of the paper's figures, which have moving averages.
_CURVES = (
  'rollout/in_group_reward_std',
  'actor/entropy',
  'actor/grad_norm',
  'response_length/mean',
  'critic/score/mean',
)
SIGNALS = tuple(f'echo_trap/{name}' for name in ('reward_std', 'entropy', 'grad_norm', 'repeats', 'format'))


@dataclasses.dataclass(frozen=True)
class MonitorSettings:
  """The responses to a collapse. Fields of `config.monitor`, and the thresholds of the rules."""

  ema_decay: float
  echo_trap: str
  max_rollbacks: int
  max_bad_iterations: int
  early_stop: EarlyStopSettings
  echo_trap_rules: EchoTrapSettings
  spikes: SpikeSettings


@dataclasses.dataclass(frozen=True)
class Verdict:
  """The action of a run after an iteration, and the reason in a few words.

  The action is 'go_on', 'warn', 'stop', 'rollback', or 'bad' for an iteration with numbers that are not finite.
  """

  action: str = 'go_on'
  reason: str = ''


class Monitor:
  """Moving averages, early stopping, the Echo-Trap warning and reports of spikes.

  `bad_iterations` counts consecutive bad iterations. Checkpoints do not contain it, because none is saved after one.
  """

  def __init__(self, settings: MonitorSettings):
    self._settings = settings
    self._emas: dict[str, Ema] = {}
    self._early_stop = EarlyStop()
    self._echo_trap = EchoTrap.create()
    self._warned = False
    self._spikes = Spikes()
    self.rollbacks = 0
    self.bad_iterations = self.all_bad_iterations = 0

  def after_iteration(self, metrics: dict[str, float], *, empty: bool) -> tuple[dict[str, float], Verdict]:
    """Updates the monitor with an iteration that played a rollout. Not called for iterations that reuse a rollout.

    `empty`: whether the filter kept no group of the fresh rollout. The result is the monitor's own metrics, and the
    verdict. A warning is given when the rule becomes true; while it stays true, the warning is not repeated.
    """
    curves = _CURVES + tuple(name for name in metrics if name.startswith('train/') and name.endswith('/success'))
    self._emas, own = update_emas(self._emas, {n: metrics[n] for n in curves if n in metrics}, self._settings.ema_decay)
    std = metrics['rollout/in_group_reward_std']
    empty = empty or not math.isfinite(std)  # all environments failed
    self._early_stop, more, reason = self._early_stop.after_step(self._settings.early_stop, reward_std=std, empty=empty)
    own |= more
    fresh = False
    if not empty and 'actor/entropy' in metrics:  # without it, only the critic was trained
      self._echo_trap, more, warning = self._echo_trap.after_step(
        self._settings.echo_trap_rules,
        reward_std=std,
        entropy=metrics['actor/entropy'],
        grad_norm=metrics['actor/grad_norm'],
        repeats=metrics['rollout/repeated_replies'],
        format=metrics.get('train/format_correct', math.nan),
      )
      own |= more
      fresh, self._warned = warning and not self._warned, warning
    if reason:
      return own, Verdict('stop', reason)
    if not fresh:
      return own, Verdict()
    signals = ', '.join(n.removeprefix('echo_trap/') for n in SIGNALS if own[n])
    return own, self._respond(f'the Echo Trap shows in {signals}')

  def after_update(self, metrics: dict[str, float]) -> tuple[dict[str, float], list[Spike]]:
    """`monitor/<name>_spike`, and the spikes that begin in this iteration; called if all its numbers are finite."""
    self._spikes, own, begun = self._spikes.after_step(self._settings.spikes, metrics)
    return own, begun

  def _respond(self, reason: str) -> Verdict:
    action = self._settings.echo_trap
    if action == 'rollback' and self.rollbacks >= self._settings.max_rollbacks:
      return Verdict('stop', f'{reason}, after {self.rollbacks} rollbacks')
    return Verdict(action, reason)

  def after_evaluation(self, success: dict[str, float]) -> tuple[dict[str, float], Verdict]:
    """Updates the monitor with the success rate of each tag; returns the monitor's metrics and the verdict."""
    self._early_stop, own, reason = self._early_stop.after_validation(self._settings.early_stop, success)
    return own, Verdict('stop', reason) if reason else Verdict()

  def after_numbers(self, not_finite: str) -> str:
    """Counts consecutive iterations with numbers that are not finite; called after every iteration.

    `not_finite` is text about these numbers; '' if all are finite. The answer is 'go_on', 'bad', or after
    `max_bad_iterations` consecutive bad iterations 'rollback' or 'stop'.
    """
    self.bad_iterations = self.bad_iterations + 1 if not_finite else 0
    self.all_bad_iterations += bool(not_finite)
    if self.bad_iterations < self._settings.max_bad_iterations:
      return 'bad' if not_finite else 'go_on'
    may = self._settings.echo_trap == 'rollback' and self.rollbacks < self._settings.max_rollbacks
    return 'rollback' if may else 'stop'

  def rolled_back(self) -> None:
    """Counts a rollback, and resets averages, baselines and rules."""
    self.rollbacks += 1
    self.bad_iterations = 0
    self._emas, self._early_stop, self._echo_trap, self._warned = {}, EarlyStop(), EchoTrap.create(), False
    self._spikes = Spikes()

  def state_dict(self) -> dict[str, Any]:
    """The whole state, as JSON values."""
    return {
      'emas': {name: serialization.to_state_dict(ema) for name, ema in self._emas.items()},
      'early_stop': serialization.to_state_dict(self._early_stop),
      'echo_trap': serialization.to_state_dict(self._echo_trap),
      'warned': self._warned,
      'rollbacks': self.rollbacks,
      'spikes': self._spikes.state_dict(),
      'bad_iterations': self.all_bad_iterations,
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Restores the state from `state_dict`.

    Checkpoints of earlier versions lack spikes, bad iterations and the signal `format`, which then has no baseline.
    """
    self._emas = {name: serialization.from_state_dict(Ema(), ema) for name, ema in state['emas'].items()}
    self._early_stop = serialization.from_state_dict(EarlyStop(), state['early_stop'])
    known = serialization.to_state_dict(EchoTrap.create())
    saved = {name: x | state['echo_trap'][name] if isinstance(x, dict) else state['echo_trap'][name]
             for name, x in known.items()}  # fmt: skip
    self._echo_trap = serialization.from_state_dict(EchoTrap.create(), saved)
    self._warned, self.rollbacks = state['warned'], state['rollbacks']
    self._spikes = Spikes.from_state_dict(state['spikes']) if 'spikes' in state else Spikes()
    self.all_bad_iterations = state.get('bad_iterations', 0)
