"""Bicubic resizing of u8 images in NumPy, with the same results as `Image.resize` of Pillow 13."""

from __future__ import annotations

import functools
import math

import numpy as np

# Pixels on each side that a result depends on, when an image is not made smaller.
_SUPPORT = 2.0
_A = -0.5
# Weights are rounded to this many binary digits, and sums are whole numbers.
_DIGITS = 22


def _cubic(x: float) -> float:
  """The bicubic kernel of Keys (1981) with a = -0.5."""
  x = abs(x)
  if x < 1:
    return ((_A + 2) * x - (_A + 3)) * x * x + 1
  if x < 2:
    return (((x - 5) * x + 8) * x - 4) * _A
  return 0.0


@functools.lru_cache(maxsize=64)
def _weights(size: int, new: int) -> tuple[np.ndarray, np.ndarray]:
  """The pixels that each new pixel of a line is made of, i64[new, taps], and their weights, i64[new, taps]."""
  scale = size / new
  stretch = max(scale, 1.0)  # a smaller image is made of all pixels of the old one
  support = _SUPPORT * stretch
  taps = math.ceil(support) * 2 + 1
  index, weight = np.zeros((new, taps), np.int64), np.zeros((new, taps), np.int64)
  for i in range(new):
    center = (i + 0.5) * scale
    low, high = max(int(center - support + 0.5), 0), min(int(center + support + 0.5), size)
    values = [_cubic((j - center + 0.5) / stretch) for j in range(low, high)]
    total = sum(values)
    values = [v / total if total else v for v in values]
    index[i, : high - low] = range(low, high)
    weight[i, : high - low] = [int((-0.5 if v < 0 else 0.5) + v * (1 << _DIGITS)) for v in values]
  return index, weight


def _resize_lines(image: np.ndarray, new: int) -> np.ndarray:
  """u8[a, size, channels] -> u8[a, new, channels]."""
  if image.shape[1] == new:
    return image
  index, weight = _weights(image.shape[1], new)
  total = np.full((image.shape[0], new, image.shape[2]), 1 << (_DIGITS - 1), np.int64)
  for i in range(index.shape[1]):
    total += image[:, index[:, i]].astype(np.int64) * weight[:, i, None]
  return np.clip(total >> _DIGITS, 0, 255).astype(np.uint8)


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
  """Resizes an image in one direction and then in the other, with whole numbers between them.

  Rows come first, unless the height shrinks by more than twice as many pixels as the width. Earlier versions of Pillow
  begin with the rows in this case too; their bytes differ from these by a few levels.

  Args:
    image: u8[H, W, channels].
    height: new number of rows.
    width: new number of columns.

  Returns:
    u8[height, width, channels], those of Pillow 13 with `Resampling.BICUBIC`.
  """
  lost_rows, lost_columns = image.shape[0] - height, image.shape[1] - width
  if lost_rows > max(0, 2 * lost_columns):
    columns_first = _resize_lines(image.swapaxes(0, 1), height).swapaxes(0, 1)
    return _resize_lines(columns_first, width)
  rows_first = _resize_lines(image, width)
  return _resize_lines(rows_first.swapaxes(0, 1), height).swapaxes(0, 1)
