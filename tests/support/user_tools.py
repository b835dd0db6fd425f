"""Functions as users write them for `tools`: good ones, broken ones, and some that are no tools."""

from __future__ import annotations

import functools
import threading
import time
from typing import Literal

from ragen_jax.envs.dataset.tools import WrongArguments

# The import path of these functions, in front of a name.
TOOLS = __name__

CALLED: list[object] = []


def shout(text: str) -> str:
  """Writes a text in capitals.

  This line is not for the policy.
  """
  if 'no' in text:
    raise WrongArguments(f'No capitals for "{text}".')
  return text.upper()


def untyped(text):
  """Repeats a text."""
  CALLED.append(text)
  return text


def book(
  city: str, nights: int, price: float = 100.0, breakfast: bool = False, room: Literal['small', 'large'] = 'small'
) -> str:
  """Books a room."""
  return repr((city, nights, price, breakfast, room))


def clock() -> str:
  """Tells the time."""
  return 'noon'


def zone(name: str = 'UTC') -> str:
  """Tells the time in a zone."""
  return f'noon in {name}'


def broken(text: str) -> str:
  """Does one of many wrong things."""
  if text == 'raise':
    raise KeyError('secret of the server')
  if text == 'exit':
    raise SystemExit(3)
  if text == 'hang':
    time.sleep(1.0)
  return {
    'number': 7,
    'nothing': None,
    'bytes': b'text',
    'long': 'x' * (1 << 21),
    'text': type('Text', (str,), {'__str__': lambda self: 1 / 0, 'strip': lambda self: 1 / 0})('fine'),
    'half': 'half \ud83d of it',
    'empty': ' \n',
  }.get(text, text)


def pairs(text: str) -> str:
  """Waits until two calls run at a time."""
  CALLED.append(threading.get_ident())
  end = time.monotonic() + 60
  while len(CALLED) < 2 and time.monotonic() < end:
    time.sleep(0.002)
  return text


def silent(text: str) -> str:
  return text


def positional(text: str, /) -> str:
  """Cannot be called by name."""
  return text


def several(*texts: str) -> str:
  """Takes any number."""
  return texts[0]


def listed(texts: list[str]) -> str:
  """Takes a list."""
  return texts[0]


def unknown(text: NoSuchType) -> str:  # noqa: F821
  """Has an annotation that means nothing."""
  return text


def finish(text: str) -> str:
  """Has the name of the built-in call."""
  return text


def Loud(text: str) -> str:
  """Has a name that is no name of a metric."""
  return text


half = functools.partial(book, 'Turin')
constant = 7
