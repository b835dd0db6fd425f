"""Rows of states on the host, and programs for any number of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from ragen_jax.utils.sizes import next_power

# Rows of the smallest compiled program.
_LEAST_ROWS = 16


def one(states: Any, i: int) -> Any:
  """One state of a batch."""
  return jax.tree.map(lambda leaf: np.asarray(leaf)[i], states)


def batched(function: Callable[[Any, Any], Any], env: Any, rows: Any) -> Any:
  """The results, as NumPy arrays, of a jitted function of an environment and N rows, N > 0.

  The function gets a power of two of rows, so that few programs are compiled.
  """
  count = len(jax.tree.leaves(rows)[0])
  padded = np.minimum(np.arange(max(_LEAST_ROWS, next_power(count))), count - 1)
  found = function(env, jax.tree.map(lambda leaf: np.asarray(leaf)[padded], rows))
  return jax.tree.map(lambda leaf: np.asarray(leaf)[:count], found)
