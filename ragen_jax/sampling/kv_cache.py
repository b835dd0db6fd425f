"""The sampler's state: a cache whose rows are dense, each with a length of its own.

The token columns of row b are 0 .. count[b]-1. A program that runs the model writes its new columns to a window, at the
same column in all rows, which is one slice update and no scatter. At its end `append_window` writes the window of each
row behind the row's last column. Rows may therefore be at different turns, and no row leaves a gap in another.

A program may run on some of the rows: it reads their part of the cache, and nothing but their windows is written.

Layers with linear attention have a `RecurrentState` instead of keys and values: what all columns of the row have left.
A window has their state after the program. It is that of the row's own columns to the bit, whatever other columns the
program computed. Nothing can be taken back from it: a row goes on, gets all that another row holds, or begins again. A
row without columns has an empty state, see `Qwen.begin_window`.
"""

from __future__ import annotations

from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from ragen_jax.distributed.sharding import ROW_AXES
from ragen_jax.models.layer_cache import Cache, LayerCache, empty_cache
from ragen_jax.models.linear_attention import RecurrentState
from ragen_jax.models.qwen import Qwen
from ragen_jax.models.qwen_config import LINEAR, QwenConfig


@struct.dataclass
class SamplerState:
  """What stays on the device from program to program.

  A row's number of tokens, its position in the random stream and its rotary position are equal for text. They are
  separate fields because an image takes many columns and advances the rotary position by its longer side only.

  Attributes:
    cache: one `LayerCache` per layer, [B, S, K, H] each, or its `RecurrentState`.
    count: i32[B], columns of the row; the content of later columns has no meaning.
    draw_position: i32[B], position of the next token in the row's stream of random numbers.
    rotary: i32[B], rotary position of the next text column, the same on all axes of a multi-axis rotary embedding.
    hidden: [B, D], hidden state of the row's last token, from which the next token is drawn.
  """

  cache: Cache
  count: jax.Array
  draw_position: jax.Array
  rotary: jax.Array
  hidden: jax.Array


def init_state(model: Qwen, rows: int, size: int) -> SamplerState:
  """An empty state of `rows` rows and `size` columns."""
  return empty_state(model.cfg, model.dtype, rows, size)


def empty_state(cfg: QwenConfig, dtype: Any, rows: int, size: int) -> SamplerState:
  """`init_state` for a model with this config, whose activations have this type."""
  return SamplerState(
    cache=empty_cache(cfg, dtype, rows, size),
    count=jnp.zeros((rows,), jnp.int32),
    draw_position=jnp.zeros((rows,), jnp.int32),
    rotary=jnp.zeros((rows,), jnp.int32),
    hidden=jnp.zeros((rows, cfg.hidden_size), dtype),
  )


def with_columns(cache: Cache) -> list[LayerCache]:
  """The layers that have keys and values of columns; every model has one."""
  return [layer for layer in cache if isinstance(layer, LayerCache)]


def columns_of(cache: Cache) -> int:
  return with_columns(cache)[0].k.shape[1]


def state_specs(cfg: QwenConfig) -> SamplerState:
  """The layout of a state on the mesh: rows divided, and the heads of the cache."""
  rows, cache = PartitionSpec(ROW_AXES), PartitionSpec(ROW_AXES, None, 'tensor', None)
  full = LayerCache(k=cache, v=cache)
  linear = RecurrentState(conv=cache, memory=PartitionSpec(ROW_AXES, 'tensor', None, None, None))
  return SamplerState(
    cache=tuple(linear if kind == LINEAR else full for kind in cfg.kinds),
    count=rows,
    draw_position=rows,
    rotary=rows,
    hidden=rows,
  )


@struct.dataclass
class Added:
  """What a program adds to some rows.

  Attributes:
    after: their state after, without a cache.
    window: one `LayerCache` of C columns per layer, or the `RecurrentState` after.
    count: i32[b], columns of the window that are new.
  """

  after: SamplerState
  window: Cache
  count: jax.Array


def append(state: SamplerState, rows: jax.Array | None, added: Added) -> SamplerState:
  """The state after a program that ran on rows i32[b], each at most once; None if it ran on all."""
  at, is_new = added.after.count - added.count, added.count > 0

  def write(kept, new):
    if isinstance(kept, LayerCache):
      return append_window(kept, rows, new, at, is_new)
    return new if rows is None else put_rows(kept, rows, new)

  cache = tuple(write(kept, new) for kept, new in zip(state.cache, added.window, strict=True))
  after = added.after if rows is None else put_rows(state.replace(cache=()), rows, added.after)
  return after.replace(cache=cache)


def append_window(
  layer: LayerCache, rows: jax.Array | None, window: LayerCache, count: jax.Array, is_new: jax.Array
) -> LayerCache:
  """Writes the columns of a window behind the last column of some rows.

      cache   a b c . . .      rows  0   window  x y      count  3      is_new  1      ->  a b c x y .
              d . . . . .            1           z .             1              1          d z . . . .
              e f g h i j            2           . .             6              0          e f g h i j

  The layer is [B, S, K, H], and the window [b, C, K, H], of which all columns are written, whether or not they are the
  row's. `rows` i32[b] are each at most once, None for all. Only the rows of `is_new` bool[b] change. `count` i32[b] are
  the columns of each row before; S must have room for C more in the rows with new columns.
  """
  on_tpu = _by_columns if rows is None else _by_slices

  def write(kept, new):
    return jax.lax.platform_dependent(kept, new, count, is_new, rows, tpu=on_tpu, default=_by_scatter)

  return LayerCache(k=write(layer.k, window.k), v=write(layer.v, window.v))


