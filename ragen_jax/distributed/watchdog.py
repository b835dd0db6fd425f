"""Notices a process of a run that has died or hangs, so that the others end with a line that names it.

Each process publishes a record every second, in the key-value store of the run's first process: its progress, the phase
it is in, and the line that its main thread executes. All processes pass the same points in the same order, so a process
that has passed fewer points than another one is being waited for. Each process judges by itself, with its own clock:

  silent    its record did not change for `SILENCE` seconds: it was killed or stopped, or cannot be reached
  hanging   it was waited for, and passed no point for `patience` seconds

A process that waits in a collective operation cannot look by itself; two threads do it. One exchanges the records and
may block if the store cannot be reached; the other judges.
"""

from __future__ import annotations

import dataclasses
import json
import os
import pathlib
import socket
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any, Protocol

# Seconds without a new record after which a process counts as dead.
SILENCE = 60.0
# Seconds between two records.
INTERVAL = 1.0
# Seconds without a new record after which a process is suspected, if a collective operation has failed.
_SUSPECT = 4.0
# Intervals that the first process gives the others before it ends.
_LEAD = 4


class Store(Protocol):
  """Texts by key that all processes see."""

  def set(self, key: str, text: str) -> None:
    """Writes or replaces a text."""

  def all(self) -> Mapping[str, str]:
    """All texts."""


@dataclasses.dataclass(frozen=True)
class Record:
  """What a process says about itself."""

  beat: int = 0  # number of the record
  points: int = 0  # number of points that its main thread has passed
  phase: str = ''  # for people
  place: str = ''  # where its main thread is: 'file.py:12, step'
  who: str = ''  # its machine and process id
  failed: str = ''  # the reason why it ends; '' while it runs


@dataclasses.dataclass
class _Seen:
  """The newest record of a process, and when its parts changed, by the own clock."""

  record: Record
  beat_at: float
  points_at: float


