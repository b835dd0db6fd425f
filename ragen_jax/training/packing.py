"""Packing: rows one behind the other in bins of a fixed width, so that a few programs serve batches of all lengths.

    rows of 3, 5, 2 and 4 columns in bins of 7      1 1 1 1 1 2 2
                                                    3 3 3 3 0 0 0

What rows of a bin share at their beginning stands in it once (`forests`). A token sees the tokens of its own row only,
and its position is that in its row, so packing changes numbers by rounding only. The number and the width of bins come
from a list that is known before the run (`bin_shapes`). An iteration uses the shape in which its mini-batches take the
least time, in one call of the program or in several.
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
from ragen_jax.training.forests import Forest, forest
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
# Scored tokens of a bin, as shares of its width: of short answers to long prompts, of thoughts, and of long replies.
_REPLIES = (0.25, 0.625, 1.0)

_Rows = TypeVar('_Rows', bound=TokenRows)


def pack(sizes: np.ndarray, capacity: int | Sequence[int]) -> list[list[int]]:
  """Packs items into bins by first-fit decreasing: the longest first, each into the first bin with room.

      sizes 3 5 2 4, capacity 7  ->  [[1, 2], [3, 0]]

  `sizes` are i32[n], or i32[n, kinds] for items with several sizes, which are sorted by the first; none is above the
  capacity. The result has indices into `sizes`, by bin.
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
  """(bins, width, replies) of all programs that packed rows may need, ascending.

  They are the bins of a call on all devices, and the columns and scored tokens of a bin. `longest` is the columns of
  the longest row, if it is longer than `settings.width`. Only rows that share their beginnings use wider bins than it.
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
  while (wider := max(round_up(int(widths[0] * _RATIO), settings.step), widths[0] + settings.step)) <= settings.widest:
    widths.insert(0, wider)
    shapes += [(settings.shards, wider, int(share * wider)) for share in _REPLIES]
  return sorted(shapes)


@dataclasses.dataclass(frozen=True)
class PackedBatch:
  """A micro-batch of packed rows.

  Attributes:
    bins: indices of the rows of each bin.
    length: i32[B], columns of each row of the batch.
    width: T, columns of a bin.
    replies: R, scored tokens of a bin.
    shared: for each row of a bin, how many of its first columns it shares with the row before it in the bin, which
      begin in the same way; None if no row shares any.
  """

  bins: tuple[np.ndarray, ...]
  length: np.ndarray
  width: int
  replies: int
  shared: tuple[np.ndarray, ...] | None = None

  @property
  def members(self) -> np.ndarray:
    """i32[n], the rows of all bins."""
    return np.concatenate(self.bins)

  def _rows(self) -> Iterator[tuple[int, int, int, np.ndarray, int]]:
    """(bin, number in the bin, row, the columns i32[n] of its tokens, how many of them the row before has too)."""
    for at, members in enumerate(self.bins):
      path, end = np.zeros(0, np.int32), 0
      for number, row in enumerate(members.tolist()):
        n, shared = int(self.length[row]), 0 if self.shared is None else int(self.shared[at][number])
        path = np.concatenate([path[:shared], np.arange(end, end + n - shared, dtype=np.int32)])
        end += n - shared
        yield at, number, row, path, shared

  def _replies(self, mask: np.ndarray) -> Iterator[tuple[int, int, int, slice]]:
    """(bin, row, scored tokens, their place among those of the bin) of each row."""
    scored = mask.sum(axis=1)
    for at, members in enumerate(self.bins):
      reply = 0
      for row in members.tolist():
        r = int(scored[row])
        yield at, row, r, slice(reply, reply + r)
        reply += r

  def cut(self, batch: _Rows) -> _Rows:
    """The bins of a batch of single rows; turns of different rows get different numbers."""
    shape = (len(self.bins), self.replies)
    # A column of padding is seen by itself.
    seen_until = np.tile(np.arange(1, self.width + 1, dtype=np.int32), (len(self.bins), 1))
    tokens = np.zeros(seen_until.shape, batch.tokens.dtype)
    found = jax.tree_util.tree_map_with_path(
      lambda path, x: np.full(shape, FILL.get(path[-1].name, 0), x.dtype),
      batch.replace(tokens=None, images=None, experts=None),
    )
    before, sequence = np.zeros(shape, np.int32), np.full(shape, FILL['sequence'], np.int32)
    of_tokens = [
      (f.name, getattr(found, f.name), getattr(batch, f.name))
      for f in dataclasses.fields(batch)
      if f.name != 'columns' and getattr(found, f.name) is not None
    ]
    experts = batch.experts
    if experts is not None:
      experts = np.zeros((*tokens.shape, *experts.shape[2:]), experts.dtype)
    turns = int(batch.turn.max(initial=0)) + 1 if hasattr(batch, 'turn') else 0
    for (at, number, row, path, shared), (_, _, r, replies) in zip(
      self._rows(), self._replies(batch.mask), strict=True
    ):
      tokens[at, path[shared:]] = batch.tokens[row, shared : len(path)]
      if experts is not None:  # of a shared column those of the first row
        experts[at, path[shared:]] = batch.experts[row, shared : len(path)]
      if shared < len(path):  # all columns of the row see its last one come
        seen_until[at, path] = path[-1] + 1
      columns = batch.columns[row, :r]
      found.columns[at, replies], before[at, replies] = path[columns], path[columns - 1]
      sequence[at, replies] = number
      for name, into, x in of_tokens:
        into[at, replies] = x[row, :r] + (number * turns if name == 'turn' else 0)
    return found.replace(
      tokens=tokens, seen_until=seen_until, before=before, sequence=sequence, images=self._cut_images(batch),
      experts=experts,
    )  # fmt: skip

  def _cut_images(self, batch: TokenRows) -> ImageInputs | None:
    """What the columns of the bins read of images."""
    if batch.images is None:
      return None

    def cut(path, x):
      into = np.full((len(self.bins), self.width, *x.shape[2:]), FILL.get(path[-1].name, 0), x.dtype)
      for at, _, row, path, _ in self._rows():
        into[at, path] = x[row, : len(path)]
      return into

    return jax.tree_util.tree_map_with_path(cut, batch.images)

  def put(self, into: np.ndarray, x: np.ndarray, mask: np.ndarray) -> None:
    """Writes numbers of the scored tokens of the bins, x [bins, R], to those of single rows, `into` [B, R]."""
    for at, row, r, replies in self._replies(mask):
      into[row, :r] = x[at, replies]


def pack_batches(
  groups: Sequence[np.ndarray],
  length: np.ndarray,
  scored: np.ndarray,
  settings: PackingSettings,
  tokens: np.ndarray | None = None,
) -> list[list[PackedBatch]]:
  """Packs each group of rows, those of a mini-batch, into micro-batches, all of one shape.

  `length` and `scored` i32[B] are the columns and scored tokens of each row. `tokens` i32[B, T] are those of rows that
  may share their beginnings; None if they may not.
  """
  longest = max((int(length[rows].max()) for rows in groups if len(rows)), default=1)
  scores = max((int(scored[rows].max()) for rows in groups if len(rows)), default=0)
  sizes = [np.stack([length[rows], scored[rows]], axis=1) for rows in groups]
  alone = [Forest(np.arange(len(rows)), np.zeros(len(rows), np.int64)) for rows in groups]
  sharing = alone if tokens is None else [forest(tokens[rows], length[rows]) for rows in groups]
  by_itself, most, limit = None, math.inf, math.inf
  if all(trees.columns(own) == own[:, 0].sum() for trees, own in zip(sharing, sizes, strict=True)):
    settings = dataclasses.replace(settings, widest=0)
  else:  # calls of what is shared must have no more columns, and together take no longer
    by_itself = pack_batches(groups, length, scored, settings)
    plan = next(plan for plans in by_itself for plan in plans)
    shape = len(plan.bins), plan.width, plan.replies
    most, limit = shape[0] * shape[1], 1 + _cost(shape, max(map(len, by_itself)), settings.shards)
  fitting = [s for s in bin_shapes(settings, longest) if s[1] >= longest and s[2] >= scores and s[0] * s[1] <= most]

  def forests(width: int) -> list[Forest]:
    return sharing if width <= settings.most_shared else alone

  def least(shape: tuple[int, int, int]) -> float:
    """The cost of as many calls as the sums need."""
    bins, width, replies = shape
    columns = max((f.columns(own) for f, own in zip(forests(width), sizes, strict=True)), default=0)
    tokens = max((int(own[:, 1].sum()) for own in sizes), default=0)
    return _cost(shape, max(-(-columns // (bins * width)), -(-tokens // (bins * replies)), 1), settings.shards)

  packed: dict[tuple[int, int], list[list[np.ndarray]]] = {}
  best, lowest = fitting[-1], limit
  for shape in sorted(fitting, key=lambda s: (least(s), s)):
    if least(shape) >= lowest:
      break
    of_bin = shape[1:]
    if of_bin not in packed:
      packed[of_bin] = [_bins(f, own, of_bin) for f, own in zip(forests(of_bin[0]), sizes, strict=True)]
    cost = _cost(shape, max([-(-len(own) // shape[0]) for own in packed[of_bin]] + [1]), settings.shards)
    if cost < lowest:
      best, lowest = shape, cost
  if by_itself is not None and lowest == limit:
    return by_itself
  bins, width, replies = best

  def batch(rows: np.ndarray, trees: Forest, call: list[np.ndarray]) -> PackedBatch:
    shared = None if forests(width) is alone else tuple(map(trees.shared, call))
    return PackedBatch(tuple(rows[own] for own in call), length, width, replies, shared)

  return [
    [batch(rows, trees, call) for call in _calls(members, bins)] if members else []
    for rows, members, trees in zip(groups, packed[width, replies], forests(width), strict=True)
  ]


def _bins(trees: Forest, sizes: np.ndarray, capacity: tuple[int, int]) -> list[np.ndarray]:
  """The rows of each bin, in the forest's order: parts of trees, by first-fit decreasing; see `Forest.parts`."""
  parts = trees.parts(sizes, capacity)
  bins = pack(np.asarray([part.size for part in parts]).reshape(len(parts), 2), capacity)
  return [trees.in_order(np.concatenate([parts[i].rows for i in own])) for own in bins]


