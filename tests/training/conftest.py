"""The built-in model and one rollout of it, which tests look at in many ways."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax import build
from tests.support import learning
from tests.support.configs import small_config


@pytest.fixture(scope='session')
def policy():
  return build.load_policy(small_config())


@pytest.fixture(scope='session')
def played(policy):
  """A rollout of eight groups, and the deviation of each group's scores."""
  trainer, state = learning.make_trainer(policy)
  rollout, _ = trainer.collect(state)
  std = np.asarray([rollout.scores[rollout.trajectory.group == g].std(ddof=1) for g in range(8)])
  assert len(np.unique(std)) > 2  # or there is nothing to choose between
  return rollout, std
