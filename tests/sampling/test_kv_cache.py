"""Compaction of the cache: which column goes where, and what becomes of each field of the state."""

from __future__ import annotations

import chex
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models.qwen import LayerCache
from ragen_jax.sampling.kv_cache import SamplerState, compaction, gather_layer, init_state
from tests.support.models import random_model

#   valid  1 1 0 1 0 1 0      row 0: 4 tokens
#          1 1 1 0 0 0 0      row 1: 3 tokens
#          1 0 0 1 1 1 1      row 2: 5 tokens
VALID = np.array([[1, 1, 0, 1, 0, 1, 0], [1, 1, 1, 0, 0, 0, 0], [1, 0, 0, 1, 1, 1, 1]], bool)


@pytest.fixture
def state():
  """Three rows of seven columns; each entry of the cache is 10 * row + column."""
  content = (10 * np.arange(3)[:, None] + np.arange(7)).astype(np.float32)
  layer = jnp.broadcast_to(jnp.asarray(content)[:, :, None, None], (3, 7, 2, 4))
  return SamplerState(
    cache=(LayerCache(k=layer, v=-layer),),
    valid=jnp.asarray(VALID),
    column=jnp.int32(7),
    count=jnp.asarray(VALID.sum(axis=1), jnp.int32),
    draw_position=jnp.asarray([40, 50, 60], jnp.int32),
    rotary=jnp.asarray([104, 103, 105], jnp.int32),
    hidden=jnp.arange(3.0)[:, None] * jnp.ones(8),
  )


def apply(state, rows, live, size):
  rows = jnp.asarray(rows)
  columns, after = compaction(state, rows, jnp.asarray(live), size)
  chex.assert_shape(columns, (len(rows), size))
  return after.replace(cache=tuple(gather_layer(layer, rows, columns) for layer in state.cache))


@pytest.mark.parametrize('size', [5, 7, 12])
def test_tokens_move_to_the_left_in_their_order_and_rows_follow_their_new_order(state, size):
  after = apply(state, [2, 0], [True, True], size)
  np.testing.assert_array_equal(after.valid, np.arange(size) < np.array([[5], [4]]))
  np.testing.assert_array_equal(after.cache[0].k[0, :5, 0, 0], [20, 23, 24, 25, 26])
  np.testing.assert_array_equal(after.cache[0].v[1, :4, 1, 3], [0, -1, -3, -5])
  assert int(after.column) == 5 and after.count.tolist() == [5, 4]
  assert after.draw_position.tolist() == [60, 40] and after.rotary.tolist() == [105, 104]
  np.testing.assert_array_equal(after.hidden[:, 0], [2, 0])


def test_a_row_that_is_not_live_is_empty_and_starts_again(state):
  after = apply(state, [0, 1, 2], [False, True, False], 4)
  assert int(after.column) == 3
  assert after.valid.sum(axis=1).tolist() == [0, 3, 0]
  assert after.count.tolist() == [0, 3, 0]
  assert after.draw_position.tolist() == [0, 50, 0] and after.rotary.tolist() == [0, 103, 0]


def test_a_row_may_be_copied(state):
  after = apply(state, [1, 1], [True, True], 3)
  np.testing.assert_array_equal(after.cache[0].k[0], after.cache[0].k[1])
  assert after.rotary.tolist() == [103, 103]


def test_a_new_state_is_empty():
  model = random_model(20).policy
  state = init_state(model, 3, 16)
  chex.assert_shape(state.valid, (3, 16))
  chex.assert_shape((state.count, state.draw_position, state.rotary), (3,))
  chex.assert_type((state.count, state.draw_position, state.rotary, state.column), jnp.int32)
  assert not state.valid.any() and int(state.column) == 0 and len(state.cache) == model.cfg.num_layers
