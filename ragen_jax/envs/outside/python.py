"""A Python class as an environment; docs/add_environment.md has a complete example."""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections.abc import Mapping
from typing import Any, ClassVar

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
from ragen_jax.utils.errors import describe_error, one_line
from ragen_jax.utils.imports import import_object


@dataclasses.dataclass(frozen=True, eq=False)
class PythonEnvironment(TextEnvironment):
  """A Python class as an environment. One object of the class plays one episode at a time.

  Methods of the class:

    reset(seed) -> str                  starts an episode and returns the first observation; equal seeds give equal
                                        levels. An optional second argument, `member`, is the number of the episode in
                                        its group; it can seed randomness that is not part of the level.
    step(action) -> (str, float, bool, success)
                                        executes one action: observation, reward, whether the game is over, and
                                        whether it is won. `success` can be a dict with 'success' and optionally
                                        'effective': whether the action changed anything. Without 'effective', an action
                                        is effective if the observation changed.
                                        With `images` observations are mappings {'text': str, 'images': [arrays]}.
    close()                             optional; called when the object is no longer needed.

  Attributes of the class or of its objects, which may also be methods without arguments:

    rules                               the game and its aim.
    action_names                        optional: the words that are actions; without them every text is an action.
    action_help                         optional: how an action is written.
    legend                              optional: symbol to meaning.

  The constructor makes one object to read these four.

  Attributes:
    class_path: 'package.module:ClassName'.
    options: keyword arguments of the class.
    workers: number of threads; 0 plays in the caller's thread, without a time limit. More than 1 helps if steps wait
      for a network or a process. Only one thread at a time then uses an object, but not always the same thread.
    step_timeout_s: time limit of a step, a reset or a close, in seconds.
    images: number of images in each observation, see envs/outside/images.py; 0 for text alone.
    image_size: (height, width) of every image, in pixels.
  """

  name: ClassVar[str] = 'python'

  class_path: str = ''
  options: Mapping[str, Any] = dataclasses.field(default_factory=dict)
  workers: int = 1
  step_timeout_s: float = 60.0
  images: int = 0
  image_size: tuple[int, int] = (0, 0)

  def __post_init__(self):
    object.__setattr__(self, 'options', check_mapping('python', 'options', self.options))
    check_workers('python', self.workers, self.step_timeout_s)
    object.__setattr__(self, '_image_form', check_image_options('python', self.images, self.image_size))
    cls = import_object('python: class_path', self.class_path)
    for method in ('reset', 'step'):
      if not inspect.isclass(cls) or not callable(getattr(cls, method, None)):
        raise ValueError(
          f'python: class_path={self.class_path!r} has no {method}; allowed: classes with reset and step'
        )
    try:
      game = cls(**copy.deepcopy(self.options))
    except (Exception, SystemExit) as e:
      raise ValueError(
        f'python: options={one_line(self.options)}: {self.class_path} does not take them ({describe_error(e)})'
      ) from e
    where = f'python: {self.class_path}'
    try:
      texts = {
        '_rules': check_text(where, 'rules', _attribute(where, game, 'rules', ''), blank=False),
        '_legend': check_legend(where, 'legend', _attribute(where, game, 'legend', {})),
        '_action_names': check_action_names(where, _attribute(where, game, 'action_names', ())),
        '_action_help': check_text(where, 'action_help', _attribute(where, game, 'action_help', '')),
      }
    finally:
      close_all([game], workers=self.workers, timeout_s=self.step_timeout_s)
    for field, value in texts.items():
      object.__setattr__(self, field, value)
    object.__setattr__(self, '_class', cls)

  @property
  def image_form(self) -> ImageForm | None:
    return self._image_form

  @property
  def action_names(self) -> tuple[str, ...]:
    return self._action_names

  @property
  def action_help(self) -> str:
    """The class's `action_help`; a default line if the class has neither that nor `action_names`."""
    return self._action_help or ('' if self._action_names else FREE_TEXT)

  def rules(self) -> str:
    return self._rules

  def legend(self) -> dict[str, str]:
    return self._legend

  def open(self, rows: int) -> LocalSession:
    # Each object has its own options, because a game may change them.
    make = lambda: _PythonGame(self._class(**copy.deepcopy(self.options)))  # noqa: E731
    limits = {'workers': self.workers, 'step_timeout_s': self.step_timeout_s}
    return LocalSession(make, rows, **limits, owner=self, form=self.image_form)


class _PythonGame:
  """An object of the user's class with a method `reset(seed, member)`, even if the class's `reset` takes no member."""

  def __init__(self, game: Any):
    self._game = game
    self.step = game.step
    self.close = getattr(game, 'close', lambda: None)
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
