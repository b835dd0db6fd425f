"""Sessions whose games are objects in worker processes."""

from __future__ import annotations

import collections
import contextlib
import functools
import itertools
import sys
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragen_jax.envs.outside import games
from ragen_jax.envs.outside.base import Session
from ragen_jax.utils.errors import one_line
from ragen_jax.utils.messages import pack, unpack
from ragen_jax.utils.threads import Fault, attempt
from ragen_jax.utils.workers import Worker, Workers

# What `read_step` reads of a mapping.
INFO_KEYS = ('success', 'effective', 'metrics')
_GIVE_UP_AFTER = 3  # resets in a row that end the process
_FACTORY = f'{games.__file__}:Rows'

# What this process has started, as long as an environment or a session holds it.
_running: weakref.WeakValueDictionary[bytes, GameProcesses] = weakref.WeakValueDictionary()


def game_processes(
  kind: str, settings: Mapping[str, Any], *, count: int, memory_mib: int, step_timeout_s: float, python: str = ''
) -> GameProcesses:
  """The processes of environments with these options, which training and evaluation share; they start when needed.

  Args:
    kind, settings: see `games.Rows`.
    count: number of processes.
    memory_mib: limit of the memory of a process; 0 for no limit.
    step_timeout_s: time limit of a step or a reset, in seconds.
    python: see `Link`.

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
  places = [entry for entry in sys.path if isinstance(entry, str)]  # a path of import means another module elsewhere
  key = pack([kind, dict(settings), count, memory_mib, step_timeout_s, python, places])
  if (found := _running.get(key)) is None:
    found = _running[key] = GameProcesses(kind, settings, count, memory_mib, step_timeout_s, python)
  return found


@functools.lru_cache(maxsize=256)
def _describe(
  kind: str, settings: bytes, memory_mib: int, python: str, step_timeout_s: float, places: tuple[str, ...]
) -> bytes:
  """What the games' `describe` returns, packed. A run makes its environments several times, and asks once.

  Args:
    settings: packed.
    places: where modules are found, which changes the answer.

  Raises:
    ValueError: no object can be made, or it says nothing that can be read; one line says why.
    _Failed: the process did not answer.
  """
  del places
  args = kind, unpack(settings), INFO_KEYS
  how = {'memory_mib': memory_mib, 'name': f'{kind}: description', 'python': python}
  with contextlib.closing(Worker(_FACTORY, args, **how)) as worker:
    result, fault = worker.call('describe', timeout_s=step_timeout_s)
  if fault is not None:
    raise _Failed(str(fault))
  about, problem = result
  if problem:
    raise ValueError(problem)
  return pack(about, describe=True)


class _Failed(Exception):
  pass


class GameProcesses:
  """The worker processes of environments with equal options, which all of their sessions share.

  Attributes:
    workers: the processes that rows play in.
    step_timeout_s: time limit of a step or a reset, in seconds.
  """

  def __init__(
    self, kind: str, settings: Mapping[str, Any], count: int, memory_mib: int, step_timeout_s: float, python: str
  ):
    """See `game_processes`."""
    self._described = kind, pack(dict(settings)), memory_mib, python
    self.step_timeout_s = step_timeout_s
    args, name = (kind, dict(settings), INFO_KEYS), str(settings.get('class_path') or settings.get('id') or kind)
    self.workers = Workers(_FACTORY, args, count=count, memory_mib=memory_mib, name=name, python=python)
    self._sessions = itertools.count()
    self._ended: list[int] = []  # sessions; added to by finalizers, which may run at any place
    # Reads actions and the ids of levels; its end, if it hangs, must not concern rows. It starts when it is needed.
    self._parser = Worker(_FACTORY, args, memory_mib=memory_mib, name=f'{name} parser', python=python)

  def describe(self, where: str) -> dict[str, Any]:
    """What the games' `describe` returns, from a process of its own.

    Args:
      where: the option that names the games, for errors.

    Raises:
      ValueError: no object can be made, or it says nothing that can be read; one line says why.
    """
    places = tuple(entry for entry in sys.path if isinstance(entry, str))
    try:
      return unpack(_describe(*self._described, self.step_timeout_s, places))
    except _Failed as e:
      raise ValueError(f'{where} cannot be used in a process ({e})') from e

  def is_action(self, text: str) -> tuple[bool, str]:
    """Whether a text names an action, and what is wrong with the parser, or ''."""
    result, fault = self._parser.call('is_action', text, timeout_s=self.step_timeout_s)
    return (False, str(fault)) if fault is not None else result

  def level_id(self, seed: int) -> Any:
    """See `PythonGames.level_id`.

    Raises:
      RuntimeError: the process did not answer.
    """
    result, fault = self._parser.call('level_id', seed, timeout_s=self.step_timeout_s)
    if fault is not None:
      raise RuntimeError(str(fault))
    return result

  def open(self, rows: int, start_of: Callable[[Any], Any] = lambda seed: seed) -> ProcessSession:
    """A session with one object for each row; an object begins with what `start_of` makes of the seed of its level."""
    session = ProcessSession(self, next(self._sessions), rows, start_of)
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

  def __init__(self, processes: GameProcesses, number: int, rows: int, start_of: Callable[[Any], Any]):
    """Makes no object yet. The number of the session tells its rows from those of others."""
    self.number = number
    self._processes, self._start_of = processes, start_of
    self._homes = [0] * rows  # the number of the process that has the row's object; 0 if it has none

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """See `Session`. Making a row's object is part of its first reset."""
    self._processes.forget_ended()
    begun = {row: (self._start_of(seed), member) for row, seed, member in zip(rows, seeds, members, strict=True)}
    return self._spread('reset', rows, lambda worker, own: self._reset(worker, {row: begun[row] for row in own}))

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    chosen = dict(zip(rows, actions, strict=True))
    return self._spread('step', rows, lambda worker, own: self._step(worker, {row: chosen[row] for row in own}))

  def expert(self, rows: Sequence[int]) -> list[Any]:
    return self._spread('expert', rows, functools.partial(self._advise, 'expert'))

  def rationale(self, rows: Sequence[int]) -> list[Any]:
    return self._spread('rationale', rows, functools.partial(self._advise, 'rationale'))

  def legal_actions(self, rows: Sequence[int]) -> list[Any]:
    return self._spread('legal_actions', rows, functools.partial(self._advise, 'legal_actions'))

  def _spread(self, what: str, rows: Sequence[int], play: Callable[[Worker, list[int]], dict[int, Any]]) -> list[Any]:
    """The results of rows, each played by the worker that it belongs to."""
    workers = self._processes.workers
    count = len(workers.workers)
    shares: list[list[int]] = [[row for row in rows if row % count == i] for i in range(count)]
    if len(rows) == 1:  # no threads for the others
      home = rows[0] % count
      played, fault = attempt(lambda: play(workers.workers[home], shares[home]), what)
      return [fault or played[rows[0]]]
    outcomes = workers.each(lambda i, worker: play(worker, shares[i]) if shares[i] else {}, what)
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
    results: dict[int, Any] = {}
    for row, action in actions.items():
      home = self._homes[row]
      if home == 0 or home != worker.process:
        self._homes[row], results[row] = 0, self._lost(worker)
        continue
      result, fault = worker.call('step', self.number, row, action, timeout_s=self._processes.step_timeout_s)
      if isinstance(result, Fault) and result.kind == games.LOST:  # a new process answered, which has no such row
        fault = self._lost(worker)
      results[row] = fault or result
      self._homes[row] = 0 if fault else home
    return results

  def _advise(self, what: str, worker: Worker, rows: Sequence[int]) -> dict[int, Any]:
    """What the objects of the rows of one worker say."""
    results: dict[int, Any] = {}
    for row in rows:
      if self._homes[row] == 0 or self._homes[row] != worker.process:
        self._homes[row], results[row] = 0, self._lost(worker)
        continue
      result, fault = worker.call('advise', what, self.number, row, timeout_s=self._processes.step_timeout_s)
      results[row] = result if fault is None else fault
    return results

  def _lost(self, worker: Worker) -> Fault:
    return Fault(games.LOST, worker.last_end)
