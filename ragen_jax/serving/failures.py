"""Errors of the server's parts as those that a client sees."""

from __future__ import annotations

import dataclasses
import logging

from ragen_jax.serving.engine import EngineStopped, QueueFull
from ragen_jax.serving.records import RequestError
from ragen_jax.serving.wire import errors
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)


def api_error(error: BaseException) -> errors.ApiError:
  """The error that a client sees."""
  match error:
    case errors.ApiError():
      return error
    case QueueFull():
      return errors.overloaded(str(error), retry_after_s=1.0)
    case RequestError():
      return request_error(error)
    case EngineStopped():
      return errors.internal(str(error), retry=True)
    case UserError():  # the disk is full, say; nothing was stored, and a person may help
      _log.error('a request failed: %s', error)
      return errors.internal('the server cannot use its store; its log says why', retry=True)
  _log.error('a request failed', exc_info=error)
  return errors.internal(f'{type(error).__name__}: {error}', retry=False)


def request_error(error: RequestError) -> errors.ApiError:
  """An error of the store as the wire's."""
  match error.status:
    case 401:
      return errors.unauthorized(str(error))
    case 404:
      return errors.not_found(str(error))
    case 410:
      return errors.over(str(error))
    case 409:
      return dataclasses.replace(errors.over(str(error)), status=409, type='conflict_error', code='conflict')
  return errors.bad_request('', str(error))


def stops() -> errors.ApiError:
  """The server stops: the client may try again, perhaps at another server with the same store."""
  return errors.overloaded('the server stops', retry_after_s=1.0)
