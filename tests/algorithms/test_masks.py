from __future__ import annotations

import numpy as np

from ragen_jax.algorithms import masks


def test_documented_example():
  loss_mask = np.array([[0, 0, 1, 1, 1, 0, 0, 1, 1, 0]], bool)
  turn = np.array([[0, 0, 0, 0, 0, 1, 1, 1, 1, -1]])
  np.testing.assert_array_equal(masks.turn_ends(loss_mask, turn)[0], [0, 0, 0, 0, 1, 0, 0, 0, 1, 0])
  np.testing.assert_array_equal(masks.next_sampled(loss_mask)[0], [2, 2, 3, 4, 7, 7, 7, 8, 10, 10])
  np.testing.assert_array_equal(masks.last_sampled(loss_mask)[0], [0, 0, 0, 0, 0, 0, 0, 0, 1, 0])


def test_turn_ends_of_adjacent_turns_without_observation_between():
  loss_mask = np.array([[0, 1, 1, 1, 1]], bool)
  turn = np.array([[0, 0, 0, 1, 1]])
  np.testing.assert_array_equal(masks.turn_ends(loss_mask, turn)[0], [0, 0, 1, 0, 1])


def test_turn_ends_on_random_batches(batch):
  for seed in range(5):
    b = batch(seed)
    np.testing.assert_array_equal(masks.turn_ends(b.loss_mask, b.turn), b.ends)
    last = np.zeros_like(b.loss_mask)
    for row in np.flatnonzero(b.valid):
      last[row, np.flatnonzero(b.loss_mask[row])[-1]] = True
    np.testing.assert_array_equal(masks.last_sampled(b.loss_mask), last)


def test_selective_masks(batch):
  b = batch(0)
  every = np.zeros_like(b.loss_mask)
  for row in np.flatnonzero(b.valid):
    every[row, 1 : b.length[row]] = True
  for mask_loss in (False, True):
    for mask_advantages in (False, True):
      of_loss, of_advantages = masks.selective_masks(
        b.loss_mask, b.length, mask_loss=mask_loss, mask_advantages=mask_advantages
      )
      np.testing.assert_array_equal(of_loss, b.loss_mask if mask_loss else every)
      np.testing.assert_array_equal(of_advantages, b.loss_mask if mask_advantages else every)


def test_moments_and_whitening(batch):
  b = batch(1)
  x = b.values[b.loss_mask].astype(np.float64)
  np.testing.assert_allclose(masks.masked_mean(b.values, b.loss_mask), x.mean(), rtol=1e-5)
  np.testing.assert_allclose(masks.masked_variance(b.values, b.loss_mask), x.var(ddof=1), rtol=1e-5)
  whitened = np.asarray(masks.whiten(b.values, b.loss_mask))
  np.testing.assert_allclose(whitened[b.loss_mask], (x - x.mean()) / np.sqrt(x.var(ddof=1) + 1e-8), atol=1e-5)
  assert not whitened[~b.loss_mask].any()


def test_moments_of_too_few():
  x = np.array([[3.0, np.nan]], np.float32)
  assert float(masks.masked_variance(x, np.array([[True, False]]))) == 0.0
  assert float(masks.masked_mean(x, np.zeros((1, 2), bool))) == 0.0
  np.testing.assert_array_equal(masks.whiten(x, np.array([[True, False]])), [[0.0, 0.0]])
