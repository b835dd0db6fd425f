"""Made-up conversations to learn from."""

from __future__ import annotations

import numpy as np

from ragen_jax.sft.data import SftExamples
from ragen_jax.training.batches import sampled_columns


def made_up_examples(lengths=(100, 37, 60, 22, 51, 90, 12, 33)):
  """Made-up rows of several replies, with values."""
  rng = np.random.default_rng(3)
  n, width = len(lengths), max(lengths)
  mask = (rng.random((n, width)) < 0.3) & (np.arange(width) < np.asarray(lengths)[:, None])
  mask[:, 0] = False
  mask[:, 5] = True
  columns, present = sampled_columns(mask)
  return SftExamples(
    tokens=rng.integers(3, 40, size=(n, width)).astype(np.int32),
    length=np.asarray(lengths, np.int32),
    columns=columns,
    mask=present,
    values=np.where(present, rng.normal(size=present.shape), 0).astype(np.float32),
    value_scale=rng.uniform(0.5, 2, size=n).astype(np.float32),
    level=np.arange(n, dtype=np.int32),
  )
