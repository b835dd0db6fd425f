"""Random ragged batches on the timeline, with poison on every slot that must not be read."""

from __future__ import annotations

from types import SimpleNamespace

import numpy as np
import pytest

ROWS, COLUMNS, TURNS = 8, 32, 4


def make_batch(seed: int, *, rows: int = ROWS, columns: int = COLUMNS, poison: float = np.nan) -> SimpleNamespace:
  """Episodes of 1 to 4 turns: prompt, replies with holes (forced tokens), observations between; one padding row.

  Rewards are on the turns' last sampled tokens, some of them zero; other sampled tokens have 0. Every slot that the
  policy did not sample carries `poison`.
  """
  rng = np.random.default_rng(seed)
  loss_mask = np.zeros((rows, columns), bool)
  turn = np.full((rows, columns), -1, np.int32)
  ends = np.zeros((rows, columns), bool)
  length = np.zeros(rows, np.int32)
  padding = int(rng.integers(rows))
  for b in range(rows):
    if b == padding:
      continue
    t = int(rng.integers(1, 4))
    for k in range(int(rng.integers(1, TURNS + 1))):
      start = t
      t += int(rng.integers(0, 3))  # observation, forced prefix
      sampled = rng.random(int(rng.integers(1, 5))) < 0.8
      sampled[-1] = True
      loss_mask[b, t : t + len(sampled)] = sampled
      t += len(sampled)
      ends[b, t - 1] = True
      turn[b, start:t] = k
    length[b] = t + int(rng.integers(0, 2))
  rewards = np.where(ends, rng.normal(size=ends.shape) * (rng.random(ends.shape) < 0.7), 0.0)
  groups = np.array([-5, 7, 7, 90, -5, 7, -5, -5, 90, 7, -5, 7])

  def floats(x: np.ndarray) -> np.ndarray:
    return np.where(loss_mask, x, poison).astype(np.float32)

  return SimpleNamespace(
    loss_mask=loss_mask,
    turn=turn,
    ends=ends,
    length=length,
    padding=padding,
    valid=loss_mask.any(-1),
    rewards=floats(rewards),
    values=floats(rng.normal(size=ends.shape)),
    logprobs=floats(-rng.exponential(size=ends.shape)),
    bootstrap=(rng.normal(size=rows) * (rng.random(rows) < 0.5)).astype(np.float32),
    group=groups[np.arange(rows) % len(groups)].astype(np.int32),
    env=(np.arange(rows) % 2).astype(np.int32),
    rng=rng,
  )


@pytest.fixture(scope='session')
def batch():
  """The maker of batches: batch(seed, rows=8, columns=32, poison=nan)."""
  return make_batch
