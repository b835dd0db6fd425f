"""What the layers of a decoder keep from call to call, and which of it new columns attend to."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.models import linear_attention
from ragen_jax.models.linear_attention import RecurrentState
from ragen_jax.models.qwen_config import LINEAR, QwenConfig


@struct.dataclass
class LayerCache:
  """Keys, with the rotary embedding applied, and values of one layer, [B, S, K, H] each."""

  k: jax.Array
  v: jax.Array


def empty_cache(
  cfg: QwenConfig, dtype: Any, batch: int, size: int, state_dtype: Any | None = None
) -> tuple[LayerCache | RecurrentState, ...]:
  """The caches of all layers for `batch` rows of `size` columns; `dtype` is that of keys and values.

  `state_dtype` is that of activations, in which convolutions keep their last columns; None if it is the same.
  """
  shape = (batch, size, cfg.num_kv_heads, cfg.head_dim)

  def of(kind: str) -> LayerCache | RecurrentState:
    if kind == LINEAR:
      return linear_attention.empty_state(cfg.linear, batch, dtype if state_dtype is None else state_dtype)
    return LayerCache(k=jnp.zeros(shape, dtype), v=jnp.zeros(shape, dtype))

  return tuple(map(of, cfg.kinds))


@struct.dataclass
class HeadsCache:
  """A `LayerCache` that many calls with one new column of each row read: keys [B, K, H, S], values [B, K, S, H].

  See `attend_to_heads`.
  """

  k: jax.Array
  v: jax.Array


# What a layer keeps from call to call, by its kind.
Cache = tuple[LayerCache | RecurrentState, ...]


@struct.dataclass
class CacheMask:
  """The columns that new columns attend to.

  Attributes:
    kept: bool[B, 1 or T, S], columns of the cache. None without a cache.
    new: bool[B or 1, T, C], columns of the window.
    fed: i32[B], how many of the new columns are the row's; linear attention leaves its state as it is in the others.
      None for models without it.
  """

  kept: jax.Array | None
  new: jax.Array
  fed: jax.Array | None = None

  def near(self, width: int, positions: jax.Array, column: jax.Array | int) -> CacheMask:
    """Those that are less than `width` columns before each new column, of `positions` i32[B, T].

    The columns of the cache are at positions 0, 1, ..., and those of the window go on behind the row: the first new one
    is at `column`.
    """
    first = positions[:, :, None] - width + 1  # [B, T, 1]
    window = positions[:, :1, None] - column + jnp.arange(self.new.shape[-1])  # [B, 1, C]
    kept = None if self.kept is None else self.kept & (jnp.arange(self.kept.shape[-1]) >= first)
    return self.replace(kept=kept, new=self.new & (window >= first))
