"""The sampler's memory between turns: a key/value cache with one write column for all rows.

Every write lands at the same column of every row, so it is one slice update and no scatter. Rows that stop early or get
a shorter observation leave holes; `valid` masks them, and `order` and `pick` close them between turns, drop rows that
are finished and give the cache the size that the next turn needs. `pick` runs layer by layer, so that never two whole
caches are held.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import struct

from ragen_jax.models.qwen import LayerCache, Qwen


@struct.dataclass
class SamplerState:
  """What stays on the device from turn to turn.

  Attributes:
    cache: one `LayerCache` a layer, [B, S, K, H] each.
    valid: bool[B, S], the column holds a token of this row.
    column: i32[], the next free column.
    position: i32[B], tokens so far: the rotary position of the next one.
    hidden: [B, D], the hidden state of each row's last token, from which the next is drawn.
  """

  cache: tuple[LayerCache, ...]
  valid: jax.Array
  column: jax.Array
  position: jax.Array
  hidden: jax.Array


def init_state(model: Qwen, rows: int, size: int) -> SamplerState:
  """An empty state for `rows` rows and `size` columns."""
  return SamplerState(
    cache=model.init_cache(rows, size),
    valid=jnp.zeros((rows, size), bool),
    column=jnp.zeros((), jnp.int32),
    position=jnp.zeros((rows,), jnp.int32),
    hidden=jnp.zeros((rows, model.cfg.hidden_size), model.dtype),
  )


def order(
  state: SamplerState, rows: jax.Array, live: jax.Array, size: int, mesh_axes: tuple[str, ...] = ()
) -> tuple[jax.Array, SamplerState]:
  """Picks rows, moves their tokens to the left and sets the number of columns; of the cache only says which go where.

      valid  1 1 0 1 0 1 0      ->  1 1 1 1 0
             1 1 1 0 0 0 0          1 1 1 0 0

  Args:
    state: the state before; its cache is not looked at.
    rows: i32[B'], the rows to keep, in their new order; a row may be named twice.
    live: bool[B'], rows that go on; the others become empty, so that they do not move the write column.
    size: columns after; at least the longest live row.
    mesh_axes: inside `jax.shard_map`, the axes that rows are divided over: a shard keeps its rows, and all shards share
      the write column.

  Returns:
    i32[B', size], the old column of each new one, for `pick`; and the state of B' rows and `size` columns without its
    cache, its write column behind the longest live row.
  """
  valid = state.valid[rows]  # [B', S]
  # Stable, so the tokens keep their order; columns past the last token are filled with whatever comes, unused.
  columns = jnp.argsort(~valid, axis=1, stable=True)[:, :size]
  if size > columns.shape[1]:
    columns = jnp.pad(columns, ((0, 0), (0, size - columns.shape[1])))
  position = jnp.where(live, state.position[rows], 0)
  column = jnp.max(position)
  return columns, SamplerState(
    cache=(),
    valid=jnp.arange(size)[None, :] < position[:, None],
    column=jax.lax.pmax(column, mesh_axes) if mesh_axes else column,
    position=position,
    hidden=state.hidden[rows],
  )


def pick(layer: LayerCache, rows: jax.Array, columns: jax.Array) -> LayerCache:
  """One layer's cache [B, S, K, H] with what `order` chose: [B', size, K, H]."""
  return LayerCache(k=layer.k[rows[:, None], columns], v=layer.v[rows[:, None], columns])
