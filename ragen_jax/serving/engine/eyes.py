"""Engine: images of prompts: rotary positions of a row with images, and what the columns of fed rows read of them."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from ragen_jax.agent.segments import ImageSegment, ImageSpan
from ragen_jax.models.rotary import AXES
from ragen_jax.models.vision.config import VisionConfig
from ragen_jax.models.vision.encoder import Encoder
from ragen_jax.models.vision.features import ImageColumns, stacked
from ragen_jax.models.vision.positions import rope_positions
from ragen_jax.models.vision.tower import Features


@dataclasses.dataclass(frozen=True)
class ImagePart:
  """Tokens of an image in a piece of a row that is fed, from a column of the piece on."""

  column: int
  image: ImageSegment
  tokens: slice


@dataclasses.dataclass(frozen=True)
class Shown:
  """What a piece of a row shows: rotary positions i32[n, 3] of its columns, counted from the row's next position, and
  images."""

  positions: np.ndarray
  parts: tuple[ImagePart, ...]


class RowImages:
  """The images of a row, and the rotary positions of its columns, also of those behind the prompt."""

  def __init__(self, ids: Sequence[int], images: Sequence[ImageSpan], vision: VisionConfig):
    """Takes the ids of the prompt; UserError if its placeholders are not those of the images."""
    grids = [tuple(side // vision.patch_size for side in span.segment.image.shape[:2]) for span in images]
    self._images = images
    self._positions, self._next = rope_positions(np.asarray(ids), grids, vision)

  def rotary(self, columns: int) -> int:
    """The rotary position after the first `columns` columns, as the device counts it."""
    if columns > len(self._positions):
      return self._next + columns - len(self._positions)
    return int(self._positions[:columns].max(initial=-1)) + 1

  def piece(self, start: int, stop: int) -> Shown | None:
    """What the columns from `start` to `stop` show; None for text, whose positions the device knows."""
    parts = []
    for span in self._images:
      first, end = max(span.start, start), min(span.stop, stop)
      if first < end:
        parts.append(ImagePart(first - start, span.segment, slice(first - span.start, end - span.start)))
    if not parts:
      return None
    behind = np.arange(max(stop - len(self._positions), 0), dtype=np.int32) + self._next
    positions = np.concatenate([self._positions[start:stop], np.repeat(behind[:, None], AXES, axis=1)])
    return Shown(positions - self.rotary(start), tuple(parts))


@dataclasses.dataclass(frozen=True)
class Eyes:
  """The vision tower of the policy of an engine."""

  encoder: Encoder
  vision: VisionConfig

  def columns(self, tower: Any, pieces: Sequence[Shown | None], width: int) -> ImageColumns:
    """What the columns of fed rows read, on the host; `tower` are its weights. A row without images shows None.

    The table of features has a row for each column, so that its size follows from the shape of the fed rows.
    """
    seen = {part.image.digest: part.image.image for shown in pieces if shown for part in shown.parts}
    found = dict(zip(seen, self.encoder(tower, list(seen.values())), strict=True)) if seen else {}
    index = np.full((len(pieces), width), -1, np.int32)
    positions = np.tile(np.arange(width, dtype=np.int32)[:, None], (len(pieces), 1, AXES))
    tokens: list[Features] = []
    first = 0
    for row, shown in enumerate(pieces):
      if shown is None:
        continue
      positions[row, : len(shown.positions)] = shown.positions
      for part in shown.parts:
        tokens.append(jax.tree.map(lambda x, part=part: x[..., part.tokens, :], found[part.image.digest]))
        count = part.tokens.stop - part.tokens.start
        index[row, part.column : part.column + count] = first + np.arange(count)
        first += count
    return ImageColumns(index, positions, stacked(tokens, index.size, self.encoder.empty))
