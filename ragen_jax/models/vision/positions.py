"""Rotary positions of columns on the axes time, height and width, and the placeholder ids of images in rows."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragen_jax.models.rotary import AXES
from ragen_jax.models.vision.config import VisionConfig
from ragen_jax.utils.errors import UserError


def image_starts(tokens: np.ndarray, grids: Sequence[tuple[int, int]], cfg: VisionConfig) -> list[int]:
  """The column of the first placeholder of each image of a row i32[T] without padding; the grids are in order.

  Raises:
    UserError: the placeholders are not those of the images.
  """
  counts = [rows * columns // cfg.merge_size**2 for rows, columns in grids]
  places = np.flatnonzero(np.asarray(tokens) == cfg.image_token_id)
  if len(places) != sum(counts):
    raise UserError(
      f'{len(places)} image placeholders (id {cfg.image_token_id}) do not match {len(counts)} images of {counts} tokens'
    )
  starts, used = [], 0
  for image, count in enumerate(counts):
    own = places[used : used + count]
    if own[-1] - own[0] != count - 1:
      raise UserError(f'the {count} placeholders of image {image} are not adjacent: they begin at column {own[0]}')
    starts.append(int(own[0]))
    used += count
  return starts


def rope_positions(
  tokens: np.ndarray, grids: Sequence[tuple[int, int]], cfg: VisionConfig, start: int = 0
) -> tuple[np.ndarray, int]:
  """The rotary positions i32[T, 3] of a row, or of its next part, and the position of the next column.

  A text column has the same position on all axes. An image has one position in time; its rows and columns count from
  it. The column after an image has the position after the largest one, so an image takes as many positions as its
  longer side has tokens.

      text, image of 2 × 3 tokens, text      time    0  1 1 1 1 1 1  4
                                             height  0  1 1 1 2 2 2  4
                                             width   0  1 2 3 1 2 3  4

  `tokens` i32[T] have no padding, and images are complete; the grids are in their order. `start` is the position of the
  first column: 0, or the one that the row's part before returned.

  Raises:
    UserError: the placeholders are not those of the images.
  """
  advance = np.ones(len(tokens), np.int64)
  within = np.zeros((len(tokens), AXES), np.int64)
  for first, (rows, columns) in zip(image_starts(tokens, grids, cfg), grids, strict=True):
    rows, columns = rows // cfg.merge_size, columns // cfg.merge_size
    stop = first + rows * columns
    within[first:stop, 1] = np.repeat(np.arange(rows), columns)
    within[first:stop, 2] = np.tile(np.arange(columns), rows)
    advance[first:stop] = 0
    advance[stop - 1] = max(rows, columns)
  before = start + np.cumsum(advance) - advance
  # Columns of an image begin where it begins: only its last column advances.
  return (before[:, None] + within).astype(np.int32), int(start + advance.sum())


def feature_columns(
  tokens: np.ndarray, grids: Sequence[tuple[int, int]], cfg: VisionConfig, first: Sequence[int]
) -> np.ndarray:
  """Which row of a table of features each column of a row i32[T] without padding reads; -1 in text columns.

  `first` has the row of the table with the first token of each image; an image's tokens follow one another.

  Raises:
    UserError: the placeholders are not those of the images.
  """
  index = np.full(len(tokens), -1, np.int32)
  for column, (rows, columns), begin in zip(image_starts(tokens, grids, cfg), grids, first, strict=True):
    count = rows * columns // cfg.merge_size**2
    index[column : column + count] = begin + np.arange(count)
  return index
