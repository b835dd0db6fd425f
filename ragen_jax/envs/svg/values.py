"""The values of SVG's attributes: numbers, lengths, colours, transforms and styles (SVG 1.1, W3C 2011)."""

from __future__ import annotations

import dataclasses
import functools
import math
import re

import numpy as np
from PIL import ImageColor

from ragen_jax.utils.errors import short

LARGEST_NUMBER = 1e5
_LARGEST_SCALE = 1e20  # of transforms

# A text matches in one way only, so that a failing match does not try all of them.
_NUMBER = r'[+-]?(?:[0-9]+(?:\.[0-9]*)?|\.[0-9]+)(?:[eE][+-]?[0-9]{1,3})?'
_FIRST = re.compile(_NUMBER)
_LENGTH = re.compile(rf'({_NUMBER})(px|%)?')
_GAP = re.compile(r'[ \t\r\n]*(?:,[ \t\r\n]*)?')
_BLANKS = ' \t\r\n'
_TRANSFORM = re.compile(r'[ \t\r\n,]*([a-zA-Z]+)[ \t\r\n]*\(([^()]*)\)[ \t\r\n]*')
_HEX = re.compile(r'#(?:[0-9a-fA-F]{3,4}|[0-9a-fA-F]{6}|[0-9a-fA-F]{8})')
_FUNCTION = re.compile(r'rgba?\(([^()]*)\)')
_TRANSFORM_ARGUMENTS = {
  'matrix': (6,), 'translate': (1, 2), 'scale': (1, 2), 'rotate': (1, 3), 'skewX': (1,), 'skewY': (1,)
}  # fmt: skip


class ProgramError(ValueError):
  """A program that is no SVG, is not of the part of SVG that is drawn here, or exceeds a limit; one line says why."""


@dataclasses.dataclass(frozen=True)
class Colour:
  """Red, green, blue from 0 to 255, and the opacity from 0 to 1."""

  rgb: tuple[float, float, float]
  alpha: float = 1.0


# -- numbers -----------------------------------------------------------------------------------------------------------


def _checked(text: str, what: str) -> float:
  number = float(text)
  if not abs(number) <= LARGEST_NUMBER:
    raise ProgramError(f'{what}: {short(text)}; allowed: numbers up to {LARGEST_NUMBER:g}')
  return number


class Scanner:
  """Reads numbers from a text, one after another."""

  def __init__(self, text: str, what: str):
    """`what` names the text in errors."""
    self._text, self._what, self._at = text, what, 0
    self.skip()

  def skip(self) -> None:
    """Skips blanks and one comma."""
    self._at = _GAP.match(self._text, self._at).end()

  @property
  def is_over(self) -> bool:
    return self._at >= len(self._text)

  def number(self) -> float:
    """The next number; ProgramError if there is none."""
    found = _FIRST.match(self._text, self._at)
    if found is None:
      raise ProgramError(f'{self._what}: {short(self._text[self._at :])} does not begin with a number')
    self._at = found.end()
    self.skip()
    return _checked(found[0], self._what)

  def flag(self) -> bool:
    """The next sign, which is 0 or 1 and may touch its neighbours."""
    sign = self._text[self._at : self._at + 1]
    if sign not in ('0', '1'):
      raise ProgramError(f'{self._what}: a flag of an arc is {sign!r}; allowed: 0, 1')
    self._at += 1
    self.skip()
    return sign == '1'

  def letter(self) -> str:
    """The next sign if it is a letter, else ''."""
    sign = self._text[self._at : self._at + 1]
    if not (sign.isascii() and sign.isalpha()):
      return ''
    self._at += 1
    self.skip()
    return sign


def read_numbers(text: str, what: str) -> list[float]:
  """Numbers that are separated by blanks or commas."""
  scanner, numbers = Scanner(text, what), []
  while not scanner.is_over:
    numbers.append(scanner.number())
  return numbers


def read_length(text: str, what: str, whole: float) -> float:
  """A length in user units; a percentage is one of `whole`."""
  found = _LENGTH.fullmatch(text.strip(_BLANKS))
  if found is None:
    raise ProgramError(f'{what}={short(text)}; allowed: a number, px or %')
  number = _checked(found[1], what)
  return number * whole / 100 if found[2] == '%' else number


