"""Games for worker processes, which load this module: it imports nothing of the package, and NumPy where it must."""

from __future__ import annotations

import collections
import enum
import os
import pathlib
import re
import signal
import sys
import time
import types

LIGHT = __name__


class Climb:
  """Up and Down on a ladder; the top wins, the ground loses. The member's luck is how far Up goes."""

  action_names = ('Up', 'Down')
  legend = types.MappingProxyType({'#': 'you'})

  def __init__(self, rungs: int = 5):
    self.rungs = rungs

  def rules(self):
    return f'A ladder of {self.rungs} rungs.'

  def reset(self, seed, member):
    self.rung, self.luck = 1 + seed % (self.rungs - 2), 1 + member % 2
    return self.told()

  def told(self):
    return f'rung {self.rung} of {self.rungs}'

  def step(self, action):
    self.rung += self.luck if action == 'Up' else -1
    done = not 0 < self.rung < self.rungs
    return self.told(), 0.25 * self.rung, done, {'success': self.rung >= self.rungs} if done else {}


class Wild:
  """Does what the action says, and notes in a file what happens to its objects."""

  rules = 'Do.'

  def __init__(self, notes=''):
    self.notes, self.episodes = notes, 0
    self.note('made')

  def note(self, what):
    if self.notes:
      with open(self.notes, 'a') as file:
        file.write(f'{what} {os.getpid()}\n')

  def reset(self, seed):
    self.note(f'reset {seed}')
    if seed >= 900:
      time.sleep(600)
    if seed >= 800:
      os._exit(8)
    if seed >= 700:
      raise RuntimeError('no such\nlevel')
    self.seed, self.episodes = seed, self.episodes + 1
    return f'level {seed}'

  def step(self, action):
    what, _, how = action.partition(' ')
    if what == 'sleep':
      time.sleep(600)
    if what == 'hold':
      re.match('(a|aa)+$', 'a' * 200 + 'b')
    if what == 'exit':
      os._exit(int(how))
    if what == 'crash':
      os.kill(os.getpid(), signal.SIGSEGV)
    if what == 'raise':
      raise KeyError('lost')
    if what == 'eat':
      self.eaten = bytearray(512 << 20)
    if what == 'talk':
      print('p' * (1 << 20), flush=True)
      os.write(1, b'f' * (1 << 20))
      os.write(2, b'e' * (1 << 20))
    return f'level {self.seed}, episode {self.episodes}, {action}', 1.0, False, False

  def close(self):
    self.note('closed')


class Pair(collections.namedtuple('Pair', 'first second')):
  """A tuple of its own class, written as a tuple."""

  __repr__ = tuple.__repr__


class Level(enum.IntEnum):
  HIGH = 2


class Text(str):
  __slots__ = ()


class Strange(dict):
  def __iter__(self):
    raise RuntimeError('no keys')

  keys = __contains__ = __iter__


def results():
  """Results of a step, honest and not, by name."""
  import numpy as np

  big = np.arange(3)
  return {
    'honest': ('x', 0.5, False, {'success': True, 'effective': False, 'more': object(), 'state': big}),
    'of numpy': ('x', np.float32(0.5), np.True_, {'success': np.False_, 'effective': np.True_}),
    'a list': ['x', 1, True, True],
    'of own classes': (Text('x'), Level.HIGH, False, types.MappingProxyType({'success': False})),
    'text that is none': ('\ud800 \x00', 1.0, False, False),
    'long text': ('x' * (1 << 20), 1.0, False, False),
    'longer text': ('x' * ((1 << 20) + 1), 1.0, False, False),
    'nothing': None,
    'an object': big,
    'a short tuple': ('x', 1.0, False),
    'a pair': Pair('x', 1.0),
    'no text': (b'x', 1.0, False, False),
    'an array for text': (big, 1.0, False, False),
    'no reward': ('x', None, False, False),
    'a reward of text': ('x', '1.0', False, False),
    'a complex reward': ('x', 1j, False, False),
    'a reward without end': ('x', float('nan'), False, False),
    'a reward of many digits': ('x', 10**400, False, False),
    'an array for a reward': ('x', big, False, False),
    'done that is a number': ('x', 1.0, 1, False),
    'no success at the end': ('x', 1.0, True, {}),
    'success that is text': ('x', 1.0, True, {'success': 'yes'}),
    'success that is a list': ('x', 1.0, True, [True, {'a': (1, 2)}]),
    'an effect that is text': ('x', 1.0, True, {'success': True, 'effective': 'no'}),
    'a mapping for text': ({'text': 'x', 'images': []}, 1.0, False, False),
    'a class': (Pair, 1.0, False, False),
  }


class Liar:
  """Returns the result that the action names."""

  rules = 'Lie.'

  def reset(self, seed):
    if seed:
      return list(results().values())[seed]
    return 'first'

  def step(self, action):
    return results()[action]


class Lamp:
  """Shows its level as a gray image; the action 'dark' and others show what is none."""

  rules = 'Look.'

  def reset(self, seed):
    import numpy as np

    self.array = np.full((4, 6, 3), seed, np.uint8)
    return {'text': 'It is <image>.', 'images': [self.array], 'more': object()}

  def step(self, action):
    import numpy as np

    self.array += 1
    given = {
      'dark': self.array,
      'turned': self.array[::-1, ::2].repeat(2, axis=1),
      'small': self.array[:2],
      'float': self.array / 2,
      'masked': np.ma.masked_array(self.array),
      'list': self.array.tolist(),
      'object': object(),
    }[action]
    return {'text': '', 'images': (given,)}, 0.0, False, False


class Choosy:
  """Its constructor does what its option says."""

  def __init__(self, what=''):
    if what == 'exit':
      os._exit(6)
    if what == 'sleep':
      time.sleep(600)
    if what == 'raise':
      raise KeyError('lost')
    self.rules = 'Choose.' if what != 'silent' else ''

  def reset(self, seed):
    return 'x'

  step = reset


def loaded(name):
  """Whether this process has loaded a module."""
  return name in sys.modules


def lines(path):
  """The lines of a file of notes."""
  path = pathlib.Path(path)
  return path.read_text().splitlines() if path.exists() else []


class Quiz:
  """Questions whose wording, items and answers the class tells."""

  system, state_label, counts_turns, whole_answer = 'You answer.', 'Question', False, True
  rules = 'Add one.'

  def level_id(self, seed):
    if seed == 99:
      raise KeyError('no such item')
    return f'item {seed % 3}'

  def reset(self, seed):
    self.number = seed
    return str(seed)

  def step(self, action):
    right = action == str(self.number + 1)
    return 'over', float(right), True, {'success': right, 'metrics': {'letters': len(action)}}

  def expert(self):
    return None if self.number == 5 else [str(self.number + 1)]

  def rationale(self):
    return f'One more than {self.number}.'


class Shaky:
  """Fails in some steps, by its seed, its member and the step: it raises, or ends its process."""

  rules = 'Go on.'
  action_names = ('Up', 'Down', 'Left', 'Right')

  def reset(self, seed, member):
    self.number = 3 * seed + member
    return f'number {seed % 5}'

  def step(self, action):
    self.number += 1 + len(action)
    if self.number % 11 == 3:
      raise OSError('out of order')
    if self.number % 11 == 7:
      os._exit(5)
    return f'number {self.number % 5}', 0.1 * (self.number % 5), self.number % 5 == 0, self.number % 5 == 0
