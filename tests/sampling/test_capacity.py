"""Rows that fit into memory: their bytes against a real state, and the number of them against the bound."""

from __future__ import annotations

import dataclasses
import types

import jax
import jax.numpy as jnp
import pytest

from ragen_jax.sampling import capacity
from ragen_jax.sampling.kv_cache import init_state
from ragen_jax.utils import host_memory
from tests.support.models import HYBRID, random_model


@pytest.mark.parametrize(('dtype', 'tensor'), [(jnp.float32, 1), (jnp.bfloat16, 2)])
def test_a_row_s_bytes_are_those_of_its_cache_one_more_layer_and_its_programs(dtype, tensor):
  model = random_model(40).policy
  layers = model.cfg.num_layers
  cache = jax.eval_shape(lambda: model.init_cache(1, 96, dtype))
  held = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(cache)) // tensor
  prompt = 3 * 96 * model.cfg.intermediate_size // tensor * jnp.dtype(dtype).itemsize
  sampling = held * 3 // 4 + 3 * 4 * 40 // tensor
  expected = held + held // layers + max(sampling, prompt)
  assert capacity.bytes_per_row(model.cfg, 96, dtype, tensor) == expected
  state = jax.eval_shape(lambda: init_state(model, 1, 96))
  assert sum(x.size for x in jax.tree.leaves(state.cache)) * jnp.dtype(dtype).itemsize == held * tensor


def test_a_row_s_bytes_count_states_of_one_size_beside_keys_and_values():
  model = random_model(40, **HYBRID).policy
  cache = jax.eval_shape(lambda: model.init_cache(1, 96, jnp.bfloat16))
  *states, full = (sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(layer)) for layer in cache)
  c = model.cfg.linear
  memory, conv = 4 * 8 * 6, 3 * 2 * (2 * 8 + 2 * 6)
  assert states == [4 * memory + 4 * conv] * 3  # activations of this model are in float32
  low = 4 * memory + 2 * conv
  assert capacity.state_bytes(model.cfg, 4) == states[0] and capacity.state_bytes(model.cfg, 2) == low
  found = [capacity.bytes_per_row(model.cfg, columns, jnp.bfloat16) for columns in (96, 4096)]
  prompts = [4 * n * c.chunk_values for n in (96, 512)]  # more than what sampling holds twice
  assert found[0] == 2 * full + 3 * low + prompts[0]
  assert found[1] - prompts[1] == (found[0] - prompts[0] - 3 * low) * 4096 // 96 + 3 * low
  # With two devices along `tensor`, each has half.
  assert capacity.bytes_per_row(model.cfg, 96, jnp.bfloat16, tensor=2) == found[0] // 2


def test_a_row_s_bytes_count_the_features_of_the_images_of_all_shards():
  cfg = random_model(40).policy.cfg
  seeing = dataclasses.replace(
    cfg, vision=types.SimpleNamespace(deepstack_blocks=(0, 1), out_hidden_size=cfg.hidden_size)
  )
  text = capacity.bytes_per_row(cfg, 96, jnp.bfloat16)
  # An embedding and two levels of DeepStack for each of 20 tokens of each row of four shards, and of its own row again.
  found = capacity.bytes_per_row(seeing, 96, jnp.bfloat16, image_tokens=20, shards=4)
  assert found == text + 5 * 20 * 3 * cfg.hidden_size * 2
  assert capacity.bytes_per_row(seeing, 96, jnp.bfloat16, image_tokens=20) == text + 20 * 3 * cfg.hidden_size * 2
  assert capacity.bytes_per_row(seeing, 96, jnp.bfloat16, shards=4) == text


class Device:
  """A device that reports its memory, or nothing."""

  platform = 'gpu'

  def __init__(self, stats):
    self.memory_stats = lambda: stats


def test_the_fullest_device_decides():
  free = capacity.free_bytes
  assert free([Device({'bytes_limit': 100, 'bytes_in_use': 10}), Device({'bytes_limit': 90, 'bytes_in_use': 40})]) == 50
  assert free([Device({'bytes_limit': 100, 'bytes_in_use': 10}), Device(None)]) is None


def test_cpu_devices_share_what_the_host_has_left(monkeypatch):
  monkeypatch.setattr(host_memory, 'available', lambda: 600)
  assert capacity.free_bytes(jax.devices('cpu')[:1]) == 600
  assert capacity.free_bytes(jax.devices('cpu')[:1] * 3) == 200


@pytest.mark.parametrize(
  ('rows', 'free', 'expected'),
  [(16, None, 16), (16, 2000, 16), (16, 1999, 8), (16, 500, 4), (16, 0, 1), (6, 600, 3), (6, 300, 2), (1, 0, 1)],
)
def test_rows_are_halved_until_they_fit_into_four_fifths_of_the_free_memory(rows, free, expected):
  assert capacity.rows_that_fit(rows, 100, free) == expected
