"""The environment of type 'alfworld': household tasks of ALFWorld in text, played in worker processes."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

from ragen_jax.envs.alfworld import library
from ragen_jax.envs.options import check_choice, check_text
from ragen_jax.envs.outside.adventures import AdventureEnvironment

# One command; the game decides whether it is possible.
_COMMAND = re.compile(r"[a-z0-9][a-z0-9' -]{0,99}", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, eq=False)
class ALFWorldEnvironment(AdventureEnvironment):
  """Household tasks. An action is a command in words. docs/alfworld.md describes the options for users.

  Making it checks its options and reads no files. The games are read by `check`, or when they are first needed.

  Its options are those of the tag `ALFWorld` in configs/environments.py, which says what they mean.
  """

  name: ClassVar[str] = 'alfworld'
  action_help: ClassVar[str] = "An action is one command, such as 'go to desk 1' or 'take mug 2 from shelf 1'."

  path: str = ''
  split: str = 'train'
  tasks: tuple[str, ...] = ()
  show_commands: bool = True
  processes: int = 2
  memory_mib: int = 4096
  step_timeout_s: float = 120.0

  def __post_init__(self):
    check_text('alfworld', 'path', self.path)
    check_choice('alfworld', 'split', self.split, library.SPLITS)
    if not isinstance(self.tasks, tuple | list):
      raise ValueError(f'alfworld: tasks={self.tasks!r}; allowed: (), or some of {", ".join(library.TASKS)}')
    for task in self.tasks:
      check_choice('alfworld', 'tasks', task, library.TASKS)
    self._check_play('engine')

  # -- text ------------------------------------------------------------------------------------------------------------

  def rules(self) -> str:
    return self._with_commands(
      'You are in a household and have a task, which the first text tells. Look for what it needs, and fulfil it. You '
      'can hold one thing. Commands are such as: go to X, open X, close X, take X from Y, move X to Y, use X, heat X '
      'with Y, cool X with Y, clean X with Y, slice X with Y, examine X, look, inventory. Names have numbers, such as '
      'cabinet 2. Nothing happens if a command is not possible. Fulfilling the task pays 1.'
    )

  def parse_action(self, text: str) -> str | None:
    """The command with single blanks; None for what has other signs than a command, such as several commands."""
    command = ' '.join(text.split())
    return command if _COMMAND.fullmatch(command) else None

  # -- the games -------------------------------------------------------------------------------------------------------

  @functools.cached_property
  def files(self) -> tuple[library.GameFile, ...]:
    """The games that are played, in the order of their paths; ValueError, with one line, if they cannot be read."""
    return library.find_games(self.path, self.split, tuple(self.tasks) or library.TASKS)

  @property
  def settings(self) -> dict[str, Any]:
    return {'tasks': tuple(x.task for x in self.files)}

  def check(self) -> None:
    """Reads the games, and loads the packages in a process; raises ValueError, with one line, if that fails."""
    library.check_packages()
    self._processes.describe('alfworld: the package textworld')
