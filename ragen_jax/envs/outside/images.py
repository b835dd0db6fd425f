"""Observations of text and images from environments outside JAX: their form, and checks of everything that arrives.

An environment whose options state a number and a size of images answers with a mapping instead of a text:

  {'text': 'The room now: <image>', 'images': [array]}

Each image is u8[height, width, 3]; behind HTTP it is a PNG file as base64. The mark <image> is the place of an image in
the text, in their order; without a mark, the images stand before the text.
"""

from __future__ import annotations

import base64
import dataclasses
import io
from collections.abc import Mapping
from typing import Any

import numpy as np

from ragen_jax.envs.drawing.tiles import IMAGE_MARK
from ragen_jax.envs.options import check_integer, is_integer
from ragen_jax.utils.errors import describe_error, one_line, short
from ragen_jax.utils.threads import Fault

MOST_IMAGES = 16
LARGEST_SIDE = 4096
LONGEST_OBSERVATION = 1 << 20  # characters; far beyond any context
_PNG_MODES = ('1', 'L', 'LA', 'P', 'RGB', 'RGBA')


@dataclasses.dataclass(frozen=True)
class ImageForm:
  """The number of images (at least 1) in every observation of an environment, and their size in pixels."""

  count: int
  height: int
  width: int


@dataclasses.dataclass(frozen=True, eq=False)
class ImageObservation:
  """A checked observation. Two are equal if their texts and all their pixels are.

  The text has one `IMAGE_MARK` for each image u8[height, width, 3], in order.
  """

  text: str
  images: tuple[np.ndarray, ...]

  __hash__ = None

  def __eq__(self, other: object) -> bool:
    return (
      isinstance(other, ImageObservation)
      and self.text == other.text
      and len(self.images) == len(other.images)
      and all(np.array_equal(a, b) for a, b in zip(self.images, other.images, strict=True))
    )


def check_image_options(env: str, images: Any, image_size: Any) -> ImageForm | None:
  """The form of the observations, or None for text without images, where `images` is 0 and `image_size` (0, 0).

  Raises ValueError if a value is not allowed; one line names it.
  """
  check_integer(env, 'images', images, 0, MOST_IMAGES)
  size = tuple(image_size) if isinstance(image_size, tuple | list) else ()
  least = 1 if images else 0
  most = LARGEST_SIDE if images else 0
  if len(size) != 2 or not all(is_integer(side) and least <= side <= most for side in size):
    allowed = f'(height, width), 1 to {LARGEST_SIDE} pixels each' if images else '(0, 0)'
    raise ValueError(f'{env}: image_size={one_line(image_size)}; allowed: {allowed}, with images={images}')
  return ImageForm(int(images), int(size[0]), int(size[1])) if images else None


def read_text(raw: Any, what: str = 'observation') -> str | Fault:
  """A checked text, of at most `LONGEST_OBSERVATION` characters. What UTF-8 cannot encode becomes question marks.

  `what` names it in a fault.
  """
  if not isinstance(raw, str):
    return Fault(f'{what} is not a string', short(raw))
  length = str.__len__(raw)  # of a subclass too
  if length > LONGEST_OBSERVATION:
    return Fault(f'{what} is longer than {LONGEST_OBSERVATION} characters', f'it has {length}')
  return str.encode(raw, 'utf-8', 'replace').decode('utf-8')


def read_image_observation(raw: Any, form: ImageForm) -> ImageObservation | Fault:
  """A checked observation of this form, from {'text': str, 'images': [array, ...]}; the arrays are copied."""
  if not isinstance(raw, Mapping) or not isinstance(raw.get('text'), str) or 'images' not in raw:
    return Fault("observation is not {'text': text, 'images': [...]}", one_line(type(raw).__name__, str))
  images = raw['images']
  if not isinstance(images, tuple | list):
    return Fault('images are not a list', one_line(type(images).__name__, str))
  if len(images) != form.count:
    return Fault(f'observation has {len(images)} images, must have {form.count}')
  own = []
  for i, image in zip(range(form.count), images, strict=True):
    if isinstance(image, Fault):
      return Fault(image.kind, f'image {i}: {image.detail}')
    fault = _check_array(i, image, form)
    if fault is None:
      own.append(np.array(image))
      fault = _check_array(i, own[i], form)  # a subclass of array may state another size than it has
    if fault is not None:
      return fault
  text = read_text(raw['text'])
  if isinstance(text, Fault):
    return text
  marks = text.count(IMAGE_MARK)
  if marks not in (0, form.count):
    return Fault(f'observation has {marks} marks {IMAGE_MARK}, must have {form.count} or none')
  if not marks:
    text = IMAGE_MARK * form.count + ('\n' + text if text else '')
  return ImageObservation(text, tuple(own))


def _check_array(number: int, image: Any, form: ImageForm) -> Fault | None:
  if not isinstance(image, np.ndarray):
    return Fault('image is not a NumPy array', f'image {number} is {one_line(type(image).__name__, str)}')
  if image.dtype != np.uint8:
    return Fault('image is not of uint8', f'image {number} is of {image.dtype}')
  wanted = (form.height, form.width, 3)
  if image.shape != wanted:
    return Fault('image has another size', f'image {number} is {image.shape}, must be {wanted}')
  return None


def decode_images(raw: Any, form: ImageForm) -> Any:
  """An observation from JSON with its PNG files in base64 as arrays, or as faults; anything else is left as it is."""
  if not isinstance(raw, Mapping) or not isinstance(raw.get('images'), list):
    return raw
  return {**raw, 'images': [_decode_png(image, form) for image in raw['images'][: form.count + 1]]}


def _decode_png(data: Any, form: ImageForm) -> np.ndarray | Fault:
  """u8[height, width, 3] from a PNG file in base64. Transparency is ignored. Large files are not decompressed."""
  from PIL import Image, UnidentifiedImageError

  if not isinstance(data, str):
    return Fault('image is not a PNG file in base64', one_line(type(data).__name__, str))
  try:
    with Image.open(io.BytesIO(base64.b64decode(data, validate=True)), formats=('PNG',)) as image:
      width, height = image.size
      if (height, width) != (form.height, form.width):
        wanted = (form.height, form.width, 3)
        return Fault('image has another size', f'it is {(height, width, 3)}, must be {wanted}')
      if image.mode not in _PNG_MODES:
        return Fault('image has another kind of colours', f'{image.mode}, must be one of {", ".join(_PNG_MODES)}')
      return np.array(image.convert('RGB'))
  except UnidentifiedImageError:
    return Fault('image is not a PNG file in base64', 'another kind of file')
  except Exception as e:  # noqa: BLE001, damaged files make Pillow raise many types, and the fault is of one row
    return Fault('image is not a PNG file in base64', describe_error(e))
