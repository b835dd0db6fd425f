"""What worker processes do with ALFWorld: they play its game files with TextWorld's engine for PDDL.

A worker process loads this file by its path, and not as a part of its package, because `ragen_jax.envs` loads JAX. Of
this package it may import `ragen_jax.utils` only. The engine is not thread-safe.

A game file contains its domain, its words and its problem, so that the package alfworld is not needed. What it adds are
the names of things, see `name_things`.
"""

from __future__ import annotations

import collections
import functools
import re
from collections.abc import Iterable, Sequence
from typing import Any

from ragen_jax.utils.errors import describe_error

INSTALL = 'pip install -r requirements-alfworld.txt'
_TASK = re.compile(r'^Your task is to: .*$', re.MULTILINE)
_TRANSLATIONS = 64  # games whose translation a process keeps
# Facts that only say what was looked at; those that follow from the others, which the engine adds during play; where
# the player is; and what is open.
_LOOKED_AT = ('checked', 'examined')
_IMPLIED = ('not_', 'new-axiom@')
_WHERE = 'atlocation'
_OPEN = 'opened'
_OTHER = 'other'


def name_things(ids: Iterable[str]) -> dict[str, str]:
  """The names of things, such as 'desk 1', by their ids, such as 'desk_bar__plus_01_dot_50'.

  The kind of a thing is what stands before the first '_bar_', and 'basin' follows if this word is anywhere in the id.
  The things of a kind are numbered in the descending order of their ids, as in the package alfworld. An id without
  '_bar_' is a kind by itself, whose name ends with a blank.
  """
  kinds: dict[str, list[str]] = collections.defaultdict(list)
  names = {}
  for thing in sorted(ids):
    kind, bar, _ = thing.partition('_bar_')
    if bar:
      kinds[kind + 'basin' * ('basin' in thing)].append(thing)
    else:
      names[thing] = f'{thing} '
  for kind, things in kinds.items():
    names |= {thing: f'{kind} {number}' for number, thing in enumerate(reversed(things), start=1)}
  return names


@functools.cache
def _engine() -> type:
  """The class of the engine; ValueError with one line if a package is missing."""
  try:
    import fast_downward
    import textworld.envs
  except Exception as e:  # a package that is missing, or one of its libraries that cannot be loaded
    raise ValueError(
      f"type='alfworld' needs the packages textworld and fast-downward-textworld, which cannot be loaded "
      f'({describe_error(e)}): {INSTALL}'
    ) from e
  translate = fast_downward.pddl2sas

  @functools.lru_cache(maxsize=_TRANSLATIONS)
  def translate_once(domain: str, problem: str) -> Any:
    return translate(domain, problem)

  def translated(domain: str, problem: str, verbose: bool = False, optimize: bool = False) -> Any:
    # The second translation that the engine asks for, `optimize`, is for its planner, which is not used.
    del verbose, optimize
    return translate_once(domain, problem)

  # The engine would translate the game four times for each episode of each row, which takes seconds.
  fast_downward.pddl2sas = translated

  class Engine(textworld.envs.PddlEnv):
    """The engine with the names of things that ALFWorld uses."""

    def load(self, file: str) -> None:
      super().load(file)
      names = name_things(self._entity_infos)
      for thing, about in self._entity_infos.items():
        about.name = names[thing]

    def name_of(self, fact: Any) -> str:
      """The name of the first thing of a fact."""
      return self._entity_infos[fact.arguments[0].name].name

  return Engine


def start() -> Any:
  """The engine of a row, which plays one game file after another: `load`, `reset` and `step`."""
  engine = _engine()
  import textworld

  return engine(textworld.EnvInfos(admissible_commands=True))


class ALFWorldGames:
  """Makes the games of rows.

  Attributes:
    files: the game files; the seed of an episode is the index of its file.
    tasks: the type of the task of each file.
  """

  def __init__(self, *, files: Sequence[str], tasks: Sequence[str], shows_commands: bool):
    """Raises ValueError with one line if a package cannot be loaded. See `ALFWorldEnvironment` for the options."""
    self.files, self.tasks, self.shows_commands = tuple(files), tuple(tasks), shows_commands
    self._idle: list[Any] = []
    _engine()

  def describe(self) -> dict[str, Any]:
    """Nothing that the environment does not know, but the packages were loaded."""
    return {}

  def make(self) -> ALFWorldGame:
    """A game of a row."""
    return ALFWorldGame(self)

  def engine(self) -> Any:
    """An engine that no row uses."""
    return self._idle.pop() if self._idle else start()

  def give_back(self, engine: Any) -> None:
    """Keeps an engine for another row, because its library cannot be unloaded: that crashes the process."""
    self._idle.append(engine)


