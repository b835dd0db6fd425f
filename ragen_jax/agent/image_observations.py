"""Observations with images: their size for a model's vision tower, and the segments that prompts take."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ragen_jax.agent.segments import ImageSegment, Segments, join
from ragen_jax.envs.drawing.tiles import IMAGE_MARK, MAX_TILE, MIN_TILE
from ragen_jax.envs.spec import EnvSpec
from ragen_jax.models.vision.processor import ProcessorConfig, resize, smart_resize
from ragen_jax.utils.errors import UserError


def shows_images(spec: EnvSpec) -> bool:
  """Whether the observations of an environment contain images."""
  return spec.tile is not None or (spec.env.is_outside and spec.env.image_form is not None)


def tile_of(spec: EnvSpec, processor: ProcessorConfig) -> int:
  """Pixels of a side of the tiles of a board that is shown as an image; an image of such tiles is not resized.

  With `spec.tile` 0, a tile is the smallest whole number of visual tokens. UserError if the processor would resize it.
  """
  rows, columns = spec.env.image_grid
  sizes = [spec.tile] if spec.tile else [*range(processor.factor, MAX_TILE + 1, processor.factor)] or [MAX_TILE]
  for tile in sizes:
    size = (rows * tile, columns * tile)
    if smart_resize(*size, processor) == size:
      return tile
  others = [t for t in range(MIN_TILE, MAX_TILE + 1) if _is_kept(rows * t, columns * t, processor)]
  allowed = f'allowed: {", ".join(map(str, others))}' if others else 'no tile fits this board'
  new = smart_resize(*size, processor)
  raise UserError(
    f'envs.{spec.tag}.tile={spec.tile}: the processor of the model would resize images of {size[0]}x{size[1]} pixels '
    f'to {new[0]}x{new[1]}; {allowed}'
  )


def observed_images(spec: EnvSpec, processor: ProcessorConfig) -> tuple[int, tuple[int, int]]:
  """Number of images of an observation, and their (height, width) in pixels as the tower reads them."""
  if spec.tile is not None:
    rows, columns = spec.env.image_grid
    tile = tile_of(spec, processor)
    return spec.env.image_count, (rows * tile, columns * tile)
  form = spec.env.image_form
  return form.count, smart_resize(form.height, form.width, processor)


def image_columns(spec: EnvSpec, processor: ProcessorConfig) -> int:
  """Columns of the images of an observation, with the tokens before and after each; 0 without images."""
  if not shows_images(spec):
    return 0
  count, size = observed_images(spec, processor)
  return count * (size[0] * size[1] // processor.factor**2 + 2)


def _is_kept(height: int, width: int, processor: ProcessorConfig) -> bool:
  return smart_resize(height, width, processor) == (height, width)


def check_images(spec: EnvSpec, processor: ProcessorConfig) -> None:
  """Raises UserError if a model cannot read the images of an environment."""
  if spec.tile is not None:
    tile_of(spec, processor)
  elif shows_images(spec):
    form = spec.env.image_form
    try:
      smart_resize(form.height, form.width, processor)
    except UserError as e:
      raise UserError(f'envs.{spec.tag}.image_size={(form.height, form.width)}: {e}') from e


def with_images(text: str, images: Sequence[np.ndarray], processor: ProcessorConfig) -> Segments:
  """A text whose marks are replaced by images u8[H, W, 3], which are resized to the size that the tower reads.

  The text has as many marks `IMAGE_MARK` as there are images; further ones stay text.
  """
  pieces = text.split(IMAGE_MARK, len(images))
  segments = join(pieces[0])
  for image, piece in zip(images, pieces[1:], strict=True):
    image = resize(image, *smart_resize(*image.shape[:2], processor))
    columns = image.shape[0] * image.shape[1] // processor.factor**2
    segments = join(segments, (ImageSegment(image, columns),), piece)
  return segments
