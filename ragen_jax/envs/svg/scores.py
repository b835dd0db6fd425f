"""How alike two pictures are: pixels, edges and colours, each from 0 for an empty drawing to 1 for equal pictures.

No model is needed. Usual measures of likeness give an empty canvas a high score, because most pixels of a small picture
are background; these do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import numpy as np

PARTS = ('pixels', 'edges', 'colours')
_STEP = 24  # of 255, between neighbours on the two sides of an edge
_LEVELS = 5  # of each channel of the histogram of colours


def score_parts(target: np.ndarray, drawing: np.ndarray) -> dict[str, float]:
  """The scores of `PARTS` of a drawing, from two pictures u8[size, size, 3] over white.

  - pixels: the share of the target's squared deviation from its best single colour that the drawing explains, at
    least 0 (the coefficient of determination).
  - edges: 2 P R / (P + R), with the share P of the drawing's edges that are beside an edge of the target, and the share
    R of the target's edges that are beside one of the drawing.
  - colours: the overlap of the histograms of what is not white, relative to their mean size.
  """
  if np.array_equal(target, drawing):
    return dict.fromkeys(PARTS, 1.0)
  return {
    'pixels': _pixels(target, drawing), 'edges': _edges(target, drawing), 'colours': _colours(target, drawing)
  }  # fmt: skip


def weighted(parts: Mapping[str, float], weights: Mapping[str, float]) -> float:
  """The mean of the scores of parts with these weights, which are at least 0 and not all 0."""
  return math.fsum(weights[name] * parts[name] for name in weights) / math.fsum(weights.values())


def _pixels(target: np.ndarray, drawing: np.ndarray) -> float:
  wanted = target.reshape(-1, 3).astype(np.float64)
  spread = float(np.sum((wanted - wanted.mean(0)) ** 2))
  error = float(np.sum((wanted - drawing.reshape(-1, 3)) ** 2))
  return max(1 - error / spread, 0.0) if spread else 0.0


def _edges(target: np.ndarray, drawing: np.ndarray) -> float:
  wanted, own = _edge_map(target), _edge_map(drawing)
  if not wanted.any() or not own.any():
    return 0.0
  slack = max(len(target) // 128, 1)
  precise = float(np.mean(_widened(wanted, slack)[own]))
  recalled = float(np.mean(_widened(own, slack)[wanted]))
  return 2 * precise * recalled / (precise + recalled) if precise + recalled else 0.0


def _edge_map(picture: np.ndarray) -> np.ndarray:
  """bool[size, size], the pixels whose colour differs from the one to the right or below."""
  levels = picture.astype(np.int16)
  found = np.zeros(picture.shape[:2], bool)
  found[:, :-1] |= (np.abs(levels[:, 1:] - levels[:, :-1]) >= _STEP).any(-1)
  found[:-1] |= (np.abs(levels[1:] - levels[:-1]) >= _STEP).any(-1)
  return found


def _widened(found: np.ndarray, by: int) -> np.ndarray:
  """The pixels within `by` pixels of those that were found, in both directions."""
  for axis in (0, 1):
    moved = np.pad(found, [(by, by) if i == axis else (0, 0) for i in range(2)])
    found = np.any(np.lib.stride_tricks.sliding_window_view(moved, 2 * by + 1, axis=axis), axis=-1)
  return found


def _colours(target: np.ndarray, drawing: np.ndarray) -> float:
  wanted, own = _histogram(target), _histogram(drawing)
  total = wanted.sum() + own.sum()
  return float(2 * np.minimum(wanted, own).sum() / total) if total else 0.0


def _histogram(picture: np.ndarray) -> np.ndarray:
  """The numbers of pixels of each colour that is not white, f64[_LEVELS ** 3].

  A pixel is shared by the levels around it, so that a small change of a colour changes the numbers a little.
  """
  packed = picture.reshape(-1, 3).astype(np.int32) @ np.array([65536, 256, 1], np.int32)
  colours, counts = np.unique(packed, return_counts=True)
  counts = np.where(colours == 0xFFFFFF, 0, counts).astype(np.float64)
  scaled = np.stack([colours >> 16, colours >> 8 & 255, colours & 255], 1) * ((_LEVELS - 1) / 255)
  low = np.minimum(scaled.astype(np.int64), _LEVELS - 2)
  part = scaled - low
  numbers = np.zeros(_LEVELS**3)
  for corner in np.ndindex(2, 2, 2):
    share = np.prod(np.where(corner, part, 1 - part), axis=1)
    index = (low + corner) @ np.array([_LEVELS**2, _LEVELS, 1])
    numbers += np.bincount(index, counts * share, _LEVELS**3)
  return numbers
