"""Calls of an MCP server that several threads make: the server has them at the same time."""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any, NamedTuple, Protocol

from ragen_jax.utils.errors import short
from ragen_jax.utils.threads import Fault

_GLANCE_S = 0.02  # how long the client waits for a call to end before it takes new ones
_SLACK_S = 10.0  # for the client to answer, and beyond the time limit of a call


class Connection(Protocol):
  """What this package uses of `utils.workers.Worker`, with an `McpClient`.

  Attributes:
    process: the number of the running process; 0 if none is running.
    last_end: why the last process ended.
  """

  process: int
  last_end: str

  def call(self, method: str, *args: Any, timeout_s: float) -> tuple[Any, Fault | None]:
    """The result of a method of `McpClient`; the process is started at the first call."""

  def restart(self, because: str) -> None:
    """Ends the process; the next call starts another one."""

  def close(self) -> None:
    """Ends the process for good."""


class Outcome(NamedTuple):
  """What a call came to; see the names in mcp_client.py. `text` is the result, or the reason why there is none."""

  kind: str
  text: str


class McpCalls:
  """Calls that any thread may make. One of the threads that wait speaks with the client for all.

  After a call that was late, or whose server has gone, the calls that run are waited for, and no other begins; then the
  server is started again.
  """

  def __init__(self, connection: Connection, most: int):
    """Starts nothing.

    Args:
      most: calls at a time.
    """
    self._connection, self._most = connection, most
    self._changed = threading.Condition()
    self._numbers = itertools.count(1)
    self._waiting: dict[int, tuple] = {}  # number -> what the client is told of the call
    self._running: dict[int, float] = {}  # number -> the time at which the client must have answered
    self._ended: dict[int, Outcome] = {}
    self._is_spent = False  # whether the server must be started again
    self._is_speaking = False  # whether a thread speaks with the client
    self._process = 0  # that has the calls which run

  def call(self, name: str, arguments: Mapping[str, Any], timeout_s: float) -> Outcome:
    """Calls a tool by the server's name for it, and waits for the outcome.

    Args:
      timeout_s: time limit of the call, from its begin.
    """
    with self._changed:
      number = next(self._numbers)
      self._waiting[number] = number, name, dict(arguments), timeout_s
      while number not in self._ended:
        if self._is_speaking:
          self._changed.wait()
          continue
        self._is_speaking = True
        try:
          self._speak()
        finally:
          self._is_speaking = False
          self._changed.notify_all()
      return self._ended.pop(number)

  def _speak(self) -> None:
    """Begins the calls that there is room for, and hears which have ended."""
    before, room = [*self._running], 0 if self._is_spent else self._most - len(self._running)
    begun = [self._waiting.pop(number) for number in [*self._waiting][:room]]
    self._changed.release()
    try:
      raw, fault = self._connection.call('exchange', begun, _GLANCE_S, timeout_s=_GLANCE_S + _SLACK_S)
    finally:
      self._changed.acquire()
      now = time.monotonic()  # before, the process may have been started
      self._running |= {number: now + timeout_s + _SLACK_S for number, _, _, timeout_s in begun}
    if fault is not None:
      found = dict.fromkeys(self._running, Outcome('away', str(fault)))
    elif (found := _read_ended(raw)) is None:
      found = dict.fromkeys(self._running, Outcome('unreadable', short(raw)))
    late = [number for number, end in self._running.items() if time.monotonic() > end]
    found = dict.fromkeys(late, Outcome('late', '')) | found
    self._is_spent |= any(found[number].kind in ('late', 'away') for number in found.keys() & self._running.keys())
    if self._connection.process != self._process:
      found |= dict.fromkeys(before, Outcome('away', self._connection.last_end))
      self._process = self._connection.process
    self._ended |= {number: found[number] for number in [*self._running] if number in found}
    self._running = {number: end for number, end in self._running.items() if number not in found}
    if self._is_spent and not self._running:
      self._connection.restart('the server did not answer')
      self._is_spent = False


def _read_ended(raw: Any) -> dict[int, Outcome] | None:
  """The outcomes that `McpClient.exchange` returned, by number; None if they are none."""
  if not isinstance(raw, list) or not all(isinstance(x, tuple) and [*map(type, x)] == [int, str, str] for x in raw):
    return None
  return {number: Outcome(kind, text) for number, kind, text in raw}
