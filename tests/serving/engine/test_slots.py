"""Slots: what a prompt finds on the device, and what of it must be fed."""

from __future__ import annotations

import random

import numpy as np
import pytest

from ragen_jax.serving.engine.slots import SlotTable


def ids(*values):
  return np.asarray(values, np.int32)


def play(table, prompt, reply):
  """A call from its admission to its end: (slot, source, kept)."""
  placement = table.place(prompt)
  table.begin(placement, prompt)
  feed(placement.slot)
  placement.slot.append(reply)
  table.end(placement.slot, len(prompt) + len(reply))
  return placement.slot.index, placement.source.index, placement.kept


def feed(slot):
  slot.append(slot.pending)
  slot.pending = slot.pending[:0]


def table(slots=3, shards=1, worth=2, **options):
  return SlotTable(slots, shards, 64, worth, **options)


def test_a_prompt_that_continues_a_row_feeds_only_what_is_new():
  t = table()
  assert play(t, ids(1, 2, 3), ids(4, 5)) == (0, 0, 0)
  assert play(t, ids(9, 8), ids(7)) == (1, 1, 0)
  placement = t.place(ids(1, 2, 3, 4, 5, 6))
  assert (placement.slot.index, placement.kept, placement.copies) == (0, 5, False)
  t.begin(placement, ids(1, 2, 3, 4, 5, 6))
  assert placement.slot.pending.tolist() == [6] and placement.slot.ids.tolist() == [1, 2, 3, 4, 5]


def test_the_last_token_of_a_prompt_is_fed_again_unless_it_is_the_row_s_last():
  t = table(slots=1)
  play(t, ids(1, 2, 3), ids(4, 5))
  assert t.place(ids(1, 2, 3, 4, 5)).kept == 5  # the row as it is
  cut = t.place(ids(1, 2, 3))
  assert cut.kept == 2 and cut.copies
  t.begin(cut, ids(1, 2, 3))
  t.end(cut.slot, cut.slot.length)  # cancelled before it was fed: the hidden state is of a dropped column
  assert cut.slot.ids.tolist() == [1, 2] and t.place(ids(1, 2)).kept == 1


def test_columns_behind_a_stop_string_are_dropped_before_the_row_is_continued():
  t = table(slots=1)
  placement = t.place(ids(1, 2))
  t.begin(placement, ids(1, 2))
  feed(placement.slot)
  placement.slot.append(ids(3, 4, 5, 6))
  t.end(placement.slot, 4)  # the reply is 3, 4
  assert placement.slot.columns == 6
  following = t.place(ids(1, 2, 3, 4, 9))
  assert following.kept == 4 and following.copies
  t.begin(following, ids(1, 2, 3, 4, 9))
  assert following.slot.columns == 4


def test_the_hidden_state_behind_a_stop_string_is_not_that_of_the_row_s_last_token():
  t = table(slots=1)
  placement = t.place(ids(1, 2))
  t.begin(placement, ids(1, 2))
  feed(placement.slot)
  placement.slot.append(ids(3, 4, 5))
  t.end(placement.slot, 4)
  assert t.place(ids(1, 2, 3, 4)).kept == 3


def test_another_continuation_keeps_its_slot_and_its_beginning_is_copied():
  t = table()
  play(t, ids(1, 2, 3, 4), ids(5))
  assert play(t, ids(1, 2, 3, 4, 6), ids(7)) == (1, 0, 4)
  assert t.slots[0].ids.tolist() == [1, 2, 3, 4, 5]
  # Not for a token or two less than it is worth.
  assert play(t, ids(1, 9), ids(7)) == (2, 2, 0)


def test_the_least_recently_used_slot_is_overwritten():
  t = table()
  for first in (10, 20, 30):
    play(t, ids(first, 1), ids(2))
  play(t, ids(10, 1, 2, 3), ids(4))  # slot 0 is the latest now
  assert [s.index for s in t.free()] == [1, 2, 0]
  assert play(t, ids(40, 1), ids(2))[0] == 1


def test_a_prompt_waits_for_an_equal_one_that_is_being_fed():
  t = table()
  prompt = ids(1, 2, 3, 4)
  first = t.place(prompt)
  t.begin(first, prompt)
  assert t.place(prompt) is None
  assert t.place(ids(9, 9, 9)) is not None
  feed(first.slot)
  second = t.place(prompt)
  assert second.kept == 4 and second.copies and second.source is first.slot
  t.begin(second, prompt)
  assert not len(second.slot.pending) and second.slot in t.ready()
  # When the first row has gone on, its hidden state is another token's.
  first.slot.append(ids(5))
  t.end(second.slot, 0)
  assert t.place(prompt).kept == 3


def test_rows_are_copied_within_their_shard_only_and_shards_fill_up_evenly():
  t = table(slots=4, shards=2)
  prompts = [ids(10 * i, 1, 2, 3) for i in range(4)]
  shards = []
  for prompt in prompts:
    placement = t.place(prompt)
    t.begin(placement, prompt)
    feed(placement.slot)
    shards.append(placement.slot.shard)
  assert sorted(shards[:2]) == [0, 1] and sorted(shards) == [0, 0, 1, 1]
  assert t.place(ids(1)) is None
  t.end(t.slots[3], 4)
  other = next(s for s in t.slots if s.shard == 0)
  same = t.slots[2]
  assert t.place(np.append(other.ids, 7)).kept == 0
  placement = t.place(np.append(same.ids, 7))
  assert (placement.slot.index, placement.source.index, placement.kept) == (3, 2, 4)


