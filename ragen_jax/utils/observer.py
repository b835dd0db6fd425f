"""The one hook of a run: who listens is told which programs are called, and which episodes were played."""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Iterator
from typing import Any


class Observer:
  """Given to all that calls programs and plays episodes; while someone listens, it passes on what any thread tells."""

  def __init__(self) -> None:
    self._listeners: list[Any] = []
    self._one_at_a_time = threading.Lock()

  @contextlib.contextmanager
  def told_to(self, listener: Any) -> Iterator[None]:
    """Context manager: the methods `runs` and `played` of the listener are called with what the observer is told."""
    self._listeners.append(listener)
    try:
      yield
    finally:
      self._listeners.remove(listener)

  def runs(self, name: str, shape: tuple[Any, ...], weights: Any = None) -> None:
    """A program is called next.

    Args:
      name: such as 'extend', 'gradient' or 'score'.
      shape: what it is compiled for. For the sampler, as `sampling.shapes.Shapes.programs` has it; rows or bins,
        columns and scored tokens of a micro-batch; () for an optimiser step.
      weights: of 'extend' and 'decode'.
    """
    with self._one_at_a_time:
      for listener in self._listeners:
        listener.runs(name, shape, weights)

  def played(self, rollout: Any, iteration: int) -> None:
    """Episodes were played; `iteration` is the first one whose programs are not yet running, from 0."""
    for listener in self._listeners:
      listener.played(rollout, iteration)
