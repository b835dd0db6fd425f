"""The features of all images as one table, and how the columns of rows read it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from flax import struct

from ragen_jax.models.vision.config import VisionConfig
from ragen_jax.models.vision.tower import Features

# Logarithm of the fewest rows of a table on the device, to base 4.
_LEAST_ROWS = 3


@struct.dataclass
class ImageColumns:
  """What the columns of rows read of images.

  Attributes:
    index: i32[B, T], the row of the table that each column reads, see `positions.feature_columns`; -1 in text columns.
    positions: i32[B, T, 3], rotary positions, or in the sampler their distances from the row's next position.
    features: a `table`.
  """

  index: jax.Array
  positions: jax.Array
  features: Features


def table(parts: Sequence[Features]) -> Features:
  """The tokens of all images one after the other: embeddings [M, D] and, with DeepStack, [n, M, D].

  Each part is a result of `VisionTower` for I images of one size; its image i begins behind the tokens of the parts
  before and those of i images of its own.
  """
  width = parts[0].embeddings.shape[-1]
  embeddings = jnp.concatenate([part.embeddings.reshape(-1, width) for part in parts])
  if parts[0].deepstack is None:
    return Features(embeddings, None)
  stacked = [jnp.moveaxis(part.deepstack, 1, 0) for part in parts]  # [n, I, tokens, D]
  return Features(embeddings, jnp.concatenate([x.reshape(len(x), -1, width) for x in stacked], axis=1))


def table_rows(tokens: int) -> int:
  """Rows of a table on the device for so many tokens: a power of four, so that few programs are compiled."""
  return 4 ** max(-(-(max(tokens, 1) - 1).bit_length() // 2), _LEAST_ROWS)


def stacked(parts: Sequence[Features], rows: int, like: Features) -> Features:
  """A `table` of `rows` rows on the host, from the features of single images; the rest is zero.

  The parts are embeddings [tokens, D] and, with DeepStack, [n, tokens, D] of each image. The table has the type and the
  width of `like`, the features of any image.
  """

  def fill(axis, own, x):
    into = np.zeros((*x.shape[:axis], rows, x.shape[-1]), x.dtype)
    if own:
      used = np.concatenate(own, axis=axis)
      into[..., : used.shape[axis], :] = used
    return into

  deepstack = None
  if like.deepstack is not None:
    deepstack = fill(1, [part.deepstack for part in parts], like.deepstack)
  return Features(fill(0, [part.embeddings for part in parts], like.embeddings), deepstack)


def abstract_features(
  cfg: VisionConfig, rows: int, dtype: Any, sharding: Any, stacked_sharding: Any = None
) -> Features:
  """Shape and type of a `table` of `rows` rows; `stacked_sharding` is that of DeepStack's, by default the same."""
  shape = (rows, cfg.out_hidden_size)
  stacked = None
  if cfg.deepstack_blocks:
    stacked = jax.ShapeDtypeStruct((len(cfg.deepstack_blocks), *shape), dtype, sharding=stacked_sharding or sharding)
  return Features(jax.ShapeDtypeStruct(shape, dtype, sharding=sharding), stacked)


def insert(x: jax.Array, features: Features, index: jax.Array) -> tuple[jax.Array, jax.Array | None]:
  """Puts features of images into columns: what `ImageColumns` describes, into embedded tokens [B, T, D].

  The result is the embedded columns [B, T, D], and what `Qwen` adds after its first layers, [B, n, T, D], zero in text
  columns; None without DeepStack.
  """
  is_image, rows = (index >= 0)[..., None], jnp.maximum(index, 0)
  x = jnp.where(is_image, features.embeddings[rows].astype(x.dtype), x)
  if features.deepstack is None:
    return x, None
  added = jnp.where(is_image, features.deepstack[:, rows].astype(x.dtype), 0)  # [n, B, T, D]
  return x, jnp.moveaxis(added, 0, 1)