def test_new_weights_empty_all_rows_and_those_with_a_reply_are_fed_again():
  t = table()
  play(t, ids(1, 2), ids(3))
  running, waiting = t.place(ids(5, 6)), None
  t.begin(running, ids(5, 6))
  feed(running.slot)
  running.slot.append(ids(7))
  waiting = t.place(ids(8, 9, 9))
  t.begin(waiting, ids(8, 9, 9))
  t.empty()
  assert [s.length for s in t.slots] == [0, 0, 0]
  assert running.slot.pending.tolist() == [5, 6, 7] and waiting.slot.pending.tolist() == [8, 9, 9]
  assert t.ready() == [] and len(t.fed()) == 2


def test_a_row_that_cannot_be_cut_goes_on_as_a_whole_or_begins_again():
  t = table(cuts=False)
  assert play(t, ids(1, 2, 3), ids(4, 5)) == (0, 0, 0)
  assert play(t, ids(1, 2, 3, 4, 5, 6), ids(7)) == (0, 0, 5)
  assert play(t, ids(1, 2, 3, 9, 9, 9), ids(7)) == (1, 1, 0)  # the beginning of row 0 is not kept anywhere
  placement = t.place(ids(1, 2, 3, 4, 5, 6, 7))
  assert placement.kept == 7 and not placement.copies
  t.begin(placement, ids(1, 2, 3, 4, 5, 6, 7))
  placement.slot.append(ids(8, 9))
  t.end(placement.slot, 8)  # a stop string before the last token: the state is of one token more
  assert t.place(ids(1, 2, 3, 4, 5, 6, 7, 8, 3)).kept == 0


def test_an_equal_prompt_waits_for_a_row_that_is_fed_and_not_for_one_that_goes_further():
  t = table(cuts=False)
  prompt = ids(1, 2, 3, 4)
  first = t.place(prompt)
  t.begin(first, prompt)
  assert t.place(prompt) is None and t.place(ids(1, 2, 3, 4, 5)) is None
  assert t.place(ids(1, 2, 3, 9, 9)) is not None, 'the row will be at its fourth token'
  feed(first.slot)
  second = t.place(prompt)
  assert second.kept == 4 and second.copies
  t.begin(second, prompt)
  assert second.slot in t.ready()


@pytest.mark.parametrize('cuts', [True, False])
def test_the_device_s_rows_hold_what_the_table_says(cuts):
  """Random calls on a made-up device that does what it is told, with prompts that share beginnings."""
  rng = random.Random(0)
  t, device = table(slots=6, shards=2, worth=2, cuts=cuts), [[] for _ in range(6)]
  running, seen, reused, copied, waited = {}, [ids(1)], 0, 0, 0
  for _ in range(3000):
    base = rng.choice(seen[-12:])
    prompt = np.append(
      base[: rng.randrange(1, len(base) + 1)], ids(*(rng.randrange(3) for _ in range(rng.randrange(3))))
    )
    placement = t.place(prompt) if len(prompt) < 50 else None
    waited += placement is None
    if placement is not None:
      slot, source = placement.slot, placement.source
      assert slot.shard == source.shard and not slot.busy
      assert cuts or placement.kept in (0, len(device[source.index]))
      if placement.copies:
        device[slot.index] = device[source.index][: placement.kept]
        copied += slot is not source
      t.begin(placement, prompt)
      if placement.kept == 0:
        device[slot.index] = []
      reused += placement.kept
      running[slot.index] = prompt
      assert slot.ids.tolist() == prompt[: placement.kept].tolist() == device[slot.index]
      assert np.concatenate([slot.ids, slot.pending]).tolist() == prompt.tolist()
    for slot in t.fed():
      if rng.random() < 0.7:
        piece = slot.pending[: rng.randrange(1, 6)]
        device[slot.index] += piece.tolist()
        slot.append(piece)
        slot.pending = slot.pending[len(piece) :]
    for slot in t.ready():
      new = ids(*(rng.randrange(3) for _ in range(2)))
      device[slot.index] += new.tolist()
      slot.append(new)
      assert slot.current and slot.ids.tolist() == device[slot.index]
      if rng.random() < 0.5 or slot.length > 56:
        t.end(slot, slot.length - rng.randrange(2))
        seen.append(slot.ids.copy())
        running.pop(slot.index)
    if rng.random() < 0.1 and running:
      slot = t.slots[rng.choice(list(running))]
      t.end(slot, slot.length)
      running.pop(slot.index)
    for slot in t.slots:
      assert slot.columns == len(device[slot.index]) or slot.length == 0
      assert slot.ids.tolist() == device[slot.index][: slot.length]
  assert reused > 1000 and copied > 50 and waited > 50
