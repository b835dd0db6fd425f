"""The tokens that have a probability."""

from __future__ import annotations

import numpy as np

from ragen_jax.models.vocabulary import allowed


def test_padding_and_banned_ids_have_no_probability():
  assert allowed(6, 6, ()) is None and allowed(6, 0, ()) is None and allowed(6, 9, ()) is None
  assert np.flatnonzero(allowed(6, 4, ())).tolist() == [0, 1, 2, 3]
  assert np.flatnonzero(allowed(6, 4, (1, 3))).tolist() == [0, 2]
  assert np.flatnonzero(allowed(6, 0, (5,))).tolist() == np.flatnonzero(allowed(6, 6, (5,))).tolist() == [0, 1, 2, 3, 4]
