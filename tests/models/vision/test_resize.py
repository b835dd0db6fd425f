"""Bicubic resizing against Pillow."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.models.vision.resize import resize
from tests.support.vision import image_of

# (rows, columns) before and after.
_ROWS_FIRST = [
  ((40, 61), (84, 56)), ((64, 64), (64, 32)), ((5, 90), (28, 90)), ((3, 2), (56, 28)), ((97, 211), (28, 56)),
  ((57, 61), (56, 56)), ((99, 50), (89, 45)),
]  # fmt: skip
# The height shrinks by more than twice as many pixels as the width.
_COLUMNS_FIRST = [((100, 37), (28, 112)), ((211, 97), (56, 28)), ((99, 50), (88, 45)), ((99, 50), (98, 50))]


@pytest.mark.parametrize(('sizes', 'since'), [(_ROWS_FIRST, 1), (_COLUMNS_FIRST, 13)], ids=['rows', 'columns'])
def test_bytes_are_those_of_pillow(sizes, since):
  pillow = pytest.importorskip('PIL', reason='the comparison of resized images needs Pillow')
  if int(pillow.__version__.split('.')[0]) < since:
    pytest.skip(f'Pillow before {since} resizes these in another order')
  from PIL import Image

  for i, (old, new) in enumerate(sizes):
    image = image_of(*old, seed=i)
    expected = Image.fromarray(image).resize(new[::-1], Image.Resampling.BICUBIC)
    np.testing.assert_array_equal(resize(image, *new), np.asarray(expected), err_msg=f'{old} -> {new}')


def test_an_image_of_the_size_that_is_asked_for_is_left_as_it_is():
  image = image_of(30, 20)
  np.testing.assert_array_equal(resize(image, 30, 20), image)


def test_a_flat_image_stays_flat():
  image = np.full((13, 29, 3), (7, 130, 255), np.uint8)
  np.testing.assert_array_equal(resize(image, 56, 28), np.broadcast_to(image[0, 0], (56, 28, 3)))
