"""Patches against the processor of `transformers`, the device's path against the host's, and refused files."""

from __future__ import annotations

import dataclasses
import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models import presets
from ragen_jax.models.vision.config import QWEN2_5_VL, QWEN3_VL
from ragen_jax.models.vision.processor import (
  ProcessorConfig,
  grid_of,
  patches_of,
  preprocess,
  read_processor,
  smart_resize,
  token_count,
)
from ragen_jax.utils.errors import UserError
from tests.support.vision import image_of, write_processor

_TOWERS = {
  QWEN2_5_VL: presets.shape('qwen2.5-vl-3b', '').vision,
  QWEN3_VL: presets.shape('qwen3-vl-2b', '').vision,
}


@pytest.fixture(params=_TOWERS)
def family(request) -> str:
  return request.param


@pytest.fixture
def processor(family, tmp_path) -> ProcessorConfig:
  write_processor(tmp_path, family)
  return read_processor(str(tmp_path), _TOWERS[family])


def test_patches_are_those_of_transformers(processor, tmp_path, transformers):
  theirs = transformers.models.qwen2_vl.image_processing_pil_qwen2_vl.Qwen2VLImageProcessorPil.from_pretrained(tmp_path)
  # As they are, enlarged, reduced, and resized to sides that tokens fill; none is square. Every Pillow resizes these in
  # the same order (`test_resize` has others).
  sizes = [(112, 168), (57, 61), (30, 90), (300, 600), (700, 1100), (101, 333)]
  for i, (height, width) in enumerate(sizes):
    image = image_of(height, width, seed=i)
    expected = theirs([image], return_tensors='np')
    patches, grid = preprocess(image, processor)
    assert (1, *grid) == tuple(expected['image_grid_thw'][0])
    assert grid == grid_of(height, width, processor)
    np.testing.assert_allclose(patches, expected['pixel_values'], rtol=0, atol=1e-6)


def test_the_device_gives_the_numbers_of_the_host_to_the_bit(processor):
  f = processor.factor
  images = np.stack([image_of(3 * f, 5 * f, seed=i) for i in range(4)]).reshape(2, 2, 3 * f, 5 * f, 3)
  found = jax.jit(lambda x: patches_of(x, processor))(images)
  for i in np.ndindex(2, 2):
    np.testing.assert_array_equal(found[i], preprocess(images[i], processor)[0])


def test_the_device_resizes_no_image(processor):
  f = processor.factor
  for size in ((3 * f, 5 * f - 1), (f, f), (20 * f, 20 * f)):
    with pytest.raises(
      UserError, match=rf'^images of {size[0]}x{size[1]} pixels would be resized to .*multiples of {f}'
    ):
      patches_of(jnp.zeros((1, *size, 3), jnp.uint8), processor)


def test_sizes_of_images():
  """Sides and tokens of square images, with the limits of the published files."""
  qwen2_5 = ProcessorConfig(14, 2, 2, 3136, 12_845_056, (0.0,) * 3, (1.0,) * 3)
  qwen3 = ProcessorConfig(16, 2, 2, 65_536, 16_777_216, (0.0,) * 3, (1.0,) * 3)
  expected = {
    56: (56, 4, 256, 64), 84: (84, 9, 256, 64), 96: (84, 9, 256, 64), 128: (140, 25, 256, 64), 160: (168, 36, 256, 64),
    224: (224, 64, 256, 64), 300: (308, 121, 288, 81), 336: (336, 144, 320, 100), 512: (504, 324, 512, 256),
  }  # fmt: skip
  for side, values in expected.items():
    found = []
    for cfg in (qwen2_5, qwen3):
      height, width = smart_resize(side, side, cfg)
      assert height == width
      found += [height, token_count(grid_of(side, side, cfg), cfg.merge_size)]
    assert tuple(found) == values, side
  # Half a token is rounded to an even number, as Python does.
  assert smart_resize(70, 98, qwen2_5) == (56, 112)
  assert smart_resize(6000, 3000, dataclasses.replace(qwen2_5, max_pixels=28 * 28 * 50)) == (280, 140)


def test_images_that_are_not_read(processor):
  with pytest.raises(UserError, match=r'^an image of 10x2001 pixels is not read: .*200 times'):
    preprocess(np.zeros((10, 2001, 3), np.uint8), processor)
  preprocess(np.zeros((10, 2000, 3), np.uint8), processor)
  for image, said in (
    (np.zeros((8, 8, 4), np.uint8), r'uint8\[8, 8, 4\]'),
    (np.zeros((8, 8, 3)), r'float64\[8, 8, 3\]'),
  ):
    with pytest.raises(UserError, match=rf'^an image must be u8\[H, W, 3\], not {said}$'):
      preprocess(image, processor)


@pytest.mark.parametrize(
  ('change', 'message'),
  [
    ({'patch_size': 8}, r'patch_size=8 differs from the 1[46] of vision_config'),
    ({'merge_size': 1}, r'merge_size=1 differs from the 2 of vision_config'),
    ({'temporal_patch_size': 1}, r'temporal_patch_size=1 differs from the 2'),
    ({'do_normalize': False}, r'do_normalize=False is not supported; only True is'),
    ({'resample': 2}, r'resample=2 is not supported; only 3 is'),
    ({'rescale_factor': 1.0}, r'rescale_factor=1.0 is not supported; only 1/255 is'),
    ({'image_mean': [0.5]}, r'image_mean=\[0.5\] must be 3 numbers'),
    ({'min_pixels': None, 'size': {'longest_edge': 10**6}}, r'size.shortest_edge=None must be a positive number'),
    ({'size': 448}, r'size=448 must be an object with shortest_edge and longest_edge'),
    ({'min_pixels': 100, 'max_pixels': 5}, r'size.shortest_edge=100 must be at most size.longest_edge=5'),
    ({'image_std': [0.5, 0, 0.5]}, r'image_std=\[0.5, 0, 0.5\] must be 3 finite numbers, above 0'),
    ({'image_mean': [0.5, float('nan'), 0.5]}, r'image_mean=.* must be 3 finite numbers'),
  ],
)
def test_processors_that_are_not_ours_are_refused(tmp_path, family, change, message):
  write_processor(tmp_path, family, **change)
  with pytest.raises(UserError, match=message) as error:
    read_processor(str(tmp_path), _TOWERS[family])
  assert '\n' not in str(error.value) and 'preprocessor_config.json' in str(error.value)


def test_a_missing_processor_is_one_line(tmp_path, family):
  with pytest.raises(UserError, match=r'preprocessor_config\.json: cannot be read, and images need it'):
    read_processor(str(tmp_path), _TOWERS[family])
  (tmp_path / 'preprocessor_config.json').write_text(json.dumps(['a']))
  with pytest.raises(UserError, match=r'preprocessor_config\.json: must hold a JSON object'):
    read_processor(str(tmp_path), _TOWERS[family])
