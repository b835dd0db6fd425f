"""The sampler's state between turns: a key/value cache with one write column for all rows.

Every write goes to the same columns of all rows, so it is one slice update and no scatter. Rows that stop early or get
a shorter observation leave unused columns, which `valid` masks. Between turns, `compaction` and `gather_layer` move
each row's tokens to the left, drop finished rows and resize the cache for the next turn. `gather_layer` handles one
layer, so that the caller never holds two complete caches.
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
  """What stays on the device from turn to turn.

  A row's number of tokens, its position in the random stream and its rotary position are equal for text. They are
  separate fields because an image takes many columns and advances the rotary position by its longer side only.

  Attributes:
    cache: one `LayerCache` per layer, [B, S, K, H] each.
    valid: bool[B, S], whether the column holds a token of the row.
    column: i32[], the next column to write.
    count: i32[B], tokens (columns in use) of the row.
    draw_position: i32[B], position of the next token in the row's stream of random numbers.
    rotary: i32[B], rotary position of the next text column, the same on all axes of a multi-axis rotary embedding.
    hidden: [B, D], hidden state of the row's last token, from which the next token is drawn.
  """

  cache: tuple[LayerCache, ...]
  valid: jax.Array
  column: jax.Array
  count: jax.Array
  draw_position: jax.Array
  rotary: jax.Array
  hidden: jax.Array


def init_state(model: Qwen, rows: int, size: int) -> SamplerState:
  """An empty state of `rows` rows and `size` columns."""
  return SamplerState(
    cache=model.init_cache(rows, size),
    valid=jnp.zeros((rows, size), bool),
    column=jnp.zeros((), jnp.int32),
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
    valid=rows,
    column=PartitionSpec(),
    count=rows,
    draw_position=rows,
    rotary=rows,
    hidden=rows,
  )


def compaction(
  state: SamplerState, rows: jax.Array, live: jax.Array, size: int, mesh_axes: tuple[str, ...] = ()
) -> tuple[jax.Array, SamplerState]:
  """Selects rows and moves their tokens to the left. Computes the new state except for its cache.

      valid  1 1 0 1 0 1 0      ->  1 1 1 1 0
             1 1 1 0 0 0 0          1 1 1 0 0

  Args:
    state: the state before; its cache is not read.
    rows: i32[B'], the rows to keep, in their new order; a row may occur twice.
    live: bool[B'], False empties a row, so that it does not move the write column.
    size: number of columns after; at least the length of the longest live row.
    mesh_axes: inside `jax.shard_map`, the axes that rows are divided over. Each shard selects among its own rows, and
      all shards share the write column.

  Returns:
    i32[B', size], the old column of each new column, for `gather_layer`; and the state of B' rows and `size` columns
    with an empty tuple as cache and its write column after the longest live row.
  """
  chex.assert_equal_shape((rows, live))
  chex.assert_type((rows, live), (jnp.integer, jnp.bool_))
  valid = state.valid[rows]  # [B', S]
  # A stable sort keeps the order of the tokens. Columns after a row's last token get arbitrary, masked content.
  columns = jnp.argsort(~valid, axis=1, stable=True)[:, :size]
  if size > columns.shape[1]:
    columns = jnp.pad(columns, ((0, 0), (0, size - columns.shape[1])))
  count = jnp.where(live, state.count[rows], 0)
  column = jnp.max(count)
  return columns, SamplerState(
    cache=(),
    valid=jnp.arange(size)[None, :] < count[:, None],
    column=jax.lax.pmax(column, mesh_axes) if mesh_axes else column,
    count=count,
    draw_position=jnp.where(live, state.draw_position[rows], 0),
    rotary=jnp.where(live, state.rotary[rows], 0),
    hidden=state.hidden[rows],
  )


def gather_layer(layer: LayerCache, rows: jax.Array, columns: jax.Array) -> LayerCache:
  """Applies a `compaction` to the cache of one layer: [B, S, K, H] -> [B', size, K, H]."""
  return LayerCache(k=layer.k[rows[:, None], columns], v=layer.v[rows[:, None], columns])
