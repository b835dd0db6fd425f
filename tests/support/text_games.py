"""Games outside JAX to test with: well-behaved ones, broken ones, and objects that are awkward to handle."""

from __future__ import annotations

import dataclasses
import time

from ragen_jax import envs as registry
from ragen_jax.envs.outside.base import TextEnvironment, TextStep, read_observation, read_step
from tests.support.light_games import Climb

# The import path of these games, in front of a class.
GAMES = __name__


class Echo:
  """Free text, and no member in reset; goes on for ever. Its observation never changes."""

  rules = 'Say something.'

  def reset(self, seed):
    return 'go on'

  def step(self, action):
    return 'go on', len(action), False, action == 'win'


class Broken:
  """Does what the action says."""

  rules = 'Break.'
  made = 0
  closed = 0

  def __init__(self):
    type(self).made += 1

  def reset(self, seed):
    if seed == 13:
      raise RuntimeError('no such\nlevel')
    return 5 if seed == 14 else f'level {seed}'

  def step(self, action):
    if action == 'raise':
      raise KeyError('lost')
    if action == 'exit':
      raise SystemExit(3)
    if action.startswith('sleep'):
      time.sleep(float(action.split()[1]))
    return 'next', 1.0, False, False

  def close(self):
    type(self).closed += 1


def make(name, **options):
  return registry.make('python', {'class_path': f'{__name__}:{name}', **options})


# -- play, by hand and by a session ------------------------------------------------------------------------------------


ACTIONS = [['Up', 'Down', 'Up', 'Up', 'Up', 'Up'], ['Down'] * 6, ['Up'] * 6, ['Down', 'Up', 'Up', 'Up', 'Down', 'Up']]


def by_hand(rungs, seeds, members):
  """Each row's texts, rewards and end, from Climb alone."""
  played = []
  for seed, member, actions in zip(seeds, members, ACTIONS, strict=True):
    game = Climb(rungs)
    row = [game.reset(seed, member)]
    for action in actions:
      observation, reward, done, info = game.step(action)
      row.append((observation, reward, done, info.get('success', False)))
      if done:
        break
    played.append(row)
  return played


def by_session(session, seeds, members):
  """The same from a session, checked as the agent does."""
  rows = list(range(len(seeds)))
  played = [[read_observation(text)] for text in session.reset(rows, seeds, members)]
  for i in range(6):
    live = [row for row in rows if len(played[row]) == i + 1 and (i == 0 or not played[row][-1][2])]
    for row, result in zip(live, session.step(live, [ACTIONS[row][i] for row in live]), strict=True):
      step = read_step(result)
      assert isinstance(step, TextStep), step
      played[row].append((step.observation, step.reward, step.done, step.success))
  return played


# -- objects that fail in unusual places -------------------------------------------------------------------------------


class Nameless(BaseException):
  def __str__(self):
    raise RuntimeError('no words')


class Unwritten(str):
  def encode(self, *arguments):
    raise Nameless

  def __repr__(self):
    raise RuntimeError('no words')


class Unreal(float):
  def __float__(self):
    raise Nameless

  __repr__ = Unwritten.__repr__


class OddMapping(dict):
  def get(self, *arguments):
    raise Nameless


# -- classes that are no environment -----------------------------------------------------------------------------------


class NoRules:
  def reset(self, seed):
    return ''

  def step(self, action):
    return '', 0.0, True, True


class TwinNames(NoRules):
  rules = 'Twins.'
  action_names = ('Up', 'up')


class NoWords(NoRules):
  def rules(self):
    raise Nameless if self.silent else KeyError('no\nrules')

  silent = False


class NoNames(NoRules):
  rules = 'No names.'
  closed = 0

  @property
  def action_names(self):
    raise SystemExit(2)

  def close(self):
    type(self).closed += 1


class NoStep:
  reset = NoRules.reset


@dataclasses.dataclass(frozen=True)
class Unfinished(TextEnvironment):
  name = 'unfinished'

  def rules(self):
    return 'x'


class NotFrozen(Unfinished):
  def open(self, rows):
    return None


@dataclasses.dataclass(frozen=True, eq=False)
class Own(TextEnvironment):
  """A way of one's own: a session that plays all rows itself."""

  name = 'own'
  task: str

  def rules(self):
    return self.task

  def open(self, rows):
    return None
