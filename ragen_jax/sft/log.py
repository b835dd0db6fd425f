"""The metrics of supervised training."""

from __future__ import annotations

import jax
import numpy as np
import optax

from ragen_jax.runs.metrics import MetricWriter
from ragen_jax.runs.progress import Progress
from ragen_jax.runs.timing import Timer
from ragen_jax.sft.packing import SftBatch

# Number of steps between two lines of metrics.
_LOG_EVERY = 10


class SftLog:
  """Writes the losses, the skipped steps, the padding and the speed of every tenth step and of the last one.

  Attributes:
    timer: measures a step as the phase 'step'.
  """

  def __init__(
    self, writer: MetricWriter, progress: Progress, schedule: optax.Schedule, last_step: int, *, value_loss: bool
  ):
    """Writes nothing.

    Args:
      writer: the run's metric writer.
      progress: the run's progress line.
      schedule: the learning rate of each step, from 0.
      last_step: number of the last step.
      value_loss: whether there is a value loss to show.
    """
    self.timer = Timer()
    self._writer, self._progress, self._schedule, self._last_step = writer, progress, schedule, last_step
    self._names = ('loss', 'value_loss') if value_loss else ('loss',)
    self._tokens = self._skipped = 0  # since the last line of metrics

  def due(self, step: int) -> bool:
    """Whether a step is logged."""
    return step % _LOG_EVERY == 0 or step == self._last_step

  def skipped(self, steps: list[int], reason: str) -> None:
    """Counts the skipped steps since the last call, and writes a line about them; `reason` is that of the first."""
    self._skipped += len(steps)
    if steps:
      shown = f'step {steps[0]}' if len(steps) == 1 else f'{len(steps)} steps from {steps[0]} to {steps[-1]}'
      self._progress.write(f'{shown}: skipped, because not finite: {reason}')

  def step(self, step: int, parts: jax.Array, batches: list[SftBatch], tokens: int) -> None:
    """Logs a step that is due, and counts the tokens of the others.

    Args:
      step: number of the step, from 1.
      parts: f32[2], loss and value loss.
      batches: the micro-batches of the step.
      tokens: number of tokens of its conversations.
    """
    self._tokens += tokens
    if not self.due(step):
      return
    parts = np.asarray(parts).tolist()
    metrics = {
      'sft/lr': float(self._schedule(step - 1)),
      'sft/skipped_steps': self._skipped,
      'sft/padding': 1 - tokens / sum(batch.tokens.size for batch in batches),
      'perf/throughput': self._tokens / self.timer.pop()['timing_s/step'],
    }
    self._writer.scalars(step, self._named(parts) | metrics)
    shown = {name.replace('_', ' '): x for name, x in zip(self._names, parts, strict=False)}
    self._progress.update(step, shown, tokens=self._tokens)
    self._tokens = self._skipped = 0

  def validation(self, step: int, parts: jax.Array) -> None:
    """Writes the losses of the validation conversations, f32[2]."""
    self._writer.scalars(step, self._named(np.asarray(parts).tolist(), 'val_'))

  def _named(self, parts: list[float], prefix: str = '') -> dict[str, float]:
    return {f'sft/{prefix}{name}': x for name, x in zip(self._names, parts, strict=False)}
