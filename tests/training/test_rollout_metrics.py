"""The age of the policies that sampled what an iteration learns from."""

from __future__ import annotations

import dataclasses

import numpy as np

from ragen_jax.training.rollout_metrics import policy_lag
from tests.support import learning


def test_the_lag_is_that_of_the_kept_rows(policy, played):
  rollout, _ = played
  trainer, _ = learning.make_trainer(policy)
  selection = trainer.select(rollout)
  version = np.repeat(np.arange(8, dtype=np.int32), 4)  # of the rows of each group
  rollout = dataclasses.replace(rollout, trajectory=rollout.trajectory.replace(policy_version=version))
  keep = np.isin(version, (2, 3, 7)) & (np.arange(32) != 8)  # three rows of version 2, four of 3 and of 7
  found = policy_lag(dataclasses.replace(selection, rollout=rollout, keep=keep), 7)
  assert found == {'rollout/policy_lag_mean': (3 * 5 + 4 * 4) / 11, 'rollout/policy_lag_max': 5.0}
  assert policy_lag(dataclasses.replace(selection, keep=np.zeros(32, bool)), 7) == {}


def test_an_update_states_how_old_its_rows_are(policy, played):
  rollout, _ = played
  trainer, state = learning.make_trainer(policy, optimizer__mini_batch_size=32)
  selection = trainer.select(rollout)
  batch, _ = trainer.estimate(state, selection)
  for iteration, lag in ((0, 0.0), (1, 1.0)):  # as with train.online_k, which learns from one rollout twice
    assert state.iteration == iteration
    state, metrics = trainer.update(state, batch, selection)
    assert metrics['rollout/policy_lag_mean'] == metrics['rollout/policy_lag_max'] == lag
