"""Bicubic resizing: the bytes of Pillow 13, which were those of a NumPy implementation of its rules."""

from __future__ import annotations

import hashlib

import numpy as np

from ragen_jax.models.vision.processor import resize
from tests.support.vision import image_of

# (rows, columns) before and after. The heights of the last four shrink by more than twice as many pixels as the widths,
# and versions of Pillow before 13 then resize in another order.
_SIZES = [
  ((40, 61), (84, 56)), ((64, 64), (64, 32)), ((5, 90), (28, 90)), ((3, 2), (56, 28)), ((97, 211), (28, 56)),
  ((57, 61), (56, 56)), ((99, 50), (89, 45)),
  ((100, 37), (28, 112)), ((211, 97), (56, 28)), ((99, 50), (88, 45)), ((99, 50), (98, 50)),
]  # fmt: skip


def test_bytes_are_those_of_every_run_so_far():
  found = [resize(image_of(*old, seed=i), *new) for i, (old, new) in enumerate(_SIZES)]
  assert [x.shape[:2] for x in found] == [new for _, new in _SIZES]
  digest = hashlib.sha256(b''.join(x.tobytes() for x in found)).hexdigest()
  assert digest == 'c2a3ab869b49151afa5a761b3bdc48922a9fc31fadfd31527d6783331f208ce0'


def test_an_image_of_the_size_that_is_asked_for_is_left_as_it_is():
  image = image_of(30, 20)
  np.testing.assert_array_equal(resize(image, 30, 20), image)
