"""What fed prompts read of images: rows of one table, and positions from the row's next one on."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.agent.context_manager import Prompt
from ragen_jax.agent.image_table_sizes import ImageCounts, ImageTableSizes
from ragen_jax.agent.prompt_images import PromptImages
from ragen_jax.agent.segments import ImageSegment
from ragen_jax.models.vision.tower import Features
from ragen_jax.utils.errors import UserError
from tests.models.vision.test_encoder import _TOWER as TOWER
from tests.support.vision import columns_of

_PAD = TOWER.image_token_id
# Images of three tokens, in up to four observations.
_ROOM = ImageTableSizes((ImageCounts((8, 24), 1, 3, 4),))


class _Encoder:
  empty = Features(np.zeros((0, 3), np.float32), np.zeros((2, 0, 3), np.float32))


def _image(number: int, rows: int, columns: int) -> tuple[ImageSegment, Features]:
  """An image of so many tokens, and features that tell its number and the token."""
  count = rows * columns
  tokens = np.stack([np.full(count, number), np.arange(count), np.zeros(count)], axis=1).astype(np.float32)
  pixels = np.full((8 * rows, 8 * columns, 3), number, np.uint8)
  return ImageSegment(pixels, count), Features(tokens, np.stack([tokens, -tokens]))


def _prompt(*parts) -> Prompt:
  """Token ids, and images in their places."""
  ids, spans = columns_of(parts, _PAD)
  return Prompt(tuple(ids), True, tuple(spans))


def test_each_image_is_in_the_table_once_and_columns_read_its_tokens():
  (wide, of_wide), (tall, of_tall), (unused, of_unused) = _image(1, 1, 3), _image(2, 2, 1), _image(3, 1, 1)
  seen = {wide.digest: of_wide, unused.digest: of_unused, tall.digest: of_tall}
  prompts = [_prompt(9, tall, 9, wide, 8), None, _prompt(7), _prompt(wide, 9, wide)]
  found = PromptImages(_Encoder(), TOWER, _ROOM).columns(prompts, seen, 10)
  assert found.features.embeddings.shape == (24, 3) and found.features.deepstack.shape == (2, 24, 3)
  assert not found.features.embeddings[5:].any()
  expected = [
    [0, (2, 0), (2, 1), 0, (1, 0), (1, 1), (1, 2), 0, 0, 0],
    [0] * 10,
    [0] * 10,
    [(1, 0), (1, 1), (1, 2), 0, (1, 0), (1, 1), (1, 2), 0, 0, 0],
  ]
  for row, wanted in enumerate(expected):
    for column, token in enumerate(wanted):
      at = found.index[row, column]
      assert (at >= 0) == bool(token)
      if token:
        assert tuple(found.features.embeddings[at, :2]) == token == tuple(-found.features.deepstack[1, at, :2])
  # Time, height and width; the columns behind an image go on after its longer side.
  assert found.positions[0, :8].tolist() == [
    [0, 0, 0], [1, 1, 1], [1, 2, 1], [3, 3, 3], [4, 4, 4], [4, 4, 5], [4, 4, 6], [7, 7, 7],
  ]  # fmt: skip
  assert found.positions[2, 0].tolist() == [0, 0, 0]


def test_the_size_of_the_table_does_not_depend_on_the_images():
  eyes, rows = PromptImages(_Encoder(), TOWER, _ROOM), set()
  for count in range(5):
    images = [_image(i + 1, 1, 3) for i in range(count)]
    seen = {image.digest: features for image, features in images}
    found = eyes.columns([_prompt(9, *(image for image, _ in images)), None], seen, 40)
    rows.add(len(found.features.embeddings))
    assert int(found.index.max()) == 3 * count - 1
  assert rows == {2 * 4 * 3}


def test_prompts_of_text_read_an_empty_table():
  found = PromptImages(_Encoder(), TOWER, _ROOM).columns([_prompt(5, 6), None], {}, 4)
  assert (found.index == -1).all() and found.features.embeddings.shape == (2, 3)  # one row for each prompt
  assert not found.features.embeddings.any()


def test_placeholders_without_an_image_are_refused():
  with pytest.raises(UserError, match=r'1 image placeholders .* do not match 0 images'):
    PromptImages(_Encoder(), TOWER, _ROOM).columns([_prompt(5, _PAD)], {}, 4)
