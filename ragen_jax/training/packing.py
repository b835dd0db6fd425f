"""Packing: rows one behind the other in bins of a fixed width, so that a few programs serve batches of all lengths.

    rows of 3, 5, 2 and 4 columns in bins of 7      1 1 1 1 1 2 2
                                                    3 3 3 3 0 0 0

The rows of a bin do not see each other, and the positions of each begin at 0, so packing changes numbers by rounding
only. The number and the width of bins come from a list (`bin_shapes`), cheapest first. An iteration uses the first
shape with room for each of its mini-batches. That is one call of the program if memory allows, because the devices
exchange all gradients in every call.
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
# Columns that would take as long as a call of its own: the exchange of the gradients, reading the weights.
_CALL = 1000
# Shapes whose costs differ by less count as equal, and the widest, with room for most lengths, is the first of them: a
# run then needs fewer programs.
_EQUAL = 1.1
# Scored tokens of a bin, as shares of its width.
_REPLIES = (0.375, 0.5, 0.625, 0.75, 1.0)

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


def bin_shapes(settings: PackingSettings, longest: int, rows: int) -> list[tuple[int, int, int]]:
  """The shapes of mini-batches, cheapest first; the last of them have room for any rows.

  Args:
    settings: see `PackingSettings`.
    longest: columns of the longest row.
    rows: of the largest mini-batch.

  Returns:
    (calls, bins, width): calls of the program for a mini-batch, bins of a call on all devices, columns of a bin.
  """
  narrowest = round_up(longest, settings.step)
  shapes = set()
  for width in range(narrowest, max(settings.width, narrowest) + 1, settings.step):
    most = max(settings.columns // width, 1)  # bins of a call on one device
    for bins in range(1, -(-max(rows, 1) // settings.shards) + 1):
      calls = -(-bins // most)
      shapes.add((calls, -(-bins // calls), width))

  def order(shape: tuple[int, int, int]) -> tuple[int, ...]:
    calls, bins, width = shape
    cost = calls * (bins * width * (1 + width / _WIDE) + _CALL)
    return math.floor(math.log(cost) / math.log(_EQUAL)), -width, bins, calls

  return [(calls, bins * settings.shards, width) for calls, bins, width in sorted(shapes, key=order)]


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
  shapes = bin_shapes(settings, longest, max(map(len, groups), default=1))
  return next(found for shape in shapes if (found := _packed(groups, length, scored, shape)) is not None)


def _packed(
  groups: Sequence[np.ndarray], length: np.ndarray, scored: np.ndarray, shape: tuple[int, int, int]
) -> list[list[PackedBatch]] | None:
  """The micro-batches of each group in bins of a shape, with as few scored tokens as will do; None without room."""
  calls, bins, width = shape
  if any(length[rows].sum() > calls * bins * width for rows in groups):
    return None
  found = None
  for share in reversed(_REPLIES):
    replies = int(share * width)
    if any((scored[rows] > replies).any() for rows in groups):
      break
    packed = [pack(np.stack([length[rows], scored[rows]], axis=1), (width, replies)) for rows in groups]
    if any(len(own) > calls * bins for own in packed):
      break
    found = [
      _calls([rows[own] for own in members], bins, length, width, replies) if members else []
      for rows, members in zip(groups, packed, strict=True)
    ]
  return found


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
