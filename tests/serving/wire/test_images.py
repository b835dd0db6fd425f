"""Images of requests: data URLs to pixels; everything else is one line with the status 400."""

from __future__ import annotations

import base64
import dataclasses
import io
import re

import numpy as np
import pytest
from PIL import Image

from ragen_jax.models.vision.processor import preprocess
from ragen_jax.serving.errors import ApiError
from ragen_jax.serving.wire import images
from ragen_jax.serving.wire.images import ImageLimits, RequestImages
from tests.support.images import data_url
from tests.support.vision import image_of
from tests.support.wire import IMAGES, PROCESSOR

AT = 'messages[0].content[1].image_url.url'


def _read(url, limits: ImageLimits = IMAGES):
  return RequestImages(limits)(url, AT)


def _file(data: bytes) -> str:
  return f'data:image/png;base64,{base64.b64encode(data).decode()}'


@pytest.mark.parametrize(('kind', 'options'), [('PNG', {}), ('WEBP', {'lossless': True}), ('JPEG', {'quality': 95})])
def test_pictures_are_resized_as_the_processor_does(kind, options):
  pixels = image_of(50, 34) if kind != 'JPEG' else np.full((50, 34, 3), (20, 90, 200), np.uint8)
  read = _read(data_url(pixels, kind, **options))
  patches, grid = preprocess(pixels, PROCESSOR)
  assert read.image.shape == (48, 32, 3) and read.columns == 6 * 4 == len(patches) // 4 and grid == (12, 8)
  ours, _ = preprocess(read.image, PROCESSOR)  # which needs no resizing any more
  np.testing.assert_allclose(ours, patches, rtol=0, atol=0.05 if kind == 'JPEG' else 0)


def test_large_pictures_are_reduced_to_the_tokens_of_an_image():
  read = _read(data_url(image_of(200, 100)))
  smaller = dataclasses.replace(PROCESSOR, max_pixels=64 * 64)
  patches, _ = preprocess(image_of(200, 100), smaller)
  assert read.columns == len(patches) // 4 <= 64
  np.testing.assert_array_equal(preprocess(read.image, PROCESSOR)[0], patches)


def test_pictures_are_turned_and_lose_their_transparency_as_transformers_loads_them():
  pixels = image_of(16, 32)
  turned = Image.Exif()
  turned[0x0112] = 6  # a quarter turn clockwise
  np.testing.assert_array_equal(_read(data_url(pixels, exif=turned)).image, np.rot90(pixels, -1))
  clear = np.dstack([pixels, np.full(pixels.shape[:2], 7, np.uint8)])
  np.testing.assert_array_equal(_read(data_url(clear)).image, pixels)


def _animated() -> str:
  file, frames = io.BytesIO(), [Image.fromarray(image_of(16, 16, seed)) for seed in range(2)]
  frames[0].save(file, 'PNG', save_all=True, append_images=frames[1:])
  return _file(file.getvalue())


def test_the_case_of_a_header_does_not_matter():
  header, _, data = data_url(image_of(16, 16)).partition(',')
  np.testing.assert_array_equal(_read(f'{header.upper()},{data}').image, _read(f'{header},{data}').image)


@pytest.mark.parametrize(
  ('url', 'told'),
  [
    (None, 'must be a data URL'),
    ('data:image/pñg;base64,aGk=', 'must be a data URL'),
    (7, 'must be a data URL'),
    ('https://example.org/a.png', 'addresses are not fetched'),
    ('http://127.0.0.1/' + 'a' * 5000, 'addresses are not fetched'),
    ('file:///etc/passwd', 'addresses are not fetched'),
    ('data:text/plain;base64,aGk=', 'must be a data URL'),
    ('data:image/png,hello', 'must be a data URL'),
    ('data:image/png;base64,*no base64*', 'cannot be read'),
    ('data:image/png;base64,', 'is no picture'),
    (_file(b'no picture'), 'is no picture that can be read: must be PNG, JPEG, WEBP'),
    (_file(base64.b64decode(data_url(image_of(32, 32)).partition(',')[2])[:300]), 'cannot be read'),
    (data_url(image_of(16, 16), 'GIF'), 'is no picture'),
    (data_url(image_of(2, 600)), 'one side is more than 200 times the other'),
    (_animated(), 'the picture is animated'),
  ],
)  # fmt: skip
def test_what_is_no_picture_is_refused_in_one_line(url, told):
  with pytest.raises(ApiError, match=told) as e:
    _read(url)
  assert (e.value.status, e.value.param) == (400, AT) and e.value.message.startswith(AT)
  assert '\n' not in e.value.message and len(e.value.message) < 300 and '0x' not in e.value.message


def test_a_picture_with_too_many_pixels_is_not_decompressed(monkeypatch):
  url = data_url(np.zeros((4096, 4096, 3), np.uint8), 'WEBP', lossless=True)
  small = data_url(np.zeros((300, 200, 3), np.uint8))
  assert len(url) < 2000
  monkeypatch.setattr(Image.Image, 'load', lambda self: pytest.fail('it was decompressed'))
  told = 'the picture has 4096x4096 pixels: must have at most 8388608 in all'
  with pytest.raises(ApiError, match=f'^{re.escape(AT)}: {told}$'):
    _read(url)
  monkeypatch.setattr(images, 'MOST_PIXELS', 300 * 200 - 1)
  with pytest.raises(ApiError, match=r'200x300 pixels: must have at most 59999 in all$'):
    _read(small)


def test_a_picture_may_have_as_many_pixels_as_the_model_reads(monkeypatch):
  monkeypatch.setattr(images, 'MOST_PIXELS', 1000)
  pixels = image_of(64, 64)  # as many as 64 tokens have
  np.testing.assert_array_equal(_read(data_url(pixels)).image, pixels)
  for limits, most in ((IMAGES, 4096), (dataclasses.replace(IMAGES, tokens=10**6), 65536)):
    with pytest.raises(ApiError, match=f'must have at most {most} in all$'):
      _read(data_url(image_of(8, most // 8 + 1)), limits)


def test_a_request_has_so_many_images():
  reader = RequestImages(IMAGES)
  for _ in range(3):
    reader(data_url(image_of(16, 16)), AT)
  with pytest.raises(ApiError, match=r'is image 4 of the request: must have at most 3$'):
    reader('never looked at', AT)


def test_a_size_that_the_tower_does_not_read_as_it_is_is_refused():
  limits = ImageLimits(dataclasses.replace(PROCESSOR, max_pixels=64 * 64), count=1, tokens=64)
  with pytest.raises(ApiError, match='too long for its width'):
    _read(data_url(image_of(8, 1600)), limits)


def test_a_long_header_is_not_searched():
  read = _read(data_url(image_of(16, 16)).replace(';base64', ';name=a.png;base64'))
  assert read.columns == 4
  with pytest.raises(ApiError, match='must be a data URL'):
    _read(data_url(image_of(16, 16)).replace(';base64', ';a' * 200 + ';base64'))
