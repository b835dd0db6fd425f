"""Environments that live outside JAX: text in, text out, on the host. What they do wrong is contained.

A `TextEnvironment` describes a game to the prompts, as an `Environment` does, and opens `Session`s, which play it on
many rows at once. A session may raise, hang or answer nonsense: the agent ends such an episode as an error and goes on.

`PythonEnvironment` plays any Python class:

    class Guess:
      rules = 'A number from 1 to 9 is hidden. Find it.'

      def reset(self, seed: int) -> str: ...
      def step(self, action: str) -> tuple[str, float, bool, bool]: ...  # observation, reward, done, success

docs/add_environment.md has whole examples.
"""

from __future__ import annotations

import abc
import collections
import dataclasses
import functools
import importlib
import inspect
import logging
import math
import numbers
import os
import threading
import time
import traceback
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, final

import numpy as np

from ragen_jax.envs.base import Budget

_log = logging.getLogger(__name__)

# After so many time-outs in a row, the calls of a batch that have not begun are not made.
_GIVE_UP_AFTER = 3
_LONGEST_MESSAGE = 300
_LARGEST_REWARD = 1e15  # its square is still far from what float32 can hold


@dataclasses.dataclass(frozen=True)
class Fault:
  """What an environment did wrong.

  Attributes:
    kind: a few words that are the same for faults of one sort, such as 'step raised KeyError'.
    detail: what is particular to this one; may be empty.
    hung: the call took too long, and may still be going on.
  """

  kind: str
  detail: str = ''
  hung: bool = False

  def __str__(self) -> str:
    line = ' '.join(f'{self.kind}: {self.detail}'.split()) if self.detail else self.kind
    line = line.encode('utf-8', 'replace').decode('utf-8')
    return line if len(line) <= _LONGEST_MESSAGE else line[: _LONGEST_MESSAGE - 3] + '...'


@dataclasses.dataclass(frozen=True)
class TextStep:
  """What one action brought, checked.

  Attributes:
    observation: the text after it.
    reward: a number, at most 1e15 in size.
    done: the game is over.
    success: it is over, and won.
    effective: whether the action changed anything; None where the environment does not say.
  """

  observation: str
  reward: float
  done: bool
  success: bool
  effective: bool | None = None


def read_observation(raw: Any) -> str | Fault:
  """An observation as an environment gave it, checked; characters that no encoding has become question marks."""
  if isinstance(raw, Fault):
    return raw
  if not isinstance(raw, str):
    return Fault('observation is no text', show(raw))
  return str.encode(raw, 'utf-8', 'replace').decode('utf-8')


def read_reward(raw: Any) -> float | Fault:
  """A number as an environment gave it, checked."""
  try:
    number = float(raw)
  except OverflowError:  # a whole number of hundreds of digits
    number = math.inf
  if not abs(number) <= _LARGEST_REWARD:  # nan is not
    return Fault(f'reward is not within {_LARGEST_REWARD:g}', show(raw))
  return number


def read_step(raw: Any) -> TextStep | Fault:
  """A step's result as an environment gave it, checked.

  Args:
    raw: a `Fault`, or (observation, reward, done, info). `info` is the success as a bool, or a mapping with 'success',
      which it must have once the game is over, and perhaps 'effective'.
  """
  if isinstance(raw, Fault):
    return raw
  step, fault = _attempt(functools.partial(_read_step, raw), 'reading a step')
  return fault or step


def _read_step(raw: Any) -> TextStep | Fault:
  if not isinstance(raw, tuple | list) or len(raw) != 4:
    return Fault('step did not return (observation, reward, done, success)', show(raw))
  observation, reward, done, info = raw
  observation = read_observation(observation)
  if isinstance(observation, Fault):
    return observation
  if not isinstance(reward, numbers.Real | np.bool_):
    return Fault('reward is no number', show(reward))
  number = read_reward(reward)
  if isinstance(number, Fault):
    return number
  if not isinstance(done, bool | np.bool_):
    return Fault('done is no bool', show(done))
  success, effective = info, None
  if isinstance(info, Mapping):
    success, effective = info.get('success', None if done else False), info.get('effective')
  if not isinstance(success, bool | np.bool_):
    return Fault('success is no bool', show(info))
  if not isinstance(effective, bool | np.bool_ | None):
    return Fault('effective is no bool', show(effective))
  effective = None if effective is None else bool(effective)
  return TextStep(observation, number, bool(done), bool(done and success), effective)


