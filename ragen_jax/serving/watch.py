"""How one run of an agent ends: by itself, by its time-out or by cancellation."""

from __future__ import annotations

import dataclasses
import enum
import threading
import time
from collections.abc import Callable

from ragen_jax.serving.client import Task
from ragen_jax.serving.types import AttemptState

_LEAST_S = 1.0  # between two questions how much time is left


class Ending(enum.Enum):
  """What came first."""

  ENDED = 'ended'
  CANCELLED = 'cancelled'
  LATE = 'late'


class Watch:
  """Waits for what comes first: the agent's end, its cancellation, or its time-out."""

  def __init__(self, timeout_s: float, time_left: Callable[[], float | None] = lambda: 0.0):
    """Starts the time of an agent.

    Args:
      timeout_s: the time that it may take, in seconds.
      time_left: called when this time is over: seconds that it may still take, since its calls were held; 0 for none.
        None if nothing is known; it is called again then.
    """
    self._deadline, self._time_left = time.monotonic() + timeout_s, time_left
    self._changed = threading.Condition()
    self._ending: Ending | None = None

  def end(self) -> None:
    """The agent has ended."""
    self._set(Ending.ENDED)

  def cancel(self) -> None:
    """The agent should end."""
    self._set(Ending.CANCELLED)

  def wait(self) -> Ending:
    """Blocks until one of the three has come; what comes later changes nothing."""
    while True:
      with self._changed:
        left = min(self._deadline - time.monotonic(), threading.TIMEOUT_MAX)
        if self._changed.wait_for(lambda: self._ending is not None, max(left, 0.0)):
          return self._ending
      more = self._time_left()
      if more is not None and more <= 0:
        self._set(Ending.LATE)
      else:
        self._deadline = time.monotonic() + max(more or 0.0, _LEAST_S)

  def _set(self, ending: Ending) -> None:
    with self._changed:
      self._ending = self._ending or ending
      self._changed.notify_all()


@dataclasses.dataclass(frozen=True)
class Outcome:
  """How a run ended.

  Attributes:
    state: 'succeeded', 'failed', 'timeout' or 'cancelled'.
    reward: the reward of the episode; None if the agent gave none to its runner.
    error: what went wrong; '' if nothing did.
    abandoned: a thread that did not stop; None if nothing was left behind.
  """

  state: AttemptState
  reward: float | None
  error: str
  abandoned: threading.Thread | None

  @classmethod
  def failed(cls, error: str) -> Outcome:
    """A run that failed."""
    return cls(AttemptState.FAILED, None, error, None)

  @classmethod
  def stopped(cls, ending: Ending, task: Task, detail: str = '') -> Outcome:
    """A run that was stopped because it was late or cancelled."""
    if ending == Ending.LATE:
      return cls(AttemptState.TIMEOUT, None, f'took longer than timeout_s={task.timeout_s:g}{detail}', None)
    return cls(AttemptState.CANCELLED, None, f'was cancelled{detail}', None)

  def leaving(self, thread: threading.Thread) -> Outcome:
    """The same outcome with a thread that did not stop."""
    return dataclasses.replace(self, abandoned=thread)
