"""Gymnasium's environments as text: a function writes observations as text; words or a parser define the actions."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from typing import Any, ClassVar

from ragen_jax.envs.options import check_action_names, check_legend, check_mapping, check_text
from ragen_jax.envs.outside.base import FREE_TEXT
from ragen_jax.envs.outside.games import GymnasiumGames
from ragen_jax.envs.outside.objects import ObjectEnvironment

_log = logging.getLogger(__name__)


@dataclasses.dataclass(frozen=True, eq=False)
class GymnasiumEnvironment(ObjectEnvironment):
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
    processes, memory_mib: see `PythonEnvironment`. The environment and the three functions then run in worker processes
      only, and `parse` has the time limit of a step.
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
  processes: int = 0
  memory_mib: int = 0
  images: int = 0
  image_size: tuple[int, int] = (0, 0)

  def __post_init__(self):
    values = {
      'kwargs': check_mapping('gymnasium', 'kwargs', self.kwargs),
      'action_names': check_action_names('gymnasium', self.action_names),
      'symbols': check_legend('gymnasium', 'symbols', self.symbols),
    }
    self._check_play()
    if self.images and (self.images > 1 or values['kwargs'].get('render_mode') != 'rgb_array'):
      raise ValueError(f"gymnasium: images={self.images}; allowed: 0, or 1 with render_mode='rgb_array' in kwargs")
    check_text('gymnasium', 'id', self.id, blank=False)
    check_text('gymnasium', 'task', self.task, blank=False)
    check_text('gymnasium', 'action_help', self.action_help)
    if bool(values['action_names']) == bool(self.parse):
      raise ValueError(
        f'gymnasium: action_names={self.action_names!r}, parse={self.parse!r}; allowed: one of them, the other empty'
      )
    if self.parse and not self.action_help:
      values['action_help'] = FREE_TEXT
    for field, value in values.items():
      object.__setattr__(self, field, value)
    fields = ('id', 'kwargs', 'action_names', 'images', 'parse', 'render', 'success')
    settings = {field: getattr(self, field) for field in fields}
    about = self._load_games(GymnasiumGames, settings, f'id={self.id!r}')
    object.__setattr__(self, '_warned', [])
    if self.action_names:
      self._check_words(about['text'], about['count'])

  def _check_words(self, space: str, count: int | None) -> None:
    """Raises ValueError if words cannot name the actions of the space, or their number is wrong."""
    wrong = f'gymnasium: action_names={self.action_names!r}; allowed: '
    if count is None:
      raise ValueError(f'{wrong}none for {space}, which is not a Discrete space and needs parse')
    if len(self.action_names) != count:
      raise ValueError(f'{wrong}one word for each action of {space}, or parse')

  def rules(self) -> str:
    return self.task

  def legend(self) -> dict[str, str]:
    return self.symbols

  def parse_action(self, text: str) -> str | None:
    """The word of the action, or a text that `parse` turns into an action of the environment's space; else None."""
    action = super().parse_action(text)
    if action is None or self.action_names:
      return action
    valid, problem = self._games.is_action(action)
    if problem and not self._warned:
      self._warned.append(text)
      _log.warning('gymnasium: parse=%r raised %s; such text is not an action', self.parse, problem)
    return action if valid else None
