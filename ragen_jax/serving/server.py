"""The HTTP server in a thread of its own, with Uvicorn."""

from __future__ import annotations

import asyncio
import contextlib
import functools
import logging
import socket
import threading
from collections.abc import Callable
from typing import Any

import uvicorn

from ragen_jax.serving.http_protocol import LARGEST_BODY, TimedProtocol
from ragen_jax.serving.wire.errors import ApiError
from ragen_jax.utils.errors import UserError

_START_S = 30.0
_STOP_S = 15.0
_BACKLOG = 2048

_log = logging.getLogger(__name__)


class _NoApiErrors(logging.Filter):
  """Leaves out the errors that break an answer on purpose; the client has to see them, and not the log."""

  def filter(self, record: logging.LogRecord) -> bool:
    return not (record.exc_info and isinstance(record.exc_info[1], ApiError))


_NO_API_ERRORS = _NoApiErrors()


class HttpServer:
  """Serves an ASGI application until it is closed. Use it as a context manager.

  Attributes:
    url: its address, with the port that was chosen.
  """

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
      app: the application.
      on_stop: called on the application's event loop when the server is about to stop; it should end open requests.
      host: address to bind; '127.0.0.1' is this machine only.
      port: port; 0 chooses a free one.
      most_connections: further connections get the status 503. Those that send no request in time are closed, see
        `TimedProtocol`.
      max_body: largest body of a request that the application accepts, in bytes; larger ones get no more time.

    Raises:
      UserError: the address cannot be bound.
    """
    family = socket.AF_INET6 if ':' in host else socket.AF_INET
    self._on_stop = on_stop
    # asyncio turns Nagle's algorithm off where the socket names its protocol; with it an answer may wait 40 ms.
    self._socket = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
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
    protocol: Any = functools.partial(TimedProtocol, largest_body=max_body)
    config = uvicorn.Config(
      app, http=protocol, ws='none', log_config=None, log_level='warning', access_log=False, lifespan='off',
      limit_concurrency=most_connections,
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
    """Calls something on the application's event loop, after earlier calls; for other threads.

    Does nothing if the loop has closed.
    """
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
