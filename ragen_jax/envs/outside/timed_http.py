"""HTTP requests with one time limit for the whole exchange, tries of requests, and batches of them.

The time limit of a socket is that of one read. A server that sends a byte before each limit, in the status line, in
headers, in answers `100 Continue` or in the body, would hold a request for ever.
"""

from __future__ import annotations

import dataclasses
import functools
import http.client
import io
import json
import socket
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragen_jax.utils.errors import describe_error
from ragen_jax.utils.retry import pause_s
from ragen_jax.utils.threads import Fault, run_calls

_LONGEST_WAIT_S = 30.0
_RETRY_STATUS = (408, 425, 429, 500, 502, 503, 504)
_CHUNK = 1 << 16
_LARGEST_ANSWER_MIB = 64
_MOST_FAILURES = 3  # requests of a batch


class NoAnswer(Exception):
  """A request has no usable answer after all tries; `away` if there was no whole answer: others would wait in vain."""

  def __init__(self, message: str, away: bool = False):
    super().__init__(message)
    self.away = away


@dataclasses.dataclass(frozen=True)
class JsonRequests:
  """Sends requests, and sends them again where that may help.

  Attributes:
    timeout_s: seconds of one try.
    tries: number of tries.
    backoff_s: seconds before the second try; each further wait is twice as long, up to 30 s.
    headers: headers of every request, besides the type of its body.
  """

  timeout_s: float
  tries: int
  backoff_s: float
  headers: Mapping[str, str] = dataclasses.field(default_factory=dict, repr=False)

  @property
  def longest_s(self) -> float:
    """More seconds than all tries take; a limit for what has none of its own, such as the look-up of the host."""
    return (self.tries + 1) * self.timeout_s + sum(map(self._wait_s, range(1, self.tries)))

  def post(self, url: str, body: dict[str, Any], read: Callable[[bytes], Any]) -> Any:
    """Sends `body`, and returns what `read` makes of the answer.

    Args:
      url: the address.
      body: what JSON can say.
      read: raises ValueError, KeyError or TypeError for a wrong answer, which another try may change.

    Raises:
      NoAnswer: no try had a usable answer.
    """
    return self._send(url, json.dumps(body).encode(), {'Content-Type': 'application/json'}, read)

  def get(self, url: str, read: Callable[[bytes], Any]) -> Any:
    """Asks for a page, and returns what `read` makes of it; see `post`."""
    return self._send(url, None, {}, read)

  def _send(self, url: str, data: bytes | None, headers: Mapping[str, str], read: Callable[[bytes], Any]) -> Any:
    """What `read` makes of the answer to a GET, or with data to a POST; see `post`."""
    is_away = False
    for i in range(self.tries):
      if i:
        time.sleep(self._wait_s(i))
      try:
        return read(self._receive(urllib.request.Request(url, data, {**headers, **self.headers})))
      except urllib.error.HTTPError as e:
        is_away, reason = False, f'status {e.code} {e.reason}'
        e.close()
        if e.code not in _RETRY_STATUS:
          raise NoAnswer(f'{url}: {reason}') from e
      except TimeoutError:
        is_away, reason = True, f'no whole answer in {self.timeout_s:g} s'
      except (OSError, http.client.HTTPException) as e:
        is_away, reason = True, describe_error(e)
      except (ValueError, KeyError, TypeError, RecursionError) as e:
        is_away, reason = False, describe_error(e)
    raise NoAnswer(f'{url}: {reason}, {self.tries} {"try" if self.tries == 1 else "tries"}', is_away)

  def _wait_s(self, tried: int) -> float:
    """Seconds to wait after this many tries, at least 1."""
    return pause_s(tried, self.backoff_s, _LONGEST_WAIT_S)

  @functools.cached_property
  def _opener(self) -> urllib.request.OpenerDirector:
    return make_opener()

  def _receive(self, request: urllib.request.Request) -> bytes:
    """The body of the answer to one request.

    Raises:
      OSError: the whole answer takes longer than `timeout_s`, or there is no answer.
      NoAnswer: the answer is too large; another try would not help.
    """
    with self._opener.open(request, timeout=self.timeout_s) as response:
      parts, size = [], 0
      while part := response.read1(_CHUNK):
        parts.append(part)
        size += len(part)
        if size > _LARGEST_ANSWER_MIB << 20:
          raise NoAnswer(f'{request.full_url}: the answer is larger than {_LARGEST_ANSWER_MIB} MiB')
      return b''.join(parts)


def in_parts(
  items: Sequence[Any],
  size: int,
  ask: Callable[[Sequence[Any]], list[Any]],
  *,
  what: str,
  workers: int,
  timeout_s: float,
  owner: Any,
) -> list[Any]:
  """The results of items that are asked for in parts, some parts at a time.

  After a request without an answer, the remaining requests are not sent, and neither are they after three requests with
  errors. So a server that is away costs one series of tries.

  Args:
    size: maximum number of items in a request.
    ask: sends the request for a part, and returns a result for each of its items; raises NoAnswer.
    what, workers, timeout_s, owner: see `run_calls`.

  Returns:
    For each item its result, or a `Fault`.
  """
  failures: list[NoAnswer] = []

  def send(part: Sequence[Any]) -> list[Any]:
    away = [e for e in failures if e.away]
    if not away and len(failures) < _MOST_FAILURES:
      try:
        return ask(part)
      except NoAnswer as e:
        failures.append(e)
        return [Fault(f'{what} got no answer', str(e))] * len(part)
    return [Fault(f'{what} got no answer', str((away or failures)[0]))] * len(part)

  parts = [items[i : i + size] for i in range(0, len(items), size)]
  calls = [functools.partial(send, part) for part in parts]
  results = run_calls(calls, what=what, workers=workers, timeout_s=timeout_s, owner=owner)
  found: list[Any] = []
  for part, (result, fault) in zip(parts, results, strict=True):
    found += result if fault is None else [fault] * len(part)
  return found


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
