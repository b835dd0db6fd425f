"""Reads small SVG programs, safely: a bounded part of SVG, without entities, files, addresses, style sheets or scripts.

Whatever a program says, reading it ends in a fraction of a second, and drawing what was read (raster.py) in about a
second for the largest pictures. The limits count what is drawn in shares of the picture, so they do not depend on its
size: the edges, and the areas that are painted.
"""

from __future__ import annotations

import dataclasses
import re
import xml.parsers.expat
from collections.abc import Callable, Mapping

import numpy as np

from ragen_jax.envs.svg import shapes
from ragen_jax.envs.svg.values import (
  Colour,
  ProgramError,
  composed,
  read_colour,
  read_length,
  read_numbers,
  read_share,
  read_style,
  read_transform,
)
from ragen_jax.utils.errors import one_line, short

MOST_CHARS = 16_384
MOST_ELEMENTS = 300
MOST_DEPTH = 16
# Heights of the canvas that the edges of all polygons may span together; a filled shape of convex outline spans two.
MOST_HEIGHTS = 1000
MOST_EDGES = 100_000
# Pictures that are painted: each fill or stroke paints its height, each group or shape with an opacity a whole one.
MOST_PAINTED = 100
CANVAS = 100.0  # user units of the sides of the canvas of a program that does not say

SHAPES = ('rect', 'circle', 'ellipse', 'line', 'polyline', 'polygon', 'path')
_SILENT = ('title', 'desc', 'metadata')  # whose content is not drawn
_FARTHEST = 1e7  # sides of the canvas

# Property -> its initial value. They are attributes, or parts of `style`, which counts more.
_INHERITED = {
  'fill': 'black', 'stroke': 'none', 'stroke-width': '1', 'fill-opacity': '1', 'stroke-opacity': '1',
  'fill-rule': 'nonzero', 'stroke-linejoin': 'miter', 'stroke-linecap': 'butt', 'stroke-miterlimit': '4',
  'visibility': 'visible', 'stroke-dasharray': 'none', 'color': 'black',
}  # fmt: skip
_OWN = {'opacity': '1', 'display': 'inline', 'clip-path': 'none', 'mask': 'none', 'filter': 'none', 'transform': ''}
_WORDS = {
  'fill-rule': ('nonzero', 'evenodd'), 'stroke-linejoin': shapes.JOINS, 'stroke-linecap': shapes.CAPS,
  'visibility': ('visible', 'hidden', 'collapse'), 'display': ('inline', 'block', 'none'),
  # These would change the picture, and are not drawn.
  'stroke-dasharray': ('none',), 'clip-path': ('none',), 'mask': ('none',), 'filter': ('none',),
}  # fmt: skip
_BEGIN, _END = re.compile(r'<svg(?=[\s>])'), re.compile(r'</svg\s*>')


@dataclasses.dataclass(frozen=True, eq=False)
class Mark:
  """An area of one colour.

  Attributes:
    edges: f64[E, 4], straight lines (x0, y0, x1, y1) of closed polygons; the canvas is from 0 to 1 in both directions.
    even_odd: whether what is crossed twice is outside; else what is wound around is inside.
  """

  edges: np.ndarray
  even_odd: bool
  colour: Colour


@dataclasses.dataclass(eq=False)
class Layer:
  """What is drawn together, in its order, and is then mixed with what is below with one opacity."""

  parts: list[Mark | Layer]
  opacity: float = 1.0


def find_program(text: str) -> str | None:
  """The first SVG document in a text, or None. What stands around it is ignored."""
  begin = _BEGIN.search(text)
  end = begin and _END.search(text, begin.end())
  return text[begin.start() : end.end()] if end else None


def read_program(text: str) -> Layer:
  """What an SVG document draws.

  Raises:
    ProgramError: see the class.
  """
  if len(text) > MOST_CHARS:
    raise ProgramError(f'the program has {len(text):,} characters; allowed: at most {MOST_CHARS:,}')
  return _Reader().read(text)


