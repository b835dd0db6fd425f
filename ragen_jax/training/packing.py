"""Packing: rows one behind the other in bins of a fixed width, so that a few programs serve batches of all lengths.

    rows of 3, 5, 2 and 4 columns in bins of 7      1 1 1 1 1 2 2
                                                    3 3 3 3 0 0 0

The rows of a bin do not see each other, and the positions of each begin at 0, so packing changes numbers by rounding
only. The number and the width of bins come from a list that is known before the run (`bin_shapes`). An iteration uses
the shape in which its mini-batches take the least time, in one call of the program or in several.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator, Sequence
from typing import TypeVar

import jax
import numpy as np

from ragen_jax.agent.trajectory import Trajectory
from ragen_jax.training.batches import (
  FILL,
  BatchingSettings,
  MicroBatch,
  PackingSettings,
  TokenRows,
  plan_micro_batches,
)
from ragen_jax.training.images import ImageInputs
from ragen_jax.utils.sizes import round_up

# Columns of a bin where attention takes as long as all else, for models of less than a billion weights. It takes time
# in proportion to the width, so narrow bins are better, unless they leave more columns empty.
_WIDE = 3500
# Columns of a device that would take as long as a call of its own: the exchange of the gradients, reading the weights.
_CALL = 1000
# Columns that would take as long as the product of a scored token with the vocabulary.
_SCORED = 0.3
# The factor between two widths of bins, and the narrowest as a share of the widest. More widths leave fewer columns
# empty and need more programs: with these, updates of 0.5B take 1 % longer than with all multiples of 128.
_RATIO, _NARROWEST = 1.12, 1 / 7
# More than two bins a device need at least this share of the widest width: fewer and wider bins hold the same rows.
_MANY = 1 / 3
# Scored tokens of a bin, as shares of its width.
_REPLIES = (0.625, 0.75, 1.0)

_Rows = TypeVar('_Rows', bound=TokenRows)


def pack(sizes: np.ndarray, capacity: int | Sequence[int]) -> list[list[int]]:
  """Packs items into bins by first-fit decreasing: the longest first, each into the first bin with room.

      sizes 3 5 2 4, capacity 7  ->  [[1, 2], [3, 0]]

  Args:
    sizes: i32[n], or i32[n, kinds] for items with several sizes, sorted by the first; none is above the capacity.
    capacity: of a bin, for each kind of size.

  Returns:
    Indices into `sizes`, by bin.
  """
  sizes = np.asarray(sizes)
  sizes = sizes.reshape(len(sizes), sizes.shape[1] if sizes.ndim > 1 else 1)
  bins: list[list[int]] = []
  room = np.zeros((len(sizes), sizes.shape[1]), np.int64)
  for i in np.argsort(-sizes[:, 0], kind='stable').tolist():
    fits = (room[: len(bins)] >= sizes[i]).all(axis=1)
    at = int(fits.argmax()) if fits.any() else len(bins)
    if at == len(bins):
      bins.append([])
      room[at] = capacity
    bins[at].append(i)
    room[at] -= sizes[i]
  return bins


def bin_shapes(settings: PackingSettings, longest: int = 0) -> list[tuple[int, int, int]]:
  """The shapes of all programs that packed rows may need, ascending.

  Args:
    settings: see `PackingSettings`.
    longest: columns of the longest row, if it is longer than `settings.width`.

  Returns:
    (bins, width, replies): bins of a call on all devices, columns of a bin, scored tokens of a bin.
  """
  widest = max(settings.width, round_up(longest, settings.step))
  widths = [widest]
  while (narrower := round_up(int(widths[-1] / _RATIO), settings.step)) >= widest * _NARROWEST:
    widths.append(narrower if narrower < widths[-1] else narrower - settings.step)
    if widths[-1] <= settings.step:
      break
  shapes = []
  for width in widths:
    most = max(settings.columns // width, 1)  # bins of a call on one device
    counts = [2**n for n in range(1, most.bit_length()) if n == 1 or width >= widest * _MANY] or [1]
    shapes += [(bins * settings.shards, width, int(share * width)) for bins in counts for share in _REPLIES]
  return sorted(shapes)


@dataclasses.dataclass(frozen=True)
class PackedBatch:
  """A micro-batch of packed rows.

  Attributes:
    bins: indices of the rows of each bin.
    length: i32[B], columns of each row of the batch.
    width: T, columns of a bin.
    replies: R, scored tokens of a bin.
  """

  bins: tuple[np.ndarray, ...]
  length: np.ndarray
  width: int
  replies: int

  @property
  def members(self) -> np.ndarray:
    """i32[n], the rows of all bins."""
    return np.concatenate(self.bins)

  def _places(self, mask: np.ndarray) -> Iterator[tuple[int, int, int, int, slice, slice]]:
    """(bin, number in the bin, row, scored tokens, their place among the bin's, columns) of each row."""
    scored = mask.sum(axis=1)
    for at, members in enumerate(self.bins):
      column = reply = 0
      for number, row in enumerate(members.tolist()):
        n, r = int(self.length[row]), int(scored[row])
        yield at, number, row, r, slice(reply, reply + r), slice(column, column + n)
        column, reply = column + n, reply + r

  def cut(self, batch: _Rows) -> _Rows:
    """The bins of a batch of single rows; turns of different rows get different numbers."""
    shape = (len(self.bins), self.replies)
    segments = np.full((len(self.bins), self.width), -1, np.int32)
    tokens = np.zeros(segments.shape, batch.tokens.dtype)
    found = jax.tree_util.tree_map_with_path(
      lambda path, x: np.full(shape, FILL.get(path[-1].name, 0), x.dtype), batch.replace(tokens=None, images=None)
    )
    images = self._cut_images(batch)
    of_tokens = [
      (f.name, getattr(found, f.name), getattr(batch, f.name))
      for f in dataclasses.fields(batch)
      if getattr(found, f.name) is not None
    ]
    turns = int(batch.turn.max(initial=0)) + 1 if hasattr(batch, 'turn') else 0
    for at, number, row, r, replies, columns in self._places(batch.mask):
      tokens[at, columns] = batch.tokens[row, : columns.stop - columns.start]
      segments[at, columns] = number
      for name, into, x in of_tokens:
        offset = {'columns': columns.start, 'turn': number * turns}.get(name, 0)
        into[at, replies] = x[row, :r] + offset if offset else x[row, :r]
    return found.replace(tokens=tokens, segments=segments, images=images)

  def _cut_images(self, batch: TokenRows) -> ImageInputs | None:
    """What the columns of the bins read of images."""
    if batch.images is None:
      return None

    def cut(path, x):
      into = np.full((len(self.bins), self.width, *x.shape[2:]), FILL.get(path[-1].name, 0), x.dtype)
      for at, _, row, _, _, columns in self._places(batch.mask):
        into[at, columns] = x[row, : columns.stop - columns.start]
      return into

    return jax.tree_util.tree_map_with_path(cut, batch.images)

  def put(self, into: np.ndarray, x: np.ndarray, mask: np.ndarray) -> None:
    """Writes numbers of the scored tokens of the bins, x [bins, R], to those of single rows, `into` [B, R]."""
    for at, _, row, r, replies, _ in self._places(mask):
      into[row, :r] = x[at, replies]


def pack_batches(
  groups: Sequence[np.ndarray], length: np.ndarray, scored: np.ndarray, settings: PackingSettings
) -> list[list[PackedBatch]]:
  """Packs each group of rows into micro-batches, all of one shape.

  Args:
    groups: rows of each mini-batch.
    length: i32[B], columns of each row.
    scored: i32[B], scored tokens of each row.
    settings: see `PackingSettings`.

  Returns:
    The micro-batches of each group.
  """
  longest = max((int(length[rows].max()) for rows in groups if len(rows)), default=1)
  scores = max((int(scored[rows].max()) for rows in groups if len(rows)), default=0)
  columns = max((int(length[rows].sum()) for rows in groups), default=0)
  tokens = max((int(scored[rows].sum()) for rows in groups), default=0)

  def least(shape: tuple[int, int, int]) -> float:
    """The cost of as many calls as the sums need."""
    bins, width, replies = shape
    return _cost(shape, max(-(-columns // (bins * width)), -(-tokens // (bins * replies)), 1), settings.shards)

  fitting = [s for s in bin_shapes(settings, longest) if s[1] >= longest and s[2] >= scores]
  packed: dict[tuple[int, int], list[list[list[int]]]] = {}
  best, lowest = fitting[-1], math.inf
  for shape in sorted(fitting, key=lambda s: (least(s), s)):
    if least(shape) >= lowest:
      break
    of_bin = shape[1:]
    if of_bin not in packed:
      packed[of_bin] = [pack(np.stack([length[rows], scored[rows]], axis=1), of_bin) for rows in groups]
    cost = _cost(shape, max(max(-(-len(own) // shape[0]) for own in packed[of_bin]), 1), settings.shards)
    if cost < lowest:
      best, lowest = shape, cost
  bins, width, replies = best
  return [
    _calls([rows[own] for own in members], bins, length, width, replies) if members else []
    for rows, members in zip(groups, packed[width, replies], strict=True)
  ]


def _cost(shape: tuple[int, int, int], calls: int, shards: int) -> float:
  """Time of calls of a program, in columns of a device that would take as long without attention."""
  bins, width, replies = shape
  return calls * (bins // shards * (width * (1 + width / _WIDE) + _SCORED * replies) + _CALL)


def _calls(members: list[np.ndarray], bins: int, length: np.ndarray, width: int, replies: int) -> list[PackedBatch]:
  """Micro-batches of `bins` bins; those that are left are empty. Bins are ordered so that every call has its share."""
  calls = max(-(-len(members) // bins), 1)
  empty = np.zeros(0, np.int32)
  members = members + [empty] * (calls * bins - len(members))
  return [PackedBatch(tuple(members[i::calls]), length, width, replies) for i in range(calls)]


def plan_batches(
  groups: Sequence[np.ndarray], length: np.ndarray, scored: np.ndarray, settings: BatchingSettings
) -> list[list[MicroBatch | PackedBatch]]:
  """The micro-batches of each of some groups of rows: packed, or sorted by length and cut; arguments as above."""
  if settings.packing is not None:
    return pack_batches(groups, length, scored, settings.packing)
  return [
    plan_micro_batches(rows, length, scored, size=settings.micro_batch_size, length_step=settings.length_step)
    for rows in groups
  ]


def plan_rows(
  groups: Sequence[np.ndarray], trajectory: Trajectory, settings: BatchingSettings
) -> list[list[MicroBatch | PackedBatch]]:
  """The micro-batches of each of some groups of rows of a trajectory, see `plan_batches`."""
  scored = trajectory.length if settings.whole_rows else trajectory.loss_mask.sum(axis=1)
  return plan_batches(groups, trajectory.length, scored, settings)
