"""Micro-batches: few rows, no conversation lost, rows that divide over devices."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from ragen_jax.sft.packing import batches
from ragen_jax.training.batches import PackingSettings
from tests.support.examples import IMAGE, examples_with_images, made_up_examples

_BINS = PackingSettings(step=16, width=128, columns=256, shards=1, reply_step=16, most_shared=128)


@pytest.mark.parametrize('packing', [None, _BINS])
def test_a_steps_micro_batches_hold_each_trained_token_once(packing):
  data, rows = made_up_examples(), np.asarray([6, 0, 1, 3, 2, 5, 4])
  cut = list(batches(data, rows, batch_size=7, length_step=16, packing=packing, mesh=None))
  there = np.concatenate([b.weights.ravel() for b in cut]) > 0
  found = np.concatenate([np.take_along_axis(b.tokens, b.columns, axis=1).ravel() for b in cut])[there]
  expected = np.concatenate([data.tokens[row, data.columns[row, data.mask[row]]] for row in rows])
  np.testing.assert_array_equal(np.sort(found), np.sort(expected))
  assert sum(b.weights.sum() for b in cut) == pytest.approx(1)
  targets = np.concatenate([b.values.ravel() for b in cut])[there]
  np.testing.assert_array_equal(np.sort(targets), np.sort(data.values[rows][data.mask[rows]]))


def test_packed_rows_divide_over_the_row_shards():
  bins = dataclasses.replace(_BINS, shards=8)
  for batch in batches(made_up_examples(), np.arange(8), batch_size=8, length_step=16, packing=bins, mesh=None):
    assert len(batch.tokens) % 8 == 0


def test_conversations_share_their_beginnings():
  """Two conversations with the same prompt need the columns of one of them and of the other's reply."""
  data = made_up_examples()
  data = dataclasses.replace(data, tokens=data.tokens.copy())
  one, two = np.argsort(data.length)[-2:]
  n = 80  # both together fit into a bin only so
  data.tokens[one, :n] = data.tokens[two, :n]
  used = {}
  for most in (0, 128):
    bins = dataclasses.replace(_BINS, most_shared=most)
    cut = list(batches(data, np.asarray([one, two]), batch_size=2, length_step=16, packing=bins, mesh=None))
    seen = np.concatenate(
      [batch.seen_until.ravel() - np.tile(np.arange(batch.tokens.shape[1]), len(batch.tokens)) for batch in cut]
    )
    used[most] = int((seen > 1).sum())
  assert used[0] - used[128] == pytest.approx(n, abs=2)


def test_conversations_with_images_share_nothing():
  """Placeholders of different images are equal tokens."""
  data = examples_with_images(8)
  data = dataclasses.replace(data, tokens=np.broadcast_to(data.tokens[:1], data.tokens.shape).copy())
  for batch in batches(data, np.arange(8), batch_size=8, length_step=16, packing=_BINS, mesh=None):
    assert (batch.images.index >= 0).sum() == (data.images.index >= 0).sum()


def test_tables_have_room_for_the_images_of_nearly_all_steps():
  data = examples_with_images(64)
  counts = data.image_counts[8, 8]
  np.testing.assert_array_equal(counts, np.asarray([len(set(row[row >= 0])) for row in data.images.index]))
  rng, sizes = np.random.default_rng(0), set()
  for _ in range(20):
    rows = rng.choice(64, size=16, replace=False)
    for batch in batches(data, rows, batch_size=16, length_step=16, packing=_BINS, mesh=None):
      sizes.add(len(batch.images.source.groups[0]))
      shown = batch.images.index[batch.images.index >= 0]
      assert (batch.tokens[batch.images.index >= 0] == IMAGE).all() and shown.max() < len(batch.images.source.groups[0])
  assert len(sizes) == 1
