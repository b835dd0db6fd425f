"""The micro-batches of a step, with one conversation in each row, or several conversations packed into a row.

Conversations in a packed row do not attend to each other, and the positions of each begin at 0, so packing changes the
gradient by rounding only.
"""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh

from ragen_jax.distributed.sharding import row_shards
from ragen_jax.sft.data import SftExamples
from ragen_jax.training.batches import MicroBatch, TokenRows, micro_batches, plan_micro_batches
from ragen_jax.training.packing import PackedBatch, pack
from ragen_jax.utils.sizes import round_up

# A packed micro-batch has (conversations of a step / 16) rows. A packed row contains several conversations, and with
# few rows the last micro-batch has little padding.
_CONVERSATIONS_A_PACKED_ROW = 16
# The same for conversations with images, which are long.
_OF_IMAGES = 4
# Trained tokens of a packed row are rounded up to multiples of an eighth of its width, so few programs are compiled.
_REPLY_STEPS = 8


@struct.dataclass
class SftBatch(TokenRows):
  """The rows of a step, or of one of its micro-batches.

  Attributes:
    values: f32[B, R], targets of the value head.
    weights: f32[B, R], weights of the tokens in the loss, 0 in unused entries; they sum to 1 over a step.
    value_weights: f32[B, R], weights of the tokens in the value loss.
  """

  values: np.ndarray
  weights: np.ndarray
  value_weights: np.ndarray


def batches(
  data: SftExamples,
  rows: np.ndarray,
  *,
  batch_size: int,
  length_step: int,
  packing: bool,
  mesh: Mesh | None,
) -> Iterator[SftBatch]:
  """The micro-batches of a step.

  Args:
    data: the conversations.
    rows: i64[n], the conversations of the step.
    batch_size: number of conversations of a training step.
    length_step: widths are multiples of this.
    packing: whether conversations are packed; otherwise the row shards of the mesh divide `batch_size // 2`.
    mesh: the devices that rows are divided over; None leaves them on the host.
  """
  mask, length = data.mask[rows], data.length[rows]
  weights = (mask / np.float32(mask.sum())).astype(np.float32)
  step = SftBatch(
    tokens=data.tokens[rows],
    columns=data.columns[rows],
    mask=mask,
    values=data.values[rows],
    weights=weights,
    value_weights=weights * data.value_scale[rows, None],
    images=jax.tree.map(lambda x: x[rows], data.images),
  )
  if packing:
    in_row = _CONVERSATIONS_A_PACKED_ROW if data.images is None else _OF_IMAGES
    size = round_up(math.ceil(batch_size / in_row), 1 if mesh is None else row_shards(mesh))
    width = round_up(data.tokens.shape[1], length_step)
    plans = _packed(length, mask.sum(axis=1), size, width)
    together = size * width / data.length.mean()
  else:
    together = max(batch_size // 2, 1)
    plans = _padded(length, mask.sum(axis=1), together, length_step)
  yield from micro_batches(step, plans, mesh, _room_for_images(data, min(together, batch_size)))


def _room_for_images(data: SftExamples, together: float) -> dict[tuple[int, int], int]:
  """A number of images, by size, that a micro-batch of so many conversations seldom exceeds."""
  return {
    size: math.ceil(together * counts.mean() + 3 * math.sqrt(together * np.square(counts).mean()))
    for size, counts in data.image_counts.items()
  }


def _padded(length: np.ndarray, sampled: np.ndarray, size: int, length_step: int) -> list[MicroBatch]:
  """Micro-batches of `size` rows with one conversation each, as wide as their longest conversation."""
  return plan_micro_batches(np.arange(len(length)), length, sampled, size=size, length_step=length_step)


def _packed(length: np.ndarray, sampled: np.ndarray, size: int, width: int) -> list[PackedBatch]:
  """Micro-batches of `size` packed rows of `width` columns."""
  bins = [np.asarray(members) for members in pack(length, width)]
  bins.sort(key=lambda members: sampled[members].sum())  # rows of a micro-batch have similar numbers of trained tokens
  step, plans = max(width // _REPLY_STEPS, 1), []
  for start in range(0, len(bins), size):
    part = bins[start : start + size]
    replies = round_up(max(int(sampled[members].sum()) for members in part), step)
    part += [np.zeros(0, np.int64)] * (size - len(part))
    plans.append(PackedBatch(tuple(part), length, width, replies))
  return plans
