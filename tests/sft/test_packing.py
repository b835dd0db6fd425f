"""Micro-batches: few rows, no conversation lost, rows that divide over devices."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.sft.packing import batches
from tests.support.examples import made_up_examples


@pytest.mark.parametrize('packing', [False, True])
def test_a_steps_micro_batches_hold_each_trained_token_once(packing):
  data, rows = made_up_examples(), np.asarray([6, 0, 1, 3, 2, 5, 4])
  cut = list(batches(data, rows, batch_size=7, length_step=16, packing=packing, shards=1))
  there = np.concatenate([b.weights.ravel() for b in cut]) > 0
  found = np.concatenate([np.take_along_axis(b.tokens, b.columns, axis=1).ravel() for b in cut])[there]
  expected = np.concatenate([data.tokens[row, data.columns[row, data.mask[row]]] for row in rows])
  np.testing.assert_array_equal(np.sort(found), np.sort(expected))
  assert sum(b.weights.sum() for b in cut) == pytest.approx(1)
  targets = np.concatenate([b.values.ravel() for b in cut])[there]
  np.testing.assert_array_equal(np.sort(targets), np.sort(data.values[rows][data.mask[rows]]))


def test_packed_rows_divide_over_the_row_shards():
  data = made_up_examples()
  for batch in batches(data, np.arange(8), batch_size=8, length_step=16, packing=True, shards=8):
    assert len(batch.tokens) == 8
