"""A person in the agent's place: training's levels, rules and limits, at a terminal."""

from __future__ import annotations

import itertools
import math
import sys
from typing import TextIO

import numpy as np
from ml_collections import ConfigDict

from ragen_jax import build
from ragen_jax.agent.chat import ChatTokenizer
from ragen_jax.agent.context_manager import ContextManager, PastTurn, describe_task, format_reward, reply_after_prefix
from ragen_jax.agent.env_manager import EnvStateManager
from ragen_jax.agent.trajectory import Status, status_after_turn
from ragen_jax.envs.base import Solution
from ragen_jax.models import presets
from ragen_jax.utils.errors import UserError

_ENDINGS = {
  Status.SUCCESS: 'Won',
  Status.FAILURE: 'Lost',
  Status.OUT_OF_ACTIONS: 'No actions left',
  Status.OUT_OF_TURNS: 'No turns left',
  Status.ENV_ERROR: 'The environment failed',
}
_COMMANDS = {
  'prompt': 'what the model would be fed up to here',
  'hint': 'the best next turn',
  'new': 'the next level',
  'help': 'the rules and this list',
  'quit': 'the end',
}


def play(config: ConfigDict, stdin: TextIO, stdout: TextIO) -> None:
  """Lets a person play training's levels, from `train.first_level` on, the tags of `train.tags` in turn.

  A level, its luck and its limits (turns, actions, actions a turn) are those of a group's first member in training.
  What is typed becomes a reply without a thought. Tokens are not limited.

  Args:
    config: see configs/default.py; the model gives its tokenizer only.
    stdin: lines with the actions of one turn, separated by `agent.action_sep`, or a command. A word that is both is an
      action, unless actions are free text. The end of the input ends the play.
    stdout: where the play is shown.

  Raises:
    UserError: a field of the config cannot be run with.
  """
  tags = tuple(config.train.tags)
  first = config.train.first_level + config.seed * build.LEVELS_PER_SEED
  if not tags:
    raise UserError('train.tags=(): name at least one environment')
  if not config.agent.action_sep.strip():
    raise UserError(f'agent.action_sep={config.agent.action_sep!r}: must not be blank')
  if not 0 <= first < 2**32:
    raise UserError(f'train.first_level={config.train.first_level}: the first level would be {first}; 0 to {2**32 - 1}')
  specs = build.env_groups(config, tags, (1,) * len(tags), field='train.tags')
  tokenizer = ChatTokenizer(presets.resolve(config.model.preset, config.model.path))
  context = build.context_manager(config, tokenizer, specs)
  managers = [EnvStateManager([spec], 1) for spec in specs]
  won, best = [], []
  for number in itertools.count():
    index, seed = number % len(tags), first + number
    level = Level(index, managers[index], context, seed)
    stdout.write(f'{tags[index]}, level {number + 1} (seed {seed})\n\n')
    if number < len(tags):  # the first of this environment
      stdout.write(_help(level))
    goes_on = _play_level(level, stdin, stdout)
    if level.status != Status.RUNNING:
      won.append(level.status == Status.SUCCESS)
      best.append(level.best)
    if not goes_on:
      break
    stdout.write('\n')
  expected = '' if np.isnan(best).any() or not best else f'; the best play wins {np.sum(best):.2f} of them on average'
  stdout.write(f'Levels won: {sum(won)} of {len(won)} that were played to the end{expected}.\n')


