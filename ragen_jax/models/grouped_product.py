"""Products of rows with one of several matrices each, where the rows of a matrix stand together."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

# The name of what `grouped_product` gives, for policies of `jax.checkpoint`.
GROUPED = 'grouped_product'

# Rows of a product on CPUs.
_TILE = 64


def grouped_product(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
  """The first `sizes[0]` rows of x times the first kernel, the next `sizes[1]` rows times the second, and so on.

  Rows behind all groups give anything; their gradient has to be 0. On CPUs, where `jax.lax.ragged_dot` multiplies all
  rows with all kernels, groups are multiplied in tiles.

  Args:
    x: [M, K].
    kernels: [E, K, N], of the same type.
    sizes: i32[E], with a sum of at most M.

  Returns:
    [M, N], of the same type.
  """
  return checkpoint_name(_product(x, kernels, sizes), GROUPED)


@jax.custom_vjp
def _product(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
  return jax.lax.platform_dependent(x, kernels, sizes, cpu=in_tiles, default=jax.lax.ragged_dot)


def _forward(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
  return _product(x, kernels, sizes), (x, kernels, sizes)


def _backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array, None]:
  of_x, of_kernels = jax.lax.platform_dependent(
    *saved, gradient, cpu=gradients_in_tiles, default=_gradients_of_ragged_dot
  )
  return of_x, of_kernels, None


_product.defvjp(_forward, _backward)


def _gradients_of_ragged_dot(x, kernels, sizes, gradient):
  return jax.vjp(lambda x, kernels: jax.lax.ragged_dot(x, kernels, sizes), x, kernels)[1](gradient)


def in_tiles(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
  """`grouped_product` as a loop over the tiles of all groups; rows behind all groups give 0."""

  def multiply(out, group, first, own):
    tile = _cut(x, first, len(own)) @ kernels[group]
    return _put(out, jnp.where(own[:, None], tile, _cut(out, first, len(own))), first)

  return _for_tiles(sizes, len(x), multiply, jnp.zeros((len(x), kernels.shape[2]), x.dtype))


def gradients_in_tiles(
  x: jax.Array, kernels: jax.Array, sizes: jax.Array, gradient: jax.Array
) -> tuple[jax.Array, jax.Array]:
  """The gradients of `in_tiles` for its first two arguments."""

  def add(of_kernels, group, first, own):
    tile = jnp.where(own[:, None], _cut(x, first, len(own)), 0)
    product = jnp.matmul(tile.T, _cut(gradient, first, len(own)), preferred_element_type=jnp.float32)
    return of_kernels.at[group].add(product)

  of_kernels = _for_tiles(sizes, len(x), add, jnp.zeros(kernels.shape, jnp.float32))
  return in_tiles(gradient, jnp.swapaxes(kernels, 1, 2), sizes), of_kernels.astype(kernels.dtype)


def _for_tiles(sizes: jax.Array, m: int, run: Callable[..., jax.Array], carry: jax.Array) -> jax.Array:
  """`carry = run(carry, group, first row, which rows are the tile's)` for each tile of each group of M rows."""
  rows = min(_TILE, m)
  tiles = -(-sizes // rows)
  ends, last_tiles = jnp.cumsum(sizes), jnp.cumsum(tiles)

  def one(i, carry):
    group = jnp.searchsorted(last_tiles, i, side='right')
    begin = ends[group] - sizes[group] + (i - last_tiles[group] + tiles[group]) * rows
    first = jnp.minimum(begin, m - rows)
    place = first + jnp.arange(rows)
    return run(carry, group, first, (place >= begin) & (place < ends[group]))

  return jax.lax.fori_loop(0, last_tiles[-1], one, carry)


def _cut(x: jax.Array, first: jax.Array, rows: int) -> jax.Array:
  return jax.lax.dynamic_slice_in_dim(x, first, rows)


def _put(x: jax.Array, tile: jax.Array, first: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(x, tile, first, axis=0)
