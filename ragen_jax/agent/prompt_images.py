"""What prompts with images show the policy, as the sampler takes them."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence

import numpy as np

from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.image_table_sizes import ImageTableSizes
from ragen_jax.models.rotary import AXES
from ragen_jax.models.vision.config import VisionConfig
from ragen_jax.models.vision.encoder import Encoder
from ragen_jax.models.vision.features import ImageColumns, stacked
from ragen_jax.models.vision.positions import feature_columns, rope_positions
from ragen_jax.models.vision.tower import Features


@dataclasses.dataclass(frozen=True)
class PromptImages:
  """The vision tower of a policy: its encoder, its shape, and the sizes of tables of features."""

  encoder: Encoder
  vision: VisionConfig
  room: ImageTableSizes

  def columns(self, prompts: Sequence[Prompt | None], seen: Mapping[bytes, Features], width: int) -> ImageColumns:
    """What the columns of fed rows read of images, on the host. Rows that are not fed have the prompt None.

    Positions count from the next position of each row. The size of the table of features depends on the number of
    prompts and `width` only.

    Args:
      seen: the features of images, by digest.
      width: columns of each row.

    Raises:
      UserError: the placeholders of a prompt are not those of its images.
    """
    digests = dict.fromkeys(span.segment.digest for p in prompts if p is not None for span in p.images)
    parts = [seen[digest] for digest in digests]
    counts = [len(part.embeddings) for part in parts]
    first = dict(zip(digests, (np.cumsum(counts) - counts).tolist(), strict=True))
    index = np.full((len(prompts), width), -1, np.int32)
    positions = np.zeros((len(prompts), width, AXES), np.int32)
    for row, prompt in enumerate(prompts):
      if prompt is None:
        continue
      ids = np.asarray(prompt.ids)
      grids = [self._grid(span.segment.image) for span in prompt.images]
      positions[row, : len(ids)], _ = rope_positions(ids, grids, self.vision)
      begins = [first[span.segment.digest] for span in prompt.images]
      index[row, : len(ids)] = feature_columns(ids, grids, self.vision, begins)
    rows = self.room.tokens(sum(counts), len(prompts), width, packed=False)
    return ImageColumns(index, positions, stacked(parts, rows, self.encoder.empty))

  def _grid(self, image: np.ndarray) -> tuple[int, int]:
    return image.shape[0] // self.vision.patch_size, image.shape[1] // self.vision.patch_size