@dataclasses.dataclass(frozen=True)
class _Open:
  """An element that is being read: its inherited properties, its transform to the canvas, and its layer."""

  name: str
  properties: Mapping[str, str]
  matrix: np.ndarray
  layer: Layer


class _Reader:
  """Reads one document. Each element is drawn into the layer of the group around it when it begins."""

  def __init__(self):
    self._open: list[_Open] = []
    self._silent = 0  # depth of elements whose content is not drawn
    self._elements = self._points = self._edges = 0
    self._heights = self._painted = 0.0
    self._whole = (CANVAS, CANVAS)
    self._root: Layer | None = None

  def read(self, text: str) -> Layer:
    parser = xml.parsers.expat.ParserCreate('UTF-8')
    parser.StartDoctypeDeclHandler = self._refuse('a document type, and so entities')
    parser.EntityDeclHandler = self._refuse('an entity')
    parser.ExternalEntityRefHandler = self._refuse('an external entity')
    parser.ProcessingInstructionHandler = self._refuse('a processing instruction')
    parser.StartElementHandler, parser.EndElementHandler = self._start, self._end
    parser.CharacterDataHandler = self._text
    try:
      parser.Parse(text.encode('utf-8', 'surrogatepass'), True)
    except xml.parsers.expat.ExpatError as e:
      raise ProgramError(f'the program is no XML ({one_line(e, str)})') from e
    return self._root

  @staticmethod
  def _refuse(what: str) -> Callable[..., None]:
    def refuse(*_: object) -> None:
      raise ProgramError(f'the program has {what}, which is not allowed')

    return refuse

  def _text(self, text: str) -> None:
    if not self._silent and text.strip():
      raise ProgramError(f'the program has text, {short(text.strip())}, which is not drawn')

  def _start(self, name: str, attributes: dict[str, str]) -> None:
    name = name.removeprefix('svg:')
    self._elements += 1
    if self._elements > MOST_ELEMENTS:
      raise ProgramError(f'the program has more than {MOST_ELEMENTS} elements')
    if len(self._open) + self._silent > MOST_DEPTH:  # what is open has a frame around the root
      raise ProgramError(f'the program has elements in more than {MOST_DEPTH} others')
    if not self._open and not self._silent:
      if name != 'svg':
        raise ProgramError(f'the program begins with {short(name)}; allowed: svg')
      self._root = Layer([])
      self._open.append(_Open(name, _INHERITED, np.eye(3), self._root))
      matrix, self._whole = _view(attributes)
      self._group(name, attributes, matrix)
    elif self._silent or name in _SILENT:
      self._silent += 1
    elif self._open[-1].name in SHAPES:
      raise ProgramError(f'{name} is in {self._open[-1].name}; allowed there: {", ".join(_SILENT)}')
    elif name == 'g':
      self._group(name, attributes, np.eye(3))
    elif name in SHAPES:
      self._shape(name, attributes)
    else:
      raise ProgramError(f'{short(name)} is not drawn here; allowed: g, {", ".join(SHAPES)}')

  def _end(self, name: str) -> None:
    del name
    if self._silent:
      self._silent -= 1
    else:
      self._open.pop()

  def _group(self, name: str, attributes: Mapping[str, str], matrix: np.ndarray) -> None:
    inherited, own = self._properties(attributes)
    parent, opacity = self._open[-1], read_share(own['opacity'], 'opacity')
    layer = parent.layer
    if own['display'] == 'none':
      layer = Layer([])  # that nothing shows
    elif opacity < 1:
      self._count_painted(1.0)
      layer = Layer([], opacity)
      parent.layer.parts.append(layer)
    moved = composed(composed(parent.matrix, matrix), read_transform(own['transform'], 'transform'))
    self._open.append(_Open(name, inherited, moved, layer))

  def _properties(self, attributes: Mapping[str, str]) -> tuple[dict[str, str], dict[str, str]]:
    """The properties that what is inside inherits, and the element's own."""
    given = {key: value for key, value in attributes.items() if key in _INHERITED or key in _OWN}
    given |= read_style(attributes.get('style', ''))
    given = {key: value.strip() for key, value in given.items() if value.strip() != 'inherit'}
    if given.get('color', '').lower() == 'currentcolor':  # means the inherited one
      del given['color']
    for key, allowed in _WORDS.items():
      if key in given and given[key] not in allowed:
        raise ProgramError(f'{key}={short(given[key])}; allowed: {", ".join(allowed)}')
    inherited = dict(self._open[-1].properties) | {key: given[key] for key in _INHERITED if key in given}
    return inherited, _OWN | {key: given[key] for key in _OWN if key in given}

  def _shape(self, name: str, attributes: Mapping[str, str]) -> None:
    """Adds the marks of a shape to the layer of its group."""
    inherited, own = self._properties(attributes)
    parent = self._open[-1]
    matrix = composed(parent.matrix, read_transform(own['transform'], 'transform'))
    self._open.append(_Open(name, inherited, matrix, parent.layer))
    outlines = _outlines(name, attributes, self._whole)
    self._points += sum(len(outline.points) for outline in outlines)
    if self._points > shapes.MOST_POINTS:
      raise ProgramError(f'the program has more than {shapes.MOST_POINTS:,} points')
    filled = outlines if name != 'line' else []
    marks = self._marks(filled, outlines, inherited, matrix)
    opacity = read_share(own['opacity'], 'opacity')
    if not marks or own['display'] == 'none' or inherited['visibility'] != 'visible':
      return
    if opacity < 1:
      self._count_painted(1.0)
      marks = [Layer(marks, opacity)]
    parent.layer.parts += marks

  def _count_painted(self, share: float) -> None:
    """Counts a share of the picture that is painted; ProgramError if that is too much."""
    self._painted += share
    if self._painted > MOST_PAINTED:
      raise ProgramError(f'the program paints more than {MOST_PAINTED} times the picture')

  def _marks(
    self,
    filled: list[shapes.Outline],
    outlines: list[shapes.Outline],
    properties: Mapping[str, str],
    matrix: np.ndarray,
  ) -> list[Mark]:
    """What fills some outlines, and the strokes of outlines."""
    marks = []
    fill = self._paint(properties, 'fill')
    opacity = read_share(properties['fill-opacity'], 'fill-opacity')
    if fill is not None:
      polygons = [outline.points[None] for outline in filled]
      marks.append(self._mark(polygons, matrix, fill, opacity, properties['fill-rule'] == 'evenodd'))
    line = self._paint(properties, 'stroke')
    width = read_length(properties['stroke-width'], 'stroke-width', _diagonal(self._whole))
    opacity = read_share(properties['stroke-opacity'], 'stroke-opacity')
    limit = read_length(properties['stroke-miterlimit'], 'stroke-miterlimit', 1.0)
    if line is not None and width > 0:
      join, cap = properties['stroke-linejoin'], properties['stroke-linecap']
      marks.append(self._mark(shapes.stroke(outlines, width, join, cap, limit), matrix, line, opacity, False))
    return [mark for mark in marks if len(mark.edges)]

  def _paint(self, properties: Mapping[str, str], name: str) -> Colour | None:
    """The colour of a paint; None for 'none'."""
    name = 'color' if properties[name].strip().lower() == 'currentcolor' else name
    return read_colour(properties[name], name)

  def _mark(
    self, polygons: list[np.ndarray], matrix: np.ndarray, paint: Colour, opacity: float, even_odd: bool
  ) -> Mark:
    """The area of stacks of polygons f64[m, n, 2] in user units; counts its edges and its height."""
    if not polygons:
      return Mark(np.zeros((0, 4)), even_odd, paint)
    edges = np.concatenate([shapes.edges_of(stack, matrix) for stack in polygons])
    self._edges += len(edges)
    if self._edges > MOST_EDGES:
      raise ProgramError(f'the polygons of the program have more than {MOST_EDGES:,} edges')
    if not np.all(np.abs(edges) <= _FARTHEST):
      raise ProgramError('the program has points too far from the canvas')
    ends = np.clip(edges[:, [1, 3]], 0.0, 1.0)
    self._heights += float(np.sum(np.abs(ends[:, 1] - ends[:, 0])))
    if self._heights > MOST_HEIGHTS:
      raise ProgramError(
        f'the edges of the program are together more than {MOST_HEIGHTS:,} times as high as the canvas'
      )
    self._count_painted(float(np.ptp(ends)))
    return Mark(edges, even_odd, dataclasses.replace(paint, alpha=paint.alpha * opacity))


