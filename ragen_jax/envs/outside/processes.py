"""Sessions whose games are objects in worker processes."""

from __future__ import annotations

import collections
import itertools
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragen_jax.envs.outside import games
from ragen_jax.envs.outside.base import Session
from ragen_jax.utils.errors import one_line
from ragen_jax.utils.messages import pack
from ragen_jax.utils.threads import Fault
from ragen_jax.utils.workers import Worker, Workers

# What `read_step` reads of a mapping.
INFO_KEYS = ('success', 'effective', 'metrics')
_GIVE_UP_AFTER = 3  # resets in a row that end the process
_FACTORY = f'{games.__file__}:Rows'


class GameProcesses:
  """The worker processes of one environment, which all of its sessions share."""

  def __init__(
    self, kind: str, settings: Mapping[str, Any], *, count: int, memory_mib: int, step_timeout_s: float, name: str
  ):
    """Starts nothing yet.

    Args:
      kind, settings: see `games.Rows`.
      count: number of processes.
      memory_mib: limit of the memory of a process; 0 for no limit.
      step_timeout_s: time limit of a step or a reset, in seconds.
      name: for the log and for lists of processes.

    Raises:
      ValueError: a setting cannot be sent to another process; one line names it.
    """
    for field, value in settings.items():
      try:
        pack(value)
      except TypeError as e:
        raise ValueError(
          f'{kind}: {field}={one_line(value)} with processes={count}; allowed: numbers, texts and collections of these '
          f'({one_line(e, str)})'
        ) from e
    self.step_timeout_s = step_timeout_s
    args = kind, dict(settings), INFO_KEYS
    self.workers = Workers(_FACTORY, args, count=count, memory_mib=memory_mib, name=name)
    self._sessions = itertools.count()
    self._ended: list[int] = []  # sessions; added to by finalizers, which may run at any place
    # Describes the games and reads actions. Its end, if it hangs, must not concern rows.
    self._probe = Worker(_FACTORY, args, memory_mib=memory_mib, name=name)

  def describe(self, where: str) -> dict[str, Any]:
    """What the games' `describe` returns, from a process of its own.

    Args:
      where: the option that names the games, for errors.

    Raises:
      ValueError: no object can be made, or it says nothing that can be read; one line says why.
    """
    result, fault = self._probe.call('describe', timeout_s=self.step_timeout_s)
    if fault is not None:
      raise ValueError(f'{where} cannot be used in a process ({fault})')
    about, problem = result
    if problem:
      raise ValueError(problem)
    return about

  def end_probe(self) -> None:
    """Ends the process that described the games, where no actions will be read."""
    self._probe.close()

  def is_action(self, text: str) -> tuple[bool, str]:
    """Whether a text names an action, and what is wrong with the parser, or ''."""
    result, fault = self._probe.call('is_action', text, timeout_s=self.step_timeout_s)
    return (False, str(fault)) if fault is not None else result

  def open(self, rows: int) -> ProcessSession:
    """A session with one object for each row."""
    session = ProcessSession(self, next(self._sessions), rows)
    weakref.finalize(session, self._ended.append, session.number)
    return session

  def forget_ended(self) -> None:
    """Closes the games of sessions that nobody holds any more."""
    ended = []
    while self._ended:
      ended.append(self._ended.pop())

    def forget(_: int, worker: Worker) -> None:
      for session in ended if worker.process else ():
        worker.call('forget', session, timeout_s=self.step_timeout_s)

    if ended:
      self.workers.each(forget, 'close')


class ProcessSession(Session):
  """A session with one object for each row, spread over worker processes, with the methods of `LocalSession`'s.

  The rows of a process play one after another, in its main thread, and the processes side by side. A call that raises
  costs its row the object. A call that exceeds its time limit or its memory, or that crashes, costs all rows of the
  process theirs: their episodes end as faults, and they begin again at their next reset.
  """

  def __init__(self, processes: GameProcesses, number: int, rows: int):
    """Makes no object yet.

    Args:
      number: of the session, to tell its rows from those of others.
    """
    self.number = number
    self._processes = processes
    self._homes = [0] * rows  # the number of the process that has the row's object; 0 if it has none

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """See `Session`. Making a row's object is part of its first reset."""
    self._processes.forget_ended()
    begun = {row: (seed, member) for row, seed, member in zip(rows, seeds, members, strict=True)}
    return self._spread('reset', rows, lambda worker, own: self._reset(worker, {row: begun[row] for row in own}))

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    """See `Session`."""
    chosen = dict(zip(rows, actions, strict=True))
    return self._spread('step', rows, lambda worker, own: self._step(worker, {row: chosen[row] for row in own}))

  def _spread(self, what: str, rows: Sequence[int], play: Callable[[Worker, list[int]], dict[int, Any]]) -> list[Any]:
    """The results of rows, each played by the worker that it belongs to."""
    count = len(self._processes.workers.workers)
    shares: list[list[int]] = [[row for row in rows if row % count == i] for i in range(count)]
    outcomes = self._processes.workers.each(lambda i, worker: play(worker, shares[i]) if shares[i] else {}, what)
    results: dict[int, Any] = {}
    for share, (played, fault) in zip(shares, outcomes, strict=True):
      results |= played if fault is None else dict.fromkeys(share, fault)
    return [results[row] for row in rows]

  def _reset(self, worker: Worker, begin: Mapping[int, tuple[int, int]]) -> dict[int, Any]:
    """Resets the rows of one worker. Rows whose process ends in this are reset again after the others, once."""
    results: dict[int, Any] = {}
    waiting, again = collections.deque(begin), set()
    ended_in_a_row = 0
    while waiting:
      row = waiting.popleft()
      result, fault = worker.call('reset', self.number, row, *begin[row], timeout_s=self._processes.step_timeout_s)
      results[row] = fault or result
      self._homes[row] = 0 if fault else worker.process
      ended_in_a_row = ended_in_a_row + 1 if worker.process == 0 else 0
      for other in begin:
        if other in results and self._homes[other] not in (0, worker.process):
          self._homes[other], results[other] = 0, self._lost(worker)
          if other not in again:
            again.add(other)
            waiting.append(other)
      if ended_in_a_row == _GIVE_UP_AFTER:
        results |= dict.fromkeys(waiting, Fault(results[row].kind, 'not tried, because earlier calls ended like this'))
        break
    return results

  def _step(self, worker: Worker, actions: Mapping[int, str]) -> dict[int, Any]:
    """Steps the rows of one worker."""
    results: dict[int, Any] = {}
    for row, action in actions.items():
      home = self._homes[row]
      if home == 0 or home != worker.process:
        self._homes[row], results[row] = 0, self._lost(worker)
        continue
      result, fault = worker.call('step', self.number, row, action, timeout_s=self._processes.step_timeout_s)
      if fault is None and worker.process != home:  # it ended before this call, which a new process answered
        fault = self._lost(worker)
      results[row] = fault or result
      self._homes[row] = 0 if fault else home
    return results

  def _lost(self, worker: Worker) -> Fault:
    return Fault(games.LOST, worker.last_end)
