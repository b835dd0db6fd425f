"""HTTP: the server in a thread of its own, with Uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import os
import resource
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.http.timed_protocol import LARGEST_BODY, TimedProtocol
from ragen_jax.utils.errors import UserError

_START_S = 30.0
_STOP_S = 15.0
_BACKLOG = 2048
_SPARE = 64  # connections beyond the limit that are told so
# Descriptors for other things than connections: store, checkpoints, pipes of programs. Half, if there are few.
_OTHER_FILES = 1024

_log = logging.getLogger(__name__)


class _NoApiErrors(logging.Filter):
  """Leaves out the errors that break an answer on purpose; the client has to see them, and not the log."""

  def filter(self, record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], ApiError))


_NO_API_ERRORS = _NoApiErrors()


def room_for(connections: int) -> int:
  """Raises the process's limit of open files, if it can, so that so many connections and other files fit below it.

  Returns the number of connections that fit, at most an eighth and `_SPARE` more than `connections`.
  """
  wanted = connections + connections // 8 + _SPARE
  used = len(os.listdir('/dev/fd'))
  soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
  if soft == resource.RLIM_INFINITY:
    return wanted
  most = used + wanted + _OTHER_FILES
  if soft < most and soft != hard:
    new = most if hard == resource.RLIM_INFINITY else min(most, hard)
    with contextlib.suppress(ValueError, OSError):  # the system has a lower limit of its own
      resource.setrlimit(resource.RLIMIT_NOFILE, (new, hard))
      soft = new
  free = max(soft - used, 2)
  return min(wanted, max(free - _OTHER_FILES, free // 2))


class _Listener(socket.socket):
  """A listening socket that closes connections at once while too many of its connections are open.

  With no descriptor left, `accept` itself would fail again and again, and so would the store and the programs.
  """

  def __init__(self, family: int, most: int):
    """A socket that is not bound; `most` of its connections may be open."""
    # asyncio turns Nagle's algorithm off where the socket names its protocol; with it an answer may wait 40 ms.
    super().__init__(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    self._most, self._accepted = most, []

  def accept(self) -> tuple[socket.socket, Any]:
    """See `socket.socket`; ConnectionAbortedError for a connection that was closed, which asyncio passes over."""
    connection, address = super().accept()
    if len(self._accepted) >= self._most:
      self._accepted = [other for other in self._accepted if other.fileno() >= 0]
    if len(self._accepted) >= self._most:
      connection.close()
      raise ConnectionAbortedError('too many connections are open')
    self._accepted.append(connection)
    return connection, address


class HttpServer:
  """Serves an ASGI application until it is closed. Use it as a context manager. `url` has the port that was chosen."""

  def __init__(
    self,
    app: Any,
    on_stop: Callable[[], None],
    host: str,
    port: int,
    most_connections: int,
    max_body: int = LARGEST_BODY,
  ):
    """Binds the address and starts the thread.

    Args:
      on_stop: called on the application's event loop when the server is about to stop; it should end open requests.
      most_connections: further connections get the status 503; fewer if the process may not open so many files. Some
        more may be open to be told so, and those beyond are closed at once. Those that send no request in time are
        closed, see `TimedProtocol`.
      max_body: largest body of a request that the application accepts, in bytes; larger ones get no more time.

    Raises:
      UserError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    self._on_stop = on_stop
    room = room_for(most_connections)
    self._socket = _Listener(family, room)
    self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
      self._socket.bind((host, port))
      self._socket.listen(_BACKLOG)  # clients may connect before the thread accepts
    except OSError as e:
      self._socket.close()
      raise UserError(f'serve.host={host!r}, serve.port={port}: cannot be bound ({e.strerror}); 0 is any port') from e
    bound = self._socket.getsockname()[1]
    shown = {'0.0.0.0': '127.0.0.1', '::': '[::1]'}.get(host, f'[{host}]' if ':' in host else host)
    self.url = f'http://{shown}:{bound}'
    served = min(most_connections, room * 8 // 9)
    if served < most_connections:
      _log.warning(
        'serve.max_connections=%d: %d connections are served, because this process may open %d files (ulimit -n)',
        most_connections, served, resource.getrlimit(resource.RLIMIT_NOFILE)[0],
      )  # fmt: skip
    protocol: Any = functools.partial(TimedProtocol, largest_body=max_body)
    config = uvicorn.Config(
      app, http=protocol, ws='none', log_config=None, log_level='warning', access_log=False, lifespan='off',
      limit_concurrency=served,
      backlog=_BACKLOG, timeout_keep_alive=75, timeout_graceful_shutdown=5, server_header=False, date_header=True,
    )  # fmt: skip
    self._server = uvicorn.Server(config)
    logging.getLogger('uvicorn.error').addFilter(_NO_API_ERRORS)
    self._loop: asyncio.AbstractEventLoop | None = None
    self._started = threading.Event()
    self._thread = threading.Thread(target=self._run, daemon=True, name='ragen_jax-http')
    self._thread.start()
    if not self._started.wait(_START_S):
      raise UserError(f'the server at {self.url} did not start within {_START_S:g} s')

  def _run(self) -> None:
    asyncio.run(self._serve())

  async def _serve(self) -> None:
    self._loop = asyncio.get_running_loop()
    self._loop.call_soon(self._started.set)
    await self._server.serve(sockets=[self._socket])

  def __enter__(self) -> HttpServer:
    return self

  def __exit__(self, *_: object) -> None:
    self.close()

  def call_soon(self, call: Callable[[], Any]) -> None:
    """Calls something on the application's event loop, after earlier calls; for other threads. Does nothing if the loop
    has closed."""
    with contextlib.suppress(RuntimeError):  # the loop has closed
      self._loop.call_soon_threadsafe(call)

  def close(self) -> None:
    """Stops the server; open requests have a few seconds to end."""
    self.call_soon(self._on_stop)
    self._server.should_exit = True
    self._thread.join(_STOP_S)
    if self._thread.is_alive():
      _log.warning('the server at %s did not stop within %g s', self.url, _STOP_S)
    self._socket.close()
