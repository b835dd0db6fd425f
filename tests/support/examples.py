"""Made-up conversations to learn from."""

from __future__ import annotations

import numpy as np

from ragen_jax.models.vision.processor import ProcessorConfig
from ragen_jax.sft.data import SftExamples
from ragen_jax.training.batches import sampled_columns
from ragen_jax.training.images import ImageInputs, RolloutImages


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
    images=None,
  )


# The placeholder of images in `examples_with_images`.
IMAGE = 41


def examples_with_images(count: int, seed: int = 0) -> SftExamples:
  """Made-up conversations of one to three turns, each with an image of one token; there are 24 different images."""
  rng = np.random.default_rng(seed)
  pixels = tuple(rng.integers(0, 256, (8, 8, 3)).astype(np.uint8) for _ in range(24))
  turns = rng.integers(1, 4, count)
  width = 12 * int(turns.max())
  tokens, index = np.zeros((count, width), np.int32), np.full((count, width), -1, np.int32)
  mask = np.zeros((count, width), bool)
  for row, n in enumerate(turns.tolist()):
    tokens[row, : 12 * n] = rng.integers(3, IMAGE, 12 * n)
    at = np.arange(n) * 12
    tokens[row, at + 4] = IMAGE
    index[row, at + 4] = rng.choice(len(pixels), n, replace=False)
    for column in range(8, 12):
      mask[row, at + column] = True
  columns, present = sampled_columns(mask)
  positions = np.broadcast_to(np.arange(width, dtype=np.int32)[:, None], (count, width, 3)).copy()
  processor = ProcessorConfig(8, 1, 1, 64, 65536, (0.5,) * 3, (0.5,) * 3)
  gallery = RolloutImages(pixels, np.arange(len(pixels) + 1), {}, processor, room=None)
  return SftExamples(
    tokens=tokens,
    length=(12 * turns).astype(np.int32),
    columns=columns,
    mask=present,
    values=np.where(present, rng.normal(size=present.shape), 0).astype(np.float32),
    value_scale=np.ones(count, np.float32),
    level=np.arange(count, dtype=np.int32),
    images=ImageInputs(index, positions, gallery=gallery),
  )
