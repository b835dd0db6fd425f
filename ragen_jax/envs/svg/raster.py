"""Draws what a program says, in NumPy: areas with smooth edges, mixed by opacity over white."""

from __future__ import annotations

import math

import numpy as np

from ragen_jax.envs.svg.program import Layer, Mark

_LINES = 4  # sample lines of a row of pixels; along a line, the covered part of a pixel is exact


def draw(layer: Layer, size: int) -> np.ndarray:
  """The picture u8[size, size, 3] of a layer over white."""
  canvas = np.zeros((4, size, size), np.float32)  # red, green, blue times the opacity, and the opacity, from 0 to 1
  _draw(layer, canvas)
  colours = canvas[:3] + (1 - canvas[3])
  return np.ascontiguousarray(np.clip(np.rint(colours * 255), 0, 255).astype(np.uint8).transpose(1, 2, 0))


def _draw(layer: Layer, canvas: np.ndarray) -> None:
  """Draws the parts of a layer over a canvas f32[4, size, size]."""
  for part in layer.parts:
    if isinstance(part, Mark):
      _paint(part, canvas)
    elif part.opacity > 0:
      own = np.zeros_like(canvas)
      _draw(part, own)
      own *= np.float32(part.opacity)
      canvas *= 1 - own[3]
      canvas += own


def _paint(mark: Mark, canvas: np.ndarray) -> None:
  """Mixes a mark with the canvas, where its edges are."""
  size = canvas.shape[1]
  edges = mark.edges * size
  low, high = edges[:, [1, 3]].min(), edges[:, [1, 3]].max()
  top, bottom = max(math.floor(low), 0), min(math.ceil(high), size)
  if top >= bottom:
    return
  edges = edges - np.array([0.0, top, 0.0, top])
  alpha = coverage(edges, mark.even_odd, bottom - top, size) * np.float32(mark.colour.alpha)
  rest = 1 - alpha
  for plane, share in zip(canvas, (*(x / 255 for x in mark.colour.rgb), 1.0), strict=True):
    part = plane[top:bottom]
    part *= rest
    part += alpha * np.float32(share)


def coverage(edges: np.ndarray, even_odd: bool, height: int, width: int) -> np.ndarray:
  """The covered share f32[height, width] of each pixel inside closed polygons, given by their edges f64[E, 4].

  Each sample line crosses the edges at points, which are sorted; the spans between them that are inside are added up.
  """
  x0, y0, x1, y1 = edges.T
  down = y1 > y0
  top, bottom = np.minimum(y0, y1), np.maximum(y0, y1)
  # Sample line k is at (k + 1/2) / _LINES; an edge crosses those from its upper end to before its lower end.
  first = np.clip(np.ceil(top * _LINES - 0.5), 0, height * _LINES).astype(np.int64)
  last = np.clip(np.ceil(bottom * _LINES - 0.5), 0, height * _LINES).astype(np.int64)
  count = last - first
  total = int(count.sum())
  if not total:
    return np.zeros((height, width), np.float32)
  edge = np.repeat(np.arange(len(edges)), count)
  line = np.arange(total) - np.repeat(np.cumsum(count) - count, count) + first[edge]
  share = ((line + 0.5) / _LINES - y0[edge]) / (y1 - y0)[edge]
  x = np.clip(x0[edge] + share * (x1 - x0)[edge], 0, width)
  order = np.argsort(line * (width + 1.0) + x, kind='stable')
  line, x, turn = line[order], x[order], np.where(down[edge], 1, -1)[order]
  # Both sums are 0 behind the last crossing of a line, since polygons are closed.
  inside = (np.arange(total) % 2 == 0) if even_odd else np.cumsum(turn) != 0
  starts = np.flatnonzero(inside[:-1])
  rows = line[starts] // _LINES
  # Of a span from a to b, a pixel has the part before b less the part before a.
  changes = _steps(np.tile(rows, 2), np.concatenate([x[starts + 1], x[starts]]), np.repeat([1, -1], len(starts)), width)
  changes = np.bincount(*changes, minlength=height * (width + 2))
  covered = np.cumsum(changes.reshape(height, width + 2), axis=1)[:, :width]
  return np.clip(covered / _LINES, 0, 1).astype(np.float32)


def _steps(rows: np.ndarray, x: np.ndarray, signs: np.ndarray, width: int) -> tuple[np.ndarray, np.ndarray]:
  """Where the part of each pixel before x changes along rows of `width` + 2, and by how much, times a sign."""
  whole = np.floor(x).astype(np.int64)
  part = x - whole
  at = rows * (width + 2) + whole
  return np.concatenate([at, at + 1]), np.concatenate([signs * (part - 1), -signs * part])
