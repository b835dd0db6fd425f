"""The outlines of SVG's shapes and of their strokes, as polygons (SVG 1.1, sections 8, 9 and 11.4)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import numpy as np

from ragen_jax.envs.svg.values import ProgramError, Scanner

# Straight pieces of a whole ellipse, and of a Bezier curve: of a circle of 256 pixels they stray by 0.1 pixel.
_ROUND = 72
_CURVE = 24
_CAP = 16  # of the circle at the end of a stroke
MOST_POINTS = 10_000  # of a program

JOINS = ('miter', 'round', 'bevel')
CAPS = ('butt', 'round', 'square')

_ARGUMENTS = {'M': 2, 'L': 2, 'H': 1, 'V': 1, 'C': 6, 'S': 4, 'Q': 4, 'T': 2, 'A': 7, 'Z': 0}


@dataclasses.dataclass(frozen=True, eq=False)
class Outline:
  """Connected straight lines.

  Attributes:
    points: f64[n, 2], in user units; a closed outline does not repeat the first one.
    closed: whether the last point is connected with the first one.
  """

  points: np.ndarray
  closed: bool


def _outline(points: Sequence[Sequence[float]] | np.ndarray, closed: bool) -> Outline:
  return Outline(np.asarray(points, np.float64).reshape(-1, 2), closed)


# -- shapes ------------------------------------------------------------------------------------------------------------


def ellipse(cx: float, cy: float, rx: float, ry: float) -> list[Outline]:
  """An ellipse; none without extent."""
  if rx <= 0 or ry <= 0:
    return []
  angles = np.arange(_ROUND) * (2 * np.pi / _ROUND)
  return [_outline(np.stack([cx + rx * np.cos(angles), cy + ry * np.sin(angles)], 1), True)]


def rectangle(x: float, y: float, width: float, height: float, rx: float, ry: float) -> list[Outline]:
  """A rectangle with round corners; none without extent."""
  if width <= 0 or height <= 0:
    return []
  rx, ry = min(max(rx, 0.0), width / 2), min(max(ry, 0.0), height / 2)
  if rx == 0 or ry == 0:
    return [_outline([(x, y), (x + width, y), (x + width, y + height), (x, y + height)], True)]
  angles = np.arange(_ROUND // 4 + 1) * (2 * np.pi / _ROUND)
  corners = ((x + width - rx, y + height - ry), (x + rx, y + height - ry), (x + rx, y + ry), (x + width - rx, y + ry))
  turned = [angles + np.pi / 2 * i for i in range(4)]
  parts = [np.stack([cx + rx * np.cos(a), cy + ry * np.sin(a)], 1) for (cx, cy), a in zip(corners, turned, strict=True)]
  return [_outline(np.concatenate(parts), True)]


def polygon(numbers: Sequence[float], closed: bool, what: str) -> list[Outline]:
  """The points of `polygon` or `polyline`."""
  if len(numbers) % 2:
    raise ProgramError(f'{what}: points has {len(numbers)} numbers; allowed: pairs')
  return [_outline(numbers, closed)] if numbers else []


# -- paths -------------------------------------------------------------------------------------------------------------


def path(text: str) -> list[Outline]:
  """The outlines of path data; ProgramError if they are none, or have too many points."""
  scanner, outlines = Scanner(text, 'path: d'), []
  points: list[tuple[float, float]] = []
  at = start = control = (0.0, 0.0)
  command = last = ''
  count = 0

  def end(closed: bool) -> None:
    if points:
      outlines.append(_outline(points, closed))

  while not scanner.is_over:
    letter = scanner.letter()
    if letter:
      command = letter
    elif not command or command in 'Zz':
      scanner.number()  # its error, or a number without a command
      raise ProgramError('path: d: a number without a command')
    kind, relative = command.upper(), command.islower()
    if kind not in _ARGUMENTS:
      raise ProgramError(f'path: d: {command!r}; allowed: the letters {"".join(_ARGUMENTS)}, large or small')
    if not last and kind != 'M':
      raise ProgramError('path: d does not begin with M')
    if kind == 'Z':
      end(True)
      points, at, last, control = [], start, 'Z', start
      continue
    numbers = _arguments(scanner, kind)
    count += {'C': _CURVE, 'S': _CURVE, 'Q': _CURVE, 'T': _CURVE, 'A': _ROUND}.get(kind, 1)
    if count > MOST_POINTS:
      raise ProgramError(f'path: d has more than {MOST_POINTS:,} points')
    base = at if relative else (0.0, 0.0)
    if kind == 'M':
      end(False)
      at = start = (base[0] + numbers[0], base[1] + numbers[1])
      points, command = [at], 'l' if relative else 'L'
    else:
      points = points or [at]
      new, control = _drawn(kind, numbers, at, base, control if last in _SMOOTH.get(kind, '') else at)
      points += new
      at = points[-1]
    last = kind
  end(False)
  return outlines


# Commands whose control point another one continues.
_SMOOTH = {'S': 'CS', 'T': 'QT'}


def _arguments(scanner: Scanner, kind: str) -> list[float]:
  if kind == 'A':
    before = [scanner.number() for _ in range(3)]
    return [*before, scanner.flag(), scanner.flag(), scanner.number(), scanner.number()]
  return [scanner.number() for _ in range(_ARGUMENTS[kind])]


Point = tuple[float, float]


def _drawn(kind: str, numbers: list[float], at: Point, base: Point, control: Point) -> tuple[list[Point], Point]:
  """The points of a command, without the first one, and its last control point.

  Args:
    at: the present point.
    base: what the numbers count from.
    control: the last control point for commands that continue a curve, else the present point.
  """
  if kind == 'H':
    return [(base[0] + numbers[0], at[1])], at
  if kind == 'V':
    return [(at[0], base[1] + numbers[0])], at
  if kind == 'A':
    end = (base[0] + numbers[5], base[1] + numbers[6])
    return _arc(at, numbers[0], numbers[1], numbers[2], bool(numbers[3]), bool(numbers[4]), end), end
  given = [(base[0] + x, base[1] + y) for x, y in zip(numbers[::2], numbers[1::2], strict=True)]
  if kind == 'L':
    return given, at
  if kind in 'ST':
    given.insert(0, (2 * at[0] - control[0], 2 * at[1] - control[1]))
  return _bezier([at, *given]), given[-2]


def _bezier(controls: list[Point]) -> list[Point]:
  """The points of a Bezier curve of any degree behind its first one."""
  t = np.arange(1, _CURVE + 1)[:, None] / _CURVE
  degree = len(controls) - 1
  terms = [math.comb(degree, i) * (1 - t) ** (degree - i) * t**i * np.array(c) for i, c in enumerate(controls)]
  return [*map(tuple, sum(terms)[:-1].tolist()), controls[-1]]


def _arc(start: Point, rx: float, ry: float, turned: float, large: bool, sweep: bool, end: Point) -> list[Point]:
  """The points of an elliptical arc behind its first one (SVG 1.1, appendix F.6)."""
  rx, ry = abs(rx), abs(ry)
  if start == end:
    return [end]
  if rx == 0 or ry == 0:
    return [end]
  cos, sin = math.cos(math.radians(turned)), math.sin(math.radians(turned))
  dx, dy = (start[0] - end[0]) / 2, (start[1] - end[1]) / 2
  x, y = cos * dx + sin * dy, -sin * dx + cos * dy
  scale = max(1.0, math.hypot(x / rx, y / ry))
  rx, ry = rx * scale, ry * scale
  u, v = x / rx, y / ry  # the half chord in the unit circle
  half = u * u + v * v
  away = math.sqrt(max(1 / half - 1, 0.0)) if half else 0.0
  away = away if large != sweep else -away
  cx, cy = away * v, -away * u
  first, last = math.atan2(v - cy, u - cx), math.atan2(-v - cy, -u - cx)
  spread = (last - first) % (2 * math.pi) if sweep else -((first - last) % (2 * math.pi))
  count = max(math.ceil(_ROUND * abs(spread) / (2 * math.pi)), 1)
  angles = first + spread * np.arange(1, count) / count
  xs, ys = rx * (np.cos(angles) + cx), ry * (np.sin(angles) + cy)
  mx, my = (start[0] + end[0]) / 2, (start[1] + end[1]) / 2
  points = np.stack([cos * xs - sin * ys + mx, sin * xs + cos * ys + my], 1)
  return [*map(tuple, points.tolist()), end]


# -- strokes -----------------------------------------------------------------------------------------------------------


def stroke(outlines: Sequence[Outline], width: float, join: str, cap: str, limit: float) -> list[np.ndarray]:
  """Stacks of polygons f64[m, n, 2], all of one orientation, whose union is the stroke of outlines.

  Args:
    width: above 0.
    join: of `JOINS`.
    cap: of `CAPS`.
    limit: of the length of a miter, as a multiple of the width.
  """
  pieces: list[np.ndarray] = []
  for outline in outlines:
    pieces += _stroke_one(outline, width / 2, join, cap, limit)
  return [_oriented(stack) for stack in pieces if len(stack)]


def _stroke_one(outline: Outline, half: float, join: str, cap: str, limit: float) -> list[np.ndarray]:
  points = outline.points
  if len(points) == 1 and not outline.closed:
    return []  # a 'moveto' alone has no stroke, unlike a line without a length
  moved = np.any(points[1:] != points[:-1], axis=1)
  points = points[np.concatenate([[True], moved])]
  closed = outline.closed and len(points) > 1
  if closed and np.array_equal(points[0], points[-1]):
    points = points[:-1]
  if len(points) < 2:
    return _dot(points[0], half, cap)
  ends = np.concatenate([points[1:], points[:1]]) if closed else points[1:]
  starts = points if closed else points[:-1]
  along = ends - starts
  along = along / np.hypot(along[:, 0], along[:, 1])[:, None]
  side = half * np.stack([-along[:, 1], along[:, 0]], 1)
  first, last = starts.copy(), ends.copy()
  if cap == 'square' and not closed:
    first[0] -= half * along[0]
    last[-1] += half * along[-1]
  pieces = [np.stack([first + side, last + side, last - side, first - side], 1)]
  after = np.roll(along, -1, 0)
  corners = slice(None) if closed else slice(-1)
  pieces += _joined(ends[corners], along[corners], after[corners], half, join, limit)
  if cap == 'round' and not closed:
    pieces.append(_discs(points[[0, -1]], half))
  return pieces


def _joined(
  at: np.ndarray, before: np.ndarray, after: np.ndarray, half: float, join: str, limit: float
) -> list[np.ndarray]:
  """What fills the gaps at corners f64[m, 2] between segments of these directions, f64[m, 2] each."""
  turn = before[:, 0] * after[:, 1] - before[:, 1] * after[:, 0]
  cos = np.sum(before * after, 1)
  bent = (np.abs(turn) >= 1e-9) | (cos <= 0)
  at, before, after, turn, cos = (x[bent] for x in (at, before, after, turn, cos))
  if join == 'round':
    return [_discs(at, half)]
  outer = np.where(turn > 0, -half, half)[:, None]  # towards the outer side of a corner
  a = at + outer * np.stack([-before[:, 1], before[:, 0]], 1)
  b = at + outer * np.stack([-after[:, 1], after[:, 0]], 1)
  # A miter is 1 / sin(angle / 2) times as long as the stroke is wide, with the angle between the segments.
  sharp = (join == 'miter') & (np.sqrt(np.maximum((1 + cos) / 2, 0)) * limit >= 1)
  tips = at[sharp] + (a + b - 2 * at)[sharp] / (1 + cos[sharp])[:, None]
  return [np.stack([at[sharp], a[sharp], tips, b[sharp]], 1), np.stack([at, a, b], 1)[~sharp]]


def _dot(at: np.ndarray, half: float, cap: str) -> list[np.ndarray]:
  """The stroke of an outline without length."""
  if cap == 'round':
    return [_discs(at[None], half)]
  return [at + half * np.array([[(-1, -1), (1, -1), (1, 1), (-1, 1)]])] if cap == 'square' else []


def _discs(at: np.ndarray, radius: float) -> np.ndarray:
  """f64[m, n, 2], circles around points f64[m, 2]."""
  angles = np.arange(_CAP * 2) * (np.pi / _CAP)
  return at[:, None] + radius * np.stack([np.cos(angles), np.sin(angles)], 1)


def _oriented(stack: np.ndarray) -> np.ndarray:
  """The polygons f64[m, n, 2] with their points in the order in which their area is positive."""
  x, y = stack[..., 0], stack[..., 1]
  area = np.sum(x * np.roll(y, -1, 1) - np.roll(x, -1, 1) * y, axis=1)
  return np.where((area > 0)[:, None, None], stack, stack[:, ::-1])


def edges_of(stack: np.ndarray, matrix: np.ndarray) -> np.ndarray:
  """The edges f64[m * n, 4] of polygons f64[m, n, 2] after a transform f64[3, 3]."""
  points = stack @ matrix[:2, :2].T + matrix[:2, 2]
  return np.concatenate([points, np.roll(points, -1, 1)], -1).reshape(-1, 4)
