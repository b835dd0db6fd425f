"""Sessions whose games are objects in this process."""

from __future__ import annotations

import functools
import logging
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragen_jax.envs.outside.base import Session, read_expert, read_observation, read_step
from ragen_jax.envs.outside.images import ImageForm, ImageObservation, read_text
from ragen_jax.utils.threads import Fault, run_calls

_log = logging.getLogger(__name__)


class LocalSession(Session):
  """A session with one object for each row, with `reset(seed, member)`, `step(action)` and optionally `close()`.

  The object of a row is made at the row's first reset and plays all its episodes. If a call raises or exceeds the time
  limit, a new object replaces the object. The old object is closed, unless its call may still be running.

  Objects may have `expert()` and `rationale()`, see `Session`.

  A result is read inside the call that returned it, because reading runs code of the environment, such as `__repr__` of
  a wrong value, which may hang too. The results of `reset` and `step` therefore consist of plain values.
  """

  def __init__(
    self,
    make: Callable[[], Any],
    rows: int,
    *,
    workers: int,
    step_timeout_s: float,
    owner: Any = None,
    form: ImageForm | None = None,
  ):
    """Makes no object yet. The limits are those of `run_calls`; the time is that of a step, a reset or a close."""
    self._make, self._form = make, form
    self._how = {'workers': workers, 'timeout_s': step_timeout_s, 'owner': owner}
    self._games: list[Any] = [None] * rows
    weakref.finalize(self, close_all, self._games, **self._how)

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[Any]:
    """See `Session`. Making a row's object is part of its first reset."""
    # The calls do not refer to the session, which a call that hangs would keep alive.
    games, make, form = self._games, self._make, self._form

    def start(row: int, seed: int, member: int) -> tuple[Any, Any]:
      game = games[row] if games[row] is not None else make()
      try:
        return game, _plain_observation(read_observation(game.reset(seed, member), form))
      except BaseException:
        if game is not games[row]:
          _close(game)
        raise

    calls = [functools.partial(start, *x) for x in zip(rows, seeds, members, strict=True)]
    results, failed = [], {}
    for row, (result, fault) in zip(rows, self._run(calls, 'reset'), strict=True):
      if fault is not None:
        failed[row] = fault
        results.append(fault)
      else:
        games[row], observation = result
        results.append(observation)
    self._drop(failed)
    return results

  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    calls = [
      functools.partial(_play, self._games[row], action, self._form) for row, action in zip(rows, actions, strict=True)
    ]
    results = self._run(calls, 'step')
    self._drop({row: fault for row, (_, fault) in zip(rows, results, strict=True) if fault is not None})
    return [fault or result for result, fault in results]

  def expert(self, rows: Sequence[int]) -> list[Any]:
    return self._advice(rows, 'expert', lambda game: read_expert(game.expert()))

  def rationale(self, rows: Sequence[int]) -> list[Any]:
    return self._advice(rows, 'rationale', lambda game: read_text(game.rationale(), 'rationale'))

  def _advice(self, rows: Sequence[int], what: str, ask: Callable[[Any], Any]) -> list[Any]:
    """What the objects of some rows say. An object whose call may still be running is removed."""
    results = self._run([functools.partial(ask, self._games[row]) for row in rows], what)
    self._drop({row: fault for row, (_, fault) in zip(rows, results, strict=True) if fault is not None and fault.hung})
    return [fault or result for result, fault in results]

  def _run(self, calls: list[Callable[[], Any]], what: str) -> list[tuple[Any, Fault | None]]:
    return run_calls(calls, what=what, **self._how)

  def _drop(self, failed: Mapping[int, Fault]) -> None:
    """Removes the objects of rows that failed."""
    idle = [self._games[row] for row, fault in failed.items() if not fault.hung]
    for row in failed:
      self._games[row] = None
    close_all(idle, **self._how)


def _plain_observation(read: str | ImageObservation | Fault) -> Any:
  """The observation as an input of `read_observation`."""
  return {'text': read.text, 'images': read.images} if isinstance(read, ImageObservation) else read


def _play(game: Any, action: str, form: ImageForm | None) -> Any:
  """The outcome of an action, as an input of `read_step` without objects of the environment."""
  read = read_step(game.step(action), form)
  if isinstance(read, Fault):
    return read
  info = {'success': read.success, 'effective': read.effective, 'metrics': read.reported}
  return _plain_observation(read.observation), read.reward, read.done, info


def close_all(games: Sequence[Any], *, workers: int, timeout_s: float, owner: Any = None) -> None:
  """Calls `close` of the objects that have it, by `run_calls`; failures are logged as one warning for each kind."""
  games = [game for game in games if game is not None]
  calls = [functools.partial(_close, game) for game in games]
  try:
    # Always: the number of objects is limited, because none is made while too many calls hang.
    results = run_calls(calls, what='close', workers=workers, timeout_s=timeout_s, owner=owner, always=True)
  except RuntimeError:  # Python 3.12 and later start no threads while they shut down
    results = run_calls(calls, what='close', workers=0, timeout_s=timeout_s)
  faults = [fault for _, fault in results]
  for kind in dict.fromkeys(fault.kind for fault in faults if fault is not None):
    alike = [(game, fault) for game, fault in zip(games, faults, strict=True) if fault and fault.kind == kind]
    game, fault = alike[0]
    _log.warning('%s: %s%s', type(game).__name__, fault, f'; {len(alike)} like it' if len(alike) > 1 else '')


def _close(game: Any) -> None:
  close = getattr(game, 'close', None)
  if close is not None:
    close()
