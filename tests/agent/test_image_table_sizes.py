"""Sizes of tables of images depend on the shape of rows, and hold all images that rows can show."""

from __future__ import annotations

import dataclasses
import types

import pytest

from ragen_jax.agent.image_table_sizes import ImageCounts, ImageTableSizes, image_room, largest_images
from ragen_jax.agent.sampler_speaker import rows_at_once
from ragen_jax.envs import Budget, spec
from ragen_jax.envs.bandit import Bandit
from ragen_jax.envs.frozen_lake import FrozenLake
from ragen_jax.envs.outside.images import ImageForm
from ragen_jax.envs.sokoban import Sokoban
from tests.models.vision.test_encoder import _PROCESSOR as PROCESSOR

# Two images of 3 tokens in each of up to 4 observations, and one of 10 tokens in each of up to 2.
SMALL, LARGE = ImageCounts((8, 24), 2, 3, 4), ImageCounts((16, 40), 1, 10, 2)
ROOM = ImageTableSizes((SMALL, LARGE))


def test_a_row_has_room_for_all_its_observations_that_fit():
  # An observation takes 2 * (3 + 2) columns.
  assert [SMALL.images(width, packed=False) for width in (9, 10, 29, 30, 40, 400)] == [0, 2, 4, 6, 8, 8]
  assert [SMALL.images(width, packed=True) for width in (9, 40, 400)] == [0, 8, 80]
  assert ROOM.images({}, 3, 30, packed=False) == {(8, 24): 18, (16, 40): 6}
  assert ROOM.tokens(0, 3, 30, packed=False) == 3 * 2 * 10  # of rows that all show the large images
  assert ROOM.tokens(0, 3, 11, packed=False) == 3 * 2 * 3  # no large image fits


def test_what_is_needed_changes_the_tables_of_packed_rows_only():
  assert {ROOM.tokens(n, 3, 30, packed=False) for n in range(61)} == {60}
  assert [ROOM.tokens(n, 2, 120, packed=True) for n in (0, 50, 51, 100, 101, 200)] == [50, 50, 100, 100, 200, 200]
  found = [ROOM.images({(8, 24): n}, 2, 120, packed=True)[8, 24] for n in (1, 12, 13, 24, 25, 48)]
  assert found == [12, 12, 24, 24, 48, 48]
  assert ROOM.images({(16, 40): 20}, 2, 120, packed=True) == {(8, 24): 12, (16, 40): 20}


def test_tables_hold_what_is_needed_and_are_never_empty():
  assert ROOM.images({(8, 8): 3, (8, 24): 5}, 1, 10, packed=False) == {(8, 8): 3, (8, 24): 5, (16, 40): 1}
  assert ROOM.tokens(7, 1, 10, packed=True) == 7 and ROOM.tokens(0, 1, 3, packed=False) == 1
  assert ROOM.tokens(0, 6, 3, packed=False) == 6  # as many for each row, so that devices can divide them


def test_environments_of_equal_images_share_their_room():
  room = ImageTableSizes((SMALL, dataclasses.replace(SMALL, turns=1)))
  assert room.images({}, 2, 40, packed=False) == {(8, 24): 16}


@pytest.mark.parametrize('tile', [0, 16])
def test_the_room_is_that_of_the_environments_with_images(tile):
  def of(tag, env, turns, tile):
    return spec.EnvSpec(tag, env, Budget(turns, 10, 1), 20, 1, tile)

  specs = [of('FrozenLake', FrozenLake(), 5, tile), of('Sokoban', Sokoban(), 7, 8), of('Bandit', Bandit(), 1, None)]
  pixels = tile or 8
  assert image_room(specs, PROCESSOR).shown == (
    ImageCounts((4 * pixels, 4 * pixels), 1, (pixels // 2) ** 2, 5), ImageCounts((48, 48), 1, 36, 7)
  )  # fmt: skip
  assert image_room(specs[2:], PROCESSOR) is None and image_room(specs, None) is None


def test_the_room_of_wide_images_is_that_of_both_sides():
  outside = types.SimpleNamespace(is_outside=True, image_form=ImageForm(count=3, height=16, width=40))
  shown = image_room([spec.EnvSpec('Game', outside, Budget(2, 10, 1), 20, 1, None)], PROCESSOR).shown
  assert shown == (ImageCounts((16, 40), 3, 2 * 5, 2),)


def test_rows_in_flight_are_chosen_with_the_images_of_a_row():
  asked = []

  def rows_that_fit(rows, columns, image_tokens):
    asked.append((rows, image_tokens))
    return rows

  sampler = types.SimpleNamespace(share=types.SimpleNamespace(shards=2), rows_that_fit=rows_that_fit)
  limits = types.SimpleNamespace(
    rows_in_flight=8, max_context=100, max_response_tokens=10, decode_chunk=10, length_step=20
  )
  shown = ImageTableSizes((ImageCounts((32, 32), 1, 16, 3), ImageCounts((64, 64), 1, 64, 3)))
  for room in (None, shown):
    rows_at_once(sampler, limits, 16, room)
  # Three images of 16 tokens, or one of 64 with the tokens around it.
  assert asked == [(4, 0), (4, 64)]


def test_the_room_of_images_of_any_size_is_that_of_the_largest():
  (shown,) = largest_images(90, 8).shown
  assert (shown.size, shown.tokens) == ((9 * 8, 10 * 8), 90)
  room = largest_images(14, 8)  # 3 x 4 tokens
  assert room.most_images(2, 57, packed=False) == {(24, 32): 2 * 4} and room.most_tokens(2, 57, packed=False) == 96
