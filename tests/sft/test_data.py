"""How conversations are divided and drawn."""

from __future__ import annotations

import itertools

import numpy as np

from ragen_jax.sft import data as sft_data
from tests.support.examples import made_up_examples


def test_levels_are_kept_back_whole():
  data = made_up_examples()
  data.level = np.asarray([0, 0, 1, 1, 2, 2, 3, 3], np.int32)
  shown, withheld = sft_data.split(data, 0.3, seed=5)
  assert len(withheld) == 4 and not set(data.level[shown]) & set(data.level[withheld])
  assert sorted([*shown, *withheld]) == list(range(8))
  assert [x.tolist() for x in sft_data.split(data, 0.0, seed=5)] == [list(range(8)), []]


def test_a_step_draws_each_conversation_once_and_a_resumed_run_draws_the_same():
  rows = np.asarray([3, 5, 8, 9, 12])
  drawn = [x.tolist() for x in itertools.islice(sft_data.step_rows(rows, 4, seed=1), 6)]
  assert all(len(set(x)) == 4 and set(x) <= set(rows.tolist()) for x in drawn) and len(set(map(tuple, drawn))) > 1
  assert [x.tolist() for x in itertools.islice(sft_data.step_rows(rows, 4, seed=1, first_step=4), 2)] == drawn[4:]


def test_other_conversations_have_another_checksum():
  data, other = made_up_examples(), made_up_examples()
  assert data.checksum == other.checksum
  other = made_up_examples()
  other.tokens[0, 0] += 1
  assert data.checksum != other.checksum
