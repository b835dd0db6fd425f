"""Errors of the server's parts as a client sees them."""

from __future__ import annotations

import logging

import pytest

from ragen_jax.serving.engine import EngineStopped, QueueFull
from ragen_jax.serving.failures import api_error, stops
from ragen_jax.serving.records import Conflict, Gone, Invalid, NotFound, Unauthorized
from ragen_jax.serving.wire import errors
from ragen_jax.utils.errors import UserError


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