class Watchdog:
  """The records of all processes, and the judgement about them."""

  def __init__(
    self, store: Store, index: int, count: int, *, patience: float, end: Callable[[str], None],
    clock: Callable[[], float] = time.monotonic,
  ):  # fmt: skip
    """Starts nothing, see `start`.

    Args:
      patience: seconds that a process may be waited for; 0 for any time.
      end: ends this process with a message; called by a thread of the watchdog.
    """
    self._store, self._index, self._count, self._patience = store, index, count, patience
    self._end, self._clock = end, clock
    self._lock = threading.Lock()
    self._own = Record(who=f'{socket.gethostname()}, pid {os.getpid()}')
    now = clock()
    self._seen = {i: _Seen(Record(), now, now) for i in range(count)}
    self._exchanged_at = self._judged_at = now
    self._closed = threading.Event()
    self._verdict = ''
    self._main = threading.main_thread().ident

  def start(self) -> None:
    """Publishes the first record, and starts the threads."""
    self.exchange()
    for name, step in (('exchange', self.exchange), ('judge', self._judge_and_end)):
      threading.Thread(target=self._repeat, args=(step,), daemon=True, name=f'ragen_jax-watchdog-{name}').start()

  def close(self) -> None:
    """Ends the threads after their current step; waits for none."""
    self._closed.set()

  def passed(self, phase: str = '') -> None:
    """Says that the main thread passes a point, where a `phase` may begin; all processes pass the same in one order."""
    with self._lock:
      self._own = dataclasses.replace(self._own, points=self._own.points + 1, phase=phase or self._own.phase)

  def fail(self, reason: str) -> None:
    """Publishes that this process ends because of an error of its own.

    Waits for some seconds: the store may not answer, and if it is in this process the others need time to read it.
    """
    with self._lock:
      self._own = dataclasses.replace(self._own, failed=reason)
    thread = threading.Thread(target=self.exchange, daemon=True)
    thread.start()
    thread.join(_SUSPECT)
    if self._index == 0:
      self._closed.wait(_LEAD * INTERVAL)

  def exchange(self) -> None:
    """Publishes the own record, and reads those of all processes."""
    with self._lock:
      self._own = dataclasses.replace(self._own, beat=self._own.beat + 1, place=self._place())
      own = self._own
    try:
      self._store.set(str(self._index), json.dumps(dataclasses.asdict(own)))
      texts = self._store.all()
    except Exception:  # noqa: BLE001, the client of the store raises its own types; `judge` notices the silence
      return
    now = self._clock()
    with self._lock:
      self._exchanged_at = now
      for i, seen in self._seen.items():
        record = Record(**json.loads(texts[str(i)])) if str(i) in texts else Record()
        if record.points != seen.record.points:
          seen.points_at = now
        if record.beat != seen.record.beat:
          seen.beat_at = now
        seen.record = record

  def judge(self) -> str:
    """A message about the processes that are missing; '' if none is."""
    now = self._clock()
    with self._lock:
      paused, self._judged_at = now - self._judged_at > SILENCE / 4, now
      if paused:  # this process was stopped itself, and its knowledge is old
        self._exchanged_at = now
        for seen in self._seen.values():
          seen.beat_at = seen.points_at = now
        return ''
      failed = {i: seen.record.failed for i, seen in self._seen.items() if seen.record.failed and i != self._index}
      silent = self._silent(SILENCE, now)
      late = [] if failed or silent else self._late(now)
      lines = [f'{self._name(i)} has ended: {reason}' for i, reason in failed.items()]
      lines += [f'{self._name(i)} has not answered for {SILENCE:.0f} s; it was last {self._where(i)}' for i in silent]
      lines += [f'{self._name(i)} hangs for {self._patience:g} s {self._where(i)}, and others wait' for i in late]
    return '; '.join(lines)

  def blame(self) -> str:
    """After a failed collective operation: a message about the process that is missing; '' if all answer.

    Waits some seconds, until a process that has died is noticed. If the processes have judged already, that judgement
    stands: the operation has failed as another process has ended because of it.
    """
    deadline = self._clock() + 3 * _SUSPECT
    while self._clock() < deadline and not self._verdict and not self._closed.wait(INTERVAL / 2):
      now = self._clock()
      with self._lock:
        failed = [(i, seen.record.failed) for i, seen in self._seen.items() if seen.record.failed and i != self._index]
        silent = self._silent(_SUSPECT, now)
        if failed:
          return '; '.join(f'{self._name(i)} has ended: {reason}' for i, reason in failed)
        if silent:
          return f'{self._name(silent[0])} does not answer; it was last {self._where(silent[0])}'
    return self._verdict

  def _silent(self, seconds: float, now: float) -> list[int]:
    """The other processes without a new record for some seconds, the longest silent first."""
    if now - self._exchanged_at > seconds:
      return [0] if self._index else []  # the store is in the first process
    quiet = [i for i, seen in self._seen.items() if i != self._index and now - seen.beat_at > seconds]
    return sorted(quiet, key=lambda i: self._seen[i].beat_at)

  def _late(self, now: float) -> list[int]:
    """The processes, this one too, that are waited for and have passed no point for too long."""
    most = max(seen.record.points for seen in self._seen.values())
    behind = [seen for seen in self._seen.values() if seen.record.points < most]
    if not self._patience or not behind:
      return []
    # The wait begins when the first one arrives where the others are missing.
    arrived = min(seen.points_at for seen in self._seen.values() if seen.record.points == most)
    return [
      i
      for i, seen in self._seen.items()
      if seen.record.points < most and now - max(seen.points_at, arrived) > self._patience
    ]

  def _name(self, index: int) -> str:
    who = self._seen[index].record.who
    return f'process {index} of {self._count}' + (f' ({who})' if who else '')

  def _where(self, index: int) -> str:
    record = self._seen[index].record
    return f'in the phase {record.phase or "start"}' + (f', at {record.place}' if record.place else '')

  def _place(self) -> str:
    """The line that the main thread executes."""
    frame: Any = sys._current_frames().get(self._main)
    if frame is None:
      return ''
    return f'{pathlib.Path(frame.f_code.co_filename).name}:{frame.f_lineno}, {frame.f_code.co_name}'

  def _judge_and_end(self) -> None:
    if message := self.judge():
      self._verdict = message
      if self._index == 0:  # the store ends with this process, and JAX then ends the others before they have judged
        self._closed.wait(_LEAD * INTERVAL)
      self._closed.set()
      self._end(message)

  def _repeat(self, step: Callable[[], None]) -> None:
    while not self._closed.wait(INTERVAL):
      step()
