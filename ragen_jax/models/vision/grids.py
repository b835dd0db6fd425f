"""Tables that depend only on the size of an image: order, windows, rotary angles and positions of its patches.

A grid is (rows, columns) of patches, both divisible by the merge size m. Each visual token has m × m patches. Patches
are listed token by token, tokens row by row, and the patches of a token row by row:

    grid (4, 4), m = 2        0  1 |  4  5
                              2  3 |  6  7
                              ------+-----
                              8  9 | 12 13
                             10 11 | 14 15

Everything here is NumPy on the host; compiled programs hold the tables as constants.
"""

from __future__ import annotations

import dataclasses
import functools

import numpy as np

# Base of the wavelengths of the tower's rotary embedding.
_THETA = 10000.0


@functools.lru_cache(maxsize=64)
def coordinates(grid: tuple[int, int], merge: int) -> np.ndarray:
  """Row and column of each patch: i32[P, 2], in the order of the patches."""
  rows, columns = np.meshgrid(np.arange(grid[0]), np.arange(grid[1]), indexing='ij')
  both = np.stack([rows, columns], axis=-1).reshape(grid[0] // merge, merge, grid[1] // merge, merge, 2)
  return both.transpose(0, 2, 1, 3, 4).reshape(-1, 2).astype(np.int32)


@functools.lru_cache(maxsize=64)
def angles(grid: tuple[int, int], merge: int, head_dim: int) -> np.ndarray:
  """Angles of the rotary embedding, f32[P, H/2]: the first half from the row of a patch, the second from its column."""
  quarter = head_dim // 4
  frequencies = (_THETA ** (-np.arange(quarter) / quarter)).astype(np.float32)  # [H/4]
  by_axis = coordinates(grid, merge)[:, :, None].astype(np.float32) * frequencies  # [P, 2, H/4]
  return by_axis.reshape(len(by_axis), -1)


@dataclasses.dataclass(frozen=True)
class Windows:
  """The order of patches in which every attention window is a run of patches.

  Attributes:
    order: i32[P], the patch at each place.
    restored: i32[tokens], the place of each token among the tokens in this order; it undoes the order after merging.
    runs: (number of windows, patches of each), in order; windows of one size are adjacent.
  """

  order: np.ndarray
  restored: np.ndarray
  runs: tuple[tuple[int, int], ...]


@functools.lru_cache(maxsize=64)
def windows(grid: tuple[int, int], merge: int, side: int) -> Windows:
  """Divides an image into windows of `side` × `side` tokens; those at the right and lower edge are smaller."""
  rows, columns = grid[0] // merge, grid[1] // merge
  tokens = np.arange(rows * columns).reshape(rows, columns)
  parts = [tokens[i : i + side, j : j + side].ravel() for i in range(0, rows, side) for j in range(0, columns, side)]
  # At most four sizes: inside, at the right, at the bottom, in the corner. All windows of a size attend at once.
  parts.sort(key=len, reverse=True)
  order = np.concatenate(parts)
  sizes, counts = np.unique([len(part) for part in parts], return_counts=True)
  runs = tuple((int(n), int(size) * merge**2) for size, n in zip(sizes[::-1], counts[::-1], strict=True))
  patches = (order[:, None] * merge**2 + np.arange(merge**2)).ravel()
  return Windows(patches.astype(np.int32), np.argsort(order).astype(np.int32), runs)


@functools.lru_cache(maxsize=64)
def interpolation(grid: tuple[int, int], merge: int, side: int) -> tuple[np.ndarray, np.ndarray]:
  """How each patch reads a learned table of `side` × `side` positions: bilinear, with the corners aligned.

  The result is i32[P, 4], the rows of the flat table, and f32[P, 4], their weights.
  """
  taps, weights = [], []
  for axis, size in enumerate(grid):
    source = coordinates(grid, merge)[:, axis].astype(np.float32) * np.float32(side - 1) / np.float32(max(size - 1, 1))
    low = np.floor(source).astype(np.int32)
    high_weight = source - low.astype(np.float32)
    taps.append(np.stack([low, np.minimum(low + 1, side - 1)], axis=1))
    weights.append(np.stack([1 - high_weight, high_weight], axis=1))
  index = taps[0][:, :, None] * side + taps[1][:, None, :]
  weight = weights[0][:, :, None] * weights[1][:, None, :]
  return index.reshape(-1, 4).astype(np.int32), weight.reshape(-1, 4).astype(np.float32)
