"""Errors of serving: what a client sees; and those of store and engine, which become that."""

from __future__ import annotations

import dataclasses
import logging
import math
from typing import Any, ClassVar

from ragen_jax.utils.errors import UserError, one_line

_log = logging.getLogger(__name__)

_TYPES = {
  400: 'invalid_request_error',
  401: 'authentication_error',
  403: 'permission_error',
  404: 'not_found_error',
  409: 'conflict_error',
  410: 'not_found_error',
  413: 'invalid_request_error',
}
_LONGEST_VALUE = 80
# openai-python waits as a Retry-After header says only up to this many seconds; above, it gives up at once.
LONGEST_RETRY_AFTER_S = 120.0


@dataclasses.dataclass(eq=False)
class ApiError(Exception):
  """A request that gets no reply.

  Attributes:
    type: the class of the error, such as 'invalid_request_error'.
    code: the error itself, such as 'context_length_exceeded'; '' for none.
    param: the field of the request that is wrong; '' for none.
    message: one line for people.
    retry: whether the same request may succeed later; clients with the OpenAI packages do as it says.
    retry_after_s: 0 leaves the time to the client.
  """

  status: int
  type: str
  code: str
  param: str
  message: str
  retry: bool
  retry_after_s: float

  def __str__(self) -> str:
    return self.message

  def body(self) -> dict[str, Any]:
    """The JSON body; also the data of the event that ends a broken stream."""
    fields = {'message': self.message, 'type': self.type, 'param': self.param or None, 'code': self.code or None}
    return {'error': fields}

  def headers(self) -> dict[str, str]:
    """The headers that tell a client whether and when to try again."""
    headers = {'x-should-retry': 'true' if self.retry else 'false'}
    if self.retry and self.retry_after_s > 0:
      headers['retry-after'] = str(math.ceil(min(self.retry_after_s, LONGEST_RETRY_AFTER_S)))
    return headers


def _error(status: int, code: str, param: str, message: str, *, retry: bool, retry_after_s: float = 0.0) -> ApiError:
  kind = _TYPES.get(status, 'server_error')
  return ApiError(status, kind, code, param, one_line(message, str), retry, retry_after_s)


def bad_request(param: str, message: str, code: str = 'invalid_value') -> ApiError:
  """400: the request is wrong; another try is wrong too."""
  return _error(400, code, param, message, retry=False)


def wrong_value(param: str, value: Any, allowed: str) -> ApiError:
  """400 for a field: its name, its value and the allowed values in one line."""
  shown = one_line(value)
  shown = shown if len(shown) <= _LONGEST_VALUE else shown[: _LONGEST_VALUE - 3] + '...'
  return bad_request(param, f'{param}={shown}: must be {allowed}')


def too_long(tokens: int, limit: int) -> ApiError:
  """400: the prompt leaves no room for a reply in the context."""
  message = f'the prompt has {tokens} tokens, and the context has {limit}, of which the reply needs at least 1'
  return bad_request('messages', message, 'context_length_exceeded')


def too_large(limit: int) -> ApiError:
  """413: the body is larger than the server reads."""
  return _error(413, 'body_too_large', '', f'the request body is larger than {limit} bytes', retry=False)


def unauthorized(message: str) -> ApiError:
  """401: no key, an unknown key, or the key of another rollout."""
  return _error(401, 'invalid_api_key', '', message, retry=False)


def not_found(message: str, code: str = 'not_found') -> ApiError:
  """404: no such model, rollout or call."""
  return _error(404, code, '', message, retry=False)


def over(message: str) -> ApiError:
  """410: the rollout is over. Not 409, which the OpenAI packages try again."""
  return _error(410, 'rollout_over', '', message, retry=False)


def overloaded(message: str, retry_after_s: float) -> ApiError:
  """503: the queue is full, or the server is about to stop."""
  return _error(503, 'overloaded', '', message, retry=True, retry_after_s=retry_after_s)


def internal(message: str, *, retry: bool) -> ApiError:
  """500: a fault of the server. `retry`: another try may succeed, and nothing of this one was stored."""
  return _error(500, 'internal_error', '', message, retry=retry)


# -- errors of the store and the engine, which become those above


class RequestError(Exception):
  """A request that the store's present content does not allow; the message is one line for the client."""

  status: ClassVar[int]


class Invalid(RequestError):
  """A value that is never allowed."""

  status = 400


class Unauthorized(RequestError):
  """A key that was never given out."""

  status = 401


class NotFound(RequestError):
  """A rollout, attempt or call that the store does not hold."""

  status = 404


class Conflict(RequestError):
  """A request that contradicts what was stored before."""

  status = 409


class Gone(RequestError):
  """A request to an attempt or rollout that is over."""

  status = 410


class QueueFull(RuntimeError):
  """A call is refused because too many wait already."""


class EngineStopped(RuntimeError):
  """The engine was closed, or its thread ended with an exception."""


def api_error(error: BaseException) -> ApiError:
  """The error that a client sees."""
  match error:
    case ApiError():
      return error
    case QueueFull():
      return overloaded(str(error), retry_after_s=1.0)
    case RequestError():
      return _request_error(error)
    case EngineStopped():
      return internal(str(error), retry=True)
    case UserError():  # the disk is full, say; nothing was stored, and a person may help
      _log.error('a request failed: %s', error)
      return internal('the server cannot use its store; its log says why', retry=True)
  _log.error('a request failed', exc_info=error)
  return internal(f'{type(error).__name__}: {error}', retry=False)


def _request_error(error: RequestError) -> ApiError:
  match error.status:
    case 401:
      return unauthorized(str(error))
    case 404:
      return not_found(str(error))
    case 410:
      return over(str(error))
    case 409:
      return dataclasses.replace(over(str(error)), status=409, type='conflict_error', code='conflict')
  return bad_request('', str(error))


def stops() -> ApiError:
  """The server stops: the client may try again, perhaps at another server with the same store."""
  return overloaded('the server stops', retry_after_s=1.0)
