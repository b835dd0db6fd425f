"""Attention to the columns of a mask and attention row by row, against each other and a softmax in NumPy."""

from __future__ import annotations

import functools

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh

from ragen_jax.distributed.mesh import AXES
from ragen_jax.models import attention, trees
from ragen_jax.models.attention import attend, attend_causal_by_row, attend_to_heads, by_heads
from ragen_jax.models.attention_settings import EINSUM, AttentionSettings

_WAYS = pytest.mark.parametrize('settings', [EINSUM, *(AttentionSettings(name, None) for name in ('flash', 'blocks'))])


def _random(columns: int, seed: int) -> tuple[jax.Array, jax.Array, jax.Array]:
  """q [2, T, 4, 8], k and v [2, T, 2, 8]."""
  rng = np.random.default_rng(seed)
  return tuple(jnp.asarray(rng.normal(size=(2, columns, heads, 8)), jnp.float32) for heads in (4, 2, 2))


@_WAYS
def test_attention_is_a_softmax_over_the_columns_of_the_mask(settings):
  q, k, v = _random(9, seed=0)
  mask = np.random.default_rng(1).random((2, 9, 9)) < 0.6
  mask |= np.eye(9, dtype=bool)
  out = jax.device_get(jax.jit(functools.partial(attend, settings=settings))(q, k, v, mask))
  chex.assert_shape(out, (2, 9, 4, 8))
  q, k, v = jax.device_get((q, k, v))
  for b in range(2):
    for head in range(4):
      scores = (q[b, :, head] @ k[b, :, head // 2].T).astype(np.float64) * 8**-0.5
      weights = np.where(mask[b], np.exp(scores), 0)
      weights /= weights.sum(axis=-1, keepdims=True)
      np.testing.assert_allclose(out[b, :, head], weights @ v[b, :, head // 2], rtol=0, atol=1e-5)


@_WAYS
@pytest.mark.slow_cases('settings0', 'settings1')
def test_attention_in_blocks_of_queries_is_attention_and_has_its_gradient(monkeypatch, settings):
  """8 queries per block: four whole blocks and a part of one."""
  inputs = _random(37, seed=3)
  mask = np.tril(np.ones((37, 37), bool)) & (np.random.default_rng(4).random((2, 1, 37)) < 0.8)

  def both(inputs):
    def run(*x):
      out = attend(*x, mask, settings=settings)
      return jnp.sum(out**2), out

    return jax.jit(lambda *x: jax.grad(run, argnums=(0, 1, 2), has_aux=True)(*x))(*inputs)

  whole = both(inputs)
  monkeypatch.setattr(attention, '_MAX_SCORES', 0)
  monkeypatch.setattr(attention, '_BLOCK_SCORES', 0)
  monkeypatch.setattr(attention, '_MIN_BLOCK', 8)
  monkeypatch.setattr(attention, '_ROW_BLOCK', 8)
  chex.assert_trees_all_close(both(inputs), whole, atol=1e-5)


def test_attention_row_by_row_is_attention():
  # 150 columns: two whole blocks of queries and a part of one.
  q, k, v = _random(150, seed=7)
  mask = jnp.tril(jnp.ones((150, 150), bool))[None]
  np.testing.assert_allclose(jax.jit(attend_causal_by_row)(q, k, v), jax.jit(attend)(q, k, v, mask), rtol=0, atol=1e-5)


@pytest.mark.parametrize('columns', [600, pytest.param(640, marks=pytest.mark.slow)])
@pytest.mark.slow_cases('600')
def test_long_rows_of_trees_attend_to_what_they_see_and_have_its_gradient(columns):
  """Four and a half or five blocks of queries; of the second tree of a row, no query sees the first."""
  q, k, v = _random(columns, seed=5)
  seen = np.arange(columns, dtype=np.int32)[None].repeat(2, axis=0) + 1
  for row, first, end, until in ((0, 0, 100, 300), (0, 100, 200, 200), (0, 200, 300, 300), (0, 300, columns, columns),
                                 (1, 0, 20, columns), (1, 20, 330, 330), (1, 330, columns, columns)):  # fmt: skip
    seen[row, first:end] = until
  mask = np.asarray(trees.still_seen(seen)) & np.tril(np.ones((columns, columns), bool))
  cotangent = jax.random.normal(jax.random.key(9), q.shape)

  def both(attention):
    return jax.jit(lambda *x: (*jax.vjp(attention, *x)[1](cotangent), attention(*x)))(q, k, v)

  got = both(lambda *x: attend_causal_by_row(*x, jnp.asarray(seen)))
  chex.assert_trees_all_close(got, both(lambda *x: attend(*x, jnp.asarray(mask))), atol=1e-5)
  near = mask & np.asarray(trees.near(trees.depths(jnp.asarray(seen)), 90))
  got = both(lambda *x: attend_causal_by_row(*x, jnp.asarray(seen), window=90))
  chex.assert_trees_all_close(got, both(lambda *x: attend(*x, jnp.asarray(near))), atol=1e-5)
  causal = both(lambda *x: attend_causal_by_row(*x))
  whole = both(lambda *x: attend(*x, jnp.tril(jnp.ones((columns, columns), bool))[None]))
  chex.assert_trees_all_close(causal, whole, atol=1e-5)


@pytest.mark.parametrize(
  ('implementation', 'rows', 'devices', 'block'),
  [
    ('cudnn', 16, 1, 600),  # all at once
    ('cudnn', 60, 1, 128),  # a whole tile, which 208 queries are not
    ('cudnn', 128, 1, 128),  # 97 in one
    ('cudnn', 300, 1, 40),  # a part of one
    ('cudnn', 300, 8, 600),  # divided over devices
    ('cudnn', 4096, 1, 8),
    ('einsum', 128, 1, 97),  # processors have no tiles
    ('einsum', 4096, 1, 32),
  ],
)
def test_blocks_follow_the_scores_of_a_device(monkeypatch, implementation, rows, devices, block):
  """Prompts of 600 columns over a cache of 768."""
  blocks = []
  real = attention._attend
  monkeypatch.setattr(attention, '_attend', lambda q, *rest: blocks.append(q.shape[1]) or real(q, *rest))
  mesh = AbstractMesh((devices, 1, 1), AXES) if devices > 1 else None
  shapes = [jax.ShapeDtypeStruct((rows, t, n, 64), jnp.bfloat16) for t, n in ((600, 14), (768, 2), (768, 2))]
  mask = jax.ShapeDtypeStruct((rows, 600, 768), bool)
  out = jax.eval_shape(lambda *x: attend(*x, settings=AttentionSettings(implementation, mesh)), *shapes, mask)
  assert out.shape == (rows, 600, 14, 64) and set(blocks) == {block}


@_WAYS
@pytest.mark.parametrize('queries', [1, 5])
@pytest.mark.slow_cases('1-settings0', '1-settings1', '5-settings1')
def test_columns_in_two_arrays_are_columns_in_one(monkeypatch, settings, queries):
  """A cache of 9 columns, of which each row has some, and new columns: against one array of all of them."""
  rng = np.random.default_rng(4)
  arrays = [
    rng.normal(size=(3, *shape, 8)).astype(np.float32)
    for shape in ((queries, 4), (queries, 2), (queries, 2), (9, 2), (9, 2))
  ]
  seen = np.arange(9)[None, None] < np.asarray([4, 0, 9])[:, None, None]
  causal = np.tril(np.ones((queries, queries), bool))[None]
  # Each query with a mask of its own, also in blocks of queries.
  own = seen & (np.arange(9) > np.arange(queries)[:, None])

  @jax.jit
  def run(q, new_k, new_v, k, v):
    every = [jnp.concatenate(parts, axis=1) for parts in ((k, new_k), (v, new_v))]
    expected = []
    for mask in (seen, own):
      whole = [np.broadcast_to(x, (3, queries, x.shape[2])) for x in (mask, causal)]
      expected.append(attend(q, *every, np.concatenate(whole, axis=2)))
    found = [attend(q, new_k, new_v, causal, (k, v, seen), settings=settings)]
    for most in (2**28, 0):
      monkeypatch.setattr(attention, '_MAX_SCORES', most)
      found.append(attend(q, new_k, new_v, causal, (k, v, own), settings=settings))
    return found, expected

  (one, *several), (of_one, of_several) = run(*arrays)
  np.testing.assert_allclose(one, of_one, rtol=0, atol=1e-5)
  for got in several:
    np.testing.assert_allclose(got, of_several, rtol=0, atol=1e-5)


def test_a_cache_by_heads_is_attended_to_as_one_by_columns():
  """A cache of 9 columns, of which each row has some, and new columns, of which all but the last are there."""
  rng = np.random.default_rng(5)
  arrays = [rng.normal(size=(3, *shape, 8)).astype(np.float32) for shape in ((1, 4), (5, 2), (5, 2), (9, 2), (9, 2))]
  seen, mask = np.arange(9)[None, None] < np.asarray([4, 0, 9])[:, None, None], np.arange(5)[None, None] < 4

  @jax.jit
  def run(q, new_k, new_v, k, v):
    expected = attend(q, new_k, new_v, mask, (k, v, seen))
    return expected, attend_to_heads(q, new_k, new_v, mask, (*by_heads(k, v), seen))

  expected, got = run(*arrays)
  chex.assert_shape(got, (3, 1, 4, 8))
  np.testing.assert_allclose(got, expected, rtol=0, atol=1e-6)


@pytest.mark.parametrize('rows, columns, heads', [(32, 128, 4), (30, 256, 4), (7, 192, 4), (8, 40, 2), (16, 512, 14)])
def test_several_short_rows_attend_at_once(rows, columns, heads):
  q = jax.ShapeDtypeStruct((rows, columns, heads, 16), jnp.float32)
  at_once = attention._rows_at_once(q)
  held = heads * min(columns, attention._ROW_BLOCK) * columns
  assert rows % at_once == 0 and (at_once == 1 or at_once * held <= attention._ROW_SCORES)
  assert at_once == rows or 4 * at_once * held > attention._ROW_SCORES or rows % (2 * at_once)
