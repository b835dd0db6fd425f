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


@pytest.mark.parametrize('rows', [1, 2, 5, 16])
def test_every_row_is_fed_in_calls_of_a_quarter_or_in_one(rows):
  shapes = Shapes(rows, 8, 3600, 32, 128)
  for fed in range(1, rows + 1):
    calls, part = shapes.calls(fed)
    assert fed <= calls * part and part in (rows, shapes.fed)
    assert (calls == 1 and part == rows) or (calls - 1) * part < fed
  assert shapes.calls(rows) == (1, rows)


def test_widths_are_two_an_octave():
  assert PAPER.widths == (32, 64, 96, 128, 192, 256, 384, 512, 768, 1024, 1536, 2048, 3072)
  for tokens in range(1, 3073, 7):
    (width,) = PAPER.pieces(tokens, 0)
    assert tokens <= width < 1.5 * tokens + 32
  assert Shapes(rows=4, shards=1, max_context=40, chunk=4, step=2).widths[:3] == (1, 2, 3)  # a quarter is a column


def test_prompts_that_the_widths_do_not_hold_take_several_calls():
  assert PAPER.pieces(3200, 0) == (3072, 128)
  assert PAPER.pieces(300, 3328) == (384,) and PAPER.pieces(300, 3329) == (256, 64)
  assert PAPER.pieces(0, 0) == PAPER.pieces(1, 0) == (32,)


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
