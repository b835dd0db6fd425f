"""Notices that the trainer's own runner plays no task any more, so that nobody waits for the tasks forever."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

from ragen_jax.serving.pool import Progress
from ragen_jax.utils.errors import UserError


class Stall:
  """Watches a runner while the trainer waits for tasks.

  The runner has stalled if its threads have ended, or if abandoned threads hold all its places for a whole time limit
  of an attempt while no outside worker plays.
  """

  def __init__(
    self, progress: Callable[[], Progress] | None, running: Callable[[], Sequence[Any]], runner: str, timeout_s: float,
    clock: Callable[[], float] = time.monotonic,
  ):  # fmt: skip
    """Begins to watch.

    Args:
      progress: gives the runner's counts; None if outside workers play.
      running: gives the attempts that run, also those of outside workers.
      runner: the runner's field and value, for errors.
      timeout_s: time limit of an attempt, in seconds.
      clock: the present time in seconds.
    """
    self._progress, self._running, self._runner = progress, running, runner
    self._timeout_s, self._clock = timeout_s, clock
    self._since: float | None = None  # when the places were first seen to be held

  def check(self) -> None:
    """Looks at the runner; called at intervals.

    Raises:
      UserError: it has stalled.
    """
    if self._progress is None:
      return
    now = self._progress()
    if now.fault:
      raise UserError(f'{self._runner}: no task is played any more, {now.fault}')
    if not now.full or self._running():
      self._since = None
      return
    if self._since is None:
      self._since = self._clock()
    if self._clock() - self._since >= self._timeout_s:
      raise UserError(
        f'{self._runner}: no task is played any more, threads of {now.abandoned} stopped attempts have not ended '
        f'within another serve.timeout={self._timeout_s:g} s (the oldest: {now.oldest}); Python cannot stop a '
        'function: make it async, limit the time of its requests, or make it a command'
      )
