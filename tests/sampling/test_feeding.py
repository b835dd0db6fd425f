"""Which calls feed prompts: those that rows share once, and what all begin with once."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ragen_jax.sampling.feeding import Beginning, Wanted, columns, common_tokens, stages
from ragen_jax.sampling.schedule import Schedule
from ragen_jax.sampling.shapes import Shapes

SHAPES = Shapes(rows=32, shards=2, max_context=3600, chunk=32, step=128)
NOTHING = Wanted(32, 0, 0, 0, 0, False, 0, 0, 0)


def test_the_first_row_of_a_shard_with_a_prompt_reads_it():
  begin = Beginning.of([['a', None, 'b', 'a', 'b'], [None, 'b', 'b', None, None]])
  assert begin.read.tolist() == [[True, False, True, False, False], [False, True, False, False, False]]
  assert begin.source.tolist() == [[0, 1, 2, 0, 2], [0, 1, 1, 3, 4]] and begin.copied
  assert begin.first.tolist() == [[0, 1, 0, 3, 4], [0, 1, 2, 3, 4]]
  read, source = begin.rows('common')
  assert read.tolist() == [True, *[False] * 5, True, *[False] * 3] and source.tolist() == [0, 1, 0, 3, 4, 0, 1, 2, 3, 4]
  read, source = begin.rows('begin')
  assert read.tolist() == begin.read.reshape(-1).tolist() and source.tolist() == begin.source.reshape(-1).tolist()
  assert not Beginning.of([['a', 'b', None]]).copied and not Beginning.of([[None], [None]]).read.any()


def test_common_tokens_leave_each_prompt_a_last_one():
  assert common_tokens([(1, 2, 3, 4), (1, 2, 5)]) == 2 == common_tokens([(1, 2, 3), (1, 2, 3, 4), (1, 2, 3)])
  assert common_tokens([(1, 2, 3)] * 3) == 2 and common_tokens([(7, 2), (1, 2)]) == 0 == common_tokens([(1,), (1, 2)])
  assert common_tokens([(1, 2, 3, 9), (1, 2, 3, 8), (1, 4, 3, 9)]) == 1
  assert common_tokens([]) > 10**6


def test_a_common_beginning_is_read_by_one_row_and_the_rest_by_one_of_each_prompt():
  wanted = dataclasses.replace(NOTHING, longest=200, begin=8, begin_tokens=200, common=150, copied=True)
  common, begin = planned = stages(SHAPES, wanted, whole=False)
  assert (common.kind, common.calls, common.pieces, common.before, common.shared) == ('common', (1,), (128, 32), 0, 256)
  assert (begin.kind, begin.calls, begin.pieces, begin.before, begin.shared) == ('begin', (8,), (64,), 150, 256)
  ids = tuple(range(200))
  assert ids[common.tokens] + ids[begin.tokens] == ids and len(ids[common.tokens]) == 150
  assert common.empties and not begin.empties
  assert columns(SHAPES, wanted, planned) == 232 == max(200 + 32, 150 + 64)
  (only,) = stages(SHAPES, wanted, whole=True)
  assert (only.kind, only.pieces, only.tokens, only.empties, only.shared) == (
    'begin', (256,), slice(0, None), True, 256
  )  # fmt: skip
  alone = dataclasses.replace(wanted, copied=False)
  assert [stage.shared for stage in stages(SHAPES, alone, whole=False)] == [256, 0]


@pytest.mark.parametrize(
  ('begin', 'common', 'worth'),
  [
    (8, 128, True),
    (8, 127, False),
    (5, 128, True),
    (4, 128, False),
    (2, 512, True),
    (2, 511, False),
    (1, 3000, False),
  ],
)
def test_a_common_beginning_must_save_clearly_more_than_it_costs(begin, common, worth):
  wanted = dataclasses.replace(NOTHING, begin=begin, begin_tokens=common + 10, common=common)
  assert [stage.kind for stage in stages(SHAPES, wanted, whole=False)] == ['common', 'begin'][1 - worth :]


def test_prompts_that_continue_rows_are_fed_behind_the_longest():
  wanted = dataclasses.replace(NOTHING, longest=990, follow=13, follow_tokens=69, follow_before=930)
  (stage,) = planned = stages(SHAPES, wanted, whole=False)
  assert (stage.kind, stage.calls, stage.pieces, stage.shared, stage.empties) == ('follow', (8, 8), (96,), 0, False)
  assert columns(SHAPES, wanted, planned) == 1026 == 930 + 96
  assert stages(SHAPES, NOTHING, whole=False) == [] and columns(SHAPES, NOTHING, []) == 32
  late = dataclasses.replace(wanted, follow_tokens=1, follow_before=3700)
  assert stages(SHAPES, late, whole=False)[0].columns == SHAPES.caches[-1]


def test_processes_agree_on_the_largest_numbers_and_on_the_shortest_beginning():
  one = Wanted(20, 300, 4, 200, 150, False, 0, 0, 0)
  two = Wanted(32, 200, 2, 190, 120, True, 3, 70, 500)
  none = dataclasses.replace(NOTHING, common=common_tokens([]))
  numbers = []
  one.agreed(lambda own: numbers.append(own) or own)
  assert all(isinstance(n, int) and abs(n) < 2**31 for n in numbers[0])

  def largest(own):
    others = []
    for wanted in (two, none):
      wanted.agreed(lambda x: others.append(x) or x)
    return np.max([own, *others], axis=0).tolist()

  assert one.agreed(largest) == Wanted(32, 300, 4, 200, 120, True, 3, 70, 500)
  assert one.agreed(list) == one


def test_replies_that_go_on_have_room_behind_the_longest_of_their_rows():
  """Columns that the cache lacks would be dropped without a word."""
  schedule = Schedule(SHAPES, 2, lockstep=True, drop_finished=True)
  length = np.zeros(64, int)
  length[[3, 8, 40, 41]] = 100, 700, 300, 900
  assert schedule.go_on([3, 8, 40], length) == (min(n for n in SHAPES.decoded if n >= 2), 700 + 32)
  assert schedule.go_on([3], length)[1] == 100 + 32
  assert schedule.go_on([], length)[1] == 32
