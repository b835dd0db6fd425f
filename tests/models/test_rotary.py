"""Rotary embeddings of one axis and of several, and the form that TPUs compute."""

from __future__ import annotations

import dataclasses
import math

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
  rng = np.random.default_rng(0)
  x, positions = rng.normal(size=(2, 5, 3, 16)).astype(np.float32), rng.integers(0, 5000, (2, 5))
  axes = rotary.frequency_axes((2, 3, 3), interleaved=True)
  on_all = np.broadcast_to(positions[..., None], (2, 5, 3))
  np.testing.assert_array_equal(rotary.rotary(x, on_all, 1e4, axes), rotary.rotary(x, positions, 1e4))


def test_each_frequency_reads_the_position_of_its_axis():
  x = np.random.default_rng(0).normal(size=(1, 4, 2, 16)).astype(np.float32)
  positions = np.asarray([[[3, 9, 27], [4, 4, 4], [0, 1, 2], [7, 0, 50]]])
  axes = (0, 1, 2, 0, 1, 2, 0, 0)
  found = np.asarray(rotary.rotary(x, positions, 1e4, axes))
  for i, axis in enumerate(axes):
    alone = np.asarray(rotary.rotary(x, positions[..., axis], 1e4))
    np.testing.assert_array_equal(found[..., [i, 8 + i]], alone[..., [i, 8 + i]])


def test_llama_3_stretches_long_wavelengths_only(transformers):
  import torch

  for factor, low, high, context, theta, half in (
    (8, 1, 4, 8192, 5e5, 64),
    (32, 1, 4, 8192, 5e5, 32),
    (3, 1, 9, 64, 1e3, 8),
  ):
    scaling = rotary.Llama3Scaling(factor, low, high, context)
    config = transformers.LlamaConfig(
      hidden_size=2 * half, num_attention_heads=1, max_position_embeddings=factor * context,
      rope_parameters={'rope_type': 'llama3', 'rope_theta': theta, **dataclasses.asdict(scaling)},
    )  # fmt: skip
    expected = transformers.modeling_rope_utils.ROPE_INIT_FUNCTIONS['llama3'](config, torch.device('cpu'))[0].numpy()
    found, plain = rotary.frequencies(half, theta, scaling), rotary.frequencies(half, theta)
    np.testing.assert_allclose(found, expected, rtol=1e-6)
    np.testing.assert_allclose(plain[-1] / found[-1], factor, rtol=1e-6)
    assert found[0] == plain[0] and ((found < plain) & (found > plain / factor * 1.01)).any()


def test_llama_3_s_scaling_is_that_of_its_reference_code():
  factor, low, high, context, theta, half = 8.0, 1.0, 4.0, 64, 1e4, 16
  expected = []
  for i in range(half):
    frequency = theta ** -(i / half)
    wavelength = 2 * math.pi / frequency
    if wavelength > context / low:
      expected.append(frequency / factor)
    elif wavelength < context / high:
      expected.append(frequency)
    else:
      smooth = (context / wavelength - low) / (high - low)
      expected.append((1 - smooth) * frequency / factor + smooth * frequency)
  found = rotary.frequencies(half, theta, rotary.Llama3Scaling(factor, low, high, context))
  np.testing.assert_allclose(found, expected, rtol=1e-6)


@pytest.mark.parametrize('dtype', [jnp.float32, jnp.bfloat16])
def test_tpus_rotate_one_column_to_the_same_numbers(dtype):
  x = np.random.default_rng(0).normal(size=(5, 1, 3, 16)).astype(dtype)
  angles = (np.arange(5.0)[:, None, None, None] * np.linspace(0.1, 2, 8)).astype(np.float32)
  run = jax.jit(lambda *x: [f(*x) for f in (rotary._rotated_by_product, rotary.rotated)])
  found, expected = (np.asarray(a, np.float32) for a in run(x, np.cos(angles), np.sin(angles)))
  np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
  x = x.astype(np.float32)
  assert (expected[1:] != x[1:]).any() and (expected[0] == x[0]).all()
