"""Pieces of rows with images: the positions that the device adds to its own, and the tokens that columns read."""

from __future__ import annotations

import itertools
import random

import numpy as np
import pytest

from ragen_jax.agent.segments import ImageSegment
from ragen_jax.models.vision.positions import rope_positions
from ragen_jax.models.vision.tower import Features
from ragen_jax.serving.engine.eyes import Eyes, RowImages
from ragen_jax.utils.errors import UserError
from tests.models.vision.test_encoder import _TOWER as TOWER
from tests.support.vision import columns_of

_PAD = TOWER.image_token_id
_SIDE = TOWER.patch_size * TOWER.merge_size


class _Encoder:
  """Features that tell an image and its token; `seen` counts images."""

  empty = Features(np.zeros((0, 2), np.float32), np.zeros((3, 0, 2), np.float32))

  def __init__(self):
    self.seen = []

  def __call__(self, tower, images):
    self.seen += [int(x[0, 0, 0]) for x in images]
    found = []
    for x in images:
      count = x.shape[0] * x.shape[1] // _SIDE**2
      tokens = np.stack([np.full(count, x[0, 0, 0]), np.arange(count)], axis=1).astype(np.float32)
      found.append(Features(tokens, np.stack([tokens, 2 * tokens, 3 * tokens])))
    return found


def _image(number: int, rows: int, columns: int) -> ImageSegment:
  return ImageSegment(np.full((_SIDE * rows, _SIDE * columns, 3), number, np.uint8), rows * columns)


def _row(*parts):
  return columns_of(parts, _PAD)


def test_pieces_of_a_row_give_the_positions_of_the_whole_row():
  ids, spans = _row(5, 6, _image(1, 2, 3), 7, 8, 9, _image(2, 3, 1), 5)
  sampled = [5, 6, 7]
  grids = [(2 * TOWER.merge_size, 3 * TOWER.merge_size), (3 * TOWER.merge_size, TOWER.merge_size)]
  whole, _ = rope_positions(np.asarray(ids + sampled), grids, TOWER)
  row, rng, n = RowImages(ids, spans, TOWER), random.Random(0), len(ids) + len(sampled)
  for _ in range(50):
    rotary = 0  # as `decode.extend` counts it
    for start, stop in itertools.pairwise(sorted({0, n, *rng.sample(range(1, n), rng.randrange(n - 1))})):
      assert row.rotary(start) == rotary
      shown = row.piece(start, stop)
      positions = np.arange(stop - start)[:, None].repeat(3, axis=1) if shown is None else shown.positions
      np.testing.assert_array_equal(rotary + positions, whole[start:stop])
      rotary += max(int(positions.max()) + 1, 0)
    assert row.rotary(n) == rotary


def test_columns_of_pieces_read_the_tokens_of_their_images():
  first, second = _image(1, 2, 3), _image(2, 3, 1)
  row, other = (RowImages(*_row(*parts), TOWER) for parts in ([5, first, 6, second, first, 7], [second, 5, 6]))
  encoder = _Encoder()
  pieces = [row.piece(3, 12), None, other.piece(0, 5)]
  columns = Eyes(encoder, TOWER).columns('tower', pieces, 10)
  assert encoder.seen == [1, 2], 'each image once'
  assert columns.features.embeddings.shape == (30, 2) and columns.features.deepstack.shape == (3, 30, 2)
  expected = [
    [(1, 2), (1, 3), (1, 4), (1, 5), 0, (2, 0), (2, 1), (2, 2), (1, 0), 0],
    [0] * 10,
    [(2, 0), (2, 1), (2, 2), 0, 0, 0, 0, 0, 0, 0],
  ]
  for r, wanted in enumerate(expected):
    for c, token in enumerate(wanted):
      at = columns.index[r, c]
      assert (at == -1) == (token == 0)
      if token:
        assert tuple(columns.features.embeddings[at]) == token
        np.testing.assert_array_equal(columns.features.deepstack[:, at], np.outer([1, 2, 3], token))
  np.testing.assert_array_equal(columns.positions[1], np.arange(10)[:, None].repeat(3, axis=1))
  np.testing.assert_array_equal(columns.positions[0, :9], row.piece(3, 12).positions)
  nothing = Eyes(encoder, TOWER).columns('tower', [None], 4)
  assert (nothing.index == -1).all() and nothing.features.embeddings.shape == (4, 2)


def test_images_that_are_not_those_of_the_placeholders_are_an_error():
  ids, spans = _row(5, _image(1, 2, 3), 6)
  with pytest.raises(UserError, match='image placeholders'):
    RowImages(ids[:-2], spans, TOWER)
