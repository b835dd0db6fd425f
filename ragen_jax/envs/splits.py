"""The parts of all levels of a game: a hash of a level's content decides to which part it belongs."""

from __future__ import annotations

import jax
import jax.numpy as jnp

# Part of the split -> its tenths of all levels, as a range.
SPLITS = {'all': (0, 10), 'test': (0, 1), 'validation': (1, 2), 'train': (2, 10)}


def tenth(content: jax.Array) -> jax.Array:
  """i32[], the tenth of all levels, 0 to 9, that the level with these integers [n] belongs to. Traced."""
  content = content.astype(jnp.uint32)
  places = _mixed(jnp.arange(len(content), dtype=jnp.uint32))
  total = _mixed(content * jnp.uint32(0x9E3779B1) + places).sum(dtype=jnp.uint32)
  return (_mixed(total) % 10).astype(jnp.int32)


def _mixed(x: jax.Array) -> jax.Array:
  """A permutation of u32 that spreads every bit over all others."""
  x = (x ^ (x >> 16)) * jnp.uint32(0x7FEB352D)
  x = (x ^ (x >> 15)) * jnp.uint32(0x846CA68B)
  return x ^ (x >> 16)
