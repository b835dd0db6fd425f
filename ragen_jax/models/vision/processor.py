"""Computes patches from images, on the host or on the device, equal to `Qwen2VLImageProcessor` of `transformers`.

On the host, an image is first resized to a size that the tower can read. On the device, images must have such a size
already; the patches are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import math
import os
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from PIL import Image

from ragen_jax.models.vision.config import CHANNELS, VisionConfig
from ragen_jax.utils.errors import UserError

PROCESSOR_FILE = 'preprocessor_config.json'

_MAX_ASPECT_RATIO = 200
_BICUBIC = 3
_LEVELS = 256  # of a byte

# Steps that the processor always takes; a file that turns one off, or takes it otherwise, describes another one.
_STEPS = {'do_resize': True, 'do_rescale': True, 'do_normalize': True, 'do_convert_rgb': True, 'resample': _BICUBIC}


@dataclasses.dataclass(frozen=True)
class ProcessorConfig:
  """How images become patches; the sizes are those of `VisionConfig`.

  Attributes:
    min_pixels: the least number of pixels of an image; smaller ones are enlarged.
    max_pixels: the most pixels of an image; larger ones are reduced.
    mean: of each channel, subtracted from values in 0..1.
    std: of each channel, a divisor.
  """

  patch_size: int
  temporal_patch_size: int
  merge_size: int
  min_pixels: int
  max_pixels: int
  mean: tuple[float, ...]
  std: tuple[float, ...]

  @property
  def factor(self) -> int:
    """Pixels of a side of a token; sides of images are multiples of it."""
    return self.patch_size * self.merge_size


def read_processor(directory: str, vision: VisionConfig) -> ProcessorConfig:
  """Reads the `preprocessor_config.json` of a checkpoint.

  Raises:
    UserError: the file cannot be read, differs from the tower's shape, or describes another processor.
  """
  where = os.path.join(directory, PROCESSOR_FILE)
  try:
    with open(where, encoding='utf-8') as f:
      raw = json.load(f)
  except (OSError, ValueError) as e:
    raise UserError(f'{where}: cannot be read, and images need it ({e})') from e
  if not isinstance(raw, dict):
    raise UserError(f'{where}: must hold a JSON object, not {type(raw).__name__}')
  for ours, value in (('patch_size', vision.patch_size), ('temporal_patch_size', vision.temporal_patch_size),
                      ('merge_size', vision.merge_size)):  # fmt: skip
    if raw.get(ours, value) != value:
      raise UserError(f'{where}: {ours}={raw[ours]!r} differs from the {value} of vision_config in config.json')
  for field, value in _STEPS.items():
    if raw.get(field) is not None and raw[field] != value:
      raise UserError(f'{where}: {field}={raw[field]!r} is not supported; only {value!r} is')
  factor = raw.get('rescale_factor', 1 / 255)
  if not isinstance(factor, float) or not math.isclose(factor, 1 / 255):
    raise UserError(f'{where}: rescale_factor={factor!r} is not supported; only 1/255 is')
  least, most = _pixels(raw, where)
  mean, std = (_channels(raw, field, where) for field in ('image_mean', 'image_std'))
  return ProcessorConfig(vision.patch_size, vision.temporal_patch_size, vision.merge_size, least, most, mean, std)


def _pixels(raw: dict[str, Any], where: str) -> tuple[int, int]:
  """The least and the most pixels: `size`, whose edges are numbers of pixels, or the older `min_pixels`."""
  size = raw.get('size') or {}
  if not isinstance(size, dict):
    raise UserError(f'{where}: size={size!r} must be an object with shortest_edge and longest_edge, in pixels')
  found = []
  for old, edge in (('min_pixels', 'shortest_edge'), ('max_pixels', 'longest_edge')):
    # `transformers` lets the older field win.
    value = raw[old] if raw.get(old) is not None else size.get(edge)
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
      raise UserError(f'{where}: size.{edge}={value!r} must be a positive number of pixels')
    found.append(value)
  if found[0] > found[1]:
    raise UserError(f'{where}: size.shortest_edge={found[0]} must be at most size.longest_edge={found[1]}')
  return found[0], found[1]


def _channels(raw: dict[str, Any], field: str, where: str) -> tuple[float, ...]:
  value = raw.get(field)
  if not isinstance(value, list) or len(value) != CHANNELS or not all(isinstance(x, int | float) for x in value):
    raise UserError(f'{where}: {field}={value!r} must be {CHANNELS} numbers')
  found = tuple(float(x) for x in value)
  if not all(map(math.isfinite, found)) or (field == 'image_std' and min(found) <= 0):
    raise UserError(f'{where}: {field}={value!r} must be {CHANNELS} finite numbers, above 0 for image_std')
  return found


def smart_resize(height: int, width: int, cfg: ProcessorConfig) -> tuple[int, int]:
  """The size that an image is resized to: multiples of `cfg.factor`, with about the same aspect ratio.

  Raises:
    UserError: one side is more than 200 times as long as the other.
  """
  factor = cfg.factor
  if max(height, width) > _MAX_ASPECT_RATIO * min(height, width):
    raise UserError(
      f'an image of {height}x{width} pixels is not read: one side is more than {_MAX_ASPECT_RATIO} times the other'
    )
  rows, columns = round(height / factor), round(width / factor)
  if rows * columns * factor**2 > cfg.max_pixels:
    shrink = math.sqrt(height * width / cfg.max_pixels)
    rows, columns = (max(1, math.floor(side / shrink / factor)) for side in (height, width))
  elif rows * columns * factor**2 < cfg.min_pixels:
    grow = math.sqrt(cfg.min_pixels / (height * width))
    rows, columns = (math.ceil(side * grow / factor) for side in (height, width))
  return rows * factor, columns * factor


def grid_of(height: int, width: int, cfg: ProcessorConfig) -> tuple[int, int]:
  """Rows and columns of patches of an image of this size, after `smart_resize`."""
  new = smart_resize(height, width, cfg)
  return new[0] // cfg.patch_size, new[1] // cfg.patch_size


def token_count(grid: tuple[int, int], merge: int) -> int:
  """Number of tokens, that is of placeholders, of an image with this grid of patches."""
  return grid[0] * grid[1] // merge**2


def preprocess(image: np.ndarray, cfg: ProcessorConfig) -> tuple[np.ndarray, tuple[int, int]]:
  """The patches f32[P, values] of an image of any size, on the host, and their grid (rows, columns).

  Raises:
    UserError: the image is not u8[H, W, 3], or is too long for its width; see `smart_resize`.
  """
  image = np.asarray(image)
  if image.dtype != np.uint8 or image.ndim != 3 or image.shape[2] != CHANNELS or 0 in image.shape:
    raise UserError(f'an image must be u8[H, W, {CHANNELS}], not {image.dtype}{list(image.shape)}')
  image = resize(image, *smart_resize(*image.shape[:2], cfg))
  values = _normalized(cfg)[np.arange(CHANNELS), image]  # f32[H, W, 3]
  return _patchify(values, cfg), (image.shape[0] // cfg.patch_size, image.shape[1] // cfg.patch_size)


def resize(image: np.ndarray, height: int, width: int) -> np.ndarray:
  """A bicubic resize of u8[H, W, 3] to u8[height, width, 3]; versions of Pillow before 13 differ by a few levels."""
  return np.asarray(Image.fromarray(image).resize((width, height), Image.Resampling.BICUBIC))


def patches_of(images: jax.Array, cfg: ProcessorConfig) -> jax.Array:
  """The patches of images that need no resizing, on the device: u8[..., H, W, 3] -> f32[..., P, values].

  Raises:
    UserError: the processor would resize images of this size.
  """
  height, width = images.shape[-3:-1]
  new = smart_resize(height, width, cfg)
  if new != (height, width):
    raise UserError(
      f'images of {height}x{width} pixels would be resized to {new[0]}x{new[1]}; sides must be multiples of '
      f'{cfg.factor}, with {cfg.min_pixels} to {cfg.max_pixels} pixels in all'
    )
  # A table, because a compiled program may round a product and a division otherwise than the host.
  table = jnp.asarray(_normalized(cfg))
  return _patchify(table[jnp.arange(CHANNELS), images], cfg)


@functools.lru_cache(maxsize=8)
def _normalized(cfg: ProcessorConfig) -> np.ndarray:
  """The value of each byte in each channel: f32[3, 256]."""
  bytes_ = (np.arange(_LEVELS, dtype=np.float64) * (1 / 255)).astype(np.float32)
  mean, std = (np.array(x, np.float32)[:, None] for x in (cfg.mean, cfg.std))
  return (bytes_ - mean) / std


def _patchify(values: Any, cfg: ProcessorConfig) -> Any:
  """[..., H, W, 3] -> [..., P, values], in the order of `grids`; a patch lists channel, frame, row and column."""
  xp = jnp if isinstance(values, jax.Array) else np
  *batch, height, width, channels = values.shape
  m, p, t = cfg.merge_size, cfg.patch_size, cfg.temporal_patch_size
  n = len(batch)
  x = values.reshape(*batch, height // (m * p), m, p, width // (m * p), m, p, channels)
  x = x.transpose(*range(n), n, n + 3, n + 1, n + 4, n + 6, n + 2, n + 5)  # rows, columns, m, m, channels, p, p
  x = xp.broadcast_to(x[..., None, :, :], (*x.shape[:-2], t, p, p))
  return x.reshape(*batch, height * width // p**2, channels * t * p**2)
