"""The game files of an environment: those of a folder, or those that TextWorld's generator makes and a cache keeps."""

from __future__ import annotations

import dataclasses
import functools
import glob
import importlib.metadata
import json
import logging
import os
import pathlib
from collections.abc import Sequence
from typing import Any

from ragen_jax.envs.dataset import selection
from ragen_jax.envs.textworld import games
from ragen_jax.utils.errors import describe_error
from ragen_jax.utils.workers import Workers

_log = logging.getLogger(__name__)

PACKAGE = 'textworld'
MOST_GAMES = 20_000
MOST_SEEDS = 4000
_MOST_NUMBERS = 1_000_000  # of games of one seed
_LARGEST_STORY = 64 << 20
_SPARE = 20  # games that may be left out, beyond as many as are wanted
_AT_A_TIME = 16  # games between two lines of the log
# What makes a game, and what only tells it in other words: texts, and how the package was called.
_PARTS = ('world', 'infos', 'quests')
_WORDING = ('desc', 'definite', 'indefinite', 'synonyms', 'room_type')


@dataclasses.dataclass(frozen=True)
class GameFile:
  """A game: its path, and its identity, which is equal for equal games."""

  path: str
  id: str


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The games that the generator makes: `games` of them, with numbers of rooms and objects and a length of the quest.

  Attributes:
    seed: another one makes other games.
    cache: the folder that keeps them.
  """

  games: int
  seed: int
  rooms: int
  objects: int
  quest_length: int
  cache: str


def check_package() -> str:
  """The version of TextWorld; ValueError, with one line, if it is not installed."""
  try:
    return importlib.metadata.version(PACKAGE)
  except importlib.metadata.PackageNotFoundError as e:
    raise ValueError(f"type='textworld' needs the package textworld, which is missing: {games.INSTALL}") from e


# -- files that are there ----------------------------------------------------------------------------------------------


def find_games(path: str) -> tuple[GameFile, ...]:
  """The games of a file, of a folder and those below it, or of a pattern such as 'games/*.z8', in the order of paths.

  Raises:
    ValueError: there is none, or one cannot be read; one line names it.
  """
  where, given = f'textworld: path={path!r}', os.path.expanduser(path)
  pattern = f'{glob.escape(given)}/**/*.z8' if os.path.isdir(given) else given
  found = sorted(x for x in glob.glob(pattern, recursive=True) if os.path.isfile(x))
  others = [x for x in found if not x.endswith('.z8')]
  if others:
    raise ValueError(f'{where}: {others[0]!r} is no game; allowed: .z8, which TextWorld makes, each with its .json')
  if not 1 <= len(found) <= MOST_GAMES:
    allowed = f"from 1 to {MOST_GAMES:,} .z8 files of a folder, or of a pattern such as 'games/*.z8'"
    raise ValueError(f'{where}: has {len(found):,} games; allowed: {allowed}')
  return tuple(_read(os.path.abspath(file), where) for file in found)


def _read(file: str, where: str) -> GameFile:
  story = pathlib.Path(file).with_suffix('.json')
  try:
    status = story.stat()
  except OSError as e:
    raise ValueError(f'{where}: {str(story)!r} cannot be read ({e.strerror}); a game needs it beside its .z8') from e
  return GameFile(file, _identity(str(story), status.st_size, status.st_mtime_ns, where))


@functools.lru_cache(maxsize=MOST_GAMES)
def _identity(story: str, size: int, changed: int, where: str) -> str:
  """The digest of the game that a .json file of a size and a time of change describes."""
  del changed
  if size > _LARGEST_STORY:
    raise ValueError(f'{where}: {story!r} has {size:,} bytes; allowed: at most {_LARGEST_STORY:,}')
  try:
    with open(story, encoding='utf-8') as file:
      described = json.load(file)
    return identity(described)
  except OSError as e:
    raise ValueError(f'{where}: {story!r} cannot be read ({e.strerror})') from e
  except (ValueError, TypeError, KeyError, RecursionError) as e:
    raise ValueError(f'{where}: {story!r} does not describe a game of TextWorld ({describe_error(e)})') from e


def identity(described: Any) -> str:
  """The digest of a game, from what its .json file says.

  Games with the same places, things, names and quests are equal, in whatever words they are told.
  """
  parts = [_without_wording(described[part]) for part in _PARTS]
  parts[0] = sorted(json.dumps(fact, sort_keys=True) for fact in parts[0])
  return selection.digest('textworld ' + json.dumps(parts, sort_keys=True))


def _without_wording(value: Any) -> Any:
  if isinstance(value, dict):
    return {key: _without_wording(x) for key, x in value.items() if key not in _WORDING}
  return [_without_wording(x) for x in value] if isinstance(value, list) else value


# -- files that are made -----------------------------------------------------------------------------------------------


def make_games(recipe: Recipe, *, processes: int, memory_mib: int, timeout_s: float) -> tuple[GameFile, ...]:
  """The games of a recipe, in the order of their numbers. Those that the cache does not have are made in processes.

  A game that its own walkthrough does not win is left out, and another one takes its place.

  Raises:
    ValueError: the package is missing, the cache cannot be written, a game takes too long, or too many are left out;
      one line says which.
  """
  version = check_package()
  folder = os.path.abspath(os.path.expanduser(recipe.cache))
  try:
    os.makedirs(folder, exist_ok=True)
  except OSError as e:
    raise ValueError(f'textworld: cache={recipe.cache!r}: cannot be made ({e.strerror})') from e
  sizes = (recipe.rooms, recipe.objects, recipe.quest_length)
  stem = f'{PACKAGE}{version}_rooms{sizes[0]}_objects{sizes[1]}_quest{sizes[2]}'
  workers = Workers(f'{games.__file__}:Maker', count=processes, memory_mib=memory_mib, name='generator of TextWorld')
  kept, left_out, number, last = [], 0, 0, ''
  try:
    while len(kept) < recipe.games:
      if left_out > recipe.games + _SPARE:
        raise ValueError(
          f'textworld: rooms={sizes[0]}, objects={sizes[1]}, quest_length={sizes[2]}: {left_out} of {number} games '
          f'were left out; the last: {last}'
        )
      count = min(recipe.games - len(kept), _AT_A_TIME)
      seeds = [recipe.seed * _MOST_NUMBERS + number + i for i in range(count)]
      number += count
      names = [f'{stem}_seed{seed}' for seed in seeds]
      new = not all(_is_made(folder, name) for name in names)
      reasons = _make(workers, folder, names, seeds, sizes, timeout_s) if new else [''] * count
      kept += [os.path.join(folder, f'{name}.z8') for name, why in zip(names, reasons, strict=True) if not why]
      left_out += sum(map(bool, reasons))
      last = next(filter(None, reversed(reasons)), last)
      if new:
        _log.info('textworld: %d of %d games are in %s', len(kept), recipe.games, folder)
  finally:
    workers.close()
  return tuple(_read(file, f'textworld: cache={recipe.cache!r}') for file in kept)


def _is_made(folder: str, name: str) -> bool:
  return all(os.path.isfile(os.path.join(folder, f'{name}{ending}')) for ending in ('.z8', '.json'))


def _make(
  workers: Workers, folder: str, names: Sequence[str], seeds: Sequence[int], sizes: tuple[int, ...], timeout_s: float
) -> list[str]:
  """For each game '' if it is made, or why it is left out; ValueError if a process cannot say."""
  arguments = [(folder, name, seed, *sizes) for name, seed in zip(names, seeds, strict=True)]
  reasons = []
  for reason, fault in workers.map('make', arguments, timeout_s=timeout_s):
    if fault is not None or not isinstance(reason, str):
      rooms, objects, quest_length = sizes
      raise ValueError(
        f'textworld: rooms={rooms}, objects={objects}, quest_length={quest_length}: a game cannot be made ({fault}); '
        'smaller games take less time and memory, and make_timeout_s and memory_mib may be larger'
      )
    reasons.append(reason)
  return reasons
