"""Errors: bodies and headers as clients read them."""

from __future__ import annotations

import logging

import pytest

from ragen_jax.serving import errors
from ragen_jax.serving.errors import (
  Conflict,
  EngineStopped,
  Gone,
  Invalid,
  NotFound,
  QueueFull,
  Unauthorized,
  api_error,
  stops,
)
from ragen_jax.utils.errors import UserError


@pytest.mark.parametrize(
  ('error', 'status', 'kind', 'headers'),
  [
    (errors.bad_request('n', 'no'), 400, 'invalid_request_error', {'x-should-retry': 'false'}),
    (errors.too_long(9, 8), 400, 'invalid_request_error', {'x-should-retry': 'false'}),
    (errors.unauthorized('no'), 401, 'authentication_error', {'x-should-retry': 'false'}),
    (errors.not_found('no'), 404, 'not_found_error', {'x-should-retry': 'false'}),
    (errors.over('no'), 410, 'not_found_error', {'x-should-retry': 'false'}),
    (errors.too_large(3), 413, 'invalid_request_error', {'x-should-retry': 'false'}),
    (errors.internal('no', retry=False), 500, 'server_error', {'x-should-retry': 'false'}),
    (errors.internal('no', retry=True), 500, 'server_error', {'x-should-retry': 'true'}),
    (errors.overloaded('no', 1.5), 503, 'server_error', {'x-should-retry': 'true', 'retry-after': '2'}),
    (errors.overloaded('no', 0), 503, 'server_error', {'x-should-retry': 'true'}),
    # A client gives up at once if it should wait longer than this.
    (errors.overloaded('no', 1e9), 503, 'server_error', {'x-should-retry': 'true', 'retry-after': '120'}),
  ],
)
def test_status_body_and_headers(error, status, kind, headers):
  assert (error.status, error.headers()) == (status, headers)
  body = error.body()['error']
  assert set(body) == {'message', 'type', 'param', 'code'}
  assert (body['type'], body['message']) == (kind, str(error))


def test_a_context_that_is_too_short_has_the_code_that_clients_know():
  assert errors.too_long(9, 8).body()['error']['code'] == 'context_length_exceeded'


def test_wrong_values_are_one_short_line():
  error = errors.wrong_value('stop', 'a\n' * 1000, 'short')
  assert error.param == 'stop'
  assert '\n' not in error.message and len(error.message) < 120
  assert error.message.startswith("stop='a\\na") and error.message.endswith('...: must be short')


def test_errors_can_be_raised_and_caught():
  """Frameworks set the traceback of exceptions that they pass on."""
  with pytest.raises(errors.ApiError, match=r'^no$') as e:
    raise errors.not_found('no').with_traceback(None)
  e.value.__traceback__ = None


@pytest.mark.parametrize(
  ('error', 'status', 'code'),
  [
    (Invalid('a'), 400, 'invalid_value'), (Unauthorized('a'), 401, 'invalid_api_key'),
    (NotFound('a'), 404, 'not_found'), (Conflict('a'), 409, 'conflict'), (Gone('a'), 410, 'rollout_over'),
  ],
)  # fmt: skip
def test_errors_of_the_store(error, status, code):
  told = api_error(error)
  assert (told.status, told.code, told.message, told.retry) == (status, code, 'a', False)


def test_errors_after_which_a_client_tries_again():
  for error, status in ((QueueFull('full'), 503), (stops(), 503), (EngineStopped('closed'), 500)):
    told = api_error(error)
    assert (told.status, told.retry) == (status, True)


def test_a_store_that_cannot_be_used_may_be_mended_and_its_path_is_nobodys_business(caplog):
  with caplog.at_level(logging.ERROR):
    told = api_error(UserError('store /secret/agents.sqlite cannot be used: disk is full'))
  assert (told.status, told.retry) == (500, True) and 'secret' not in told.message
  assert [r.getMessage().count('disk is full') for r in caplog.records] == [1] and not caplog.records[0].exc_info


def test_errors_of_the_wire_stay_and_others_are_logged(caplog):
  told = errors.bad_request('n', 'no')
  assert api_error(told) is told and not caplog.records
  with caplog.at_level(logging.ERROR):
    told = api_error(RuntimeError('broken'))
  assert (told.status, told.message, told.retry) == (500, 'RuntimeError: broken', False) and len(caplog.records) == 1
