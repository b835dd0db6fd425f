"""The game files of ALFWorld's data: a folder for each part, with a folder for each game."""

from __future__ import annotations

import dataclasses
import functools
import importlib.metadata
import json
import logging
import os
import pathlib
import re
from collections.abc import Sequence
from typing import Any

from ragen_jax.envs.alfworld import games
from ragen_jax.envs.dataset import selection
from ragen_jax.utils.errors import describe_error

_log = logging.getLogger(__name__)

PACKAGES = ('textworld', 'fast-downward-textworld')
SPLITS = ('train', 'valid_seen', 'valid_unseen')
# The types of tasks that ALFWorld plays.
TASKS = (
  'pick_and_place_simple',
  'look_at_obj_in_light',
  'pick_clean_then_place_in_recep',
  'pick_heat_then_place_in_recep',
  'pick_cool_then_place_in_recep',
  'pick_two_obj_and_place',
)
MOST_GAMES = 20_000
_LARGEST = 64 << 20
_FOLDER = 'json_2.1.1'
_VARIABLE = 'ALFWORLD_DATA'
_GAME, _ABOUT = 'game.tw-pddl', 'traj_data.json'
_UNPLAYED = ('movable', 'Sliced')  # tasks of ALFRED that ALFWorld leaves out have these in their paths
# What a problem says beside the game: comments, and its name.
_COMMENT = re.compile(r';[^\n]*')
_NAME = re.compile(r'\(\s*problem\s[^()]*\)', re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class GameFile:
  """A game: its path, its identity, which is equal for equal games, and the type of its task."""

  path: str
  id: str
  task: str


def check_packages() -> None:
  """Raises ValueError, with one line, if a package is not installed."""
  for package in PACKAGES:
    try:
      importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError as e:
      raise ValueError(f"type='alfworld' needs the package {package}, which is missing: {games.INSTALL}") from e


def folder_of(path: str) -> str:
  """The folder with the parts: `path`, or the default of the package alfworld if it is ''."""
  path = path or os.path.join(os.environ.get(_VARIABLE) or '~/.cache/alfworld', _FOLDER)
  return os.path.abspath(os.path.expanduser(os.path.expandvars(path)))


def find_games(path: str, split: str, tasks: Sequence[str]) -> tuple[GameFile, ...]:
  """The games of a part whose tasks are of the given types, in the order of their paths.

  Games that ALFWorld does not play are left out: those without a description beside them, of other tasks, and those
  that are not known to be solvable.

  Raises:
    ValueError: there is none, or a file cannot be read; one line names it.
  """
  part = pathlib.Path(folder_of(path)) / split
  where = f'alfworld: path={path!r}: {str(part)!r}'
  if not part.is_dir():
    unset = '' if path or os.environ.get(_VARIABLE) else f', and {_VARIABLE} is not set'
    raise ValueError(f'{where} is no folder{unset}; alfworld-download makes it, see docs/alfworld.md')
  found = sorted(part.rglob(_GAME), key=lambda file: file.relative_to(part).parts)
  read = [_read(file) for file in found if not any(x in str(file.relative_to(part)) for x in _UNPLAYED)]
  kept = tuple(game for game in read if game is not None and game.task in tasks)
  if not 1 <= len(kept) <= MOST_GAMES:
    raise ValueError(
      f'{where} has {len(kept):,} games of tasks={tuple(tasks)} among {len(found):,} files {_GAME}; allowed: from 1 to '
      f'{MOST_GAMES:,} that are solvable, each with its {_ABOUT}'
    )
  _log.info('alfworld: %d of %d games of %s are played', len(kept), len(found), part)
  return kept


def _read(file: pathlib.Path) -> GameFile | None:
  """The game of a file; None if ALFWorld does not play it."""
  try:
    about = file.with_name(_ABOUT)
    if not about.is_file():
      return None
    status = file.stat(), about.stat()
  except OSError as e:
    raise ValueError(f'alfworld: {str(file)!r} cannot be read ({e.strerror})') from e
  return _game(str(file), str(about), tuple((x.st_size, x.st_mtime_ns) for x in status))


@functools.lru_cache(maxsize=MOST_GAMES)
def _game(file: str, about: str, changed: tuple[tuple[int, int], ...]) -> GameFile | None:
  """The game of files with these sizes and times of change."""
  del changed
  game, described = _load(file), _load(about)
  try:
    task = described['task_type']
    if not game.get('solvable') or task not in TASKS:
      return None
    if not all(isinstance(game[field], str) for field in ('pddl_domain', 'grammar', 'pddl_problem')):
      raise TypeError('a field is no text')
    walkthrough = game.get('walkthrough') or []
    if not isinstance(walkthrough, list) or not all(isinstance(x, str) for x in walkthrough):
      raise TypeError('walkthrough is no list of texts')
    return GameFile(file, identity(game['pddl_problem']), task)
  except (TypeError, KeyError, AttributeError) as e:
    raise ValueError(f'alfworld: {file!r} and its {_ABOUT} do not describe a game ({describe_error(e)})') from e


def _load(file: str) -> Any:
  try:
    if (size := os.path.getsize(file)) > _LARGEST:
      raise ValueError(f'alfworld: {file!r} has {size:,} bytes; allowed: at most {_LARGEST:,}')
    with open(file, encoding='utf-8') as opened:
      text = opened.read()
  except OSError as e:
    raise ValueError(f'alfworld: {file!r} cannot be read ({e.strerror})') from e
  except UnicodeDecodeError as e:
    raise ValueError(f'alfworld: {file!r} is not UTF-8 text') from e
  try:
    return json.loads(text)
  except (ValueError, RecursionError) as e:
    raise ValueError(f'alfworld: {file!r} is no JSON ({describe_error(e)})') from e


def identity(problem: str) -> str:
  """The digest of a game, from its problem in PDDL: things, facts and goal, in whatever words they are told."""
  return selection.digest('alfworld ' + _NAME.sub('', _COMMENT.sub('', problem)))
