"""The skipped steps of a warm start. Their flags are read from the devices only now and then, so no step waits."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax

from ragen_jax.utils.errors import Diverged


class SkippedSteps:
  """Counts the steps whose loss, gradient, optimiser state or weights were not finite.

  Attributes:
    in_a_row: number of consecutive skipped steps up to the last step that was read.
    reason: text about the first skipped step of the last `read` that found one; '' before.
  """

  def __init__(self, limit: int, describe: Callable[[dict[str, Any]], str]):
    """The state before the first step.

    Args:
      limit: number of consecutive skipped steps that ends the warm start (`monitor.max_bad_iterations`).
      describe: from a step's metrics on the host, text about what was not finite; '' for a step that was taken.
    """
    self.in_a_row = 0
    self.reason = ''
    self._limit, self._describe = limit, describe
    self._pending: list[tuple[int, dict[str, Any]]] = []

  def add(self, step: int, metrics: dict[str, Any]) -> None:
    """Adds a step with its metrics, which are read later."""
    self._pending.append((step, metrics))

  def read(self) -> list[int]:
    """The skipped steps since the last call, up to the one that ends the warm start."""
    steps = []
    for step, metrics in self._pending:
      reason = self._describe(jax.device_get(metrics))
      self.in_a_row = self.in_a_row + 1 if reason else 0
      if reason:
        self.reason = self.reason if steps else reason
        steps.append(step)
      if self.in_a_row == self._limit:
        break
    self._pending = []
    return steps

  @property
  def too_many(self) -> bool:
    """Whether the number of consecutive skipped steps ends the warm start."""
    return self.in_a_row >= self._limit


def diverged(step: int, reason: str, good: int | None) -> Diverged:
  """The error of a warm start whose numbers are not finite.

  Args:
    step: the current step.
    reason: text about the numbers that are not finite.
    good: step of the newest checkpoint; None if there is none.
  """
  left = f'the newest checkpoint is that of step {good}' if good is not None else 'there is no checkpoint'
  return Diverged(
    f'step {step}: {reason}; {left}, sft.output was not written; start again with a smaller sft.learning_rate or '
    'optimizer.grad_clip'
  )
