"""The objects that rows of environments outside JAX play with, in this process or in worker processes.

A worker process loads this file by its path, and not as a part of its package, because `ragen_jax.envs` loads JAX. Of
this package it may import `ragen_jax.utils` only.
"""

from __future__ import annotations

import copy
import functools
import inspect
import logging
import pathlib
import sys
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from ragen_jax.utils.errors import describe_error, one_line, short
from ragen_jax.utils.imports import import_function, import_object
from ragen_jax.utils.threads import Fault

_log = logging.getLogger(__name__)

# Attributes of a class that change its prompts, see `Game`.
WORDING = ('system', 'state_label', 'counts_turns', 'whole_answer')
LOST = 'the process of the row ended'  # kind of a fault


def close_game(game: Any) -> None:
  """Calls the `close` of an object, if it has one; a failure is logged."""
  try:
    close = getattr(game, 'close', None)
    if close is not None:
      close()
  except Exception as e:  # noqa: BLE001, whatever it raises, the object is not used any more
    _log.warning('%s: close raised %s', type(game).__name__, describe_error(e))


# -- a Python class ----------------------------------------------------------------------------------------------------


class PythonGames:
  """Makes objects of a user's class; raises ValueError with one line if it is no class with `reset` and `step`."""

  def __init__(self, class_path: str, options: Mapping[str, Any], close: Callable[[Any], None] = close_game):
    """`close` closes an object that was made to be described."""
    self._path, self._options, self._close = class_path, options, close
    self._class = import_object('python: class_path', class_path)
    for method in ('reset', 'step'):
      if not inspect.isclass(self._class) or not callable(getattr(self._class, method, None)):
        raise ValueError(f'python: class_path={class_path!r} has no {method}; allowed: classes with reset and step')

  def _new(self) -> Any:
    # Each object has its own options, because a game may change them.
    return self._class(**copy.deepcopy(self._options))

  def make(self) -> PythonGame:
    """A game of a row."""
    return PythonGame(self._new())

  def describe(self) -> dict[str, Any]:
    """What an object says for the prompt; raises ValueError with one line if none can be made, or says nothing."""
    try:
      game = self._new()
    except (Exception, SystemExit) as e:
      raise ValueError(
        f'python: options={one_line(self._options)}: {self._path} does not take them ({describe_error(e)})'
      ) from e
    defaults = {'rules': '', 'legend': {}, 'action_names': (), 'action_help': ''}
    try:
      told = {field: _attribute(f'python: {self._path}', game, field, default) for field, default in defaults.items()}
      # The other fields have the defaults of `Game`, which cannot be loaded here.
      told['wording'] = {
        field: _attribute(f'python: {self._path}', game, field, None) for field in WORDING if hasattr(game, field)
      }
    finally:
      self._close(game)
    return told | {f'has_{name}': callable(getattr(self._class, name, None)) for name in ('expert', 'level_id')}

  @functools.cached_property
  def _asked(self) -> Any:
    """The object that is asked for the ids of levels."""
    return self._new()

  def level_id(self, seed: int) -> Any:
    """What the class's `level_id` returns for a seed."""
    return self._asked.level_id(seed)


class PythonGame:
  """An object of the user's class with a method `reset(seed, member)`, even if the class's `reset` takes no member."""

  def __init__(self, game: Any):
    self._game = game
    self.step = game.step
    self.close = getattr(game, 'close', lambda: None)
    self.expert, self.rationale = getattr(game, 'expert', None), getattr(game, 'rationale', lambda: '')
    self._takes_member = 'member' in inspect.signature(game.reset).parameters

  def reset(self, seed: int, member: int) -> Any:
    return self._game.reset(seed, member=member) if self._takes_member else self._game.reset(seed)


def _attribute(where: str, game: Any, field: str, default: Any) -> Any:
  """The value of an attribute, or of a method without arguments; raises ValueError if reading it fails."""
  try:
    value = getattr(game, field, default)
    return value() if callable(value) else value
  except (Exception, SystemExit) as e:
    raise ValueError(
      f'{where}: {field} cannot be read ({describe_error(e)}); allowed: an attribute, or a method without arguments'
    ) from e


# -- Gymnasium ---------------------------------------------------------------------------------------------------------


