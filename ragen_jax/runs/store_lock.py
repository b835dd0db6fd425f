"""The lock of a workdir in a bucket: an object that one process creates, renews and deletes.

No operating system releases such a lock when its owner is killed. The owner therefore renews it, and a lock that is
not renewed for `LOCK_SILENCE` seconds is taken over. Waiting processes measure this time with their own clock, so the
clocks of machines may differ. An owner that finds the lock in other hands stops before it writes a checkpoint.
"""

from __future__ import annotations

import json
import logging
import os
import pathlib
import socket
import threading
import time
import uuid
from collections.abc import Callable

from ragen_jax.runs.stores import Store, StoreError
from ragen_jax.utils.errors import UserError

_log = logging.getLogger(__name__)

KEY = '.lock'
LOCK_RENEWAL = 15.0  # seconds between two renewals
LOCK_SILENCE = 90.0  # seconds without a renewal after which an owner counts as dead; several renewals may fail


class StoreLock:
  """Holds the object `.lock` of a store, from `acquire` to `release`.

  The object is JSON: the owner's `host` and `pid`, its `machine` (see `_machine`), a `token` of this lock, and the
  number of `renewals`.
  """

  def __init__(self, store: Store, *, renewal: float, silence: float, sleep: Callable[[float], None] = time.sleep):
    """Acquires nothing. The owner renews its lock every `renewal` seconds; others wait for `silence` seconds."""
    self._store, self._renewal, self._silence, self._sleep = store, renewal, silence, sleep
    self._record = {
      'host': socket.gethostname(),
      'pid': os.getpid(),
      'machine': _machine(),
      'token': uuid.uuid4().hex,
      'renewals': 0,
    }
    self._ended = threading.Event()
    self._thread = threading.Thread(target=self._renew_until_released, name='workdir lock', daemon=True)

  def acquire(self) -> None:
    """Takes the lock, and renews it in a thread from then on.

    Raises UserError if another process holds and renews it, and StoreError if a request failed.
    """
    while not self._store.create(KEY, self._content()):
      found = self._wait_for_change()
      if found is None:
        continue  # it was released
      _log.warning('the lock of %s was left by %s; it is taken over', self._store.url, _owner(found))
      self._store.write(KEY, self._content())
      break
    self._thread.start()

  def check(self) -> None:
    """Raises UserError if another process has taken the lock over, and StoreError if a request failed."""
    found = _parse(self._store.read(KEY))
    if found.get('token') != self._record['token']:
      raise UserError(
        f'--workdir={self._store.url}: {_owner(found)} has taken over the lock of this run, which did not renew it for '
        f'{self._silence:g} seconds; nothing more is written'
      )

  def release(self) -> None:
    """Deletes the lock if this process still holds it, and ends the thread."""
    self._ended.set()
    self._thread.join()
    if _parse(self._store.read(KEY)).get('token') == self._record['token']:
      self._store.delete([KEY])

  def _content(self) -> bytes:
    return json.dumps(self._record).encode()

  def _wait_for_change(self) -> dict | None:
    """The lock of a dead owner; None if there is no lock any more. Raises UserError if the owner is alive."""
    first = self._store.read(KEY)
    found, waited = _parse(first), 0.0
    if first is not None and not _ended_here(found):
      _log.warning(
        '%s is locked by %s; waiting %g seconds for a sign of life', self._store.url, _owner(found), self._silence
      )
    while first is not None and not _ended_here(found):
      if waited >= self._silence:
        return found
      pause = self._renewal / 2
      self._sleep(pause)
      waited += pause
      now = self._store.read(KEY)
      if now is not None and now != first:
        raise UserError(
          f'workdir {self._store.url} is in use by another run ({_owner(_parse(now))}); wait for it or choose another '
          '--workdir'
        )
      if now is None:
        return None
    return None if first is None else found

  def _renew_until_released(self) -> None:
    while not self._ended.wait(self._renewal):
      try:
        self.check()
        self._record['renewals'] += 1
        self._store.write(KEY, self._content())
      except StoreError as e:
        _log.warning('the lock of %s was not renewed: %s', self._store.url, e)
      except UserError as e:
        _log.warning('%s', e)
        return


def _parse(content: bytes | None) -> dict:
  try:
    record = json.loads(content or b'{}')
  except ValueError:
    record = {}
  return record if isinstance(record, dict) else {}


def _owner(record: dict) -> str:
  return f'process {record.get("pid", "?")} on {record.get("host", "an unknown host")}'


def _machine() -> str:
  """The boot of this machine and the name space of its process numbers; '' if the system does not tell."""
  try:
    return f'{pathlib.Path("/proc/sys/kernel/random/boot_id").read_text().strip()} {os.readlink("/proc/self/ns/pid")}'
  except OSError:
    return ''


def _ended_here(record: dict) -> bool:
  """Whether the owner was a process of this machine that does not run any more."""
  pid = record.get('pid')
  if not record.get('machine') or record['machine'] != _machine() or not isinstance(pid, int):
    return False
  try:
    os.kill(pid, 0)
  except ProcessLookupError:
    return True
  except OSError:
    pass
  return False