def read_share(text: str, what: str) -> float:
  """A number or a percentage, limited to 0 to 1."""
  return min(max(read_length(text, what, 1.0), 0.0), 1.0)


# -- colours -----------------------------------------------------------------------------------------------------------


@functools.lru_cache(maxsize=1024)
def read_colour(text: str, what: str) -> Colour | None:
  """The colour of a paint; None for 'none'."""
  word = text.strip(_BLANKS).lower()
  if word in ('none', 'transparent'):
    return None
  if word == 'currentcolor':
    return Colour((0.0, 0.0, 0.0))
  if _HEX.fullmatch(word):
    digits = word[1:] if len(word) > 5 else ''.join(digit * 2 for digit in word[1:])
    *rgb, alpha = (int(f'{digits}ff'[i : i + 2], 16) for i in range(0, 8, 2))
    return Colour(tuple(map(float, rgb)), alpha / 255)
  if named := ImageColor.colormap.get(word):
    return read_colour(named, what)
  if found := _FUNCTION.fullmatch(word):
    parts = re.split(r'[ \t\r\n]*[,/ ][ \t\r\n]*', found[1].strip(_BLANKS))
    if len(parts) in (3, 4):
      rgb = tuple(min(max(read_length(part, what, 255.0), 0.0), 255.0) for part in parts[:3])
      return Colour(rgb, read_share(parts[3], what) if len(parts) == 4 else 1.0)
  raise ProgramError(f'{what}={short(text)}; allowed: none, a name, #rgb, #rrggbb or rgb(r, g, b)')


# -- transforms --------------------------------------------------------------------------------------------------------


def read_transform(text: str, what: str) -> np.ndarray:
  """The matrix f64[3, 3] of a list of transforms, the last of which acts on a point first."""
  at, matrix = 0, np.eye(3)
  while at < len(text.rstrip(_BLANKS)):
    found = _TRANSFORM.match(text, at)
    if found is None or found[1] not in _TRANSFORM_ARGUMENTS:
      raise ProgramError(f'{what}={short(text)}; allowed: {", ".join(_TRANSFORM_ARGUMENTS)}, with numbers')
    numbers = read_numbers(found[2], what)
    if len(numbers) not in _TRANSFORM_ARGUMENTS[found[1]]:
      raise ProgramError(f'{what}={short(text)}: {found[1]} has {len(numbers)} numbers')
    matrix, at = composed(matrix, _matrix(found[1], numbers)), found.end()
  return matrix


def composed(first: np.ndarray, second: np.ndarray) -> np.ndarray:
  """The transform f64[3, 3] that does the second one and then the first one."""
  product = first @ second
  if np.abs(product).max() > _LARGEST_SCALE:
    raise ProgramError('transform moves points too far from the canvas')
  return product


def _matrix(name: str, numbers: list[float]) -> np.ndarray:
  if name == 'matrix':
    a, b, c, d, e, f = numbers
  elif name == 'translate':
    a, b, c, d, e, f = 1.0, 0.0, 0.0, 1.0, numbers[0], numbers[1] if len(numbers) == 2 else 0.0
  elif name == 'scale':
    a, b, c, d, e, f = numbers[0], 0.0, 0.0, numbers[-1], 0.0, 0.0
  elif name == 'rotate':
    angle, x, y = math.radians(numbers[0]), *(numbers[1:] or (0.0, 0.0))
    a, b = math.cos(angle), math.sin(angle)
    c, d, e, f = -b, a, x - a * x + b * y, y - b * x - a * y
  elif name == 'skewX':
    a, b, c, d, e, f = 1.0, 0.0, math.tan(math.radians(numbers[0])), 1.0, 0.0, 0.0
  else:
    a, b, c, d, e, f = 1.0, math.tan(math.radians(numbers[0])), 0.0, 1.0, 0.0, 0.0
  return np.array([[a, c, e], [b, d, f], [0.0, 0.0, 1.0]])


# -- styles ------------------------------------------------------------------------------------------------------------


def read_style(text: str) -> dict[str, str]:
  """The properties of a `style` attribute; the last of two with one name counts."""
  found = {}
  for part in text.split(';'):
    name, colon, value = part.partition(':')
    if part.strip(_BLANKS):
      if not colon:
        raise ProgramError(f'style: {short(part)}; allowed: name:value')
      found[name.strip(_BLANKS).lower()] = value.strip(_BLANKS)
  return found
