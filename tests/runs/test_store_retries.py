"""Requests to a bucket that is away are repeated for some minutes, by a clock that no test waits for."""

from __future__ import annotations

import signal

import pytest

from ragen_jax.runs.interrupt import Interrupt
from ragen_jax.runs.store_retries import REPEAT_SECONDS, until_reached
from ragen_jax.runs.stores import StoreError
from tests.support.buckets import Pauses, away


def _failing(times, error=None):
  """(function that fails so many times, list of its calls)."""
  calls = []

  def operation():
    calls.append(None)
    if len(calls) <= times:
      raise error or away()

  return operation, calls


@pytest.fixture
def pauses(monkeypatch):
  return Pauses.put(monkeypatch)


def test_what_succeeds_is_called_once_and_nothing_is_told(pauses, caplog):
  operation, calls = _failing(0)
  until_reached(operation, 's3://bucket/run')
  assert len(calls) == 1 and pauses.taken == [] and not caplog.records


def test_pauses_grow_and_the_log_tells_when_it_begins_and_when_it_is_over(pauses, caplog):
  operation, calls = _failing(7)
  until_reached(operation, 's3://bucket/run')
  assert len(calls) == 8 and pauses.taken == [2, 4, 8, 16, 32, 60, 60]
  assert [record.getMessage() for record in caplog.records] == [
    's3://bucket/run: the network is down; trying again for 5 minutes',
    's3://bucket/run is reached again after 182 s',
  ]


def test_a_bucket_that_stays_away_is_an_error_after_the_last_attempt_at_the_limit(pauses):
  operation, calls = _failing(100)
  with pytest.raises(StoreError, match='the network is down'):
    until_reached(operation, 's3://bucket/run')
  assert sum(pauses.taken) == REPEAT_SECONDS == 300 and len(calls) == len(pauses.taken) + 1


def test_the_time_of_the_attempts_counts(pauses):
  def operation():
    pauses.now += 100
    raise away()

  with pytest.raises(StoreError):
    until_reached(operation, 's3://bucket/run')
  assert pauses.taken == [2, 4, 8]


@pytest.mark.parametrize(
  'cause', [FileNotFoundError(), PermissionError(), OSError('Forbidden: b\nno'), OSError(22, 'x')]
)
def test_requests_that_are_refused_are_not_repeated(pauses, caplog, cause):
  operation, calls = _failing(1, away(cause))
  with pytest.raises(StoreError):
    until_reached(operation, 's3://bucket/run')
  assert len(calls) == 1 and pauses.taken == [] and not caplog.records


def test_other_errors_are_raised_at_once(pauses):
  operation, calls = _failing(1, ZeroDivisionError())
  with pytest.raises(ZeroDivisionError):
    until_reached(operation, 's3://bucket/run')
  assert len(calls) == 1 and pauses.taken == []


def test_a_signal_to_a_run_waits_for_the_checkpoint_and_elsewhere_ends_the_pause(pauses):
  operation, calls = _failing(2)
  pauses.during = lambda: signal.raise_signal(signal.SIGINT)
  with pytest.raises(KeyboardInterrupt):
    until_reached(operation, 's3://bucket/run')
  assert len(calls) == 1
  operation, calls = _failing(1)
  with Interrupt() as interrupt:
    until_reached(operation, 's3://bucket/run')
  assert interrupt.requested == signal.SIGINT and len(calls) == 2
