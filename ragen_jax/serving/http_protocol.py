"""HTTP connections that are closed if a request does not arrive in time.

Uvicorn counts open connections, and refuses further ones above a limit. Without a limit of time, connections that send
nothing, or a request very slowly, would keep everybody else out; no key is needed for that.
"""

from __future__ import annotations

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

REQUEST_S = 30.0  # for a whole request, from the connection or its first byte
BYTES_PER_S = 16 * 1024  # a long request has a second more for so many bytes


class TimedProtocol(H11Protocol):
  """Closes a connection whose request, headers and body, is not complete in time.

  The time of an answer is not limited, nor is that of a connection which is kept for further requests: Uvicorn closes
  the latter itself (`timeout_keep_alive`).
  """

  def __init__(self, *given: Any, **named: Any):
    """Waits for nothing yet; see `H11Protocol` for the arguments."""
    super().__init__(*given, **named)
    self._timer: asyncio.TimerHandle | None = None
    self._begun, self._bytes = 0.0, 0  # of the request that is awaited

  def connection_made(self, transport: asyncio.BaseTransport) -> None:
    """A client has connected."""
    super().connection_made(transport)
    self._set_timer()

  def connection_lost(self, exc: Exception | None) -> None:
    """The connection is closed."""
    super().connection_lost(exc)
    self._clear_timer()

  def data_received(self, data: bytes) -> None:
    """Bytes have come."""
    self._bytes += len(data)
    super().data_received(data)
    self._set_timer()

  def on_response_complete(self) -> None:
    """An answer was sent; the next request may have come with the one before it."""
    super().on_response_complete()
    self._set_timer()

  def _awaits(self) -> bool:
    """Whether a part of a request is missing, or nothing has come at all."""
    state = self.conn.their_state
    return state is h11.SEND_BODY or (state is h11.IDLE and (self.cycle is None or bool(self.conn.trailing_data[0])))

  def _set_timer(self) -> None:
    if self.transport.is_closing() or not self._awaits():
      self._clear_timer()
    elif self._timer is None:
      self._begun, self._bytes = self.loop.time(), 0
      self._timer = self.loop.call_later(REQUEST_S, self._on_time)

  def _clear_timer(self) -> None:
    if self._timer is not None:
      self._timer.cancel()
      self._timer = None

  def _on_time(self) -> None:
    left = self._begun + REQUEST_S + self._bytes / BYTES_PER_S - self.loop.time()
    if left > 0:
      self._timer = self.loop.call_later(left, self._on_time)
      return
    self._timer = None
    self.transport.abort()  # `close` would wait for a client that does not read what was sent
