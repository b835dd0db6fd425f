"""Calls in threads: order, time limits, and exceptions of any kind."""

from __future__ import annotations

import threading
import time

import pytest

from ragen_jax.utils.threads import Fault, run_calls
from tests.support.stopped_clock import stop_clock
from tests.support.text_games import (
  Nameless,
)


@pytest.fixture
def clock(monkeypatch):
  """The clock of the time limits."""
  stopped = stop_clock(monkeypatch, 'ragen_jax.utils.threads')
  yield stopped
  stopped.release.set()


def test_a_fault_is_written_in_one_short_line():
  assert str(Fault('a', 'b\n  c')) == 'a: b c'
  assert len(str(Fault('a', 'b' * 1000))) == 300
  assert str(Fault('a\n\x1b', 'b\x1b[2J\rc\x07')) == 'a ?: b?[2J c?' and str(Fault('a\n\x1b')) == 'a ?'


def test_calls_keep_their_order_and_run_side_by_side():
  barrier = threading.Barrier(4, timeout=60)  # breaks unless four wait at once
  results = run_calls([lambda i=i: (barrier.wait(), i)[1] for i in range(8)], what='step', workers=4, timeout_s=90)
  assert results == [(i, None) for i in range(8)]
  assert run_calls([], what='step', workers=2, timeout_s=1) == []
  main = threading.get_ident()
  assert run_calls([threading.get_ident], what='step', workers=0, timeout_s=1) == [(main, None)]
  assert run_calls([threading.get_ident], what='step', workers=1, timeout_s=90)[0][0] != main


def test_a_call_that_hangs_is_left_behind_and_the_others_are_not(clock):
  functions = [lambda: 'a', lambda: clock.hang(1.0), lambda: 'b', lambda: 1 / 0, lambda: 'c']
  start = time.monotonic()
  results = run_calls(functions, what='step', workers=1, timeout_s=0.3)
  assert time.monotonic() - start < 60  # it hangs for longer
  assert [result for result, _ in results] == ['a', None, 'b', None, 'c']
  assert results[1][1] == Fault('step took longer than 0.3 s', hung=True)
  assert results[3][1].kind == 'step raised ZeroDivisionError'
  assert 'test_threads.py' in results[3][1].detail


def test_the_limit_is_one_call_s_own_and_not_that_of_the_queue(clock):
  results = run_calls([lambda: clock.take(0.025)] * 6, what='step', workers=1, timeout_s=0.1)
  assert results == [(None, None)] * 6


def test_where_nothing_answers_the_rest_is_not_tried(clock):
  begun = []
  functions = [lambda i=i: (begun.append(i), clock.hang(1.0)) for i in range(50)]
  results = run_calls(functions, what='reset', workers=1, timeout_s=0.2)
  assert begun == [0, 1, 2]
  assert {fault.kind for _, fault in results} == {'reset took longer than 0.2 s'}
  assert [fault.hung for _, fault in results] == [True] * 3 + [False] * 47


def _abandoned(what):
  return [t for t in threading.enumerate() if t.name == f'ragen_jax-{what}']


def test_abandoned_threads_are_limited_and_those_that_end_are_given_back(clock, monkeypatch):
  monkeypatch.setattr('ragen_jax.utils.threads._MOST_ABANDONED', 3)
  owner, begun = object(), []

  def call(function, **more):
    more = {'owner': owner} | more
    ((result, fault),) = run_calls([function], what='linger', workers=1, timeout_s=0.1, **more)
    return result or str(fault)

  def hang():
    begun.append(1)
    clock.hang(1.0)
    return 'late'

  late = 'linger took longer than 0.1 s'
  refused = 'linger is no longer called: 3 calls that took too long are still running'
  assert [call(hang) for _ in range(6)] == [late] * 3 + [refused] * 3 and len(begun) == len(_abandoned('linger')) == 3
  # Only calls of the same owner are refused, and not those that are always made.
  assert [call(lambda: 'ok', owner=object()), call(lambda: 'ok', owner=None)] == ['ok', 'ok']
  assert [call(lambda: 'ok', always=True), call(lambda: 'ok')] == ['ok', refused]
  clock.release.set()
  for thread in _abandoned('linger'):
    thread.join(60)
  assert call(lambda: 'ok') == 'ok' and not _abandoned('linger')


def test_the_limit_of_abandoned_threads_holds_within_one_batch(clock, monkeypatch):
  monkeypatch.setattr('ragen_jax.utils.threads._MOST_ABANDONED', 2)
  functions = [lambda: 'ok', lambda: clock.hang(1.0)] * 5
  results = run_calls(functions, what='linger', workers=1, timeout_s=0.1, owner=clock)
  assert [result for result, _ in results] == ['ok', None] * 2 + [None] * 6
  assert [fault.hung for _, fault in results if fault] == [True] * 2 + [False] * 6
  assert {fault.kind for _, fault in results[4:]} == {'linger is no longer called'}


@pytest.mark.parametrize('workers', [0, 1])
def test_exceptions_of_any_kind_become_faults(workers):
  def fail(error):
    raise error

  errors = [Nameless(), GeneratorExit(), SystemExit(1), UnicodeError('\ud800')]
  errors += [KeyboardInterrupt()] * workers  # in a thread, it does not come from the user
  start = time.monotonic()
  results = run_calls([lambda e=e: fail(e) for e in errors], what='step', workers=workers, timeout_s=90)
  assert time.monotonic() - start < 60
  assert [fault.kind for _, fault in results] == [f'step raised {type(e).__name__}' for e in errors]
  assert 'Nameless that cannot be written: RuntimeError' in str(results[0][1])
  assert '?' in str(results[3][1]) and str(results[3][1]).encode()
  with pytest.raises(KeyboardInterrupt):
    run_calls([lambda: fail(KeyboardInterrupt())], what='step', workers=0, timeout_s=90)
