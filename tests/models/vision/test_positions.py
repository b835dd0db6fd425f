"""Positions on three axes against `transformers`, over turns, and placeholders that do not match their images."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.models import presets
from ragen_jax.models.vision.positions import feature_columns, image_starts, rope_positions
from ragen_jax.utils.errors import UserError
from tests.support.vision import conversation

_TOWER = presets.shape('qwen3-vl-2b', '').vision
_IMAGE = _TOWER.image_token_id
# Two text tokens, an image of 2 × 3 tokens between its marks, three text tokens, one of 2 × 2, two text tokens.
_ROW = np.array([1, 2, 3, *[_IMAGE] * 6, 4, 5, 6, 7, 8, *[_IMAGE] * 4, 9, 10, 11])
_GRIDS = ((4, 6), (4, 4))


def test_positions_of_a_row_by_hand():
  positions, after = rope_positions(_ROW, _GRIDS, _TOWER)
  assert positions[:, 0].tolist() == [0, 1, 2, *[3] * 6, 6, 7, 8, 9, 10, *[11] * 4, 13, 14, 15]
  assert positions[:, 1].tolist() == [0, 1, 2, 3, 3, 3, 4, 4, 4, 6, 7, 8, 9, 10, 11, 11, 12, 12, 13, 14, 15]
  assert positions[:, 2].tolist() == [0, 1, 2, 3, 4, 5, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 11, 12, 13, 14, 15]
  assert after == 16


def test_a_later_part_goes_on_where_the_part_before_ended():
  whole, end = rope_positions(_ROW, _GRIDS, _TOWER)
  # Behind the first image, whose last column has smaller positions than the one before it.
  for cut in (0, 3, 9, 12, 18, len(_ROW)):
    images = sum(start < cut for start in image_starts(_ROW, _GRIDS, _TOWER))
    first, after = rope_positions(_ROW[:cut], _GRIDS[:images], _TOWER)
    second, last = rope_positions(_ROW[cut:], _GRIDS[images:], _TOWER, start=after)
    np.testing.assert_array_equal(np.concatenate([first, second]), whole)
    assert last == end


def test_text_has_one_position_on_all_axes():
  positions, after = rope_positions(np.arange(1, 8), (), _TOWER, start=5)
  np.testing.assert_array_equal(positions, np.repeat(np.arange(5, 12), 3).reshape(7, 3))
  assert after == 12


def test_positions_are_those_of_transformers(pair):
  import torch

  cfg = pair.ours.cfg.vision
  for seed, grids in enumerate([((12, 18),), ((4, 6), (12, 4), (2, 2)), ((6, 4), (6, 4)), ()]):
    row = conversation(grids, 1, (4, 1, 3, 2)[: len(grids) + 1], seed=seed)
    tokens = torch.tensor(row.tokens)[None]
    expected, delta = pair.theirs.model.get_rope_index(
      tokens,
      (tokens == cfg.image_token_id).int(),
      torch.tensor([[1, *grid] for grid in grids]) if grids else None,
    )
    positions, after = rope_positions(row.tokens, row.grids, cfg)
    np.testing.assert_array_equal(positions, expected[:, 0].numpy().T)
    assert after == len(row.tokens) + int(delta.ravel()[0])


def test_columns_read_the_features_of_their_image():
  found = feature_columns(_ROW, _GRIDS, _TOWER, (20, 3))
  assert found.tolist() == [-1] * 3 + [20, 21, 22, 23, 24, 25] + [-1] * 5 + [3, 4, 5, 6] + [-1] * 3


@pytest.mark.parametrize(
  ('row', 'grids', 'message'),
  [
    (_ROW[:-4], _GRIDS, r'^9 image placeholders \(id 151655\) do not match 2 images of \[6, 4\] tokens$'),
    (np.append(_ROW, _IMAGE), _GRIDS, r'^11 image placeholders .* do not match 2 images'),
    (_ROW, _GRIDS[:1], r'^10 image placeholders .* do not match 1 images of \[6\] tokens$'),
    (_ROW[:3], _GRIDS, r'^0 image placeholders .* do not match 2 images'),
    (_ROW, _GRIDS[::-1], r'^the 6 placeholders of image 1 are not adjacent: they begin at column 7$'),
  ],
)
def test_placeholders_that_do_not_match_the_images_are_refused(row, grids, message):
  for function in (rope_positions, image_starts, lambda *args: feature_columns(*args, (0, 6))):
    with pytest.raises(UserError, match=message):
      function(row, grids, _TOWER)
