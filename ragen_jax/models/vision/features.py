"""The features of all images as one table, and how the columns of rows read it."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import jax.numpy as jnp

from ragen_jax.models.vision.tower import Features


def table(parts: Sequence[Features]) -> Features:
  """The tokens of all images one after the other: embeddings [M, D] and, with DeepStack, [n, M, D].

  Args:
    parts: results of `VisionTower`, each for I images of one size; image i of a part begins behind the tokens of the
      parts before and those of i images of its own.
  """
  width = parts[0].embeddings.shape[-1]
  embeddings = jnp.concatenate([part.embeddings.reshape(-1, width) for part in parts])
  if parts[0].deepstack is None:
    return Features(embeddings, None)
  stacked = [jnp.moveaxis(part.deepstack, 1, 0) for part in parts]  # [n, I, tokens, D]
  return Features(embeddings, jnp.concatenate([x.reshape(len(x), -1, width) for x in stacked], axis=1))


def insert(x: jax.Array, features: Features, index: jax.Array) -> tuple[jax.Array, jax.Array | None]:
  """Puts features of images into columns.

  Args:
    x: [B, T, D], embedded tokens.
    features: a `table`.
    index: i32[B, T], the row of the table that each column reads, see `positions.feature_columns`; -1 in text columns.

  Returns:
    The embedded columns [B, T, D], and what `Qwen` adds after its first layers, [B, n, T, D], zero in text columns;
    None without DeepStack.
  """
  is_image, rows = (index >= 0)[..., None], jnp.maximum(index, 0)
  x = jnp.where(is_image, features.embeddings[rows].astype(x.dtype), x)
  if features.deepstack is None:
    return x, None
  added = jnp.where(is_image, features.deepstack[:, rows].astype(x.dtype), 0)  # [n, B, T, D]
  return x, jnp.moveaxis(added, 0, 1)
