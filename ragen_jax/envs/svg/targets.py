"""The targets that are made from a seed: a few shapes on a white canvas, each written as an SVG program.

The random numbers are those of `random.Random.random`, which are the same in every version of Python.
"""

from __future__ import annotations

import dataclasses
import functools
import hashlib
import random
import re

import numpy as np

from ragen_jax.envs.dataset.selection import is_held_out
from ragen_jax.envs.svg.program import CANVAS, read_program
from ragen_jax.envs.svg.raster import draw
from ragen_jax.envs.svg.values import read_colour

KINDS = ('rect', 'circle', 'ellipse', 'line', 'polygon', 'path')
COLOURS = ('red', 'green', 'blue', 'gold', 'purple', 'orange', 'black', 'gray')
GRIDS = (1, 2, 5, 10)
MOST_SHAPES = 12

_TRIES = 64  # places for a shape, and drawings of a part
_PARTS_TRIES = 512
_IDENTITY = 64  # pixels of the sides of the picture whose bytes are the identity of a drawing
_SIDE = int(CANVAS)
_LINE_WIDTHS = (2, 4, 6)


@dataclasses.dataclass(frozen=True)
class Recipe:
  """The difficulty of targets; `SvgEnvironment` describes the fields."""

  min_shapes: int
  max_shapes: int
  kinds: tuple[str, ...]
  colours: tuple[str, ...]
  overlap: bool
  outlines: bool
  grid: int


@dataclasses.dataclass(frozen=True, eq=False)
class Target:
  """A drawing: its program, and its identity, which is equal for equal pictures."""

  program: str
  id: str


def identity(program: str) -> str:
  """The digest of what a program draws; equal pictures have equal ones."""
  picture = draw(read_program(program), _IDENTITY)
  return hashlib.blake2b(picture.tobytes(), digest_size=12).hexdigest()


def is_drawn(program: str, side: int) -> bool:
  """Whether a program draws anything that differs from white in a picture of `side` pixels."""
  return bool(np.any(draw(read_program(program), side) != 255))


def make_target(recipe: Recipe, seed: int, split: str, test_share: float, side: int) -> Target:
  """The first target of a seed that is in a part of all targets, and can be seen in a picture of `side` pixels.

  Raises:
    ValueError: none of many is; one line says so.
  """
  for number in range(_PARTS_TRIES):
    target = _numbered(recipe, seed, number)
    is_in = split == 'all' or is_held_out(target.id, test_share) == (split == 'test')
    if is_in and _is_seen(target.program, side):
      return target
  raise ValueError(
    f'svg: split={split!r}: none of {_PARTS_TRIES} targets is in this part and seen at {side} pixels; allowed: more '
    f'shapes, kinds or colours, or another share than test_share={test_share}'
  )


@functools.lru_cache(maxsize=4096)
def _numbered(recipe: Recipe, seed: int, number: int) -> Target:
  program = make_program(recipe, random.Random(seed << 16 | number))
  return Target(program, identity(program))


_is_seen = functools.lru_cache(maxsize=4096)(is_drawn)


def make_program(recipe: Recipe, rng: random.Random) -> str:
  """A random program of a recipe. Where there is no place left for a shape, it has fewer."""
  count = recipe.min_shapes + _below(rng, recipe.max_shapes - recipe.min_shapes + 1)
  boxes: list[np.ndarray] = []
  written: list[str] = []
  for _ in range(count):
    for _ in range(_TRIES):
      made = _shape(recipe, rng)
      if made is not None and all(_may_stand(made[1], other, recipe.overlap) for other in boxes):
        written.append(made[0])
        boxes.append(made[1])
        break
  return f'<svg viewBox="0 0 {_SIDE} {_SIDE}">{"".join(written)}</svg>'


def _below(rng: random.Random, count: int) -> int:
  """A whole number from 0 to below `count`."""
  return min(int(rng.random() * count), count - 1)


def _choice(rng: random.Random, values: tuple) -> object:
  return values[_below(rng, len(values))]


def _may_stand(box: np.ndarray, other: np.ndarray, overlap: bool) -> bool:
  """Whether a shape in a box (x0, y0, x1, y1) may be drawn behind another one: it must not hide all of it."""
  if overlap:
    return not (np.all(box[:2] <= other[:2]) and np.all(box[2:] >= other[2:]))
  return bool(np.any(box[2:] < other[:2]) or np.any(other[2:] < box[:2]))


