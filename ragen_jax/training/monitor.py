"""Watches a run for signs of a collapse, and says what is to be done about them.

The rules are those of `algorithms/collapse.py`; this holds their state from one iteration to the next, also through a
checkpoint, and turns the config into their thresholds.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

from flax import serialization
from ml_collections import ConfigDict

from ragen_jax.algorithms.collapse import EarlyStop, EarlyStopConfig, EchoTrap, EchoTrapConfig
from ragen_jax.algorithms.diagnostics import Ema, update_emas

ECHO_TRAP_ACTIONS = ('warn', 'stop', 'rollback')
# The curves of the paper's figures, which get a moving average.
_CURVES = (
  'rollout/in_group_reward_std',
  'actor/entropy',
  'actor/grad_norm',
  'response_length/mean',
  'critic/score/mean',
)
_SIGNALS = tuple(f'echo_trap/{name}' for name in ('reward_std', 'entropy', 'grad_norm', 'repeats'))


@dataclasses.dataclass(frozen=True)
class Verdict:
  """What is to be done after an iteration.

  Attributes:
    action: 'go_on', 'warn', 'stop' or 'rollback'.
    reason: in a few words, '' where the run just goes on.
  """

  action: str = 'go_on'
  reason: str = ''


class Monitor:
  """Moving averages, early stopping and the Echo-Trap warning.

  Attributes:
    lr_scale: what learning rates are multiplied with, below 1 after a rollback.
    rollbacks: how many there were.
  """

  def __init__(self, config: ConfigDict):
    """Starts with nothing seen; reads `config.monitor`."""
    m = config.monitor
    self._config = m
    self._stop_rules = EarlyStopConfig(
      baseline_steps=m.baseline_steps,
      std_patience=m.flat_reward_patience,
      success_patience=m.hopeless_patience,
      empty_patience=m.empty_patience,
    )
    self._echo_rules = EchoTrapConfig(
      baseline_steps=m.baseline_steps, decay=m.ema_decay, min_signals=m.min_signals, patience=m.patience
    )
    self._emas: dict[str, Ema] = {}
    self._early_stop = EarlyStop()
    self._echo_trap = EchoTrap.create()
    self._warned = False
    self.lr_scale = 1.0
    self.rollbacks = 0

  def after_iteration(self, metrics: dict[str, float], *, empty: bool) -> tuple[dict[str, float], Verdict]:
    """Takes in an iteration that played a rollout; those that learn from it again (`train.online_k`) are left out.

    Args:
      metrics: the iteration's, by name.
      empty: the filter left nothing of the fresh rollout.

    Returns:
      Metrics of its own, and what is to be done. A warning is given when the rule is first met, and again only after
      it was not.
    """
    curves = _CURVES + tuple(name for name in metrics if name.startswith('train/') and name.endswith('/success'))
    self._emas, own = update_emas(self._emas, {n: metrics[n] for n in curves if n in metrics}, self._config.ema_decay)
    std = metrics['rollout/in_group_reward_std']
    empty = empty or not math.isfinite(std)  # every environment failed
    self._early_stop, more, reason = self._early_stop.after_step(self._stop_rules, reward_std=std, empty=empty)
    own |= more
    warning = False
    if not empty and 'actor/entropy' in metrics:  # or the critic alone was trained
      self._echo_trap, more, warning = self._echo_trap.after_step(
        self._echo_rules,
        reward_std=std,
        entropy=metrics['actor/entropy'],
        grad_norm=metrics['actor/grad_norm'],
        repeats=metrics['rollout/repeated_replies'],
      )
      own |= more
    if reason:
      return own, Verdict('stop', reason)
    fresh, self._warned = warning and not self._warned, warning
    if not fresh:
      return own, Verdict()
    signals = ', '.join(n.removeprefix('echo_trap/') for n in _SIGNALS if own[n])
    return own, self._respond(f'the Echo Trap shows in {signals}')

  def _respond(self, reason: str) -> Verdict:
    action = self._config.echo_trap
    if action == 'rollback' and self.rollbacks >= self._config.max_rollbacks:
      return Verdict('stop', f'{reason}, after {self.rollbacks} rollbacks')
    return Verdict(action, reason)

  def after_evaluation(self, success: dict[str, float]) -> tuple[dict[str, float], Verdict]:
    """Takes in an evaluation's success by tag."""
    self._early_stop, own, reason = self._early_stop.after_validation(self._stop_rules, success)
    return own, Verdict('stop', reason) if reason else Verdict()

  def rolled_back(self) -> None:
    """The run goes on from an earlier state, with a smaller step; averages and baselines begin anew."""
    self.rollbacks += 1
    self.lr_scale *= self._config.rollback_lr
    self._emas, self._early_stop, self._echo_trap, self._warned = {}, EarlyStop(), EchoTrap.create(), False

  def state_dict(self) -> dict[str, Any]:
    """All of it, as JSON."""
    return {
      'emas': {name: serialization.to_state_dict(ema) for name, ema in self._emas.items()},
      'early_stop': serialization.to_state_dict(self._early_stop),
      'echo_trap': serialization.to_state_dict(self._echo_trap),
      'warned': self._warned,
      'lr_scale': self.lr_scale,
      'rollbacks': self.rollbacks,
    }

  def load_state_dict(self, state: dict[str, Any]) -> None:
    """Goes on where `state_dict` was taken."""
    self._emas = {name: serialization.from_state_dict(Ema(), ema) for name, ema in state['emas'].items()}
    self._early_stop = serialization.from_state_dict(EarlyStop(), state['early_stop'])
    self._echo_trap = serialization.from_state_dict(EchoTrap.create(), state['echo_trap'])
    self._warned, self.lr_scale, self.rollbacks = state['warned'], state['lr_scale'], state['rollbacks']
