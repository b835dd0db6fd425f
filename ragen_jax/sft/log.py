"""The metrics of supervised training."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
import optax

from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.runs.progress import Progress
from ragen_jax.runs.timing import Timer
from ragen_jax.sft.packing import SftBatch
from ragen_jax.sft.step_watch import GRAD_NORM, Watched
from ragen_jax.utils.heartbeat import Heartbeat

# Number of steps between two lines of metrics.
_LOG_EVERY = 10


class SftLog:
  """Writes the losses, the gradient norm, the padding and the speed of every tenth step and of the last one.

  The lines also have the number of skipped steps, and whether there were spikes, since the line before. Between two
  lines that are long apart, it logs how many steps were taken. `timer` measures a step as the phase 'step'.
  """

  def __init__(
    self, writer: MetricWriter, progress: Progress, schedule: optax.Schedule, last_step: int, *, value_loss: bool
  ):
    """Writes nothing. `schedule` is the learning rate of each step, from 0."""
    self.timer = Timer()
    self._writer, self._progress, self._schedule, self._last_step = writer, progress, schedule, last_step
    self._names = ('loss', 'value_loss') if value_loss else ('loss',)
    # Since the last line of metrics:
    self._tokens = self._skipped = 0
    self._spikes: dict[str, float] = {}
    self._heartbeat: Heartbeat | None = None

  def state_dict(self) -> dict[str, Any]:
    """What has been counted since the last line of metrics but tokens, as JSON values."""
    return {'skipped': self._skipped, 'spikes': dict(self._spikes)}

  def load_state_dict(self, state: Mapping[str, Any]) -> None:
    """Goes on from `state_dict`."""
    self._skipped, self._spikes = state['skipped'], dict(state['spikes'])

  def begin(self, step: int) -> None:
    """Writes that a step begins, the first one of this start, unless all are done."""
    if step <= self._last_step:
      self._progress.write(f'step {step} of {self._last_step} begins; most of the first minute is compilation')

  def due(self, step: int) -> bool:
    """Whether a step is logged."""
    return step % _LOG_EVERY == 0 or step == self._last_step

  def watched(self, found: Watched) -> None:
    """Counts the skipped steps and keeps the spikes since the last call, and writes a line about each."""
    self._skipped += len(found.skipped)
    if steps := found.skipped:
      shown = f'step {steps[0]}' if len(steps) == 1 else f'{len(steps)} steps from {steps[0]} to {steps[-1]}'
      self._progress.write(f'{shown}: skipped, because not finite: {found.reason}')
    for step, spike in found.spikes:
      self._progress.write(spike.line(f'step {step}'))
    self._spikes |= {name: max(x, self._spikes.get(name, 0.0)) for name, x in found.metrics.items()}

  def step(self, step: int, parts: jax.Array, grad_norm: jax.Array, batches: list[SftBatch], tokens: int) -> None:
    """Logs a step that is due, numbered from 1, and counts the `tokens` of the others' conversations.

    `parts` f32[2] are loss and value loss, and `grad_norm` f32[] is that of the gradient before it is clipped.
    """
    self._tokens += tokens
    if self._heartbeat is None:
      next_line = min(step - step % -_LOG_EVERY, self._last_step)
      self._heartbeat = Heartbeat(f'steps {step} to {next_line}: %d of %d began', next_line - step + 1)
    if not self.due(step):
      self._heartbeat.advance()
      return
    self._heartbeat = None
    parts = np.asarray(parts).tolist()
    metrics = {
      GRAD_NORM: float(grad_norm),
      'sft/lr': float(self._schedule(step - 1)),
      'sft/skipped_steps': self._skipped,
      'sft/columns_per_token': sum(batch.tokens.size for batch in batches) / tokens,
      'perf/throughput': self._tokens / self.timer.pop()['timing_s/step'],
    }
    self._writer.scalars(step, self._named(parts) | metrics | self._spikes)
    shown = {name.replace('_', ' '): x for name, x in zip(self._names, parts, strict=False)}
    self._progress.update(step, shown, tokens=self._tokens)
    self._tokens = self._skipped = 0
    self._spikes = {}

  def validation(self, step: int, parts: jax.Array) -> None:
    """Writes the losses of the validation conversations, f32[2]."""
    self._writer.scalars(step, self._named(np.asarray(parts).tolist(), 'val_'))

  def _named(self, parts: list[float], prefix: str = '') -> dict[str, float]:
    return {f'sft/{prefix}{name}': x for name, x in zip(self._names, parts, strict=False)}
