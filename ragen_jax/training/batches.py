"""Batches of the update: sampled tokens by column, and mini-batches cut into micro-batches of similar length.

A mini-batch is what one optimiser step learns from, a micro-batch what goes through the model at once. The rows of a
mini-batch are sorted by length and cut into micro-batches, each only as wide as its longest row, so that a few long
episodes do not widen all the others.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from typing import Any, TypeVar

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import place_rows
from ragen_jax.training.images import ImageInputs
from ragen_jax.utils.sizes import round_up


@struct.dataclass
class TokenRows:
  """Rows for the model, and the columns of up to R tokens of each row.

  Attributes:
    tokens: i32[B, T].
    columns: i32[B, R], the columns of the tokens that are scored, ascending in each row; 1 where there is none.
    mask: bool[B, R], True where there is a token.
    seen_until: i32[B, T], which columns see which if rows are packed, see `models.trees`; None if they are not, as are
      the following two.
    before: i32[B, R], the column before each scored token in its row, whose state emits it; 0 where there is none.
      Without packing it is the one to the left.
    sequence: i32[B, R], the number of each scored token's row among those of its bin; -1 where there is none.
    images: what the columns read of images; None for rows of text.
    experts: [B, T, L, k], the experts that the policy uses for each column, see `Qwen.run`; None for those that its
      routers choose.
  """

  tokens: np.ndarray
  columns: np.ndarray
  mask: np.ndarray
  seen_until: np.ndarray | None = struct.field(default=None, kw_only=True)
  before: np.ndarray | None = struct.field(default=None, kw_only=True)
  sequence: np.ndarray | None = struct.field(default=None, kw_only=True)
  images: ImageInputs | None = struct.field(default=None, kw_only=True)
  experts: np.ndarray | None = struct.field(default=None, kw_only=True)


@struct.dataclass
class TrainBatch(TokenRows):
  """The tokens of a rollout with all that the loss needs but their weights; f32[B, R] unless noted.

  Attributes:
    turn: i32[B, R], index of the token's turn, -1 where there is no token.
    trained: bool[B, R], tokens in the policy loss.
    valued: bool[B, R], tokens in the value loss.
    old_logprobs: f32[B, R], log-probs that probability ratios are taken to.
    old_values: f32[B, R], the critic's values when the batch was made.
    returns: f32[B, R], targets of the critic.
    ref_logprobs: f32[B, R], log-probs under the reference; None if no KL term is on.
    importance: f32[B, R], truncated importance weights, factors of the policy loss; None if they are off.
  """

  turn: np.ndarray
  trained: np.ndarray
  valued: np.ndarray
  old_logprobs: np.ndarray
  old_values: np.ndarray
  advantages: np.ndarray
  returns: np.ndarray
  ref_logprobs: np.ndarray | None
  importance: np.ndarray | None


@struct.dataclass
class MiniBatch(TrainBatch):
  """A `TrainBatch` with the weights of one optimiser step's tokens.

  Attributes:
    weights: f32[B, R], of the policy loss; 0 outside the mini-batch. They sum to 1 under 'token-mean'.
    value_weights: f32[B, R], of the value loss; they sum to 1 / `objective.value_unit`.
  """

  weights: np.ndarray
  value_weights: np.ndarray


@dataclasses.dataclass(frozen=True)
class PackingSettings:
  """Bins of packed rows, see `training/packing.py`.

  Attributes:
    step: widths of bins are multiples of this.
    width: the most columns of a bin, if no row is longer; a multiple of `step`.
    columns: the most columns that go through the model at once on one device; at least one bin does.
    shards: parts into which the bins of a micro-batch are divided.
    reply_step: the number of scored tokens of a rollout's rows is rounded up to 1, 2, 4, ... times this.
    most_shared: columns of the widest bins in which rows share their beginnings; 0 for none.
    widest: columns of bins that rows may fill only because they share their beginnings, one for each device; 0 for no
      wider ones than `width`.
  """

  step: int
  width: int
  columns: int
  shards: int
  reply_step: int
  most_shared: int = 0
  widest: int = 0


@dataclasses.dataclass(frozen=True)
class BatchingSettings:
  """Sizes of micro-batches.

  Attributes:
    micro_batch_size: rows of a micro-batch that is not packed.
    length_step: its T is rounded up to a multiple of this, its R to a multiple of half of it.
    whole_rows: any column may be a scored token, not only the sampled ones.
    packing: pack rows into bins; None for a row each.
  """

  micro_batch_size: int
  length_step: int
  whole_rows: bool
  packing: PackingSettings | None

  @property
  def reply_step(self) -> int:
    """The number of scored tokens of a rollout's rows is rounded up to 1, 2, 4, ... times this."""
    return max(self.length_step // 2, 1) if self.packing is None else self.packing.reply_step


# Values in rows and columns that do not exist, where not 0.
FILL = {'columns': 1, 'turn': -1, 'index': -1, 'sequence': -1}
# Arrays with a number for each column, not for each scored token.
OF_COLUMNS = ('tokens', 'index', 'positions', 'experts')

_Rows = TypeVar('_Rows', bound=TokenRows)


@dataclasses.dataclass(frozen=True)
class MicroBatch:
  """The rows i32[micro_batch_size] of a micro-batch, -1 where there is none, its T (`width`) and its R (`replies`)."""

  rows: np.ndarray
  width: int
  replies: int

  @property
  def members(self) -> np.ndarray:
    """i32[n], the rows that exist."""
    return self.rows[self.rows >= 0]

  def cut(self, batch: _Rows) -> _Rows:
    """The rows and columns of this micro-batch; rows of index -1 become rows without tokens."""
    present = self.rows >= 0
    rows = np.maximum(self.rows, 0)

    def cut(path, x):
      name = path[-1].name
      width, fill = self.width if name in OF_COLUMNS else self.replies, FILL.get(name, 0)
      x = x[rows, :width]
      x = np.pad(x, ((0, 0), (0, width - x.shape[1]), *((0, 0),) * (x.ndim - 2)), constant_values=fill)
      return np.where(present.reshape(-1, *(1,) * (x.ndim - 1)), x, fill).astype(x.dtype)

    return jax.tree_util.tree_map_with_path(cut, batch)

  def put(self, into: np.ndarray, x: np.ndarray, mask: np.ndarray) -> None:
    """Writes `x` [micro_batch_size, R], of scored tokens, to `into`, which is [B, R of the batch] as `mask` is."""
    present, width = self.rows >= 0, min(self.replies, mask.shape[1])
    into[self.rows[present], :width] = x[present, :width]


def sampled_columns(loss_mask: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
  """The columns i32[B, R] of each row's sampled tokens, and a mask bool[B, R].

      loss_mask  0 0 1 1 0 1   ->  columns  2 3 5    mask  1 1 1
                 0 1 0 0 0 0                1 1 1          1 0 0

  R is the largest number of sampled tokens of a row, at least 1. Column 0 of `loss_mask` bool[B, T] is never sampled.
  """
  counts = loss_mask.sum(axis=1)
  mask = np.arange(max(int(counts.max(initial=0)), 1))[None, :] < counts[:, None]
  columns = np.ones(mask.shape, np.int32)
  columns[mask] = np.nonzero(loss_mask)[1]
  return columns, mask


def at_columns(x: np.ndarray, columns: np.ndarray, mask: np.ndarray) -> np.ndarray:
  """[B, T] -> [B, R]: the values of a timeline's array at `columns`, 0 off the mask."""
  return np.where(mask, np.take_along_axis(x, columns, axis=1), 0).astype(x.dtype)


def mini_batches(
  kept: np.ndarray, episode: np.ndarray, rng: np.random.Generator, *, size: int, parts: int | None
) -> list[np.ndarray]:
  """Divides the kept rows i32[K] over optimiser steps: whole episodes, in random order.

  `episode` i32[B] is the episode of each row. Mini-batches have `size` episodes, unless `parts` says how many of almost
  equal size there are. The result has the row indices i32[M] of each mini-batch; none is empty.
  """
  episodes = np.unique(episode[kept])
  order = rng.permutation(episodes)
  if parts is not None:
    cut = np.array_split(order, parts)
  else:
    cut = [order[start : start + size] for start in range(0, len(order), size)]
  rows = {e: kept[episode[kept] == e] for e in episodes.tolist()}
  return [np.concatenate([rows[e] for e in part.tolist()]).astype(np.int32) for part in cut if len(part)]


def plan_micro_batches(
  rows: np.ndarray, length: np.ndarray, sampled: np.ndarray, *, size: int, length_step: int
) -> list[MicroBatch]:
  """Cuts a mini-batch into micro-batches of `size` rows of similar length, longest last; every row is in exactly one.

  `rows` i32[M] is the mini-batch. `length` i32[B] has the used columns of each row of the rollout, `sampled` i32[B] its
  scored tokens. T is rounded up to a multiple of `length_step`, R to a multiple of half of it.
  """
  rows = rows[np.argsort(length[rows], kind='stable')]
  half = max(length_step // 2, 1)
  plans = []
  for start in range(0, len(rows), size):
    part = rows[start : start + size]
    width = round_up(int(length[part].max()), length_step)
    replies = round_up(max(int(sampled[part].max()), 1), half)
    padded = np.concatenate([part, np.full(size - len(part), -1, part.dtype)])
    plans.append(MicroBatch(padded, width, replies))
  return plans


def micro_batches(
  batch: _Rows, plans: Sequence[Any], mesh: Mesh | None = None, room: Mapping[tuple[int, int], int] | None = None
) -> Iterator[_Rows]:
  """The micro-batches of a batch on the host, one after the other; `plans` says which rows go together.

  Args:
    mesh: places the rows of each micro-batch on it; None leaves them on the host.
    room: images, by size, for which the table of each micro-batch has room at least, see `ImageInputs.sizes`. Batches
      with about equally many images then have tables of one size, and need one program. Not read if the batch's
      `RolloutImages` has a `room`.
  """
  parts = (plan.cut(batch) for plan in plans)
  if batch.images is not None:
    yield from _with_images(list(parts), mesh, room or {})
    return
  for part in parts:
    yield part if mesh is None else place_rows(part, mesh)


def _with_images(parts: list[_Rows], mesh: Mesh | None, room: Mapping[tuple[int, int], int]) -> Iterator[_Rows]:
  """Micro-batches, each with the images that its columns read. Those of one shape have tables of one size."""
  sizes = [part.images.sizes() for part in parts]
  size = {key: max(room.get(key, 0), *(own[key] for own in sizes)) for key in (sizes[0] if sizes else ())}
  for part in parts:
    images = part.images.with_source(size, mesh, packed=part.seen_until is not None)
    part = part.replace(images=None)
    yield (part if mesh is None else place_rows(part, mesh)).replace(images=images)


def abstract_mini_batch(
  rows: int,
  width: int,
  replies: int,
  *,
  reference: bool,
  importance: bool,
  sharding: Any = None,
  packed: bool = False,
  images: ImageInputs | None = None,
  experts: tuple[tuple[int, int], np.dtype] | None = None,
) -> MiniBatch:
  """The shapes and types of a micro-batch of `rows` rows, T = `width` and R = `replies`, to compile programs for.

  `reference` and `importance` say whether `ref_logprobs` and `importance` exist. If `packed`, a row is a bin, and
  `seen_until`, `before` and `sequence` exist. `experts` are (L, k) and the type of replayed ones; None for no replay.
  """
  replayed, kind = experts or ((), None)
  types = {
    'tokens': np.int32,
    'seen_until': np.int32,
    'before': np.int32,
    'sequence': np.int32,
    'columns': np.int32,
    'turn': np.int32,
    'mask': bool,
    'trained': bool,
    'valued': bool,
    'experts': kind,
  }
  optional = {
    'ref_logprobs': reference, 'importance': importance, 'images': False, 'experts': experts is not None
  }  # fmt: skip
  optional |= dict.fromkeys(('seen_until', 'before', 'sequence'), packed)

  def leaf(name):
    if not optional.get(name, True):
      return None
    shape = (rows, width if name in ('tokens', 'seen_until', 'experts') else replies)
    shape += replayed if name == 'experts' else ()
    return jax.ShapeDtypeStruct(shape, types.get(name, np.float32), sharding=sharding)

  return MiniBatch(**{f.name: leaf(f.name) for f in dataclasses.fields(MiniBatch)} | {'images': images})