class Session(abc.ABC):
  """The rows of a rollout that play one environment. Rows are numbers from 0; they are reset again and again."""

  @abc.abstractmethod
  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[str | Fault]:
    """Starts fresh episodes.

    Args:
      rows: which.
      seeds: of their levels. Rows with the same seed must begin with the same observation.
      members: number of the row in its group; for luck that members do not share.

    Returns:
      The first observations.
    """

  @abc.abstractmethod
  def step(self, rows: Sequence[int], actions: Sequence[str]) -> list[Any]:
    """One action on each of some rows.

    Returns:
      For each row what `read_step` reads: (observation, reward, done, info), or a `Fault`.
    """

  def end(self) -> None:
    """The rollout is over: no row is stepped before it is reset. By default nothing."""
    return


class TextEnvironment(abc.ABC):
  """A game outside JAX. Subclasses are frozen dataclasses whose fields are the game's options, compared by identity.

  The attributes and the methods that prompts and replies need have the names and meanings of `Environment`'s. An action
  is a string.
  """

  name: ClassVar[str]
  action_names: ClassVar[tuple[str, ...]] = ()
  action_help: ClassVar[str] = ''
  has_solver: ClassVar[bool] = False

  @abc.abstractmethod
  def open(self, rows: int) -> Session:
    """A session of so many rows, for one thread at a time."""

  @abc.abstractmethod
  def rules(self) -> str:
    """What the game is and what is to be reached, in one or a few lines."""

  def legend(self) -> dict[str, str]:
    """Symbol to meaning, for boards made of symbols; empty otherwise."""
    return {}

  def parse_action(self, text: str) -> str | None:
    """The action that a piece of the answer names, None when it names none. Without `action_names` all text is one."""
    text = text.strip()
    if not self.action_names:
      return text or None
    return next((name for name in self.action_names if name.lower() == text.lower()), None)

  @final
  def read_action(self, text: str) -> tuple[str, str] | None:
    """What `parse_action` makes of a text, and how `format_action` writes it; never raises.

    Returns:
      None where the text is no action, and where one of the two fails, which is told of once.
    """

    def read() -> tuple[str, str] | None:
      action = self.parse_action(text)
      if action is None:
        return None
      written = self.format_action(action)
      if not isinstance(action, str) or not isinstance(written, str):
        raise TypeError(f'{show(action)}, written {show(written)}, is no text')
      return action, written

    result, fault = _attempt(read, 'parse_action or format_action')
    told = vars(self).setdefault('_kinds_told', set())
    if fault is not None and fault.kind not in told:
      told.add(fault.kind)
      _log.warning('%s: %s; such text is no action', self.name, fault)
    return result

  @property
  def action_words(self) -> tuple[str, ...]:
    """Every word that is an action; empty where actions are free text."""
    return self.action_names

  def format_action(self, action: str) -> str:
    """How an action is written in an answer."""
    return action

  def check_budget(self, budget: Budget) -> None:
    """Refuses none: nobody knows what a level takes."""
    del budget
    return

  def solve(self, states: Any, budget: Budget, discount: float = 1.0) -> Any:
    """Always raises ValueError: nobody knows the best play, so there are no demonstrations and no hints."""
    raise ValueError(f'{self.name} has no solver')


# -- calls that may hang -----------------------------------------------------------------------------------------------


class _Call:
  def __init__(self, function: Callable[[], Any]):
    self.function = function
    self.started = 0.0
    self.outcome: Any = None
    self.over = False


