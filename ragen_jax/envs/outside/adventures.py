"""What the text adventures of TextWorld and ALFWorld have in common: a level is a game file, played in processes."""

from __future__ import annotations

import abc
import functools
from collections.abc import Sequence
from typing import Any, ClassVar

from ragen_jax.envs.dataset import selection
from ragen_jax.envs.options import check_flag, check_processes, check_seconds
from ragen_jax.envs.outside.base import Session, TextEnvironment
from ragen_jax.envs.outside.processes import GameProcesses, game_processes


class AdventureEnvironment(TextEnvironment):
  """Games in files. An action is a command in words. Subclasses have the options that are declared here."""

  state_label: ClassVar[str] = 'Observation'
  has_expert: ClassVar[bool] = True
  has_legal_actions: ClassVar[bool] = True
  any_thread: ClassVar[bool] = True

  show_commands: bool
  processes: int
  memory_mib: int
  step_timeout_s: float

  @property
  @abc.abstractmethod
  def files(self) -> Sequence[Any]:
    """The games of the part that is played, with `path` and `id`; ValueError, with one line, if there are none."""

  @property
  @abc.abstractmethod
  def settings(self) -> dict[str, Any]:
    """Arguments of the games in the worker processes, besides `files` and `shows_commands`."""

  def _check_play(self, breaks: str) -> None:
    """Checks the options of this class; `breaks` is what breaks in threads."""
    check_flag(self.name, 'show_commands', self.show_commands)
    if self.processes == 0 and not isinstance(self.processes, bool):
      raise ValueError(f"{self.name}: processes=0; allowed: from 1, since TextWorld's {breaks} breaks in threads")
    check_processes(self.name, self.processes, self.memory_mib, 1)
    check_seconds(self.name, 'step_timeout_s', self.step_timeout_s)

  def _with_commands(self, rules: str) -> str:
    return rules + ' Each text ends with the commands that are possible.' * bool(self.show_commands)

  def _index(self, seed: int) -> int:
    return selection.select(seed, len(self.files), 'shuffled')

  def level_id(self, seed: int) -> str:
    """The identity of the game: equal for equal games of any file, see `identity` of the libraries."""
    return self.files[self._index(seed)].id

  @functools.cached_property
  def _processes(self) -> GameProcesses:
    settings = {'files': tuple(x.path for x in self.files), 'shows_commands': bool(self.show_commands)}
    limits = {'memory_mib': self.memory_mib, 'step_timeout_s': self.step_timeout_s}
    return game_processes(self.name, settings | self.settings, count=self.processes, **limits)

  def open(self, rows: int) -> Session:
    return self._processes.open(rows, self._index)