class GymnasiumGames:
  """Makes environments of Gymnasium; raises ValueError with one line if a function cannot be imported.

  Attributes:
    images: the number of images in each observation.
    ansi: whether the environment draws itself as text.
    render, success: the functions; None for one that is not given.
  """

  def __init__(
    self,
    *,
    id: str,
    kwargs: Mapping[str, Any],
    action_names: Sequence[str],
    images: int,
    parse: str,
    render: str,
    success: str,
    close: Callable[[Any], None] = close_game,
  ):
    """Imports Gymnasium and the functions.

    Args:
      id, kwargs, action_names, images, parse, render, success: see `GymnasiumEnvironment`.
      close: closes an environment that was made to be described.
    """
    try:
      import gymnasium  # noqa: F401, here rather than in the first reset, which has a time limit
    except ImportError as e:
      raise ValueError("type='gymnasium' needs the package gymnasium, which is missing: pip install gymnasium") from e
    self._id, self._kwargs, self._names, self._close = id, kwargs, tuple(action_names), close
    self.images = images
    self.ansi = kwargs.get('render_mode') == 'ansi'
    self._parse, self.render, self.success = (
      import_function(f'gymnasium: {field}', path) if path else None
      for field, path in (('parse', parse), ('render', render), ('success', success))
    )

  def new(self) -> Any:
    """A new environment; raises ValueError if Gymnasium cannot make it."""
    import gymnasium

    try:
      return gymnasium.make(self._id, **copy.deepcopy(self._kwargs))  # an environment may change its arguments
    except (Exception, SystemExit) as e:
      raise ValueError(
        f'gymnasium: id={self._id!r} with kwargs={one_line(self._kwargs)} cannot be made ({describe_error(e)})'
      ) from e

  def make(self) -> GymnasiumGame:
    """A game of a row."""
    return GymnasiumGame(self)

  @functools.cached_property
  def _space(self) -> Any:
    env = self.new()
    try:
      return env.action_space
    finally:
      self._close(env)

  def describe(self) -> dict[str, Any]:
    """The space of actions: as Gymnasium writes it, and the number of actions, None if it is not `Discrete`."""
    from gymnasium.spaces import Discrete

    space = self._space
    return {'text': one_line(space, str), 'count': int(space.n) if isinstance(space, Discrete) else None}

  def is_action(self, text: str) -> tuple[bool, str]:
    """Whether a text names an action; and what `parse` raised, if it raised what is wrong with itself, or ''."""
    action, problem = self.read(text)
    return action is not None, problem

  def read(self, text: str) -> tuple[Any | None, str]:
    """The action that a text names, or None; and what `parse` raised instead of saying so, or ''."""
    if self._names:
      return (self._space.start + self._names.index(text), '') if text in self._names else (None, '')
    try:
      action = self._parse(text)
      return (action if action is not None and self._space.contains(action) else None), ''
    except ValueError:
      return None, ''
    except (Exception, SystemExit) as e:  # noqa: BLE001, a reply that the parser cannot read must not end a run
      return None, describe_error(e)


