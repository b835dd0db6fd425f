"""Gymnasium's environments as text: a function writes observations as text; words or a parser define the actions."""

from __future__ import annotations

import copy
import dataclasses
import logging
from collections.abc import Callable, Mapping
from typing import Any, ClassVar

import numpy as np

from ragen_jax.envs.options import (
  check_action_names,
  check_legend,
  check_mapping,
  check_text,
  check_workers,
)
from ragen_jax.envs.outside.base import FREE_TEXT, TextEnvironment
from ragen_jax.envs.outside.images import ImageForm, check_image_options
from ragen_jax.envs.outside.local import LocalSession, close_all
from ragen_jax.utils.errors import describe_error, one_line, short
from ragen_jax.utils.imports import import_function

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class GymnasiumEnvironment(TextEnvironment):
  """An environment of Gymnasium's registry.

  A level is the result of `reset(seed=...)`. Afterwards the environment's generator, `np_random`, is seeded from
  (level, member). The members of a group then share the level and differ in their randomness, provided that the
  environment draws all random numbers from `np_random`, as Gymnasium requires. The game is over when the environment
  terminates or truncates.

  Attributes:
    id: the registered name; 'package.module:Name-v0' imports the module first.
    kwargs: arguments of `gymnasium.make`.
    task: the game and its aim, for the prompt.
    action_names: words for the actions of a `Discrete` space, in the order of its actions.
    parse: instead of `action_names`, the import path of a function from text to an action. It returns None or raises
      ValueError for a text that is not an action.
    action_help: with `parse`, one line about the form of an action.
    render: import path of a function from an observation to text. Without it, the text that the environment renders if
      kwargs has render_mode='ansi', else `str(observation)`.
    symbols: symbol to meaning, for the prompt, if the text is a board.
    success: import path of a function (observation, reward, terminated, truncated, info) -> bool, which tells whether a
      finished game is won. Without it, info['is_success'] or info['success'] is used; if info has neither, the game is
      won if it terminated with a reward above 0.
    workers: number of threads, see `PythonEnvironment`.
    step_timeout_s: time limit of a step, a reset or a close, in seconds.
    images: 1 if each observation contains the image that the environment renders, which needs render_mode='rgb_array'
      in kwargs; 0 for text alone. With an image, the text is empty unless `render` is set.
    image_size: (height, width) of the image, in pixels.
  """

  name: ClassVar[str] = 'gymnasium'

  id: str = ''
  kwargs: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  task: str = ''
  action_names: tuple[str, ...] = ()
  parse: str = ''
  action_help: str = ''
  render: str = ''
  symbols: Mapping[str, str] = dataclasses.field(default_factory=dict)
  success: str = ''
  workers: int = 1
  step_timeout_s: float = 60.0
  images: int = 0
  image_size: tuple[int, int] = (0, 0)

  def __post_init__(self):
    values = {
      'kwargs': check_mapping('gymnasium', 'kwargs', self.kwargs),
      'action_names': check_action_names('gymnasium', self.action_names),
      'symbols': check_legend('gymnasium', 'symbols', self.symbols),
      '_image_form': check_image_options('gymnasium', self.images, self.image_size),
    }
    if self.images and (self.images > 1 or values['kwargs'].get('render_mode') != 'rgb_array'):
      raise ValueError(f"gymnasium: images={self.images}; allowed: 0, or 1 with render_mode='rgb_array' in kwargs")
    check_text('gymnasium', 'id', self.id, blank=False)
    check_text('gymnasium', 'task', self.task, blank=False)
    check_text('gymnasium', 'action_help', self.action_help)
    check_workers('gymnasium', self.workers, self.step_timeout_s)
    if bool(values['action_names']) == bool(self.parse):
      raise ValueError(
        f'gymnasium: action_names={self.action_names!r}, parse={self.parse!r}; allowed: one of them, the other empty'
      )
    if self.parse and not self.action_help:
      values['action_help'] = FREE_TEXT
    for field in ('parse', 'render', 'success'):
      path = getattr(self, field)
      values['_' + field] = import_function(f'gymnasium: {field}', path) if path else None
    for field, value in values.items():
      object.__setattr__(self, field, value)
    env = self._make()
    space = env.action_space
    close_all([env], workers=self.workers, timeout_s=self.step_timeout_s)
    object.__setattr__(self, '_space', space)
    object.__setattr__(self, '_warned', [])
    if self.action_names:
      self._check_words(space)

  def _check_words(self, space: Any) -> None:
    """Raises ValueError if words cannot name the actions of the space, or their number is wrong."""
    from gymnasium.spaces import Discrete  # an optional package

    wrong = f'gymnasium: action_names={self.action_names!r}; allowed: '
    if not isinstance(space, Discrete):
      raise ValueError(f'{wrong}none for {one_line(space, str)}, which is not a Discrete space and needs parse')
    if len(self.action_names) != space.n:
      raise ValueError(f'{wrong}one word for each action of {space}, or parse')

  def _make(self) -> Any:
    """A new environment; raises ValueError if Gymnasium cannot make it."""
    try:
      import gymnasium
    except ImportError as e:
      raise ValueError("type='gymnasium' needs the package gymnasium, which is missing: pip install gymnasium") from e
    try:
      return gymnasium.make(self.id, **copy.deepcopy(self.kwargs))  # an environment may change its arguments
    except (Exception, SystemExit) as e:
      raise ValueError(
        f'gymnasium: id={self.id!r} with kwargs={one_line(self.kwargs)} cannot be made ({describe_error(e)})'
      ) from e

  @property
  def image_form(self) -> ImageForm | None:
    return self._image_form

  def rules(self) -> str:
    return self.task

  def legend(self) -> dict[str, str]:
    return self.symbols

  def parse_action(self, text: str) -> str | None:
    """The word of the action, or a text that `parse` turns into an action of the environment's space; else None."""
    action = super().parse_action(text)
    return action if action is None or self._action(action) is not None else None

  def _action(self, text: str) -> Any | None:
    """The argument of the environment's `step` for a text, or None if the text is not an action."""
    if self.action_names:
      return self._space.start + self.action_names.index(text)
    try:
      action = self._parse(text)
      return action if action is not None and self._space.contains(action) else None
    except ValueError:
      return None
    except (Exception, SystemExit) as e:  # noqa: BLE001, a reply that the parser cannot read must not end a run
      if not self._warned:
        self._warned.append(text)
        _log.warning('gymnasium: parse=%r raised %s; such text is not an action', self.parse, describe_error(e))
      return None

  def open(self, rows: int) -> LocalSession:
    make = lambda: _Game(self)  # noqa: E731
    limits = {'workers': self.workers, 'step_timeout_s': self.step_timeout_s}
    return LocalSession(make, rows, **limits, owner=self, form=self.image_form)