def _cost(shape: tuple[int, int, int], calls: int, shards: int) -> float:
  """Time of calls of a program, in columns of a device that would take as long without attention."""
  bins, width, replies = shape
  return calls * (bins // shards * (width * (1 + width / _WIDE) + _SCORED * replies) + _CALL)


def _calls(members: list[np.ndarray], bins: int) -> list[list[np.ndarray]]:
  """The bins of each call of `bins` bins; those that are left are empty. Every call has its share of the full ones."""
  calls = max(-(-len(members) // bins), 1)
  members = members + [np.zeros(0, np.int32)] * (calls * bins - len(members))
  return [members[i::calls] for i in range(calls)]


def plan_batches(
  groups: Sequence[np.ndarray],
  length: np.ndarray,
  scored: np.ndarray,
  settings: BatchingSettings,
  tokens: np.ndarray | None = None,
) -> list[list[MicroBatch | PackedBatch]]:
  """The micro-batches of each of some groups of rows: packed, or sorted by length and cut; arguments as above."""
  if settings.packing is not None:
    return pack_batches(groups, length, scored, settings.packing, tokens)
  return [
    plan_micro_batches(rows, length, scored, size=settings.micro_batch_size, length_step=settings.length_step)
    for rows in groups
  ]


def plan_rows(
  groups: Sequence[np.ndarray], trajectory: Trajectory, settings: BatchingSettings
) -> list[list[MicroBatch | PackedBatch]]:
  """The micro-batches of each of some groups of rows of a trajectory, see `plan_batches`."""
  scored = trajectory.length if settings.whole_rows else trajectory.loss_mask.sum(axis=1)
  return plan_batches(groups, trajectory.length, scored, settings, tokens_to_share(trajectory))


def tokens_to_share(trajectory: Trajectory) -> np.ndarray:
  """Equal numbers i32[B, T] for columns that may be shared: of text the tokens, of an image its number below 0."""
  if trajectory.image is None:
    return trajectory.tokens
  return np.where(trajectory.image >= 0, -1 - trajectory.image, trajectory.tokens)


def shared_tokens(plans: Sequence[PackedBatch]) -> float:
  """The share of the rows' tokens that the model does not compute, because another row of the bin has them too."""
  saved = sum(int(own.sum()) for plan in plans for own in plan.shared or ())
  return saved / max(sum(int(plan.length[plan.members].sum()) for plan in plans), 1)
