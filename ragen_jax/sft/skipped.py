"""The skipped steps of a warm start: read from the devices from time to time, so that steps need not wait for them."""

from __future__ import annotations

import jax

from ragen_jax.utils.errors import Diverged


class SkippedSteps:
  """Counts the steps whose loss, gradient or update was not finite.

  Attributes:
    in_a_row: skipped steps in a row up to the last step that was read.
  """

  def __init__(self, limit: int):
    """Before the first step.

    Args:
      limit: steps in a row that end the warm start (`monitor.max_bad_iterations`).
    """
    self.in_a_row = 0
    self._limit = limit
    self._pending: list[tuple[int, jax.Array]] = []

  def add(self, step: int, flag: jax.Array) -> None:
    """Takes in a step; its flag, 1 if it was skipped, is read later."""
    self._pending.append((step, flag))

  def read(self) -> list[int]:
    """The skipped steps since the last call, up to the one that ends the warm start."""
    steps = []
    for step, flag in self._pending:
      skipped = bool(flag)
      self.in_a_row = self.in_a_row + 1 if skipped else 0
      if skipped:
        steps.append(step)
      if self.in_a_row == self._limit:
        break
    self._pending = []
    return steps

  @property
  def too_many(self) -> bool:
    """Whether so many steps in a row were skipped that the warm start ends."""
    return self.in_a_row >= self._limit


def diverged(step: int, reason: str, good: int | None) -> Diverged:
  """The error of a warm start whose numbers are not finite.

  Args:
    step: the present step.
    reason: what is not finite, in words.
    good: step of the newest checkpoint; None without any.
  """
  left = f'the newest checkpoint is that of step {good}' if good is not None else 'there is no checkpoint'
  return Diverged(
    f'step {step}: {reason}; {left}, sft.output was not written; start anew with a smaller sft.learning_rate or '
    'optimizer.grad_clip'
  )
