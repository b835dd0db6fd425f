"""`--mode=play`: a person plays the training levels at a terminal, with the agent's rules and limits."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
import pathlib
import sys
import tempfile
from collections.abc import Callable, Set
from typing import ClassVar, TextIO

import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax import envs as registry
from ragen_jax.agent.agent_proxy import AgentProxy
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.env_manager import EnvStateManager, first_training_level, refuse_programs
from ragen_jax.agent.episode import Episode, Status, TextReply, Turn
from ragen_jax.agent.episode_log import EpisodeLog
from ragen_jax.agent.image_observations import shows_images
from ragen_jax.agent.speakers import SolverSpeaker, written_reply
from ragen_jax.agent.templates import describe_task, format_reward
from ragen_jax.build_environments import check_needs
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models import presets
from ragen_jax.utils.errors import UserError
from ragen_jax.utils.files import encode_png

_ENDINGS = {
  Status.SUCCESS: 'Won',
  Status.FAILURE: 'Lost',
  Status.OUT_OF_ACTIONS: 'No actions left',
  Status.OUT_OF_TURNS: 'No turns left',
  Status.ENV_ERROR: 'The environment failed',
}
_COMMANDS = {
  'prompt': "the model's input up to here",
  'hint': 'the best next turn',
  'new': 'the next level',
  'help': 'the rules and this list',
  'quit': 'end the game',
}
_SHORT = {'q': 'quit', 'exit': 'quit'}
_OVER = "This level is over; 'new' begins the next one.\n"


def play(config: ConfigDict, stdin: TextIO, stdout: TextIO, *, level: str | None = None) -> None:
  """Lets a person play training's levels, from `train.first_level` on, the tags of `train.tags` in turn.

  A level, its randomness and its limits (turns, actions, actions a turn) are those of a group's first member in
  training. The typed actions become a reply without a thought. Tokens are not limited; of the model, only the tokenizer
  is read.

  Args:
    stdin: lines with the actions of one turn, separated by `agent.action_sep`, or a command. A word that is both is an
      action, unless actions are free text. The end of the input ends the play.
    level: a text file with the level that is played each time, in place of training's (`envs.load_level`).

  Raises:
    UserError: the config has a field that cannot be played with, or the file has no level of its environment.
  """
  tags = tuple(config.train.tags)
  first = first_training_level(config.train.first_level, config.seed)
  if not tags:
    raise UserError('train.tags=(): name at least one environment')
  if not config.agent.action_sep.strip():
    raise UserError(f'agent.action_sep={config.agent.action_sep!r}: must not be blank')
  if not 0 <= first < 2**32:
    raise UserError(f'train.first_level={config.train.first_level}: the first level would be {first}; 0 to {2**32 - 1}')
  specs = build.env_specs(config, tags, (1,) * len(tags), field='train.tags')
  refuse_programs(specs)
  check_needs(specs, envs=config.envs)
  drawn = {spec.tag for spec in specs if shows_images(spec)}
  specs = [dataclasses.replace(spec, tile=None) for spec in specs]  # people also read the text
  if level is not None:
    specs = [_with_level_of(level, specs)]
  tokenizer = ChatTokenizer(presets.resolve(config.model.preset, config.model.path))
  proxies = [
    AgentProxy(
      EnvStateManager([spec], 1),
      build.context_manager(config, tokenizer, [spec]),
      dataclasses.replace(build.episode_limits(config, [spec]), episode_timeout=0.0, rollout_timeout=0.0),
    )
    for spec in specs
  ]
  with tempfile.TemporaryDirectory(prefix='ragen_jax_play_') as folder:
    person = functools.partial(Person, stdin, stdout, pathlib.Path(folder), drawn)
    _play_levels(proxies, first, level, person, stdout)


def _play_levels(
  proxies: list[AgentProxy], first: int, level: str | None, make: Callable[[AgentProxy], Person], stdout: TextIO
) -> None:
  """Plays one level after another until the person ends the game; `first` is the seed of the first."""
  tags = [spec.tag for proxy in proxies for spec in proxy.envs.specs]
  won, best = [], []
  for number in itertools.count():
    proxy, seed = proxies[number % len(tags)], first + number
    person = make(proxy)
    which = f'level {number + 1}' if level is None else f'level of {level}, attempt {number + 1}'
    stdout.write(f'{tags[number % len(tags)]}, {which} (seed {seed})\n\n')
    if number < len(tags):  # the first of this environment
      stdout.write(person.help())
    (episode,) = proxy.rollout(person, seed).episodes
    if episode.status != Status.ABANDONED:
      won.append(episode.success)
      best.append(float(proxy.envs.optimal()[0]))
      person.after_the_end(episode, best[-1])
    if person.quits:
      break
    stdout.write('\n')
  expected = '' if np.isnan(best).any() or not best else f'; the best play wins {np.sum(best):.2f} of them on average'
  stdout.write(f'Levels won: {sum(won)} of {len(won)} that were played to the end{expected}.\n')


def _with_level_of(path: str, specs: list[EnvSpec]) -> EnvSpec:
  """The environment of `train.tags` with the level of a text file as its only one."""
  if len(specs) > 1:
    tags = tuple(spec.tag for spec in specs)
    raise UserError(f'--level={path}: is for one environment, name it alone in train.tags={tags}')
  (spec,) = specs
  try:
    return dataclasses.replace(spec, env=registry.with_level(spec.env, registry.load_level(spec.env, path)))
  except ValueError as e:
    raise UserError(f'--level: envs.{spec.tag}: {e}') from e


class Person:
  """A person as the speaker of one level; the batch has one row."""

  writes_tokens: ClassVar[bool] = False

  def __init__(self, stdin: TextIO, stdout: TextIO, folder: pathlib.Path, drawn: Set[str], proxy: AgentProxy):
    """Shows nothing before the first turn. `folder` is for the images of the environments with the tags `drawn`."""
    (self._spec,) = proxy.envs.specs
    self._envs, self._context = proxy.envs, proxy.context
    self._picture = folder / 'observation.png' if self._spec.tag in drawn else None
    self._stdin, self._stdout = stdin, stdout
    self._solver = SolverSpeaker()
    self._typed = 0  # number of typed actions in the last turn
    self.conversation: list[int] = []  # tokens of the prompt up to the next reply; after the end, of the whole episode
    self.quits = False  # whether the person ended the game

  def reply(self, log: EpisodeLog) -> dict[int, TextReply] | None:
    """See `agent.speakers.Speaker`. Shows the state and reads lines until a line has actions or leaves the level."""
    if not log.live:
      return None
    prompt = log.prompts([0], room=sys.maxsize)[0]
    self.conversation = [*([] if prompt.fresh else self.conversation), *prompt.ids]
    state = self._state(log) + self._shown()
    self._stdout.write(self._outcome(log.past(0)) + state)
    names = self._ask(state, lambda: self._hint(log))
    if names is None:
      log.leave(0, Status.ABANDONED)
      return None
    env = self._spec.env
    reply = written_reply(self._context, [env.format_action(env.parse_action(name)) for name in names])
    self.conversation += reply.ids
    self._typed = len(names)
    return {0: reply}

  def after_the_end(self, episode: Episode, best: float) -> None:
    """Shows the end and the best success probability (NaN if unknown), and answers commands until the person leaves."""
    ending = self._shown() + self._ending(episode, best)
    self._stdout.write(self._outcome(episode.turns) + ending)
    while self._ask(ending, lambda: _OVER) is not None:
      self._stdout.write(_OVER)

  def _ask(self, state: str, hint: Callable[[], str]) -> list[str] | None:
    """Reads lines and answers commands until the person types actions, and returns their words, at least one.

    None if the person leaves the level; `quits` then tells whether the game is over. `state` answers an empty line,
    `hint` the command 'hint'.
    """
    env = self._spec.env
    while True:
      self._stdout.write('> ')
      self._stdout.flush()
      line = self._stdin.readline()
      if not line:
        self._stdout.write('\n')
        self.quits = True
        return None
      names = [env.typed(piece) for piece in self._context.pieces(0, line)]
      unknown = [name for name in names if env.parse_action(name) is None]
      command = line.strip().lower()
      command = _SHORT.get(command, command)
      # A word that is both is an action, but a command if actions are free text.
      if not unknown and names and (env.action_words or command not in _COMMANDS):
        return names
      if command in ('quit', 'new'):
        self.quits = command == 'quit'
        return None
      if command == 'help':
        self._stdout.write(self.help())
      elif command == 'prompt':
        self._stdout.write(self._context.tokenizer.decode(self.conversation) + '\n')
      elif command == 'hint':
        self._stdout.write(hint())
      elif unknown:
        self._stdout.write(f'{unknown[0]!r} is not an action{self._allowed()}\n')
      else:
        self._stdout.write(state)

  def _outcome(self, turns: list[Turn]) -> str:
    """The reward of the last turn and the number of executed actions; '' before the first turn."""
    if not turns:
      return ''
    last = turns[-1]
    shown = f'Reward: {format_reward(last.reward)}\n'
    if len(last.actions) < self._typed:
      shown += f'Carried out: {len(last.actions)} of {self._typed} actions\n'
    return shown

  def _state(self, log: EpisodeLog) -> str:
    """The observation, the turn and the remaining actions."""
    left = f'Turn {log.turn + 1} of {self._spec.budget.max_turns}, actions left: {log.actions_left[0]}'
    return f'{left}\n{log.observations[0]}\n'

  def _shown(self) -> str:
    """Writes the images of the present observation to a file, and names it; '' if there are none."""
    picture = self._envs.picture(0) if self._picture else None
    if picture is None:
      return ''
    self._picture.write_bytes(encode_png(picture))
    return f'The images are in {self._picture} until the game ends.\n'

  @staticmethod
  def _ending(episode: Episode, best: float) -> str:
    """The last observation and the outcome of the level."""
    used = f'turns: {len(episode.turns)}, actions: {sum(len(turn.actions) for turn in episode.turns)}'
    possible = 'not known' if math.isnan(best) else f'{best:.3f}'
    return (
      f'{episode.final_observation}\n{_ENDINGS[episode.status]}. Success: {int(episode.success)}, '
      f"best possible: {possible}, reward: {format_reward(episode.env_return)}, {used}. 'new' begins the next level.\n"
    )

  @property
  def _has_hints(self) -> bool:
    return self._spec.env.has_solver or self._spec.env.has_expert

  def _hint(self, log: EpisodeLog) -> str:
    """The solver's next turn, in one line."""
    if not self._has_hints:
      return f'{self._spec.tag} has no solver, so there is no hint.\n'
    try:
      (names,) = self._solver.plans(log)
    except ValueError as e:
      return f'{e}\n'
    return (f' {self._context.settings.action_sep} '.join(names) or 'There is no advice.') + '\n'

  def _allowed(self) -> str:
    """What follows a word that is no action: those that are, in one line."""
    env, sep = self._spec.env, self._context.settings.action_sep
    words = f'; allowed: {", ".join(env.action_words) or "what the task describes"}'
    actions = f'. {env.action_help}' if env.action_help else words
    separated = f', separated by {sep}' if self._spec.actions_a_turn > 1 else ''
    return f'{actions.removesuffix(".")}{separated}; or {", ".join(_COMMANDS)}'

  def help(self) -> str:
    """The task of the prompt, and the commands."""
    task = describe_task(self._spec, self._context.settings.action_sep)
    shown = {name: meaning for name, meaning in _COMMANDS.items() if name != 'hint' or self._has_hints}
    commands = ', '.join(f'{name!r} ({meaning})' for name, meaning in shown.items())
    more = f'\n{self._spec.env.typing_help}' if self._spec.env.typing_help else ''
    return f'{task}{more}\nType the actions of a turn, or {commands}.\n\n'
