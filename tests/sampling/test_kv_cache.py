"""The cache: where the columns of a window go, and what becomes of rows that are taken, put back and resized."""

from __future__ import annotations

import chex
import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models.layer_cache import LayerCache
from ragen_jax.sampling import kv_cache
from ragen_jax.sampling.kv_cache import SamplerState, init_state, resize
from tests.support.models import random_model

COUNT = [4, 3, 5]  # columns of each row, of 7

# Each is one program in place of one for each operation.
append_window = jax.jit(kv_cache.append_window)
copy_rows = jax.jit(kv_cache.copy_rows)
put_rows = jax.jit(kv_cache.put_rows)
take_rows = jax.jit(kv_cache.take_rows)


@pytest.fixture
def state():
  """Three rows of seven columns; each entry of the cache is 10 * row + column."""
  content = (10 * np.arange(3)[:, None] + np.arange(7)).astype(np.float32)
  layer = jnp.broadcast_to(jnp.asarray(content)[:, :, None, None], (3, 7, 2, 4))
  return SamplerState(
    cache=(LayerCache(k=layer, v=-layer),),
    count=jnp.asarray(COUNT, jnp.int32),
    draw_position=jnp.asarray([40, 50, 60], jnp.int32),
    rotary=jnp.asarray([104, 103, 105], jnp.int32),
    hidden=jnp.arange(3.0)[:, None] * jnp.ones(8),
  )


def test_the_window_goes_behind_each_row_s_last_column(state):
  new = jnp.broadcast_to(jnp.asarray([[100.0, 101], [200, 201], [300, 301]])[:, :, None, None], (3, 2, 2, 4))
  after = append_window(state.cache[0], None, LayerCache(k=new, v=2 * new), state.count, jnp.ones(3, bool))
  expected = np.asarray(state.cache[0].k[:, :, 0, 0]).copy()
  for row, n in enumerate(COUNT):
    expected[row, n : n + 2] = [100 * (row + 1), 100 * (row + 1) + 1]
  np.testing.assert_array_equal(after.k, np.broadcast_to(expected[:, :, None, None], after.k.shape))
  np.testing.assert_array_equal(after.v[1, 3:5, 1, 3], [400, 402])
  np.testing.assert_array_equal(after.v[1, :3, 1, 3], [-10, -11, -12])


def test_a_row_without_new_columns_keeps_all_of_its_own(state):
  """Row 2 is full but for one column, so a window of 3 would not fit behind it."""
  full = state.replace(count=jnp.asarray([4, 3, 6], jnp.int32))
  new = jnp.full((3, 3, 2, 4), 99.0)
  after = append_window(full.cache[0], None, LayerCache(k=new, v=new), full.count, jnp.asarray([True, False, False]))
  np.testing.assert_array_equal(after.k[1:], full.cache[0].k[1:])
  np.testing.assert_array_equal(after.v[1:], full.cache[0].v[1:])
  assert (after.k[0, 4:] == 99).all()


@pytest.mark.parametrize('on_tpu', ['all', 'some'])
def test_tpus_write_windows_as_other_devices_do(on_tpu):
  rng = np.random.default_rng(0)
  kept, new = (jnp.asarray(rng.normal(size=(5, n, 2, 4)), jnp.bfloat16) for n in (9, 3))
  at, is_new = jnp.asarray([0, 6, 2, 9, 4]), jnp.asarray([True, True, False, False, True])
  if on_tpu == 'all':
    rows, way = None, kv_cache._by_columns
  else:
    rows = jnp.asarray([3, 1, 4])
    at, is_new, new = at[rows], is_new[rows], new[:3]
    way = kv_cache._by_slices
  got, expected = jax.jit(lambda *x: [f(*x) for f in (way, kv_cache._by_scatter)])(kept, new, at, is_new, rows)
  np.testing.assert_array_equal(got, expected)
  assert (got != kept).any()


def test_windows_of_some_rows_go_to_these_rows_only(state):
  """Rows 2 and 0, of which row 0 has no new columns."""
  rows, new = jnp.asarray([2, 0]), jnp.full((2, 2, 2, 4), 99.0)
  is_new = jnp.asarray([True, False])
  after = append_window(state.cache[0], rows, LayerCache(k=new, v=-new), state.count[rows], is_new)
  np.testing.assert_array_equal(after.k[:2], state.cache[0].k[:2])
  np.testing.assert_array_equal(after.v[2, :5], state.cache[0].v[2, :5])
  assert (after.k[2, 5:] == 99).all() and (after.v[2, 5:] == -99).all()


