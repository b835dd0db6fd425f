"""The lock in a bucket: one owner, taken over from the dead and never from the living."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest

from ragen_jax.runs.store_lock import KEY, LOCK_RENEWAL, LOCK_SILENCE, StoreLock
from ragen_jax.utils.errors import UserError
from tests.support.buckets import memory_store


@pytest.fixture
def store():
  with memory_store() as found:
    yield found


def _lock(store, **fields):
  """A lock that is not renewed during a test, and that waits without taking time."""
  return StoreLock(store, **{'renewal': 1000.0, 'silence': 4000.0, 'sleep': lambda _: None} | fields)


def _record(store):
  return json.loads(store.read(KEY))


def _of_another_machine(store, **fields):
  record = {'host': 'far', 'pid': 7, 'machine': 'another boot', 'token': 'theirs', 'renewals': 0} | fields
  store.write(KEY, json.dumps(record).encode())
  return record


def test_a_lock_is_there_from_acquire_to_release(store):
  lock = _lock(store)
  lock.acquire()
  assert _record(store)['pid'] == os.getpid()
  lock.check()
  lock.release()
  assert store.read(KEY) is None


def test_the_lock_of_a_living_process_is_refused(store):
  _of_another_machine(store)

  def renewed(_):
    _of_another_machine(store, renewals=1)

  with pytest.raises(UserError) as e:
    _lock(store, sleep=renewed).acquire()
  assert str(e.value) == (
    'workdir s3://bucket/run is in use by another run (process 7 on far); wait for it or choose another --workdir'
  )
  assert _record(store)['token'] == 'theirs'


def test_a_lock_that_nobody_renews_is_taken_over_after_the_silence(store, caplog):
  _of_another_machine(store)
  waits = []
  lock = _lock(store, renewal=10.0, silence=40.0, sleep=waits.append)
  with caplog.at_level('WARNING'):
    lock.acquire()
  assert sum(waits) == 40.0 and max(waits) <= 5.0  # a living owner would have renewed it several times
  assert _record(store)['token'] != 'theirs'
  assert 'was left by process 7 on far; it is taken over' in caplog.text
  lock.release()


def test_a_lock_that_is_released_meanwhile_is_taken_at_once(store):
  _of_another_machine(store)
  waits = []

  def sleep(seconds):
    waits.append(seconds)
    store.delete([KEY])

  lock = _lock(store, sleep=sleep)
  lock.acquire()
  assert len(waits) == 1 and _record(store)['token'] != 'theirs'
  lock.release()


def test_the_lock_of_a_killed_process_of_this_machine_is_taken_over_at_once(store):
  dead = subprocess.Popen([sys.executable, '-c', ''])
  dead.wait(timeout=60)
  first = _lock(store)
  first._record['pid'] = dead.pid
  store.write(KEY, first._content())

  def never(_):
    raise AssertionError('it waits for a dead process')

  lock = _lock(store, sleep=never)
  lock.acquire()
  lock.release()
  # A number of a process says nothing about another machine, or another container.
  _of_another_machine(store, pid=dead.pid)
  with pytest.raises(AssertionError, match='waits'):
    _lock(store, sleep=never).acquire()


def test_the_lock_of_a_living_process_of_this_machine_is_waited_for(store):
  store.write(KEY, _lock(store)._content())
  waits = []
  lock = _lock(store, renewal=10.0, silence=40.0, sleep=waits.append)
  lock.acquire()
  assert sum(waits) == 40.0
  lock.release()


def test_the_loser_of_a_lock_stops_and_leaves_it(store):
  lock = _lock(store)
  lock.acquire()
  _of_another_machine(store)
  with pytest.raises(UserError, match=r'^--workdir=s3://bucket/run: process 7 on far has taken over the lock'):
    lock.check()
  lock.release()
  assert _record(store)['token'] == 'theirs'


def test_the_owner_renews_its_lock(store):
  written = []
  lock = _lock(store, renewal=0.001)
  write = store.write
  store.write = lambda key, content: (write(key, content), written.append(json.loads(content)['renewals']))
  lock.acquire()
  while len(written) < 3:  # the test's own limit of time ends a lock that is not renewed
    lock._ended.wait(0.01)
  lock.release()
  assert written[:3] == [1, 2, 3] and store.read(KEY) is None


def test_several_renewals_may_fail_before_a_lock_is_lost():
  assert LOCK_SILENCE >= 4 * LOCK_RENEWAL