def run_calls(
  functions: Sequence[Callable[[], Any]], *, what: str, workers: int, timeout_s: float
) -> list[tuple[Any, Fault | None]]:
  """Calls functions, several at a time, and waits for each no longer than it may take.

  Python cannot stop a thread. A call that takes too long is left behind: its thread goes on until the call returns, and
  what it returns is dropped. Code that never lets go of the interpreter's lock cannot be left behind either.

  Args:
    functions: to call, without arguments.
    what: what they do, one word for the faults.
    workers: how many at a time, each in a thread of this call; 0 calls them here, one after the other, with no limit.
    timeout_s: seconds that one call may take.

  Returns:
    For each function (result, None), or (None, fault) where it raised, took too long, or was not begun because
    too many before it took too long.
  """
  if workers == 0:
    return [_attempt(f, what) for f in functions]
  calls = [_Call(f) for f in functions]
  waiting, running = collections.deque(calls), set()
  changed = threading.Condition()
  late = Fault(f'{what} took longer than {timeout_s:g} s', hung=True)
  late_in_a_row = 0

  def work() -> None:
    nonlocal late_in_a_row
    while True:
      with changed:
        if not waiting:
          return
        call = waiting.popleft()
        call.started = time.monotonic()
        running.add(call)
        changed.notify()
      outcome = _attempt(call.function, what)
      with changed:
        if call.over:
          return  # another thread is in this one's place
        call.outcome, call.over = outcome, True
        running.discard(call)
        late_in_a_row = 0
        changed.notify()

  def start() -> None:
    threading.Thread(target=work, daemon=True, name=f'ragen_jax-{what}').start()

  for _ in range(min(workers, len(calls))):
    start()
  with changed:
    while waiting or running:
      now = time.monotonic()
      overdue = [call for call in running if now - call.started >= timeout_s]
      for call in overdue:
        call.outcome, call.over = (None, late), True
        running.discard(call)
      late_in_a_row += len(overdue)
      if late_in_a_row >= _GIVE_UP_AFTER:
        for call in waiting:
          call.outcome = (None, Fault(late.kind, 'not tried, as others before it took too long'))
        waiting.clear()
      for _ in range(min(len(overdue), len(waiting))):
        start()
      if running:
        first = min(call.started for call in running)
        changed.wait(max(first + timeout_s - time.monotonic(), 0.0))
      elif waiting:
        changed.wait()
  return [call.outcome for call in calls]


def _attempt(function: Callable[[], Any], what: str) -> tuple[Any, Fault | None]:
  try:
    return function(), None
  except BaseException as e:  # whatever foreign code raises becomes a fault that is reported
    if isinstance(e, KeyboardInterrupt) and threading.current_thread() is threading.main_thread():
      raise  # the user's own
    frame = traceback.extract_tb(e.__traceback__)[-1]
    where = f'{os.path.basename(frame.filename)}:{frame.lineno}'
    return None, Fault(f'{what} raised {type(e).__name__}', f'{show(e, str)} ({where})')


def show(value: Any, write: Callable[[Any], str] = repr) -> str:
  """A foreign value in one line, for messages, also where it cannot be written."""
  try:
    return ' '.join(write(value).split())
  except (Exception, SystemExit) as e:  # noqa: BLE001, a message is no reason to end a run
    return f'({type(value).__name__} that cannot be written: {type(e).__name__})'


def reason(error: BaseException) -> str:
  """An exception's type and message in one line."""
  return f'{type(error).__name__}: {show(error, str)}'


# -- imports and options -----------------------------------------------------------------------------------------------


def import_object(field: str, path: str) -> Any:
  """What 'package.module:name' names.

  Args:
    field: where the path comes from, for the error.
    path: the module and, behind the colon, the name in it.

  Raises:
    ValueError: the path has another form, the module cannot be imported, or has no such name.
  """
  module, colon, name = path.partition(':') if isinstance(path, str) else ('', '', '')
  if not (module and colon and name):
    raise ValueError(f"{field}={path!r}; allowed: 'package.module:name'")
  try:
    return functools.reduce(getattr, name.split('.'), importlib.import_module(module))
  except (Exception, SystemExit) as e:
    raise ValueError(f'{field}={path!r} cannot be imported ({reason(e)}); allowed: what Python can import') from e


def import_function(field: str, path: str) -> Callable[..., Any]:
  """As `import_object`; raises ValueError also where it cannot be called."""
  function = import_object(field, path)
  if not callable(function):
    raise ValueError(f'{field}={path!r} is {type(function).__name__}; allowed: a function')
  return function


def plain(value: Any) -> Any:
  """Config sections as dicts, at any depth; other values as they are."""
  value = value.to_dict() if hasattr(value, 'to_dict') else value
  if isinstance(value, Mapping):
    return {key: plain(x) for key, x in value.items()}
  return value


def check_workers(name: str, workers: Any, step_timeout_s: Any) -> None:
  """Raises ValueError where either is out of range."""
  if not isinstance(workers, int) or isinstance(workers, bool) or workers < 0:
    raise ValueError(f'{name}: workers={workers!r}; allowed: whole numbers from 0')
  check_seconds(name, 'step_timeout_s', step_timeout_s)


