"""Token trees for tests."""

from __future__ import annotations

import numpy as np


def seen_until_of(segments) -> np.ndarray:
  """i32[B, T]: `models.trees` of sequences beside one another, given as the number of each column's sequence."""
  segments = np.asarray(segments)
  ends = np.empty(segments.shape, np.int32)
  for row, own in zip(ends, segments, strict=True):
    for i in range(len(own)):
      end = i + 1
      while end < len(own) and own[end] == own[i]:
        end += 1
      row[i] = end
  return ends


def random_tree(rng: np.random.Generator, columns: int) -> tuple[np.ndarray, np.ndarray]:
  """A random forest over some columns: the parent of each column i32[T], -1 for none, and `seen_until` i32[T]."""
  parents, path = [], []
  for column in range(columns):
    # Mostly the next token of a sequence; sometimes back to a token of the path, or a new tree.
    if path and rng.random() < 0.15:
      del path[rng.integers(0, len(path)) + (rng.random() < 0.8) :]
    parents.append(path[-1] if path else -1)
    path.append(column)
  seen_until = np.arange(1, columns + 1)
  for column in range(columns - 1, -1, -1):
    if parents[column] >= 0:
      seen_until[parents[column]] = max(seen_until[parents[column]], seen_until[column])
  return np.asarray(parents, np.int32), seen_until.astype(np.int32)
