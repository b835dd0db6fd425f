"""Watches the steps of a warm start: which were skipped, and spikes of the losses and of the gradient norm.

The metrics of the steps are read from the devices only now and then, so no step waits.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import jax

from ragen_jax.algorithms.spikes import Spike, Spikes, SpikeSettings
from ragen_jax.utils.errors import Diverged

LOSS, VALUE_LOSS, GRAD_NORM = 'sft/loss', 'sft/value_loss', 'sft/grad_norm'
# Watched metric of a step -> its name in `monitor/<name>_spike`.
_SERIES = {LOSS: 'loss', VALUE_LOSS: 'value_loss', GRAD_NORM: 'grad_norm'}


@dataclasses.dataclass(frozen=True)
class WatchSettings:
  """When a warm start ends, and what it says. Fields of `config.monitor`, and the rule for spikes."""

  max_bad_iterations: int
  spikes: SpikeSettings


@dataclasses.dataclass(frozen=True)
class Watched:
  """What `StepWatch.read` found.

  Attributes:
    skipped: the skipped steps.
    reason: text about the first of them; '' if there is none.
    spikes: (step, spike) for each spike that begins.
    metrics: `monitor/<name>_spike`, 1 if a step has a spike, and 0 if none has.
  """

  skipped: list[int]
  reason: str
  spikes: list[tuple[int, Spike]]
  metrics: dict[str, float]


class StepWatch:
  """Reads the metrics of steps, in their order.

  Attributes:
    skipped_in_a_row: number of consecutive skipped steps up to the last step that was read.
    reason: text about the first skipped step of the last `read` that found one; '' before.
  """

  def __init__(
    self,
    settings: WatchSettings,
    describe_skipped: Callable[[dict[str, Any]], str],
    watched: Callable[[dict[str, Any]], Mapping[str, float]],
  ):
    """The state before the first step. Both functions take a step's metrics on the host.

    `describe_skipped` gives text about what was not finite, '' for a step that was taken; `watched` gives those of
    `LOSS`, `VALUE_LOSS` and `GRAD_NORM` that exist.
    """
    self.skipped_in_a_row = 0
    self.reason = ''
    self._settings, self._describe_skipped, self._watched = settings, describe_skipped, watched
    self._spikes = Spikes()
    self._pending: list[tuple[int, dict[str, Any]]] = []

  def add(self, step: int, metrics: dict[str, Any]) -> None:
    """Adds a step with its metrics, which are read later."""
    self._pending.append((step, metrics))

  def read(self) -> Watched:
    """What happened since the last call, up to the step that ends the warm start."""
    found = Watched([], '', [], {})
    for step, metrics in self._pending:
      metrics = jax.device_get(metrics)
      reason = self._describe_skipped(metrics)
      self.skipped_in_a_row = self.skipped_in_a_row + 1 if reason else 0
      if reason:
        found = dataclasses.replace(found, reason=found.reason or reason)
        found.skipped.append(step)
      self._spikes, flags, begun = self._spikes.after_step(self._settings.spikes, self._watched(metrics), _SERIES)
      found.spikes.extend((step, spike) for spike in begun)
      found.metrics.update({name: max(x, found.metrics.get(name, 0.0)) for name, x in flags.items()})
      if self.too_many:
        break
    self._pending = []
    self.reason = found.reason or self.reason
    return found

  @property
  def too_many(self) -> bool:
    """Whether the number of consecutive skipped steps ends the warm start."""
    return self.skipped_in_a_row >= self._settings.max_bad_iterations

  def state_dict(self) -> dict[str, Any]:
    """The state of the rule for spikes as JSON values, after `read`.

    The number of consecutive skipped steps is not part of it, because a warm start saves no skipped step.
    """
    return self._spikes.state_dict()

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Goes on from `state_dict`."""
    self._spikes = Spikes.from_state_dict(state)


def diverged(step: int, reason: str, good: int | None) -> Diverged:
  """The error of a warm start whose numbers are not finite; `good` is the step of the newest checkpoint, if any."""
  left = f'the newest checkpoint is that of step {good}' if good is not None else 'there is no checkpoint'
  return Diverged(
    f'step {step}: {reason}; {left}, sft.output was not written; start again with a smaller sft.learning_rate or '
    'optimizer.grad_clip'
  )