def check_seconds(name: str, field: str, value: Any) -> None:
  """Raises ValueError where a time is not a positive number."""
  ok = isinstance(value, numbers.Real) and not isinstance(value, bool) and math.isfinite(value) and value > 0
  if not ok:
    raise ValueError(f'{name}: {field}={value!r}; allowed: seconds, above 0')


def check_mapping(name: str, field: str, value: Any) -> dict[str, Any]:
  """A section of options as a dict; raises ValueError where it is none, or its keys are no strings."""
  value = plain(value)
  if not isinstance(value, dict) or not all(isinstance(key, str) for key in value):
    raise ValueError(f'{name}: {field}={show(value)}; allowed: a section of options by name')
  return value


def check_text(name: str, field: str, value: Any, *, blank: bool = True) -> str:
  """A text; raises ValueError where it is none, or blank though it must not be."""
  if not isinstance(value, str) or not (blank or value.strip()):
    raise ValueError(f'{name}: {field}={show(value)}; allowed: text' + ('' if blank else ' that is not blank'))
  return value


def check_action_names(name: str, value: Any) -> tuple[str, ...]:
  """Names of actions as a tuple; raises ValueError where they are not distinct words."""
  names = tuple(value) if isinstance(value, tuple | list) else (None,)
  words = all(isinstance(n, str) and n and n == n.strip() for n in names)
  if not words or len({n.lower() for n in names}) < len(names):
    raise ValueError(f'{name}: action_names={show(value)}; allowed: names that differ, letter case aside')
  return names


def check_legend(name: str, field: str, value: Any) -> dict[str, str]:
  """Symbols and their meanings; raises ValueError where one is no text."""
  value = check_mapping(name, field, value)
  if not all(isinstance(meaning, str) for meaning in value.values()):
    raise ValueError(f'{name}: {field}={show(value)}; allowed: texts by symbol')
  return value


# -- games in this process ---------------------------------------------------------------------------------------------


class LocalSession(Session):
  """Rows that are objects in this process, each with `reset(seed, member)`, `step(action)` and perhaps `close()`.

  A row's object is made when the row is first reset, and used again for its later episodes. One that raised or took too
  long is not: a fresh one takes its place, and the old one is closed, unless it may still be running. A `close`
  may take as long as a step.
  """

  def __init__(self, make: Callable[[], Any], rows: int, *, workers: int, step_timeout_s: float):
    """No object is made yet.

    Args:
      make: makes an object.
      rows: how many.
      workers: see `run_calls`.
      step_timeout_s: seconds that a step, a reset or a close may take.
    """
    self._make, self._workers, self._timeout_s = make, workers, step_timeout_s
    self._games: list[Any] = [None] * rows
    weakref.finalize(self, close_all, self._games, workers=workers, timeout_s=step_timeout_s)

  def reset(self, rows: Sequence[int], seeds: Sequence[int], members: Sequence[int]) -> list[str | Fault]:
    """See `Session`. Making the row's object counts as part of its first reset."""
    games = self._games

    def start(row: int, seed: int, member: int) -> tuple[Any, str]:
      game = games[row] if games[row] is not None else self._make()
      try:
        return game, game.reset(seed, member)
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
    """See `Session`."""
    calls = [functools.partial(self._games[row].step, action) for row, action in zip(rows, actions, strict=True)]
    results = self._run(calls, 'step')
    self._drop({row: fault for row, (_, fault) in zip(rows, results, strict=True) if fault is not None})
    return [fault or result for result, fault in results]

  def _run(self, calls: list[Callable[[], Any]], what: str) -> list[tuple[Any, Fault | None]]:
    return run_calls(calls, what=what, workers=self._workers, timeout_s=self._timeout_s)

  def _drop(self, failed: Mapping[int, Fault]) -> None:
    """Forgets the objects of rows that failed."""
    idle = [self._games[row] for row, fault in failed.items() if not fault.hung]
    for row in failed:
      self._games[row] = None
    close_all(idle, workers=self._workers, timeout_s=self._timeout_s)


def close_all(games: Sequence[Any], *, workers: int, timeout_s: float) -> None:
  """Closes objects that have `close`, each within a time limit; those that fail are told of, and no more.

  Args:
    games: the objects; None where there is none.
    workers: see `run_calls`.
    timeout_s: seconds that one may take.
  """
  games = [game for game in games if game is not None]
  calls = [functools.partial(_close, game) for game in games]
  try:
    results = run_calls(calls, what='close', workers=workers, timeout_s=timeout_s)
  except RuntimeError:  # Python 3.12 and later start no threads at their end
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