class GymnasiumGame:
  """One environment with the methods that sessions call."""

  def __init__(self, games: GymnasiumGames):
    self._games, self._env = games, games.new()

  def _observation(self, observation: Any) -> Any:
    render = self._games.render
    if self._games.images:
      return {'text': '' if render is None else render(observation), 'images': [self._env.render()]}
    if render is not None:
      return render(observation)
    if self._games.ansi:
      return self._env.render()
    import numpy as np

    with np.printoptions(threshold=sys.maxsize):  # else the middle of more than 1,000 numbers is left out
      return str(observation)

  def reset(self, seed: int, member: int) -> Any:
    import numpy as np

    observation, _ = self._env.reset(seed=seed)
    # The generator of the level makes the level; all later random numbers come from the generator of the member.
    self._env.unwrapped.np_random = np.random.default_rng([seed, member])
    return self._observation(observation)

  def step(self, text: str) -> tuple[Any, Any, bool, dict[str, Any]]:
    import numpy as np

    observation, reward, terminated, truncated, info = self._env.step(self._games.read(text)[0])
    reward = reward.item() if isinstance(reward, np.ndarray) and reward.size == 1 else reward
    terminated, truncated = _flag('terminated', terminated), _flag('truncated', truncated)
    done = terminated or truncated
    success = done and self.is_won(observation, reward, terminated, truncated, info)
    told = {key: info[key] for key in ('effective', 'metrics') if key in info}
    return self._observation(observation), reward, done, {'success': success, **told}

  def is_won(self, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
    """Whether a game that is over was won."""
    if self._games.success is not None:
      return self._games.success(observation, reward, terminated, truncated, info)
    for key in ('is_success', 'success'):
      if key in info:
        return _flag(f'info[{key!r}]', info[key])
    return terminated and bool(reward > 0)

  def close(self) -> None:
    self._env.close()


def _flag(name: str, value: Any) -> bool:
  """A bool from a bool or a number that is 0 or 1, of Python or NumPy; text is neither, whatever it says."""
  import numpy as np

  value = value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
  if not isinstance(value, bool | int | float) or value not in (0, 1):
    raise TypeError(f'{name} is {short(value)}, must be a bool')
  return bool(value)


# -- other folders -----------------------------------------------------------------------------------------------------


def _games_of(module: str, cls: str) -> Callable[..., Any]:
  """Makes the games of a module of `envs`, 'folder/file', which is loaded by its path too."""
  file = pathlib.Path(__file__).parents[1] / f'{module}.py'
  return lambda **settings: import_object(module, f'{file}:{cls}')(**settings)


# -- in a worker process -----------------------------------------------------------------------------------------------


class Rows:
  """The games of a worker process, of the rows of several sessions. A game is made at the first reset of its row."""

  _KINDS: Mapping[str, Callable[..., Any]] = {
    'python': PythonGames,
    'gymnasium': GymnasiumGames,
    'textworld': _games_of('textworld/games', 'TextWorldGames'),
    'alfworld': _games_of('alfworld/games', 'ALFWorldGames'),
    'ai2thor': _games_of('simulators/ai2thor_worker', 'ThorGames'),
    'maniskill': _games_of('simulators/maniskill_worker', 'ManiSkillGames'),
  }

  def __init__(self, kind: str, settings: Mapping[str, Any], info_keys: Sequence[str]):
    """Loads the user's code.

    Args:
      kind: type of the environment.
      settings: arguments of the class of this type in `_KINDS`.
      info_keys: what the parent reads of the last value of a step, if it is a mapping; the rest may not be plain.
    """
    self._info_keys, self._problem = tuple(info_keys), ''
    self._rows: dict[tuple[int, int], Any] = {}
    try:
      self._games = self._KINDS[kind](**settings)
    except ValueError as e:
      self._problem = str(e)

  def describe(self) -> tuple[dict[str, Any], str]:
    """What the games' `describe` returns; or the message of a ValueError."""
    try:
      return ({}, self._problem) if self._problem else (self._games.describe(), '')
    except ValueError as e:
      return {}, str(e)

  def is_action(self, text: str) -> tuple[bool, str]:
    """Whether a text names an action, and what is wrong with the parser."""
    return self._games.is_action(text)

  def reset(self, session: int, row: int, seed: int, member: int) -> Any:
    """The first observation of a new episode."""
    if self._problem:
      raise ValueError(self._problem)
    key = session, row
    if key not in self._rows:
      self._rows[key] = self._games.make()
    try:
      return _read_part(self._rows[key].reset(seed, member), ('text', 'images'))
    except BaseException:
      close_game(self._rows.pop(key))
      raise

  def step(self, session: int, row: int, action: str) -> Any:
    key = session, row
    if key not in self._rows:
      return Fault(LOST)
    try:
      result = self._rows[key].step(action)
      if not isinstance(result, tuple | list) or len(result) != 4:
        return result
      observation, reward, done, info = result
      return _read_part(observation, ('text', 'images')), reward, done, _read_part(info, self._info_keys)
    except BaseException:
      close_game(self._rows.pop(key))
      raise

  def advise(self, what: str, session: int, row: int) -> Any:
    """What a method of a game, such as `expert`, returns; it keeps the game, also if the method raises."""
    game = self._rows.get((session, row))
    return Fault(LOST) if game is None else getattr(game, what)()

  def level_id(self, seed: int) -> Any:
    """See `PythonGames.level_id`."""
    return self._games.level_id(seed)

  def forget(self, session: int) -> None:
    """Closes the games of a session."""
    for key in [key for key in self._rows if key[0] == session]:
      close_game(self._rows.pop(key))

  def close(self) -> None:
    """Closes all games."""
    while self._rows:
      close_game(self._rows.popitem()[1])


def _read_part(value: Any, keys: Sequence[str]) -> Any:
  """The values of a mapping that are read; any other value as it is."""
  return {key: value[key] for key in keys if key in value} if isinstance(value, Mapping) else value
