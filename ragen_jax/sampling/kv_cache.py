"""The sampler's state: a key/value cache whose rows are dense, each with a length of its own.

The token columns of row b are 0 .. count[b]-1. A program that runs the model writes its new columns to a window, at the
same column in all rows, which is one slice update and no scatter. At its end `append_window` moves the window of each
row behind the row's last column. Rows may therefore be at different turns, and no row leaves a gap in another.
"""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
from flax import struct
from jax.sharding import PartitionSpec

from ragen_jax.distributed.sharding import ROW_AXES
from ragen_jax.models.qwen import LayerCache, Qwen


@struct.dataclass
class SamplerState:
  """What stays on the device from program to program.

  A row's number of tokens, its position in the random stream and its rotary position are equal for text. They are
  separate fields because an image takes many columns and advances the rotary position by its longer side only.

  Attributes:
    cache: one `LayerCache` per layer, [B, S, K, H] each.
    count: i32[B], columns of the row; the content of later columns has no meaning.
    draw_position: i32[B], position of the next token in the row's stream of random numbers.
    rotary: i32[B], rotary position of the next text column, the same on all axes of a multi-axis rotary embedding.
    hidden: [B, D], hidden state of the row's last token, from which the next token is drawn.
  """

  cache: tuple[LayerCache, ...]
  count: jax.Array
  draw_position: jax.Array
  rotary: jax.Array
  hidden: jax.Array


def init_state(model: Qwen, rows: int, size: int) -> SamplerState:
  """An empty state of `rows` rows and `size` columns."""
  return SamplerState(
    cache=model.init_cache(rows, size),
    count=jnp.zeros((rows,), jnp.int32),
    draw_position=jnp.zeros((rows,), jnp.int32),
    rotary=jnp.zeros((rows,), jnp.int32),
    hidden=jnp.zeros((rows, model.cfg.hidden_size), model.dtype),
  )


def state_specs(num_layers: int) -> SamplerState:
  """The layout of a state on the mesh: rows divided, and the heads of the cache."""
  rows, cache = PartitionSpec(ROW_AXES), PartitionSpec(ROW_AXES, None, 'tensor', None)
  return SamplerState(
    cache=tuple(LayerCache(k=cache, v=cache) for _ in range(num_layers)),
    count=rows,
    draw_position=rows,
    rotary=rows,
    hidden=rows,
  )


def append_window(layer: LayerCache, window: LayerCache, count: jax.Array, is_new: jax.Array) -> LayerCache:
  """Writes the columns of a window behind the last column of each row.

      cache   a b c . . .      window  x y      count  3      is_new  1      ->  a b c x y .
              d . . . . .              z .             1              1          d z . . . .
              e f g h i j              . .             6              0          e f g h i j

  Args:
    layer: [B, S, K, H].
    window: [B, C, K, H]; all C columns of a row are written, whether or not they are the row's.
    count: i32[B], columns of each row before; at most S - C for rows with new columns.
    is_new: bool[B], rows with new columns; the others stay as they are.

  Returns:
    [B, S, K, H].
  """

  def write(kept, new, at, is_new):
    # Both slices clamp `at` alike, so a row without new columns gets back what it holds.
    held = jax.lax.dynamic_slice_in_dim(kept, at, len(new), axis=0)
    return jax.lax.dynamic_update_slice_in_dim(kept, jnp.where(is_new, new, held), at, axis=0)

  write_rows = jax.vmap(write)
  return LayerCache(k=write_rows(layer.k, window.k, count, is_new), v=write_rows(layer.v, window.v, count, is_new))


def take_rows(state: SamplerState, rows: jax.Array) -> SamplerState:
  """The state of some rows i32[b]."""
  return jax.tree.map(lambda x: x[rows], state)


def put_rows(state: SamplerState, rows: jax.Array, part: SamplerState) -> SamplerState:
  """The state with that of some rows i32[b], each at most once, replaced."""
  return jax.tree.map(lambda x, own: x.at[rows].set(own, unique_indices=True), state, part)


def copy_rows(state: SamplerState, copies: jax.Array) -> SamplerState:
  """Replaces rows by the first columns of other rows, or drops the last columns of a row.

  Args:
    state: the state before.
    copies: i32[b, 3], for each copy the row that is read, the row that is replaced, which each at most one copy may
      be, and the most columns that it keeps. Dropped columns must be text. The hidden state is that of the row that is
      read, so it is right only if no column is dropped.

  Returns:
    The state after.
  """
  source, target, columns = copies[:, 0], copies[:, 1], copies[:, 2]
  part = take_rows(state, source)
  dropped = jnp.maximum(part.count - columns, 0)
  part = part.replace(
    count=part.count - dropped, draw_position=part.draw_position - dropped, rotary=part.rotary - dropped
  )
  return put_rows(state, target, part)


def resize(layer: LayerCache, rows: jax.Array, size: int) -> LayerCache:
  """Selects rows i32[b] of one layer, and adds or drops columns at the end: [B, S, K, H] -> [b, size, K, H]."""

  def one(x):
    chex.assert_rank(x, 4)
    x = x[rows, :size]
    return jnp.pad(x, ((0, 0), (0, size - x.shape[1]), (0, 0), (0, 0)))

  return LayerCache(k=one(layer.k), v=one(layer.v))