class _PythonGame:
  """An object of the user's class, with `reset(seed, member)` whether it knows of members or not."""

  def __init__(self, game: Any):
    self._game = game
    self.step = game.step
    self.close = getattr(game, 'close', lambda: None)
    self._knows_members = 'member' in inspect.signature(game.reset).parameters

  def reset(self, seed: int, member: int) -> Any:
    return self._game.reset(seed, member=member) if self._knows_members else self._game.reset(seed)


@dataclasses.dataclass(frozen=True, eq=False)
class PythonEnvironment(TextEnvironment):
  """A Python class as an environment.

  An object of the class plays one episode at a time:

    reset(seed) -> str                  a fresh episode; the same seed gives the same level. With a second argument
                                        `member`, members of a group can have luck of their own.
    step(action) -> (str, float, bool, success)
                                        one action: observation, reward, whether the game is over, and whether it is
                                        won; in place of `success` a dict may have 'success' and 'effective', which says
                                        whether the action changed anything (else: whether the observation changed).
    close()                             optional: the object is not needed any more.

  and the class, or its objects, tell the prompt:

    rules                               what the game is and what is to be reached.
    action_names                        optional: the words that are actions; without them all text is one.
    action_help                         optional: how an action is written.
    legend                              optional: symbol to meaning.

  All four may be methods without arguments. One object is made at once, to read them.

  Attributes:
    class_path: 'package.module:ClassName'.
    options: keyword arguments of the class.
    workers: threads that play; 0 plays in the caller's, without a time limit. More than 1 helps where steps wait, for
      a network or a process; the class must then bear to be used by several threads, one for each object at a time, and
      not always the same.
    step_timeout_s: seconds that a step, a reset or a close may take.
  """

  name: ClassVar[str] = 'python'

  class_path: str = ''
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  workers: int = 1
  step_timeout_s: float = 60.0

  def __post_init__(self):
    object.__setattr__(self, 'options', check_mapping('python', 'options', self.options))
    check_workers('python', self.workers, self.step_timeout_s)
    cls = import_object('python: class_path', self.class_path)
    for method in ('reset', 'step'):
      if not inspect.isclass(cls) or not callable(getattr(cls, method, None)):
        raise ValueError(
          f'python: class_path={self.class_path!r} has no {method}; allowed: classes with reset and step'
        )
    try:
      game = cls(**self.options)
    except (Exception, SystemExit) as e:
      raise ValueError(
        f'python: options={show(self.options)}: {self.class_path} does not take them ({reason(e)})'
      ) from e
    where = f'python: {self.class_path}'
    try:
      told = {
        '_rules': check_text(where, 'rules', _told(where, game, 'rules', ''), blank=False),
        '_legend': check_legend(where, 'legend', _told(where, game, 'legend', {})),
        '_action_names': check_action_names(where, _told(where, game, 'action_names', ())),
        '_action_help': check_text(where, 'action_help', _told(where, game, 'action_help', '')),
      }
    finally:
      close_all([game], workers=self.workers, timeout_s=self.step_timeout_s)
    for field, value in told.items():
      object.__setattr__(self, field, value)
    object.__setattr__(self, '_class', cls)

  @property
  def action_names(self) -> tuple[str, ...]:
    """The class's; empty where actions are free text."""
    return self._action_names

  @property
  def action_help(self) -> str:
    """The class's; a line of ours where it names no actions and does not say how they are written."""
    return self._action_help or ('' if self._action_names else FREE_TEXT)

  def rules(self) -> str:
    """The class's."""
    return self._rules

  def legend(self) -> dict[str, str]:
    """The class's."""
    return self._legend

  def open(self, rows: int) -> LocalSession:
    """One object of the class a row."""
    make = lambda: _PythonGame(self._class(**self.options))  # noqa: E731
    return LocalSession(make, rows, workers=self.workers, step_timeout_s=self.step_timeout_s)


FREE_TEXT = 'An action is free text.'


def _told(where: str, game: Any, field: str, default: Any) -> Any:
  """What an object says of itself, as an attribute or by a method; raises ValueError where it cannot."""
  try:
    value = getattr(game, field, default)
    return value() if callable(value) else value
  except (Exception, SystemExit) as e:
    raise ValueError(f'{where}: {field} cannot be asked for ({reason(e)}); allowed: what tells it') from e
