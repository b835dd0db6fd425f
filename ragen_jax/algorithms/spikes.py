"""A rule that reports spikes of the loss and of the gradient norm, as a state machine over the metrics of a run.

The state is JSON values, so checkpoints can contain it. Updates are pure functions on the host, as in `collapse.py`.
"""

from __future__ import annotations

import dataclasses
import math
import statistics
from collections.abc import Mapping
from typing import Any

# Watched metric of training -> its name in `monitor/<name>_spike`.
SERIES = {
  'actor/grad_norm': 'grad_norm',
  'actor/pg_loss': 'pg_loss',
  'critic/grad_norm': 'critic_grad_norm',
  'critic/vf_loss': 'vf_loss',
}


@dataclasses.dataclass(frozen=True)
class SpikeSettings:
  """The rule. Fields of `config.monitor`."""

  spike_factor: float
  baseline_steps: int


@dataclasses.dataclass(frozen=True)
class Spike:
  """The first value of a spike; `usual` is the median magnitude of the values before."""

  metric: str
  value: float
  usual: float

  def __str__(self) -> str:
    """The spike in one line."""
    times = abs(self.value) / self.usual
    return f'{self.metric} is {self.value:.3g}, {times:.1f} times its usual {self.usual:.3g}'

  def line(self, when: str) -> str:
    """The line of a log, with the iteration or step in which the spike begins and the field of the rule."""
    return f'{when}: {self} (monitor.spike_factor)'


@dataclasses.dataclass(frozen=True)
class Spikes:
  """The state of the rule.

  The usual magnitude of a metric is the median of the magnitudes of its last `baseline_steps` values. A median ignores
  the spikes among them, as long as they are fewer than half; after a lasting change, the new level becomes the usual
  one. Nothing is a spike before there are so many values, or while the usual magnitude is 0. Values that are not finite
  are no spikes, because they are reported as such, and do not enter the median.

  Attributes:
    recent: metric -> magnitudes of its last values, oldest first.
    spiking: metrics whose last value was a spike.
  """

  recent: Mapping[str, tuple[float, ...]] = dataclasses.field(default_factory=dict)
  spiking: frozenset[str] = frozenset()

  def after_step(
    self, settings: SpikeSettings, metrics: Mapping[str, float], series: Mapping[str, str] = SERIES
  ) -> tuple[Spikes, dict[str, float], list[Spike]]:
    """Updates the state with one iteration of training, or one step of a warm start: (state, metrics, spikes).

    `series` is watched metric -> its name in `monitor/<name>_spike`; metrics that are missing keep their state. The
    result's metrics are `monitor/<name>_spike`, 1 or 0, for those that are present. Spikes are those that begin in this
    iteration, so a spike that lasts is reported once.
    """
    if not settings.spike_factor:
      return self, {}, []
    recent, spiking, own, begun = dict(self.recent), set(self.spiking), {}, []
    for metric, name in series.items():
      if metric not in metrics:
        continue
      x, before = float(metrics[metric]), recent.get(metric, ())
      full = len(before) >= settings.baseline_steps
      usual = statistics.median(before) if full else 0.0
      spike = math.isfinite(x) and usual > 0 and abs(x) > settings.spike_factor * usual
      if spike and metric not in spiking:
        begun.append(Spike(metric, x, usual))
      spiking = spiking | {metric} if spike else spiking - {metric}
      own[f'monitor/{name}_spike'] = float(spike)
      if math.isfinite(x):
        recent[metric] = (*before, abs(x))[-settings.baseline_steps :]
    return Spikes(recent, frozenset(spiking)), own, begun

  def state_dict(self) -> dict[str, Any]:
    """The state as JSON values."""
    return {'recent': {name: list(x) for name, x in self.recent.items()}, 'spiking': sorted(self.spiking)}

  @classmethod
  def from_state_dict(cls, state: Mapping[str, Any]) -> Spikes:
    return cls({name: tuple(x) for name, x in state['recent'].items()}, frozenset(state['spiking']))
