"""HTTP: connections that are closed if a request does not arrive in time, or if answers are not read.

Uvicorn counts open connections, and refuses further ones above a limit. Without limits of time, connections that send
nothing, or a request very slowly, or that read no answers, would keep everybody else out; no key is needed for that.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 30.0  # for a whole request, from the connection or its first byte
BYTES_PER_S = 16 * 1024  # a long request has a second more for so many bytes, and a long answer that is being read
LARGEST_BODY = 1 << 24  # more bytes of a request add no time, unless the server accepts larger bodies
ANSWERED_S = 10.0  # for the rest of a request that was answered already
UNREAD_S = 60.0  # for a client to read something of answers that wait for it


class _Counted:
  """A transport that counts what is written to it."""

  def __init__(self, transport: asyncio.Transport):
    self._transport, self._written = transport, 0

  def __getattr__(self, name: str) -> Any:
    return getattr(self._transport, name)

  def write(self, data: bytes) -> None:
    self._written += len(data)
    self._transport.write(data)

  def taken(self) -> int:
    """Bytes that have left the buffer, because the client has read these or earlier ones."""
    return self._written - self._transport.get_write_buffer_size()


class TimedProtocol(H11Protocol):
  """Closes a connection whose request, headers and body, is not complete in time, or whose answers are not read.

  Answers wait in a buffer for a client that reads slowly. While the buffer is not empty, the client has to take
  something within `UNREAD_S`, and `BYTES_PER_S` in the long run.

  A request may be answered before its body has come, as one without a key. The rest is dropped, for a short time only:
  a connection that is closed at once may lose the answer before its client, which still sends, has read it.

  Otherwise the time of an answer is not limited. Connections that are kept for further requests are closed by Uvicorn
  itself (`timeout_keep_alive`).
  """

  def __init__(self, *given: Any, largest_body: int = LARGEST_BODY, **named: Any):
    """See `H11Protocol`; `largest_body` is the largest body that the server accepts, in bytes."""
    super().__init__(*given, **named)
    self._largest_body = largest_body
    self._timer: asyncio.TimerHandle | None = None
    self._begun, self._bytes, self._drops = 0.0, 0, False  # of the request that is awaited
    self._unread: asyncio.TimerHandle | None = None
    self._taken = 0  # bytes of answers, when `_unread` was set

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    super().connection_made(_Counted(transport))
    self._set_timer()

  def connection_lost(self, exc: Exception | None) -> None:
    super().connection_lost(exc)
    self._clear_timer()
    self._clear_unread()

  def data_received(self, data: bytes) -> None:
    self._bytes += len(data)
    super().data_received(data)
    self._set_timer()

  def pause_writing(self) -> None:
    """The buffer of answers is full."""
    super().pause_writing()
    self._watch_reading()

  def on_response_complete(self) -> None:
    """An answer was sent; the next request may have come with the one before it."""
    super().on_response_complete()
    self._set_timer()
    self._watch_reading()  # a rest that does not fill the buffer would keep even a closed connection open

  def _awaits(self) -> bool:
    """Whether a part of a request is missing, or nothing has come, and Uvicorn does not wait for the next request."""
    state, kept = self.conn.their_state, self.timeout_keep_alive_task is not None
    return state is h11.SEND_BODY or (state is h11.IDLE and (not kept or bool(self.conn.trailing_data[0])))

  def _set_timer(self) -> None:
    drops = self.conn.their_state is h11.SEND_BODY and self.cycle.response_complete
    if self.transport.is_closing() or not self._awaits():
      self._clear_timer()
    elif self._timer is None or drops != self._drops:
      self._clear_timer()
      self._begun, self._bytes, self._drops = self.loop.time(), 0, drops
      self._timer = self.loop.call_later(ANSWERED_S if drops else REQUEST_S, self._on_time)

  def _clear_timer(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None

  def _watch_reading(self) -> None:
    if self._unread is None and self.transport.get_write_buffer_size():
      self._taken = self.transport.taken()
      self._unread = self.loop.call_later(UNREAD_S, self._on_unread)

  def _on_unread(self) -> None:
    self._unread = None
    if not self.transport.get_write_buffer_size():
      return
    before, self._taken = self._taken, self.transport.taken()
    if self._taken <= before:
      self.transport.abort()
      return
    self._unread = self.loop.call_later(min((self._taken - before) / BYTES_PER_S, UNREAD_S), self._on_unread)

  def _clear_unread(self) -> None:
    if self._unread is not None:
      self._unread.cancel()
      self._unread = None

  def _on_time(self) -> None:
    more = min(self._bytes, self._largest_body) / BYTES_PER_S
    left = self._begun + REQUEST_S + more - self.loop.time()
    if left > 0 and not self._drops:
      self._timer = self.loop.call_later(left, self._on_time)
      return
    self._timer = None
    self.transport.abort()  # `close` would wait for a client that does not read what was sent
