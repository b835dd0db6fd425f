"""Wire: images of requests, data URLs to the pixels that the model's vision tower reads."""

from __future__ import annotations

import base64
import dataclasses
import io
import re
from typing import Any

import numpy as np
from PIL import Image, ImageOps, UnidentifiedImageError

from ragen_jax.agent.segments import ImageSegment
from ragen_jax.models.vision.processor import ProcessorConfig, resize, smart_resize
from ragen_jax.serving.errors import bad_request, wrong_value
from ragen_jax.utils.errors import UserError, describe_error

# Pillow's readers of other formats have no use here.
FORMATS = ('PNG', 'JPEG', 'WEBP')
# Pixels of a picture before it is resized, unless the model reads more; a larger one is not decompressed. A file of 700
# bytes can have any number of pixels, and so many take 0.4 s of processor time and 150 MB.
MOST_PIXELS = 1 << 23
_LONGEST_HEADER = 200
_HEADER = re.compile(r'data:image/[\w.+-]+(;[\w.=+-]+)*;base64,', re.ASCII | re.IGNORECASE)


@dataclasses.dataclass(frozen=True)
class ImageLimits:
  """How images of requests become pixels: a request has at most `count` of them, with at most about `tokens` each; the
  `processor` is that of the model."""

  processor: ProcessorConfig
  count: int
  tokens: int

  @property
  def read_pixels(self) -> int:
    """Most pixels of an image after it is resized."""
    return min(self.processor.max_pixels, self.tokens * self.processor.factor**2)

  def size(self, height: int, width: int) -> tuple[int, int]:
    """The size that an image is resized to. UserError if it is too long for its width."""
    p = self.processor
    size = smart_resize(height, width, dataclasses.replace(p, max_pixels=self.read_pixels))
    if smart_resize(*size, p) != size:
      raise UserError(f'an image of {height}x{width} pixels is not read: it is too long for its width')
    return size


class RequestImages:
  """Reads the images of one request."""

  def __init__(self, limits: ImageLimits):
    self._limits = limits
    self._read = 0

  def __call__(self, url: Any, at: str) -> ImageSegment:
    """The image of a data URL, with the size that the processor gives it; `at` names the field.

    ApiError if the value is no data URL of a picture that can be read, or the request has too many images. Addresses
    are not fetched.
    """
    self._read += 1
    if self._read > self._limits.count:
      raise bad_request(at, f'{at}: is image {self._read} of the request: must have at most {self._limits.count}')
    header = _HEADER.match(url, 0, _LONGEST_HEADER) if isinstance(url, str) else None
    if header is None:
      shown = url[:60] if isinstance(url, str) else url
      allowed = "a data URL, such as 'data:image/png;base64,...'; addresses are not fetched"
      raise wrong_value(at, shown, allowed)
    try:
      most = max(MOST_PIXELS, self._limits.read_pixels)
      image = _decode(base64.b64decode(url[header.end() :], validate=True), most)
      image = resize(image, *self._limits.size(*image.shape[:2]))
    except UserError as e:
      raise bad_request(at, f'{at}: {e}') from e
    except UnidentifiedImageError as e:
      raise bad_request(at, f'{at}: is no picture that can be read: must be {", ".join(FORMATS)}') from e
    except Exception as e:
      raise bad_request(at, f'{at}: cannot be read as a picture ({describe_error(e)})') from e
    return ImageSegment(image, image.shape[0] * image.shape[1] // self._limits.processor.factor**2)


def _decode(data: bytes, most: int) -> np.ndarray:
  """u8[H, W, 3] from a file of at most so many pixels: turned as its EXIF data say, without transparency, as
  `transformers` loads images."""
  with Image.open(io.BytesIO(data), formats=FORMATS) as image:
    width, height = image.size
    if width * height > most:
      raise UserError(f'the picture has {width}x{height} pixels: must have at most {most} in all')
    if getattr(image, 'is_animated', False):
      raise UserError('the picture is animated: must be one picture')
    ImageOps.exif_transpose(image, in_place=True)
    return np.asarray(image if image.mode == 'RGB' else image.convert('RGB'))
