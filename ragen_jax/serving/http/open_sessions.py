"""HTTP: the sessions of the attempts that call the policy, in memory, or rebuilt from the store."""

from __future__ import annotations

import asyncio
import collections

from ragen_jax.serving.conversation.chat_format import QwenFormat
from ragen_jax.serving.conversation.sessions import Session
from ragen_jax.serving.http.running import Pending
from ragen_jax.serving.rollouts.records import AttemptRecord
from ragen_jax.serving.rollouts.store import Store
from ragen_jax.serving.rollouts.tables import Tables

_MOST = 1024  # in memory; others are rebuilt from the store when their attempt calls again


class OpenSession:
  """The session of an attempt, with its requests that are being answered.

  Attributes:
    lock: of storing: calls are stored in the order of their indices.
    count: requests that are being answered.
    broken: a call could not be stored, so the session knows more than the store; it stores nothing more.
  """

  def __init__(self, session: Session):
    self.session = session
    self.lock = asyncio.Lock()
    self.count = 0
    self.broken = False
    self._running: dict[str, list[Pending]] = {}  # by request key

  def unfollowed(self, digest: str) -> Pending | None:
    """The running request that a repetition joins: the first that nobody follows, else the last; None if none runs."""
    running = self._running.get(digest, [])
    return next((p for p in running if not p.followers), running[-1] if running else None)

  def add(self, digest: str, pending: Pending) -> None:
    self.count += 1
    self._running.setdefault(digest, []).append(pending)

  def remove(self, digest: str, pending: Pending) -> None:
    self.count -= 1
    self._running[digest].remove(pending)
    if not self._running[digest]:
      del self._running[digest]


class OpenSessions:
  """The sessions in memory. The methods run on one event loop; disk access runs in threads."""

  def __init__(self, store: Store, chat_format: QwenFormat):
    self._store, self._format = store, chat_format
    self._open: collections.OrderedDict[str, OpenSession] = collections.OrderedDict()

  def __len__(self) -> int:
    return len(self._open)

  async def open(self, attempt: AttemptRecord) -> OpenSession:
    """The session of an attempt; after a restart of the server it is rebuilt from the store."""
    open_ = self._open.get(attempt.attempt_id)
    if open_ is None:
      calls = await asyncio.to_thread(self._store.ask, Tables.calls, attempt.attempt_id)
      session = Session.from_calls(attempt.attempt_id, self._format, calls)
      open_ = self._open.setdefault(attempt.attempt_id, OpenSession(session))
    self._open.move_to_end(attempt.attempt_id)
    idle = [key for key, known in self._open.items() if not known.count and known is not open_]
    for key in idle[: max(len(self._open) - _MOST, 0)]:
      del self._open[key]
    return open_

  def forget(self, attempt_id: str) -> None:
    """Drops the session of an attempt; its next request reads the store."""
    self._open.pop(attempt_id, None)