def _diagonal(whole: tuple[float, float]) -> float:
  """What percentages of lengths without a direction count from (SVG 1.1, section 7.10)."""
  return float(np.hypot(*whole) / np.sqrt(2))


def _view(attributes: Mapping[str, str]) -> tuple[np.ndarray, tuple[float, float]]:
  """The transform f64[3, 3] from user units to the canvas from 0 to 1, and the width and height of the view box.

  A view box that is no square is in the middle of the canvas, unless its aspect ratio is not preserved.
  """
  x = y = 0.0
  width = height = CANVAS
  if 'viewBox' in attributes:
    numbers = read_numbers(attributes['viewBox'], 'viewBox')
    if len(numbers) != 4 or min(numbers[2:]) <= 0:
      raise ProgramError(f'viewBox={short(attributes["viewBox"])}; allowed: x y width height, the last two above 0')
    x, y, width, height = numbers
  elif 'width' in attributes and 'height' in attributes:
    width, height = (read_length(attributes[key], key, CANVAS) for key in ('width', 'height'))
    if min(width, height) <= 0:
      raise ProgramError(f'width={short(attributes["width"])}, height={short(attributes["height"])}; allowed: above 0')
  kept = attributes.get('preserveAspectRatio', 'xMidYMid').split()
  if kept == ['none']:
    scale = (1 / width, 1 / height)
  elif kept in (['xMidYMid'], ['xMidYMid', 'meet']):
    scale = (1 / max(width, height),) * 2
  else:
    raise ProgramError('preserveAspectRatio; allowed: xMidYMid, none')
  left, top = (1 - width * scale[0]) / 2 - x * scale[0], (1 - height * scale[1]) / 2 - y * scale[1]
  return np.array([[scale[0], 0.0, left], [0.0, scale[1], top], [0.0, 0.0, 1.0]]), (width, height)


