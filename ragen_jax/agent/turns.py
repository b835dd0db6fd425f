"""Turns that environments play: all rows that replied at once, or each row by itself while others sample."""

from __future__ import annotations

from collections.abc import Mapping
from concurrent import futures
from typing import Any, NamedTuple

from ragen_jax.agent.env_manager import EnvStateManager, StepResult

_MOST_SECONDS = 0.05  # between looks at a signal of the user, while all rows wait for their environments


class Played(NamedTuple):
  """The rows whose turns are over, ascending, and the outcome, in which the other rows have no action."""

  rows: list[int]
  result: StepResult


class Turns:
  """Has the environments of a rollout play the turns of rows that replied.

  Attributes:
    apart: whether rows play in threads.
  """

  def __init__(self, envs: EnvStateManager, threads: int):
    """Starts nothing.

    Args:
      threads: number of threads in which rows outside JAX play, each when it has replied; an environment that may not
        be used in any thread plays here. 0: all rows that replied are waited for.
    """
    self._envs = envs
    self.apart = threads > 0
    self._threads = futures.ThreadPoolExecutor(threads, 'ragen_jax-turn') if threads else None
    self._waiting: dict[futures.Future[Any], int] = {}

  def play(self, actions: Mapping[int, list[Any]], *, wait: bool) -> Played | None:
    """Begins the turns of some rows, and gives the rows whose turns are over; None if there are none.

    If `wait`, and turns are played, at least one is waited for.
    """
    apart = {row for row in actions if self.apart and self._envs.plays_apart(row)}
    for row in sorted(apart):
      self._waiting[self._threads.submit(self._envs.play, row, actions[row])] = row
    here = [row for row in actions if row not in apart]
    if wait and not here:
      self._wait()
    over = {self._waiting.pop(future): future.result() for future in [f for f in self._waiting if f.done()]}
    rows = sorted([*here, *over])
    if not rows:
      return None
    chosen = [actions[row] if row in actions and row not in apart else [] for row in range(self._envs.rows)]
    return Played(rows, self._envs.step(chosen, over if self.apart else None))

  def _wait(self) -> None:
    while self._waiting and not futures.wait(self._waiting, _MOST_SECONDS, futures.FIRST_COMPLETED).done:
      pass

  def close(self) -> None:
    """Begins no turn any more. Those that play end within the time limits of their environments."""
    if self._threads is not None:
      self._threads.shutdown(wait=False, cancel_futures=True)
    for row in self._waiting.values():
      self._envs.pool_of(row).abandon()
