"""Token trees against a walk from each column to its root."""

from __future__ import annotations

import numpy as np
import pytest

from ragen_jax.models import trees
from tests.support.trees import random_tree


def _sees(parents: np.ndarray) -> np.ndarray:
  """bool[T, T]: whether a column sees another: itself and what stands before it in its sequence."""
  seen = np.eye(len(parents), dtype=bool)
  for column, parent in enumerate(parents):
    if parent >= 0:
      seen[column] |= seen[parent]
  return seen


def test_the_example_of_the_module():
  seen_until = np.asarray([[5, 5, 4, 4, 5, 7, 7, 8]], np.int32)
  assert np.asarray(trees.depths(seen_until)).tolist() == [[0, 1, 2, 3, 2, 0, 1, 0]]
  assert np.asarray(trees.begins(seen_until)).tolist() == [[True, *[False] * 4, True, False, True]]


@pytest.mark.parametrize('seed', range(8))
def test_columns_see_their_own_sequence_only(seed):
  rng = np.random.default_rng(seed)
  made = [random_tree(rng, 60) for _ in range(3)]
  seen_until = np.stack([own for _, own in made])
  sees = np.stack([_sees(parents) for parents, _ in made])
  found = np.asarray(trees.still_seen(seen_until)) & np.tril(np.ones((60, 60), bool))
  np.testing.assert_array_equal(found, sees)
  np.testing.assert_array_equal(trees.depths(seen_until), sees.sum(axis=2) - 1)
  np.testing.assert_array_equal(trees.begins(seen_until), [parents < 0 for parents, _ in made])
  part = np.asarray(trees.still_seen(seen_until[:, :40], 20, 40))
  np.testing.assert_array_equal(part & (np.arange(40) <= np.arange(20, 40)[:, None]), sees[:, 20:40, :40])
