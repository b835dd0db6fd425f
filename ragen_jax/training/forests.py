"""Which rows of a mini-batch share their beginnings, and how they are divided into trees that fit into bins.

Episodes of a group have the same first prompt, episodes of an environment the same rules, and calls of an agent repeat
the conversation so far. Sorted by their tokens, every row shares most with a neighbour. One number for each row, what
it shares with the row before, therefore describes the trees (`models.trees`):

    rows in order    a b c d    shared 0
                     a b e             2
                     a b e f           3    5 columns of 11 in a bin of their own
                     f g               0    a tree of its own
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence

import numpy as np

# Rows stay together if they share this part of the shorter one at least. To keep them together leaves more of a bin
# empty than single rows would.
_WORTH = 1 / 8


@dataclasses.dataclass(frozen=True)
class Part:
  """The numbers of some rows that go into one bin; `size` are the columns and scored tokens that they take."""

  rows: np.ndarray
  size: tuple[int, int]


@dataclasses.dataclass(frozen=True)
class Forest:
  """The trees of n rows.

  Attributes:
    order: i64[n], the rows, those with equal beginnings beside one another.
    common: i64[n], first columns that a row of `order` shares with the row before it in `order`.
  """

  order: np.ndarray
  common: np.ndarray

  def columns(self, sizes: np.ndarray) -> int:
    """Columns of all trees; `sizes` i32[n, 2] are the columns and scored tokens of each row."""
    return int(sizes[:, 0].sum() - self._worth(sizes).sum())

  def _worth(self, sizes: np.ndarray) -> np.ndarray:
    """`common`, but 0 where a row begins a tree because it shares too little."""
    columns = sizes[self.order, 0]
    shorter = np.minimum(columns, np.concatenate([columns[:1], columns[:-1]]))
    return np.where(self.common >= _WORTH * shorter, self.common, 0)

  def parts(self, sizes: np.ndarray, capacity: tuple[int, int]) -> list[Part]:
    """The trees, of which those that do not fit into a bin are cut between rows.

    `sizes` i32[n, 2] and `capacity` are columns and scored tokens, of each row and of a bin; each row fits.
    """
    parts: list[tuple[list[int], np.ndarray]] = []
    for row, shared in zip(self.order.tolist(), self._worth(sizes).tolist(), strict=True):
      more = sizes[row] - (shared, 0)
      if shared and (parts[-1][1] + more <= capacity).all():
        parts[-1][0].append(row)
        parts[-1] = (parts[-1][0], parts[-1][1] + more)
      else:
        parts.append(([row], sizes[row].astype(np.int64)))
    return [Part(np.asarray(rows), (int(size[0]), int(size[1]))) for rows, size in parts]

  def in_order(self, rows: np.ndarray) -> np.ndarray:
    """Some rows in the order of the forest."""
    return rows[np.argsort(self._place[rows], kind='stable')]

  def shared(self, rows: np.ndarray) -> np.ndarray:
    """First columns that each of some rows, in order, shares with the one before it: i64[m]."""
    at = self._place[rows]
    least = [self.common[a + 1 : b + 1].min() for a, b in itertools.pairwise(at)]
    return np.asarray([0, *least][: len(rows)], np.int64)

  @property
  def _place(self) -> np.ndarray:
    place = np.empty_like(self.order)
    place[self.order] = np.arange(len(self.order))
    return place


def forest(tokens: np.ndarray, length: np.ndarray) -> Forest:
  """The forest of the rows `tokens` i32[n, T], of which the first `length` i32[n] columns count."""
  rows: Sequence[bytes] = [x[:n].astype('>u4').tobytes() for x, n in zip(tokens, length.tolist(), strict=True)]
  order = sorted(range(len(rows)), key=rows.__getitem__)
  common = [0] * min(len(order), 1)
  for one, other in itertools.pairwise(order):
    n = int(min(length[one], length[other]))
    differ = tokens[one, :n] != tokens[other, :n]
    common.append(int(differ.argmax()) if differ.any() else n)
  return Forest(np.asarray(order, np.int64), np.asarray(common, np.int64))
