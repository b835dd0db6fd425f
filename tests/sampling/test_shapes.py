"""The few sizes of the sampler's programs."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.sampling.shapes import Shapes, largest_cache

PAPER = Shapes(rows=16, shards=8, max_context=3600, chunk=32, step=128)


def test_caches_are_a_quarter_a_half_and_all_of_the_largest_in_steps():
  assert largest_cache(3600, 32, 128) == 3712
  assert PAPER.caches == (1024, 1920, 3712)
  assert [PAPER.cache(n) for n in (1, 1024, 1025, 1921, 3712)] == [1024, 1024, 1920, 3712, 3712]
  assert PAPER.cache(3713) == 3840, 'a cache that is long enough, whatever was expected'
  assert largest_cache(100, 7, 64) == 128 and largest_cache(60, 2, 64) == 128  # a prompt is rounded by up to 15


@pytest.mark.parametrize(
  ('rows', 'shards', 'parts'),
  [
    (16, 8, (16, 12, 8, 5, 2)),
    (128, 1, (128, 96, 64, 40, 16)),
    (16, 1, (16, 12, 8, 5)),
    (4, 2, (4, 3, 2)),
    (2, 8, (2,)),
  ],
)
def test_decode_runs_on_all_rows_or_on_a_part(rows, shards, parts):
  shapes = Shapes(rows, shards, 3600, 32, 128)
  assert shapes.decoded == parts
  for live in range(1, rows + 1):
    n = shapes.decoded_rows(live)
    assert live <= n and not any(live <= other < n for other in parts)
    assert 1 <= shapes.enough(n) <= min(n, shapes.fed)


@pytest.mark.parametrize(('rows', 'part'), [(1, 1), (2, 2), (4, 4), (5, 4), (8, 4), (16, 4), (32, 8), (128, 32)])
def test_every_row_is_fed_in_calls_of_a_quarter_or_of_one_row(rows, part):
  shapes = Shapes(rows, 8, 3600, 32, 128)
  assert shapes.fed == part
  for fed in range(1, rows + 1):
    calls = shapes.calls(fed)
    assert sum(calls) >= fed and set(calls) <= {part, 1}
    assert sum(calls) == fed or (calls[-1] == part and sum(calls) - fed < part / 2)
  programs = shapes.programs([], room=3600, drop_finished=False)
  listed = {n for name, (_, n, *_) in programs if name == 'extend'}
  assert listed == {8 * n for fed in range(1, rows + 1) for n in shapes.calls(fed)}


def test_few_rows_are_fed_one_by_one_and_more_of_them_together():
  shapes = Shapes(32, 8, 3600, 32, 128)
  assert [shapes.calls(n) for n in (1, 4, 5, 8, 12, 13)] == [(1,), (1,) * 4, (8,), (8,), (8, 1, 1, 1, 1), (8, 8)]


def test_widths_are_few():
  assert PAPER.widths == (32, 64, 96, 128, 256, 512)
  assert Shapes(rows=4, shards=1, max_context=512, chunk=32, step=64).widths == (16, 32, 48, 64, 128, 256, 512)
  assert Shapes(rows=4, shards=1, max_context=40, chunk=4, step=2).widths == (1, 2, 3, 4, 8, 16, 32)
  assert Shapes(rows=4, shards=1, max_context=9000, chunk=4, step=4096).widths == (1024,)


def test_prompts_that_no_width_holds_closely_take_several_calls():
  assert [PAPER.pieces(n, 0) for n in (1, 32, 69, 96, 97)] == [(32,), (32,), (96,), (96,), (128,)]
  assert PAPER.pieces(150, 0) == (128, 32) and PAPER.pieces(192, 0) == (128, 64) and PAPER.pieces(193, 0) == (256,)
  assert PAPER.pieces(1200, 0) == (512, 512, 128, 64)
  assert PAPER.pieces(300, 3392) == (256, 64) and PAPER.pieces(300, 3457) == (128, 96, 32, 32, 32)
  assert PAPER.pieces(0, 0) == PAPER.pieces(1, 0) == (32,)


@pytest.mark.parametrize('tokens', range(1, 1400, 13))
def test_pieces_are_the_cheapest(tokens):
  """Beside a table of the least cost of so many units, of which a call costs one more."""
  units = [width // 32 for width in PAPER.widths]
  least = [0]
  for n in range(1, -(-tokens // 32) + 1):
    least.append(min(width + 1 + least[max(n - width, 0)] for width in units))
  found = PAPER.pieces(tokens, 0)
  assert sum(found) >= tokens and sum(width // 32 + 1 for width in found) == least[-1]


def test_prompts_with_images_are_fed_whole():
  assert [PAPER.whole(n, 0) for n in (0, 1, 33, 100, 150, 200, 600, 3073)] == [
    32,
    32,
    64,
    128,
    192,
    256,
    768,
    4096 - 992,
  ]
  assert PAPER.whole(600, 3712 - 768) == 768 and PAPER.whole(600, 3712 - 767) == 608


def test_rows_are_copied_in_the_columns_of_a_width_or_of_a_cache():
  assert [PAPER.shared(n) for n in (1, 33, 129, 512, 513, 1025)] == [32, 64, 256, 512, 1024, 1920]


def test_no_row_needs_more_columns_than_the_largest_cache_has():
  """The rows of a call differ: the longest prompt need not follow the most columns."""
  room = 3200
  rng = np.random.default_rng(0)
  for _ in range(200):
    before = rng.integers(0, room, size=4)
    tokens = np.asarray([rng.integers(1, room - b + 1) for b in before])
    pieces, fed = PAPER.pieces(int(tokens.max()), int(before.max())), 0
    for width in pieces:
      assert width in PAPER.widths
      assert (before + fed + width)[tokens > fed].max() <= PAPER.caches[-1]
      fed += width
    assert fed >= tokens.max() and len(pieces) <= 4 + tokens.max() // 32
