"""What is found that is not finite, and in which words."""

from __future__ import annotations

import numpy as np

from ragen_jax.agent import finite
from ragen_jax.agent.finite import NotFinite


def test_numbers_under_the_mask_are_counted_and_their_rows_named():
  x, mask = np.zeros((8, 3), np.float32), np.ones((8, 3), bool)
  assert finite.find('values', 'values', x, mask) == {} and finite.find('values', 'values', None, mask) == {}
  x[2, 1], x[5], mask[5, 1:] = np.nan, np.inf, False  # two of them are off the mask
  assert finite.find('values', 'old values', x, mask) == {
    'not_finite/values': NotFinite(2, '2 of 22 old values (rows 2, 5)')
  }
  x[:6] = -np.inf
  (finding,) = finite.find('values', 'old values', x, mask).values()
  assert finding.text == '16 of 22 old values (rows 0, 1, 2, 3 and 2 more)'
  (finding,) = finite.find('scores', 'scores', np.full(4, np.nan), np.ones(4, bool)).values()
  assert finding.text == '4 of 4 scores (all 4 rows)'


def test_a_finding_stands_among_metrics_as_its_count():
  metrics = {'loss': 0.5, 'train/skipped_steps': NotFinite(2, 'loss in 2 of 3 optimiser steps')}
  assert finite.scalars(metrics) == {'loss': 0.5, 'train/skipped_steps': 2}
  assert finite.describe(finite.findings(metrics)) == 'loss in 2 of 3 optimiser steps'
  assert finite.describe([]) == ''
