"""Columns of sampled tokens, mini-batches and micro-batches."""

from __future__ import annotations

import dataclasses

import jax
import numpy as np
import pytest

from ragen_jax.training.batches import (
  MiniBatch,
  abstract_mini_batch,
  at_columns,
  micro_batches,
  mini_batches,
  plan_micro_batches,
  sampled_columns,
)
from tests.support import learning


def test_sampled_columns_by_hand():
  mask = np.asarray([[0, 0, 1, 1, 0, 1], [0, 1, 0, 0, 0, 0], [0] * 6], bool)
  columns, present = sampled_columns(mask)
  assert columns.tolist() == [[2, 3, 5], [1, 1, 1], [1, 1, 1]]
  assert present.tolist() == [[True] * 3, [True, False, False], [False] * 3]
  x = np.arange(18).reshape(3, 6)
  assert at_columns(x, columns, present).tolist() == [[2, 3, 5], [7, 0, 0], [0, 0, 0]]


def test_micro_batches_cover_every_row_once_and_are_wide_enough():
  rng = np.random.default_rng(0)
  length, sampled = rng.integers(1, 200, size=50), rng.integers(0, 40, size=50)
  rows = rng.permutation(50)[:36]
  plans = plan_micro_batches(rows, length, sampled, size=8, length_step=32)
  taken = np.concatenate([p.rows[p.rows >= 0] for p in plans])
  assert sorted(taken.tolist()) == sorted(rows.tolist())
  for p in plans:
    own = p.rows[p.rows >= 0]
    assert len(p.rows) == 8 and p.width % 32 == 0 and p.replies % 16 == 0
    assert length[own].max() <= p.width < length[own].max() + 32 and sampled[own].max() <= p.replies


def test_mini_batches_keep_episodes_whole():
  episode = np.repeat(np.arange(10), 2)
  kept = np.flatnonzero(episode != 3)
  by_size = mini_batches(kept, episode, np.random.default_rng(0), size=4, parts=None)
  by_parts = mini_batches(kept, episode, np.random.default_rng(0), size=4, parts=6)
  assert [len(part) for part in by_size] == [8, 8, 2]
  assert [len(part) for part in by_parts] == [4, 4, 4, 2, 2, 2]
  for parts in (by_size, by_parts):
    assert sorted(np.concatenate(parts).tolist()) == kept.tolist()
    assert all((np.bincount(episode[part])[np.unique(episode[part])] == 2).all() for part in parts)
  assert mini_batches(kept[:0], episode, np.random.default_rng(0), size=4, parts=6) == []


@pytest.mark.parametrize('parts', [None, 5])
def test_the_generator_chooses_the_order_of_mini_batches(parts):
  episode, kept = np.arange(40), np.arange(40)

  def order(seed):
    found = mini_batches(kept, episode, np.random.default_rng(seed), size=8, parts=parts)
    return tuple(np.concatenate(found).tolist())

  orders = [order(seed) for seed in (0, 1, 2)]
  assert len({*orders, tuple(range(40))}) == 4  # none is that of the rollout
  assert order(1) == orders[1]


def test_a_micro_batch_has_its_rows_and_empty_ones():
  loss_mask = np.zeros((5, 12), bool)
  loss_mask[:, 2:5] = True
  batch = learning.mini_batch(loss_mask, 30, importance=None)
  plan = plan_micro_batches(np.asarray([4, 0, 2]), np.full(5, 10), np.full(5, 3), size=4, length_step=10)[0]
  part = plan.cut(batch)
  assert (
    plan.rows.tolist() == [4, 0, 2, -1]
    and plan.members.tolist() == [4, 0, 2]
    and part.tokens.shape == (4, 10)
    and part.mask.shape == (4, 5)
  )
  np.testing.assert_array_equal(part.tokens[:3], batch.tokens[[4, 0, 2], :10])
  np.testing.assert_array_equal(part.advantages[:3, :3], batch.advantages[[4, 0, 2]])
  assert part.importance is None
  for empty in (part.trained[3], part.mask[3], part.weights[3], part.weights[:, 3:]):
    assert not empty.any()
  assert (part.columns[3] == 1).all() and (part.turn[3] == -1).all()
  for name in [f.name for f in dataclasses.fields(MiniBatch) if getattr(batch, f.name) is not None]:
    assert getattr(part, name).dtype == getattr(batch, name).dtype, name


def test_abstract_micro_batches_are_those_of_real_ones():
  loss_mask = np.zeros((4, 16), bool)
  loss_mask[:, 3:6] = True
  experts = np.zeros((4, 16, 2, 3), np.uint8)
  batch = learning.mini_batch(loss_mask, 30, ref_logprobs=None, experts=experts)
  (part,) = micro_batches(batch, plan_micro_batches(np.arange(4), np.full(4, 16), np.full(4, 3), size=4, length_step=8))
  abstract = abstract_mini_batch(4, 16, 4, reference=False, importance=True, experts=((2, 3), np.uint8))
  assert jax.tree.map(lambda x: (x.shape, x.dtype), part) == jax.tree.map(lambda x: (x.shape, x.dtype), abstract)