def _by_scatter(kept: jax.Array, new: jax.Array, at: jax.Array, is_new: jax.Array, rows: jax.Array | None) -> jax.Array:
  b = len(kept)
  rows = jnp.arange(b) if rows is None else rows
  at = jnp.stack([jnp.where(is_new, rows, b), at], axis=1)  # a row that is not there is left out
  one_slice = jax.lax.ScatterDimensionNumbers(
    update_window_dims=(1, 2, 3), inserted_window_dims=(0,), scatter_dims_to_operand_dims=(0, 1)
  )
  return jax.lax.scatter(kept, at, new, one_slice, unique_indices=True, mode=jax.lax.GatherScatterMode.FILL_OR_DROP)


# TPUs scatter one slice after the other, in a loop that takes six times as long as what follows.


def _by_columns(kept: jax.Array, new: jax.Array, at: jax.Array, is_new: jax.Array, rows: None) -> jax.Array:
  """All rows: each column of the cache takes what a product with ones and zeros picks from the window, or stays."""
  del rows
  from_window = jnp.arange(kept.shape[1])[None, :, None] - at[:, None, None] == jnp.arange(new.shape[1])
  from_window &= is_new[:, None, None]  # [B, S, C]
  picked = jnp.einsum('BSC,BCKH->BSKH', from_window.astype(new.dtype), new, precision=jax.lax.Precision.HIGHEST)
  return jnp.where(from_window.any(axis=2)[:, :, None, None], picked, kept)


def _by_slices(kept: jax.Array, new: jax.Array, at: jax.Array, is_new: jax.Array, rows: jax.Array) -> jax.Array:
  """Some rows, one after the other; one without new columns gets back what it holds."""
  for i in range(len(rows)):
    place, own = (rows[i], at[i], 0, 0), new[i : i + 1]
    own = jnp.where(is_new[i], own, jax.lax.dynamic_slice(kept, place, own.shape))
    kept = jax.lax.dynamic_update_slice(kept, own, place)
  return kept


State = TypeVar('State', SamplerState, RecurrentState)


def take_rows(state: State, rows: jax.Array) -> State:
  """The state of some rows i32[b]."""
  return jax.tree.map(lambda x: x[rows], state)


def put_rows(state: State, rows: jax.Array, part: State) -> State:
  """The state with that of some rows i32[b], each at most once, replaced."""
  return jax.tree.map(lambda x, own: x.at[rows].set(own, unique_indices=True), state, part)


def copy_rows(state: SamplerState, copies: jax.Array) -> SamplerState:
  """Replaces rows by the first columns of other rows, or drops the last columns of a row.

  The columns behind those that a row keeps become 0. Attention gives columns without meaning the weight 0, which hides
  every number but NaN and infinity: a row that may hold such numbers is mended by a copy to itself without columns.

  Args:
    copies: i32[b, 3], for each copy the row that is read, the row that is replaced, which each at most one copy may
      be, and the most columns that it keeps. Dropped columns must be text, unless there is a fourth number: the rotary
      position after the columns that are kept, or -1 if the dropped ones are text. The hidden state is that of the row
      that is read, so it is right only if no column is dropped; it is 0 if no column is kept. A `RecurrentState` of
      which some columns are dropped is not known, so it becomes NaN.
  """
  source, target, columns = copies[:, 0], copies[:, 1], copies[:, 2]
  part = take_rows(state, source)
  dropped = jnp.maximum(part.count - columns, 0)
  count = part.count - dropped
  kept = jnp.arange(columns_of(part.cache)) < count[:, None]  # [b, S]
  unknown = (dropped > 0) & (count > 0)
  rotary = part.rotary - dropped
  if copies.shape[1] > 3:
    rotary = jnp.where(copies[:, 3] < 0, rotary, copies[:, 3])

  def cut(layer):
    if isinstance(layer, LayerCache):
      return jax.tree.map(lambda x: jnp.where(kept[:, :, None, None], x, 0), layer)

    def of(x):
      each = (-1, *(1,) * (x.ndim - 1))
      x = jnp.where(count.reshape(each) > 0, x, 0)
      return jnp.where(unknown.reshape(each), jnp.nan, x)

    return jax.tree.map(of, layer)

  part = SamplerState(
    cache=tuple(map(cut, part.cache)),
    count=count,
    draw_position=part.draw_position - dropped,
    rotary=rotary,
    hidden=jnp.where(count[:, None] > 0, part.hidden, 0),
  )
  return put_rows(state, target, part)


def share_columns(layer: LayerCache | RecurrentState, source: jax.Array, columns: int) -> LayerCache | RecurrentState:
  """Gives rows of one layer [B, S, K, H] the first `columns` columns of other rows; later columns stay.

  `source` i32[B] is for each row the row whose columns it gets; itself to stay as it is. A `RecurrentState` is given
  as it is, so it must be that of these columns.
  """
  if isinstance(layer, RecurrentState):
    return take_rows(layer, source)
  return jax.tree.map(lambda x: jax.lax.dynamic_update_slice_in_dim(x, x[:, :columns][source], 0, axis=1), layer)


def resize(layer: LayerCache, size: int) -> LayerCache:
  """Adds columns at the end of one layer: [B, S, K, H] -> [B, size, K, H]."""
  pad = [(0, 0), (0, size - layer.k.shape[1]), (0, 0), (0, 0)]
  return jax.tree.map(lambda x: jnp.pad(x, pad), layer)
