"""Token trees: sequences that share their beginnings, in one row of columns.

A tree has a column for each token with a history of its own, in depth-first order: a token stands before all tokens
that follow it. One number for each column says everything, `seen_until`: the columns that see column j are
j .. seen_until[j] - 1. The sequences a b c d, a b e and f g are

    column       0  1  2  3  4  5  6  7
    token        a  b  c  d  e  f  g  .
    seen_until   5  5  4  4  5  7  7  8
    depth        0  1  2  3  2  0  1  0

Column 4 sees 0, 1 and itself. Sequences without a common beginning are trees without branches. A column of padding sees
itself only.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

# A number of columns that no row has; columns of this `seen_until` are seen by all later ones.
ALWAYS = 2**30


def still_seen(seen_until: jax.Array, first: int = 0, end: int | None = None) -> jax.Array:
  """Whether columns are seen by queries that are not before them: bool[..., queries, S], from `seen_until` i32[..., S].

  The queries are the columns from `first` to before `end`, default S.
  """
  queries = jnp.arange(first, seen_until.shape[-1] if end is None else end)
  return queries[:, None] < seen_until[..., None, :]


def depths(seen_until: jax.Array) -> jax.Array:
  """The number of columns that each column sees besides itself, which is its position in its sequence: i32[B, T]."""
  t = seen_until.shape[1]
  # Of the columns before i, those with seen_until <= i have ended.
  ending = jax.vmap(lambda ends: jnp.zeros((t + 1,), jnp.int32).at[jnp.minimum(ends, t)].add(1))(seen_until)
  return jnp.arange(t, dtype=jnp.int32) - jnp.cumsum(ending[:, :t], axis=1)


def places(seen_until: jax.Array | None, columns: int) -> jax.Array:
  """`depths`, or for None those of rows that are one sequence: i32[B or 1, T], T = `columns`."""
  return jnp.arange(columns)[None] if seen_until is None else depths(seen_until)


def near(places: jax.Array, window: int) -> jax.Array:
  """Whether columns are less than `window` places before queries: bool[..., queries, S], from i32[..., S]."""
  return places[..., :, None] - places[..., None, :] < window


def begins(seen_until: jax.Array) -> jax.Array:
  """Whether a column begins a tree, so that no column before it is seen by it or by later ones: bool[B, T]."""
  before = jax.lax.cummax(seen_until, axis=1)[:, :-1]
  before = jnp.pad(before, ((0, 0), (1, 0)))
  return before <= jnp.arange(seen_until.shape[1])