def _outlines(name: str, attributes: Mapping[str, str], whole: tuple[float, float]) -> list[shapes.Outline]:
  """The outlines of a shape in user units; none if it has no extent."""
  wide, high = whole

  def length(key: str, full: float) -> float:
    return read_length(attributes.get(key, '0'), f'{name}: {key}', full)

  def radii() -> tuple[float, float]:
    """`rx` and `ry`; one that is not given, or 'auto', has the length of the other."""
    rx, ry = (
      None if attributes.get(key, 'auto') == 'auto' else length(key, full) for key, full in (('rx', wide), ('ry', high))
    )
    return (ry or 0.0 if rx is None else rx), (rx or 0.0 if ry is None else ry)

  if name == 'rect':
    width, height = length('width', wide), length('height', high)
    return shapes.rectangle(length('x', wide), length('y', high), width, height, *radii())
  if name == 'circle':
    r = length('r', _diagonal(whole))
    return shapes.ellipse(length('cx', wide), length('cy', high), r, r)
  if name == 'ellipse':
    return shapes.ellipse(length('cx', wide), length('cy', high), *radii())
  if name == 'line':
    ends = [length('x1', wide), length('y1', high), length('x2', wide), length('y2', high)]
    return shapes.polygon(ends, False, name)
  if name == 'path':
    return shapes.path(attributes.get('d', ''))
  numbers = read_numbers(attributes.get('points', ''), f'{name}: points')
  return shapes.polygon(numbers, name == 'polygon', name)
