"""HTTP requests with one time limit for the whole exchange.

The time limit of a socket is that of one read. A server that sends a byte before each limit, in the status line, in
headers, in answers `100 Continue` or in the body, would hold a request for ever.
"""

from __future__ import annotations

import http.client
import io
import socket
import time
import urllib.request
from typing import Any


class NoRedirect(urllib.request.HTTPRedirectHandler):
  """Treats a redirect as an error, because a redirected request would lose its body."""

  def redirect_request(self, *arguments: Any) -> None:
    return None


def make_opener() -> urllib.request.OpenerDirector:
  """An opener for http and https, without proxies and redirects; `timeout` limits each request as a whole."""
  return urllib.request.build_opener(urllib.request.ProxyHandler({}), NoRedirect, _TimedHandler, _TimedTlsHandler)


class _Timed(http.client.HTTPConnection):
  """A connection for one request, which ends `timeout` seconds after it was made."""

  def __init__(self, *arguments: Any, **options: Any):
    super().__init__(*arguments, **options)
    self._deadline = time.monotonic() + self.timeout

  def connect(self) -> None:
    super().connect()
    self.sock = _TimedSocket(self.sock, self._deadline)


class _TimedTls(_Timed, http.client.HTTPSConnection):
  """`_Timed` with encryption."""


class _TimedHandler(urllib.request.HTTPHandler):
  def http_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
    return self.do_open(_Timed, request)


class _TimedTlsHandler(urllib.request.HTTPSHandler):
  def https_open(self, request: urllib.request.Request) -> http.client.HTTPResponse:
    return self.do_open(_TimedTls, request)


class _TimedSocket:
  """What a connection uses of a socket. The stream of the answer closes the socket."""

  def __init__(self, sock: socket.socket, deadline: float):
    self._sock, self._deadline, self._is_read = sock, deadline, False

  def sendall(self, data: bytes) -> None:
    _limit(self._sock, self._deadline)
    self._sock.sendall(data)

  def makefile(self, mode: str) -> io.BufferedReader:
    del mode  # 'rb'
    self._is_read = True
    return io.BufferedReader(_Stream(self._sock, self._deadline))

  def close(self) -> None:
    if not self._is_read:
      self._sock.close()


class _Stream(io.RawIOBase):
  """The bytes that a socket receives until the deadline."""

  def __init__(self, sock: socket.socket, deadline: float):
    self._sock, self._deadline = sock, deadline

  def readable(self) -> bool:
    return True

  def readinto(self, buffer: Any) -> int:
    _limit(self._sock, self._deadline)
    return self._sock.recv_into(buffer)

  def close(self) -> None:
    self._sock.close()
    super().close()


def _limit(sock: socket.socket, deadline: float) -> None:
  """Limits the next call of a socket; raises TimeoutError if no time is left."""
  left = deadline - time.monotonic()
  if left <= 0:
    raise TimeoutError('the time of the request is over')
  sock.settimeout(left)
