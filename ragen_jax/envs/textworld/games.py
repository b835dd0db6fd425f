"""What worker processes do with TextWorld: they play game files, and make new ones.

A worker process loads this file by its path, and not as a part of its package, because `ragen_jax.envs` loads JAX. Of
this package it may import `ragen_jax.utils` only. The parser of TextWorld is not thread-safe: two games in two threads
of a process fail.
"""

from __future__ import annotations

import os
import pathlib
import re
import shutil
import tempfile
from collections.abc import Sequence
from typing import Any

from ragen_jax.utils.errors import describe_error

INSTALL = 'pip install -r requirements-textworld.txt'
_SEED = 0  # of the interpreter, whose default is the time

# The frame that the games write around their text: the package's name in large letters at the beginning; and at the end
# the question what to do after the game, and the prompt with the status line.
_BANNER = re.compile(r'\A(?:[ _|\\/$<>]*\n)+')
_END = re.compile(r'(?:\s*Would you like to RESTART,[^\n]*)?\s*>\s*-=[^\n]*=-\s*-?\d+/\d+\s*\Z')


def read_feedback(feedback: str) -> str:
  """The text of a game without its frame and without runs of blank lines."""
  text = _END.sub('', _BANNER.sub('', feedback))
  text = '\n'.join(re.sub(r'^ {9,}', '', line).rstrip() for line in text.split('\n'))  # some lines are centred
  return re.sub(r'\n{3,}', '\n\n', text).strip()


def _package() -> Any:
  try:
    import textworld
  except Exception as e:  # a package that is missing, or one of its libraries that cannot be loaded
    raise ValueError(
      f"type='textworld' needs the package textworld, which cannot be loaded ({describe_error(e)}): {INSTALL}"
    ) from e
  return textworld


# -- play --------------------------------------------------------------------------------------------------------------


class TextWorldGames:
  """Makes the games of rows.

  Attributes:
    files: the game files; the seed of an episode is the index of its file.
  """

  def __init__(self, *, files: Sequence[str], reward: str, shows_commands: bool):
    """Raises ValueError with one line if the package cannot be loaded. See `TextWorldEnvironment` for the options."""
    self.files, self.reward, self.shows_commands = tuple(files), reward, shows_commands
    self.package = _package()

  def describe(self) -> dict[str, Any]:
    """Nothing that the environment does not know, but the package was loaded."""
    return {}

  def make(self) -> TextWorldGame:
    """A game of a row."""
    return TextWorldGame(self)


class TextWorldGame:
  """The episodes of a row, one after another. Its interpreter is kept while the game file stays the same."""

  def __init__(self, games: TextWorldGames):
    self._games, self._file, self._env = games, '', None

  def reset(self, index: int, member: int) -> str:
    """Begins an episode of the file with this index; a game has no randomness that members could share or not."""
    del member
    file = self._games.files[index]
    if file != self._file:
      self.close()
      self._env = start(self._games.package, file)
      self._file = file
    self._state, self._done = self._env.reset(), False
    self._played, self._admissible, self._share = 0, 0, 0.0
    self._vain = ''  # the last command, if it changed nothing
    return self._observation()

  def step(self, command: str) -> tuple[str, float, bool, dict[str, Any]]:
    before, facts, known = self._score, self._facts, {_spelling(x) for x in self._state.admissible_commands or ()}
    self._state, _, done = self._env.step(command)
    self._done = bool(done)
    gained, won = self._score - before, bool(self._state.won)
    changed = self._facts != facts
    self._vain = '' if changed else command
    self._played += 1
    self._admissible += _spelling(command) in known
    share, last = self._admissible / self._played, self._share
    self._share = share
    most = self._state.max_score or 0
    # Metrics add up over an episode: to the last score, and to the share of admissible commands.
    metrics = {'score_share': gained / most if most else 0.0, 'admissible_share': share - last}
    reward = float(gained) if self._games.reward == 'score' else float(won and self._done)
    return self._observation(), reward, self._done, {'success': won, 'effective': changed, 'metrics': metrics}

  @property
  def _score(self) -> int:
    return self._state.score or 0

  @property
  def _facts(self) -> frozenset:
    return frozenset(self._state.facts or ())

  def _observation(self) -> str:
    text = read_feedback(self._state.feedback)
    if self._done or not self._games.shows_commands:
      return text
    return f'{text}\n\nPossible commands: {", ".join(self.legal_actions())}'

  def legal_actions(self) -> list[str]:
    """The admissible commands, in alphabetical order; none if the game is over."""
    return [] if self._done else list(self._state.admissible_commands or ())

  def expert(self) -> list[str]:
    """The commands that win from here; none if the game is over, cannot be won any more, or refused the first one."""
    plan = [] if self._done else list(self._state.policy_commands or ())
    # A game may not understand its own plan, where two things have names that contain one another.
    return [] if plan and _spelling(plan[0]) == _spelling(self._vain) else plan

  def rationale(self) -> str:
    """Nothing: the plan has no reasons."""
    return ''

  def close(self) -> None:
    """Ends the interpreter."""
    env, self._env, self._file = self._env, None, ''
    if env is not None:
      env.close()


def _spelling(command: str) -> str:
  return ' '.join(command.split()).casefold()


def start(package: Any, file: str) -> Any:
  """The package's environment of a game file, with all that `TextWorldGame` reads."""
  infos = package.EnvInfos(
    feedback=True, won=True, lost=True, score=True, max_score=True, admissible_commands=True, policy_commands=True,
    facts=True,
  )  # fmt: skip
  env = package.start(file, request_infos=infos)
  env.seed(_SEED)
  return env


# -- making games ------------------------------------------------------------------------------------------------------


class Maker:
  """Makes game files with the package's generator."""

  def make(self, folder: str, name: str, seed: int, rooms: int, objects: int, quest_length: int) -> str:
    """Makes the files `name`.z8 and `name`.json in a folder, unless they are there.

    A game whose own walkthrough does not win it is not kept; the file `name`.left_out remembers it.

    Returns:
      '' if the files are there, or why this game is left out.
    """
    package, place = _package(), pathlib.Path(folder)
    game, story, left_out = (place / f'{name}{ending}' for ending in ('.z8', '.json', '.left_out'))
    if game.is_file() and story.is_file():
      return ''
    if left_out.is_file():
      return left_out.read_text(encoding='utf-8')
    options = package.GameOptions()
    options.seeds = seed
    options.nb_rooms, options.nb_objects, options.quest_length = rooms, objects, quest_length
    own = pathlib.Path(tempfile.mkdtemp(prefix='making_', dir=place))
    try:
      options.path = str(own / 'game.z8')
      try:
        package.make(options)
      except MemoryError:
        raise
      except Exception as e:  # noqa: BLE001, of many kinds, where no game can be as it should; not remembered
        return f'the generator raised {describe_error(e)}'
      if not is_won_by_its_walkthrough(package, options.path):
        reason = 'its walkthrough does not win it'
        (own / 'left_out').write_text(reason, encoding='utf-8')
        os.replace(own / 'left_out', left_out)
        return reason
      # The game is the last one, so that it is never there without its story.
      os.replace(own / 'game.json', story)
      os.replace(own / 'game.z8', game)
      return ''
    finally:
      shutil.rmtree(own, ignore_errors=True)


def is_won_by_its_walkthrough(package: Any, file: str) -> bool:
  """Whether the commands that a game file advises at its beginning win it."""
  env = start(package, file)
  try:
    state = env.reset()
    for command in state.policy_commands or ():
      state, _, done = env.step(command)
      if done:
        break
    return bool(state.won)
  finally:
    env.close()
