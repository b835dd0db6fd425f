"""The micro-batches of a step, with one conversation in each row, or packed into bins as in the update of a run."""

from __future__ import annotations

import math
from collections.abc import Iterator

import jax
import numpy as np
from flax import struct
from jax.sharding import Mesh

from ragen_jax.sft.data import SftExamples
from ragen_jax.training.batches import PackingSettings, TokenRows, micro_batches, plan_micro_batches
from ragen_jax.training.packing import pack_batches


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
  packing: PackingSettings | None,
  mesh: Mesh | None,
) -> Iterator[SftBatch]:
  """The micro-batches of a step with the conversations `rows` i64[n], placed on the mesh if there is one.

  Widths are multiples of `length_step`. Without packing, the row shards of the mesh divide `batch_size // 2`.
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
  if packing is None:
    together = max(batch_size // 2, 1)
    plans = plan_micro_batches(np.arange(len(rows)), length, mask.sum(axis=1), size=together, length_step=length_step)
  else:
    tokens = step.tokens if data.images is None else None
    (plans,) = pack_batches([np.arange(len(rows))], length, mask.sum(axis=1), packing, tokens)
    together = len(plans[0].bins) * plans[0].width / data.length.mean()
  yield from micro_batches(step, plans, mesh, _room_for_images(data, min(together, batch_size)))


def _room_for_images(data: SftExamples, together: float) -> dict[tuple[int, int], int]:
  """A number of images, by size, that a micro-batch of so many conversations seldom exceeds."""
  return {
    size: math.ceil(together * counts.mean() + 3 * math.sqrt(together * np.square(counts).mean()))
    for size, counts in data.image_counts.items()
  }