class ALFWorldGame:
  """The episodes of a row, one after another."""

  def __init__(self, games: ALFWorldGames):
    self._games, self._env, self._file = games, None, ''

  def reset(self, index: int, member: int) -> str:
    """Begins an episode of the file with this index; a game has no randomness that members could share or not."""
    del member
    file = self._games.files[index]
    if self._env is None:
      self._env = self._games.engine()
    if file != self._file:
      self._file = ''
      self._env.load(file)
      self._file = file
    self._kind, self._played, self._done = self._games.tasks[index], 0, False
    self._look(self._env.reset())
    told = _TASK.search(self._state.feedback)
    self._task = told[0] if told else ''
    # The rest of the walkthrough, the facts from which it wins, and the command that leads to where it begins.
    self._rest, self._facts_there, self._way = list(self._env.walkthrough or ()), self._facts, ''
    return self._observation(self._state.feedback.strip())

  def step(self, command: str) -> tuple[str, float, bool, dict[str, Any]]:
    before, (back, rest) = self._facts, self._plan()
    written = self._commands.get(_spelling(command))
    state, _, done = self._env.step(command if written is None else written)
    self._look(state)
    self._done, won = bool(done), bool(state.won)
    if [*back, *rest] and _spelling(command) == _spelling([*back, *rest][0]) and written is not None:
      self._follow(back, rest, before)
    # Ratios: the share of admissible commands, and the success in this type of task, with an episode counted once.
    metrics = {'admissible_share': (float(written is not None), 1)}
    if won or not self._played:
      metrics[f'success_{self._kind}'] = (float(won), int(not self._played))
    self._played += 1
    text = state.feedback.strip()
    text = f'{text}\n\n{self._task}' if self._task and not done else text
    return self._observation(text), float(won), self._done, {
      'success': won, 'effective': self._facts != before, 'metrics': metrics
    }  # fmt: skip

  def _look(self, state: Any) -> None:
    self._state = state
    self._commands = {_spelling(x): x for x in state.admissible_commands}
    self._facts = frozenset(x for x in state['_facts'] if x.name not in _LOOKED_AT and not x.name.startswith(_IMPLIED))

  def _observation(self, text: str) -> str:
    if self._done or not self._games.shows_commands:
      return text
    return f'{text}\n\nPossible commands: {", ".join(self.legal_actions())}'

  def legal_actions(self) -> list[str]:
    """The admissible commands, in alphabetical order; none if the game is over."""
    return [] if self._done else [x.strip() for x in self._state.admissible_commands]

  # -- the expert ------------------------------------------------------------------------------------------------------

  def expert(self) -> list[str]:
    """The rest of the file's walkthrough, from here; none if the game is over or a detour changed the world.

    A detour does not matter if it only went elsewhere, or opened something that the walkthrough would have found shut.
    """
    back, rest = self._plan()
    advice = [*back, *rest]
    return advice if advice and _spelling(advice[0]) in self._commands else []

  def _plan(self) -> tuple[list[str], list[str]]:
    """The command that leads back to where the walkthrough goes on, if it is needed, and its rest."""
    there, here = _by_name(self._facts_there), _by_name(self._facts)
    if self._done or there[_OTHER] != here[_OTHER] or not there[_OPEN] <= here[_OPEN]:
      return [], []
    rest = list(self._rest)
    for fact in here[_OPEN] - there[_OPEN]:
      command = f'open {self._env.name_of(fact)}'
      if command in rest:
        rest.remove(command)
    back = [self._way] if self._way and there[_WHERE] != here[_WHERE] else []
    return back, rest

  def _follow(self, back: list[str], rest: list[str], before: frozenset) -> None:
    """Goes on in the walkthrough after the first command of a plan, which was made with the facts `before`."""
    if not back:
      goes = _by_name(before)[_WHERE] != _by_name(self._facts)[_WHERE]
      self._way, rest = rest[0] if goes else self._way, rest[1:]
    self._rest, self._facts_there = rest, self._facts

  def rationale(self) -> str:
    """Nothing: the walkthrough has no reasons."""
    return ''

  def close(self) -> None:
    """Gives the engine back."""
    env, self._env, self._file = self._env, None, ''
    if env is not None:
      self._games.give_back(env)


def _by_name(facts: frozenset) -> dict[str, frozenset]:
  """The facts that say where the player is, those that say what is open, and the others."""
  parts: dict[str, list[Any]] = {_WHERE: [], _OPEN: [], _OTHER: []}
  for fact in facts:
    parts[fact.name if fact.name in parts else _OTHER].append(fact)
  return {name: frozenset(own) for name, own in parts.items()}


def _spelling(command: str) -> str:
  return ' '.join(command.split()).casefold()