def test_rows_are_taken_in_the_given_order_and_put_back(state):
  rows = jnp.asarray([2, 0])
  part = take_rows(state, rows)
  assert part.count.tolist() == [5, 4] and part.rotary.tolist() == [105, 104]
  np.testing.assert_array_equal(part.cache[0].v, state.cache[0].v[rows])
  changed = jax.tree.map(lambda x: x + 1, part)
  after = put_rows(state, rows, changed)
  chex.assert_trees_all_equal(take_rows(after, rows), changed)
  chex.assert_trees_all_equal(take_rows(after, jnp.asarray([1])), take_rows(state, jnp.asarray([1])))


def without_rest(state):
  """The state with zeros in the columns that belong to no row."""
  kept = (jnp.arange(7) < state.count[:, None])[:, :, None, None]
  return state.replace(cache=jax.tree.map(lambda x: jnp.where(kept, x, 0), state.cache))


def test_rows_are_copied_whole_or_cut(state):
  """Row 2 to row 0 without its last two columns, row 1 to itself as it is."""
  after = copy_rows(state, jnp.asarray([[2, 0, 3], [1, 1, 7]]))
  chex.assert_trees_all_equal(take_rows(after, jnp.asarray([2])), take_rows(state, jnp.asarray([2])))
  chex.assert_trees_all_equal(take_rows(after, jnp.asarray([1])), take_rows(without_rest(state), jnp.asarray([1])))
  assert after.count.tolist() == [3, 3, 5]
  assert after.draw_position.tolist() == [58, 50, 60] and after.rotary.tolist() == [103, 103, 105]
  for got, want in ((after.cache[0].k, state.cache[0].k), (after.cache[0].v, state.cache[0].v)):
    np.testing.assert_array_equal(got[0, :3], want[2, :3])
  whole = copy_rows(state, jnp.asarray([[2, 0, 5]]))
  rows = jnp.asarray([0, 2, 2])
  chex.assert_trees_all_equal(take_rows(whole, rows[:1]), take_rows(without_rest(state), rows[1:2]))


def test_a_row_that_loses_images_has_the_rotary_position_that_is_given(state):
  after = copy_rows(state, jnp.asarray([[2, 0, 3, 91], [1, 1, 7, -1]]))
  assert after.count.tolist() == [3, 3, 5] and after.rotary.tolist() == [91, 103, 105]


def test_a_copy_takes_no_number_behind_the_columns_that_it_keeps(state):
  """Row 2 has numbers that are not finite from its column 3 on. Row 1 is emptied by a copy to itself."""
  spoilt = jnp.zeros((3, 7), bool).at[2, 3:].set(True).at[1].set(True)[:, :, None, None]
  cache = jax.tree.map(lambda x: jnp.where(spoilt, jnp.nan, x), state.cache)
  state = state.replace(cache=cache, hidden=state.hidden.at[1].set(jnp.inf))
  after = copy_rows(state, jnp.asarray([[2, 0, 3], [1, 1, 0]]))
  assert after.count.tolist() == [3, 0, 5]
  own = take_rows(after, jnp.asarray([0, 1]))
  assert all(jnp.isfinite(x).all() for x in jax.tree.leaves(own))
  np.testing.assert_array_equal(own.cache[0].k[0, :3, 0, 0], [20, 21, 22])
  assert not own.cache[0].v[0, 3:].any() and not own.cache[0].v[1].any() and not own.hidden[1].any()


def test_resizing_adds_columns_at_the_end(state):
  after = resize(state.cache[0], 12)
  assert after.k.shape == (3, 12, 2, 4)
  np.testing.assert_array_equal(after.k[:, :7], state.cache[0].k)
  np.testing.assert_array_equal(after.v[:, :7], state.cache[0].v)


def test_a_new_state_is_empty():
  model = random_model(20).policy
  state = init_state(model, 3, 16)
  chex.assert_shape((state.count, state.draw_position, state.rotary), (3,))
  chex.assert_type((state.count, state.draw_position, state.rotary), jnp.int32)
  assert not state.count.any() and len(state.cache) == model.cfg.num_layers
  assert all(x.shape[:2] == (3, 16) for x in jax.tree.leaves(state.cache))


@pytest.mark.slow
def test_rows_get_exactly_the_first_columns_of_others(state):
  (layer,) = state.cache
  found = kv_cache.share_columns(layer, jnp.asarray([2, 1, 2]), 3)
  expected = np.asarray([[20, 21, 22, 3, 4, 5, 6], [10, 11, 12, 13, 14, 15, 16], [20, 21, 22, 23, 24, 25, 26]])
  for x, sign in ((found.k, 1), (found.v, -1)):
    np.testing.assert_array_equal(x, np.broadcast_to(sign * expected[:, :, None, None], (3, 7, 2, 4)))
