"""The micro-batches of a step, with one conversation in each row, or several conversations packed into a row.

Conversations in a packed row do not attend to each other, and the positions of each begin at 0, so packing changes the
gradient by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import numpy as np
from flax import struct

from ragen_jax.sft.data import SftExamples
from ragen_jax.training.batches import plan_micro_batches
from ragen_jax.training.packing import pack
from ragen_jax.utils.sizes import round_up

# A packed micro-batch has (conversations of a step / 16) rows. A packed row contains several conversations, and with
# few rows the last micro-batch has little padding.
_CONVERSATIONS_A_PACKED_ROW = 16
# Trained tokens of a packed row are rounded up to multiples of an eighth of its width, so few programs are compiled.
_REPLY_STEPS = 8


@struct.dataclass
class SftBatch:
  """A micro-batch: b rows of T columns, with at most R trained tokens in a row.

  Attributes:
    tokens: i32[b, T].
    columns: i32[b, R], columns of the trained tokens; 1 in unused entries.
    values: f32[b, R], targets of the value head.
    weights: f32[b, R], weights of the tokens in the loss, 0 in unused entries; they sum to 1 over a step.
    value_weights: f32[b, R], weights of the tokens in the value loss.
    segments: i32[b, T], number of the token's conversation in its row; None if each row has one conversation.
  """

  tokens: np.ndarray
  columns: np.ndarray
  values: np.ndarray
  weights: np.ndarray
  value_weights: np.ndarray
  segments: np.ndarray | None = None


def padded_batches(data: SftExamples, rows: np.ndarray, size: int, length_step: int) -> Iterator[SftBatch]:
  """Micro-batches with one conversation in each row, as wide as the longest conversation of the micro-batch.

  Args:
    data: the conversations.
    rows: i64[n], the conversations of a step.
    size: rows of a micro-batch.
    length_step: widths are multiples of this.
  """
  sampled = data.sampled
  total = np.float32(sampled[rows].sum())
  for plan in plan_micro_batches(rows, data.length, sampled, size=size, length_step=length_step):
    at = np.maximum(plan.rows, 0)
    weights = _fit(data.mask[at], plan.replies) * (plan.rows >= 0)[:, None] / total
    yield SftBatch(
      tokens=_fit(data.tokens[at], plan.width),
      columns=_fit(data.columns[at], plan.replies, 1),
      values=_fit(data.values[at], plan.replies),
      weights=weights,
      value_weights=weights * data.value_scale[at, None],
    )


def packed_batches(data: SftExamples, rows: np.ndarray, size: int, length_step: int) -> Iterator[SftBatch]:
  """Micro-batches of packed rows; a row is as wide as the longest conversation in `data`.

  Args:
    data: the conversations.
    rows: i64[n], the conversations of a step.
    size: rows of a micro-batch.
    length_step: the width is a multiple of this.
  """
  sampled = data.sampled
  total = np.float32(sampled[rows].sum())
  width = round_up(int(data.length.max()), length_step)
  bins = [rows[b] for b in pack(data.length[rows], width)]
  bins.sort(key=lambda b: sampled[b].sum())  # rows of a micro-batch get similar numbers of trained tokens
  step = max(width // _REPLY_STEPS, 1)
  for start in range(0, len(bins), size):
    part = bins[start : start + size]
    replies = round_up(max(int(sampled[b].sum()) for b in part), step)
    batch = SftBatch(
      tokens=np.zeros((size, width), np.int32),
      columns=np.ones((size, replies), np.int32),
      values=np.zeros((size, replies), np.float32),
      weights=np.zeros((size, replies), np.float32),
      value_weights=np.zeros((size, replies), np.float32),
      segments=np.full((size, width), -1, np.int32),
    )
    for row, members in enumerate(part):
      column = reply = 0
      for number, i in enumerate(members.tolist()):
        n, r = int(data.length[i]), int(sampled[i])
        batch.tokens[row, column : column + n] = data.tokens[i, :n]
        batch.segments[row, column : column + n] = number
        batch.columns[row, reply : reply + r] = data.columns[i, :r] + column
        batch.values[row, reply : reply + r] = data.values[i, :r]
        batch.weights[row, reply : reply + r] = 1 / total
        batch.value_weights[row, reply : reply + r] = data.value_scale[i] / total
        column, reply = column + n, reply + r
    yield batch


def batches(
  data: SftExamples, rows: np.ndarray, *, batch_size: int, length_step: int, packing: bool, shards: int
) -> Iterator[SftBatch]:
  """The micro-batches of a step.

  Args:
    data: the conversations.
    rows: i64[n], the conversations of the step.
    batch_size: number of conversations of a training step.
    length_step: widths are multiples of this.
    packing: whether conversations are packed.
    shards: parts into which rows are divided; without packing it must divide `batch_size // 2`.
  """
  if not packing:
    return padded_batches(data, rows, max(batch_size // 2, 1), length_step)
  size = math.ceil(batch_size / _CONVERSATIONS_A_PACKED_ROW)
  return packed_batches(data, rows, round_up(size, shards), length_step)


def _fit(x: np.ndarray, width: int, fill: int = 0) -> np.ndarray:
  """x, cut or padded to `width` columns."""
  x = x[:, :width]
  return np.pad(x, ((0, 0), (0, width - x.shape[1])), constant_values=fill)
