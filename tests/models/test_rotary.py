"""Rotary embeddings of one axis and of several, and the form that TPUs compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from ragen_jax.models import rotary


def test_frequencies_of_one_axis_are_a_block_or_take_turns():
  assert rotary.frequency_axes((2, 3, 3), interleaved=False) == (0, 0, 1, 1, 1, 2, 2, 2)
  assert rotary.frequency_axes((4, 2, 2), interleaved=True) == (0, 1, 2, 0, 1, 2, 0, 0)
  published = rotary.frequency_axes((24, 20, 20), interleaved=True)
  assert [published.count(axis) for axis in range(3)] == [24, 20, 20]
  assert published[:60] == (0, 1, 2) * 20 and published[60:] == (0,) * 4


def test_equal_positions_on_all_axes_are_one_position_to_the_bit():
  x = jax.random.normal(jax.random.key(0), (2, 5, 3, 16))
  positions = jax.random.randint(jax.random.key(1), (2, 5), 0, 5000)
  axes = rotary.frequency_axes((2, 3, 3), interleaved=True)
  on_all = jnp.broadcast_to(positions[..., None], (2, 5, 3))
  np.testing.assert_array_equal(rotary.rotary(x, on_all, 1e4, axes), rotary.rotary(x, positions, 1e4))


def test_each_frequency_reads_the_position_of_its_axis():
  x = jax.random.normal(jax.random.key(0), (1, 4, 2, 16))
  positions = jnp.asarray([[[3, 9, 27], [4, 4, 4], [0, 1, 2], [7, 0, 50]]])
  axes = (0, 1, 2, 0, 1, 2, 0, 0)
  found = rotary.rotary(x, positions, 1e4, axes)
  for i, axis in enumerate(axes):
    alone = rotary.rotary(x, positions[..., axis], 1e4)
    np.testing.assert_array_equal(found[..., [i, 8 + i]], alone[..., [i, 8 + i]])


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_tpus_rotate_one_column_to_the_same_numbers(dtype):
  x = jax.random.normal(jax.random.key(0), (5, 1, 3, 16), dtype)
  angles = jnp.arange(5.0)[:, None, None, None] * jnp.linspace(0.1, 2, 8)
  cos, sin = jnp.cos(angles), jnp.sin(angles)
  expected = rotary.rotated(x, cos, sin)
  np.testing.assert_allclose(
    *(np.asarray(a, np.float32) for a in (rotary._rotated_by_product(x, cos, sin), expected)), rtol=1e-6, atol=1e-6
  )
  assert (expected[1:] != x[1:]).any() and (expected[0] == x[0]).all()