class Level:
  """One level, from its first prompt to its end.

  Attributes:
    spec: the environment and its budget.
    context: writes the prompts.
    observation: the state as text.
    turn: turns that were played.
    actions_left: actions that may still be played.
    status: how it ended; RUNNING until then.
    reward: the sum of the environment's rewards so far.
    best: the highest probability of success of any play on this level, NaN where nobody knows.
    conversation: tokens of the prompt up to the next reply; of the whole episode once it is over.
  """

  def __init__(self, index: int, envs: EnvStateManager, context: ContextManager, seed: int):
    """Starts a level.

    Args:
      index: of the environment, in `context`.
      envs: with this environment in its only row; it is reset.
      context: writes the prompts.
      seed: of the level.
    """
    self._index, self._envs, self.context = index, envs, context
    self.spec = envs.specs[0]
    self.observation = envs.reset(seed)[0]
    self._fresh = envs.pool_states(0)
    self._solution: Solution | None = None
    self.turn, self.status, self.reward = 0, Status.RUNNING, 0.0
    self.actions_left = int(envs.actions_left()[0])
    try:
      self.best = float(envs.optimal()[0])
    except ValueError:  # the solver cannot do a game of this size
      self.best = math.nan
    self._past: list[PastTurn] = []
    self.conversation: list[int] = []
    if self._envs.faults:
      self.status = Status.ENV_ERROR
    self._write_prompt()

  def _write_prompt(self) -> None:
    """What comes before the next reply, by the context policy."""
    ids, begins = self.context.prompt(
      self._index, self._past, self.observation, self.actions_left, used=len(self.conversation), room=sys.maxsize
    )
    self.conversation = [*ids] if begins else [*self.conversation, *ids]

  def act(self, names: list[str]) -> tuple[float, int]:
    """Plays a turn.

    Args:
      names: words that `parse_action` knows, at least one. Those beyond a turn's limit are left out, as a model's are.

    Returns:
      The turn's reward, and how many actions were carried out.
    """
    context, tokenizer = self.context, self.context.tokenizer
    env = self.spec.env
    reply = reply_after_prefix(context, '', [env.format_action(env.parse_action(name)) for name in names])
    actions = context.parse(self._index, context.reply_prefix + reply).actions
    result = self._envs.step([list(actions)])
    reward, executed = float(result.reward[0]), int(result.executed[0])
    sampled = (*tokenizer.encode(reply), tokenizer.stop_ids[0])
    written = tuple(env.format_action(action) for action in actions[:executed])
    self._past.append(PastTurn(self.observation, self.actions_left, written, reward, sampled, True))
    self.observation = self._envs.render()[0]
    self.actions_left = int(self._envs.actions_left()[0])
    self.turn += 1
    self.reward += reward
    self.conversation += sampled
    self.status = Status.ENV_ERROR if self._envs.faults else status_after_turn(
      done=result.done[0], success=result.success[0], actions_left=self.actions_left,
      last_turn=self.turn >= self.spec.budget.max_turns,
    )  # fmt: skip
    if self.status == Status.RUNNING:
      self._write_prompt()
    return reward, executed

  def hint(self) -> list[str]:
    """The solver's next turn, as words.

    Raises:
      ValueError: there is no solver for the game, or not for a game of this size.
    """
    env = self.spec.env
    if self._solution is None:
      self._solution = env.solve(self._fresh, self.spec.budget)
    turns_left = np.asarray([self.spec.budget.max_turns - self.turn], np.int32)
    plan = self._solution.plan(self._envs.pool_states(0), turns_left, np.asarray([self.actions_left], np.int32))[0]
    return [env.format_action(action) for action in plan]


def _play_level(level: Level, stdin: TextIO, stdout: TextIO) -> bool:
  """Plays until another level is asked for, True, or the end, False."""
  stdout.write(_state(level))
  while True:
    stdout.write('> ')
    stdout.flush()
    line = stdin.readline()
    if not line:
      stdout.write('\n')
      return False
    names = [piece.strip() for piece in line.split(level.context.action_sep) if piece.strip()]
    unknown = [name for name in names if level.spec.env.parse_action(name) is None]
    command = line.strip().lower()
    # A word that is both is an action; but where anything may be one, a command stays a command.
    if not unknown and names and (level.spec.env.action_words or command not in _COMMANDS):
      stdout.write(_turn(level, names))
    elif command == 'quit':
      return False
    elif command == 'new':
      return True
    elif command == 'help':
      stdout.write(_help(level))
    elif command == 'prompt':
      stdout.write(level.context.tokenizer.decode(level.conversation) + '\n')
    elif command == 'hint':
      stdout.write(_hint(level))
    elif unknown:
      stdout.write(f'{unknown[0]!r} is no action; {_allowed(level)}\n')
    else:
      stdout.write(_state(level))


def _turn(level: Level, names: list[str]) -> str:
  """Plays a turn and tells what came of it."""
  if level.status != Status.RUNNING:
    return "This level is over; 'new' begins the next one.\n"
  reward, executed = level.act(names)
  told = f'Reward: {format_reward(reward)}\n'
  if executed < len(names):
    told += f'Carried out: {executed} of {len(names)} actions\n'
  return told + _state(level)


def _state(level: Level) -> str:
  """The observation, and what is left to do or what came of it all."""
  budget = level.spec.budget
  if level.status == Status.RUNNING:
    left = f'Turn {level.turn + 1} of {budget.max_turns}, actions left: {level.actions_left}'
    return f'{left}\n{level.observation}\n'
  used = f'turns: {level.turn}, actions: {budget.max_actions - level.actions_left}'
  best = 'not known' if math.isnan(level.best) else f'{level.best:.3f}'
  success = int(level.status == Status.SUCCESS)
  return (
    f'{level.observation}\n{_ENDINGS[level.status]}. Success: {success}, best possible: {best}, '
    f"reward: {format_reward(level.reward)}, {used}. 'new' begins the next level.\n"
  )


def _hint(level: Level) -> str:
  if level.status != Status.RUNNING:
    return "This level is over; 'new' begins the next one.\n"
  if not level.spec.env.has_solver:
    return f'{level.spec.tag} has no solver, so nobody knows.\n'
  try:
    names = level.hint()
  except ValueError as e:
    return f'{e}\n'
  return f' {level.context.action_sep} '.join(names) + '\n'


def _allowed(level: Level) -> str:
  """What may be typed, in one line."""
  env, sep = level.spec.env, level.context.action_sep
  actions = env.action_help or f'allowed: {", ".join(env.action_words)}'
  return f'{actions.removesuffix(".")}, separated by {sep}; or {", ".join(_COMMANDS)}'


def _help(level: Level) -> str:
  """The task as the model is told it, and the commands."""
  task = describe_task(level.spec, level.context.action_sep)
  commands = ', '.join(f'{name!r} ({meaning})' for name, meaning in _COMMANDS.items())
  return f'{task}\nType the actions of a turn, or {commands}.\n\n'