def _shape(recipe: Recipe, rng: random.Random) -> tuple[str, np.ndarray] | None:
  """A random shape, and its box (x0, y0, x1, y1) with its line; None for one that is too thin."""
  kind, colour = _choice(rng, recipe.kinds), _choice(rng, recipe.colours)
  grid = recipe.grid
  places = _SIDE // grid
  least = -(-10 // grid)  # sides of at least 10 units

  def place(size: int) -> int:
    """A coordinate at which something of so many steps begins."""
    return _below(rng, places - size + 1) * grid

  def size(most: int) -> int:
    return least + _below(rng, max(most // grid, least) - least + 1)

  outlined = kind == 'line' or (recipe.outlines and rng.random() < 1 / 3)
  width = _choice(rng, _LINE_WIDTHS)
  paint = f'stroke="{colour}" stroke-width="{width}"' if outlined else f'fill="{colour}"'
  paint = f'fill="none" {paint}' if outlined and kind != 'line' else paint

  def told(written: str, x: int, y: int, wide: int, high: int) -> tuple[str, np.ndarray]:
    """The shape with its paint, and the box of its side lengths."""
    more = width / 2 if outlined else 0
    return f'<{written} {paint}/>', np.array([x - more, y - more, x + wide + more, y + high + more])

  if kind == 'circle':
    r = max(size(60) // 2, 1)
    x, y, r = place(2 * r), place(2 * r), r * grid
    return told(f'circle cx="{x + r}" cy="{y + r}" r="{r}"', x, y, 2 * r, 2 * r)
  if kind == 'ellipse':
    rx, ry = max(size(70) // 2, 1), max(size(70) // 2, 1)
    x, y, rx, ry = place(2 * rx), place(2 * ry), rx * grid, ry * grid
    return told(f'ellipse cx="{x + rx}" cy="{y + ry}" rx="{rx}" ry="{ry}"', x, y, 2 * rx, 2 * ry)
  wide, high = size(70), size(70)
  x, y, wide, high = place(wide), place(high), wide * grid, high * grid
  if kind == 'rect':
    return told(f'rect x="{x}" y="{y}" width="{wide}" height="{high}"', x, y, wide, high)
  if kind == 'line':
    y0, y1 = (y, y + high) if rng.random() < 0.5 else (y + high, y)
    return told(f'line x1="{x}" y1="{y0}" x2="{x + wide}" y2="{y1}"', x, y, wide, high)
  a, b, c, d = (_below(rng, side // grid + 1) * grid for side in (wide, high, wide, high))
  # Of the box, a polygon covers (1 - thin) / 2, and the two curves (1 - thin) / 3; what is too thin would be a line.
  thin = (a - c) * (b - d) / (wide * high) * (1 if kind == 'path' else -1)
  if thin > 0.5:
    return None
  if kind == 'polygon':  # one point on each side of the box, so that no edges cross
    points = ((x + a, y), (x + wide, y + b), (x + c, y + high), (x, y + d))
    return told(f'polygon points="{" ".join(f"{px},{py}" for px, py in points)}"', x, y, wide, high)
  curves = f'M{x} {y + b}Q{x + a} {y} {x + wide} {y + d}Q{x + c} {y + high} {x} {y + b}Z'
  return told(f'path d="{curves}"', x, y, wide, high)


# -- words -------------------------------------------------------------------------------------------------------------

_WRITTEN = re.compile(r'<(\w+) [^>]*?(?:fill|stroke)="(?!none)([^"]*)"[^>]*/>')
_ROWS, _COLUMNS = ('at the top', 'in the middle', 'at the bottom'), (' left', '', ' right')


def describe(program: str) -> str:
  """One sentence about the shapes of a program that `make_program` wrote: their colours, kinds and places."""
  told = []
  for (x, y), shape in zip(_marks(program), _WRITTEN.finditer(program), strict=True):
    article = 'an' if shape[2][0] in 'aeiou' else 'a'
    told.append(f'{article} {shape[2]} {shape[1]} {_ROWS[min(int(3 * y), 2)]}{_COLUMNS[min(int(3 * x), 2)]}')
  return f'I see {", then ".join(told)}.' if told else ''


def _marks(program: str) -> list[tuple[float, float]]:
  """The middles of the marks of a program, as shares of the canvas."""
  middles = []
  for mark in read_program(program).parts:
    points = np.clip(mark.edges[:, :2], 0.0, 1.0)
    x, y = (points.min(0) + points.max(0)) / 2
    middles.append((float(x), float(y)))
  return middles


def is_visible(name: str) -> bool:
  """Whether a text is the name of a colour that can be seen on white."""
  try:
    colour = read_colour(name, 'colours') if name.isascii() and name.isalpha() else None
  except ValueError:
    return False
  return colour is not None and min(colour.rgb) < 230
