"""The environment of type 'textworld': text adventures of the package TextWorld, played in worker processes."""

from __future__ import annotations

import dataclasses
import functools
import re
from typing import Any, ClassVar

from ragen_jax.envs.base import Budget
from ragen_jax.envs.dataset import selection
from ragen_jax.envs.options import check_choice, check_integer, check_seconds, check_share, check_text
from ragen_jax.envs.outside.adventures import AdventureEnvironment
from ragen_jax.envs.textworld import library

REWARDS = ('score', 'win')
# First words of commands to the interpreter or to the package, which stop, repeat or take back play, change how it is
# told, or show what is hidden. They are no part of a story: the package loses track of the game, or waits for an answer
# to a question about the program. Games read the first letters of a word only.
_LETTERS = 9
_OUTSIDE_THE_STORY = frozenset(word[:_LETTERS] for word in (
  'again', 'brief', 'disable', 'enable', 'g', 'long', 'normal', 'noscript', 'notify', 'nouns', 'o', 'oops', 'pronouns',
  'q', 'quit', 'recording', 'replay', 'restart', 'restore', 'restrict', 'save', 'script', 'short', 'superbrief',
  'transcript', 'undo', 'unscript', 'verbose', 'verify', 'version',
))  # fmt: skip
# One command: other signs separate commands.
_COMMAND = re.compile(r"(?!tw-)[a-z0-9][a-z0-9' -]{0,99}", re.IGNORECASE)


@dataclasses.dataclass(frozen=True, eq=False)
class TextWorldEnvironment(AdventureEnvironment):
  """Text adventures. An action is a command in words. docs/textworld.md describes the options for users.

  Making it checks its options and reads no files. The games are read or made by `check`, or when they are first needed.

  Its options are those of the tag `TextWorld` in configs/environments.py, which says what they mean.
  """

  name: ClassVar[str] = 'textworld'
  action_help: ClassVar[str] = "An action is one command, such as 'go north' or 'open box'."

  path: str = ''
  games: int = 100
  seed: int = 0
  rooms: int = 3
  objects: int = 5
  quest_length: int = 3
  cache: str = '~/.cache/ragen_jax/textworld'
  split: str = 'all'
  test_share: float = 0.2
  reward: str = 'score'
  show_commands: bool = True
  processes: int = 2
  memory_mib: int = 4096
  step_timeout_s: float = 60.0
  make_timeout_s: float = 300.0

  def __post_init__(self):
    check_text('textworld', 'path', self.path)
    check_text('textworld', 'cache', self.cache, blank=False)
    for option, low, high in (
      ('games', 1, library.MOST_GAMES), ('seed', 0, library.MOST_SEEDS), ('rooms', 1, 20), ('objects', 1, 50),
      ('quest_length', 1, 20),
    ):  # fmt: skip
      check_integer('textworld', option, getattr(self, option), low, high)
    check_choice('textworld', 'split', self.split, selection.SPLITS)
    check_share('textworld', 'test_share', self.test_share)
    check_choice('textworld', 'reward', self.reward, REWARDS)
    self._check_play('parser')
    check_seconds('textworld', 'make_timeout_s', self.make_timeout_s)

  # -- text ------------------------------------------------------------------------------------------------------------

  def rules(self) -> str:
    pays = {'score': 'Each point of the score pays 1.', 'win': 'It pays 1.'}[self.reward]
    return self._with_commands(
      'You play a text adventure. The first text tells your task; fulfil it to win. Commands are such as: look, goal, '
      'inventory, go north, examine X, take X, take X from Y, drop X, put X on Y, insert X into Y, open X, close X, '
      f'unlock X with Y, lock X with Y, eat X. {pays}'
    )

  def parse_action(self, text: str) -> str | None:
    """The command with single blanks; None for several commands, and for one that is not a part of the story."""
    command = ' '.join(text.split())
    words = command.casefold().split(' ')
    if not _COMMAND.fullmatch(command) or words[0][:_LETTERS] in _OUTSIDE_THE_STORY or 'then' in words:
      return None
    return command

  def check_budget(self, budget: Budget) -> None:
    """Raises ValueError if games that are made need more commands than an episode has."""
    if not self.path and budget.most_actions < self.quest_length:
      raise ValueError(
        f'quest_length={self.quest_length}; allowed: at most {budget.most_actions}, which max_actions, max_turns and '
        'max_actions_per_turn leave'
      )

  # -- the games -------------------------------------------------------------------------------------------------------

  @functools.cached_property
  def files(self) -> tuple[library.GameFile, ...]:
    """The games of the part that is played; ValueError, with one line, if they cannot be read or made."""
    if self.path:
      found, source = library.find_games(self.path), f'path={self.path!r}'
    else:
      recipe = library.Recipe(**{field.name: getattr(self, field.name) for field in dataclasses.fields(library.Recipe)})
      limits = {'processes': self.processes, 'memory_mib': self.memory_mib, 'timeout_s': self.make_timeout_s}
      found, source = library.make_games(recipe, **limits), f'games={self.games}'
    wanted = {'all': (False, True), 'train': (False,), 'test': (True,)}[self.split]
    part = tuple(x for x in found if selection.is_held_out(x.id, self.test_share) in wanted)
    if not part:
      raise ValueError(
        f'textworld: {source}: none of {len(found)} games is in the part split={self.split!r} with '
        f'test_share={self.test_share}; use more games or another share'
      )
    return part

  @property
  def settings(self) -> dict[str, Any]:
    return {'reward': self.reward}

  def check(self) -> None:
    """Reads or makes the games, and loads the package in a process; raises ValueError, with one line, if that fails."""
    library.check_package()
    self._processes.describe('textworld: the package textworld')
