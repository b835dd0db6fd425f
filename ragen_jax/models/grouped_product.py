"""Products of rows with one of several matrices each, where the rows of a matrix stand together.

`jax.lax.ragged_dot` is this product. Compilers write it out as the products of all rows with all matrices, with zeros
for the rows of others, on CPUs and GPUs always and on TPUs for the gradient of the matrices (jax 0.10.2): for 128
matrices this is 128 times the work. There we loop over tiles, each of a few rows of one matrix.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.ad_checkpoint import checkpoint_name

from ragen_jax.utils.sizes import next_power

# The name of what `grouped_product` gives, for policies of `jax.checkpoint`.
GROUPED = 'grouped_product'

# Least and most rows of a tile.
_TILE = (8, 256)

# On GPUs, a loop takes longer than to multiply so few rows with all matrices.
_FEW_ROWS = 1024


def grouped_product(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
  """The first `sizes[0]` rows of x times the first kernel, the next `sizes[1]` rows times the second, and so on.

  Rows behind all groups give anything; their gradient has to be 0.

  Args:
    x: [M, K].
    kernels: [E, K, N], of the same type; or int8, which has no gradient.
    sizes: i32[E], with a sum of at most M.

  Returns:
    [M, N], of the type of x.
  """
  return checkpoint_name(_product(x, kernels, sizes), GROUPED)


@jax.custom_vjp
def _product(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
  def ragged_dot(x, kernels, sizes):
    return jax.lax.ragged_dot(x, kernels.astype(x.dtype), sizes)

  others = ragged_dot if len(x) <= _FEW_ROWS else in_tiles
  return jax.lax.platform_dependent(x, kernels, sizes, cpu=in_tiles, tpu=ragged_dot, default=others)


def _forward(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> tuple[jax.Array, Any]:
  return _product(x, kernels, sizes), (x, kernels, sizes)


def _backward(saved: Any, gradient: jax.Array) -> tuple[jax.Array, jax.Array | None, None]:
  x, kernels, sizes = saved
  of_x = _with_transposed(gradient, kernels, sizes)
  if kernels.dtype == jnp.int8:
    return of_x, None, None
  return of_x, gradient_of_kernels(x, kernels, sizes, gradient), None


def _with_transposed(x: jax.Array, kernels: jax.Array, sizes: jax.Array) -> jax.Array:
  """`_product` with transposed kernels [E, N, K], of which tiles need no copy."""
  tiles = functools.partial(in_tiles, transposed=True)

  def ragged_dot(x, kernels, sizes):
    return jax.lax.ragged_dot(x, jnp.swapaxes(kernels.astype(x.dtype), 1, 2), sizes)

  others = ragged_dot if len(x) <= _FEW_ROWS else tiles
  return jax.lax.platform_dependent(x, kernels, sizes, cpu=tiles, tpu=ragged_dot, default=others)


_product.defvjp(_forward, _backward)


def in_tiles(x: jax.Array, kernels: jax.Array, sizes: jax.Array, *, transposed: bool = False) -> jax.Array:
  """`grouped_product` as a loop over the tiles of all groups; rows behind all groups give 0.

  With `transposed`, kernels are [E, N, K].
  """
  inputs = 1 if transposed else 0

  def multiply(out, group, first, own):
    kernel = kernels[group].astype(x.dtype)
    tile = jax.lax.dot_general(_cut(x, first, len(own)), kernel, (((1,), (inputs,)), ((), ())))
    return _put(out, jnp.where(own[:, None], tile, _cut(out, first, len(own))), first)

  return _for_tiles(sizes, len(x), multiply, jnp.zeros((len(x), kernels.shape[2 - inputs]), x.dtype))


def gradient_of_kernels(x: jax.Array, kernels: jax.Array, sizes: jax.Array, gradient: jax.Array) -> jax.Array:
  """The gradient of the kernels in `grouped_product`, of the same shape and type; sums are float32."""

  def add(of_kernels, group, first, own):
    tile = jnp.where(own[:, None], _cut(x, first, len(own)), 0)
    product = jnp.matmul(tile.T, _cut(gradient, first, len(own)), preferred_element_type=jnp.float32)
    return of_kernels.at[group].add(product)

  return _for_tiles(sizes, len(x), add, jnp.zeros(kernels.shape, jnp.float32)).astype(kernels.dtype)


def _for_tiles(sizes: jax.Array, m: int, run: Callable[..., jax.Array], carry: jax.Array) -> jax.Array:
  """`carry = run(carry, group, first row, which rows are the tile's)` for each tile of each group of M rows.

  A tile has about as many rows as a group. The loop has as many turns as there are tiles at most, some without rows of
  their own, so that its length does not depend on data.
  """
  least, most = _TILE
  rows = min(next_power(m // len(sizes), least), most, m)
  tiles = -(-sizes // rows)
  ends, last_tiles = jnp.cumsum(sizes), jnp.cumsum(tiles)

  def one(i, carry):
    group = jnp.minimum(jnp.searchsorted(last_tiles, i, side='right'), len(sizes) - 1)
    begin = ends[group] - sizes[group] + (i - last_tiles[group] + tiles[group]) * rows
    first = jnp.minimum(begin, m - rows)
    place = first + jnp.arange(rows)
    return run(carry, group, first, (place >= begin) & (place < ends[group]))

  return jax.lax.fori_loop(0, m // rows + min(m, len(sizes)), one, carry)


def _cut(x: jax.Array, first: jax.Array, rows: int) -> jax.Array:
  return jax.lax.dynamic_slice_in_dim(x, first, rows)


def _put(x: jax.Array, tile: jax.Array, first: jax.Array) -> jax.Array:
  return jax.lax.dynamic_update_slice_in_dim(x, tile, first, axis=0)