class _Game:
  """One environment with the methods that `LocalSession` calls."""

  def __init__(self, spec: GymnasiumEnvironment):
    self._spec = spec
    self._env = spec._make()
    self._ansi = spec.kwargs.get('render_mode') == 'ansi'

  def _observation(self, observation: Any) -> Any:
    if self._spec.images:
      text = '' if self._spec._render is None else self._spec._render(observation)
      return {'text': text, 'images': [self._env.render()]}
    if self._spec._render is not None:
      return self._spec._render(observation)
    return self._env.render() if self._ansi else str(observation)

  def reset(self, seed: int, member: int) -> Any:
    observation, _ = self._env.reset(seed=seed)
    # The generator of the level makes the level; all later random numbers come from the generator of the member.
    self._env.unwrapped.np_random = np.random.default_rng([seed, member])
    return self._observation(observation)

  def step(self, text: str) -> tuple[Any, Any, bool, dict[str, Any]]:
    observation, reward, terminated, truncated, info = self._env.step(self._spec._action(text))
    reward = reward.item() if isinstance(reward, np.ndarray) and reward.size == 1 else reward
    terminated, truncated = _flag('terminated', terminated), _flag('truncated', truncated)
    done = terminated or truncated
    success = done and self._is_won(observation, reward, terminated, truncated, info)
    outcome = {'success': success} | ({'effective': info['effective']} if 'effective' in info else {})
    return self._observation(observation), reward, done, outcome

  def _is_won(self, observation: Any, reward: Any, terminated: bool, truncated: bool, info: Mapping[str, Any]) -> bool:
    judge: Callable[..., Any] | None = self._spec._success
    if judge is not None:
      return judge(observation, reward, terminated, truncated, info)
    for key in ('is_success', 'success'):
      if key in info:
        return _flag(f'info[{key!r}]', info[key])
    return terminated and bool(reward > 0)

  def close(self) -> None:
    self._env.close()


def _flag(name: str, value: Any) -> bool:
  """A bool from a bool or a number that is 0 or 1, of Python or NumPy; text is neither, whatever it says."""
  value = value.item() if isinstance(value, np.ndarray | np.generic) and value.size == 1 else value
  if not isinstance(value, bool | int | float) or value not in (0, 1):
    raise TypeError(f'{name} is {short(value)}, must be a bool')
  return bool(value)
